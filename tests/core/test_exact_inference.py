"""Where results of exact inference are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

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
    """Its first rows stay on the device; whether all come there is seen when its source is gone."""
    monkeypatch.setattr(tiles, "_send", lambda source, target: target.copy_(source))
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

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._memory = torch.empty(shape, dtype=dtype, device="meta")

    def next(self, num_rows: int) -> torch.Tensor:
        return self._memory[:num_rows]

    def used(self, until: Any) -> None:
        pass


class _Event:
    def record(self) -> None:
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
