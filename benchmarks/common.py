"""What the benchmark modules share: their options, progress, and the handling of what a rival cannot do."""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from . import suite
from .record import RESULTS, Recorder

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def add_common(
    parser: argparse.ArgumentParser, *, graphs: Iterable[str] = (), budget_ms: float | None = None
) -> None:
    """Options of every benchmark.

    Args:
        parser: gets them.
        graphs: those of the suite that are measured by default; none: it takes others.
        budget_ms: how long a timing takes by default; None: nobody can say.
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


def progress(items: Iterable[T], description: str, total: int | None = None) -> tqdm[T]:
    """A progress bar over items, whose number may have to be told; a log file gets few updates of it."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(items, desc=description, total=total, mininterval=interval, dynamic_ncols=True)


def release() -> None:
    """Gives memory that nothing refers to any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class WrongResult(Exception):
    """A result that is not timed."""

    def __init__(self, error: float, what: str = "") -> None:
        super().__init__(f"wrong: {what}relative error {error:.1e}")
        self.error = min(error, 1e300)


def attempt(fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs a measurement; what is wrong, does not fit in memory or is not supported is the cell's status."""
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


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the float64 reference; inf when `out` holds a nan."""
    error = ((out.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
    return error if math.isfinite(error) else math.inf


def geometric_mean(values: Iterable[float]) -> float:
    """Exp of the mean logarithm; nan for no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
