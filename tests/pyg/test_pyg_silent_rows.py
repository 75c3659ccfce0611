"""NaN and infinities in rows that no edge reads reach no gradient that the original keeps finite."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pyg_layer_cases import CASES, Case, each_case, first
from silent_rows import SPECIAL, edges_of_some, features_with, goes_no_further
from torch import Tensor, nn
from torch_geometric import nn as pyg

from fastsparse_pyg import accelerate
from fastsparse_pyg.nn import DROP_INS, FastRGATConv

WIDE, NARROW = 12, 4
#: Options that make no difference for nodes without edges.
LEFT_OUT = {
    "aggr": ("add", "min"),
    "heads": (3,),
    "post_layers": (2,),
    "improved": (True,),
}


def distinct() -> list[Case]:
    """Every layer with every option that matters here; only one kind of weights, and no fill values."""
    found: dict[str, Case] = {}
    for case in CASES:
        left_out = any(case.options.get(name) in values for name, values in LEFT_OUT.items())
        is_filled = case.options.get("fill_value", "mean") != "mean"
        if case.edges not in ("constant", "column") and not left_out and not is_filled:
            found.setdefault(case._replace(widths=(0, 0)).id, case)
    return list(found.values())


def results(layer: nn.Module, case: Case, x: Any, edges: Tensor) -> dict[str, Tensor | None]:
    """The output and all gradients by name."""
    xs = [each.clone().requires_grad_() for each in ([x] if isinstance(x, Tensor) else x)]
    torch.manual_seed(2)
    rest = case.rest(edges, xs[0].dtype)
    out = case.run(layer, xs[0] if isinstance(x, Tensor) else tuple(xs), edges, *rest)
    if not out.requires_grad:
        return {"out": out}
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    upstream = upstream.to(out.device)
    named = {
        **{f"x {at}": each for at, each in enumerate(xs)},
        **{f"edges {at}": each for at, each in enumerate(rest)},
        **{f"parameter {name}": each for name, each in layer.named_parameters() if each.requires_grad},
    }
    named = {name: each for name, each in named.items() if each.requires_grad}
    grads = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True)
    return {"out": out.detach(), **dict(zip(named, grads, strict=True))}


def compare(case: Case, widths: tuple[int, int], x: Any, edges: Tensor, special: float) -> None:
    torch.manual_seed(0)
    layers = case._replace(widths=widths).pair(dtype=torch.float64)
    expected, got = (results(layer, case._replace(widths=widths), x, edges) for layer in layers)
    for name, value in got.items():
        goes_no_further(name, value, expected[name], special)


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@pytest.mark.parametrize("widths", [(WIDE, NARROW), (NARROW, WIDE)], ids=["narrower", "wider"])
@each_case(distinct())
def test_rows_that_no_edge_reads(case, widths, where, special):
    compare(case, widths, features_with(special, widths[0], where), torch.stack(edges_of_some()), special)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["isolated", "silent"])
@each_case(distinct())
def test_rows_that_no_edge_reads_on_a_gpu(case, where):
    """In float32, which all kernels take; other tests compare the numbers."""
    case = case._replace(widths=(WIDE, NARROW))
    x = features_with(math.nan, WIDE, where).float().cuda()
    torch.manual_seed(0)
    expected, got = (
        results(each, case, x, torch.stack(edges_of_some()).cuda()) for each in case.pair("cuda")
    )
    for name, value in got.items():
        right = expected[name]
        if value is None or right is None:
            assert value is right, name
        else:
            assert not (right.isfinite() & ~value.isfinite()).any(), name


@pytest.mark.parametrize("options", [{}, {"attention_mechanism": "within-relation"}], ids=str)
def test_maps_of_all_nodes_and_relations(options, monkeypatch):
    """What RGAT computes of small graphs on a GPU."""
    monkeypatch.setattr(FastRGATConv, "_takes_every_pair", lambda *_: True)
    case = first(pyg.RGATConv, options=options)
    for special, where in SPECIAL:
        x = features_with(special, WIDE, where)
        compare(case, (WIDE, NARROW), x, torch.stack(edges_of_some()), special)


def pairs(original: Any, edges: int | str = "", **options: Any) -> Case:
    return Case(original, options, edges=edges, arguments=lambda i, o: ((i, i), o))


BIPARTITE = [
    *(
        pairs(pyg.SAGEConv),
        pairs(pyg.SAGEConv, aggr="sum", root_weight=False),
        pairs(pyg.SAGEConv, project=True),
    ),
    *(pairs(pyg.GraphConv), pairs(pyg.GraphConv, "weight", aggr="mean"), pairs(pyg.MFConv)),
    *(pairs(pyg.GATConv, add_self_loops=False), pairs(pyg.ResGatedGraphConv, 3, edge_dim=3)),
]


@pytest.mark.parametrize(("special", "where"), SPECIAL)
@each_case(BIPARTITE)
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
