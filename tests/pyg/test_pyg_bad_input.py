"""What does not fit is refused with what was expected and what came; the merely unusual comes out right."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from pyg_cases import as_kind, close, random_graph, simple_graph
from torch import nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import fastsparse_pyg
from benchmarks.pyg_layers import LAYERS as TABLE
from benchmarks.pyg_layers import Inputs
from fastsparse_core import Adjacency
from fastsparse_pyg import (
    FastGATConv,
    FastGCNConv,
    FastGINConv,
    FastGINEConv,
    FastRGATConv,
    FastRGCNConv,
    FastSAGEConv,
    accelerate,
)
from fastsparse_pyg.nn import DROP_INS


def test_edges_between_no_nodes():
    with pytest.raises(IndexError, match="expected no edges in row 0 for 0 nodes, got 0"):
        FastGCNConv(3, 2)(torch.zeros(0, 3), torch.zeros(2, 1, dtype=torch.long))


_X, _EDGES = torch.randn(12, 4), random_graph(12, num_edges=30)
_METADATA = (["a"], [("a", "to", "a")])
#: PyG layers, and calls that they reject.
REFUSED = {
    **{
        f"{name}, {what}": (make, given)
        for name, make in {
            "GCN": lambda: pyg.GCNConv(4, 6),
            "SAGE": lambda: pyg.SAGEConv(4, 6),
            "GIN": lambda: pyg.GINConv(nn.Linear(4, 6)),
            "GAT": lambda: pyg.GATConv(4, 6),
            "GATv2": lambda: pyg.GATv2Conv(4, 6),
            "transformer": lambda: pyg.TransformerConv(4, 6),
            "Cheb": lambda: pyg.ChebConv(4, 6, 2),
            "an accelerated layer": lambda: pyg.LEConv(4, 6),
        }.items()
        for what, given in {
            "features of one dimension": (torch.randn(12), _EDGES),
            "integers": (torch.randint(3, (12, 4)), _EDGES),
            "swapped": (_EDGES, _X),
        }.items()
        if (name, what) != ("GIN", "integers")  # PyG converts them to floats
    },
    "GINE, features of the edges": (
        lambda: pyg.GINEConv(nn.Linear(4, 6)),
        (_X, _EDGES, torch.randn(_EDGES.size(1), 5)),
    ),
    "GINE, no features of the edges": (lambda: pyg.GINEConv(nn.Linear(4, 6)), (_X, _EDGES)),
    "HGT, unknown type": (
        lambda: pyg.HGTConv(4, 6, _METADATA),
        ({"a": _X, "b": _X}, {("a", "to", "b"): _EDGES}),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_pyg_refuses_announces_no_slow_path(name, reasons):
    make, given = REFUSED[name]
    layer = make()
    refused: type[Exception] | None = None
    try:
        layer(*given)
    except Exception as error:
        refused = type(error)
    assert refused is not None
    accelerate(layer, show=False)
    with pytest.raises(refused):
        layer(*given)
    assert not reasons.records


@pytest.mark.parametrize(
    ("x", "edge_index", "message"),
    [
        (torch.randn(12), _EDGES, r"x: expected shape \(num_nodes, .*got \(12,\); .* pass x.unsqueeze"),
        (torch.ones(12, 4, dtype=torch.int64), _EDGES, r"x: expected a floating.*int64; .*x.float\(\)"),
        (_EDGES, _X, r"x: .*the arguments are swapped: call layer\(x, edge_index\)"),
    ],
    ids=["one dimension", "integers", "swapped"],
)
@pytest.mark.parametrize(
    "make", [lambda: FastGCNConv(4, 6), lambda: FastGATConv(4, 6), lambda: FastSAGEConv(4, 6)]
)
def test_errors_of_pyg_name_the_argument(make, x, edge_index, message):
    with pytest.raises(Exception, match=message) as raised:
        make()(x, edge_index)
    assert type(raised.value) is type(raised.value.__cause__)


@pytest.mark.parametrize("layer", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_no_heads(layer):
    with pytest.raises(ValueError, match="heads .*expected at least 1, got 0"):
        getattr(fastsparse_pyg, f"Fast{layer}")(4, 6, heads=0)(_X, _EDGES)


def test_gine_names_the_missing_features():
    with pytest.raises(AttributeError, match="edge_attr: expected features .*got None; .*FastGINConv"):
        FastGINEConv(nn.Linear(4, 6))(_X, _EDGES)


@pytest.mark.parametrize(
    ("node", "message"), [(12, "got 12; check that x has"), (-1, "got -1; ids must not be negative")]
)
def test_ids_of_no_node(node, message):
    with pytest.raises(IndexError, match=f"edge_index: .*in row 0 for 12 nodes, {message}"):
        FastGCNConv(4, 6)(_X, torch.full((2, 30), node))
    with pytest.raises(IndexError, match=f"edge_index: .*, {message}"):
        FastRGCNConv(4, 6, 2)(_X, torch.full((2, 30), node), torch.zeros(30, dtype=torch.long))


@pytest.mark.parametrize(
    "layer", [FastSAGEConv((4, 3), 6), FastGINConv(nn.Linear(4, 6))], ids=["sage", "gin"]
)
def test_bipartite_sizes(layer):
    edge_index = random_graph(12, 9, 30)
    x_src, x_dst = (
        torch.randn(12, 4),
        torch.randn(9, layer.in_channels[1] if hasattr(layer, "in_channels") else 4),
    )
    with pytest.raises(ValueError, match=r"expected 13 source rows as size=\(13, 9\) says, got 12"):
        layer((x_src, x_dst), edge_index, (13, 9))
    with pytest.raises(ValueError, match="expected 8 destination rows"):
        layer((x_src, x_dst), edge_index, (12, 8))
    with pytest.raises(IndexError, match="edge_index"):
        layer((x_src, x_dst[:4]), edge_index)
    with pytest.raises(ValueError, match="x: expected 12 source and 9 destination rows"):
        layer((x_src, x_dst[:4]), Adjacency.from_coo(edge_index[1], edge_index[0], (9, 12)))


def test_square_size_with_one_tensor():
    edge_index = random_graph(12, num_edges=30)
    with pytest.raises(ValueError, match="destination"):
        FastSAGEConv(4, 6)(torch.randn(12, 4), edge_index, (12, 9))


@pytest.mark.parametrize("shape", [(54,), (56,), (55, 2), (1, 55), ()])
@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"add_self_loops": False}], ids=str)
def test_edge_weight_length(device, shape, options):
    edge_index = simple_graph(20, 55, device=device)
    layer = FastGCNConv(4, 6, **options).to(device)
    x = torch.randn(20, 4, device=device)
    for graph in (edge_index, Adjacency.from_coo(edge_index[1], edge_index[0], (20, 20))):
        with pytest.raises(ValueError, match=r"edge_weight: expected one weight per edge, shape \(55,\)"):
            layer(x, graph, torch.ones(shape, device=device))
    with pytest.raises(TypeError, match="edge_weight"):
        layer(x, edge_index, [1.0] * 55)


def test_nan_weights_propagate(device):
    edge_index = random_graph(device=device)
    weight = torch.rand(edge_index.size(1), device=device)
    weight[5] = float("nan")
    x = torch.randn(40, 4, device=device)
    for options in ({}, {"normalize": False}):
        reference, layer = (conv(4, 6, **options).to(device) for conv in (GCNConv, FastGCNConv))
        layer.load_state_dict(reference.state_dict())
        expected = reference(x, edge_index, weight)
        assert expected.isnan().any()
        assert not expected.isnan().all()
        close(layer(x, edge_index, weight), expected)


def test_tuple_of_features(device):
    x = torch.randn(12, 4, device=device)
    for pair in ((x, x), [x, x], (x, None)):
        with pytest.raises(ValueError, match="bipartite"):
            FastGCNConv(4, 6).to(device)(pair, random_graph(12, num_edges=30, device=device))


@pytest.mark.parametrize(
    "original", [pyg.LGConv(normalize=False), pyg.RGATConv(4, 6, 3)], ids=lambda layer: type(layer).__name__
)
def test_a_pair_of_features_where_the_kernels_take_one_tensor(original, reasons):
    """PyG's code takes it, and runs."""
    layer = copy.deepcopy(original)
    accelerate(layer, show=False)
    assert type(layer).__name__.startswith("Fast")
    edge_index = random_graph(12, 9, 30)
    rest = (torch.arange(edge_index.size(1)) % 3,) if isinstance(original, pyg.RGATConv) else ()
    pair = torch.randn(12, 4), torch.randn(9, 4)
    close(layer(pair, edge_index, *rest), original(pair, edge_index, *rest))
    assert "a pair of features" in reasons.text


def test_rectangular_matrix_under_normalisation(device):
    graph = as_kind("csr", random_graph(20, 30, device=device), 20, 30)
    for num_rows in (20, 30):
        with pytest.raises(ValueError, match="x: expected 20 source and 30 destination"):
            FastGCNConv(4, 6).to(device)(torch.randn(num_rows, 4, device=device), graph)


def test_matrix_of_another_layout():
    dense_blocks = torch.eye(4).to_sparse_bsr((2, 2))
    with pytest.raises(ValueError, match="CSR, COO or CSC"):
        FastSAGEConv(4, 6)(torch.randn(4, 4), dense_blocks)
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 3), (4, 4, 3)).coalesce()
    with pytest.raises(ValueError, match="two-dimensional"):
        FastSAGEConv(4, 6)(torch.randn(4, 4), hybrid)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_uncoalesced_matrix():
    edge_index = random_graph(20, num_edges=50)
    matrix = torch.sparse_coo_tensor(edge_index.flip(0), torch.rand(edge_index.size(1)), (20, 20))
    for layer in (FastGCNConv(4, 6), FastSAGEConv(4, 6)):
        x = torch.randn(20, 4)
        close(layer(x, matrix), layer(x, matrix.coalesce()))


GRAPH_LAYERS = {name: layer for name, layer in TABLE.items() if getattr(pyg, name) in DROP_INS}


@pytest.mark.parametrize("name", GRAPH_LAYERS)
def test_features_and_edges_of_other_types(name):
    """NumPy's arrays, None and data objects, in every drop-in."""
    it = Inputs.draw(random_graph(12, num_edges=30), 12, 6, torch.float32)
    case = GRAPH_LAYERS[name]
    layer = case.make(6)
    accelerate(layer, show=False)
    data = Data(x=it.x, edge_index=it.edge_index)
    features = [
        (it.x.detach().numpy(), r"ndarray; convert it with torch.as_tensor\(x\)"),
        (data, "Data; pass its x"),
    ]
    if "RGCN" not in name:  # in RGCN, None means all nodes
        features.append((None, "None; data.x is None for graphs without features"))
    for x, got in features:
        with pytest.raises(TypeError, match=rf"^x(_dict\['.*'\])?: expected a floating tensor .*, got {got}"):
            case.call(layer, dataclasses.replace(it, x=x))
    for edges, got in ((data, "Data; pass its edge_index"), (it.edge_index.numpy(), "ndarray; convert it")):
        with pytest.raises(ValueError, match=rf"edge_index.*: expected an integer tensor .*, got {got}"):
            case.call(layer, dataclasses.replace(it, edge_index=edges))


# ---------------------------------------------------------------- unusual, but right


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_zero_width(device, aggr):
    edge_index = random_graph(12, num_edges=30, device=device)
    x = torch.empty(12, 0, device=device)
    layer = FastGINConv(nn.Identity(), aggr=aggr).to(device)
    assert layer(x, edge_index).shape == (12, 0)
    assert FastGCNConv(4, 0).to(device)(torch.randn(12, 4, device=device), edge_index).shape == (12, 0)


@pytest.mark.parametrize(
    ("edge_index", "cure"),
    [
        (torch.zeros(7, 2, dtype=torch.int64), r"got \(7, 2\); transpose it with \.t\(\)"),
        (torch.zeros(5, 5, dtype=torch.int64), r"got \(5, 5\); if it is a dense adjacency matrix"),
        (None, "got NoneType; pass the edges of your graph"),
        ([[0], [1]], "got list; convert it with torch.as_tensor"),
        ((torch.tensor([0]), torch.tensor([1])), r"got tuple; convert it with torch.stack\(edge_index\)"),
    ],
    ids=["transposed", "dense", "None", "list", "tuple of tensors"],
)
def test_edges_of_other_forms_name_the_cure(edge_index, cure):
    with pytest.raises(ValueError, match=f"edge_index: expected .*{cure}"):
        FastGCNConv(3, 2)(torch.randn(5, 3), edge_index)


@pytest.mark.parametrize(
    ("edge_type", "got"), [(None, "got NoneType"), (torch.rand(4), r"got torch\.float32; convert it")]
)
@pytest.mark.parametrize("layer", [FastRGCNConv, FastRGATConv])
def test_edge_types_that_are_no_integers(layer, edge_type, got):
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    with pytest.raises(ValueError, match=f"edge_type: expected one integer per edge.*{got}"):
        layer(3, 2, 2)(torch.randn(4, 3), edge_index, edge_type)


@pytest.mark.parametrize("kind", [fastsparse_pyg.FastGATv2Conv, fastsparse_pyg.FastTransformerConv])
def test_edge_features_of_the_wrong_width(kind, device):
    layer = kind(6, 4, edge_dim=5).to(device)
    x, edge_index = torch.randn(9, 6, device=device), torch.randint(9, (2, 30), device=device)
    with pytest.raises(ValueError, match="edge_attr has 4 columns, got .4, 5.; in a layer, edge_dim"):
        layer(x, edge_index, torch.randn(30, 4, device=device))
