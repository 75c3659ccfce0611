"""The report of a comparison: a table on the terminal, a JSON log and curves as PNG."""

from __future__ import annotations

import importlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .errors import ExampleError
from .training import LayerResult, RunResult

METRIC_TITLES = {"accuracy": "test accuracy", "roc_auc": "test ROC-AUC"}


def make_console() -> Console:
    """Makes a console for standard output. Lines in files are so long that no table column wraps."""
    return Console(width=None if sys.stdout.isatty() else 120)


#: With fewer training steps per layer, the table has a note that its times may be noise.
_FEW_STEPS = 20


def check_writable(path: Path | None, option: str) -> None:
    """Raises an error for an output path that cannot be written, before the training starts."""
    if path is None:
        return
    problem = ""
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = f"is in the folder {path.parent}, which does not exist"
    else:
        try:
            is_new = not path.exists()
            with path.open("ab"):  # a test by writing, because a file system may be read-only or full
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
    if problem:
        raise ExampleError(f"{option} {path}: expected the path of a file to write, but it {problem}.")


def check_plotting(path: Path | None) -> None:
    """Raises an error for --plot if matplotlib is missing, before the training starts."""
    check_writable(path, "--plot")
    if path is not None:
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            raise ExampleError("--plot needs matplotlib: pip install 'fastsparse-gnn[bench]'.") from error


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Returns mean and sample standard deviation; the deviation is nan for a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _percent(values: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{100 * mean:.2f} %" if math.isnan(deviation) else f"{100 * mean:.2f} ± {100 * deviation:.2f} %"


def _bytes(count: int | None) -> str:
    if count is None:
        return "not measured"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def speed_up(results: Sequence[LayerResult], result: LayerResult) -> float | None:
    """Returns the speed-up of a step over the reference layer, or over ReLU; None if neither was trained."""
    for other in results:
        if other.conv in ("reference", "relu"):
            return other.step_ms() / result.step_ms()
    return None


def print_table(console: Console, title: str, results: Sequence[LayerResult]) -> None:
    """Prints one row per layer."""
    table = Table(title=title, title_justify="left")
    table.add_column("layer", no_wrap=True)
    metrics = list(results[0].runs[0].scores)
    for metric in metrics:
        table.add_column(METRIC_TITLES[metric], justify="right")
    for column in ("ms per epoch", "speed-up", "first epoch ms", "peak memory"):
        table.add_column(column, justify="right")
    for result in results:
        ratio = speed_up(results, result)
        table.add_row(
            result.layer,
            *(_percent(result.scores(metric)) for metric in metrics),
            f"{result.step_ms():.2f}",
            "-" if ratio is None else f"{ratio:.2f}x",
            f"{result.first_step_ms():.1f}",
            _bytes(result.peak_bytes()),
        )
    console.print(table)
    if len(results) > 1 and results[0].num_steps() < _FEW_STEPS:
        console.print(
            f"[dim]Times are medians of {results[0].num_steps()} steps, so the speed-up may be noise; "
            f"--epochs {_FEW_STEPS} or more tells more.[/dim]"
        )


def print_parts(console: Console, results: Sequence[LayerResult]) -> None:
    """Prints the parts of an epoch's time: waiting for batches, gathering and training, by the host's clock.

    A GPU samples batches during the steps, while the host continues. Sampling for which the host did not wait
    is in none of these times. Gathering on the GPU is in the time of training.
    """
    table = Table(title="milliseconds per epoch", title_justify="left")
    table.add_column("layer", no_wrap=True)
    for column in ("waiting for batches", "gathering", "training"):
        table.add_column(column, justify="right")
    for result in results:
        epochs = [
            (waiting, gather, step - waiting - gather)
            for run in result.runs
            for waiting, gather, step in zip(run.waiting_ms, run.gather_ms, run.step_ms, strict=True)
        ]
        medians = (statistics.median(part) for part in zip(*epochs, strict=True))
        table.add_row(result.layer, *(f"{ms:.1f}" for ms in medians))
    console.print(table)


def _run_log(run: RunResult) -> dict[str, Any]:
    return {
        "scores": run.scores,
        "best_epoch": run.best_epoch,
        "peak_bytes": run.peak_bytes,
        "loss": run.loss,
        "train": run.train,
        "val": run.val,
        "test": run.test,
        "step_ms": [round(ms, 4) for ms in run.step_ms],
        "waiting_ms": [round(ms, 4) for ms in run.waiting_ms],
        "gather_ms": [round(ms, 4) for ms in run.gather_ms],
    }


def to_log(settings: dict[str, Any], data: dict[str, Any], results: Sequence[LayerResult]) -> dict[str, Any]:
    """Returns settings, data, versions and every run of every layer, as values that JSON supports."""
    layers = []
    for result in results:
        scores = {}
        for metric in result.runs[0].scores:
            mean, deviation = mean_and_deviation(result.scores(metric))
            scores[metric] = {"mean": mean, "std": None if math.isnan(deviation) else deviation}
        layers.append(
            {
                "conv": result.conv,
                "layer": result.layer,
                "scores": scores,
                "step_ms": result.step_ms(),
                "first_step_ms": result.first_step_ms(),
                "speed_up": speed_up(results, result),
                "peak_bytes": result.peak_bytes(),
                "runs": [_run_log(run) for run in result.runs],
            }
        )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        versions["gpu"] = torch.cuda.get_device_name()
    return {"settings": settings, "data": data, "versions": versions, "layers": layers}


def write_json(path: Path, log: dict[str, Any]) -> None:
    """Writes a log. NaN and infinite numbers become null, because JSON has no such numbers."""
    path.write_text(json.dumps(_finite(log), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, title: str, metric: str, results: Sequence[LayerResult]) -> None:
    """Draws loss and test score of each layer's first run, against epochs and against training time."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharey="row", constrained_layout=True)
    for place, result in enumerate(results):
        run = result.runs[0]
        seconds = [sum(run.step_ms[: i + 1]) / 1e3 for i in range(len(run.step_ms))]
        epochs = range(1, len(run.loss) + 1)
        # Both layers compute the same, so the curves over epochs coincide. Dashes make both visible.
        style = {
            "label": result.layer,
            "color": f"C{place}",
            "linestyle": ("-", "--")[place % 2],
            "linewidth": 1.6,
        }
        scored = [i for i, score in enumerate(run.test) if math.isfinite(score)]
        for column, across in enumerate((epochs, seconds)):
            axes[0, column].plot(across, run.loss, **style)
            axes[1, column].plot([across[i] for i in scored], [run.test[i] for i in scored], **style)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel(METRIC_TITLES[metric])
    for row in axes:
        row[0].set_xlabel("epoch")
        row[1].set_xlabel("seconds spent in training steps")
        for axis in row:
            axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
