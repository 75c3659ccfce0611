"""The benchmark of the formats once, tiny, through the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import record, suite, tables
from benchmarks.__main__ import run

pytest.importorskip("fastsparse_core", exc_type=ImportError)


def test_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(suite.SUITE["dd"], nodes=400, edges=3_000)
    monkeypatch.setattr(suite, "SUITE", {"dd": small})
    monkeypatch.setenv("FASTSPARSE_DATA", str(tmp_path))
    ring = np.arange(100, dtype=np.int32)
    np.savez(tmp_path / "ring.npz", num_nodes=np.int64(100), edge_index=np.stack([ring, (ring + 1) % 100]))
    run(
        ["formats", "--device", "cpu", "--out", str(tmp_path), "--graphs", "dd", "real:ring"],
        Console(quiet=True),
    )
    result = record.load(next(tmp_path.glob("*/formats.json")))
    cells = result["cells"]
    assert [cell["graph"] for cell in cells] == ["dd"] * 3 + ["ring"] * 3
    assert [cell["grouping"] for cell in cells] == ["none", "minhash", "auto"] * 2
    assert all(cell["status"] == "ok" for cell in cells)
    assert all(cell["zeros_8x1"] < cell["zeros_16x1"] for cell in cells)
    # A window of the ring has ten columns, the last one its four rows' six.
    assert cells[3]["vectors_8x1"] == 12 * 10 + 6
    assert not cells[3]["kept"]
    shown = tables.report(result)
    assert "| ring | 200 |" in shown
    assert "**Footprint, MB**" in shown
