"""FastAGNNConv against AGNNConv: outputs, all gradients, every option."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import random_graph
from torch_geometric.nn import AGNNConv

from fastsparse_pyg import FastAGNNConv


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
