"""Exact inference: the results of a full forward pass, whatever the tiles, places and dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dgl_cases import DGLError, dgl, fastsparse_dgl, homogeneous
from hook_cases import enabled
from torch import nn

from fastsparse_core.exact_inference import tiles

inference = fastsparse_dgl.inference
NODES = 30


class Model(nn.Module):
    """A model as DGL's examples have it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes, heads = [8, 12, 6, 5], [1, 2, 2]
        has_heads = kind.startswith("GAT")
        make = {
            "SAGE": lambda i, o: dgl.nn.SAGEConv(i, o, "mean"),
            "SAGE pool": lambda i, o: dgl.nn.SAGEConv(i, o, "pool"),
            "SAGE gcn": lambda i, o: dgl.nn.SAGEConv(i, o, "gcn"),
            "GCN": lambda i, o: dgl.nn.GraphConv(i, o),
            "GCN left": lambda i, o: dgl.nn.GraphConv(i, o, norm="left"),
            "GIN": lambda i, o: dgl.nn.GINConv(nn.Linear(i, o)),
            "GAT": lambda i, o: dgl.nn.GATConv(i, o, 2),
            "GATv2": lambda i, o: dgl.nn.GATv2Conv(i, o, 2),
        }[kind]
        widths = [size * (head if has_heads else 1) for size, head in zip(sizes, heads, strict=False)]
        self.layers = nn.ModuleList(make(i, o) for i, o in zip(widths, sizes[1:], strict=True))
        self.has_heads, self.dropout = has_heads, nn.Dropout(0.5)

    def forward(self, graph: Any, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(graph, x)
            is_last = number == len(self.layers) - 1
            if self.has_heads:
                x = x.mean(1) if is_last else x.flatten(1)
            if not is_last:
                x = self.dropout(F.elu(x))
        return x


KINDS = ["SAGE", "SAGE pool", "SAGE gcn", "GCN", "GCN left", "GIN", "GAT", "GATv2"]


def full(model: nn.Module, graph: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(graph, x)


@pytest.mark.parametrize("tile", [None, 1, 7, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_full_pass(kind: str, tile: int | None) -> None:
    graph, x, model = homogeneous(), torch.randn(NODES, 8), Model(kind)
    expected = full(model, graph, x)
    model.train()
    torch.testing.assert_close(inference(model, graph, x, tile=tile), expected, rtol=1e-4, atol=2e-5)
    assert model.training
    rows = torch.tensor([29, 3, 3])
    found = inference(model, graph, x, rows=rows, tile=tile)
    torch.testing.assert_close(found, expected[rows], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["SAGE", "GIN"])
def test_columns_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where features do not fit on a GPU."""
    graph, x, model = homogeneous(), torch.randn(NODES, 8), Model(kind)
    expected = full(model, graph, x)
    widths = []

    def three(self: tiles._Tiles, stage: tiles.Stage, stored: tiles._Rows, *more: object) -> int:
        widths.append(3 if stage.sums is not None and stored.data.size(0) == NODES else 0)
        return widths[-1]

    monkeypatch.setattr(tiles._Tiles, "_width_of_columns", three)
    torch.testing.assert_close(inference(model, graph, x), expected, rtol=1e-4, atol=2e-5)
    assert 3 in widths


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_full_pass_on_a_gpu(kind: str) -> None:
    graph, x, model = homogeneous(), torch.randn(NODES, 8), Model(kind)
    expected = full(model, graph, x)
    with enabled():  # pip's DGL has no CUDA support
        for features in (x, x.cuda()):
            found = inference(model.cuda(), graph, features, tile=7)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["SAGE", "GCN", "GAT"])
def test_bfloat16_and_mapped_files(kind: str, tmp_path: Path) -> None:
    graph, x, model = homogeneous(), torch.randn(NODES, 8), Model(kind)
    expected = full(model, graph, x)
    np.save(tmp_path / "x.npy", x.numpy())
    out = np.memmap(tmp_path / "out.bin", np.float32, "w+", shape=expected.shape)
    assert inference(model, graph, np.load(tmp_path / "x.npy", mmap_mode="r"), out=out, tile=7) is out
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-4, atol=2e-5)
    found = inference(model.bfloat16(), graph, x.bfloat16(), tile=7)
    assert found.dtype == torch.bfloat16
    plain = full(model, graph, x.bfloat16()).float()
    error, of_plain = ((result.float() - expected).abs().max().item() for result in (found, plain))
    assert error <= 2 * of_plain + 1e-2 * expected.abs().max().item()


def test_what_cannot_be_split() -> None:
    graph, x = homogeneous(), torch.randn(NODES, 8)
    with pytest.raises(ValueError, match=r"layers\[0\] \(SGConv\)"):
        inference([dgl.nn.SGConv(8, 4, k=2)], graph, x)
    with pytest.raises(ValueError, match="graph layers found in Linear: none"):
        inference(nn.Linear(8, 4), graph, x)
    with pytest.raises(ValueError, match="feat: expected floating features with a row for each of 30 nodes"):
        inference(Model("GCN"), graph, x[:3])
    with pytest.raises(DGLError, match="graph: expected a DGLGraph"):
        inference(Model("GCN"), "graph", x)
