"""The layers that multiply by the graph's matrix against PyG's own: output and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pyg_cases import as_kind, close, gradients, random_graph, same, simple_graph
from torch import Tensor, nn
from torch_geometric import nn as pyg

import fastsparse_pyg
from fastsparse_core import Adjacency


class Case(NamedTuple):
    """A layer and its call."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    weighted: bool = False

    def pair(self, dtype: torch.dtype, device: str) -> tuple[nn.Module, nn.Module]:
        """PyG's layer, and ours on the same parameters."""
        original = getattr(pyg, self.name)(*self.arguments, **self.options)
        ours = getattr(fastsparse_pyg, f"Fast{self.name}")(*self.arguments, **self.options)
        return original.to(device, dtype), ours.to(device, dtype)


def cases() -> dict[str, Case]:
    """Every layer over its options."""
    grid: list[tuple[str, tuple[Any, ...], list[dict[str, Any]]]] = [
        ("GraphConv", (6, 4), [{}, {"aggr": "mean"}, {"aggr": "max"}, {"bias": False}]),
        ("GraphConv", (4, 8), [{}, {"aggr": "mean"}]),
        ("SGConv", (6, 4), [{"K": 2}, {"K": 2, "add_self_loops": False}, {"K": 3, "cached": True}]),
        ("SGConv", (4, 6), [{"K": 2, "bias": False}, {"aggr": "mean"}, {"flow": "target_to_source"}]),
        ("SSGConv", (6, 4), [{"alpha": 0.1, "K": 3}, {"alpha": 0.2, "K": 2, "cached": True}]),
        ("SSGConv", (4, 6), [{"alpha": 0.1, "K": 2, "add_self_loops": False}]),
        ("APPNP", (3, 0.1), [{}, {"add_self_loops": False}, {"cached": True}, {"normalize": False}]),
        ("TAGConv", (6, 4), [{}, {"normalize": False}, {"bias": False, "K": 2}, {"aggr": "mean"}]),
        ("TAGConv", (4, 6), [{}]),
        (
            "MixHopConv",
            (6, 4),
            [{}, {"powers": [2, 0], "add_self_loops": False, "bias": False}, {"aggr": "max"}],
        ),
        ("GCN2Conv", (6, 0.3), [{}, {"theta": 0.5, "layer": 2}, {"shared_weights": False, "cached": True}]),
        ("GCN2Conv", (6, 0.3), [{"normalize": False}, {"add_self_loops": False}]),
        ("LGConv", (), [{}, {"normalize": False}]),
        ("ARMAConv", (6, 4), [{}, {"num_stacks": 2, "num_layers": 3}, {"act": None, "bias": False}]),
        ("ARMAConv", (6, 4), [{"shared_weights": True, "num_layers": 2}]),
        ("ClusterGCNConv", (6, 4), [{}, {"diag_lambda": 0.5}]),
        ("MFConv", (6, 4), [{}, {"max_degree": 3, "bias": False}, {"aggr": "mean"}]),
        ("GatedGraphConv", (8, 3), [{}, {"aggr": "max"}, {"bias": False}]),
        ("ChebConv", (6, 4, 1), [{}]),
        ("ChebConv", (6, 4, 3), [{}, {"normalization": "rw"}, {"normalization": None}, {"bias": False}]),
        ("ChebConv", (6, 4, 3), [{"flow": "target_to_source", "normalization": "rw"}]),
    ]
    found = {}
    for name, arguments, all_options in grid:
        for options in all_options:
            for weighted in (False, True):
                if weighted and name in ("ClusterGCNConv", "MFConv"):
                    continue
                words = [name, *map(str, arguments), *(f"{key}={value}" for key, value in options.items())]
                case = Case(name, arguments, options, weighted)
                found["-".join([*words, "weighted" if weighted else ""])] = case
    return found


CASES = cases()
#: Those that PyG multiplies by sparse matrices.
MATRIX_LAYERS = [
    "GraphConv",
    "SGConv",
    "APPNP",
    "TAGConv",
    "MixHopConv",
    "GCN2Conv",
    "LGConv",
    "GatedGraphConv",
]


def call(name: str, x: Tensor, edges: Any, weight: Tensor | None) -> Callable[[nn.Module], Tensor]:
    """The layer's call."""
    more = () if weight is None else (weight,)
    if name == "GCN2Conv":
        return lambda layer: layer(x, x.flip(1), edges, *more)
    return lambda layer: layer(x, edges, *more)


def _dtypes() -> list[Any]:
    """float64 for all, float32 for the layers as they are by default."""
    both = [(name, torch.float64) for name in CASES]
    both += [(name, torch.float32) for name, case in CASES.items() if not case.options and not case.weighted]
    return [pytest.param(*pair, id=f"{pair[0]}-{str(pair[1])[6:]}") for pair in both]


@pytest.mark.parametrize(("name", "dtype"), _dtypes())
def test_against_the_original(name: str, dtype: torch.dtype, device: str, kernels_only: None) -> None:
    case = CASES[name]
    edges = random_graph(device=device)
    x = torch.randn(40, 6 if case.name in ("GCN2Conv", "LGConv", "APPNP") else _width(case))
    x = x.to(device, dtype).requires_grad_()
    weight = None
    if case.weighted:
        weight = torch.rand(edges.size(1)).add(0.1).to(device, dtype).requires_grad_()
    original, ours = case.pair(dtype, device)
    inputs = [x] if weight is None else [x, weight]
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    if case.name == "ClusterGCNConv":  # whose degrees are float32 in PyG
        tolerance = 2e-5
    if case.options.get("cached"):
        with torch.no_grad():  # the first call fills the cache
            ours.load_state_dict(original.state_dict())
            first = [call(case.name, x, edges, weight)(layer) for layer in (ours, original)]
            close(*first, tolerance)
        inputs = [x] if case.name in ("APPNP", "GCN2Conv") else []
    same(original, ours, call(case.name, x, edges, weight), inputs, tolerance=tolerance, floor=1e-1)


def _width(case: Case) -> int:
    return case.arguments[0] if case.name != "GatedGraphConv" else 5


@pytest.mark.parametrize("kind", ["EdgeIndex", "csr", "coo", "Adjacency", "edge_index_int32"])
@pytest.mark.parametrize("name", MATRIX_LAYERS)
def test_kinds_of_edges(name: str, kind: str, device: str, kernels_only: None) -> None:
    edges = simple_graph(device=device)
    weight = torch.rand(edges.size(1), dtype=torch.float64, device=device) + 0.1
    x = torch.randn(40, 6, dtype=torch.float64, device=device, requires_grad=True)
    arguments = {"APPNP": (2, 0.1), "GCN2Conv": (6, 0.1), "LGConv": (), "GatedGraphConv": (6, 2)}
    case = Case(name, arguments.get(name, (6, 4)), {})
    original, ours = case.pair(torch.float64, device)
    is_matrix = kind in ("csr", "coo")
    graph = as_kind(kind, edges, 40, 40, weight if is_matrix else None)
    theirs = graph if is_matrix else edges
    of_edges = None if is_matrix else weight
    same(
        original,
        ours,
        call(name, x, theirs, of_edges),
        [x],
        fast_call=call(name, x, graph, of_edges),
        tolerance=1e-10,
    )


@pytest.mark.parametrize(
    "options", [{}, {"concat": False, "heads": 3}, {"attention_mode": "edge", "heads": 2}]
)
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_hypergraphs(
    options: dict[str, Any], attention: bool, weighted: bool, device: str, kernels_only: None
) -> None:
    if not attention and options:
        options = {"bias": False}
    case = Case("HypergraphConv", (6, 4), {**options, "use_attention": attention})
    original, ours = case.pair(torch.float64, device)
    edges = random_graph(40, 15, 120, device=device)
    x = torch.randn(40, 6, dtype=torch.float64, device=device, requires_grad=True)
    attr = torch.randn(15, 6, dtype=torch.float64, device=device, requires_grad=True) if attention else None
    weight = torch.rand(15, dtype=torch.float64, device=device).requires_grad_() if weighted else None
    inputs = [one for one in (x, attr, weight) if one is not None]
    same(original, ours, lambda layer: layer(x, edges, weight, attr, 15), inputs, tolerance=1e-9)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize(("num_edges", "rows"), [(None, 15), (None, 18), (18, 15), (18, 18), (18, 20)])
def test_hyperedges_without_nodes(
    attention: bool, num_edges: int | None, rows: int, device: str, kernels_only: None
) -> None:
    """In between, and behind the last that holds one, with rows for them or not."""
    case = Case("HypergraphConv", (6, 4), {"use_attention": attention})
    original, ours = case.pair(torch.float64, device)
    edges = random_graph(40, 15, 120, device=device)
    edges = edges[:, edges[1] != 4]
    x = torch.randn(40, 6, dtype=torch.float64, device=device, requires_grad=True)
    attr = torch.randn(rows, 6, dtype=torch.float64, device=device, requires_grad=True) if attention else None
    weight = torch.rand(rows, dtype=torch.float64, device=device).requires_grad_()
    inputs = [one for one in (x, attr, weight) if one is not None]
    same(original, ours, lambda layer: layer(x, edges, weight, attr, num_edges), inputs, tolerance=1e-9)
    none = edges[:, :0]
    close(ours(x, none, weight, attr, num_edges), original(x, none, weight, attr, num_edges))
    with pytest.raises(IndexError, match="hyperedge_weight: expected 13 rows or more, one for each hyper"):
        ours(x, edges, weight[:12], attr, num_edges)


CACHING = {
    "GCNConv": (6, 4),
    "GCNConv, wider": (6, 8),
    "GCNConv, no loops": (6, 4),
    "APPNP": (2, 0.1),
    "GCN2Conv": (6, 0.1),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CACHING)
def test_cached_goes_on_with_more_nodes(name: str, weighted: bool, device: str, kernels_only: None) -> None:
    """Nodes that came after the cache was filled have no edges; then the first ones come again."""
    kind, _, options = name.partition(", ")
    loops = {"add_self_loops": False} if options == "no loops" else {}
    layers = Case(kind, CACHING[name], {"cached": True, **loops}).pair(torch.float64, device)
    original, ours = layers
    edges = random_graph(device=device)
    weight = torch.rand(edges.size(1), dtype=torch.float64, device=device) + 0.1 if weighted else None
    few = torch.randn(40, 6, dtype=torch.float64, device=device)
    more = torch.randn(47, 6, dtype=torch.float64, device=device, requires_grad=True)
    ours.load_state_dict(original.state_dict())
    for x in (few, more, more, few):
        close(call(kind, x, edges, weight)(ours), call(kind, x, edges, weight)(original), 1e-10)
    same(original, ours, call(kind, more, edges, weight), [more], tolerance=1e-10)
    with pytest.raises(IndexError, match="edge_index: expected indices from 0 to 29"):
        call(kind, few[:30], edges, weight)(ours)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("sides", ["both", "sources", "Adjacency"])
def test_degrees_of_destinations(sides: str, flow: str, device: str) -> None:
    """Of MFConv, whose weights depend on them: bipartite graphs, structures, and hooks on its layers."""
    original, ours = Case("MFConv", ((6, 5), 4), {"flow": flow}).pair(torch.float64, device)
    edges = random_graph(40, 15, 120, device=device)
    x = torch.randn(40, 6, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(15, 5, dtype=torch.float64, device=device, requires_grad=True)
    if flow == "target_to_source":
        original, ours = Case("MFConv", ((6, 6), 4), {"flow": flow}).pair(torch.float64, device)
        edges, y = random_graph(device=device), x
    pair, size = (x, None if sides == "sources" else y), (40, y.size(0))
    graph: Any = edges
    if sides == "Adjacency" and flow == "source_to_target":
        graph = Adjacency.from_coo(edges[1], edges[0], (15, 40))
    kept: list[Tensor] = []
    ours.lins_l[2].register_forward_hook(lambda *rest: kept.append(rest[2].detach().clone()))
    inputs = [x] if sides == "sources" or y is x else [x, y]
    same(
        original,
        ours,
        lambda layer: layer(pair, edges, size),
        inputs,
        fast_call=lambda layer: layer(pair, graph, size),
        tolerance=1e-10,
    )
    assert kept


@pytest.mark.parametrize("lambda_max", [1.7, "per graph"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_eigenvalues_of_chebyshev(lambda_max: Any, flow: str, device: str, kernels_only: None) -> None:
    case = Case("ChebConv", (6, 4, 3), {"flow": flow})
    original, ours = case.pair(torch.float64, device)
    batch = (torch.arange(40, device=device) >= 20).long()
    edges = torch.cat(
        [random_graph(20, 20, 80, device=device), random_graph(20, 20, 80, device=device) + 20], 1
    )
    if lambda_max == "per graph":
        lambda_max = torch.tensor([1.5, 1.9], dtype=torch.float64, device=device)
    x = torch.randn(40, 6, dtype=torch.float64, device=device, requires_grad=True)
    same(original, ours, lambda layer: layer(x, edges, None, batch, lambda_max), [x], tolerance=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["labels", "soft", "masked", "post"])
def test_label_propagation(name: str, weighted: bool, device: str, kernels_only: None) -> None:
    original, ours = pyg.LabelPropagation(3, 0.7), fastsparse_pyg.FastLabelPropagation(3, 0.7)
    edges = random_graph(device=device)
    weight = torch.rand(edges.size(1), device=device) if weighted else None
    y = torch.randint(0, 4, (40,), device=device) if name != "soft" else torch.rand(40, 4, device=device)
    mask = torch.arange(40, device=device) % 3 == 0 if name == "masked" else None
    post = (lambda out: out * 0.5) if name == "post" else None
    close(ours(y, edges, mask, weight, post), original(y, edges, mask, weight, post))


def test_light_gcn(device: str, kernels_only: None) -> None:
    original = pyg.LightGCN(40, 8, 3).to(device)
    ours = fastsparse_pyg.FastLightGCN(40, 8, 3).to(device)
    edges = random_graph(device=device)
    same(original, ours, lambda model: model(edges, edges[:, :20]), [])
    assert fastsparse_pyg.cache_info().misses == 1


@pytest.mark.parametrize("training", [True, False])
def test_dropped_edges_of_appnp(training: bool, device: str, kernels_only: None) -> None:
    """The mean over many masks is the result without any; without training nothing is dropped."""
    layer = fastsparse_pyg.FastAPPNP(1, 0.1, dropout=0.5).to(device).train(training)
    edges, x = random_graph(device=device), torch.rand(40, 200, device=device)
    runs = torch.stack([layer(x, edges) for _ in range(60)])
    assert (runs.std(0).max() > 0.01) == training
    close(runs.mean(0), copy.copy(layer).eval()(x, edges), 0.3)


@pytest.mark.parametrize("name", ["SGConv", "SSGConv"])
def test_cached_products_are_pygs(name: str) -> None:
    """What is cached is the original's attribute: restored layers go on with it."""
    options = {"alpha": 0.1} if name == "SSGConv" else {}
    layer = getattr(fastsparse_pyg, f"Fast{name}")(6, 4, K=2, cached=True, **options)
    x, edges = torch.randn(40, 6), random_graph()
    expected = layer(x, edges)
    fastsparse_pyg.restore(layer)
    close(layer(x, edges[:, :5]), expected)


def test_no_values_per_edge_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The normalisation scales rows inside the kernel."""
    from fastsparse_pyg.nn import base

    values, product = [], base.spmm

    def watched(adj: Any, x: Tensor, value: Any, *rest: Any, **more: Any) -> Tensor:
        values.append(value)
        return product(adj, x, value, *rest, **more)

    monkeypatch.setattr(base, "spmm", watched)
    x, edges = torch.randn(40, 6), random_graph()
    fastsparse_pyg.FastSGConv(6, 4, K=3)(x, edges)
    fastsparse_pyg.FastAPPNP(2, 0.1)(x, edges)
    assert values == [None] * 5


@pytest.mark.parametrize("name", ["SGConv", "APPNP", "LGConv", "GraphConv"])
def test_compiled_with_an_adjacency(name: str) -> None:
    edges, x = random_graph(), torch.randn(40, 6)
    case = Case(name, {"APPNP": (2, 0.1), "LGConv": ()}.get(name, (6, 4)), {})
    _, layer = case.pair(torch.float32, "cpu")
    loops = name in ("SGConv", "APPNP")
    adj = fastsparse_pyg.prepare(edges, 40, add_self_loops=loops)
    expected = layer(x, edges)
    torch._dynamo.reset()
    close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, adj), expected)


def test_sixteen_bits(device: str) -> None:
    edges = random_graph(device=device)
    for name in ("SGConv", "TAGConv", "GraphConv", "ChebConv"):
        case = Case(name, (6, 4, 2) if name == "ChebConv" else (6, 4), {})
        original, ours = case.pair(torch.float32, device)
        ours.load_state_dict(original.state_dict())
        x = torch.randn(40, 6, device=device)
        got = ours.to(torch.bfloat16)(x.bfloat16(), edges)
        assert got.dtype == torch.bfloat16
        close(got.float(), original(x, edges), 0.05)
        assert gradients(got, list(ours.parameters()))[0] is not None


def test_adjacency_of_another_graph() -> None:
    adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), (5, 5))
    with pytest.raises(ValueError, match="expected 5 source and 5 destination rows"):
        fastsparse_pyg.FastSGConv(6, 4)(torch.randn(40, 6), adj)
