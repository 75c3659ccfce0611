"""Every layer of the table against PyG's own: outputs, all gradients, kinds of graphs, dtypes, bad input."""

from __future__ import annotations

import copy
import pickle
import re
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_graphs import check_replays
from pyg_cases import KINDS, as_kind, close, gradients, random_graph, same, simple_graph
from pyg_layer_cases import ATTENTION, CASES, PLAIN, WEIGHTS, WITH_DROPOUT, Case, each_case, first
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg

from fastsparse_core import Adjacency
from fastsparse_pyg import prepare
from fastsparse_pyg.nn import DROP_INS

FEATURED = [first(case.original, 3) for case in WITH_DROPOUT]


def adds_loops(layer: Any) -> bool:
    return bool(getattr(layer, "add_self_loops", False))


def test_every_drop_in_has_a_case() -> None:
    assert {case.original for case in CASES} == set(DROP_INS)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case.id}-{str(dtype)[6:]}") for case in CASES for dtype in case.dtypes],
)
@pytest.mark.usefixtures("kernels_only")
def test_matches_the_original(case: Case, dtype: torch.dtype, device: str) -> None:
    """With a structure too where edges have features; without a gradient of the nodes' features, too."""
    edges = random_graph(device=device)
    reference, layer = case.pair(device, dtype)
    x, rest = case.features(40, device, dtype), case.rest(edges, dtype)
    if case.original is pyg.AGNNConv:
        x.data[4] = 0  # its norm is clamped
    graphs: list[Any] = [edges]
    if isinstance(case.edges, int):
        kinds = {False, adds_loops(layer)}
        graphs += [prepare(edges, 40, flow=layer.flow, add_self_loops=loops) for loops in kinds]
    if case.options.get("cached"):
        with torch.no_grad():  # the first call fills the cache
            results = [case.run(conv, x, edges, *rest) for conv in (layer, reference)]
            close(*results, case.bounds(dtype)["tolerance"])
        keeps_products = case.original in (pyg.SGConv, pyg.SSGConv)
        x, rest = x.requires_grad_(not keeps_products), [each.detach() for each in rest]
    case.check((reference, layer), graphs, edges, x, *rest)
    if any(parameter.requires_grad for parameter in reference.parameters()):
        case.check((reference, layer), graphs, edges, x.detach(), *rest)


# ---------------------------------------------------------------- graphs

MATRICES = ("csr", "coo", "csc", "SparseTensor")
DOUBLE = {"dtypes": (torch.float64,)}
#: Layers, and weights of edges, for all kinds of graphs. PyG uses `improved` only with weights.
ON_KINDS = [
    *(first(pyg.GCNConv, options=each, widths=(6, 9)) for each in ({}, {"add_self_loops": False})),
    *(first(pyg.GCNConv, options=each, widths=(6, 9)) for each in ({"improved": True}, {"normalize": False})),
    *(
        case._replace(options={"aggr": aggr}, widths=(6, 4))
        for case in (first(pyg.SAGEConv), first(pyg.GINConv))
        for aggr in ("sum", "mean", "max")
    ),
    *ATTENTION,
    first(pyg.GINEConv, 3, tolerance={}),
    first(pyg.ResGatedGraphConv),
    first(pyg.PNAConv),
    *(
        first(original, "weight", **DOUBLE)
        for original in (
            *(pyg.GraphConv, pyg.SGConv, pyg.APPNP, pyg.TAGConv, pyg.MixHopConv),
            *(pyg.GCN2Conv, pyg.LGConv, pyg.GatedGraphConv),
        )
    ),
]


def kinds_of(case: Case) -> list[str]:
    """Kinds of graphs for a case. Matrices have no features of edges, and no edge order for gated layers."""
    if isinstance(case.edges, int) or case.original is pyg.ResGatedGraphConv:
        return [kind for kind in KINDS if kind not in MATRICES]
    if case.edges == "weight":  # PyG's matrices cannot have leaves as weights
        return [kind for kind in KINDS if kind not in ("SparseTensor", "EdgeIndex_sorted", "edge_index")]
    return [*KINDS, "csc"] if case.original in (pyg.SAGEConv, pyg.GINConv) else list(KINDS)


@pytest.mark.parametrize(
    ("case", "kind"),
    [pytest.param(case, kind, id=f"{case.id}-{kind}") for case in ON_KINDS for kind in kinds_of(case)],
)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Converting sparse tensor")
@pytest.mark.usefixtures("kernels_only")
def test_kinds_of_graphs(case: Case, kind: str, device: str) -> None:
    """One graph without repeated edges and loops means the same to PyG in every form."""
    dtype = torch.float64 if case.dtypes == (torch.float64,) else torch.float32
    edges = simple_graph(device=device)
    if case.original is pyg.GCNConv:
        edges = edges[:, edges[0] != edges[1]]
    layers = case.pair(device, dtype)
    x = case.features(40, device, dtype)
    rest = [each.detach() for each in case.rest(edges, dtype)]
    has_values = kind in MATRICES and case.edges == "weight"
    graph = as_kind(kind, edges, 40, 40, rest[0] if has_values else None)
    takes_matrix = kind in MATRICES and (has_values or case.original is pyg.GCNConv)
    theirs = edges if not takes_matrix else graph if has_values else as_kind("csr", edges, 40, 40)
    given = [] if has_values else rest
    case.check(layers, [graph], theirs, x, *given)


def bipartite(original: Any, edges: int | str = "", *, narrow: int | None = None, **options: Any) -> Case:
    """A layer for pairs of features, the destinations' of another width if `narrow` says so."""
    case = first(original, "" if original is not pyg.GINEConv else -1)
    if narrow is not None:
        case = case._replace(arguments=lambda i, o: ((i, narrow), o))
    bounds = {} if original in (pyg.TransformerConv,) else case.tolerance
    return case._replace(options=options, edges=edges, widths=(6, 5), tolerance=bounds)


GAT_PAIRS = [
    bipartite(each, dim or "", narrow=narrow, edge_dim=dim, heads=2, residual=True, add_self_loops=loops)
    for each in (pyg.GATConv, pyg.GATv2Conv)
    for narrow in (None, 4)
    for loops in (True, False)
    for dim in (None, 3)
]
PAIRS = [
    *(bipartite(pyg.SAGEConv, narrow=3, aggr=aggr) for aggr in ("sum", "mean", "max")),
    *(bipartite(pyg.GINConv, aggr=aggr, eps=0.3) for aggr in ("sum", "mean", "max")),
    *GAT_PAIRS,
    *(bipartite(pyg.TransformerConv, narrow=4, **each) for each in ({"heads": 2}, {"beta": True})),
    *(
        bipartite(original, 3, narrow=4, edge_dim=3)
        for original in (pyg.TransformerConv, pyg.ResGatedGraphConv)
    ),
    bipartite(pyg.ResGatedGraphConv, narrow=4),
    *(bipartite(pyg.GINEConv, -1), bipartite(pyg.GINEConv, 3, edge_dim=3)),
]


@pytest.mark.parametrize(("num_src", "num_dst"), [(40, 25), (25, 40)])
@each_case(PAIRS)
@pytest.mark.usefixtures("kernels_only")
def test_bipartite(case: Case, num_src: int, num_dst: int, device: str) -> None:
    """Loops go to the nodes that both sides have; sizes are taken where the layer has the argument."""
    edges = random_graph(num_src, num_dst, device=device)
    if adds_loops(case.make(case.original)) and num_src < num_dst:
        case = case._replace(options={**case.options, "fill_value": 0.5})  # PyG's own mean fails here
    reference, layer = case.pair(device)
    channels = case.arguments(*case.widths)[0]
    width = channels[1] if isinstance(channels, tuple) else 6
    x = case.features(num_src, device), torch.randn(num_dst, width, device=device, requires_grad=True)
    rest, size = [each.detach() for each in case.rest(edges)], (num_src, num_dst)
    graphs = [edges, prepare(edges, size)]
    if case.original in (pyg.SAGEConv, pyg.GINConv):
        graphs += [as_kind("EdgeIndex", edges, *size)]
        graphs += [as_kind("csr", edges, *size)] * (case.options["aggr"] == "sum")  # csr merges equal edges
    case.check((reference, layer), graphs, edges, x, *rest)
    if case.original in (pyg.GATConv, pyg.GINEConv, pyg.SAGEConv, pyg.GINConv):
        sized = [*(rest or [None] * (case.original is pyg.GATConv)), size]
        case.check((reference, layer), graphs[:1], edges, x, *sized)
    if case.edges == 3 and case.original in (pyg.GATConv, pyg.GATv2Conv):
        case.check((reference, layer), graphs, edges, x)
    if case.original is pyg.GINEConv:
        call = lambda conv: case.run(conv, (x[0], None), edges, *rest, size)  # noqa: E731
        same(reference, layer, call, [x[0]], **case.bounds())


@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex", "csr", "Adjacency"])
@each_case(PAIRS[:1] + PAIRS[3:4])
@pytest.mark.usefixtures("kernels_only")
def test_pairs_without_features_of_destinations(case: Case, kind: str, device: str) -> None:
    edges, size = random_graph(30, 20, device=device), (30, 20)
    reference, layer = case.pair(device)
    x, graph = case.features(30, device), as_kind(kind, edges, 30, 20)
    call = lambda conv: conv((x, None), edges, size)  # noqa: E731
    same(reference, layer, call, [x], fast_call=lambda conv: conv((x, None), graph, size))
    if kind == "edge_index":  # PyG then assumes as many destinations as sources
        same(reference, layer, lambda conv: conv((x, None), edges), [x])
        same(reference, layer, lambda conv: conv((x, None), edges, (30, None)), [x])


@each_case([first(pyg.GCNConv, edges) for edges in WEIGHTS[:3]] + PLAIN[1:3])
@pytest.mark.usefixtures("kernels_only")
def test_more_dimensions(case: Case, device: str) -> None:
    """Features of several graphs with the same edges."""
    edges = random_graph(device=device)
    shapes: list[tuple[tuple[int, ...], dict[str, int]]] = [((3, 40, 6), {})]
    if case.original is not pyg.GCNConv:
        shapes += [((2, 3, 40, 6), {}), ((40, 3, 6), {"node_dim": 0})]
    for shape, options in shapes:
        for width in (4, 9):
            reference, layer = case._replace(widths=(6, width)).pair(device, **options)
            x, rest = torch.randn(shape, device=device, requires_grad=True), case.rest(edges)
            case.check((reference, layer), [edges], edges, x, *rest)


@each_case(PLAIN)
@pytest.mark.usefixtures("kernels_only")
def test_an_adjacency_with_and_without_loops(case: Case, device: str) -> None:
    """Layers add loops to a structure that has none, and take one that has them as it is."""
    edges = random_graph(device=device)
    for weights in WEIGHTS[:3] if case.original is pyg.GCNConv else ("",):
        case = case._replace(edges=weights)
        layers = case.pair(device)
        x, rest, graphs = case.features(40, device), case.rest(edges), [prepare(edges, 40)]
        if adds_loops(layers[1]):
            loops = prepare(edges, 40, add_self_loops=True)
            graphs += [loops, pickle.loads(pickle.dumps(loops))]
        case.check(layers, graphs, edges, x, *rest)


@each_case(PLAIN)
@pytest.mark.usefixtures("kernels_only")
def test_strides(case: Case, device: str) -> None:
    """Gradients of features and of edges."""
    edges = random_graph(device=device)
    reference, layer = case.pair(device)
    wide, turned = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((40, 11), (6, 40)))
    same(reference, layer, lambda conv: conv(wide[:, 3:9], edges), [wide], **case.bounds())
    same(reference, layer, lambda conv: conv(turned.t(), edges), [turned], **case.bounds())
    every_other = edges.repeat_interleave(2, dim=1)[:, ::2]
    case.check((reference, layer), [edges.t().contiguous().t(), every_other], edges, turned.t())


@each_case([*PLAIN, first(pyg.GCNConv, "weight"), first(pyg.PNAConv, 3)])
def test_graphs_without_edges_or_nodes(case: Case, device: str) -> None:
    edges, dtype = torch.empty(2, 0, dtype=torch.long, device=device), case.dtypes[-1]
    layers = case.pair(device, dtype)
    for nodes in (12, 0) if case.original is not pyg.PNAConv else (12,):
        x, rest = case.features(nodes, device, dtype), case.rest(edges, dtype)
        kinds = ["edge_index", "Adjacency"] + ["csr", "coo"] * (case in PLAIN[:3] and nodes > 0)
        graphs = [as_kind(kind, edges, nodes, nodes) for kind in kinds]
        tolerance = case.tolerance if dtype == torch.float64 else {}
        case._replace(tolerance=tolerance).check(layers, graphs, edges, x, *rest)


@each_case([*FEATURED, first(pyg.GINEConv, -1), first(pyg.PNAConv, 3)])
def test_features_of_edges_of_wrong_length(case: Case, device: str) -> None:
    edges, dtype = simple_graph(20, 55, device=device), case.dtypes[-1]
    layer, x = case.make(case.fast, device, dtype), case.features(20, device, dtype)
    (features,) = case.rest(edges, dtype)
    for graph in (edges, prepare(edges, 20)):
        for wrong in (features[1:], torch.cat([features, features[:1]])):
            with pytest.raises(ValueError, match=r"edge_attr: expected one row per edge \(55 rows"):
                layer(x, graph, wrong)
    with pytest.raises((RuntimeError, ValueError), match="shape|size|dimension"):
        layer(x, edges, torch.cat([features, features], 1))


@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 5), (5, 0)])
@each_case([*PLAIN[1:3], *WITH_DROPOUT])
def test_pairs_without_nodes_on_one_side(case: Case, num_src: int, num_dst: int, device: str) -> None:
    edges = torch.empty(2, 0, dtype=torch.long, device=device)
    reference, layer = case.pair(device)
    x = case.features(num_src, device), torch.randn(num_dst, 6, device=device)
    same(reference, layer, lambda conv: conv(x, edges), [x[0]], floor=case.floor)


@each_case(PLAIN)
def test_numbers_that_are_not_finite_stay_where_they_belong(case: Case, device: str) -> None:
    edges = random_graph(device=device)
    reference, layer = case.pair(device)
    x = torch.randn(40, 6, device=device)
    x[7, 1] = float("nan")
    if case not in ATTENTION:
        x[8] = float("inf")
    expected = reference(x, edges)
    assert expected.isnan().any()
    assert not expected.isnan().all()
    close(layer(x, edges), expected, case.bounds()["tolerance"])


# ---------------------------------------------------------------- dtypes, derivatives


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@each_case(
    [first(pyg.GCNConv, edges, widths=widths) for edges in WEIGHTS[:3] for widths in ((4, 6), (6, 4))]
    + [case._replace(options={"aggr": aggr}) for case in PLAIN[1:3] for aggr in ("sum", "mean", "max")]
    + ATTENTION
)
@pytest.mark.usefixtures("kernels_only")
def test_dtypes(case: Case, dtype: torch.dtype, device: str) -> None:
    """Against the original in float64 on the same rounded parameters."""
    edges = random_graph(device=device)
    layer = case.make(case.fast, device).to(dtype)
    reference = case.make(case.original, device, torch.float64)
    reference.load_state_dict(layer.state_dict())
    x, rest = case.features(40, device).detach().to(dtype).requires_grad_(), case.rest(edges, dtype)
    got = layer(x, edges, *rest)
    assert got.dtype == dtype
    digits = (4 if case in ATTENTION else 100) * torch.finfo(dtype).eps
    tolerance = 1e-12 if dtype == torch.float64 else digits
    close(got.double(), reference(x.double(), edges, *(each.double() for each in rest)), tolerance)
    for gradient in gradients(got, [x, *layer.parameters()]):
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()


AUTOCAST = [
    first(pyg.GCNConv, edges, widths=widths) for edges in ("", "weight") for widths in ((4, 6), (6, 4))
]
AUTOCAST += [case._replace(widths=(6, width)) for case in PLAIN[1:3] for width in (4, 9)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(pytest.param(case, torch.bfloat16, id=case.id) for case in [*AUTOCAST, *ATTENTION, *FEATURED]),
        *(pytest.param(case, torch.float16, id=f"{case.id}-float16") for case in ATTENTION),
    ],
)
@pytest.mark.usefixtures("kernels_only")
def test_autocast(case: Case, dtype: torch.dtype, device: str) -> None:
    """Results near those of float32, and gradients of float32."""
    edges = random_graph(device=device)
    reference, layer = case.pair(device)
    x, rest = case.features(40, device), case.rest(edges)
    with torch.autocast(device, dtype=dtype):
        got = layer(x, edges, *rest)
    tolerance = 4 * torch.finfo(dtype).eps if case in ATTENTION else 5e-2 if case.original in SUMS else 3e-2
    close(got.float(), reference(x, edges, *rest), tolerance)
    for gradient in gradients(got, [x, *rest, *layer.parameters()]):
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


SUMS = (pyg.SAGEConv, pyg.GINConv)

#: Under autocast, results have its dtype. The original's results are float32, because it multiplies by
#: float32 numbers, or has no linear map.
OURS = {"GCNConv", "GATConv", "GATv2Conv", "AGNNConv", "LGConv"}
#: On CUDA, autocast keeps exponentials in float32.
OURS_ON_CUDA = OURS | {"TransformerConv"}
#: The original adds float32 features to products in 16 bits.
FAILS = {"MFConv"}


def test_the_page_names_the_layers_whose_dtype_is_another() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "precision_determinism.md"
    rows = [row for row in page.read_text().splitlines() if row.startswith("| PyG")]
    assert set(re.findall(r"`Fast(\w+)`", " ".join(rows))) == OURS_ON_CUDA | FAILS


def first_of_each() -> list[Case]:
    """One of every drop-in, and one with a weight or with features of edges."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in CASES:
        if case.edges not in ("constant", "column", 40):
            width = (16, 16) if case.original is not pyg.GatedGraphConv else case.widths
            found.setdefault((case.original, case.edges == ""), case._replace(widths=width))
            if case.widths[0] != case.widths[1]:  # a narrower result may be multiplied first
                found.setdefault((case.original, "narrow"), case._replace(widths=(16, 6)))
    return list(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_case(first_of_each())
def test_dtypes_of_results_under_autocast(case: Case, dtype: torch.dtype, device: str) -> None:
    edges = random_graph(device=device)
    x, rest = case.features(40, device), [each.detach() for each in case.rest(edges)]
    found: list[torch.dtype | None] = []
    for conv in (case.original, case.fast):
        layer = case.make(conv, device)
        with torch.autocast(device, dtype=torch.bfloat16):
            try:
                out = case.run(layer, x.to(dtype), edges, *rest)
            except RuntimeError:
                assert conv is case.original
                assert case.name in FAILS
                found.append(None)
                continue
        found.append(out.dtype)
        if out.requires_grad:
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert grad.dtype == torch.float32
    theirs, ours = found
    if case.name in (OURS_ON_CUDA if device == "cuda" else OURS):
        assert ours == torch.bfloat16
        assert theirs == torch.float32 or dtype == torch.bfloat16
    elif theirs is not None:
        assert ours == theirs


@each_case([first(pyg.GCNConv, "weight", widths=(3, 4)), *PLAIN])
@pytest.mark.usefixtures("kernels_only")
def test_second_derivatives(case: Case, device: str) -> None:
    edges = random_graph(9, num_edges=25, device=device)
    layer = case.make(case.fast, device, torch.float64)
    inputs = [case.features(9, device, torch.float64), *case.rest(edges, torch.float64)]
    matrices = [parameter for parameter in layer.parameters() if parameter.dim() > 1]

    def call(x: Tensor, *rest: Tensor) -> Tensor:
        out: Tensor = layer(x, edges, *rest[: len(inputs) - 1])
        return out

    fast = case in ATTENTION
    assert torch.autograd.gradcheck(call, (*inputs, *matrices[:1]), fast_mode=fast)
    assert torch.autograd.gradgradcheck(call, (*inputs, *matrices[:1]), fast_mode=fast)


# ---------------------------------------------------------------- modules


@each_case(
    [
        case
        for case in [*PLAIN, first(pyg.ResGatedGraphConv)]
        if case.original not in (pyg.GINConv, pyg.AGNNConv)
    ]
)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.usefixtures("kernels_only")
def test_lazy(case: Case, pair: bool, device: str) -> None:
    edges = random_graph(device=device)
    x: Any = torch.randn(40, 3, device=device)
    if pair and case.original is pyg.GCNConv:
        pytest.skip("takes no pairs")
    x = (x, torch.randn(40, 5, device=device)) if pair else x
    case = case._replace(arguments=lambda i, o: ((-1, -1) if pair else -1, o))
    reference, layer = (case.make(conv, device) for conv in (case.original, case.fast))
    assert layer(x, edges).shape == reference(x, edges).shape
    same(reference, layer, lambda conv: conv(x, edges), [], **case.bounds())


@each_case(PLAIN)
def test_state_dict_repr_and_copies_are_the_original_s(case: Case) -> None:
    reference, layer = case.pair()
    assert list(layer.state_dict()) == list(reference.state_dict())
    reference.load_state_dict(layer.state_dict())
    assert isinstance(layer, case.original)
    assert repr(layer) == "Fast" + repr(reference)
    edges, x = random_graph(), torch.randn(40, 6)
    expected = layer(x, edges)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x, edges), expected)


@each_case(PLAIN)
@pytest.mark.usefixtures("kernels_only")
def test_no_warnings(case: Case, device: str) -> None:
    layer = case.make(case.fast, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PyG 2.8 on Python 3.14.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch_geometric\.")
        layer(case.features(40, device), random_graph(device=device)).sum().backward()


def first_in_double() -> list[Case]:
    """One of each layer, and one with features of edges, that float64 compares with the original."""
    never_run = (pyg.TAGConv, pyg.MixHopConv)  # PyG calls `lin.forward`, so hooks do not run
    cases = [case for case in first_of_each() if case.dtypes and case.edges != "weight"]
    cases = [case for case in cases if case.original not in never_run]
    return [case._replace(widths=(6, 6)) if case.widths == (16, 16) else case for case in cases]


@each_case(first_in_double())
def test_hooks_within_a_layer_are_called(case: Case) -> None:
    """Hooks on single linear maps, as adapters use them: the result of the hook counts, whatever is fused
    otherwise."""
    reference, layer = case.pair(dtype=torch.float64)
    edges = random_graph()
    x, rest = case.features(40, dtype=torch.float64), case.rest(edges, torch.float64)
    bounds = {"tolerance": max(case.tolerance.get(torch.float64, 1e-9), 1e-9), "floor": max(case.floor, 0.1)}
    for name, module in reference.named_modules():
        if isinstance(module, (nn.Linear, pyg.Linear)):
            double = [
                conv.get_submodule(name).register_forward_hook(lambda module, inputs, out: 2 * out)
                for conv in (reference, layer)
            ]
            same(reference, layer, lambda conv: case.run(conv, x, edges, *rest), [x, *rest], **bounds)
            for handle in double:
                handle.remove()


#: Options that no kernel supports, and the message to the user.
FALL_BACK = [
    *((case, {"aggr": aggr}, f"aggr='{aggr}'") for case in ATTENTION for aggr in ("mean", "max")),
    *((case, {"edge_dim": 3, "fill_value": "max"}, "fill_value='max'") for case in ATTENTION[:2]),
    (first(pyg.GINEConv, -1), {"aggr": "mean"}, "aggr='mean'"),
    (first(pyg.ResGatedGraphConv), {"act": nn.Tanh()}, "act=Tanh() has no kernel"),
    (first(pyg.ResGatedGraphConv), {"act": torch.tanh, "edge_dim": 2}, "act=<built-in method tanh"),
    (first(pyg.ResGatedGraphConv), {"aggr": "max"}, "aggr='max'"),
    (first(pyg.ResGatedGraphConv), {"edge_dim": 40}, "40 features of an edge, more than 32"),
    *(
        (
            first(pyg.PNAConv),
            {"aggregators": names},
            "falls back to PyG's implementation, which is slower: aggre",
        )
        for names in (["median", "mean"], ["mean", "mean"], ["softmax"])
    ),
]


@pytest.mark.parametrize(
    ("case", "options", "why"), [pytest.param(*row, id=f"{row[0].name}-{row[2]}") for row in FALL_BACK]
)
def test_the_original_runs_where_no_kernel_can_and_says_why(
    case: Case, options: dict[str, Any], why: str, reasons: pytest.LogCaptureFixture
) -> None:
    case = case._replace(edges=options.get("edge_dim", case.edges))
    dtype = torch.float64 if case.original is pyg.PNAConv else torch.float32
    edges, layers = random_graph(), case.pair(dtype=dtype, **options)
    x, rest = case.features(40, dtype=dtype), case.rest(edges, dtype)
    case = case._replace(tolerance={torch.float64: 1e-9}, floor=1)
    for _ in range(2):
        case.check(layers, [edges], edges, x, *rest)
    assert reasons.text.count(why) == 1


@each_case(PLAIN)
def test_a_method_replaced_on_the_instance_is_called(case: Case) -> None:
    reference, layer = case.pair()
    edges, x = random_graph(), torch.randn(40, 6)
    name = "edge_update" if case.original in (pyg.GATConv, pyg.GATv2Conv) else "message"
    original, called = getattr(layer, name), []

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        called.append(1)
        out: Tensor = original(*args, **kwargs)
        return out

    setattr(layer, name, types.MethodType(watched, layer))
    close(layer(x, edges), reference(x, edges), 2e-5)
    assert called


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("value", [-1, 12, 2**40])
@each_case(PLAIN)
def test_index_out_of_range(case: Case, row: int, value: int, device: str) -> None:
    """Also covers num_nodes smaller than the largest index: the number of nodes is the rows of x."""
    edges, x = random_graph(12, num_edges=30, device=device), torch.randn(12, 6, device=device)
    reference, layer = case.pair(device)
    edges[row, 7] = value
    with pytest.raises(IndexError, match=rf"edge_index.*0 to 11 in row {row}.*{value}"):
        layer(x, edges)
    with pytest.raises(IndexError, match=str(value)):
        layer(x, EdgeIndex(edges))
    edges[row, 7] = 3
    close(layer(x, edges), reference(x, edges), case.bounds()["tolerance"])  # no poisoned device


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
@each_case(PLAIN)
def test_edges_of_other_integers(case: Case, dtype: torch.dtype, device: str) -> None:
    """PyG takes narrower integers where it appends self loops to them, and refuses them elsewhere."""
    edges = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0]], device=device)
    layer, x = case.make(case.fast, device), torch.randn(2, 6, device=device)
    try:
        case.make(case.original, device)(x, edges.to(dtype))
    except (ValueError, RuntimeError):
        with pytest.raises(ValueError, match=rf"edge_index: expected .* got {dtype}; convert it with \.long"):
            layer(x, edges.to(dtype))
    else:
        close(layer(x, edges.to(dtype)), layer(x, edges))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (torch.zeros(2, 3), r"edge_index.*torch.float32"),
        (torch.zeros(2, 3, dtype=torch.complex64), r"edge_index.*torch.complex64"),
        *(
            (torch.zeros(shape, dtype=torch.long), r"edge_index: expected shape \(2, num_edges\)")
            for shape in ((3, 5), (5, 2), (6,), (2, 3, 1))
        ),
        *((graph, "edge_index: expected an integer tensor") for graph in (None, [[0, 1], [1, 0]], "edges")),
        ((torch.zeros(3), torch.zeros(3)), "edge_index: expected an integer tensor"),
    ],
    ids=lambda it: str(getattr(it, "shape", type(it).__name__)) if not isinstance(it, str) else None,
)
@each_case(PLAIN)
def test_what_is_no_graph(case: Case, graph: Any, message: str, device: str) -> None:
    graph = graph.to(device) if isinstance(graph, Tensor) else graph
    with pytest.raises(ValueError, match=message):
        case.make(case.fast, device)(torch.randn(12, 6, device=device), graph)


@pytest.mark.parametrize("kind", ["EdgeIndex", "csr", "coo", "SparseTensor", "Adjacency"])
@pytest.mark.filterwarnings("ignore:Sparse")
@each_case(PLAIN)
def test_sizes_of_graph_and_features_differ(case: Case, kind: str, device: str) -> None:
    graph = as_kind(kind, simple_graph(20, 40, device=device), 20, 20)
    reference, layer = case.pair(device)
    for num_rows in (19, 21):
        x = torch.randn(num_rows, 6, device=device)
        if kind == "EdgeIndex" and num_rows == 21 and adds_loops(layer):
            close(layer(x, graph), reference(x, graph), 2e-5)  # loops enlarge a small EdgeIndex
            continue
        with pytest.raises(ValueError, match=f"x: expected 20 .*got {num_rows}"):
            layer(x, graph)


@pytest.mark.parametrize("kind", ["csr", "coo", "SparseTensor"])
@pytest.mark.filterwarnings("ignore:Sparse")
@each_case(PLAIN)
def test_a_matrix_against_the_flow(case: Case, kind: str) -> None:
    layer = case.make(case.fast, flow="target_to_source")
    with pytest.raises(ValueError, match="adj_t.t"):
        layer(torch.randn(20, 6), as_kind(kind, simple_graph(20, 40), 20, 20))


@each_case(PLAIN)
def test_a_rectangular_adjacency_for_one_tensor(case: Case) -> None:
    graph = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([2, 3]), (2, 4))
    with pytest.raises(ValueError, match="x: expected 4 source and 2 destination rows"):
        case.make(case.fast)(torch.randn(4, 6), graph)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex", "csr", "coo", "Adjacency"])
@each_case(PLAIN)
def test_a_graph_on_another_device(case: Case, kind: str) -> None:
    graph = as_kind(kind, simple_graph(20, 40), 20, 20)
    with pytest.raises(ValueError, match="edge_index: expected device cuda:0 like x, got cpu"):
        case.make(case.fast, "cuda")(torch.randn(20, 6, device="cuda"), graph)


@each_case([case for case in PLAIN if case.original is not pyg.AGNNConv])
def test_wrong_widths_and_shapes(case: Case, device: str) -> None:
    edges = random_graph(12, num_edges=30, device=device)
    reference, layer = case.pair(device)
    with pytest.raises(RuntimeError, match="shape|size"):
        layer(torch.randn(12, 5, device=device), edges)
    if case not in ATTENTION:
        edges = random_graph(4, num_edges=5, device=device)
        for shape in ((4,), ()):
            for conv in (reference, layer):
                with pytest.raises(IndexError):
                    conv(torch.randn(shape, device=device), edges)


@pytest.mark.gpu
@each_case(first_of_each())
def test_a_training_step_is_replayed(case: Case) -> None:
    edges = random_graph(device="cuda")
    x, rest = case.features(40, "cuda").detach(), [each.detach() for each in case.rest(edges)]
    # With new tensors of edges in every step, structures would be built, which waits for the GPU.
    types, hyperedges = torch.arange(edges.size(1)).cuda() % 3, torch.stack([edges[0], edges[1] % 9])
    if case.original in (pyg.RGCNConv, pyg.FastRGCNConv, pyg.RGATConv):
        case = case._replace(call=lambda layer, *given: layer(*given[:2], types, *given[2:]))
    elif case.original is pyg.HypergraphConv:
        case = case._replace(call=lambda layer, x, _: layer(x, hyperedges, num_edges=9))
    check_replays(lambda: case.make(case.fast, "cuda"), lambda layer: case.run(layer, x, edges, *rest))
