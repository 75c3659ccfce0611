"""How much Python of ours a warm step runs: the host bounds steps of small models."""

from __future__ import annotations

import torch
from dgl_cases import homogeneous
from dgl_layer_cases import CASES, Case, each_case
from frames import frames_of_step

#: Limits of a warm step on the CPU: frames, and files that they are of.
ASKED = (45, 12)
#: What single layers were measured to take. Lower it where one needs less.
MOST: dict[str, tuple[int, int]] = {
    "AGNNConv(allow_zero_in_degree=True,learn_beta=True)": (42, 18),
    "DotGatConv(allow_zero_in_degree=True)": (54, 21),
    "EGATConv()-3": (124, 26),
    "EdgeGATConv(allow_zero_in_degree=True)-3": (204, 32),
    "GATConv(allow_zero_in_degree=True)": (39, 13),
    "GATv2Conv(allow_zero_in_degree=True)": (41, 13),
    "GATConv(allow_zero_in_degree=True,residual=True)": (103, 22),
    "GATv2Conv(allow_zero_in_degree=True,residual=True)": (58, 23),
    "GINConv(max)": (60, 19),
    "GINEConv()--1": (46, 13),
    "GINEConv(learn_eps=True)--1": (75, 16),
    "GatedGCNConv(batch_norm=False,residual=False)-3": (106, 20),
    "GraphConv(norm=both,allow_zero_in_degree=True)": (31, 14),
    "GraphConv(norm=right,allow_zero_in_degree=True)": (28, 13),
    "GraphConv(norm=left,allow_zero_in_degree=True)": (29, 14),
    "GraphConv(allow_zero_in_degree=True)-weight": (65, 20),
    "PNAConv(aggregators=['mean', 'max', 'std'],scalers=['identity', 'amplification'],delta=2.5)": (36, 14),
    "PNAConv(aggregators=['mean', 'max', 'std'],scalers=['identity', 'amplification'],"
    "delta=2.5,edge_feat_size=3)-3": (43, 15),
    "SAGEConv(mean)": (33, 14),
    "SAGEConv(gcn)": (46, 16),
    "SAGEConv(pool)": (67, 20),
    "SAGEConv(mean)-weight": (42, 16),
    "SAGEConv(gcn)-weight": (63, 19),
}


def step_frames(case: Case) -> tuple[int, int]:
    """Frames and files of a step of the drop-in."""
    _, layer = case.pair(6, 4)
    graph, x = homogeneous(), torch.randn(30, 6, requires_grad=True)
    rest = case.rest(graph, 6)

    def forward() -> torch.Tensor:
        out = case.run(layer, graph, x, *rest)
        return out if isinstance(out, torch.Tensor) else out[0] + out[1].sum()

    return frames_of_step(forward)


@each_case(CASES)
def test_frames_of_a_warm_step(case: Case) -> None:
    frames, files = step_frames(case)
    most = MOST.get(case.id, ASKED)
    assert frames <= most[0], (frames, files)
    assert files <= most[1], (frames, files)
