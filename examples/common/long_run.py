"""Trains for hours: shows progress, writes logs and checkpoints, and resumes exactly.

Every epoch seeds the random generators with a number made from the run's seed and the epoch's number, so a
checkpoint contains no generator state. A resumed training gives the same results as an uninterrupted one, bit
for bit if the operators are deterministic (``--deterministic``).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from . import report
from .cli import add_capture, at_least, captured
from .errors import ExampleError
from .parallel import ALONE, Parallel
from .training import AUTOCAST, LayerResult, PeakMemory, Recipe, RunResult, matmul_precision

#: A training step: takes a batch, and returns the mean loss and the number of its examples.
Step = Callable[[Any], tuple[Tensor, int]]

#: The columns of --csv.
COLUMNS = ("run", "epoch", "loss", "train", "val", "test", "step_ms")


@dataclass(frozen=True)
class LongRecipe(Recipe):
    """Hyper-parameters of a long run.

    Attributes:
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
    """

    eval_every: int = 1


@dataclass
class Training:
    """The parts of a training that the loop calls.

    Attributes:
        model: The model to train.
        batches: Gives the batches of one epoch, drawn from PyTorch's generator.
        steps: Number of batches of an epoch.
        loss: The mean loss over a batch, and over how many examples it is.
        evaluate: Function that returns the scores of ``train``, ``val`` and ``test``. It is called without
            gradients, with the model in evaluation mode.
        parallel: The processes that train together.
        gather: Function that takes a batch, and returns it with its data on the device, in the form for
            `loss`.
        captures: Whether steps run as CUDA graphs.
    """

    model: nn.Module
    batches: Callable[[], Iterable[Any]]
    steps: int
    loss: Callable[[Any], tuple[Tensor, int]]
    evaluate: Callable[[], dict[str, float]]
    parallel: Parallel = ALONE
    gather: Callable[[Any], Any] = lambda batch: batch
    captures: bool = False


def add_options(options: argparse.ArgumentParser) -> None:
    """Adds the options of long runs."""
    add = options.add_argument
    add("--checkpoint", type=Path, help="keep model, optimiser and curves here while training")
    add("--checkpoint-every", type=at_least(1), default=10, help="epochs between two checkpoints")
    add("--eval-every", type=at_least(1), help="epochs between evaluations (default: the dataset's recipe)")
    add("--resume", action="store_true", help="continue from --checkpoint if that file is there")
    add("--deterministic", action="store_true", help="use only deterministic operators")
    add("--csv", type=Path, help="write a line per epoch here, as it ends")
    add_capture(options)


def check_options(options: argparse.Namespace) -> None:
    """Checks the options before any data is loaded.

    Raises:
        ExampleError: Paths cannot be written, or a checkpoint would be overwritten.
    """
    for name in ("csv", "json", "checkpoint"):
        report.check_writable(getattr(options, name), f"--{name}")
    report.check_plotting(options.plot)
    if options.resume and options.checkpoint is None:
        raise ExampleError("--resume: name the file to continue from with --checkpoint.")
    if options.checkpoint is not None and options.checkpoint.is_file() and not options.resume:
        raise ExampleError(
            f"--checkpoint {options.checkpoint} exists: add --resume to continue from it, or name"
            " another file."
        )


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Switches PyTorch's deterministic mode on, and restores the old mode afterwards."""
    if not enabled:
        yield
        return
    # cuBLAS reads this variable when it starts. Without it, PyTorch refuses deterministic products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class State:
    """The progress of all runs.

    Attributes:
        finished: Results of the runs that are done.
        current: Result, so far, of the one that is not.
        tensors: State of its model, optimiser and gradient scaler; None before its first epoch.
    """

    finished: list[RunResult]
    current: RunResult
    tensors: dict[str, Any] | None = None


def save(path: Path, settings: dict[str, Any], state: State) -> None:
    """Writes a checkpoint. If the program crashes while writing, the previous checkpoint stays."""
    content = {
        "settings": settings,
        "finished": [dataclasses.asdict(run) for run in state.finished],
        "current": dataclasses.asdict(state.current),
        "tensors": state.tensors,
    }
    part = path.with_name(path.name + ".part")
    torch.save(content, part)
    part.replace(path)


def load(path: Path, settings: dict[str, Any]) -> State:
    """Reads a checkpoint.

    Raises:
        ExampleError: The file is no checkpoint, or belongs to a training with other settings.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        before = content["settings"]
        state = State(
            [RunResult(**run) for run in content["finished"]],
            RunResult(**content["current"]),
            content["tensors"],
        )
    except Exception as error:
        raise ExampleError(
            f"--resume: {path} is not a checkpoint that --checkpoint wrote; name another file, or leave "
            f"--resume out ({type(error).__name__})."
        ) from error
    other = sorted(key for key in settings if settings[key] != before.get(key))
    # A single run may be continued with more epochs, because no other setting depends on their number.
    if other == ["epochs"] and settings["runs"] == 1 and settings["epochs"] >= len(state.current.loss):
        other = []
    if other:
        changes = ", ".join(f"{key} {before.get(key)} (now {settings[key]})" for key in other)
        raise ExampleError(f"--resume: {path} was made with {changes}: use the same settings to continue.")
    return state


def seed_everything(seed: int, run: int, epoch: int, rank: int = 0) -> None:
    """Seeds all random generators for one epoch of one run, with another seed on every rank."""
    value = (seed + run) * 1_000_003 + epoch + (rank << 40)
    torch.manual_seed(value)
    random.seed(value)


def make_step(
    training: Training,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    autocast: torch.autocast,
) -> Step:
    """Trains on a batch; returns the mean loss and the number of its examples."""

    def step(batch: Any) -> tuple[Tensor, int]:
        optimiser.zero_grad()
        with autocast:
            loss, count = training.loss(batch)
        scaler.scale(loss).backward()
        training.parallel.after_backward(training.model)
        scaler.step(optimiser)
        scaler.update()
        return loss.detach(), count

    return captured(step, training.captures)


def train_epoch(training: Training, step: Step, progress: tqdm) -> tuple[float, float, float]:
    """Trains on all batches once.

    Returns:
        The mean loss of all examples, and the milliseconds of waiting for batches and of gathering data.
    """
    total: Tensor | float = 0.0
    examples = 0
    waiting = gathering = 0.0
    training.model.train()
    asked = time.perf_counter()
    for batch in training.batches():
        drawn = time.perf_counter()
        batch = training.gather(batch)
        gathered = time.perf_counter()
        waiting, gathering = waiting + drawn - asked, gathering + gathered - drawn
        loss, count = step(batch)
        total = total + loss * count
        examples += count
        progress.update()
        asked = time.perf_counter()
    return training.parallel.mean_loss(total, examples), waiting * 1e3, gathering * 1e3


def train_run(
    training: Training,
    recipe: LongRecipe,
    state: State,
    *,
    device: torch.device,
    precision: str,
    seed: int,
    progress: tqdm,
    after_epoch: Callable[[State], None],
) -> RunResult:
    """Trains one model from the epoch in the state to the last epoch.

    Args:
        training: Model, batches, loss and evaluation.
        recipe: Hyper-parameters.
        state: Progress of all runs, to which this function adds the epochs.
        device: Device of the model.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        seed: First seed of all runs.
        progress: Bar that is moved by one per batch.
        after_epoch: Called after each epoch.

    Returns:
        The state's result; epochs without an evaluation have scores that are nan.

    Raises:
        ExampleError: The loss became NaN or infinite.
    """
    model, result, run = training.model, state.current, len(state.finished)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    optimiser = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    autocast = torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)
    parts = {"model": model, "optimiser": optimiser, "scaler": scaler}
    if state.tensors is not None:
        for name, part in parts.items():
            part.load_state_dict(state.tensors[name])
    step = make_step(training, optimiser, scaler, autocast)
    shown: dict[str, str] = {}
    for epoch in range(len(result.loss), recipe.epochs):
        seed_everything(seed, run, epoch, training.parallel.rank)
        synchronise()
        start = time.perf_counter()
        loss, waiting, gathering = train_epoch(training, step, progress)
        synchronise()
        result.step_ms.append((time.perf_counter() - start) * 1e3)
        result.waiting_ms.append(waiting)
        result.gather_ms.append(gathering)
        result.loss.append(loss)
        if not math.isfinite(loss):
            raise ExampleError(
                f"the loss became {loss} in epoch {epoch + 1}: try a smaller --lr"
                + (" or --precision bf16." if precision == "fp16" else ".")
            )
        scores = dict.fromkeys(("train", "val", "test"), math.nan)
        if (epoch + 1) % recipe.eval_every == 0 or epoch + 1 == recipe.epochs:
            model.eval()
            with torch.no_grad(), autocast:
                scores = training.parallel.scores(training.evaluate, device)
            best = result.val[result.best_epoch] if result.best_epoch >= 0 else -math.inf
            if scores["val"] > best:
                result.best_epoch, result.scores = epoch, {recipe.select_by: scores["test"]}
            shown = {part: f"{scores[part]:.4f}" for part in ("val", "test")}
        for part, value in scores.items():
            getattr(result, part).append(value)
        progress.set_postfix(loss=f"{loss:.4f}", **shown, refresh=False)
        state.tensors = {name: part.state_dict() for name, part in parts.items()}
        after_epoch(state)
    return result


def train_runs(
    options: argparse.Namespace,
    settings: dict[str, Any],
    make_training: Callable[[int], tuple[Training, str]],
    recipe: LongRecipe,
    *,
    device: torch.device,
    parallel: Parallel = ALONE,
) -> LayerResult:
    """Trains `recipe.runs` models one after the other, and writes the log and the checkpoint.

    Args:
        options: The options that `add_options` adds, ``precision`` and ``seed``.
        settings: Settings that must not change between a checkpoint and its continuation.
        make_training: ``make_training(run)`` returns the training, with a newly initialised model on the
            device, and the layer's name.
        recipe: Hyper-parameters.
        device: Where to train.
        parallel: The processes that train together; only the first one prints and writes.

    Returns:
        All runs.
    """
    settings = {**settings, **dataclasses.asdict(recipe), "precision": options.precision}
    settings |= {"seed": options.seed, "deterministic": options.deterministic}
    state = State([], RunResult())
    if options.resume and options.checkpoint.is_file():
        state = load(options.checkpoint, settings)
    is_first = parallel.is_first
    interval = 0.5 if sys.stderr.isatty() else 20.0
    name = ""
    with (
        deterministic(options.deterministic),
        matmul_precision(options.precision),
        _open_csv(options.csv if is_first else None, state) as log,
        tqdm(unit="step", dynamic_ncols=True, mininterval=interval, disable=not is_first) as bar,
    ):

        def after_epoch(state: State) -> None:
            epoch = len(state.current.loss)
            if (peak := memory.read()) is not None:
                state.current.peak_bytes = max(peak, state.current.peak_bytes or 0)
            _write_row(log, len(state.finished), epoch - 1, state.current)
            wanted = is_first and options.checkpoint is not None
            if wanted and (epoch % options.checkpoint_every == 0 or epoch >= recipe.epochs):
                save(options.checkpoint, settings, state)

        for run in range(len(state.finished), recipe.runs):
            memory = PeakMemory(device)
            torch.manual_seed(options.seed + run)
            training, name = make_training(run)
            bar.total = recipe.runs * recipe.epochs * training.steps
            bar.n = bar.initial = (run * recipe.epochs + len(state.current.loss)) * training.steps
            bar.set_description(f"{name}, run {run + 1}/{recipe.runs}")
            result = train_run(
                training,
                recipe,
                state,
                device=device,
                precision=options.precision,
                seed=options.seed,
                progress=bar,
                after_epoch=after_epoch,
            )
            _check_scored(result, recipe.select_by)
            if run + 1 < recipe.runs:
                state = State([*state.finished, result], RunResult())
            del training
    return LayerResult(options.conv, name, [*state.finished, state.current])


def _check_scored(result: RunResult, metric: str) -> None:
    if result.best_epoch < 0:
        raise ExampleError(f"the validation {metric} was never a number.")


@contextlib.contextmanager
def _open_csv(path: Path | None, state: State) -> Iterator[Any]:
    """Opens the log with the epochs that the state already has; returns None without --csv."""
    if path is None:
        yield None
        return
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(COLUMNS)
        for run, result in enumerate([*state.finished, state.current]):
            for epoch in range(len(result.loss)):
                _write_row(file, run, epoch, result)
        yield file


def _write_row(file: Any, run: int, epoch: int, result: RunResult) -> None:
    """Writes the line of one epoch and flushes the file. Scores are empty if the epoch was not evaluated."""
    if file is None:
        return
    values = [getattr(result, column)[epoch] for column in COLUMNS[2:]]
    row = ["" if math.isnan(value) else repr(value) for value in values]
    csv.writer(file).writerow([run + 1, epoch + 1, *row])
    file.flush()
