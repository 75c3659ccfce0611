"""How much Python of ours a warm step runs: the host bounds steps of small models."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import homogeneous
from frames import frames_of_step
from test_dgl_changed_parameters import CASES

from fastsparse_dgl import accelerate

#: Most frames of a warm step on the CPU and most files that they are of, to be lowered where less is needed.
MOST: dict[str, tuple[int, int]] = {
    "AGNNConv": (42, 20),
    "DotGatConv": (50, 24),
    "EGATConv": (132, 27),
    "EdgeGATConv": (209, 35),
    "GATConv": (98, 24),
    "GATv2Conv": (56, 26),
    "GINConv": (28, 14),
    "GINEConv": (73, 17),
    "GraphConv": (36, 15),
    "GraphConv, wider": (37, 15),
    "PNAConv": (155, 27),
    "SAGEConv, mean": (42, 19),
    "SAGEConv, gcn": (49, 18),
    "SAGEConv, pool": (68, 21),
    "GatedGCNConv": (109, 21),
}


@pytest.mark.parametrize("name", CASES)
def test_frames_of_a_warm_step(name: str) -> None:
    make, width, edge_width = CASES[name]
    layer, graph = make(), homogeneous()
    assert accelerate(layer, show=False).swapped
    given = [torch.randn(graph.num_nodes(), width, requires_grad=True)]
    if edge_width:
        given.append(torch.randn(graph.num_edges(), edge_width, requires_grad=True))

    def forward() -> torch.Tensor:
        out = layer(graph, *given)
        return out if isinstance(out, torch.Tensor) else out[0] + out[1].sum()

    frames, files = frames_of_step(forward)
    assert frames <= MOST[name][0], (frames, files)
    assert files <= MOST[name][1], (frames, files)
