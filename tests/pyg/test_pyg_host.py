"""How much Python of ours a warm call runs: the host bounds steps of small models."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric import nn as pyg

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
from fastsparse_pyg.nn import any_layer

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
        out, calls = counted(layer, x, edge_index)
    torch.testing.assert_close(out, expected)
    assert len(calls) <= MOST_CALLS, calls
    assert len(set(calls)) <= MOST_FILES, sorted(set(calls))


def counted(layer: nn.Module, *given: Any) -> tuple[Any, list[str]]:
    """The result of a call, and the file of every call of ours within it."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("fastsparse_core" in file or "fastsparse_pyg" in file):
            calls.append(file)

    sys.setprofile(note)
    try:
        out = layer(*given)
    finally:
        sys.setprofile(None)
    return out, calls


#: Layers whose code is PyG's where edges are few, for all of which it propagates once.
LEFT_TO_PYG = {
    "LEConv": lambda: pyg.LEConv(16, 8),
    "FiLMConv": lambda: pyg.FiLMConv(16, 8),
    "EdgeConv": lambda: pyg.EdgeConv(nn.Linear(32, 8)),
    "SuperGATConv": lambda: pyg.SuperGATConv(16, 8),
}


@pytest.mark.parametrize("where", ["on the CPU", "new, as on a GPU", "known, as on a GPU"])
@pytest.mark.parametrize("name", LEFT_TO_PYG)
def test_little_of_ours_runs_before_the_code_of_pyg(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LEFT_TO_PYG[name]().eval()
    x, edge_index = torch.randn(40, 16), torch.randint(40, (2, 200))
    with torch.no_grad():
        expected = layer(x, edge_index)
        accelerate(layer, show=False)
        layer(x, edge_index)  # which may say so
        if where != "on the CPU":
            monkeypatch.setattr(any_layer, "FEW_EDGES", 0)
            monkeypatch.setattr(any_layer, "are_few_on_gpu", lambda *_: True)
        for _ in range(SIGHTS + 1 if where.startswith("known") else 0):
            layer(x, edge_index)
        out, calls = counted(layer, x, edge_index)
    assert torch.equal(out, expected)
    # `forward`, `propagate`, and one question: whether edges are few. On a GPU that asks one more.
    assert len(calls) <= 3, calls
