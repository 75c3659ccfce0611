"""Swapping layers: the walk, the rules and the report, on layers of no framework."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from fastsparse_core import SlowPathWarning, log
from fastsparse_core.layer_swap import Report, Row, accelerate, restore


class Original(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.kept = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.message(self.lin(x))

    def message(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Slot:
    """Keeps what is assigned under another name, in a tuple."""

    def __get__(self, layer, owner=None):
        return self if layer is None else layer.__dict__["_slot"][0]

    def __set__(self, layer, value):
        layer.__dict__["_slot"] = (value,)

    def __delete__(self, layer):
        del layer.__dict__["_slot"]


class Mixin:
    pass


class DropIn(Mixin, Original):
    kept = Slot()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class Unsupported(nn.Module):
    pass


class OnlyConstructed(Original):
    """Defines only an annotation and its constructor."""

    note: int

    def __init__(self) -> None:
        super().__init__(3)


class Deeper(OnlyConstructed):
    pass


class OwnMessage(Original):
    def message(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class BelowOwnMessage(OwnMessage):
    pass


class OwnConstant(Original):
    width = 3


class OtherBase:
    pass


class OtherBases(Original, OtherBase):
    pass


class OfDropIn(DropIn):
    pass


def run(model: nn.Module, why_not=lambda layer, drop_in: "") -> tuple[Row, ...]:
    return accelerate(
        model,
        {Original: DropIn},
        is_graph_layer=lambda layer: isinstance(layer, Unsupported),
        why_not=why_not,
    ).rows


def undo(model: nn.Module) -> None:
    restore(model, {Original: DropIn})


def test_the_object_stays():
    layer = Original()
    layer.mine = [1]
    layer.register_buffer("buffer", torch.ones(1))
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    layer.eval()
    before = dict(vars(layer))
    parameters = list(layer.parameters())
    model = nn.Sequential(layer)
    assert run(model) == (Row(("0",), "Original", "DropIn", ""),)
    assert model[0] is layer
    assert type(layer) is DropIn
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert layer.kept is None
    layer(torch.ones(1, 2))
    assert calls == [1]
    undo(model)
    assert type(layer) is Original
    assert vars(layer) == before


def test_the_model_itself():
    layer = Original()
    assert run(layer) == (Row(("",), "Original", "DropIn", ""),)
    assert type(layer) is DropIn


def test_containers_and_shared_layers():
    shared = Original()
    model = nn.ModuleDict(
        {
            "list": nn.ModuleList([shared, Original()]),
            "deep": nn.Sequential(nn.Sequential(nn.Linear(2, 2), Original()), shared),
        }
    )
    assert [row.paths for row in run(model)] == [("list.0", "deep.1"), ("list.1",), ("deep.0.1",)]
    assert model["list"][0] is model["deep"][1] is shared
    assert not any(type(module) is Original for module in model.modules())
    undo(model)
    assert sum(type(module) is Original for module in model.modules()) == 3


def test_layers_within_layers():
    outer = Original()
    outer.inner = Original()
    assert [row.paths for row in run(outer)] == [("",), ("inner",)]
    assert type(outer) is type(outer.inner) is DropIn


def test_twice_changes_nothing():
    model = nn.Sequential(Original(), OfDropIn())
    run(model)
    state = [dict(vars(module)) for module in model.modules()]
    assert run(model) == (
        Row(("0",), "DropIn", "DropIn", "is a drop-in already"),
        Row(("1",), "OfDropIn", "OfDropIn", "is a drop-in already"),
    )
    assert [dict(vars(module)) for module in model.modules()] == state
    undo(model)
    undo(model)
    assert [type(module) for module in model] == [Original, OfDropIn]


def test_kept_in_another_form():
    """Attributes that the drop-in has a descriptor for move into it and back."""
    layer = Original()
    layer.kept = "something"
    run(layer)
    assert layer.kept == "something"
    assert "kept" not in vars(layer)
    layer.kept = "something else"
    undo(layer)
    assert vars(layer)["kept"] == "something else"
    assert "_slot" not in vars(layer)


def test_restore_what_was_built_with_drop_ins():
    layer = DropIn()
    undo(layer)
    assert type(layer) is Original
    assert layer.kept is None


@pytest.mark.parametrize("klass", [OnlyConstructed, Deeper])
def test_subclasses_that_define_nothing(klass):
    layer = klass()
    assert run(layer) == (Row(("",), klass.__name__, "DropIn", ""),)
    assert type(layer) is DropIn
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    for one in (layer, again):
        undo(one)
        assert type(one) is klass
        assert one.lin.weight.shape == (3, 3)
        assert one.__dict__.keys() == klass().__dict__.keys()


@pytest.mark.parametrize(
    ("klass", "reason"),
    [
        (OwnMessage, "a subclass of Original with its own message"),
        (BelowOwnMessage, "a subclass of Original with its own message"),
        (OwnConstant, "a subclass of Original with its own width"),
        (OtherBases, "a subclass of Original with other bases"),
    ],
)
def test_subclasses_that_stay(klass, reason):
    layer = klass()
    assert run(layer) == (Row(("",), klass.__name__, "", reason),)
    assert type(layer) is klass


def test_names_that_the_framework_generated_do_not_count():
    layer = OwnConstant()
    report = accelerate(
        layer,
        {Original: DropIn},
        is_graph_layer=lambda module: False,
        why_not=lambda *_: "",
        is_generated=lambda klass, name: name == "width",
    )
    assert report.swapped == report.rows
    assert type(layer) is DropIn


def test_parametrized_layers_stay():
    layer = Original()
    layer.scale = nn.Parameter(torch.ones(1))
    nn.utils.parametrizations.weight_norm(layer, "scale")
    (row,) = run(layer)
    assert "a subclass of Original with its own" in row.reason
    assert "scale" in row.reason


def test_parametrized_submodules_do_not_matter():
    layer = Original()
    nn.utils.parametrizations.spectral_norm(layer.lin)
    run(layer)
    assert type(layer) is DropIn


def test_replaced_forward_stays():
    layer = Original()
    layer.forward = lambda x: x
    assert run(layer) == (Row(("",), "Original", "", "forward is replaced on the instance"),)


def test_what_the_plugin_refuses_stays():
    model = nn.Sequential(Original(), Original())
    rows = run(model, why_not=lambda layer, drop_in: "no kernel" if layer is model[0] else "")
    assert [row.reason for row in rows] == ["no kernel", ""]
    assert [type(layer) for layer in model] == [Original, DropIn]


def test_layers_without_a_drop_in_are_listed():
    rows = run(nn.Sequential(Unsupported(), nn.ReLU()))
    assert rows == (Row(("0",), "Unsupported", "", "has no drop-in"),)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_layers_stay():
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(torch.jit.script(Plain()))
    report = accelerate(model, {Plain: DropIn}, is_graph_layer=lambda _: False, why_not=lambda *_: "")
    assert report.rows == (
        Row(("0",), "Plain", "", "torch.jit compiled it; call accelerate before torch.jit"),
    )


def test_compiled_models_are_compiled_again():
    calls = []

    class Telling(DropIn):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("drop-in")
            return super().forward(x)

    layer = Original()
    model = torch.compile(nn.Sequential(layer), backend="eager")
    x = torch.randn(3, 2)
    expected = model(x)
    report = accelerate(model, {Original: Telling}, is_graph_layer=lambda _: False, why_not=lambda *_: "")
    assert [row.paths for row in report.swapped] == [("_orig_mod.0",)]
    torch.testing.assert_close(model(x), expected)
    assert calls == ["drop-in"]


def test_optimiser_state_goes_on():
    model = nn.Sequential(Original())
    other = copy.deepcopy(model)
    x = torch.randn(4, 2)
    for one, swap in ((model, True), (other, False)):
        optimiser = torch.optim.Adam(one.parameters())
        for step in range(4):
            if swap and step == 2:
                run(one)
            optimiser.zero_grad()
            one(x).square().sum().backward()
            optimiser.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("function", [run, undo])
def test_not_a_module(function):
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got list"):
        function([Original()])


def test_report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "110")
    model = nn.ModuleDict({"<a___b>": Original(), "[bold]": OwnMessage(), "other": Unsupported()})
    model["again"] = model["<a___b>"]
    report = accelerate(
        model,
        {Original: DropIn},
        is_graph_layer=lambda layer: isinstance(layer, Unsupported),
        why_not=lambda layer, drop_in: "",
    )
    assert [row.original for row in report.swapped] == ["Original"]
    assert [row.original for row in report.left] == ["OwnMessage", "Unsupported"]
    text = " ".join(str(report).split())
    assert "<a___b>, again │ Original │ DropIn" in text
    assert "[bold] │ OwnMessage │ unchanged: a subclass of Original with its own message" in text
    assert "other │ Unsupported │ unchanged: has no drop-in" in text
    assert "1 of 3 graph layers swapped" in text
    assert repr(report) == "Report(1 of 3 graph layers swapped)"


def test_a_report_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = str(Report((Row(("conv",), "Original", "DropIn", ""),)))
    assert "DropIn" in text
    assert "\x1b" not in text


def test_a_model_without_graph_layers_is_warned_about(monkeypatch):
    def accelerated(model: nn.Module) -> Report:
        return accelerate(model, {Original: DropIn}, is_graph_layer=lambda _: False, why_not=lambda *_: "")

    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Original()]

    monkeypatch.setattr(log, "seen", set())
    with pytest.warns(
        SlowPathWarning, match="model: .*found none in Listing. Layers in a Python list"
    ) as caught:
        report = accelerated(Listing())
    assert caught[0].filename == __file__
    assert str(report) == "no graph layers found"
    assert len(accelerated(Original()).rows) == 1
