"""Pruned, normalised and parametrised parameters: drop-ins compute with them as PyG's layers do."""

from __future__ import annotations

import copy

import pytest
import torch
from changed_parameters import CHANGES, check_changed
from pyg_cases import random_graph
from torch import nn
from torch_geometric import nn as pyg

from benchmarks.pyg_layers import FEATURES, LAYERS, Inputs, Layer
from fastsparse_pyg import accelerate
from fastsparse_pyg.nn import DROP_INS

N, WIDTH = 40, 6
CASES = {
    **{name: layer for name, layer in LAYERS.items() if getattr(pyg, name) in DROP_INS},
    "GAT with edges": Layer(
        lambda w: pyg.GATConv(w, w, heads=2, edge_dim=FEATURES, residual=True), LAYERS["GINEConv"].call
    ),
    "GATv2 with edges": Layer(
        lambda w: pyg.GATv2Conv(w, w, heads=2, edge_dim=FEATURES), LAYERS["GINEConv"].call
    ),
    "ResGated with edges": Layer(
        lambda w: pyg.ResGatedGraphConv(w, w, edge_dim=FEATURES), LAYERS["GINEConv"].call
    ),
}


def test_every_drop_in_has_a_case() -> None:
    made = {type(CASES[name].make(WIDTH)) for name in CASES}
    assert set(DROP_INS) - made == {pyg.LabelPropagation}  # it has no parameters


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CASES)
def test_changed_parameters(name: str, change: str, device: str) -> None:
    it = Inputs.draw(random_graph(N, device=device), N, WIDTH, torch.float64)
    torch.manual_seed(3)
    layer: nn.Module = CASES[name].make(WIDTH).to(device, torch.float64)
    drop_in = copy.deepcopy(layer)
    assert accelerate(drop_in, show=False).swapped
    tolerance = 5e-5 if name == "ClusterGCNConv" else 1e-9  # PyG's code divides in float32
    count = check_changed(layer, drop_in, lambda one: CASES[name].call(one, it), change, tolerance)
    assert count or not any(item.dim() for item in layer.parameters()) or change == "spectral_norm"
