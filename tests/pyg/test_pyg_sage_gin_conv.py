"""FastSAGEConv and FastGINConv against the originals: outputs, all gradients, every option and input kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyg_cases import alike, as_kind, close, gradients, random_graph, same, simple_graph
from torch import nn
from torch_geometric.nn import GINConv, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation

from fastsparse_pyg import FastGINConv, FastSAGEConv


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


def test_bipartite_against_the_flow_is_left_to_pyg():
    edge_index = random_graph(20, 20)
    reference, layer = pair("sage", (6, 3), 4, "cpu", flow="target_to_source")
    x_src, x_dst = torch.randn(20, 6), torch.randn(20, 3)
    same(reference, layer, lambda conv: conv((x_src, x_dst), edge_index), [])


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
    assert inputs == [torch.float32] * 2  # a hook sees the same dtype as in the original
    with torch.autocast(device, torch.bfloat16):
        whole = layer(x, edge_index)
    names = {node.name() for node, _ in whole.grad_fn.next_functions[0][0].next_functions if node is not None}
    assert ("_AggregateTransformBackward" in names) == isinstance(first, nn.Linear)


@pytest.mark.usefixtures("kernels_only")
def test_aggregation_modules(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    for aggregation in (MeanAggregation, MaxAggregation):
        reference, layer = (conv(6, 4, aggr=aggregation()).to(device) for conv in (SAGEConv, FastSAGEConv))
        same(reference, layer, lambda conv: conv(x, edge_index), [x])
