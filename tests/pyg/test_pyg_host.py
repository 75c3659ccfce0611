"""How much Python of ours a warm call runs: a step of a small model takes as long as the host needs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from fastsparse_pyg import (
    FastGATConv,
    FastGATv2Conv,
    FastGCNConv,
    FastGINConv,
    FastSAGEConv,
    FastTransformerConv,
)

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
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("fastsparse_core" in file or "fastsparse_pyg" in file):
            calls.append(file)

    with torch.no_grad():
        expected = layer(x, edge_index)
        for _ in range(20):
            layer(x, edge_index)
        sys.setprofile(note)
        try:
            out = layer(x, edge_index)
        finally:
            sys.setprofile(None)
    torch.testing.assert_close(out, expected)
    assert len(calls) <= MOST_CALLS, calls
    assert len(set(calls)) <= MOST_FILES, sorted(set(calls))
