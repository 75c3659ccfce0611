"""Exact inference: on which device results are stored, and how they are moved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastsparse_core import Adjacency
from fastsparse_core.exact_inference import tiles


@pytest.mark.parametrize(
    ("free", "freed", "later", "rows_here"),
    [(1_500, 2_000, 3_000, 52), (1_500, 2_000, 100, 52), (1_500, 0, 0, 0), (5_000, 0, 0, 0)],
)
def test_a_result_that_does_not_fit_yet_is_put_together(
    monkeypatch: pytest.MonkeyPatch, free: int, freed: int, later: int, rows_here: int
) -> None:
    """Some rows stay on the device. All rows move there if there is memory once the input is freed."""
    monkeypatch.setattr(tiles, "_send", lambda source, target, buffers: target.copy_(source))
    monkeypatch.setattr(tiles.Placement, "fits", lambda self, size: size <= 0.85 * free)
    monkeypatch.setattr(tiles.Placement, "free", lambda self: free)
    x = torch.randn(100, 5)
    placement = tiles.Placement(torch.device("cpu"))
    result = tiles._Result((100, 5), x.dtype, placement, None, freed)
    assert result._num_here == rows_here
    for start in range(0, 100, 7):
        result.write(start, x[start : start + 7])
    result.finish()
    monkeypatch.setattr(tiles.Placement, "free", lambda self: later)
    assert torch.equal(result.whole(), x)


class _PlainBuffers:
    """Buffers without page-locked memory, which needs a GPU."""

    def next(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="meta")

    def used(self, until: Any) -> None:
        pass


class _Event:
    def record(self) -> None:
        pass


class _Stream:
    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_no_error_of_a_written_piece_is_lost(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    stored: list[int] = []

    def store(target: torch.Tensor, *others: Any) -> None:
        stored.append(len(stored))
        if stored[-1] == failing:
            raise OSError("no space left on device")

    monkeypatch.setattr(tiles, "_store", store)
    monkeypatch.setattr(tiles, "_Buffers", _PlainBuffers)
    monkeypatch.setattr(tiles, "_PIECE_BYTES", 80)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    target, away = torch.zeros(12, 5), torch.device("meta")  # meta in place of a GPU
    result = tiles._Result((12, 5), target.dtype, tiles.Placement(away), target, 0)
    result.write(0, torch.empty(12, 5, device=away))
    with pytest.raises(OSError, match="no space left"):
        result.finish()
    assert stored == [0, 1, 2]


def test_inference_runs_with_the_models_gpu_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and streams are those of the current device."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    class Tiles:
        def __init__(self, adj: Adjacency, placement: tiles.Placement) -> None:
            assert current == [placement.device]
            raise InterruptedError

    monkeypatch.setattr(tiles, "_Tiles", Tiles)
    monkeypatch.setattr(torch.cuda, "device", device)
    placement = tiles.Placement(torch.device("cuda:1"))
    adj = Adjacency(torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32), (1, 1))
    with pytest.raises(InterruptedError):
        tiles.run(adj, torch.ones(1, 1), [], placement)


def _tiles_with_structure_on_the_host(monkeypatch: pytest.MonkeyPatch, col: torch.Tensor) -> tiles._Tiles:
    monkeypatch.setattr(tiles.Placement, "fits", lambda self, size: False)
    rowptr = torch.tensor([0, col.numel()])
    return tiles._Tiles(Adjacency(rowptr, col, (1, 1)), tiles.Placement(torch.device("cuda", 0)))


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_structure_is_page_locked_until_the_end(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """It is locked once, unlocked after an error of the GPU, too, and a refusal is no error."""
    calls: list[tuple[str, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        assert (size, flags) == (32, 0)
        calls.append(("lock", address))
        return int(is_refused)

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error")

    unregister = lambda address: calls.append(("unlock", address))  # noqa: E731
    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=unregister, cudaError=SimpleNamespace(success=0)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=fail))
    col = torch.zeros(8, dtype=torch.int32)
    found = _tiles_with_structure_on_the_host(monkeypatch, col)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", fail)  # the launch that reports the refusal
        found._lock_structure()
        if not is_refused:
            found._lock_structure()
    with pytest.raises(RuntimeError, match="CUDA error"):
        found.close()
    address = found.col.data_ptr()
    assert calls == [("lock", address)] + [("unlock", address)] * (not is_refused)


@pytest.mark.gpu
def test_page_locked_structure_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    col = torch.zeros(100_000, dtype=torch.int32)
    found = _tiles_with_structure_on_the_host(monkeypatch, col)
    found._lock_structure()
    assert found.col.is_pinned()
    assert torch.equal(found._sent(found.col[3:]).cpu(), col[3:])
    found.close()
    assert not found.col.is_pinned()
    # Memory that the driver may refuse to lock: kernels run as before.
    np.zeros(100_000, dtype=np.int32).tofile(tmp_path / "col")
    mapped = torch.from_numpy(np.memmap(tmp_path / "col", dtype=np.int32, mode="r"))
    found = _tiles_with_structure_on_the_host(monkeypatch, mapped)
    found._lock_structure()
    assert torch.ones(3, device="cuda").sum() == 3
    assert torch.equal(found._sent(found.col).cpu(), col)
    found.close()
