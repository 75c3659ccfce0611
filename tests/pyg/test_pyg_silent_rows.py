"""NaN and infinities in rows that no edge reads reach no gradient that the original keeps finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from silent_rows import SPECIAL, edges_of_some, features_with, goes_no_further
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.models import LabelPropagation

from fastsparse_pyg import accelerate
from fastsparse_pyg.nn import DROP_INS, FastRGATConv

WIDE, NARROW, EDGE_WIDTH = 12, 4, 3
RELATION = ("a", "to", "a")
DEGREES = torch.tensor([0, 3, 9, 4, 4])


def network(width_in: int, width_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width_in, width_out), nn.ReLU(), nn.Linear(width_out, width_out))


def kinds(edges: Tensor) -> Tensor:
    return torch.arange(edges.size(1)) % 3


class Case(NamedTuple):
    original: Any
    arguments: Callable[[int, int], tuple[Any, ...]] = lambda i, o: (i, o)
    options: Mapping[str, Any] = MappingProxyType({})
    edge_width: int = 0
    weighted: bool = False
    call: Callable[[Any, Tensor, Tensor], Any] | None = None

    @property
    def id(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items() if key not in ("deg",))
        return f"{self.original.__name__}({options})" + ("-weighted" if self.weighted else "")


def typed(conv: Any, x: Tensor, edges: Tensor) -> Tensor:
    return conv(x, edges, kinds(edges))


def hypergraph(conv: Any, x: Tensor, edges: Tensor) -> Tensor:
    return conv(x, torch.stack([edges[0], edges[1] % 9]))


PNA = {"aggregators": ["mean", "std", "max"], "scalers": ["identity", "amplification"], "deg": DEGREES}
CASES = [
    Case(pyg.AGNNConv, lambda i, o: ()),
    Case(pyg.AGNNConv, lambda i, o: (), {"add_self_loops": False}),
    Case(pyg.APPNP, lambda i, o: (3, 0.1)),
    Case(pyg.APPNP, lambda i, o: (3, 0.1), {"add_self_loops": False}, weighted=True),
    Case(pyg.ARMAConv),
    Case(pyg.ChebConv, lambda i, o: (i, o, 3)),
    Case(pyg.ChebConv, lambda i, o: (i, o, 2), {"normalization": None}, weighted=True),
    Case(pyg.ClusterGCNConv),
    Case(pyg.GATConv),
    Case(pyg.GATConv, options={"add_self_loops": False}),
    Case(pyg.GATConv, options={"add_self_loops": False, "edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.GATv2Conv, options={"add_self_loops": False}),
    Case(pyg.GATv2Conv, options={"add_self_loops": False, "edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.GCN2Conv, lambda i, o: (i, 0.1), {"add_self_loops": False}, call=lambda c, x, e: c(x, x, e)),
    Case(
        pyg.GCN2Conv,
        lambda i, o: (i, 0.1, 0.5, 2),
        {"shared_weights": False},
        call=lambda c, x, e: c(x, x, e),
    ),
    Case(pyg.GCNConv),
    Case(pyg.GCNConv, options={"add_self_loops": False}),
    Case(pyg.GCNConv, options={"add_self_loops": False}, weighted=True),
    Case(pyg.GCNConv, options={"normalize": False}),
    Case(pyg.GINConv, lambda i, o: (network(i, o),), {"train_eps": True}),
    Case(pyg.GINConv, lambda i, o: (network(i, o),)),
    Case(pyg.GINEConv, lambda i, o: (network(i, o),), {"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.ResGatedGraphConv),
    Case(pyg.ResGatedGraphConv, options={"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.PNAConv, options=PNA),
    Case(pyg.PNAConv, options=PNA | {"towers": 2}),
    Case(pyg.PNAConv, options=PNA | {"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.PNAConv, options=PNA | {"pre_layers": 2}),
    Case(pyg.GatedGraphConv, lambda i, o: (i, 2)),
    Case(pyg.GraphConv),
    Case(pyg.GraphConv, options={"aggr": "mean"}),
    Case(pyg.GraphConv, options={"aggr": "max"}),
    Case(pyg.GraphConv, weighted=True),
    Case(pyg.GraphConv, options={"aggr": "mean"}, weighted=True),
    Case(pyg.HypergraphConv, call=hypergraph),
    Case(pyg.HypergraphConv, options={"use_attention": False, "bias": False}, call=hypergraph),
    Case(pyg.LGConv, lambda i, o: ()),
    Case(pyg.MFConv),
    Case(pyg.MixHopConv),
    Case(pyg.MixHopConv, options={"add_self_loops": False}, weighted=True),
    Case(LabelPropagation, lambda i, o: (2, 0.9)),
    Case(
        pyg.HGTConv,
        lambda i, o: (i, o, (["a"], [RELATION])),
        call=lambda conv, x, edges: conv({"a": x}, {RELATION: edges})["a"],
    ),
    Case(pyg.RGATConv, lambda i, o: (i, o, 3), call=typed),
    Case(pyg.RGATConv, lambda i, o: (i, o, 3), {"attention_mechanism": "within-relation"}, call=typed),
    Case(
        pyg.RGATConv, lambda i, o: (i, o, 3), {"attention_mode": "multiplicative-self-attention"}, call=typed
    ),
    Case(pyg.FastRGCNConv, lambda i, o: (i, o, 3), call=typed),
    Case(pyg.FastRGCNConv, lambda i, o: (i, o, 3), {"root_weight": False}, call=typed),
    Case(pyg.RGCNConv, lambda i, o: (i, o, 3), call=typed),
    Case(pyg.RGCNConv, lambda i, o: (i, o, 3), {"root_weight": False, "num_bases": 2}, call=typed),
    Case(pyg.RGCNConv, lambda i, o: (i, o, 3), {"aggr": "max"}, call=typed),
    Case(pyg.SAGEConv),
    Case(pyg.SAGEConv, options={"aggr": "sum", "root_weight": False}),
    Case(pyg.SAGEConv, options={"root_weight": False, "bias": False}),
    Case(pyg.SAGEConv, options={"aggr": "max"}),
    Case(pyg.SAGEConv, options={"project": True}),
    Case(pyg.SAGEConv, options={"project": True, "root_weight": False}),
    Case(pyg.SAGEConv, options={"flow": "target_to_source", "root_weight": False}),
    Case(pyg.SGConv, options={"K": 2}),
    Case(pyg.SGConv, options={"K": 1, "add_self_loops": False}),
    Case(pyg.SGConv, options={"K": 2, "add_self_loops": False}),
    Case(pyg.SGConv, options={"K": 2, "add_self_loops": False}, weighted=True),
    Case(pyg.SSGConv, options={"alpha": 0.0, "K": 2, "add_self_loops": False}),
    Case(pyg.SSGConv, options={"alpha": 0.1, "K": 2, "add_self_loops": False}),
    Case(pyg.TAGConv),
    Case(pyg.TAGConv, weighted=True),
    Case(pyg.TransformerConv),
    Case(pyg.TransformerConv, options={"edge_dim": EDGE_WIDTH, "root_weight": False}, edge_width=EDGE_WIDTH),
]


def results(layer: nn.Module, case: Case, x: Any, edges: Tensor) -> dict[str, Tensor | None]:
    """The output and all gradients by name."""
    xs = (
        [x.clone().requires_grad_()]
        if isinstance(x, Tensor)
        else [each.clone().requires_grad_() for each in x]
    )
    generator = torch.Generator().manual_seed(2)
    rest: list[Tensor] = []
    if case.edge_width:
        rest = [torch.randn(edges.size(1), case.edge_width, generator=generator, dtype=torch.float64)]
    elif case.weighted:
        rest = [torch.rand(edges.size(1), generator=generator, dtype=torch.float64)]
    for each in rest:
        each.requires_grad_()
    given: Any = xs[0] if isinstance(x, Tensor) else tuple(xs)
    out = layer(given, edges, *rest) if case.call is None else case.call(layer, given, edges)
    if not out.requires_grad:
        return {"out": out}
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    named = {
        **{f"x {at}": each for at, each in enumerate(xs)},
        **{f"edges {at}": each for at, each in enumerate(rest)},
        **{f"parameter {name}": each for name, each in layer.named_parameters() if each.requires_grad},
    }
    grads = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True)
    return {"out": out.detach(), **dict(zip(named, grads, strict=True))}


def compare(case: Case, widths: tuple[int, int], x: Any, edges: Tensor, special: float) -> None:
    torch.manual_seed(0)
    original = case.original(*case.arguments(*widths), **case.options).double()
    layer = DROP_INS[case.original](*case.arguments(*widths), **case.options).double()
    layer.load_state_dict(original.state_dict())
    expected, got = results(original, case, x, edges), results(layer, case, x, edges)
    for name, value in got.items():
        goes_no_further(name, value, expected[name], special)


def test_every_drop_in_has_a_case():
    assert {case.original for case in CASES} == set(DROP_INS)


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("widths", [(WIDE, NARROW), (NARROW, WIDE)], ids=["narrower", "wider"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows_that_no_edge_reads(case, widths, where, special):
    compare(case, widths, features_with(special, widths[0], where), torch.stack(edges_of_some()), special)


@pytest.mark.parametrize("options", [{}, {"attention_mechanism": "within-relation"}], ids=str)
def test_maps_of_all_nodes_and_relations(options, monkeypatch):
    """What RGAT computes of small graphs on a GPU."""
    monkeypatch.setattr(FastRGATConv, "_takes_every_pair", lambda *_: True)
    case = Case(pyg.RGATConv, lambda i, o: (i, o, 3), options, call=typed)
    for special, where in SPECIAL:
        x = features_with(special, WIDE, where)
        compare(case, (WIDE, NARROW), x, torch.stack(edges_of_some()), special)


BIPARTITE = [
    Case(pyg.SAGEConv, lambda i, o: ((i, i), o)),
    Case(pyg.SAGEConv, lambda i, o: ((i, i), o), {"aggr": "sum", "root_weight": False}),
    Case(pyg.SAGEConv, lambda i, o: ((i, i), o), {"project": True}),
    Case(pyg.GraphConv, lambda i, o: ((i, i), o)),
    Case(pyg.GraphConv, lambda i, o: ((i, i), o), {"aggr": "mean"}, weighted=True),
    Case(pyg.MFConv, lambda i, o: ((i, i), o)),
    Case(pyg.GATConv, lambda i, o: ((i, i), o), {"add_self_loops": False}),
    Case(pyg.ResGatedGraphConv, lambda i, o: ((i, i), o), {"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
]


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("case", BIPARTITE, ids=lambda case: case.id)
def test_sources_that_no_edge_reads(case, where, special):
    """Their features are not those of the destinations, which are all finite."""
    x = features_with(special, WIDE, where), features_with(0.0, WIDE, where, seed=4)
    compare(case, (WIDE, NARROW), x, torch.stack(edges_of_some()), special)


@pytest.mark.parametrize("root_weight", [False, True])
def test_both_directions(root_weight):
    src, dst = edges_of_some()
    x = features_with(math.nan, WIDE, "isolated")
    original = pyg.DirGNNConv(pyg.SAGEConv(WIDE, NARROW, root_weight=root_weight)).double()
    layer = copy.deepcopy(original)
    accelerate(layer)
    case = Case(pyg.DirGNNConv)
    expected, got = (results(each, case, x, torch.stack([src, dst])) for each in (original, layer))
    for name, value in got.items():
        goes_no_further(name, value, expected[name], math.nan)


def test_the_smallest_case():
    """One source with an edge and one without."""
    x = torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), torch.ones(1, 2)
    layer = DROP_INS[pyg.SAGEConv]((2, 2), 1)
    layer(x, torch.tensor([[0], [0]])).sum().backward()
    assert layer.lin_l.weight.grad.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives(weighted):
    """The gradients of a penalty on a weight's gradient."""
    src, dst = edges_of_some()
    x = features_with(math.nan, WIDE, "isolated"), features_with(0.0, WIDE, seed=4)
    weight = torch.rand(len(src), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = []
    for conv in (pyg.GraphConv, DROP_INS[pyg.GraphConv]):
        torch.manual_seed(0)
        layer = conv((WIDE, WIDE), NARROW).double()
        out = layer(x, torch.stack([src, dst]), weight if weighted else None)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), layer.lin_rel.weight, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.pow(2).sum(), list(layer.parameters()))))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("original", [pyg.SAGEConv, pyg.GraphConv, pyg.GCNConv])
def test_a_weight_of_zero_does_not_hide_nan(original, special):
    """An edge that exists is read: 0 times NaN is NaN, as in the original."""
    src, dst = edges_of_some()
    x = features_with(special, WIDE)
    x[src[0]] = special
    weight = torch.ones(len(src), dtype=torch.float64)
    weight[src == src[0]] = 0
    given = () if original is pyg.SAGEConv else (weight,)
    torch.manual_seed(0)
    theirs = original(WIDE, NARROW).double()
    ours = DROP_INS[original](WIDE, NARROW).double()
    ours.load_state_dict(theirs.state_dict())
    expected, got = (layer(x, torch.stack([src, dst]), *given) for layer in (theirs, ours))
    assert torch.equal(got.isnan(), expected.isnan())
