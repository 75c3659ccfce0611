"""The loop of every benchmark: its command line, cases and cells, errors, progress and the record."""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from . import suite
from .record import RESULTS, Recorder
from .timing import Timing, kernel_time

T = TypeVar("T")
Cell = dict[str, Any]
#: The fields that identify a cell, and the function that measures it.
Job = tuple[Cell, Callable[[], Cell]]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Largest relative error against float64 that a product may have and still be timed. cuSPARSE's float16
#: result is rounded once, at the end, as ours is.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def option(default: Any = None, help: str | None = None, **more: Any) -> dict[str, Any]:
    """Arguments of `add_argument`, with the type and the number of values taken from the default.

    Args:
        default: A list or tuple: one value or more; False: a flag.
        help: As there.
        **more: As there; choices without a default are those of several values, all by default.
    """
    if default is None and "choices" in more and "type" not in more:
        default = list(more["choices"])
    if default is False:
        return {"action": "store_true", "help": help, **more}
    if isinstance(default, list | tuple):
        default = list(default)
        more = {"nargs": "+", "type": type(default[0]) if default else str, **more}
    elif default is not None:
        more = {"type": type(default), **more}
    return {"default": default, "help": help, **more}


def add_common(
    parser: argparse.ArgumentParser, *, graphs: Iterable[str] = (), budget_ms: float | None = None
) -> None:
    """Options of every benchmark.

    Args:
        parser: gets them.
        graphs: those of the suite that are measured by default; none: it takes others.
        budget_ms: how long a timing takes by default; None: unknown.
    """
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--commit", help="the commit measured, where the files are a copy without history")
    if graphs:
        parser.add_argument("--graphs", nargs="+", default=list(graphs), help=suite.NAMES)
    if budget_ms is not None:
        parser.add_argument("--budget-ms", type=float, default=budget_ms, help="time to spend on each timing")


def recorder(
    name: str, options: argparse.Namespace, *, device: torch.device | None = None, variant: str = ""
) -> Recorder:
    """A recorder that keeps the benchmark's own options as settings.

    Args:
        name: of the benchmark.
        options: its command line.
        device: what is measured; None: the option's.
        variant: tells several records of one benchmark apart in the file's name.
    """
    housekeeping = ("out", "commit", "command", "benchmark")
    settings = {key: value for key, value in vars(options).items() if key not in housekeeping}
    out = Recorder(name, device or torch.device(options.device), settings, options.out, options.commit)
    if variant:
        out.path = out.path.with_stem(f"{name}_{variant}")
    return out


@dataclass(frozen=True)
class Run:
    """A benchmark that is being run."""

    options: argparse.Namespace
    device: torch.device
    out: Recorder
    start: float = field(default_factory=time.monotonic)

    @property
    def is_late(self) -> bool:
        """Whether the option ``--limit-s`` has passed."""
        return time.monotonic() > self.start + self.options.limit_s

    def grid(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """All combinations of the values of some options."""
        return itertools.product(*(getattr(self.options, name) for name in names))

    def time(self, fn: Callable[[], Any], timer: Callable[..., Timing] = kernel_time, **more: Any) -> Cell:
        """The cell of a timing that takes as long as ``--budget-ms`` says."""
        return timer(fn, self.device, budget_ms=self.options.budget_ms, **more).as_cell()

    def checked(self, fn: Callable[[], Tensor], exact: Tensor, dtype: str) -> Callable[[], Cell]:
        """Measures error and device time of a call in a dtype, against the exact result."""

        def measure() -> Cell:
            poison(exact.shape, DTYPES[dtype], exact.device)
            error = relative_error(fn(), exact)
            check(error, TOLERANCE[dtype])
            return {"error": error, **self.time(fn)}

        return measure

    def compared(
        self,
        step: Callable[[], Tensor],
        expected: list[Tensor],
        tolerance: float | None,
        timer: Callable[..., Timing] = kernel_time,
        *,
        above: bool = False,
    ) -> Callable[[], Cell]:
        """Measures time and peak memory of a step whose result is the expected one.

        Args:
            step: the call.
            expected: its result. An empty list gets the result of this step.
            tolerance: the largest relative error; None: any.
            timer: how.
            above: whether to subtract the memory in use before the step.
        """

        def measure() -> Cell:
            result, error = step().detach(), None
            if expected:
                error = relative_error(result, expected[0])
                check(error, math.inf if tolerance is None else tolerance)
            peak = peak_bytes(step, self.device, above=above)
            cell = {"error": error, "peak_bytes": peak, **self.time(step, timer)}
            expected.extend([] if expected else [result])
            return cell

        return measure


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its command line.

    Attributes:
        name: Of the benchmark.
        cells: The cells of one case, in order: each is measured before the next is asked for. What it holds
            on the device ends with the case.
        cases: The option that lists the cases, or what makes them from the options.
        graphs, budget_ms: As `add_common` takes them.
        options: Further options, as `option` makes them, by name.
        notes: Sentences that the reader of the numbers needs.
        variant: Tells several records of the benchmark apart.
        device: The device to measure; None: the device of the option.
    """

    name: str
    cells: Callable[[Run, Any], Iterable[Job | Cell]]
    cases: str | Callable[[argparse.Namespace], Iterable[Any]] = "graphs"
    graphs: Sequence[str] = ()
    budget_ms: float | None = None
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: Sequence[str] | Callable[[argparse.Namespace], Iterable[str]] = ()
    variant: Callable[[argparse.Namespace], str] = lambda options: ""
    device: str | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The options."""
        add_common(parser, graphs=self.graphs, budget_ms=self.budget_ms)
        for name, arguments in self.options.items():
            parser.add_argument(f"--{name.replace('_', '-')}", **arguments)

    def run(self, options: argparse.Namespace) -> Path:
        """Runs the benchmark; returns the path of its record."""
        cases = getattr(options, self.cases) if isinstance(self.cases, str) else self.cases(options)
        device = torch.device(self.device or options.device)
        out = recorder(self.name, options, device=device, variant=self.variant(options))
        for note in self.notes(options) if callable(self.notes) else self.notes:
            out.note(note)
        run = Run(options, device, out)
        for case in progress(list(cases), self.name):
            for job in self.cells(run, case):
                # A dict is a cell that the benchmark measured itself.
                out.add(**(job if isinstance(job, dict) else {**job[0], **attempt(job[1])}))
                del job
            release()
        out.write()  # even without a cell
        return out.path


def progress(items: Iterable[T], description: str, total: int | None = None) -> tqdm[T]:
    """A progress bar over items, whose number may have to be told; a log file gets few updates of it."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(items, desc=description, total=total, mininterval=interval, dynamic_ncols=True)


def end_workers() -> None:
    """Ends the processes that this one started, such as persistent workers of loaders.

    Call it while their loader is referenced: when that is deleted, PyTorch waits up to 5 s for each worker.
    """
    processes = multiprocessing.active_children()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def release() -> None:
    """Ends worker processes, and returns unreferenced memory to the device."""
    end_workers()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronise(device: torch.device) -> None:
    """Waits for all that a device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class WrongResult(Exception):
    """A result that is not timed."""

    def __init__(self, error: float, what: str = "") -> None:
        super().__init__(f"wrong: {what}relative error {error:.1e}")
        self.error = min(error, 1e300)


def attempt(fn: Callable[[], Cell]) -> Cell:
    """Runs a measurement; wrong results, lack of memory and unsupported calls become the cell's status."""
    try:
        return {"status": "ok", **fn()}
    except WrongResult as wrong:
        return {"status": str(wrong), "error": wrong.error}
    except torch.cuda.OutOfMemoryError:
        status = "out of memory"
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        status = f"failed: {str(error).strip().splitlines()[0][:160]}" if str(error).strip() else "failed"
    # Outside the handler, whose traceback would keep the tensors of the failed call alive.
    release()
    return {"status": status}


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the float64 reference; inf when `out` holds a nan."""
    error = ((out.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
    return error if math.isfinite(error) else math.inf


def check(error: float, tolerance: float, what: str = "") -> None:
    """Raises :class:`WrongResult`, which ends a cell, unless a relative error is within what is accepted."""
    if not error <= tolerance:
        raise WrongResult(error, what)


def poison(shape: list[int] | torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Fills the memory of the next result with nan, so that elements that are not written show."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)


def peak_bytes(step: Callable[[], Any], device: torch.device, *, above: bool = False) -> int | None:
    """Peak memory of a step, or its increase over the memory in use before; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if above else 0
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def geometric_mean(values: Iterable[float]) -> float:
    """Exp of the mean logarithm; nan for no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
