"""Trains classifiers of small graphs in batches, in the same way for all compared layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from .errors import ExampleError
from .graph_data import GraphBatch, GraphDataset, batches, pyg_loader
from .training import (
    AUTOCAST,
    LayerResult,
    Recipe,
    RunResult,
    in_turn,
    metrics_of,
    score,
)

#: Function that takes a batch, trains on it, and returns the loss.
Step = Callable[[Any], Tensor]

#: make_graph(batch) -> the graph that the model's layers take.
GraphFactory = Callable[[GraphBatch], Any]

#: Number of graphs per batch in the evaluation.
EVALUATED_AT_ONCE = 1024


class Evaluation:
    """Evaluates a model on a fixed part of the data. Logits stay on the device until the last batch.

    Args:
        model: The model to evaluate.
        dataset: All graphs.
        graphs: Positions of the graphs of this part.
        size: Graphs per batch.
        device: Device of the model.
        make_graph: Converts a batch on the device to the graph that the model's layers take.
        as_step: The function that captures the evaluation of a batch; None: no capture.
        takes_pyg: Whether batches are PyG's. Other batches are converted only once.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: GraphDataset,
        graphs: Tensor,
        size: int,
        device: torch.device,
        make_graph: GraphFactory,
        as_step: Callable[[Step], Step] | None,
        takes_pyg: bool,
    ) -> None:
        self.y = dataset.y[graphs]
        self._inputs: Iterable[Any]
        if takes_pyg:
            self._inputs = pyg_loader(dataset, graphs, size, device=device)
        else:
            on_device = [batch.to(device) for batch in batches(dataset, graphs, size)]
            self._inputs = [(make_graph(batch), batch) for batch in on_device]

        def logits_of(given: Any) -> Tensor:
            if takes_pyg:
                batch = GraphBatch.of_pyg(given)
                given = make_graph(batch), batch
            return model(*given).float()

        self._logits_of = logits_of if as_step is None else as_step(logits_of)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Computes the logits (graphs, classes), on the CPU."""
        return torch.cat([self._logits_of(given) for given in self._inputs]).cpu()

    def score(self, metric: str, logits: Tensor) -> float:
        return score(metric, logits, self.y, torch.ones(self.y.numel(), dtype=torch.bool))


def train_run(
    model: nn.Module,
    dataset: GraphDataset,
    make_graph: GraphFactory,
    recipe: Recipe,
    *,
    device: torch.device,
    precision: str,
    seed: int,
    progress: tqdm,
    as_step: Callable[[Step], Step] | None = None,
    takes_pyg: bool = False,
) -> RunResult:
    """Trains a model for the recipe's epochs, scoring validation and test graphs after each.

    Args:
        model: Called as ``model(graph, batch)``, gives logits (graphs, classes).
        dataset: The graphs, on the CPU.
        make_graph: Turns a batch on the device into what the model's layers take.
        recipe: Hyper-parameters.
        device: Where to train.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        seed: Seed of the order of graphs, and of the split where it is drawn.
        progress: Bar that is moved by one per epoch.
        as_step: The function that captures the training step and the evaluation; None: no capture.
        takes_pyg: Whether batches are PyG's, from `fastsparse_pyg.DataLoader`.

    Returns:
        Curves, times and scores. Here a step is an epoch, including the conversion of its batches.

    Raises:
        ExampleError: The loss became NaN or infinite.
    """
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    split = dataset.split(seed)
    train = split.train.nonzero().flatten()
    parts = {
        part: Evaluation(
            model,
            dataset,
            getattr(split, part).nonzero().flatten(),
            EVALUATED_AT_ONCE,
            device,
            make_graph,
            as_step,
            takes_pyg,
        )
        for part in ("val", "test")
    }
    optimiser = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    autocast = torch.autocast(device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)
    generator = torch.Generator().manual_seed(seed)

    def step(batch: Any) -> Tensor:
        batch = GraphBatch.of_pyg(batch) if takes_pyg else batch
        optimiser.zero_grad()
        with autocast:
            logits = model(make_graph(batch), batch)
        loss = F.cross_entropy(logits.float(), batch.y)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        return loss.detach()

    train_on = step if as_step is None else as_step(step)
    size: dict[str, Any] = {"size": recipe.batch_size, "generator": generator}
    loader = pyg_loader(dataset, train, **size, device=device) if takes_pyg else None
    result = RunResult()
    best = -math.inf
    for epoch in range(recipe.epochs):
        model.train()
        synchronise()
        start = time.perf_counter()
        losses = []
        waiting = gathering = 0.0
        asked = start
        for batch in batches(dataset, train, **size) if loader is None else loader:
            drawn = time.perf_counter()
            batch = batch.to(device)
            gathered = time.perf_counter()
            losses.append(train_on(batch))
            waiting, gathering = waiting + drawn - asked, gathering + gathered - drawn
            asked = time.perf_counter()
        synchronise()
        result.step_ms.append((time.perf_counter() - start) * 1e3)
        result.waiting_ms.append(waiting * 1e3)
        result.gather_ms.append(gathering * 1e3)

        result.loss.append(torch.stack(losses).mean().item())
        if not math.isfinite(result.loss[-1]):
            raise ExampleError(
                f"the loss became {result.loss[-1]} in epoch {epoch + 1}: try --precision fp32 or bf16."
            )
        model.eval()
        with autocast:
            logits_of = {part: evaluation.logits() for part, evaluation in parts.items()}
        for part, evaluation in parts.items():
            getattr(result, part).append(evaluation.score(recipe.select_by, logits_of[part]))
        if result.val[-1] > best:
            best = result.val[-1]
            result.best_epoch = epoch
            result.scores = {
                metric: parts["test"].score(metric, logits_of["test"])
                for metric in metrics_of(dataset.num_classes)
            }
        progress.set_postfix(loss=f"{result.loss[-1]:.3f}", val=f"{result.val[-1]:.3f}", refresh=False)
        progress.update()
    if result.best_epoch < 0:
        raise ExampleError(f"the validation {recipe.select_by} was never a number: too few graphs.")
    return result


def compare(
    dataset: GraphDataset,
    convs: Sequence[str],
    make_model: Callable[[str], tuple[nn.Module, str]],
    make_graph: Callable[[str], GraphFactory],
    recipe: Recipe,
    *,
    device: torch.device,
    precision: str,
    seed: int,
    as_step: Callable[[Step], Step] | None = None,
    takes_pyg: bool = False,
) -> list[LayerResult]:
    """Trains the model with each layer, `recipe.runs` times, from the same weights, seeds and batches.

    Arguments as for `training.compare`; ``make_graph(conv)`` gives the function for batches, `as_step` and
    `takes_pyg` as for `train_run`.

    Returns:
        One result per layer, in the order of `convs`.
    """

    def train(model: nn.Module, conv: str, run: int, bar: tqdm) -> RunResult:
        place: dict[str, Any] = {"device": device, "precision": precision, "seed": seed + run}
        options: dict[str, Any] = {"as_step": as_step, "takes_pyg": takes_pyg}
        return train_run(model, dataset, make_graph(conv), recipe, **place, progress=bar, **options)

    return in_turn(convs, make_model, train, recipe, device=device, precision=precision, seed=seed)
