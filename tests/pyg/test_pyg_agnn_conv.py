"""FastAGNNConv against AGNNConv: outputs, all gradients, every option."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import close, random_graph
from torch_geometric.nn import AGNNConv

from fastsparse_pyg import FastAGNNConv


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
