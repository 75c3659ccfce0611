"""FastAGNNConv against AGNNConv: outputs, all gradients, every option."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import close, random_graph, same
from torch_geometric.nn import AGNNConv

from fastsparse_pyg import FastAGNNConv, prepare

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}

OPTIONS = [
    {},
    {"requires_grad": False},
    {"add_self_loops": False},
    {"flow": "target_to_source"},
    {"flow": "target_to_source", "add_self_loops": False},
    {"node_dim": 0},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.usefixtures("kernels_only")
def test_matches_the_original(device, options, width, dtype):
    edge_index = random_graph(device=device)
    reference, layer = (conv(**options).to(device, dtype) for conv in (AGNNConv, FastAGNNConv))
    reference.beta.data.fill_(-1.7)
    x = torch.randn(40, width, device=device, dtype=dtype)
    x[4] = 0  # its norm is clamped
    x.requires_grad_()
    same(reference, layer, lambda conv: conv(x, edge_index), [x], tolerance=TOLERANCE[dtype], floor=1)
    graph = prepare(edge_index, 40, flow=layer.flow)
    close(layer(x, graph), reference(x, edge_index), TOLERANCE[dtype])


@pytest.mark.usefixtures("kernels_only")
def test_mixed_dtypes_promote_like_the_original(device):
    edge_index = random_graph(device=device)
    for x_dtype, beta_dtype in ((torch.float16, torch.float32), (torch.float32, torch.float64)):
        reference, layer = (conv().to(device, beta_dtype) for conv in (AGNNConv, FastAGNNConv))
        x = torch.randn(40, 6, device=device).to(x_dtype)
        close(layer(x, edge_index), reference(x, edge_index), 3e-3 if x_dtype == torch.float16 else 1e-5)


def test_beta_is_trained_or_constant(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device)
    layer = FastAGNNConv().to(device)
    layer(x, edge_index).square().sum().backward()
    assert layer.beta.grad.abs() > 0
    constant = FastAGNNConv(requires_grad=False)
    assert [*constant.state_dict()] == ["beta"]
    assert not list(constant.parameters())


def test_other_dimensions_run_the_original(device):
    edge_index = random_graph(device=device)
    layer = FastAGNNConv().to(device)
    with pytest.raises(Exception, match="size|shape|dimension|expand"):
        AGNNConv().to(device)(torch.randn(3, 40, 6, device=device), edge_index)
    with pytest.raises(Exception, match="size|shape|dimension|expand"):
        layer(torch.randn(3, 40, 6, device=device), edge_index)
