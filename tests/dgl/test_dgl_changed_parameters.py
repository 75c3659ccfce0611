"""Pruned, normalised and parametrised parameters: drop-ins compute with them as DGL's layers do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from changed_parameters import CHANGES, check_changed
from dgl_cases import dgl, homogeneous
from torch import Tensor, nn

from fastsparse_dgl import accelerate
from fastsparse_dgl.nn import DROP_INS

original = dgl.nn.pytorch
#: Layer, widths of the features of nodes and, where it takes them, of edges.
CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "AGNNConv": (lambda: original.AGNNConv(learn_beta=True), 6, 0),
    "DotGatConv": (lambda: original.DotGatConv(6, 4, 2), 6, 0),
    "EGATConv": (lambda: original.EGATConv(6, 5, 4, 3, 2), 6, 5),
    "EdgeGATConv": (lambda: original.EdgeGATConv(6, 5, 4, 2), 6, 5),
    "GATConv": (lambda: original.GATConv(6, 4, 2, residual=True), 6, 0),
    "GATv2Conv": (lambda: original.GATv2Conv(6, 4, 2, residual=True), 6, 0),
    "GINConv": (lambda: original.GINConv(nn.Linear(6, 4), "mean", learn_eps=True), 6, 0),
    "GINEConv": (lambda: original.GINEConv(nn.Linear(6, 4), learn_eps=True), 6, 6),
    "GraphConv": (lambda: original.GraphConv(6, 4), 6, 0),
    "GraphConv, wider": (lambda: original.GraphConv(4, 6, "right"), 4, 0),
    "PNAConv": (
        lambda: original.PNAConv(6, 4, ["mean", "max"], ["identity"], 2.5, edge_feat_size=5),
        6,
        5,
    ),
    **{
        f"SAGEConv, {kind}": (lambda kind=kind: original.SAGEConv(6, 4, kind), 6, 0)
        for kind in ("mean", "gcn", "pool")
    },
}
if hasattr(original, "GatedGCNConv"):  # since DGL 2.0
    CASES["GatedGCNConv"] = (lambda: original.GatedGCNConv(6, 5, 4, batch_norm=False), 6, 5)


def test_every_drop_in_has_a_case() -> None:
    made = {type(make()) for make, _, _ in CASES.values()}
    assert set(DROP_INS) - made == {original.HeteroGraphConv}  # which has no parameters of its own


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CASES)
def test_changed_parameters(name: str, change: str) -> None:
    """On the CPU, where pip's DGL has its own layers; where parameters lie decides nothing here."""
    make, width, edge_width = CASES[name]
    graph = homogeneous()
    torch.manual_seed(3)
    layer = make()
    drop_in = copy.deepcopy(layer)
    assert accelerate(drop_in, show=False).swapped
    inputs = [torch.randn(graph.num_nodes(), width)]
    if edge_width:
        inputs.append(torch.randn(graph.num_edges(), edge_width))

    def call(one: nn.Module) -> Tensor:
        out = one(graph, *inputs)
        return torch.cat([each.flatten() for each in out]) if isinstance(out, tuple) else out

    assert check_changed(layer, drop_in, call, change, 2e-5) or change == "spectral_norm"
