"""NaN and infinities in rows that no edge reads reach no gradient that DGL keeps finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from dgl_cases import dgl
from silent_rows import NUM_NODES, SPECIAL, edges_of_some, features_with, goes_no_further
from torch import Tensor, nn

from fastsparse_dgl.nn import DROP_INS

layers = dgl.nn.pytorch
WIDE, NARROW, EDGE_WIDTH = 12, 4, 3
PNA = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "delta": 2.5}
ZERO = {"allow_zero_in_degree": True}


class Case(NamedTuple):
    name: str
    arguments: Callable[[int, int], tuple[Any, ...]] = lambda i, o: (i, o)
    options: Mapping[str, Any] = MappingProxyType({})
    edge_width: int = 0
    weighted: bool = False
    same_width: bool = False

    @property
    def id(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        given = ",".join(each for each in self.arguments(1, 2) if isinstance(each, str))
        return f"{self.name}({given}{options})" + ("-weighted" if self.weighted else "")


def network(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out))


def sage(kind: str, **options: Any) -> Case:
    return Case("SAGEConv", lambda i, o: (i, o, kind), **options)


CASES = [
    Case("AGNNConv", lambda i, o: (), ZERO),
    Case("DotGatConv", lambda i, o: (i, o, 2), ZERO),
    Case("EGATConv", lambda i, o: (i, EDGE_WIDTH, o, o, 2), edge_width=EDGE_WIDTH),
    Case("EdgeGATConv", lambda i, o: (i, EDGE_WIDTH, o, 2), ZERO, edge_width=EDGE_WIDTH),
    Case("GATConv", lambda i, o: (i, o, 2), ZERO),
    Case("GATv2Conv", lambda i, o: (i, o, 2), ZERO),
    Case("GINConv", lambda i, o: (network(i, o), "sum"), {"learn_eps": True}),
    Case("GINConv", lambda i, o: (network(i, o), "max")),
    Case("GINConv", lambda i, o: (network(i, o), "mean")),
    Case("GINEConv", lambda i, o: (network(i, o),), edge_width=WIDE, same_width=True),
    Case(
        "GatedGCNConv", lambda i, o: (i, EDGE_WIDTH, o), {"batch_norm": False, "residual": False}, EDGE_WIDTH
    ),
    *(Case("GraphConv", options={"norm": norm} | ZERO) for norm in ("none", "both", "right", "left")),
    Case("GraphConv", options=ZERO, weighted=True),
    Case("PNAConv", options=PNA),
    Case("PNAConv", options=PNA | {"edge_feat_size": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    *(sage(kind) for kind in ("mean", "gcn", "pool")),
    sage("mean", weighted=True),
    sage("gcn", weighted=True),
]
WIDTHS = [(WIDE, NARROW), (NARROW, WIDE)]


def test_every_drop_in_has_a_case() -> None:
    named = {each.__name__ for each in DROP_INS} - {"HeteroGraphConv"}  # which has layers of others
    assert named <= {case.name for case in CASES}


def pair(case: Case, widths: tuple[int, int]) -> tuple[nn.Module, nn.Module]:
    """DGL's layer and the drop-in, with the same parameters."""
    original = getattr(layers, case.name, None)
    if original not in DROP_INS:
        pytest.skip("this DGL has no such layer")
    torch.manual_seed(0)
    theirs = original(*case.arguments(*widths), **case.options).double()
    ours = DROP_INS[original](*case.arguments(*widths), **case.options).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def results(layer: nn.Module, case: Case, graph: Any, x: Any) -> dict[str, Tensor | None]:
    """Outputs and all gradients by name."""
    xs = [x] if isinstance(x, Tensor) else list(x)
    xs = [each.clone().requires_grad_() for each in xs]
    generator = torch.Generator().manual_seed(2)
    rest: list[Tensor] = []
    if case.edge_width:
        rest = [torch.randn(graph.num_edges(), case.edge_width, generator=generator, dtype=torch.float64)]
    elif case.weighted:
        rest = [torch.rand(graph.num_edges(), generator=generator, dtype=torch.float64)]
    for each in rest:
        each.requires_grad_()
    options = {"edge_weight": rest[0]} if case.weighted else {}
    given = xs[0] if isinstance(x, Tensor) else tuple(xs)
    out = layer(graph, given, *(rest if case.edge_width else []), **options)
    outs = out if isinstance(out, tuple) else (out,)
    named = {
        **{f"x {at}": each for at, each in enumerate(xs)},
        **{f"edges {at}": each for at, each in enumerate(rest)},
        **{f"parameter {name}": each for name, each in layer.named_parameters() if each.requires_grad},
    }
    upstream = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in outs]
    grads = torch.autograd.grad(outs, list(named.values()), upstream, allow_unused=True)
    return {"out": outs[0].detach(), **dict(zip(named, grads, strict=True))}


def compare(case: Case, widths: tuple[int, int], graph: Any, x: Any, special: float) -> None:
    theirs, ours = pair(case, widths)
    expected, got = (results(layer, case, graph, x) for layer in (theirs, ours))
    for name, value in got.items():
        goes_no_further(name, value, expected[name], special)


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("widths", WIDTHS, ids=["narrower", "wider"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows_that_no_edge_reads(case: Case, widths: tuple[int, int], special: float, where: str) -> None:
    if case.same_width:
        widths = (WIDE, widths[1])
    src, dst = edges_of_some()
    if case.name == "EGATConv":  # which wants every node to receive
        src, dst = torch.cat([src, torch.arange(20, 34)]), torch.cat([dst, torch.arange(14)])
    graph = dgl.graph((src, dst), num_nodes=NUM_NODES)
    compare(case, widths, graph, features_with(special, widths[0], where), special)


BIPARTITE = [
    *(Case("SAGEConv", lambda i, o, kind=kind: ((i, i), o, kind)) for kind in ("mean", "gcn", "pool")),
    *(Case("GraphConv", options={"norm": norm} | ZERO) for norm in ("none", "both")),
    Case("GATConv", lambda i, o: ((i, i), o, 2), ZERO),
]


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("widths", WIDTHS, ids=["narrower", "wider"])
@pytest.mark.parametrize("case", BIPARTITE, ids=lambda case: case.id)
def test_sources_that_no_edge_reads(case: Case, widths: tuple[int, int], special: float, where: str) -> None:
    """Their features are not those of the destinations, which are all finite."""
    nodes = {"user": NUM_NODES, "item": NUM_NODES}
    graph = dgl.heterograph({("user", "rates", "item"): edges_of_some()}, num_nodes_dict=nodes)
    x = features_with(special, widths[0], where), features_with(0.0, widths[0], where, seed=4)
    compare(case, widths, graph, x, special)
