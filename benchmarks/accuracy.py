"""Test accuracy of the examples in several precisions, against the frameworks' own layers in float32.

For the GCN this is FlashSparse's table 8. On a GPU the drop-ins run on the tensor cores from the first step.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from fastsparse_core import algorithms

from .record import REPOSITORY
from .runner import Benchmark, Cell, Run, option, progress

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class Model(NamedTuple):
    """An example, and the settings that run by default.

    Attributes:
        example: Its module.
        datasets: Names of the datasets.
        frameworks: Names of the frameworks.
        precisions: Precisions of the drop-ins on a GPU. On the CPU, only fp32 and bf16 of these run.
        runs: Number of repetitions.
        options: Further options for the example's command line.
    """

    example: str
    datasets: tuple[str, ...]
    frameworks: tuple[str, ...]
    precisions: tuple[str, ...]
    runs: int
    options: tuple[str, ...] = ()


def _molecules(kind: str) -> Model:
    """Layers with edge features, on 400 random molecules."""
    arguments = ("--model", kind, "--molecules", "400", "--batch-size", "64")
    return Model("molecules", ("molecules",), ("pyg", "dgl"), ("fp32",), 5, arguments)


#: DGL's own attention layers run only on request: without CUDA they would take most of the time.
MODELS = {
    "gcn": Model(
        "gcn", ("cora", "citeseer", "minesweeper", "actor", "amazon_photo"), ("pyg", "dgl"), PRECISIONS, 10
    ),
    "gat": Model("gat", ("cora", "minesweeper", "actor"), ("pyg",), ("fp32", "bf16"), 10),
    "agnn": Model("agnn", ("cora",), ("pyg",), ("fp32", "bf16"), 10),
    "gt": Model("graph_transformer", ("molhiv",), ("pyg",), ("fp32", "bf16"), 3),
    "gine": _molecules("gine"),
    "gps": _molecules("gps"),
    "pna": _molecules("pna"),
}


class Task(NamedTuple):
    """Training runs of one layer on one dataset in one precision, for all seeds.

    Attributes:
        model: Of `MODELS`.
        dataset, framework, conv, precision: As the example's options.
        device: As asked; `_train` says where it really ran.
        algorithm: Of the drop-in's products.
        runs: Repetitions.
        epochs: None: the example's recipe.
    """

    model: str
    dataset: str
    framework: str
    conv: str
    precision: str
    device: str
    algorithm: str
    runs: int
    epochs: int | None

    @property
    def name(self) -> dict[str, str]:
        """The name that identifies the task in a record."""
        return {
            "model": self.model,
            "dataset": Path(self.dataset).stem,
            "framework": self.framework,
            "conv": self.conv,
            "precision": self.precision,
        }

    def arguments(self, device: str) -> list[str]:
        """The example's command line."""
        arguments = ["--dataset", self.dataset, "--framework", self.framework, "--conv", self.conv]
        arguments += ["--precision", self.precision, "--device", device, "--runs", str(self.runs)]
        arguments += MODELS[self.model].options
        return arguments if self.epochs is None else [*arguments, "--epochs", str(self.epochs)]


def cells(run: Run, tasks: list[Task]) -> Iterator[Cell]:
    """All cells, in the order of the tasks and not in the order in which they finished."""
    for task, cells in progress(_outcomes(tasks, run.options.jobs), "trainings", len(tasks)):
        yield from ({**task.name, **cell} for cell in cells)
    names = [task.name for task in tasks]
    run.out.record["cells"].sort(key=lambda cell: names.index({key: cell[key] for key in names[0]}))
    run.out.write()


def _tasks(options: argparse.Namespace) -> list[Task]:
    on_cpu = torch.device(options.device).type == "cpu"
    tasks = []
    for name in options.models:
        model = MODELS[name]
        products = "csr" if on_cpu else "flashsparse"
        # Attention needs no request: auto takes the fused kernels from the first call.
        algorithm = products if name == "gcn" else "auto"
        usual = [it for it in model.precisions if not on_cpu or it in ("fp32", "bf16")]
        layers = [("reference", "fp32"), *(("fast", it) for it in options.precisions or usual)]
        for dataset, framework, layer in itertools.product(
            options.datasets or model.datasets, options.frameworks or model.frameworks, layers
        ):
            more = (options.device, algorithm, options.runs or model.runs, options.epochs)
            tasks.append(Task(name, dataset, framework, *layer, *more))
    return tasks


def _outcomes(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, list[Cell]]]:
    """Trains. If a task fails, its one cell has the reason."""
    if jobs == 1:
        for task in tasks:
            yield task, _train_safely(task, timed=True)
        return
    threads = max((os.cpu_count() or 1) // jobs, 1)
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(threads,)) as pool:
        # Longest tasks first: many graphs, then layers of a DGL without CUDA, which run on the CPU.
        queue = sorted(
            tasks, key=lambda task: (task.model != "gt", task.conv != "reference", task.framework != "dgl")
        )
        futures = {pool.submit(_train_safely, task, timed=False): task for task in queue}
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], future.result() if error is None else [{"status": _reason(error)}]


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the progress bars of several workers are unreadable


def _reason(error: BaseException) -> str:
    return f"failed: {' '.join(str(error).split())[:160] or type(error).__name__}"


def _train_safely(task: Task, *, timed: bool) -> list[Cell]:
    try:
        return _train(task, timed=timed)
    except Exception as error:  # whatever it is, the other tasks can still run
        return [{"status": _reason(error)}]


def _train(task: Task, *, timed: bool) -> list[Cell]:
    """The cells of a task, one per metric."""
    # The examples are scripts and not part of a package.
    folder = str(REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    example = importlib.import_module(MODELS[task.model].example)
    device = task.device
    if (task.framework, task.conv) == ("dgl", "reference") and device != "cpu" and not _dgl_has_cuda(device):
        device = "cpu"
    with algorithms(spmm=task.algorithm):
        log, (result,) = example.main(task.arguments(device), Console(file=io.StringIO()))
    return [
        {
            "implementation": result.layer,
            "device": device,
            "algorithm": task.algorithm if task.conv == "fast" else None,
            "metric": metric,
            "split": log["data"]["split"],
            "runs": len(scores),
            "epochs": log["settings"]["recipe"]["epochs"],
            "mean": statistics.fmean(scores),
            "std": statistics.stdev(scores) if len(scores) > 1 else None,
            "scores": [round(score, 5) for score in scores],
            "step_ms": result.step_ms() if timed else None,
        }
        for metric in result.runs[0].scores
        for scores in [result.scores(metric)]
    ]


def _dgl_has_cuda(device: str) -> bool:
    dgl = importlib.import_module("common.framework_data").import_dgl()
    try:
        dgl.graph(([0], [1])).to(device)
    except dgl.DGLError:
        return False
    return True


def _notes(options: argparse.Namespace) -> Iterator[str]:
    examples = dict.fromkeys(MODELS[model].example for model in options.models)
    scripts = " and ".join(f"examples/{example}.py" for example in examples)
    yield (
        f"{scripts}: same initial weights, dropout seeds and splits for all; test score at the best"
        " validation; bf16 and fp16 by autocast (fp16 with a gradient scaler), tf32 by"
        " torch.set_float32_matmul_precision('high')"
    )
    yield (
        "a loss counts from the mean of the framework's own layer in fp32, and is held against the standard"
        " deviation of that layer's runs; where the installed DGL has no CUDA, its own layer ran on the CPU"
    )


BENCHMARK = Benchmark(
    "accuracy",
    cells,
    lambda options: [_tasks(options)],
    options={
        "models": option(["gcn"], choices=tuple(MODELS)),
        # Options that are not given have the model's own values.
        "datasets": option(None, "names or paths of .npz files", nargs="+"),
        "frameworks": {"choices": ("pyg", "dgl"), "nargs": "+"},
        "precisions": {"choices": PRECISIONS, "nargs": "+", "help": "of the drop-ins"},
        "runs": option(None, "repetitions, each with its own seed and split", type=int),
        "epochs": option(None, "training steps (default: the example's recipe)", type=int),
        "jobs": option(
            min(6, os.cpu_count() or 1) if torch.cuda.is_available() else 1,
            "processes at once; more than one and no times are kept",
        ),
    },
    notes=_notes,
    variant=lambda options: "" if options.models == ["gcn"] else "_".join(options.models),
)
