"""Linear maps of one tensor in a layer's own `forward`: one product for few edges on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing

from fastsparse_pyg import accelerate
from fastsparse_pyg.nn import any_layer, joint_maps

NODES, EDGES, WIDTH = 40, 200, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Gated(MessagePassing):
    """Three linear maps of the same features."""

    def __init__(self, kind: Any = nn.Linear, bias: bool = True) -> None:
        super().__init__(aggr="sum")
        self.a, self.b = kind(WIDTH, WIDTH, bias=bias), kind(WIDTH, WIDTH, bias=bias)
        self.v, self.of_edge = kind(WIDTH, WIDTH, bias=bias), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        out: Tensor = self.propagate(edge_index, a=self.a(x), b=self.b(x), v=self.v(x), edge_attr=edge_attr)
        return out

    def message(self, a_i: Tensor, b_j: Tensor, v_j: Tensor, edge_attr: Tensor | None) -> Tensor:
        gates = a_i + b_j
        return torch.sigmoid(gates if edge_attr is None else gates + self.of_edge(edge_attr)) * v_j


class WithSize(Gated):
    """Passes a constant on."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        b = self.b(x)
        return self.propagate(edge_index, size=None, v=self.v(x), edge_attr=edge_attr, b=b, a=self.a(x))


class Branching(Gated):
    """Takes another way without edge features."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        if edge_attr is None:
            return self.a(x)
        return self.propagate(edge_index, a=self.a(x), b=self.b(x), v=self.v(x), edge_attr=edge_attr)


class AfterUse(Gated):
    """Adds the features to the result."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return x + self.propagate(edge_index, a=self.a(x), b=self.b(x), v=self.v(x), edge_attr=edge_attr)


class OfTwoTensors(Gated):
    """Maps the result of a map."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        a = self.a(x)
        return self.propagate(edge_index, a=a, b=self.b(a), v=self.v(x), edge_attr=edge_attr)


class Counting(Gated):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.propagate(edge_index, a=self.a(x), b=self.b(x), v=self.v(x), edge_attr=edge_attr)


class Comparing(Gated):
    """Passes a number on that depends on the call."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        has_edges = edge_attr is not None
        return self.propagate(
            edge_index, a=self.a(x), b=self.b(x), v=self.v(x), edge_attr=edge_attr, on=has_edges
        )

    def message(self, a_i: Tensor, b_j: Tensor, v_j: Tensor, edge_attr: Tensor | None, on: bool) -> Tensor:
        return torch.sigmoid(a_i + b_j + on) * v_j


class InPlace(Gated):
    """Writes into an argument that is not gathered."""

    def message(self, a_i: Tensor, b_j: Tensor, v: Tensor, edge_attr: Tensor, index: Tensor) -> Tensor:
        return v.mul_(2.0)[index] + a_i + b_j + self.of_edge(edge_attr)


class Scaling(Gated):
    """Reads one of its maps through a function."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return (lambda x: 2 * found(x)) if name == "b" else found


def writing(layer: Any) -> None:
    def double(module: Any, inputs: Any) -> None:
        inputs[-1]["v"].mul_(2.0)

    layer.register_propagate_forward_pre_hook(double)


def hooked(layer: Any) -> None:
    layer.b.register_forward_hook(lambda module, args, out: 2 * out)


def replaced(layer: Any) -> None:
    layer.b = nn.Sequential(copy.deepcopy(layer.a), nn.ReLU())


def without_bias(layer: Any) -> None:
    layer.b.bias = None


def narrow(layer: Any) -> None:
    for each in (layer.a, layer.b, layer.v, layer.of_edge):
        each.weight, each.bias = nn.Parameter(each.weight[:5]), nn.Parameter(each.bias[:5])


def parametrised(layer: Any) -> None:
    parametrize.register_parametrization(layer.b, "bias", nn.Tanh())


def frozen(layer: Any) -> None:
    layer.b.requires_grad_(False)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the maps were joined, for every call of a layer whose body joins them."""
    joined: list[bool] = []
    run = joint_maps.JointMaps.run

    def running(self: Any, *args: Any) -> Any:
        out = run(self, *args)
        joined.append(out is not None)
        return out

    monkeypatch.setattr(joint_maps.JointMaps, "run", running)
    return joined


def results(layer: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    x, edge_index, *rest = inputs
    x = x.detach().clone().requires_grad_()
    out = layer(x, edge_index, *rest)
    wanted = [x, *[each for each in layer.parameters() if each.requires_grad]]
    return [out, *torch.autograd.grad(out, wanted, out.detach().sin(), allow_unused=True)]


def check(layer: nn.Module, fast: nn.Module, inputs: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    for ours, theirs in zip(results(fast, inputs), results(layer, inputs), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def drawn(device: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    edges = torch.randint(NODES, (2, EDGES), device=device)
    return (
        torch.randn(NODES, WIDTH, dtype=dtype, device=device),
        edges,
        torch.randn(EDGES, 3).to(device, dtype),
    )


@pytest.fixture(autouse=True)
def few_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "is_joined"),
    [
        (Gated, True),
        (lambda: Gated(bias=False), True),
        (lambda: Gated(pyg.Linear), True),
        (WithSize, True),
        (Branching, False),
        (AfterUse, False),
        (OfTwoTensors, False),
        (Counting, False),
        (InPlace, False),
        (Comparing, False),
        (Scaling, False),
    ],
)
def test_which_bodies_are_joined(
    make: Callable[[], nn.Module], is_joined: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = noted(monkeypatch)
    layer = make().double().to(device)
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    inputs = drawn(device)
    for _ in range(5):  # the edges are new at first
        check(layer, fast, inputs)
    if type(layer) in (Gated, Branching, Comparing):
        check(layer, fast, inputs[:2])
    assert all(joined)
    assert bool(joined) == is_joined
    assert getattr(fast, "calls", 0) == getattr(layer, "calls", 0)


@pytest.mark.parametrize(
    "change",
    [hooked, writing, replaced, without_bias, narrow, parametrised, frozen],
    ids=lambda each: each.__name__,
)
def test_maps_that_change(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    joined = noted(monkeypatch)
    layer = Gated().double()
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    inputs = drawn("cpu")
    check(layer, fast, inputs)
    for each in (layer, fast):
        torch.manual_seed(0)
        change(each)
    check(layer, fast, inputs)
    assert joined == [True, change is frozen]


def test_calls_by_name_under_autocast_and_of_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = noted(monkeypatch)
    layer = Gated()
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    x, edge_index, edge_attr = drawn("cpu", torch.float32)
    for each in (layer, fast):
        each.by_name = each(x, edge_attr=edge_attr, edge_index=edge_index)
    torch.testing.assert_close(fast.by_name, layer.by_name)
    with torch.autocast("cpu", torch.bfloat16):
        check(layer, fast, (x, edge_index, edge_attr), 3e-2)
    assert joined == [True, True]
    for each in (layer, fast):
        with pytest.raises(RuntimeError, match="dtype"):
            each(x.double(), edge_index, edge_attr)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            each(x[:, 1:], edge_index, edge_attr)


def test_lazy_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = noted(monkeypatch)
    layer = Gated(lambda _, width, bias: pyg.Linear(-1, width, bias=bias))
    fast = copy.deepcopy(layer)
    accelerate(fast, show=False)
    inputs = drawn("cpu", torch.float32)
    fast(*inputs)
    layer(*inputs)
    layer.load_state_dict(fast.state_dict())
    check(layer, fast, inputs, 1e-5)
    assert joined == [False, True]


def test_second_derivatives() -> None:
    fast = Gated().double()
    accelerate(fast, show=False)
    x, edge_index, edge_attr = drawn("cpu")
    x = x[:6].requires_grad_()
    run = lambda x: fast(x, edge_index[:, :20] % 6, edge_attr[:20])  # noqa: E731
    assert torch.autograd.gradgradcheck(run, (x,))
