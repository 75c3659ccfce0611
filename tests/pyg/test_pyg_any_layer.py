"""Layers of any class under `accelerate`: PyG's own, layers as people write them, and hostile ones."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric
from pyg_cases import as_kind, close, gradients, random_graph, simple_graph
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import degree, scatter, softmax

import fastsparse_pyg
from benchmarks import any_layer as any_layer_benchmark
from benchmarks.pyg_layers import LAYERS, NO_LAYER, Inputs
from fastsparse_core import SlowPathWarning, log
from fastsparse_core.message_plans import ends
from fastsparse_pyg import VerificationError, accelerate, prepare, restore
from fastsparse_pyg.caching import SIGHTS, _met
from fastsparse_pyg.nn import any_layer, layer_arguments, message_kernels

N, WIDTH = 40, 6
EDGES = random_graph(N)
E = EDGES.size(1)


@pytest.fixture(autouse=True)
def kernels_for_every_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    _met.clear()  # uses of edges in other tests do not count
    if request.function is not test_few_edges_on_the_cpu:
        monkeypatch.setattr(any_layer, "FEW_EDGES", 0)


def results(layer: nn.Module, call: Callable[[Any], Any], leaves: list[Tensor]) -> list[Tensor | None]:
    """Output and gradients of everything."""
    torch.manual_seed(7)
    out = call(layer)
    if not out.requires_grad:
        return [out]
    return [out, *gradients(out, [*leaves, *layer.parameters()])]


def check(
    layer: nn.Module, call: Callable[[Any], Any], leaves: list[Tensor], tolerance: float = 1e-9
) -> list[str]:
    """Accelerated against original, twice (a second call may differ), and back; returns the kernels."""
    expected = results(layer, call, leaves)
    classes = [type(module) for module in layer.modules()]
    report = accelerate(layer, show=False)
    assert report.swapped, report
    for _ in range(2):
        for got, want in zip(results(layer, call, leaves), expected, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                close(got, want, tolerance, floor=1e-1)
    restore(layer)
    assert [type(module) for module in layer.modules()] == classes
    return [row.kernel for row in report.swapped]


# ---------------------------------------------------------------- PyG's layers


def test_the_table_is_complete() -> None:
    assert set(LAYERS) | set(NO_LAYER) >= set(torch_geometric.nn.conv.__all__)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_pyg(name: str, dtype: torch.dtype, device: str, reasons: pytest.LogCaptureFixture) -> None:
    it = Inputs.draw(random_graph(N, device=device), N, WIDTH, dtype)
    layer = LAYERS[name].make(WIDTH).to(device, dtype)
    exact = dtype == torch.float64 and name != "ClusterGCNConv"
    check(layer, lambda one: LAYERS[name].call(one, it), it.leaves(), 1e-9 if exact else 5e-5)
    assert "falls back" not in reasons.text


#: Options that change what a layer's messages are or how they are reduced.
OPTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Inputs], Tensor]]] = {
    "aggr=max": (lambda: pyg.GINEConv(nn.Linear(6, 4), edge_dim=4, aggr="max"), LAYERS["GINEConv"].call),
    "aggr=mul": (lambda: pyg.GENConv(6, 4, aggr="mul", edge_dim=4), LAYERS["GENConv"].call),
    "aggr=list": (lambda: pyg.SAGEConv(6, 4, aggr=["mean", "std", "softmax"]), LAYERS["SAGEConv"].call),
    "aggr=var": (lambda: pyg.GENConv(6, 4, aggr="var", edge_dim=4), LAYERS["GENConv"].call),
    "aggr=std": (lambda: pyg.GENConv(6, 4, aggr="std", edge_dim=4), LAYERS["GENConv"].call),
    "aggr=var, semi": (
        lambda: pyg.GENConv(6, 4, aggr=pyg.aggr.VarAggregation(semi_grad=True), edge_dim=4),
        LAYERS["GENConv"].call,
    ),
    "aggr=softmax, learnt": (lambda: pyg.GENConv(6, 4, learn_t=True, edge_dim=4), LAYERS["GENConv"].call),
    "aggr=softmax, semi": (
        lambda: pyg.GENConv(6, 4, aggr=pyg.aggr.SoftmaxAggregation(t=0.5, semi_grad=True), edge_dim=4),
        LAYERS["GENConv"].call,
    ),
    "aggr=softmax, channels": (
        lambda: pyg.GENConv(6, 4, aggr=pyg.aggr.SoftmaxAggregation(learn=True, channels=4), edge_dim=4),
        LAYERS["GENConv"].call,
    ),
    "aggr=powermean": (lambda: pyg.GENConv(6, 4, aggr="powermean", edge_dim=4), LAYERS["GENConv"].call),
    "aggr=median": (lambda: pyg.SAGEConv(6, 4, aggr="median"), LAYERS["SAGEConv"].call),
    "aggr=max of GCN": (lambda: pyg.GCNConv(6, 4, aggr="max"), LAYERS["GCNConv"].call),
    "flow": (
        lambda: pyg.GINEConv(nn.Linear(6, 4), edge_dim=4, flow="target_to_source"),
        LAYERS["GINEConv"].call,
    ),
    "flow of copies": (lambda: pyg.LEConv(6, 4, flow="target_to_source"), LAYERS["LEConv"].call),
    "flow of products": (
        lambda: pyg.SimpleConv(aggr="mean", flow="target_to_source"),
        LAYERS["SimpleConv"].call,
    ),
    "decomposed": (lambda: Copying(decomposed_layers=2), LAYERS["LGConv"].call),
    "normalised FAConv": (lambda: pyg.FAConv(6, dropout=0.5), LAYERS["FAConv"].call),
    "GAT with edges": (
        lambda: pyg.GATConv(6, 3, heads=2, edge_dim=4, residual=True),
        lambda layer, it: layer(it.x, it.edge_index, it.edge_attr),
    ),
    "lazy": (lambda: pyg.GENConv(-1, 4, edge_dim=4), LAYERS["GENConv"].call),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, device: str) -> None:
    make, call = OPTIONS[name]
    it = Inputs.draw(random_graph(N, device=device), N, WIDTH, torch.float64)
    layer = make().to(device, torch.float64)
    if name == "lazy":
        with torch.no_grad():
            accelerate(layer, show=False)
            call(layer, it)
            restore(layer)
    check(layer, lambda one: call(one, it), it.leaves())


@pytest.mark.parametrize("dims", ["pair", "no destinations", "size"])
def test_bipartite(dims: str, device: str) -> None:
    edges = random_graph(N, 12, 60, device=device)
    x = torch.randn(N, 6, dtype=torch.float64, device=device, requires_grad=True)
    dst = torch.randn(12, 6, dtype=torch.float64, device=device, requires_grad=True)
    attr = torch.randn(edges.size(1), 4, dtype=torch.float64, device=device, requires_grad=True)
    layer = pyg.GINEConv(nn.Linear(6, 4), edge_dim=4).to(device, torch.float64)
    pair, size = ((x, dst), None) if dims == "pair" else ((x, None), (N, 12))
    if dims == "no destinations":
        layer = pyg.SimpleConv("max")
        check(layer, lambda one: one(pair, edges, size=size), [x])
        return
    check(layer, lambda one: one(pair, edges, attr, size=size), [x, attr])


class Pairing(MessagePassing):
    """Copies, messages of both ends and an `edge_update` of a pair of features."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        weight = self.edge_updater(edge_index, x=x) if self.kind == "edges" else None
        return self.propagate(edge_index, x=x, weight=weight)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).sum(1, keepdim=True)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            return x_j * weight
        return x_j if self.kind == "copies" else torch.tanh(x_i) + x_j


@pytest.mark.parametrize("num_dst", [N, 12])
@pytest.mark.parametrize("kind", ["copies", "both", "edges"])
def test_a_pair_against_the_flow(
    kind: str, num_dst: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyG documents one order and its generated code reads another: its code runs, and the user is told."""
    edges = random_graph(min(N, num_dst), num_edges=100, device=device)
    x, dst = (
        torch.randn(rows, 6, dtype=torch.float64, device=device, requires_grad=True) for rows in (N, num_dst)
    )
    layer = Pairing(kind, flow="target_to_source")
    monkeypatch.setattr(log, "seen", set())
    with pytest.warns(SlowPathWarning, match="a pair of features with flow='target_to_source'"):
        check(layer, lambda one: one((x, dst), edges), [x, dst])
    # If both ends have one tensor, the order does not matter.
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        check(layer, lambda one: one((x, x), edges), [x])


# ---------------------------------------------------------------- layers as people write them


class Copying(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


class Weighted(MessagePassing):
    """Every spelling of a weight per edge."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, x: Tensor, edge_index: Tensor, norm: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        if self.spelling == "view":
            return norm.view(-1, 1) * x_j
        if self.spelling == "right":
            return x_j * norm.unsqueeze(-1)
        if self.spelling == "slice":
            return norm[:, None] * x_j
        if self.spelling == "reshape":
            return torch.mul(x_j, norm.reshape(-1, 1))
        if self.spelling == "divided":
            return x_j / norm.view(-1, 1)
        return (norm * norm).sqrt().view(-1, 1) * x_j


class Scaled(MessagePassing):
    """By a number that is the same for all edges: the caller's, or one that message passing knows."""

    def __init__(self, spelling: str, aggr: str = "sum", t: float = 3) -> None:
        super().__init__(aggr)
        self.spelling, self.t = spelling, t

    def forward(self, x: Tensor, edge_index: Tensor, norm: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, norm=norm, t=self.t)

    def message(self, x_j: Tensor, norm: Tensor, t: float, dim_size: int, size_i: int) -> Tensor:
        if self.spelling == "number":
            return x_j / t
        if self.spelling == "product":
            return -2 * (x_j * t)
        if self.spelling == "dim_size":
            return x_j / dim_size
        if self.spelling == "size_i":
            return x_j / size_i
        return norm.view(-1, 1) * x_j / t


class PerHead(MessagePassing):
    def __init__(self) -> None:
        super().__init__(node_dim=0)
        self.att = nn.Parameter(torch.randn(1, 2, 3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x.view(-1, 2, 3)
        return self.propagate(edge_index, x=x).flatten(1)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, size_i: int | None) -> Tensor:
        score = ((x_i + x_j).tanh() * self.att).sum(-1)
        return x_j * softmax(score, index, ptr, size_i).unsqueeze(-1)


class OptionalWeight(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j: Tensor, weight: Tensor | None) -> Tensor:
        return x_j if weight is None else x_j * weight.view(-1, 1)


class Edgewise(MessagePassing):
    def __init__(self) -> None:
        super().__init__("max")
        self.mlp = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j - x_i, edge_attr], dim=-1))


class Rectified(MessagePassing):
    """As GINE's."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=F.pad(edge_attr, (0, 2)))

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return F.relu(edge_attr.tanh() + x_j)


class RectifiedByOne(Rectified):
    """One term for all features."""

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return (x_j + edge_attr[:, :1]).relu()


class Attending(MessagePassing):
    """A softmax within a message that is no weighted copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax(x_i * x_j, index, num_nodes=size_i) * (x_j + self.lin(edge_attr))


class Gate(MessagePassing):
    """Elementwise weights, which look like a weight per edge."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, gate=F.pad(edge_attr, (0, 2)).sigmoid())

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * x_j


class Updated(MessagePassing):
    def __init__(self) -> None:
        super().__init__("mean")
        self.lin = nn.Linear(6, 4)
        self.skip = nn.Linear(6, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), root=x)

    def update(self, inputs: Tensor, root: Tensor) -> Tensor:
        return inputs.relu() + self.skip(root)


class WithDegree(MessagePassing):
    """The tutorial's GCN."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = torch_geometric.utils.add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        deg[deg == float("inf")] = 0
        return self.propagate(edge_index, x=self.lin(x), norm=deg[row] * deg[col])

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class EdgeUpdater(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, alpha=alpha)

    def edge_update(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int | None) -> Tensor:
        return softmax((x_i * x_j).sum(-1), index, num_nodes=size_i)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha.unsqueeze(-1) * x_j


class LastDimension(MessagePassing):
    """Features (batch, channels, nodes) and (nodes,)."""

    def __init__(self) -> None:
        super().__init__(node_dim=-1)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        x = x.t()
        out = self.propagate(edge_index, x=x, weight=weight) + self.propagate(
            edge_index, x=x[0], weight=weight
        )
        return out.t()

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight


X_E = Callable[[Any, Inputs], Tensor]
plain: X_E = LAYERS["GCNConv"].call
weighted: X_E = LAYERS["GraphConv"].call
attributed: X_E = LAYERS["GINEConv"].call
SPMM, SEGMENT = "spmm (sum)", "message() per edge"
WRITTEN: dict[str, tuple[Callable[[], nn.Module], X_E, str]] = {
    "Copying": (Copying, plain, "x_j: spmm (sum)"),
    **{
        f"Weighted {spelling}": (
            lambda spelling=spelling: Weighted(spelling),
            weighted,
            "w * x_j: spmm (sum)",
        )
        for spelling in ("view", "right", "slice", "reshape", "divided", "computed")
    },
    **{
        f"Scaled {spelling}": (lambda spelling=spelling: Scaled(spelling), weighted, "w * x_j: spmm (sum)")
        for spelling in ("number", "product", "dim_size", "size_i", "weight, too")
    },
    "Scaled maximum": (lambda: Scaled("number", "max", -0.5), weighted, "w * x_j: spmm (max)"),
    "PerHead": (PerHead, plain, "w * x_j: spmm (sum)"),
    "OptionalWeight given": (OptionalWeight, weighted, "w * x_j: spmm (sum)"),
    "OptionalWeight absent": (OptionalWeight, plain, "w * x_j: spmm (sum)"),
    "Edgewise": (Edgewise, attributed, "message() per edge: segment max"),
    "Rectified": (Rectified, attributed, "message() per edge: segment sum"),
    "RectifiedByOne": (RectifiedByOne, attributed, "message() per edge: segment sum"),
    "Attending": (Attending, attributed, "message() per edge: segment sum"),
    "Gate": (Gate, attributed, "w * x_j: spmm (sum)"),
    "Updated": (Updated, plain, "x_j: spmm (mean)"),
    "WithDegree": (WithDegree, plain, "w * x_j: spmm (sum)"),
    "EdgeUpdater": (EdgeUpdater, plain, "w * x_j: spmm (sum)"),
    "LastDimension": (LastDimension, weighted, "w * x_j: spmm (sum)"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_layers_as_people_write_them(name: str, device: str, reasons: pytest.LogCaptureFixture) -> None:
    make, call, kernel = WRITTEN[name]
    it = Inputs.draw(random_graph(N, device=device), N, WIDTH, torch.float64)
    layer = make().to(device, torch.float64)
    assert check(layer, lambda one: call(one, it), it.leaves()) == [kernel]
    assert not [each for each in reasons.records if "compiling generated" not in each.message]


def test_few_edges_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There PyG's code runs, except for 16-bit features, which it would not sum in float32."""
    layer = Copying()
    accelerate(layer, show=False)
    made = []
    monkeypatch.setattr(
        any_layer,
        "reduce_by_kernel",
        lambda *rest: (made.append(1), message_kernels.reduce_by_kernel(*rest))[1],
    )
    edges = torch.randint(N, (2, any_layer.FEW_EDGES))
    x = torch.randn(N, 6)
    layer(x, edges[:, 1:])
    assert not made
    layer(x, edges)
    layer(x.bfloat16(), EDGES)
    with torch.autocast("cpu"):
        layer(x, EDGES)
    assert len(made) == 3


def test_few_edges_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There PyG's code runs where no one kernel computes and reduces the messages, or edges are new."""
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    ran: list[str] = []
    for module, name in (
        (any_layer, "aggregate"),
        (any_layer, "reduce_by_kernel"),
        (message_kernels, "plain_spmm"),
    ):
        right = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *rest, right=right, name=name: (ran.append(name), right(*rest))[1]
        )
    cases: list[tuple[nn.Module, X_E, bool]] = [
        (pyg.LEConv(WIDTH, 4), weighted, False),
        (pyg.CGConv(WIDTH), plain, False),
        (Attending(), attributed, False),
        (EdgeUpdater(), plain, True),  # weights by PyG's code, the sum by the kernel
        (pyg.SimpleConv("median"), plain, False),  # "median" has no kernel
        (pyg.SimpleConv(), weighted, True),
        (pyg.WLConvContinuous(), plain, True),
    ]
    for layer, call, by_kernel in cases:
        expected = call(layer, it)
        accelerate(layer, show=False)
        _met.clear()
        for batch in range(2):  # the second one will be used as often as the first, so it is not new
            new = Inputs(EDGES.clone(), *list(vars(it).values())[1:])
            for nth in range(5):
                ran.clear()
                close(call(layer, new), expected, 1e-5)
                assert bool(ran) == (by_kernel and nth >= SIGHTS * (1 - batch)), layer
    ran.clear()
    _met.clear()
    for _ in range(4):  # equal edges in a new tensor per call
        cases[-2][0](it.x, EDGES.clone())
    assert not ran
    half = Inputs.draw(EDGES, N, WIDTH, torch.bfloat16)
    weighted(cases[0][0].bfloat16(), half)  # PyG would not sum in float32
    assert ran == ["aggregate"]


def test_verify_waits_for_the_kernels_of_few_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    monkeypatch.setattr(message_kernels, "spmm", lambda adj, x, *_: torch.zeros_like(x))
    layer = pyg.SimpleConv()
    accelerate(layer, show=False, verify=True)
    with pytest.raises(VerificationError, match="verify: layer"):
        layer(torch.randn(N, 6), EDGES.clone())


def test_verify_waits_for_a_call_that_a_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyG's code runs small graphs, and calls that the kernels do not support: no check is spent on them."""
    own, drop_in = pyg.SimpleConv(), pyg.GCNConv(6, 6)
    for layer in (own, drop_in):
        accelerate(layer, show=False, verify=True)
    x, matrix = torch.randn(N, 6), torch.sparse_coo_tensor(EDGES, torch.ones(E), (N, N)).to_sparse_csr()
    with monkeypatch.context() as small:
        small.setattr(any_layer, "FEW_EDGES", E + N + 1)
        own(x, EDGES)
        own(x, EDGES)
    drop_in.fuse = False
    drop_in(x, matrix)
    drop_in.fuse = True
    said = [each for each in caplog.messages if "nothing was compared yet" in each]
    assert len(said) == 2
    assert "PyG is faster there. The first call" in said[0]
    monkeypatch.setattr(message_kernels, "spmm", lambda adj, x, *_: torch.zeros_like(x))
    monkeypatch.setattr(message_kernels, "plain_spmm", lambda *_: None)
    with pytest.raises(VerificationError, match="verify: layer"):
        own(x, EDGES)
    assert drop_in._forward_pre_hooks
    drop_in(x, EDGES)
    assert not drop_in._forward_pre_hooks


class Scaling(MessagePassing):
    """Writes into what it gets."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, size=None)
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j.mul_(2.0) + x_i.sin()


FEW: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Inputs], Tensor]]] = {
    **{name: (lambda layer=layer: layer.make(WIDTH), layer.call) for name, layer in LAYERS.items()},
    **{name: (make, call) for name, (make, call, _) in WRITTEN.items()},
    **OPTIONS,
    "in place": (Scaling, plain),
    "in place, turned": (lambda: Scaling(flow="target_to_source", aggr="mean"), plain),
    "mean": (lambda: pyg.FeaStConv(WIDTH, 4, add_self_loops=False), plain),
    "min, turned": (lambda: pyg.EdgeConv(nn.Linear(12, 4), "min", flow="target_to_source"), plain),
}


@pytest.mark.parametrize("where", ["as on a GPU", "on the CPU"])
@pytest.mark.parametrize("name", FEW)
def test_few_edges_take_the_steps_of_pyg(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are the same for all arguments of propagate()."""
    if where == "on the CPU":
        monkeypatch.setattr(any_layer, "FEW_EDGES", E + N + 1)
    else:
        monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda edges, *_: type(edges) is Tensor)
    make, call = FEW[name]
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    check(make().double(), lambda one: call(one, it), it.leaves(), 5e-5 if name == "ClusterGCNConv" else 1e-9)


@pytest.mark.parametrize("first", [False, True])
def test_few_edges_heed_the_options_of_an_aggregation(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of one class with aggregations of other options."""
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    monkeypatch.setattr(any_layer, "is_new", lambda *_: False)
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    for semi_grad in (first, not first):
        layer = pyg.EdgeConv(nn.Linear(2 * WIDTH, 4), pyg.aggr.VarAggregation(semi_grad)).double()
        check(layer, lambda one: plain(one, it), it.leaves(), 1e-9)


def _operators(step: Callable[[], Any]) -> int:
    """Number of operators of PyTorch that a step calls."""
    with torch.profiler.profile() as profile:
        step()
    return sum(
        event.name.startswith("aten::")
        and (event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::"))
        for event in profile.events()
    )


@pytest.mark.parametrize("where", ["as on a GPU", "on the CPU"])
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_few_edges_take_fewer_operators_than_pyg(
    aggr: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends are gathered at once; as on a GPU, a maximum is one operator each way."""
    if where == "on the CPU":
        monkeypatch.setattr(any_layer, "FEW_EDGES", E + 1)
    else:
        monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    layer = pyg.EdgeConv(nn.Linear(2 * WIDTH, 4), aggr)
    x = torch.randn(N, WIDTH, requires_grad=True)
    step = lambda: layer(x, EDGES).sum().backward()  # noqa: E731
    step()
    expected = _operators(step)
    accelerate(layer, show=False)
    for _ in range(SIGHTS + 1):
        step()
    saved = 10 if aggr == "max" and where == "as on a GPU" else 0
    assert _operators(step) < expected - saved


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("name", [*LAYERS, *OPTIONS])
def test_edges_in_int32(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those of int64 edges, where PyG's own are wrong: PyTorch's gather reads other rows."""
    if few:
        monkeypatch.setattr(any_layer, "FEW_EDGES", E + N + 1)
    make, call = OPTIONS[name] if name in OPTIONS else (lambda: LAYERS[name].make(WIDTH), LAYERS[name].call)
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    narrow = dataclasses.replace(it, edge_index=EDGES.int(), turned=it.turned.int())
    layer = make().double()
    if name == "lazy":
        call(layer, it)
    expected = results(layer, lambda one: call(one, it), it.leaves())
    accelerate(layer, show=False)
    for _ in range(2):
        got = results(layer, lambda one: call(one, narrow), it.leaves())
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                close(ours, theirs, 5e-5 if name == "ClusterGCNConv" else 1e-9, floor=1e-1)


def test_wrong_calls_with_few_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unusual calls give PyG's results, and wrong calls PyG's errors."""
    monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
    x, y = torch.randn(N, 6), torch.randn(7, 6)
    layer, fast = (pyg.EdgeConv(nn.Linear(12, 4)) for _ in range(2))
    fast.load_state_dict(layer.state_dict())
    accelerate(fast, show=False)
    for _ in range(SIGHTS + 1):
        fast(x, EDGES)
    bipartite = torch.stack([torch.arange(N), torch.arange(N) % 7])
    for given in ((x, EDGES), ((x, y), bipartite), ((x, x), bipartite)):
        close(fast(*given), layer(*given))
    for given in ((x[:5], EDGES), ((x, y), EDGES), (x, EDGES.float()), (x, EDGES[:1]), (x, EDGES - 1)):
        with pytest.raises((ValueError, IndexError)) as expected:
            layer(*given)
        with pytest.raises(expected.type) as got:
            fast(*given)
        assert str(got.value) == str(expected.value)


def test_few_edges_with_a_destination_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG's own error."""
    monkeypatch.setattr(any_layer, "FEW_EDGES", E + 1)
    layer, edges = pyg.SimpleConv(), torch.stack([torch.zeros(N, dtype=torch.int64), torch.arange(N)])
    said = []
    for _ in range(2):
        with pytest.raises(ValueError, match="dim_size") as error:
            layer(torch.randn(5, WIDTH), edges)
        said.append(str(error.value))
        accelerate(layer, show=False)
    assert said[0] == said[1]


def test_softmax_is_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """In weights, messages, edge updates and PyG's aggregation."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    calls = []
    for name in ("softmax_op", "softmax_sum"):
        right = getattr(ends, name)
        counting = lambda *args, right=right, **kw: (calls.append(1), right(*args, **kw))[1]  # noqa: E731
        monkeypatch.setattr(ends, name, counting)
    layers: list[tuple[nn.Module, X_E]] = [
        (PerHead(), plain),
        (Attending(), attributed),
        (EdgeUpdater(), plain),
        (pyg.GENConv(6, 4, edge_dim=4), attributed),
    ]
    for layer, call in layers:
        accelerate(layer, show=False)
        calls.clear()
        call(layer, it)
        assert calls == [1], layer


def test_a_divisor_of_zero_is_one_of_pytorch() -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    layer = Scaled("number", t=0)
    expected = weighted(layer, it)
    accelerate(layer, show=False)
    assert torch.equal(weighted(layer, it).isnan(), expected.isnan())
    assert torch.equal(weighted(layer, it).nan_to_num(), expected.nan_to_num())


def test_no_messages_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weighted copy gathers no features, and does not call message()."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    layers: list[tuple[nn.Module, X_E]] = [
        (Weighted("view"), weighted),
        (OptionalWeight(), plain),
        (Scaled("dim_size"), weighted),
        (Rectified(), attributed),
    ]
    for layer, call in layers:
        accelerate(layer, show=False)
        expected = call(layer, it)
        monkeypatch.setattr(layer_arguments, "gather", None)
        close(call(layer, it), expected)
        monkeypatch.undo()


# ---------------------------------------------------------------- hostile ones

SCALE = 2.0
SEEN: list[int] = []


class Hostile(MessagePassing):
    """Base of the following layers: `forward` passes all its arguments to propagate()."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lin = nn.Linear(6, 6)
        self.factor = nn.Parameter(torch.tensor([1.5]))
        self.calls = 0

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)


class Printing(Hostile):
    def message(self, x_j: Tensor) -> Tensor:
        print("message", tuple(x_j.shape))
        return x_j


class Branching(Hostile):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        if edge_attr.sum() > 0:
            return x_j
        return edge_attr.sum(-1, keepdim=True) * x_j


class InPlace(Hostile):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        x_j[edge_attr[:, 0] > 0] = 0.0
        x_j.mul_(2.0)
        return x_j


class WithoutGradient(Hostile):
    def message(self, x_j: Tensor) -> Tensor:
        with torch.no_grad():
            norm = x_j.norm(dim=-1, keepdim=True)
        return x_j / norm


class HandledError(Hostile):
    def message(self, x_j: Tensor) -> Tensor:
        try:
            return x_j.view(-1, 5, 7)[:, 0] * x_j
        except RuntimeError:
            return -x_j


class CapturedGlobal(Hostile):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return SCALE * edge_attr[:, :1] * x_j


class CapturedOnLayer(Hostile):
    """Edge features kept on the layer, in the caller's order."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        self.kept = edge_attr[:, :1]
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.kept * x_j


class OnlyDestinations(Hostile):
    def message(self, x_i: Tensor, edge_attr: Tensor) -> Tensor:
        return x_i * edge_attr[:, :1]


class NoFeatures(Hostile):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, edge_attr=edge_attr, size=(N, N))

    def message(self, edge_attr: Tensor) -> Tensor:
        return edge_attr


class NoFeaturesNoSize(NoFeatures):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, edge_attr=edge_attr)


class TupleOutput(Hostile):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        return x_j, edge_attr

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int | None = None) -> Tensor:
        return torch.cat([scatter(each, index, 0, dim_size, "mean") for each in inputs], dim=-1)


class Integers(Hostile):
    def message(self, x_j: Tensor) -> Tensor:
        return (x_j * 10).long()


class OwnAggregation(Hostile):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        out = inputs.new_zeros(dim_size or 0, inputs.size(1))
        out = out.index_add(0, index, inputs)
        return out.scatter_add(0, index.unsqueeze(-1).expand(-1, inputs.size(1)), inputs.relu())


class OwnSize(Hostile):
    """The edges determine the number of results, as in AllSet, whose destinations are not the nodes of x."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        other = torch.stack([edge_index[0], edge_index[1] * 2])
        return self.propagate(other, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * edge_attr[:, :1]

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return scatter(inputs, index, dim=0)


class FewerDestinations(OwnSize):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        other = torch.stack([edge_index[0], edge_index[1] // 2])
        return self.propagate(other, x=x, edge_attr=edge_attr)


class UnreadSources(Hostile):
    """Indices of sources may exceed the number of nodes if no features of sources are read."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        other = torch.stack([edge_index[0] * 3, edge_index[1]])
        alpha = self.edge_updater(other.flip(0), x=x, edge_attr=edge_attr)
        return self.propagate(other, x=(None, x), alpha=alpha)

    def edge_update(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j[:, :1] * edge_attr[:, :1]

    def message(self, x_i: Tensor, alpha: Tensor) -> Tensor:
        return x_i * alpha


class Nested(Hostile):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Copying()

    def update(self, inputs: Tensor, edge_attr: Tensor) -> Tensor:
        return self.inner(inputs, EDGES.to(inputs.device))


class InMessage(Hostile):
    """A message that is another layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Copying()

    def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
        return x_j + self.inner(x_j, edge_index)


class TwoSizes(Hostile):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        half = edge_index[:, (edge_index < 20).all(0)]
        first = self.propagate(half, x=x[:20])
        return self.propagate(edge_index, x=x) + F.pad(first, (0, 0, 0, 20))


class ParametersInside(Hostile):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.lin(x_j) * self.factor * edge_attr[:, :1]


class ParameterAsWeight(Hostile):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * (self.factor * edge_attr[:, :1]).tanh()


class OnlyUpdate(pyg.GCNConv):
    def __init__(self) -> None:
        super().__init__(6, 4)

    def update(self, inputs: Tensor) -> Tensor:
        return inputs.tanh()


class Counting(Hostile):
    def message(self, x_j: Tensor) -> Tensor:
        self.calls += 1
        return x_j * self.calls


class Remembering(Hostile):
    def message(self, x_j: Tensor) -> Tensor:
        SEEN.append(x_j.size(0))
        return x_j


class Keeping(Hostile):
    """Leaves a tensor of the edges on the layer."""

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        alpha = edge_attr[:, :1].sigmoid()
        self.alpha = alpha
        return alpha * x_j

    def update(self, inputs: Tensor) -> Tensor:
        return inputs + self.alpha.sum()


class Mode(Hostile):
    """Training and options decide."""

    power = 2

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        weight = F.dropout(edge_attr[:, :1] ** self.power, 0.5, self.training)
        return weight * x_j if self.training else x_j


class OrderOfEdges(Hostile):
    """The message of an edge depends on neighbouring edges."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j + x_j.roll(1, 0)


class NodesByIndex(Hostile):
    """An argument that has a row per node, not per edge."""

    def message(self, x: Tensor, edge_index_j: Tensor, index: Tensor) -> Tensor:
        return x[edge_index_j] - x[index]


class SameNumbers(Hostile):
    """A table that happens to have as many rows as there are edges."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        table = edge_attr.cumsum(0)
        return self.propagate(edge_index, x=x, table=table)

    def message(self, x_j: Tensor, table: Tensor, index: Tensor) -> Tensor:
        return x_j + table[index, :1]


HOSTILE: list[type[MessagePassing]] = [
    WithoutGradient,
    HandledError,
    Branching,
    InPlace,
    CapturedGlobal,
    CapturedOnLayer,
    OnlyDestinations,
    NoFeatures,
    NoFeaturesNoSize,
    TupleOutput,
    Integers,
    OwnAggregation,
    OwnSize,
    FewerDestinations,
    UnreadSources,
    Nested,
    InMessage,
    TwoSizes,
    ParametersInside,
    ParameterAsWeight,
    Keeping,
    Mode,
    OrderOfEdges,
    NodesByIndex,
    SameNumbers,
]


@pytest.mark.parametrize("klass", HOSTILE, ids=[klass.__name__ for klass in HOSTILE])
def test_hostile_layers(klass: Callable[[], nn.Module], device: str) -> None:
    it = Inputs.draw(random_graph(N, device=device), N, WIDTH, torch.float64)
    check(klass().to(device, torch.float64), lambda one: attributed(one, it), it.leaves())


def test_destinations_that_nobody_counted_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "seen", set())
    layer, it = OwnSize(), Inputs.draw(EDGES, N, WIDTH, torch.float32)
    accelerate(layer, show=False)
    with pytest.warns(SlowPathWarning, match=r"OwnSize falls back to PyG.*Pass `size=") as caught:
        attributed(layer, it)
    assert caught[0].filename == __file__


def test_update_alone() -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    assert check(OnlyUpdate().double(), lambda one: plain(one, it), it.leaves()) == ["w * x_j: spmm (sum)"]


def test_side_effects(capsys: pytest.CaptureFixture[str]) -> None:
    """Each call has them, as often as PyG."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    printing, counting, remembering = Printing(), Counting(), Remembering()
    SEEN.clear()
    for layer in (printing, counting, remembering):
        accelerate(layer, show=False)
        assert SEEN == []
        for _ in range(3):
            attributed(layer, it)
    assert capsys.readouterr().out == f"message ({E}, 6)\n" * 3
    assert counting.calls == 3
    assert SEEN == [E] * 3


def test_state_that_changes_after_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Globals, attributes, the mode and the method itself count as they are at each call."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    layer, reference = CapturedGlobal(), CapturedGlobal()
    reference.load_state_dict(layer.state_dict())
    layer, reference = layer.double(), reference.double()
    accelerate(layer, show=False)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        close(attributed(layer, it), attributed(reference, it), 1e-10)
    mode = Mode().double()
    accelerate(mode, show=False)
    for training, power in ((True, 2), (False, 2), (True, 3)):
        mode.train(training).power = power
        other = copy.deepcopy(mode)
        restore(other)
        torch.manual_seed(1)
        expected = attributed(other, it)
        torch.manual_seed(1)
        close(attributed(mode, it), expected, 1e-10)
    copying = Copying()
    accelerate(copying, show=False)
    before = plain(copying, it)
    copying.message = lambda x_j: 2 * x_j
    close(plain(copying, it), 2 * before, 1e-10)


def test_hooks_added_later(reasons: pytest.LogCaptureFixture) -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    layer = OptionalWeight()
    accelerate(layer, show=False)
    before = plain(layer, it)
    handle = layer.register_message_forward_hook(lambda module, inputs, out: 3 * out)
    close(plain(layer, it), 3 * before, 1e-10)
    (record,) = reasons.records  # no warning, because the user registered the hook
    assert record.levelname == "INFO"
    assert record.message.endswith("falls back to PyG's implementation: a hook on message passing")
    handle.remove()
    close(plain(layer, it), before, 1e-10)


def test_explain_mode_and_back() -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    reference, layer = Copying(), Copying()
    accelerate(layer, show=False)
    expected = plain(reference, it)
    for one in (reference, layer):
        one.explain = True
        one._edge_mask, one._loop_mask, one._apply_sigmoid = torch.linspace(-1, 1, E), None, True
    close(plain(layer, it), plain(reference, it), 1e-10)
    for one in (reference, layer):
        one.explain = False
    calls = []
    product = message_kernels.spmm
    message_kernels.spmm = lambda *arguments: (calls.append(1), product(*arguments))[1]
    try:
        close(plain(layer, it), expected, 1e-10)
    finally:
        message_kernels.spmm = product
    assert calls == [1]
    restore(layer)
    assert "propagate" not in vars(layer)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(how: str) -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    layer = Edgewise()
    accelerate(layer, show=False)
    expected = attributed(layer, it)
    if how == "deepcopy":
        again = copy.deepcopy(layer)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert type(again) is type(layer)
    assert isinstance(again, Edgewise)
    close(attributed(again, it), expected)
    restore(again)
    assert type(again) is Edgewise
    close(attributed(again, it), expected)


def test_kinds_of_edges(reasons: pytest.LogCaptureFixture) -> None:
    """An EdgeIndex, sorted or not, and an Adjacency; a sparse matrix is PyG's."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    layer = Edgewise().double()
    expected = attributed(layer, it)
    accelerate(layer, show=False)
    order = EDGES[1].argsort(stable=True)
    by_dst = EdgeIndex(EDGES[:, order], sparse_size=(N, N), sort_order="col")
    close(layer(it.x, by_dst, it.edge_attr[order]), expected, 1e-10)
    close(layer(it.x, EdgeIndex(EDGES, sparse_size=(N, N)), it.edge_attr), expected, 1e-10)
    adj = prepare(EDGES, N)
    misses = fastsparse_pyg.cache_info().misses
    close(layer(it.x, adj, it.edge_attr), expected, 1e-10)
    close(layer(it.x, adj, it.edge_attr), expected, 1e-10)
    assert fastsparse_pyg.cache_info().misses <= misses + 1
    with pytest.raises(ValueError, match="expected edges or a plain Adjacency"):
        layer(it.x, prepare(EDGES, N, add_self_loops=True), it.edge_attr)
    copying = Copying()
    accelerate(copying, show=False)
    simple = simple_graph(N)
    matrix = as_kind("csr", simple, N, N, torch.ones(simple.size(1), dtype=torch.float64))
    close(copying(it.x, matrix), copying(it.x, simple), 1e-10)
    assert "AcceleratedCopying falls back to PyG's implementation, which is slower: a sparse" in reasons.text


def test_edges_that_a_layer_makes_anew_are_recognised() -> None:
    """From the fourth time on, edges of that size are compared instead of sorted."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    layer = WithDegree()
    accelerate(layer, show=False)
    built = []
    build = fastsparse_pyg.graph.build_from_edge_list
    fastsparse_pyg.graph.build_from_edge_list = lambda *rest: (built.append(1), build(*rest))[1]
    try:
        expected = plain(layer, it)
        for _ in range(5):
            close(plain(layer, it), expected)
        assert len(built) == 3
        other = random_graph(N, seed=5)
        it.edge_index = other
        reference = copy.deepcopy(layer)
        restore(reference)
        close(plain(layer, it), plain(reference, it))
    finally:
        fastsparse_pyg.graph.build_from_edge_list = build


def test_hostile_graphs(device: str) -> None:
    """No edges, no nodes, one edge."""
    for nodes, edges in ((5, torch.empty(2, 0, dtype=torch.long)), (0, torch.empty(2, 0, dtype=torch.long))):
        it = Inputs.draw(edges.to(device), nodes, WIDTH, torch.float64)
        for make, call in ((PerHead, plain), (Edgewise, attributed), (lambda: Weighted("view"), weighted)):
            check(make().to(device, torch.float64), lambda one, call=call, it=it: call(one, it), [it.x])
    it = Inputs.draw(torch.tensor([[2], [0]], device=device), 3, WIDTH, torch.float64)
    for make, call in ((PerHead, plain), (Edgewise, attributed), (lambda: Weighted("slice"), weighted)):
        check(make().to(device, torch.float64), lambda one, call=call, it=it: call(one, it), [it.x])


def test_indices_out_of_range() -> None:
    layer = Copying()
    accelerate(layer, show=False)
    with pytest.raises(IndexError, match="expected indices from 0 to 2"):
        layer(torch.randn(3, 6), torch.tensor([[0, 1], [1, 3]]))
    layer = OwnSize()
    accelerate(layer, show=False)
    with pytest.raises(IndexError):  # the features have no row for such a source
        layer.propagate(torch.tensor([[0, 3], [1, 1]]), x=torch.randn(3, 6), edge_attr=torch.ones(2, 1))


def test_sixteen_bits_and_autocast(device: str) -> None:
    it = Inputs.draw(random_graph(N, device=device), N, WIDTH, torch.bfloat16)

    def smooth() -> Edgewise:  # rounding may change a ReLU's sign or a maximum's edge
        layer = Edgewise()
        layer.mlp[1] = nn.Tanh()
        layer.aggr_module = pyg.aggr.MeanAggregation()
        return layer

    for make, call in ((smooth, attributed), (lambda: Weighted("view"), weighted)):
        check(make().to(device, torch.bfloat16), lambda one, call=call: call(one, it), [it.x], 3e-2)
    single = Inputs.draw(random_graph(N, device=device), N, WIDTH, torch.float32)
    layer = Edgewise().to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = attributed(layer, single)
        accelerate(layer, show=False)
        close(attributed(layer, single), expected, 3e-2)


def test_the_same_bits(device: str) -> None:
    """Outputs and gradients, of layers whose PyG code adds by atomics on CUDA."""
    it = Inputs.draw(random_graph(2000, 2000, 20_000, device=device), 2000, 32, torch.float32)
    for name in ("PointTransformerConv", "GENConv", "FiLMConv", "PNAConv"):
        layer = LAYERS[name].make(32).to(device).eval()
        accelerate(layer, show=False)
        runs = [results(layer, lambda one, name=name: LAYERS[name].call(one, it), [it.x]) for _ in range(3)]
        for run in runs[1:]:
            for got, want in zip(run, runs[0], strict=True):
                assert got is want is None or torch.equal(got, want)


def test_compiled() -> None:
    """PyG's code is compiled."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    layer = Edgewise()
    expected = attributed(layer, it)
    accelerate(layer, show=False)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    close(compiled(it.x, it.edge_index, it.edge_attr), expected)


def test_second_derivatives() -> None:
    edges = random_graph(12, 12, 30)
    layer = Edgewise().double()
    layer.aggr_module = pyg.aggr.MeanAggregation()
    layer.mlp[1] = nn.Tanh()
    accelerate(layer, show=False)
    x = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(edges.size(1), 4, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edges, attr).sum(0), (x,))


class Viewing(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i).view(-1, x_j.size(-1)).tanh().view(x_j.shape)


def test_tensors_of_graphs_side_by_side_can_be_viewed() -> None:
    x = torch.randn(2, N, WIDTH, dtype=torch.float64, requires_grad=True)
    for layer in (Viewing(), Viewing("max"), pyg.SimpleConv(), pyg.SAGEConv(WIDTH, 4), pyg.LGConv()):
        check(layer.double(), lambda layer: layer(x, EDGES).view(-1), [x])


# ---------------------------------------------------------------- verify


def test_verify_passes_and_is_gone() -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    model = nn.ModuleList([Edgewise(), pyg.GATConv(6, 4), pyg.GENConv(6, 4, edge_dim=4)])
    norm = model[2].mlp[1]
    before = norm.running_mean.clone()
    accelerate(model, show=False, verify=True)
    out = attributed(model[0], it)
    plain(model[1], it)
    keeping = Keeping()
    attributed(keeping, it)  # leaves a tensor with a graph on the layer
    accelerate(keeping, show=False, verify=True)
    attributed(keeping, it)
    with torch.no_grad():
        attributed(model[2].eval(), it)
    assert not any(one._forward_pre_hooks for one in model)
    assert torch.equal(before, norm.running_mean), "the comparison runs on copies"
    close(attributed(model[0], it), out)


def test_verify_compares_what_can_be_compared() -> None:
    """Dropout draws other numbers, PyG counts in float32, a trace is no call, matrices are not copied."""
    it = Inputs.draw(EDGES, N, WIDTH, torch.float64)
    edges = torch.stack([torch.arange(4), torch.arange(4)])
    matrix = torch.sparse_coo_tensor(edges, torch.ones(4), (4, 4)).to_sparse_csr()
    models = (
        pyg.GATConv(6, 4, dropout=0.5),
        pyg.RGATConv(6, 4, 3, dropout=0.5),
        pyg.APPNP(3, 0.1, dropout=0.5),
        pyg.ClusterGCNConv(6, 4),
    )
    kinds = torch.arange(EDGES.size(1)) % 3
    for model in models:
        accelerate(model.double(), show=False, verify=True)
        model(it.x, EDGES, *([kinds] if isinstance(model, pyg.RGATConv) else []))
        assert not model._forward_pre_hooks
    keeping = pyg.GCNConv(6, 4, cached=True)
    keeping(torch.randn(4, 6), matrix)
    accelerate(keeping, show=False, verify=True)
    keeping(torch.randn(4, 6), matrix)
    traced = Edgewise().double()
    accelerate(traced, show=False, verify=True)
    torch.jit.trace(traced, (it.x, EDGES, it.edge_attr), check_trace=False)
    assert traced._forward_pre_hooks
    typed = pyg.HGTConv(-1, 4, (["a", "b"], [("a", "to", "a"), ("b", "to", "a")]))
    accelerate(typed, show=False, verify=True)
    typed({"a": torch.randn(N, 6)}, {("a", "to", "a"): EDGES})


@pytest.mark.parametrize("fault", ["output", "gradient"])
def test_verify_raises_and_falls_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Inputs.draw(EDGES, N, WIDTH, torch.float32)
    model = nn.Sequential(Edgewise())
    expected = attributed(model[0], it)
    accelerate(model, show=False, verify=True)
    right = any_layer.aggregate

    def wrong(messages: Tensor, *rest: Any) -> Tensor:
        out = right(messages, *rest)
        return out * 1.1 if fault == "output" else out.detach() + 0.0 * messages.sum()

    monkeypatch.setattr(any_layer, "aggregate", wrong)
    with pytest.raises(VerificationError, match=f"layer '0', AcceleratedEdgewise, differs .*{fault}"):
        attributed(model[0], it)
    assert type(model[0]) is Edgewise
    close(attributed(model[0], it), expected)


def test_the_page_lists_every_layer() -> None:
    """docs/pyg_layers.md holds what `python -m benchmarks.any_layer --write` puts there."""
    page = any_layer_benchmark.PAGE.read_text()
    for row in any_layer_benchmark.rows():
        assert f"| {' | '.join(row)} |" in page, "run python -m benchmarks.any_layer --write"
