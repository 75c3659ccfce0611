"""``python -m fastsparse_core.tune``: measures the sizes from which one kernel is faster than another.

The results are stored as the GPU's profile in the user's cache folder. FastSparse then chooses kernels by
this profile (docs/dev/decisions/gpu_profiles.md). Measuring takes a few minutes; nothing else should use the
GPU during this time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastsparse_core import gpu
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency

#: Total device time for which a call is repeated, in milliseconds.
_BUDGET_MS = 60.0

#: A measurement: size, time of the first kernel, and time of the second kernel, in milliseconds.
Point = tuple[float, float, float]
Clock = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Experiment:
    """The measurement of one constant of a profile.

    Attributes:
        constant: name of the constant in `GpuProfile`.
        about: description of the compared kernels.
        points: function that measures and yields one point after the other.
    """

    constant: str
    about: str
    points: Callable[[torch.device, Clock], Iterator[Point]]


def crossover(points: Sequence[Point]) -> float | None:
    """Estimates the size at which the faster kernel changes.

    The estimate is an interpolation on a logarithmic scale between the measured sizes on either side.

    Args:
        points: (size, time of the first kernel, time of the second), in any order.

    Returns:
        The size; None if one kernel is faster at every point.
    """
    ordered = sorted(points)
    gains = [math.log(first / second) for _, first, second in ordered]
    for nth in range(1, len(ordered)):
        if gains[nth - 1] < 0 <= gains[nth] or gains[nth - 1] >= 0 > gains[nth]:
            share = gains[nth - 1] / (gains[nth - 1] - gains[nth])
            low, high = math.log(ordered[nth - 1][0]), math.log(ordered[nth][0])
            return math.exp(low + share * (high - low))
    return None


def time_of(call: Callable[[], object]) -> float:
    """Device time of a call in milliseconds, the median of several calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < _BUDGET_MS and len(times) < 200:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def structure(num_dst: int, num_src: int, num_edges: int, share: float, device: torch.device) -> Adjacency:
    """A structure of random edges. A share of the edges has columns that rows of a window have in common."""
    generator = torch.Generator().manual_seed(num_edges)
    row = torch.randint(num_dst, (num_edges,), generator=generator).sort().values
    col = torch.randint(num_src, (num_edges,), generator=generator)
    window = row // HEIGHT
    few = max(1, num_edges // max(num_dst, 1))
    common = (window * 2654435761 + torch.randint(few, (num_edges,), generator=generator) * 40503) % num_src
    col = torch.where(torch.rand(num_edges, generator=generator) < share, common, col)
    adj = Adjacency.from_coo(row.to(device), col.to(device), (num_dst, num_src), group_rows="none")
    return adj.prepare(backward=False)


def _compare(
    adj: Adjacency, width: int, dtype: torch.dtype, first: str, second: str, clock: Clock
) -> tuple[float, float]:
    x = torch.randn(adj.num_src, width, device=adj.device).to(dtype)
    times = [clock(lambda it=it: spmm(adj, x, algorithm=it)) for it in (first, second)]  # type: ignore[misc]
    return times[0], times[1]


def _shared(device: torch.device, clock: Clock) -> Iterator[Point]:
    for share in (0.0, 0.15, 0.3, 0.45, 0.6, 0.8):
        adj = structure(100_000, 100_000, 2_000_000, share, device)
        vectors = adj.bsb.num_vectors / adj.num_edges
        first, second = _compare(adj, 64, torch.float32, "csr", "flashsparse", clock)
        yield vectors, first, second


def _narrow(device: torch.device, clock: Clock) -> Iterator[Point]:
    adj = structure(100_000, 100_000, 2_000_000, 0.1, device)
    for width in (8, 16, 24, 32, 64):
        yield width, *_compare(adj, width, torch.float32, "csr", "flashsparse", clock)


def _few_edges(device: torch.device, clock: Clock) -> Iterator[Point]:
    """Compares the time of a product with twice the time of a product with very few edges."""
    x = torch.randn(20_000, 64, device=device)
    empty = structure(20_000, 20_000, 1000, 0.0, device)
    launch = clock(lambda: spmm(empty, x, algorithm="csr"))
    for num_edges in (25_000, 50_000, 100_000, 200_000, 400_000, 800_000):
        adj = structure(20_000, 20_000, num_edges, 0.0, device)
        yield num_edges, clock(lambda adj=adj: spmm(adj, x, algorithm="csr")), 2 * launch  # type: ignore[misc]


EXPERIMENTS = (
    Experiment("few_edges", "spmm of few edges against its launch", _few_edges),
    Experiment("shared", "csr and flashsparse over shared columns, float32", _shared),
    Experiment("narrow", "csr and flashsparse over narrow features, float32", _narrow),
)


def gradient_rate(device: torch.device, clock: Clock) -> float:
    """Measures the rate of reading a tensor much larger than the L2 cache, in bytes per millisecond."""
    x = torch.ones(64 << 20, device=device)
    return x.nbytes / clock(lambda: x.sum())


def tune(device: torch.device, clock: Clock, note: Callable[[str, str], None]) -> gpu.GpuProfile:
    """Measures the constants of `EXPERIMENTS`, ``gradient_rate`` and ``miss_rate``; others do not change.

    Args:
        device: a GPU.
        clock: function that returns the time of a call in milliseconds.
        note: function that is called with the name and the result of each constant.

    Returns:
        The GPU's profile with the measured constants.
    """
    before = gpu.profile_of(device)
    found: dict[str, float] = {}
    for experiment in EXPERIMENTS:
        at = crossover(list(experiment.points(device, clock)))
        if at is not None:
            found[experiment.constant] = float(f"{at:.3g}")
        known = getattr(before, experiment.constant)
        note(experiment.constant, f"{known:g} -> {found.get(experiment.constant, known):g}")
    rate = gradient_rate(device, clock)
    found |= {"gradient_rate": float(f"{rate:.3g}")}
    found |= {"miss_rate": float(f"{before.miss_rate * rate / before.gradient_rate:.3g}")}
    note("gradient_rate", f"{before.gradient_rate:g} -> {rate:g}")
    constants: dict[str, Any] = {"source": f"tuned {datetime.date.today()}", **found}
    return dataclasses.replace(before, **constants)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastsparse_core.tune", description=__doc__)
    parser.add_argument("--device", default="cuda", help="GPU to measure (default: cuda)")
    parser.add_argument("--out", type=Path, help="file to write instead of the one in the cache folder")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        print(
            f"--device: expected a GPU that PyTorch can use, got {options.device}; CPU kernels do not use a "
            "GPU profile",
            file=sys.stderr,
        )
        return 1

    from rich.progress import Progress

    with torch.cuda.device(device), Progress() as progress:
        task = progress.add_task("measuring", total=len(EXPERIMENTS) + 1)

        def note(constant: str, what: str) -> None:
            progress.console.print(f"{constant}: {what}")
            progress.advance(task)

        profile = tune(torch.device("cuda", torch.cuda.current_device()), time_of, note)
    path = options.out or gpu.cache_folder() / f"{gpu.file_name(profile.name)}.json"
    gpu.write(profile, path)
    print(f"stored in {path}; FastSparse uses it from the next start of Python on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
