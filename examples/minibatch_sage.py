"""Trains GraphSAGE on sampled neighbours with the framework's own layer and with its drop-in.

    python examples/minibatch_sage.py --framework pyg --conv both --dataset planted --fanouts 10,5

Every batch is a new graph, so every step includes the time to build its structure.
fastsparse_pyg.NeighborLoader or fastsparse_dgl.DataLoader samples the neighbours on the device. Waiting for a
batch, gathering its features and the step are timed separately. With --capture, steps run as CUDA graphs.
See docs/minibatch.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch
import torch.nn.functional as F
from common.cli import add_capture, at_least, captured, override, parse_device, parser, report_results, run
from common.data import NodeDataset, Split, load_dataset, node_features
from common.errors import ExampleError
from common.frameworks import CONVS, make_graph
from common.node_models import NodeModel, NodeRecipe, make_sage
from common.report import LayerResult, check_plotting, check_writable, make_console
from common.sampling import Batches, Sampling, opened
from common.training import (
    AUTOCAST,
    RunResult,
    in_turn,
    metrics_of,
    score,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

DEFAULT = NodeRecipe(layers=2, hidden=64, lr=0.01, epochs=20, runs=1, batch_size=256, fanouts=(10, 5))

#: Hyper-parameters by dataset. For ogbn-products, those of PyG's examples/ogbn_products_sage.py.
RECIPES = {
    "planted": replace(DEFAULT, epochs=5, runs=2),
    "ogbn-arxiv": replace(DEFAULT, layers=3, hidden=256, lr=3e-3, batch_size=1024, fanouts=(15, 10, 5)),
    "ogbn-products": replace(DEFAULT, layers=3, hidden=256, lr=3e-3, batch_size=1024, fanouts=(15, 10, 5)),
}


@dataclass
class BatchTimes:
    """Milliseconds of every batch.

    Attributes:
        sampling: Waiting for sampled neighbours; a GPU samples them during the previous step.
        gather: Gathering features and labels of the nodes, and moving graphs to the device.
        step: Forward, backward and optimiser.
    """

    sampling: list[float]
    gather: list[float]
    step: list[float]


@dataclass
class Task:
    """Trains models on batches of one graph.

    Attributes:
        options: The command line.
        dataset: The graph, on the CPU.
        x: Features of the nodes, (num_nodes, width).
        recipe: Hyper-parameters.
        device: Device that trains.
    """

    options: argparse.Namespace
    dataset: NodeDataset
    x: Tensor
    recipe: NodeRecipe
    device: torch.device

    def __post_init__(self) -> None:
        self.x_on_device = self.x.to(self.device)
        self.y_on_device = self.dataset.y.to(self.device)

    @property
    def num_outputs(self) -> int:
        """Number of classes, under the name that the models read."""
        return self.dataset.num_classes

    def model(self, conv: str) -> tuple[NodeModel, str]:
        """Makes a newly initialised model; also returns its layer's name."""
        words = argparse.Namespace(framework=self.options.framework, conv=conv, batching="neighbor")
        model, name = make_sage(words, self, self.recipe)  # type: ignore[arg-type]
        return model, name  # type: ignore[return-value]

    def batches(self, conv: str, nodes: Tensor) -> Batches:
        """Makes shuffled batches of nodes with sampled neighbours."""
        recipe, workers = self.recipe, self.options.workers
        sampling = Sampling(self.options.framework, self.dataset, conv, self.device, self_loops=False)
        return sampling.batches(recipe.fanouts, nodes, recipe.batch_size, shuffle=True, workers=workers)

    def loss(self, model: NodeModel, batch: Any) -> Tensor:
        """Computes the mean cross entropy of the seeds."""
        graphs, x, y = opened(batch, self.recipe.layers)
        return F.cross_entropy(model(graphs, x)[: y.numel()].float(), y)

    def train(
        self, model: NodeModel, conv: str, split: Split, progress: tqdm, times: BatchTimes
    ) -> RunResult:
        """Trains a model on sampled neighbours, and evaluates it with all neighbours of all nodes."""
        result, recipe, precision = RunResult(), self.recipe, self.options.precision
        synchronise = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        optimiser = torch.optim.Adam(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        autocast = torch.autocast(self.device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)
        batches = self.batches(conv, split.train.cpu().nonzero().flatten())
        graph = make_graph(self.options.framework, self.dataset, conv, self.device, self_loops=False)

        def step(batch: Any) -> Tensor:
            optimiser.zero_grad()
            with autocast:
                loss = self.loss(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            return loss.detach()

        step = captured(step, self.options.capture)
        best = -1.0
        for epoch in range(recipe.epochs):
            model.train()
            losses, spent, begin = [], 0.0, time.perf_counter()
            for batch in batches:
                drawn = time.perf_counter()
                x = self.x_on_device[batch.nodes.to(self.device)]
                y = self.y_on_device[batch.seeds.to(self.device)]
                own = batch.holding(conv, self.device, x, y)
                synchronise()
                gathered = time.perf_counter()
                losses.append(float(step(own)))
                synchronise()
                times.sampling.append((drawn - begin) * 1e3)
                times.gather.append((gathered - drawn) * 1e3)
                begin = time.perf_counter()
                times.step.append((begin - gathered) * 1e3)
                spent += times.step[-1]
            result.step_ms.append(spent)
            result.loss.append(statistics.fmean(losses))
            model.eval()
            with torch.no_grad(), autocast:
                logits = model([graph] * recipe.layers, self.x_on_device)
            self.keep_scores(result, logits, split)
            if result.val[-1] > best:
                best, result.best_epoch = result.val[-1], epoch
                metrics = metrics_of(self.num_outputs)
                y = self.y_on_device
                result.scores = {metric: score(metric, logits, y, split.test) for metric in metrics}
            progress.update()
        return result

    def keep_scores(self, result: RunResult, logits: Tensor, split: Split) -> None:
        """Appends the scores of an epoch."""
        for part in ("train", "val", "test"):
            mask = getattr(split, part)
            getattr(result, part).append(score(self.recipe.select_by, logits, self.y_on_device, mask))

    def compare(self, convs: Sequence[str]) -> tuple[list[LayerResult], dict[str, BatchTimes]]:
        """Trains with every layer, from the same initial weights, with the same splits and batches."""
        times = {conv: BatchTimes([], [], []) for conv in convs}
        data, options = self.dataset.to(self.device), self.options
        splits = [data.split(number, options.seed) for number in range(self.recipe.runs)]

        def train(model: nn.Module, conv: str, number: int, bar: tqdm) -> RunResult:
            return self.train(model, conv, splits[number], bar, times[conv])

        place: dict[str, Any] = {"device": self.device, "precision": options.precision, "seed": options.seed}
        return in_turn(convs, self.model, train, self.recipe, **place), times


def print_batches(console: Console, results: Sequence[LayerResult], times: dict[str, BatchTimes]) -> None:
    """Prints medians per batch."""
    table = Table(title="milliseconds per batch", title_justify="left")
    table.add_column("layer", no_wrap=True)
    for column in ("sampling", "gathering", "step", "speed-up of the step"):
        table.add_column(column, justify="right")
    reference = statistics.median(times["reference"].step) if "reference" in times else None
    for result in results:
        step = statistics.median(times[result.conv].step)
        table.add_row(
            result.layer,
            f"{statistics.median(times[result.conv].sampling):.2f}",
            f"{statistics.median(times[result.conv].gather):.2f}",
            f"{step:.2f}",
            "-" if reference is None else f"{reference / step:.2f}x",
        )
    console.print(table)


def fanouts(text: str) -> tuple[int, ...]:
    """Type for argparse: a list of numbers of neighbours, such as 15,10,5."""
    return tuple(at_least(1)(part) for part in text.split(","))


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict[str, Any], list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.

    Raises:
        ExampleError: The user has to change an option or a file.
    """
    command_line = parser(__doc__.split("\n\n", 1)[0])
    add = command_line.add_argument
    add("--batch-size", type=at_least(1), help="nodes per batch (default: the dataset's recipe)")
    add("--fanouts", type=fanouts, help="neighbours per hop, as 15,10,5 (default: the dataset's recipe)")
    add("--workers", type=at_least(0), default=0, help="processes that draw neighbours")
    add_capture(command_line)
    options = command_line.parse_args(arguments)
    console = console or make_console()
    check_writable(options.json, "--json")
    check_plotting(options.plot)
    device = parse_device(options.device)
    dataset = load_dataset(
        options.dataset, options.root, options.framework, seed=options.seed, download=options.download
    )
    recipe = override(RECIPES.get(dataset.name.lower().replace("_", "-"), DEFAULT), options)
    if options.fanouts is not None and options.layers is None:
        recipe = replace(recipe, layers=len(options.fanouts))
    if len(recipe.fanouts) != recipe.layers:
        given = ",".join(map(str, recipe.fanouts))
        raise ExampleError(f"--fanouts {given}: expected one number for each of --layers {recipe.layers}.")
    x, note = node_features(dataset, options.features, normalise=recipe.normalise_features)
    if x is None:
        raise ExampleError("--features learned: expected given or degree, because batches gather features.")
    data = {
        "name": dataset.name,
        "nodes": dataset.num_nodes,
        "edges": dataset.num_edges,
        "classes": dataset.num_classes,
        "features": note,
        "split": dataset.split_description(options.seed),
        "notes": list(dataset.notes),
    }
    console.print(
        f"[bold]{dataset.name}[/bold]: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} directed edges,"
        f" {dataset.num_classes} classes; {note}; {data['split']}",
        f"{options.framework} on {device}, {options.precision}: {recipe.layers} layers of width"
        f" {recipe.hidden}, batches of {recipe.batch_size} nodes with {list(recipe.fanouts)} neighbours,"
        f" {recipe.epochs} epochs, {recipe.runs} run(s)",
        sep="\n",
    )
    convs = CONVS if options.conv == "both" else (options.conv,)
    results, times = Task(options, dataset, x, recipe, device).compare(convs)
    medians = {
        conv: {
            "sampling_ms": statistics.median(of.sampling),
            "gather_ms": statistics.median(of.gather),
            "step_ms": statistics.median(of.step),
        }
        for conv, of in times.items()
    }
    log = report_results(options, device, data, recipe, results, console, {"batches": medians})
    print_batches(console, results, times)
    return log, results


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
