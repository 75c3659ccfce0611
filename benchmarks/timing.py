"""The timers of all benchmarks: for kernels, for steps of a loop, and for the wall clock.

- `kernel_time` measures GPU work alone, between two CUDA events around each call. Before each call, a large
  write evicts the inputs from the last-level cache. Then the GPU waits for the time that the host takes to
  queue the call (at most 2 ms), so host work is not measured.
- `step_time` measures steps that the host queues ahead, as in training.
- `wall_time` and `wall_times` measure what a user waits for, including host work.

On the CPU, all of them use the wall clock.
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

#: Number of bytes written between two calls: larger than the last-level cache of any current GPU.
FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call.

    Attributes:
        median_ms: The median.
        p20_ms, p80_ms: The 20th and the 80th percentile.
        samples: Number of timed calls.
        method: The clock, and how the calls followed each other, in words.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    method: str

    def as_cell(self, prefix: str = "") -> dict[str, Any]:
        """The fields as entries of a record's cell. The prefix is put before each name."""
        return {prefix + key: round(v, 6) if isinstance(v, float) else v for key, v in asdict(self).items()}


def summarise(milliseconds: Sequence[float], method: str) -> Timing:
    """Median and percentiles of single measurements."""
    if len(milliseconds) == 1:
        return Timing(milliseconds[0], milliseconds[0], milliseconds[0], 1, method)
    fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
    return Timing(statistics.median(milliseconds), fifths[0], fifths[-1], len(milliseconds), method)


def in_turn(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Runs several calls alternately, so that other work on the machine slows all of them equally.

    Returns:
        The results of each call, by name.
    """
    found: dict[str, list[T]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(call())
    return found


def _samples(one_call_ms: float, budget_ms: float, min_calls: int, max_calls: int) -> int:
    return min(max(int(budget_ms / max(one_call_ms, 1e-3)), min_calls), max_calls)


def kernel_time(fn: Callable[[], Any], device: torch.device, *, budget_ms: float = 60.0) -> Timing:
    """Times an operator with cold inputs: between CUDA events on a GPU, by the wall clock on the CPU.

    Args:
        fn: The call.
        device: The device of the call.
        budget_ms: About how long to measure; at least 5 and at most 100 calls are timed.

    Returns:
        Median and percentiles.
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
    """Times the steps of a loop. The host queues the next step while the device works, as in training.

    Args:
        fn: One step.
        device: The device of the call.
        budget_ms: About how long to measure; at most 100 steps are timed.
        warm_up: Number of steps before the timed ones, at least 1.
        min_calls: The minimum number of steps to time.

    Returns:
        Median and percentiles.
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
    """Times a call by the host's clock, from the call to the finished result, including host work.

    Args:
        fn: The call.
        device: The device of the call; a CUDA device is synchronised before and after each call.
        budget_ms: About how long to measure.
        warm_up: Number of calls before the timed ones.
        min_calls: The minimum number of calls to time.
        max_calls: The maximum number of calls to time.

    Returns:
        Median and percentiles.
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
    """Times several calls as `wall_time` does, alternating, so that other work slows all of them equally.

    If there are several calls, each runs once more, untimed, before it is timed. The caches then contain its
    own data, and not the data of another call.

    Args:
        calls: The calls, by name.
        device: The device of the calls; a CUDA device is synchronised before and after each call.
        budget_ms: About how long to measure each call, without untimed runs, if all calls take equally long.
        warm_up: Number of rounds (one run of each call) before the timed ones.
        min_calls: The minimum number of rounds to time.
        max_calls: The maximum number of rounds to time.
        around: Context managers by name of the call. Each is active during a call and its untimed run.

    Returns:
        Median and percentiles, by name.
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
