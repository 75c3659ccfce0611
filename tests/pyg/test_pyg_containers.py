"""The layers inside PyG's own containers and model classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyg_cases import close, random_graph, same
from torch import nn
from torch_geometric.nn import GCNConv, HeteroConv, SAGEConv, Sequential, to_hetero
from torch_geometric.nn.models import GCN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from fastsparse_pyg import FastGCNConv, FastSAGEConv


class FastGCN(GCN):
    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
        return FastGCNConv(in_channels, out_channels, **kwargs)


class FastGraphSAGE(GraphSAGE):
    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
        return FastSAGEConv(in_channels, out_channels, **kwargs)


@pytest.mark.parametrize(("original", "fast"), [(GCN, FastGCN), (GraphSAGE, FastGraphSAGE)])
@pytest.mark.usefixtures("kernels_only")
def test_basic_gnn(device: str, original: type[BasicGNN], fast: type[BasicGNN]) -> None:
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    reference, model = (kind(6, 16, 3, 4, jk="cat").to(device) for kind in (original, fast))
    same(reference, model, lambda one: one(x, edge_index), [x])


@pytest.mark.usefixtures("kernels_only")
def test_sequential(device: str) -> None:
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    reference, model = (
        Sequential("x, edge_index", [(conv(6, 8), "x, edge_index -> x"), nn.ReLU(), nn.Linear(8, 3)]).to(
            device
        )
        for conv in (GCNConv, FastGCNConv)
    )
    same(reference, model, lambda one: one(x, edge_index), [x])


HETERO_EDGES = {
    ("user", "rates", "film"): random_graph(20, 12, 50),
    ("film", "rated_by", "user"): random_graph(12, 20, 50, seed=1),
    ("user", "knows", "user"): random_graph(20, 20, 50, seed=2),
}


@pytest.mark.usefixtures("kernels_only")
def test_hetero_conv() -> None:
    x = {"user": torch.randn(20, 4), "film": torch.randn(12, 5)}
    reference, model = (
        HeteroConv({kind: conv((-1, -1), 6) for kind in HETERO_EDGES}) for conv in (SAGEConv, FastSAGEConv)
    )
    expected = reference(x, HETERO_EDGES)
    model(x, HETERO_EDGES)
    model.load_state_dict(reference.state_dict())
    for name, out in model(x, HETERO_EDGES).items():
        close(out, expected[name])


@pytest.mark.usefixtures("kernels_only")
def test_to_hetero() -> None:
    class Model(nn.Module):
        def __init__(self, conv: type[nn.Module]) -> None:
            super().__init__()
            self.first, self.second = conv((-1, -1), 8), conv((-1, -1), 3)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    x = {"user": torch.randn(20, 4), "film": torch.randn(12, 5)}
    metadata = (list(x), list(HETERO_EDGES))
    reference, model = (to_hetero(Model(conv), metadata) for conv in (SAGEConv, FastSAGEConv))
    expected = reference(x, HETERO_EDGES)
    model(x, HETERO_EDGES)
    model.load_state_dict(reference.state_dict())
    for name, out in model(x, HETERO_EDGES).items():
        close(out, expected[name])


def _replica(module: nn.Module) -> nn.Module:
    """As DataParallel makes them: parameters are plain attributes."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _replica(child)
    for name, parameter in module._parameters.items():
        if parameter is None:
            made._parameters[name] = None
        else:
            setattr(made, name, parameter * 1.0)
    return made


def test_replicas_of_data_parallel() -> None:
    x, edge_index = torch.randn(40, 6), random_graph()
    for layer in (FastSAGEConv(6, 6), FastGCNConv(6, 6, bias=False), FastGCNConv(6, 6)):
        expected = layer(x, edge_index)
        for _ in range(2):
            close(_replica(layer)(x, edge_index), expected)
