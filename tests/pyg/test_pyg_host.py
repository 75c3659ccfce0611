"""How much Python of ours a warm call runs: launch overhead decides the time of steps of small models."""

from __future__ import annotations

import copy

import pytest
import torch
from frames import counted, frames_of_step
from torch import nn
from torch_geometric import nn as pyg

import fastsparse_pyg
from benchmarks.pyg_layers import FEATURES, Inputs, Layer
from benchmarks.pyg_layers import LAYERS as TABLE
from fastsparse_pyg import (
    FastGATConv,
    FastGATv2Conv,
    FastGCNConv,
    FastGINConv,
    FastSAGEConv,
    FastTransformerConv,
    accelerate,
)
from fastsparse_pyg.caching import SIGHTS
from fastsparse_pyg.nn import DROP_INS, any_layer

LAYERS = {
    "GCN": lambda: FastGCNConv(16, 16),
    "SAGE": lambda: FastSAGEConv(16, 16),
    "SAGE, sum": lambda: FastSAGEConv(16, 16, aggr="sum"),
    "GIN": lambda: FastGINConv(nn.Linear(16, 16)),
    "GAT": lambda: FastGATConv(16, 4, heads=4),
    "GATv2": lambda: FastGATv2Conv(16, 4, heads=4),
    "transformer": lambda: FastTransformerConv(16, 4, heads=4),
}
MOST_CALLS, MOST_FILES = 20, 8


@pytest.mark.parametrize("name", LAYERS)
def test_a_warm_call_is_short(device: str, name: str) -> None:
    if device == "cuda" and name not in ("GCN", "GIN"):
        pytest.skip("counted on the CPU; launches on CUDA have steps of their own")
    layer = LAYERS[name]().to(device).eval()
    x, edge_index = torch.randn(40, 16, device=device), torch.randint(40, (2, 200), device=device)
    with torch.no_grad():
        expected = layer(x, edge_index)
        for _ in range(20):
            layer(x, edge_index)
        out, calls = counted(lambda: layer(x, edge_index))
    torch.testing.assert_close(out, expected)
    assert len(calls) <= MOST_CALLS, calls
    assert len(set(calls)) <= MOST_FILES, sorted(set(calls))


_attributed = TABLE["GINEConv"].call
CASES: dict[str, Layer] = {
    **{name: layer for name, layer in TABLE.items() if getattr(pyg, name) in DROP_INS},
    "GCNConv, weights": Layer(TABLE["GCNConv"].make, TABLE["GraphConv"].call),
    "GATConv, edges": Layer(lambda w: pyg.GATConv(w, w // 2, heads=2, edge_dim=FEATURES), _attributed),
    "GATv2Conv, edges": Layer(lambda w: pyg.GATv2Conv(w, w // 2, heads=2, edge_dim=FEATURES), _attributed),
    "ResGatedGraphConv, edges": Layer(lambda w: pyg.ResGatedGraphConv(w, w, edge_dim=FEATURES), _attributed),
    "TransformerConv, edges": Layer(
        lambda w: pyg.TransformerConv(w, w // 2, heads=2, edge_dim=FEATURES), _attributed
    ),
}
#: Limits of a warm step on the CPU: number of Python frames, and of files that they belong to.
LIMIT = (45, 12)


def test_every_drop_in_is_counted() -> None:
    assert set(DROP_INS) - {type(case.make(16)) for case in CASES.values()} == {pyg.LabelPropagation}


@pytest.mark.parametrize("name", CASES)
def test_frames_of_a_warm_step(name: str) -> None:
    edges = torch.randint(60, (2, 200))
    case, it = CASES[name], Inputs.draw(edges, 60, 16, torch.float32)
    layer = case.make(16)
    assert accelerate(layer, show=False).swapped
    frames, files = frames_of_step(lambda: case.call(layer, it))
    assert frames <= LIMIT[0], (frames, files)
    assert files <= LIMIT[1], (frames, files)


@pytest.mark.parametrize("name", CASES)
def test_enabled_layers_run_as_drop_ins_do(name: str) -> None:
    """Two frames more: the call, and the check for a report."""
    edges = torch.randint(60, (2, 200))
    case, it = CASES[name], Inputs.draw(edges, 60, 16, torch.float32)
    swapped, enabled = case.make(16), case.make(16)
    accelerate(swapped, show=False)
    frames, _ = frames_of_step(lambda: case.call(swapped, it))
    fastsparse_pyg.enable("layers")
    try:
        found, _ = frames_of_step(lambda: case.call(enabled, it))
    finally:
        fastsparse_pyg.disable()
    assert found <= frames + 2


#: Layers without a plan on few edges, and how many frames more than PyG's a call may take on a GPU.
LEFT_TO_PYG = {
    "LEConv": (lambda: pyg.LEConv(16, 8), 0),
    "FiLMConv": (lambda: pyg.FiLMConv(16, 8), 0),
    "EdgeConv": (lambda: pyg.EdgeConv(nn.Linear(32, 8)), 0),
    # It makes new edges in every call, with self loops, so that the search for known edges never ends.
    "SuperGATConv": (lambda: pyg.SuperGATConv(16, 8), 11),
}


@pytest.mark.parametrize("where", ["on the CPU", "new, as on a GPU", "known, as on a GPU"])
@pytest.mark.parametrize("name", LEFT_TO_PYG)
def test_few_edges_take_no_more_frames_than_pyg(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, more = LEFT_TO_PYG[name]
    layer = make().eval()
    original = copy.deepcopy(layer)
    x, edge_index = torch.randn(40, 16), torch.randint(40, (2, 200))
    with torch.no_grad():
        expected = original(x, edge_index)
        accelerate(layer, show=False)
        layer(x, edge_index)  # this call may report the fallback
        if where != "on the CPU":
            monkeypatch.setattr(any_layer, "FEW_EDGES", 0)
            monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
        for _ in range(SIGHTS + 1 if where.startswith("known") else 0):
            layer(x, edge_index)
        out, frames = counted(lambda: layer(x, edge_index), only_ours=False)
        _, of_pyg = counted(lambda: original(x, edge_index), only_ours=False)
    torch.testing.assert_close(out, expected)
    assert len(frames) <= len(of_pyg) + more
