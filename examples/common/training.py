"""Trains node classifiers, in the same way for all compared layers.

`compare` runs each layer with the same initial weights, the same dropout seeds and the same splits, and
measures time and memory of the training steps; the test score is taken at the epoch with the best validation
score.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from .data import NodeDataset, Split
from .errors import ExampleError

PRECISIONS = {"fp32": "highest", "tf32": "high", "bf16": "highest", "fp16": "highest"}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one kind of run.

    Attributes:
        layers: Number of graph convolutions.
        hidden: Width between the convolutions.
        heads: Attention heads, which share that width; for attention layers.
        dropout: Dropout probability.
        lr: Learning rate of Adam.
        weight_decay: L2 penalty.
        decay_first_layer_only: Whether the penalty covers only the first layer, as in Kipf and Welling's GCN.
        epochs: Training steps; for many small graphs, passes over all of them.
        batch_size: Graphs per training step, where there are many small ones.
        runs: Number of runs, each with another seed (and the next split).
        normalise_features: Whether to scale rows of given features to sum one.
        residual: Whether the model has residual blocks with layer norms.
        select_by: Validation metric that picks the epoch: ``accuracy`` or ``roc_auc``.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 8
    dropout: float = 0.5
    lr: float = 0.01
    weight_decay: float = 0.0
    decay_first_layer_only: bool = False
    epochs: int = 200
    batch_size: int = 256
    runs: int = 3
    normalise_features: bool = False
    residual: bool = False
    select_by: str = "accuracy"


@dataclass
class RunResult:
    """The results of one training run; lists have one entry per epoch.

    Attributes:
        loss: Training loss.
        train, val, test: Scores by the recipe's metric.
        step_ms: Time of forward, backward and optimiser step.
        scores: Test scores (``accuracy``, for two classes also ``roc_auc``) at the best validation score.
        best_epoch: That epoch, counted from 0.
        peak_bytes: Peak memory in bytes, without data and graph; None if it cannot be measured.
        waiting_ms, gather_ms: Parts of `step_ms`: waiting for batches, and gathering their data;
            only for training on batches.
    """

    loss: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)
    val: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    best_epoch: int = -1
    peak_bytes: int | None = None
    waiting_ms: list[float] = field(default_factory=list)
    gather_ms: list[float] = field(default_factory=list)


@dataclass
class LayerResult:
    """All runs of one layer."""

    conv: str
    layer: str
    runs: list[RunResult] = field(default_factory=list)

    def scores(self, metric: str) -> list[float]:
        return [run.scores[metric] for run in self.runs]

    def step_ms(self) -> float:
        """Median over all epochs except the first of each run, which builds structures for later epochs."""
        return statistics.median(ms for run in self.runs for ms in (run.step_ms[1:] or run.step_ms))

    def num_steps(self) -> int:
        """Number of training steps from which `step_ms` is computed."""
        return sum(max(len(run.step_ms) - 1, 1) for run in self.runs)

    def first_step_ms(self) -> float:
        return statistics.median(run.step_ms[0] for run in self.runs)

    def peak_bytes(self) -> int | None:
        peaks = [run.peak_bytes for run in self.runs if run.peak_bytes is not None]
        return max(peaks, default=None)


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Returns the share of correct predictions; nan without nodes."""
    return (logits.argmax(dim=-1) == y).float().mean().item()


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """Computes the area under the ROC curve; a tie between a positive and a negative counts half.

    Args:
        score: Real numbers, (n,).
        positive: True for positives, bool (n,).

    Returns:
        The area; nan if there are only positives or only negatives.
    """
    values, place = torch.unique(score.double(), return_inverse=True)
    count = torch.bincount(place, minlength=values.numel()).double()
    rank = torch.cumsum(count, 0) - (count - 1) / 2  # the mean rank of tied scores
    positives = positive.sum().item()
    negatives = positive.numel() - positives
    if not positives or not negatives:
        return math.nan
    above = rank[place][positive].sum().item() - positives * (positives + 1) / 2
    return above / (positives * negatives)


def metrics_of(num_classes: int) -> tuple[str, ...]:
    """Returns the names of the metrics that are reported for a task."""
    return ("accuracy", "roc_auc") if num_classes == 2 else ("accuracy",)


def score(metric: str, logits: Tensor, y: Tensor, mask: Tensor) -> float:
    """Computes one metric over the nodes of a mask."""
    logits, y = logits[mask].float(), y[mask]
    if metric == "roc_auc":
        return roc_auc(logits[:, 1] - logits[:, 0], y == 1)
    return accuracy(logits, y)


class LearnedFeatures(nn.Module):
    """A model whose input features are trained with it, for graphs without features.

    Args:
        model: Called as ``model(graph, x)``.
        num_nodes: Number of nodes.
        width: Width of the features.
    """

    def __init__(self, model: nn.Module, num_nodes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(num_nodes, width) / math.sqrt(width))
        self.model = model

    def forward(self, graph: Any, x: None) -> Tensor:
        """Ignores `x`, which is None, and runs the model on the learned features."""
        return self.model(graph, self.features)

    def first_layer(self) -> nn.Module:
        return self.model.first_layer()  # type: ignore[operator]


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Sets PyTorch's float32 precision ("highest" is exact, "high" allows TF32), and restores it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class PeakMemory:
    """Measures the peak memory above the memory in use at the start.

    On CUDA, the allocator reports the peak. On Linux, the kernel records the peak of a process's resident
    memory, and the process can reset it. On other systems, nothing is reported.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start: int | None = torch.cuda.memory_allocated(device)
            return
        self.start = None
        try:
            # Freed memory that the C library does not return would hide a part of the next peak.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self.start = self._resident("VmRSS")
        except (OSError, AttributeError):
            pass

    @staticmethod
    def _resident(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/self/status has no {field}")

    def read(self) -> int | None:
        if self.start is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return max(self._resident("VmHWM") - self.start, 0)


def _optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if not recipe.decay_first_layer_only:
        return torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    first = {id(parameter) for parameter in model.first_layer().parameters()}  # type: ignore[operator]
    groups = [
        {
            "params": [p for p in model.parameters() if id(p) in first],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [p for p in model.parameters() if id(p) not in first], "weight_decay": 0.0},
    ]
    return torch.optim.Adam(groups, lr=recipe.lr)


def train_run(
    model: nn.Module,
    graph: Any,
    x: Tensor | None,
    y: Tensor,
    split: Split,
    recipe: Recipe,
    *,
    precision: str,
    metrics: Sequence[str],
    progress: tqdm,
) -> RunResult:
    """Trains a model for the recipe's epochs, scoring all nodes after each.

    Args:
        model: Called as ``model(graph, x)``; returns logits (num_nodes, classes).
        graph: The graph, in the form that the model's layers take.
        x: Features, or None when the model learns them.
        y: Labels.
        split: Which nodes to train on, choose by and report.
        recipe: Hyper-parameters.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        metrics: The metrics to report.
        progress: Bar that is moved by one per epoch.

    Returns:
        Curves, times and scores.

    Raises:
        ExampleError: The loss became NaN or infinite.
    """
    device = y.device
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    optimiser = _optimiser(model, recipe)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    autocast = torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)
    train_y = y[split.train]
    result = RunResult()
    best = -math.inf
    for epoch in range(recipe.epochs):
        model.train()
        synchronise()
        start = time.perf_counter()
        optimiser.zero_grad()
        with autocast:
            logits = model(graph, x)
        loss = F.cross_entropy(logits[split.train].float(), train_y)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        synchronise()
        result.step_ms.append((time.perf_counter() - start) * 1e3)

        result.loss.append(loss.item())
        if not math.isfinite(result.loss[-1]):
            raise ExampleError(
                f"the loss became {result.loss[-1]} in epoch {epoch + 1}: try a smaller --lr"
                + (" or --precision bf16." if precision == "fp16" else ".")
            )
        model.eval()
        with torch.no_grad(), autocast:
            logits = model(graph, x)
        for part in ("train", "val", "test"):
            curve = getattr(result, part)
            curve.append(score(recipe.select_by, logits, y, getattr(split, part)))
        if result.val[-1] > best:
            best = result.val[-1]
            result.best_epoch = epoch
            result.scores = {metric: score(metric, logits, y, split.test) for metric in metrics}
        progress.set_postfix(loss=f"{result.loss[-1]:.3f}", val=f"{result.val[-1]:.3f}", refresh=False)
        progress.update()
    if result.best_epoch < 0:
        raise ExampleError(
            f"the validation {recipe.select_by} was never a number: {int(split.val.sum())} validation nodes"
            " are too few, or all of one class."
        )
    return result


#: make_model(conv) -> (the model on the CPU, the name of its layer).
ModelFactory = Callable[[str], tuple[nn.Module, str]]


def compare(
    dataset: NodeDataset,
    x: Tensor | None,
    convs: Sequence[str],
    make_model: ModelFactory,
    make_graph: Callable[[str], Any],
    recipe: Recipe,
    *,
    device: torch.device,
    precision: str,
    seed: int,
) -> list[LayerResult]:
    """Trains the model with each layer, `recipe.runs` times, under equal conditions.

    Run r of every layer uses the seed ``seed + r`` for weights and dropout, and the same split. Runs of the
    layers alternate, so a machine that becomes slower affects all layers.

    Args:
        dataset: Data on `device`.
        x: Features on `device`, or None.
        convs: Layers to compare, of ``reference`` and ``fast``.
        make_model: ``make_model(conv)`` returns a model on the CPU and the layer's name.
        make_graph: ``make_graph(conv)`` returns the graph on the device.
        recipe: Hyper-parameters.
        device: Where to train.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        seed: First seed.

    Returns:
        One result per layer, in the order of `convs`.
    """
    graphs = {conv: make_graph(conv) for conv in convs}
    metrics = metrics_of(dataset.num_classes)
    splits = [dataset.split(run, seed) for run in range(recipe.runs)]

    def train(model: nn.Module, conv: str, run: int, bar: tqdm) -> RunResult:
        data = (graphs[conv], x, dataset.y, splits[run])
        return train_run(model, *data, recipe, precision=precision, metrics=metrics, progress=bar)

    return in_turn(convs, make_model, train, recipe, device=device, precision=precision, seed=seed)


def in_turn(
    convs: Sequence[str],
    make_model: ModelFactory,
    train: Callable[[nn.Module, str, int, tqdm], RunResult],
    recipe: Recipe,
    *,
    device: torch.device,
    precision: str,
    seed: int,
) -> list[LayerResult]:
    """Compares layers, for any kind of training: ``train(model, conv, run, bar)`` trains one model."""
    results: dict[str, LayerResult] = {}
    total = recipe.epochs * recipe.runs * len(convs)
    # A terminal overwrites old updates of the bar, but a log file keeps all of them, so a file gets few.
    interval = 0.5 if sys.stderr.isatty() else 20.0
    with (
        matmul_precision(precision),
        tqdm(total=total, unit="epoch", dynamic_ncols=True, mininterval=interval) as bar,
    ):
        for run in range(recipe.runs):
            weights: dict[str, Tensor] | None = None
            for conv in convs:
                memory = PeakMemory(device)
                torch.manual_seed(seed + run)
                model, name = make_model(conv)
                if weights is None:
                    weights = {key: value.clone() for key, value in model.state_dict().items()}
                model.load_state_dict(weights)
                model.to(device)
                bar.set_description(f"{name}, run {run + 1}/{recipe.runs}")
                torch.manual_seed(seed + run)
                outcome = train(model, conv, run, bar)
                outcome.peak_bytes = memory.read()
                results.setdefault(conv, LayerResult(conv, name)).runs.append(outcome)
                del model
    return list(results.values())
