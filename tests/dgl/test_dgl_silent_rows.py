"""NaN and infinities in rows that no edge reads reach no gradient that DGL keeps finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dgl_cases import dgl
from dgl_layer_cases import CASES, ZERO, Case, each_case
from silent_rows import NUM_NODES, SPECIAL, edges_of_some, features_with, goes_no_further
from torch import Tensor, nn

WIDE, NARROW = 12, 4
WIDTHS = [(WIDE, NARROW), (NARROW, WIDE)]


def results(layer: nn.Module, case: Case, graph: Any, x: Any) -> dict[str, Tensor | None]:
    """Outputs and all gradients by name."""
    xs = [each.clone().requires_grad_() for each in ([x] if isinstance(x, Tensor) else x)]
    edges = case.rest(graph, xs[0].size(1), xs[0].dtype)
    rest = [each.detach().to(xs[0].device).requires_grad_() for each in edges]
    out = case.run(layer, graph, xs[0] if isinstance(x, Tensor) else tuple(xs), *rest)
    outs = out if isinstance(out, tuple) else (out,)
    named = {
        **{f"x {at}": each for at, each in enumerate(xs)},
        **{f"edges {at}": each for at, each in enumerate(rest)},
        **{f"parameter {name}": each for name, each in layer.named_parameters() if each.requires_grad},
    }
    generator = torch.Generator().manual_seed(3)
    upstream = [
        torch.randn(each.shape, generator=generator, dtype=each.dtype).to(each.device) for each in outs
    ]
    grads = torch.autograd.grad(outs, list(named.values()), upstream, allow_unused=True)
    return {"out": outs[0].detach(), **dict(zip(named, grads, strict=True))}


def graph_of(case: Case) -> Any:
    src, dst = edges_of_some()
    if case.name == "EGATConv":  # EGATConv requires an edge into every node
        src, dst = torch.cat([src, torch.arange(20, 34)]), torch.cat([dst, torch.arange(14)])
    return dgl.graph((src, dst), num_nodes=NUM_NODES)


def compare(case: Case, widths: tuple[int, int], graph: Any, x: Any, special: float) -> None:
    torch.manual_seed(0)
    expected, got = (results(layer, case, graph, x) for layer in case.pair(*widths, torch.float64))
    for name, value in got.items():
        goes_no_further(name, value, expected[name], special)


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("widths", WIDTHS, ids=["narrower", "wider"])
@each_case(CASES)
def test_rows_that_no_edge_reads(case: Case, widths: tuple[int, int], special: float, where: str) -> None:
    compare(case, widths, graph_of(case), features_with(special, widths[0], where), special)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["isolated", "silent"])
@each_case(CASES)
def test_rows_that_no_edge_reads_on_a_gpu(case: Case, where: str) -> None:
    """In float32, which all kernels take, against DGL on the CPU; other tests compare the numbers."""
    graph, x = graph_of(case), features_with(math.nan, WIDE, where).float()
    torch.manual_seed(0)
    original, layer = case.pair(WIDE, NARROW, torch.float32)
    expected, got = results(original, case, graph, x), results(layer.cuda(), case, graph, x.cuda())
    for name, value in got.items():
        right = expected[name]
        if value is None or right is None:
            assert value is right, name
        else:
            assert not (right.isfinite() & ~value.isfinite().cpu()).any(), name


BIPARTITE = [
    *(Case("SAGEConv", lambda i, o, kind=kind: ((i, i), o, kind)) for kind in ("mean", "gcn", "pool")),
    *(Case("GraphConv", options={"norm": norm} | ZERO) for norm in ("none", "both")),
    Case("GATConv", lambda i, o: ((i, i), o, 2), ZERO),
]


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("widths", WIDTHS, ids=["narrower", "wider"])
@each_case(BIPARTITE)
def test_sources_that_no_edge_reads(case: Case, widths: tuple[int, int], special: float, where: str) -> None:
    """Their features are not those of the destinations, which are all finite."""
    nodes = {"user": NUM_NODES, "item": NUM_NODES}
    graph = dgl.heterograph({("user", "rates", "item"): edges_of_some()}, num_nodes_dict=nodes)
    x = features_with(special, widths[0], where), features_with(0.0, widths[0], where, seed=4)
    compare(case, widths, graph, x, special)
