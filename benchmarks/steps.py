"""Calls that are timed where their results are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import WrongResult, relative_error
from .timing import Timing, kernel_time


def check(error: float, tolerance: float) -> None:
    """Raises :class:`WrongResult`, which ends a cell, unless a relative error is within what is accepted."""
    if not error <= tolerance:
        raise WrongResult(error)


def poison(shape: list[int] | torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Fills the memory that the allocator hands out for a result next: what nothing writes shows as a nan."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)


def timed(
    fn: Callable[[], Tensor], exact: Tensor, dtype: torch.dtype, tolerance: float, budget_ms: float
) -> dict[str, Any]:
    """Error and device time of a call that gives the exact result in a dtype."""
    poison(exact.shape, dtype, exact.device)
    error = relative_error(fn(), exact)
    check(error, tolerance)
    return {"error": error, **kernel_time(fn, exact.device, budget_ms=budget_ms).as_cell()}


def peak_bytes(step: Callable[[], Any], device: torch.device, *, above: bool = False) -> int | None:
    """Peak of a step's memory, or of what it takes above what is held before; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if above else 0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    step: Callable[[], Tensor],
    expected: Tensor | None,
    tolerance: float | None,
    device: torch.device,
    budget_ms: float,
    timer: Callable[..., Timing] = kernel_time,
    *,
    above: bool = False,
) -> dict[str, Any]:
    """Time and peak memory of a step whose result is the expected one.

    Args:
        step: the call.
        expected: what it should return; None: whatever it does.
        tolerance: the largest relative error; None: any.
        device: where it works.
        budget_ms: about how long to measure.
        timer: how.
        above: whether memory that is held before does not count.
    """
    result = step().detach()
    error = None if expected is None else relative_error(result, expected)
    if error is not None and tolerance is not None:
        check(error, tolerance)
    peak = peak_bytes(step, device, above=above)
    timing = timer(step, device, budget_ms=budget_ms)
    return {"result": result, "error": error, "peak_bytes": peak, **timing.as_cell()}
