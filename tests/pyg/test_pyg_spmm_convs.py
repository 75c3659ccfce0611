"""The layers that multiply by the graph's matrix against PyG's own: output and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pyg_cases import close, gradients, random_graph, same
from torch import Tensor, nn
from torch_geometric import nn as pyg

import fastsparse_pyg
from fastsparse_core import Adjacency


def made(
    name: str, *arguments: Any, dtype: torch.dtype = torch.float64, device: str = "cpu", **options: Any
) -> tuple[nn.Module, nn.Module]:
    """PyG's layer, and ours on the same parameters."""
    original, ours = (
        getattr(package, prefix + name)(*arguments, **options).to(device, dtype)
        for package, prefix in ((pyg, ""), (fastsparse_pyg, "Fast"))
    )
    ours.load_state_dict(original.state_dict())
    return original, ours


def call(name: str, x: Tensor, edges: Any, weight: Tensor | None) -> Callable[[nn.Module], Tensor]:
    """The layer's call."""
    more = () if weight is None else (weight,)
    if name == "GCN2Conv":
        return lambda layer: layer(x, x.flip(1), edges, *more)
    return lambda layer: layer(x, edges, *more)


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
    original, ours = made("HypergraphConv", 6, 4, device=device, **options, use_attention=attention)
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
    """Empty hyperedges between others and after the last one, with and without rows of weights for these."""
    original, ours = made("HypergraphConv", 6, 4, device=device, use_attention=attention)
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
    """Nodes that came after the cache was filled have no edges; then the first nodes are used again."""
    kind, _, options = name.partition(", ")
    loops = {"add_self_loops": False} if options == "no loops" else {}
    original, ours = made(kind, *CACHING[name], device=device, cached=True, **loops)
    edges = random_graph(device=device)
    weight = torch.rand(edges.size(1), dtype=torch.float64, device=device) + 0.1 if weighted else None
    few = torch.randn(40, 6, dtype=torch.float64, device=device)
    more = torch.randn(47, 6, dtype=torch.float64, device=device, requires_grad=True)
    for x in (few, more, more, few):
        close(call(kind, x, edges, weight)(ours), call(kind, x, edges, weight)(original), 1e-10)
    same(original, ours, call(kind, more, edges, weight), [more], tolerance=1e-10)
    with pytest.raises(IndexError, match="edge_index: expected indices from 0 to 29"):
        call(kind, few[:30], edges, weight)(ours)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("sides", ["both", "sources", "Adjacency"])
def test_degrees_of_destinations(sides: str, flow: str, device: str) -> None:
    """Degrees in MFConv, whose weights depend on them: bipartite graphs, structures, and hooks on its
    layers."""
    original, ours = made("MFConv", (6, 5), 4, device=device, flow=flow)
    edges = random_graph(40, 15, 120, device=device)
    x = torch.randn(40, 6, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(15, 5, dtype=torch.float64, device=device, requires_grad=True)
    if flow == "target_to_source":
        original, ours = made("MFConv", (6, 6), 4, device=device, flow=flow)
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
    original, ours = made("ChebConv", 6, 4, 3, device=device, flow=flow)
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
    from fastsparse_core.fused import propagation

    values, product = [], propagation.launch_spmm

    def watched(adj: Any, x: Tensor, value: Any, *rest: Any) -> Tensor:
        values.append(value)
        return product(adj, x, value, *rest)

    monkeypatch.setattr(propagation, "launch_spmm", watched)
    x, edges = torch.randn(40, 6), random_graph()
    fastsparse_pyg.FastSGConv(6, 4, K=3)(x, edges)
    fastsparse_pyg.FastAPPNP(2, 0.1)(x, edges)
    assert values == [None] * 5


@pytest.mark.parametrize("name", ["SGConv", "APPNP", "LGConv", "GraphConv"])
def test_compiled_with_an_adjacency(name: str) -> None:
    edges, x = random_graph(), torch.randn(40, 6)
    _, layer = made(name, *{"APPNP": (2, 0.1), "LGConv": ()}.get(name, (6, 4)), dtype=torch.float32)
    loops = name in ("SGConv", "APPNP")
    adj = fastsparse_pyg.prepare(edges, 40, add_self_loops=loops)
    expected = layer(x, edges)
    torch._dynamo.reset()
    close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, adj), expected)


def test_sixteen_bits(device: str) -> None:
    edges = random_graph(device=device)
    for name in ("SGConv", "TAGConv", "GraphConv", "ChebConv"):
        more = (2,) if name == "ChebConv" else ()
        original, ours = made(name, 6, 4, *more, dtype=torch.float32, device=device)
        x = torch.randn(40, 6, device=device)
        got = ours.to(torch.bfloat16)(x.bfloat16(), edges)
        assert got.dtype == torch.bfloat16
        close(got.float(), original(x, edges), 0.05)
        assert gradients(got, list(ours.parameters()))[0] is not None


def test_adjacency_of_another_graph() -> None:
    adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), (5, 5))
    with pytest.raises(ValueError, match="expected 5 source and 5 destination rows"):
        fastsparse_pyg.FastSGConv(6, 4)(torch.randn(40, 6), adj)


@pytest.mark.parametrize("name", ["SGConv", "SSGConv"])
@pytest.mark.usefixtures("kernels_only")
def test_what_was_kept_under_autocast_serves_without(device, name):
    edges = random_graph(device=device)
    x = torch.randn(40, 16, device=device)
    options = {"K": 2, "cached": True} | ({"alpha": 0.1} if name == "SSGConv" else {})
    layers = made(name, 16, 16, dtype=torch.float32, device=device, **options)
    with torch.autocast(device, dtype=torch.bfloat16):
        close(layers[1](x, edges), layers[0](x, edges), 1e-2)
    close(layers[1](x, edges), layers[0](x, edges))


def test_appnp_under_autocast_is_rounded_in_between_alone(device):
    edges = random_graph(device=device)
    x = torch.randn(40, 16, device=device, requires_grad=True)
    layers = made("APPNP", 3, 0.1, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected, found = (layer(x, edges) for layer in layers)
    close(found, expected, 2e-2)
    for layer, out in zip(layers, (expected, found), strict=True):
        assert layer is layers[0] or not torch.equal(out, out.bfloat16().float())
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, found)]
    close(gradients[1], gradients[0], 2e-2)
