"""One timer for every benchmark.

Device time comes from events around each call, after a write that pushes the inputs out of the last-level
cache, and behind a short wait on the device that lets the host queue the whole call first: what is measured
is the device's work and not the host's.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: Bytes written between two calls: more than the last-level cache of any GPU of today.
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call.

    Attributes:
        median_ms: The median.
        p20_ms, p80_ms: The spread: the fastest and the slowest fifth begin here.
        samples: How many calls were timed.
        method: How.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    method: str

    def as_cell(self, prefix: str = "") -> dict[str, Any]:
        """The fields as entries of a record's cell, their names behind a prefix."""
        return {prefix + key: round(v, 6) if isinstance(v, float) else v for key, v in asdict(self).items()}


def summarise(milliseconds: Sequence[float], method: str) -> Timing:
    """Median and spread of single measurements."""
    if len(milliseconds) == 1:
        return Timing(milliseconds[0], milliseconds[0], milliseconds[0], 1, method)
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    return Timing(statistics.median(milliseconds), fifths[0], fifths[-1], len(milliseconds), method)


def in_turn(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Results by name of several calls, which alternate: other work on the machine slows all equally."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return found


def _samples(one_call_ms: float, budget_ms: float, min_calls: int, max_calls: int) -> int:
    return min(max(int(budget_ms / max(one_call_ms, 1e-3)), min_calls), max_calls)


def kernel_time(fn: Callable[[], Any], device: torch.device, *, budget_ms: float = 60.0) -> Timing:
    """Time of an operator's own work, inputs cold: on CUDA between events, else by the wall clock.

    Args:
        fn: The call.
        device: Where it works.
        budget_ms: About how long to measure; at least 5 and at most 100 calls are timed.

    Returns:
        Median and spread.
    """
    if device.type != "cuda":
        return wall_time(fn, device, budget_ms=budget_ms)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    for _ in range(3):
        fn()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    fn()
    queued = time.perf_counter()
    torch.cuda.synchronize(device)
    one_call_ms = (time.perf_counter() - begin) * 1e3
    # The wait must be longer than the host's work on one call. GPU clocks run at about 2 GHz.
    wait_cycles = int(min((queued - begin) * 1.5 + 50e-6, 2e-3) * 2e9)
    count = _samples(one_call_ms, budget_ms, 5, 100)
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        torch.cuda._sleep(wait_cycles)
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize(device)
    return summarise([s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)], "events, cold cache")


def step_time(
    fn: Callable[[], Any],
    device: torch.device,
    *,
    budget_ms: float = 1000.0,
    warm_up: int = 4,
    min_calls: int = 5,
) -> Timing:
    """Time per step of a loop: the host queues the next step while the device works, as training does.

    Args:
        fn: One step.
        device: Where it works.
        budget_ms: About how long to measure; at most 100 steps are timed.
        warm_up: Steps before that, at least 1.
        min_calls: Fewest steps to time.

    Returns:
        Median and spread.
    """
    if device.type != "cuda":
        return wall_time(fn, device, budget_ms=budget_ms, warm_up=warm_up, min_calls=min_calls)

    def steps(count: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            fn()
            mark.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]

    one_step_ms = steps(warm_up)[-1]
    return summarise(steps(_samples(one_step_ms, budget_ms, min_calls, 100)), "events, steps back to back")


def wall_time(
    fn: Callable[[], Any],
    device: torch.device,
    *,
    budget_ms: float = 1000.0,
    warm_up: int = 2,
    min_calls: int = 5,
    max_calls: int = 200,
) -> Timing:
    """Time from call to finished result by the host's clock: what a user waits, host work included.

    Args:
        fn: The call.
        device: Where it works; a CUDA device is synchronised before and after each call.
        budget_ms: About how long to measure.
        warm_up: Calls before that.
        min_calls: The minimum number of calls to time.
        max_calls: The maximum number of calls to time.

    Returns:
        Median and spread.
    """
    one = {"": fn}
    return wall_times(
        one, device, budget_ms=budget_ms, warm_up=warm_up, min_calls=min_calls, max_calls=max_calls
    )[""]


def wall_times(
    calls: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    budget_ms: float = 1000.0,
    warm_up: int = 2,
    min_calls: int = 5,
    max_calls: int = 200,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, Timing]:
    """`wall_time` of several calls, alternating, so that other work on the machine slows all alike.

    Before each timed call of several the same call is made once more: then its caches have its own data, and
    not that of another call.

    Args:
        calls: The calls, by name.
        device: As there, like what follows; the budget is that of each call.
        budget_ms: About how long to measure, if the calls took equally long, what is not timed aside.
        warm_up: Rounds before that.
        min_calls: Fewest rounds to time.
        max_calls: Most rounds to time.
        around: What is entered, by name, for a call and its repetition, and not timed.

    Returns:
        Median and spread by name.
    """
    around = around or {}

    def once(fn: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1e3

    def again(name: str, fn: Callable[[], Any]) -> float:
        with around.get(name, contextlib.nullcontext)():
            if len(calls) > 1:
                fn()
            return once(fn)

    turns = {name: partial(again, name, fn) for name, fn in calls.items()}
    in_turn(turns, warm_up)
    one_round = sum(times[0] for times in in_turn(turns, 1).values())
    times = in_turn(turns, _samples(one_round, budget_ms * len(calls), min_calls, max_calls))
    method = "wall clock, alternating" if len(calls) > 1 else "wall clock"
    return {name: summarise(times[name], method) for name in calls}
