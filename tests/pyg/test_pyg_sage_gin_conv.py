"""FastSAGEConv and FastGINConv against the originals: outputs, all gradients, every option and input kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyg_cases import KINDS, SAGE_OPTIONS, alike, as_kind, close, gradients, random_graph, same, simple_graph
from torch import nn
from torch_geometric.nn import GINConv, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation

from fastsparse_pyg import FastGINConv, FastSAGEConv

REDUCE = ["sum", "add", "mean", "max", "min"]


def mlp(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_in, 7), nn.ReLU(), nn.Linear(7, num_out))


def pair(family: str, num_in: Any, num_out: int, device: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The original layer and ours."""
    if family == "sage":
        layers = SAGEConv(num_in, num_out, **options), FastSAGEConv(num_in, num_out, **options)
    else:
        width = num_in if isinstance(num_in, int) else num_in[0]
        layers = GINConv(mlp(width, num_out), **options), FastGINConv(mlp(width, num_out), **options)
    return layers[0].to(device), layers[1].to(device)


@pytest.fixture(params=["sage", "gin"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("aggr", REDUCE)
@pytest.mark.parametrize("options", SAGE_OPTIONS, ids=str)
@pytest.mark.parametrize("width", [(8, 5), (8, 8), (5, 8)], ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_sage_matches_the_original(device, width, options, aggr):
    edge_index = random_graph(device=device)
    reference, layer = pair("sage", *width, device, aggr=aggr, **options)
    for requires_grad in (True, False):
        x = torch.randn(40, width[0], device=device, requires_grad=requires_grad)
        same(reference, layer, lambda conv, x=x: conv(x, edge_index), [x])


@pytest.mark.parametrize("aggr", REDUCE)
@pytest.mark.parametrize(
    "options", [{}, {"eps": 0.3}, {"train_eps": True, "eps": 0.1}, {"flow": "target_to_source"}], ids=str
)
@pytest.mark.usefixtures("kernels_only")
def test_gin_matches_the_original(device, options, aggr):
    edge_index = random_graph(device=device)
    reference, layer = pair("gin", 6, 4, device, aggr=aggr, **options)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, edge_index), [x])


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", [*KINDS, "csc"])
@pytest.mark.usefixtures("kernels_only")
def test_input_kinds(device, family, kind, aggr):
    edge_index = simple_graph(device=device)
    reference, layer = pair(family, 6, 4, device, aggr=aggr)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    graph = as_kind(kind, edge_index, 40, 40)
    same(reference, layer, lambda conv: conv(x, edge_index), [x], fast_call=lambda conv: conv(x, graph))


@pytest.mark.parametrize("kind", ["csr", "coo", "csc", "SparseTensor"])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
@pytest.mark.usefixtures("kernels_only")
def test_values_of_a_matrix(family, kind, aggr):
    """The original multiplies by the values of a torch.sparse matrix, and drops those of a SparseTensor."""
    edge_index = random_graph()
    weight = torch.rand(edge_index.size(1))
    reference, layer = pair(family, 6, 4, "cpu", aggr=aggr)
    graph = as_kind(kind, edge_index, 40, 40, weight)
    x = torch.randn(40, 6, requires_grad=aggr != "max" and kind == "csr")
    layer.load_state_dict(reference.state_dict())
    if x.requires_grad:
        same(reference, layer, lambda conv: conv(x, graph), [x])
    else:
        with torch.no_grad():
            close(layer(x, graph), reference(x, graph))


@pytest.mark.usefixtures("kernels_only")
def test_values_changed_in_place_are_seen():
    """All values 1 are skipped, but not once they are something else."""
    edge_index = simple_graph()
    matrix = as_kind("csr", edge_index, 40, 40)
    layer = FastSAGEConv(6, 4, aggr="sum")
    x = torch.randn(40, 6)
    layer(x, matrix)
    matrix.values().mul_(2.0)
    close(layer(x, matrix), layer(x, as_kind("csr", edge_index, 40, 40, torch.full((200,), 2.0))))


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("with_size", [False, True])
@pytest.mark.usefixtures("kernels_only")
def test_bipartite(device, family, aggr, with_size):
    edge_index = random_graph(30, 20, device=device)
    num_in = (6, 3) if family == "sage" else 6
    reference, layer = pair(family, num_in, 4, device, aggr=aggr)
    x_src = torch.randn(30, 6, device=device, requires_grad=True)
    x_dst = torch.randn(20, 3 if family == "sage" else 6, device=device, requires_grad=True)
    size = (30, 20) if with_size else None
    same(reference, layer, lambda conv: conv((x_src, x_dst), edge_index, size), [x_src, x_dst])
    for kind in ("EdgeIndex", "Adjacency", "csr"):
        graph = as_kind(kind, edge_index, 30, 20)
        if kind == "csr" and aggr != "sum":
            continue  # repeated edges are merged there
        same(
            reference,
            layer,
            lambda conv: conv((x_src, x_dst), edge_index, size),
            [x_src, x_dst],
            fast_call=lambda conv, graph=graph: conv((x_src, x_dst), graph),
        )


@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex", "csr", "Adjacency"])
@pytest.mark.usefixtures("kernels_only")
def test_bipartite_without_destination_features(device, family, kind):
    edge_index = random_graph(30, 20, device=device)
    reference, layer = pair(family, (6, 3) if family == "sage" else 6, 4, device, aggr="sum")
    x = torch.randn(30, 6, device=device, requires_grad=True)
    graph = as_kind(kind, edge_index, 30, 20)
    same(
        reference,
        layer,
        lambda conv: conv((x, None), edge_index, (30, 20)),
        [x],
        fast_call=lambda conv: conv((x, None), graph, (30, 20)),
    )
    if kind == "edge_index":  # PyG takes as many destinations as sources then
        same(reference, layer, lambda conv: conv((x, None), edge_index), [x])
        same(reference, layer, lambda conv: conv((x, None), edge_index, (30, None)), [x])


def test_bipartite_against_the_flow_is_left_to_pyg():
    edge_index = random_graph(20, 20)
    reference, layer = pair("sage", (6, 3), 4, "cpu", flow="target_to_source")
    x_src, x_dst = torch.randn(20, 6), torch.randn(20, 3)
    same(reference, layer, lambda conv: conv((x_src, x_dst), edge_index), [])


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.usefixtures("kernels_only")
def test_static_graph_and_more_dimensions(device, family, aggr):
    edge_index = random_graph(device=device)
    for shape, options in (((3, 40, 6), {}), ((2, 3, 40, 6), {}), ((40, 3, 6), {"node_dim": 0})):
        for num_out in (4, 9):
            reference, layer = pair(family, 6, num_out, device, aggr=aggr, **options)
            x = torch.randn(shape, device=device, requires_grad=True)
            same(reference, layer, lambda conv, x=x: conv(x, edge_index), [x])


@pytest.mark.usefixtures("kernels_only")
def test_strided_features(device, family):
    edge_index = random_graph(device=device)
    reference, layer = pair(family, 6, 4, device)
    wide = torch.randn(40, 11, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(wide[:, 3:9], edge_index), [wide])
    transposed = torch.randn(6, 40, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(transposed.t(), edge_index), [transposed])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.usefixtures("kernels_only")
def test_dtypes(device, family, dtype, aggr):
    edge_index = random_graph(device=device)
    reference, layer = pair(family, 6, 4, device, aggr=aggr)
    layer.to(dtype)
    reference.double().load_state_dict(layer.state_dict())
    x = torch.randn(40, 6, device=device).to(dtype)
    got = layer(x, edge_index)
    assert got.dtype == dtype
    close(
        got.double(),
        reference(x.double(), edge_index),
        1e-12 if dtype == torch.float64 else 100 * torch.finfo(dtype).eps,
    )


@pytest.mark.usefixtures("kernels_only")
def test_autocast(device, family):
    edge_index = random_graph(device=device)
    for num_out in (4, 9):
        reference, layer = pair(family, 6, num_out, device)
        layer.load_state_dict(reference.state_dict())
        x = torch.randn(40, 6, device=device, requires_grad=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            got, expected = layer(x, edge_index), reference(x, edge_index)
        assert got.dtype == expected.dtype
        close(got.float(), expected.float(), 5e-2)
        assert all(gradient.isfinite().all() for gradient in gradients(got, [x, *layer.parameters()]))


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("under", [torch.bfloat16, None])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_sage_is_one_step(device, under, aggr):
    """One node of autograd's graph, under autocast too, for float32 features and for a layer's result."""
    edge_index = random_graph(device=device)
    reference, layer = pair("sage", 6, 6, device, aggr=aggr)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(40, 6, device=device, requires_grad=True)
    with torch.autocast(device, under, enabled=under is not None):
        hidden = layer(x, edge_index)
        found, expected = layer(hidden.relu(), edge_index), reference(hidden.relu(), edge_index)
    for out in (hidden, found):
        assert out.grad_fn.name() == "_AggregateTransformBackward"
        assert out.dtype == (under or torch.float32)
    tolerance = 2e-2 if under else 1e-5
    inputs = [x, *layer.parameters()]
    close(found.float(), expected.float(), tolerance)
    grads = gradients(found, inputs)
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("first", [nn.Linear(6, 6), nn.Identity(), nn.LayerNorm(6)], ids=str)
def test_gin_under_autocast(device, first):
    """One node of autograd's graph where a linear layer is next; results in the original's dtypes."""
    edge_index = random_graph(device=device)
    inputs = []
    reference, layer, watched = (
        conv(nn.Sequential(first, nn.Tanh()), eps=0.25).to(device)
        for conv in (GINConv, FastGINConv, FastGINConv)
    )
    watched.nn.register_forward_pre_hook(lambda _, given: inputs.append(given[0].dtype))
    x = torch.randn(40, 6, device=device, requires_grad=True)
    for features in (x, x.detach().bfloat16().requires_grad_()):
        with torch.autocast(device, torch.bfloat16):
            expected = reference(features, edge_index)
            outputs = [conv(features, edge_index) for conv in (layer, layer, watched)]
        (wanted,) = gradients(expected, [features])
        for found in outputs:
            alike(found, expected, 3e-2)
            alike(*gradients(found, [features]), wanted, 5e-2)
    assert inputs == [torch.float32] * 2  # a hook sees what the original gives
    with torch.autocast(device, torch.bfloat16):
        whole = layer(x, edge_index)
    names = {node.name() for node, _ in whole.grad_fn.next_functions[0][0].next_functions if node is not None}
    assert ("_AggregateTransformBackward" in names) == isinstance(first, nn.Linear)


@pytest.mark.usefixtures("kernels_only")
def test_lazy(device):
    edge_index = random_graph(30, 20, device=device)
    reference, layer = pair("sage", (-1, -1), 4, device)
    x = torch.randn(30, 6, device=device), torch.randn(20, 3, device=device)
    reference(x, edge_index)
    assert layer(x, edge_index).shape == (20, 4)
    same(reference, layer, lambda conv: conv(x, edge_index), [])


@pytest.mark.usefixtures("kernels_only")
def test_aggregation_modules(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    for aggregation in (MeanAggregation, MaxAggregation):
        reference, layer = (conv(6, 4, aggr=aggregation()).to(device) for conv in (SAGEConv, FastSAGEConv))
        same(reference, layer, lambda conv: conv(x, edge_index), [x])


def test_double_backward(device, family):
    edge_index = random_graph(12, num_edges=20, device=device)
    if family == "sage":
        layer = FastSAGEConv(3, 4).to(device, torch.float64)
    else:
        layer = FastGINConv(nn.Sequential(nn.Linear(3, 4), nn.Tanh())).to(device, torch.float64)
    x = torch.randn(12, 3, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index), (x,))


def test_state_dict_and_repr_are_the_original_s():
    for family, keys in (
        ("sage", ["lin_l.bias", "lin_l.weight", "lin_r.weight"]),
        ("gin", ["eps", "nn.0.bias", "nn.0.weight", "nn.2.bias", "nn.2.weight"]),
    ):
        reference, layer = pair(family, 4, 6, "cpu")
        assert sorted(layer.state_dict()) == sorted(reference.state_dict()) == keys
        layer.load_state_dict(reference.state_dict())
        reference.load_state_dict(layer.state_dict())
        assert isinstance(layer, type(reference))
        assert repr(layer) == "Fast" + repr(reference)
