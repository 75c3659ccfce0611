"""Models of PyG's layers on the drop-ins: same numbers, same objects, and back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_terms import gradient_terms
from pyg_cases import close, cotangent, gradients, no_original, random_graph
from pyg_layer_cases import CASES, Case, each_case, first
from torch import Tensor, nn
from torch.nn.utils import prune
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing

import fastsparse_pyg
from fastsparse_pyg import accelerate, restore
from fastsparse_pyg.nn import DROP_INS

Call = Callable[[nn.Module], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


#: The first case of every layer, in float32 except for PNA.
LAYERS = {case.name: case for case in reversed(CASES) if case.dtypes and case.edges in ("", -1)}


def graph_and_features(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return random_graph(device=device), torch.randn(40, 6, device=device, requires_grad=True)


def results(model: nn.Module, call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients of every parameter and input."""
    out = call(model)
    found = gradients(out, [*model.parameters(), *inputs])
    return [out, *(torch.zeros(()) if each is None else each for each in found)]  # ARMA has unused weights


def check(model: nn.Module, call: Call, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients before, after, and restored; parameters and state_dict are the same objects."""
    expected = results(model, call, inputs)
    terms = gradient_terms(model, lambda: call(model), cotangent(expected[0].detach()))
    sums = [terms.get(name, 0.0) for name, _ in model.named_parameters()]
    floors = [max(1e-1, each) for each in (0.0, *sums, *(0.0 for _ in inputs))]
    parameters, names = list(model.parameters()), list(model.state_dict())
    classes = [type(module) for module in model.modules()]
    report = accelerate(model, show=False)
    assert report.swapped
    assert not report.left
    assert not any(type(module) in DROP_INS for module in model.modules())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    with monkeypatch.context() as patch:
        no_original(patch)
        for got, want, floor in zip(results(model, call, inputs), expected, floors, strict=True):
            close(got, want, floor=floor)
    restore(model)
    assert [type(module) for module in model.modules()] == classes
    for got, want, floor in zip(results(model, call, inputs), expected, floors, strict=True):
        close(got, want, floor=floor)


def test_the_table_is_complete() -> None:
    """Every exported drop-in has its original in the table."""
    exported = {getattr(fastsparse_pyg, name) for name in fastsparse_pyg.__all__ if name.startswith("Fast")}
    originals = {klass: klass.__bases__[-1] for klass in exported if issubclass(klass, MessagePassing)}
    replacing = {klass for klass, one in originals.items() if one.__module__.startswith("torch_geometric.")}
    assert set(DROP_INS.values()) == replacing
    assert all(drop_in.__name__ == f"Fast{original.__name__}" for original, drop_in in DROP_INS.items())
    assert all(original is getattr(pyg, original.__name__) for original in DROP_INS)


@each_case(LAYERS.values())
def test_every_layer(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, dtype = random_graph(device=device), case.dtypes[-1]
    inputs = [case.features(40, device, dtype), *case.rest(edges, dtype)]
    layer = case.make(case.original, device, dtype)
    check(layer, lambda one: case.run(one, inputs[0], edges, *inputs[1:]), inputs, monkeypatch)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: pyg.models.GCN(6, 8, 3, 3, jk="cat"),
    "GraphSAGE": lambda: pyg.models.GraphSAGE(6, 8, 2, 3, norm="batch_norm"),
    "GAT": lambda: pyg.models.GAT(6, 8, 2, 3, heads=2),
    "GAT_v2": lambda: pyg.models.GAT(6, 8, 2, 3, heads=2, v2=True),
    "GIN": lambda: pyg.models.GIN(6, 8, 2, 3, norm=None),
    "Sequential": lambda: pyg.Sequential(
        "x, edge_index",
        [(pyg.GCNConv(6, 8), "x, edge_index -> x"), nn.ReLU(), (pyg.SAGEConv(8, 3), "x, edge_index -> x")],
    ),
    "GPSConv": lambda: pyg.GPSConv(6, pyg.SAGEConv(6, 6), heads=2),
    "DirGNNConv": lambda: pyg.DirGNNConv(pyg.SAGEConv(6, 3)),
}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("GPSConv", "DirGNNConv")])
def test_models(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, x = graph_and_features(device)
    check(MODELS[name]().to(device), lambda model: model(x, edge_index), [x], monkeypatch)


@pytest.mark.parametrize("name", ["GPSConv", "DirGNNConv"])
def test_wrappers_of_a_layer(name: str) -> None:
    """The wrapper is PyG's message passing class or module; the layer within is swapped."""
    edge_index, x = graph_and_features()
    model = MODELS[name]()
    expected = model(x, edge_index)
    report = accelerate(model, show=False)
    assert {row.original for row in report.swapped} == {"SAGEConv"}
    close(model(x, edge_index), expected)


# ---------------------------------------------------------------- heterogeneous models

HETERO_EDGES = {
    ("user", "rates", "film"): random_graph(20, 12, 50),
    ("film", "rated_by", "user"): random_graph(12, 20, 50, seed=1),
    ("user", "knows", "user"): random_graph(20, 20, 50, seed=2),
}


class Homogeneous(nn.Module):
    """What `to_hetero` converts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.SAGEConv((-1, -1), 8), pyg.GATConv((-1, -1), 3, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Heterogeneous(nn.Module):
    """Layers of several kinds per edge type."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [
            lambda width: pyg.SAGEConv((-1, -1), width),
            lambda width: pyg.GATv2Conv((-1, -1), width, add_self_loops=False),
            lambda width: pyg.GCNConv(-1, width),
        ]
        self.layers = nn.ModuleList(
            pyg.HeteroConv({edge: kind(width) for edge, kind in zip(HETERO_EDGES, kinds, strict=True)})
            for width in (8, 3)
        )

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        for layer in self.layers:
            x = {name: part.tanh() for name, part in layer(x, edges).items()}
        return x


HETERO_MODELS = {
    "to_hetero": lambda: pyg.to_hetero(Homogeneous(), (["user", "film"], list(HETERO_EDGES))),
    "HeteroConv": Heterogeneous,
}


def hetero_input(device: str) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = {"user": torch.randn(20, 4, generator=generator), "film": torch.randn(12, 5, generator=generator)}
    return (
        {name: part.to(device).requires_grad_() for name, part in x.items()},
        {name: edges.to(device) for name, edges in HETERO_EDGES.items()},
    )


def flat(out: dict[str, Tensor]) -> Tensor:
    return torch.cat([out[name].flatten() for name in sorted(out)])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", HETERO_MODELS)
def test_heterogeneous_models(name: str, lazy: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, edges = hetero_input(device)
    model = HETERO_MODELS[name]().to(device)
    if lazy:  # swapped before its sizes are known
        assert len(accelerate(model, show=False).swapped) == 6
        with torch.no_grad():
            model(x, edges)
        restore(model)
    else:
        with torch.no_grad():
            model(x, edges)
    check(model, lambda one: flat(one(x, edges)), list(x.values()), monkeypatch)


@pytest.mark.parametrize("name", HETERO_MODELS)
def test_heterogeneous_training(name: str) -> None:
    """Five steps of Adam go the same way, and every edge type is converted once."""
    x, edges = hetero_input("cpu")
    reference = HETERO_MODELS[name]()
    with torch.no_grad():
        reference(x, edges)
    model = copy.deepcopy(reference)
    accelerate(model, show=False)
    losses = []
    for one in (reference, model):
        optimiser = torch.optim.Adam(one.parameters(), lr=0.01)
        losses.append([])
        for _ in range(5):
            optimiser.zero_grad()
            loss = flat(one(x, edges)).square().mean()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    info = fastsparse_pyg.cache_info()
    # GCNConv adds self loops to its edge type.
    assert info.misses == info.entries == 3
    assert info.stale == 0


# ---------------------------------------------------------------- caches of layers

EDGES, FEATURES = random_graph(), torch.randn(40, 6)


def filled_cache() -> nn.Module:
    layer = pyg.GCNConv(6, 4, cached=True)
    layer(FEATURES, EDGES)
    assert layer._cached_edge_index is not None
    return layer


def test_cached_propagation_is_taken_over_and_given_back() -> None:
    layer = filled_cache()
    expected = layer(FEATURES, EDGES)
    cached = layer._cached_edge_index
    accelerate(layer, show=False)
    assert layer._cached_edge_index is cached
    assert "_cached_edge_index" not in vars(layer)
    # The layer uses its cache, not the edges.
    close(layer(FEATURES, EDGES[:, :3]), expected)
    restore(layer)
    assert vars(layer)["_cached_edge_index"] is cached
    close(layer(FEATURES, EDGES[:, :3]), expected)
    assert not [name for name in vars(layer) if name.startswith("_held")]


def test_cache_filled_by_the_drop_in_is_pygs_afterwards() -> None:
    layer = pyg.GCNConv(6, 4, cached=True)
    accelerate(layer, show=False)
    expected = layer(FEATURES, EDGES)
    restore(layer)
    edges, weight = vars(layer)["_cached_edge_index"]
    assert edges.shape == (2, weight.numel())
    close(layer(FEATURES, EDGES[:, :3]), expected)


def test_hooks_training_mode_and_attributes() -> None:
    model = pyg.models.GCN(6, 8, 2, 3).eval()
    layer = model.convs[0]
    layer.mine = "kept"
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    accelerate(model, show=False)
    model(FEATURES.clone().requires_grad_(), EDGES).sum().backward()
    assert calls == ["before", "after", "backward"]
    assert model.convs[0] is layer
    assert layer.mine == "kept"
    assert not any(module.training for module in model.modules())


def test_message_hooks_run_pygs_code() -> None:
    layer = pyg.SAGEConv(6, 4)
    calls = []
    handle = layer.register_message_forward_hook(lambda *_: calls.append(1))
    accelerate(layer, show=False)
    layer(FEATURES, EDGES)
    assert calls == [1]
    handle.remove()
    layer(FEATURES, EDGES)
    assert calls == [1]


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "AGNNConv"])
@pytest.mark.parametrize("when", ["before", "after", "restored"])
def test_explain_mode(name: str, when: str) -> None:
    """Masks act whether explain mode is set before the swap, after it, or after the way back."""
    mask = torch.linspace(-3, 3, EDGES.size(1))
    loops = EDGES[0] != EDGES[1]

    def explained(layer: Any) -> Tensor:
        layer.explain = True
        layer._edge_mask, layer._loop_mask = mask, loops
        return layer(FEATURES, EDGES)

    layer: Any = first(getattr(pyg, name), widths=(6, 6)).make(getattr(pyg, name))
    expected = explained(copy.deepcopy(layer))
    plain = layer(FEATURES, EDGES)
    assert not torch.allclose(plain, expected)
    if when == "before":
        explained(layer)
    accelerate(layer, show=False)
    if when == "restored":
        restore(layer)
    close(explained(layer), expected)
    if when == "before":
        restore(layer)
        close(explained(layer), expected)
    layer.explain = False
    close(layer(FEATURES, EDGES), plain)


@each_case(LAYERS.values())
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(case: Case, how: str) -> None:
    layer = case.make(case.original)
    inputs = case.features(40), EDGES, *case.rest(EDGES)
    originals = [type(module) for module in layer.modules()]
    expected = case.run(layer, *inputs)
    accelerate(layer, show=False)
    if how == "deepcopy":
        again = copy.deepcopy(layer)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    classes = [type(module) for module in again.modules()]
    assert case.fast in classes
    assert classes == [type(module) for module in layer.modules()]
    close(case.run(again, *inputs), expected, 2e-5)
    restore(again)
    assert [type(module) for module in again.modules()] == originals
    close(case.run(copy.deepcopy(again), *inputs), expected)


def test_checkpoints_both_ways() -> None:
    reference, model = pyg.models.GAT(6, 8, 2, 3), pyg.models.GAT(6, 8, 2, 3)
    accelerate(model, show=False)
    model.load_state_dict(reference.state_dict())
    close(model(FEATURES, EDGES), reference(FEATURES, EDGES))
    reference.load_state_dict(model.state_dict())


def test_compiled_model() -> None:
    model = pyg.models.GraphSAGE(6, 8, 2, 3)
    compiled = torch.compile(model, backend="eager")
    expected = compiled(FEATURES, EDGES)
    assert len(accelerate(compiled, show=False).swapped) == 2
    close(compiled(FEATURES, EDGES), expected)
    close(compiled(FEATURES, fastsparse_pyg.prepare(EDGES, 40)), expected)


def test_pruned_and_normalised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parametrised linear layer inside is called as a module."""
    edge_index, x = graph_and_features()
    layer = pyg.SAGEConv(6, 4)
    nn.utils.parametrizations.weight_norm(layer.lin_l)
    prune.l1_unstructured(layer.lin_r, "weight", amount=0.5)
    check(layer, lambda one: one(x, edge_index), [x], monkeypatch)


# ---------------------------------------------------------------- layers that are not replaced, and why


class OnlyConstructed(pyg.GCNConv):
    def __init__(self) -> None:
        super().__init__(6, 4)


class OwnPropagate(pyg.SAGEConv):
    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return kwargs["x"][0]


class OfDropIn(fastsparse_pyg.FastGCNConv):
    pass


def replaced_forward() -> nn.Module:
    layer = pyg.GINConv(nn.Identity())
    layer.forward = lambda x, edge_index: x
    return layer


def replaced_propagate() -> nn.Module:
    layer = pyg.GENConv(6, 4)
    layer.propagate = lambda edge_index, x, edge_attr, size: x[0]
    return layer


STAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own propagate": (lambda: OwnPropagate(6, 4), "a layer with its own propagate"),
    "replaced forward": (replaced_forward, "forward is replaced on the instance"),
    "replaced propagate": (replaced_propagate, "propagate is replaced on the instance"),
    "drop-in": (lambda: fastsparse_pyg.FastGCNConv(6, 4), "is a drop-in already"),
    "of a drop-in": (lambda: OfDropIn(6, 4), "is a drop-in already"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str) -> None:
    make, reason = STAYS[name]
    layer = make()
    before = type(layer)
    (row,) = accelerate(nn.Sequential(layer), show=False).rows
    assert (row.paths, row.reason) == (("0",), reason)
    assert type(layer) is before


def test_the_report_says_that_a_drop_in_runs_the_code_of_pyg() -> None:
    class OwnMessage(fastsparse_pyg.FastGCNConv):
        def message(self, x_j, edge_weight):
            return 2 * x_j

    (row,) = accelerate(nn.Sequential(OwnMessage(6, 4)), show=False).rows
    assert (row.reason, row.kernel) == ("is a drop-in already", "PyG: message() is overridden")


def test_aggregations_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index, x = graph_and_features()
    for aggr in ("sum", "add", "mean", "max", "min"):
        check(pyg.SAGEConv(6, 4, aggr=aggr), lambda one: one(x, edge_index), [x], monkeypatch)


def test_subclass_with_a_constructor_only() -> None:
    layer = OnlyConstructed()
    assert "propagate" in vars(OnlyConstructed), "PyG puts generated methods into the class"
    expected = layer(FEATURES, EDGES)
    assert [row.original for row in accelerate(layer, show=False).swapped] == ["OnlyConstructed"]
    close(layer(FEATURES, EDGES), expected)
    restore(layer)
    assert type(layer) is OnlyConstructed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_layer() -> None:
    layer = torch.jit.script(pyg.SAGEConv(6, 4))
    (row,) = accelerate(nn.Sequential(layer), show=False).rows
    assert (row.original, row.reason) == (
        "SAGEConv",
        "torch.jit compiled it; call accelerate before torch.jit",
    )
    assert layer(FEATURES, EDGES).shape == (40, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_restored_models_can_be_scripted() -> None:
    layer = pyg.SAGEConv(6, 4)
    accelerate(layer, show=False)
    expected = layer(FEATURES, EDGES)
    restore(layer)
    close(torch.jit.script(layer)(FEATURES, EDGES), expected)


def test_built_with_drop_ins() -> None:
    layer = fastsparse_pyg.FastTransformerConv(6, 4, heads=2)
    expected = layer(FEATURES, EDGES)
    restore(layer)
    assert type(layer) is pyg.TransformerConv
    assert isinstance(layer, MessagePassing)
    close(layer(FEATURES, EDGES), expected)


def test_the_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleList([pyg.GCNConv(6, 4), pyg.GENConv(6, 4)])
    report = accelerate(model)
    assert capsys.readouterr().out == f"{report}\n"
    assert "FastGCNConv" in str(report)
    assert "AcceleratedGENConv" in str(report)
    assert len(accelerate(model, show=False).swapped) == 0
    assert capsys.readouterr().out == ""


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got type"):
        accelerate(pyg.GCNConv)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got dict"):
        restore({})  # type: ignore[arg-type]


def _replica(module: nn.Module) -> nn.Module:
    """As DataParallel makes them: parameters are plain attributes."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _replica(child)
    for name, parameter in module._parameters.items():
        if parameter is None:
            made._parameters[name] = None
        else:
            setattr(made, name, parameter * 1.0)
    return made


def test_replicas_of_data_parallel() -> None:
    for original, bias in ((pyg.SAGEConv, True), (pyg.GCNConv, False), (pyg.GCNConv, True)):
        layer = DROP_INS[original](6, 6, bias=bias)
        expected = layer(FEATURES, EDGES)
        for _ in range(2):
            close(_replica(layer)(FEATURES, EDGES), expected)


def test_layers_without_a_drop_in_say_what_serves_them():
    with pytest.raises(AttributeError, match=r"EdgeConv has no drop-in; accelerate\(model\) and enable\(\)"):
        _ = fastsparse_pyg.FastEdgeConv
    with pytest.raises(AttributeError, match="no attribute 'FastNothing'$"):
        _ = fastsparse_pyg.FastNothing
    assert not hasattr(fastsparse_pyg, "EdgeConv")
