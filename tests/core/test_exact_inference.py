"""Where results of exact inference lie."""

from __future__ import annotations

import pytest
import torch

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
