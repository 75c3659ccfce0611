"""Trains OGB's molecule classification, with OGB's loaders and Evaluators.

    python examples/ogb_graph.py --dataset ogbg-molhiv --root data --download --model gin --conv fast

Hyper-parameters of gin and gcn are those of OGB's example scripts. Features of bonds are left out, because
the layers take no edge features: see docs/ogb.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch
import torch.nn.functional as F
from common import graph_training
from common.cli import (
    above_zero,
    at_least,
    check_capture,
    override,
    parse_device,
    parser,
    report_results,
    run,
)
from common.frameworks import FRAMEWORKS, Framework, layer, make_batch_graph
from common.graph_data import GraphBatch, batches
from common.long_run import LongRecipe, Training, add_options, check_options, train_runs
from common.ogb_tasks import OgbGraphs, load_graphs
from common.report import LayerResult, make_console, print_parts
from graph_transformer import GraphTransformer, make_layers
from rich.console import Console
from torch import Tensor, nn

DATASETS = ("ogbg-molhiv",)

#: OGB's examples/graphproppred/mol: five layers of width 300.
_OGB = LongRecipe(layers=5, hidden=300, dropout=0.5, lr=1e-3, epochs=100, batch_size=32, runs=1)

#: Hyper-parameters by model. The transformer has those of graph_transformer.py.
RECIPES = {
    "gin": _OGB,
    "gcn": _OGB,
    "gt": replace(_OGB, layers=4, hidden=80, dropout=0.1, epochs=30, batch_size=512),
}


class GraphModel(nn.Module):
    """Graph layers with batch norms on embedded atoms, then the mean over each graph's atoms.

    Args:
        framework: The framework of the layers.
        convs: The layers, all of width `recipe.hidden`.
        code_sizes: Number of categories of each feature.
        recipe: Width and dropout.
    """

    def __init__(
        self, framework: Framework, convs: Sequence[nn.Module], code_sizes: Sequence[int], recipe: LongRecipe
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        self.embeddings = nn.ModuleList(nn.Embedding(size, recipe.hidden) for size in code_sizes)
        for embedding in self.embeddings:
            nn.init.xavier_uniform_(embedding.weight)
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(recipe.hidden) for _ in convs)
        self.lin_out = nn.Linear(recipe.hidden, 2)

    def forward(self, graph: Any, batch: GraphBatch) -> Tensor:
        """Computes logits (graphs, 2)."""
        x = sum(embedding(code) for embedding, code in zip(self.embeddings, batch.codes.t(), strict=True))
        last = len(self.convs) - 1
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(self.framework.call(conv, graph, x))
            x = F.dropout(F.relu(x) if i < last else x, self.dropout, self.training)
        return self.lin_out(batch.mean(x))


def make_gin(options: argparse.Namespace, data: OgbGraphs, recipe: LongRecipe) -> tuple[nn.Module, str]:
    """GIN with a perceptron of two linear layers in each graph layer."""
    name, constructor = layer(options.framework, "gin", options.conv)
    width = recipe.hidden

    def perceptron() -> nn.Module:
        wide = nn.Linear(width, 2 * width)
        return nn.Sequential(wide, nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    convs = [constructor(perceptron()) for _ in range(recipe.layers)]
    return GraphModel(FRAMEWORKS[options.framework], convs, data.code_sizes, recipe), name


def make_gcn(options: argparse.Namespace, data: OgbGraphs, recipe: LongRecipe) -> tuple[nn.Module, str]:
    """GCN."""
    name, constructor = layer(options.framework, "gcn", options.conv)
    # Every batch is another graph, so the layer must not cache the normalised graph.
    extra = {"cached": False} if options.framework == "pyg" else {}
    convs = [constructor(recipe.hidden, recipe.hidden, **extra) for _ in range(recipe.layers)]
    return GraphModel(FRAMEWORKS[options.framework], convs, data.code_sizes, recipe), name


def make_gt(options: argparse.Namespace, data: OgbGraphs, recipe: LongRecipe) -> tuple[nn.Module, str]:
    """The graph transformer of graph_transformer.py."""
    convs, name, framework = make_layers(options.framework, options.conv, recipe, "batch")
    return GraphTransformer(framework, convs, data.code_sizes, 2, recipe), name


@dataclass(frozen=True)
class Model:
    """A model that ``--model`` names; `self_loops` says whether DGL's graphs need them."""

    make: Callable[[argparse.Namespace, OgbGraphs, LongRecipe], tuple[nn.Module, str]]
    self_loops: bool = False


MODELS = {"gin": Model(make_gin), "gcn": Model(make_gcn, self_loops=True), "gt": Model(make_gt)}


class GraphTask:
    """Batches, loss and evaluation of a `Training` on many graphs.

    Args:
        options: The command line.
        data: The graphs, on the CPU.
        recipe: Hyper-parameters.
        device: Device that trains.
    """

    def __init__(
        self, options: argparse.Namespace, data: OgbGraphs, recipe: LongRecipe, device: torch.device
    ) -> None:
        self.options, self.data, self.recipe, self.device = options, data, recipe, device
        self.kind = MODELS[options.model]
        self.make_graph = functools.partial(
            make_batch_graph, options.framework, conv=options.conv, self_loops=self.kind.self_loops
        )
        split = data.dataset.split(options.seed)
        self.ids = {part: getattr(split, part).nonzero().flatten() for part in ("train", "val", "test")}

    def training(self, run: int) -> tuple[Training, str]:
        """Returns the `Training` of a run with a newly initialised model, and the layer's name."""
        model, name = self.kind.make(self.options, self.data, self.recipe)
        self.model = model.to(self.device)
        place = (graph_training.EVALUATED_AT_ONCE, self.device, self.make_graph)
        self.parts = {
            part: graph_training.Evaluation(self.model, self.data.dataset, ids, *place, None, takes_pyg=False)
            for part, ids in self.ids.items()
        }
        steps = -(-self.ids["train"].numel() // self.recipe.batch_size)
        training = Training(
            self.model,
            self.batches,
            steps,
            self.loss,
            self.evaluate,
            gather=self.gathered,
            captures=self.options.capture,
        )
        return training, name

    def batches(self) -> Any:
        return batches(
            self.data.dataset,
            self.ids["train"],
            self.recipe.batch_size,
            generator=torch.default_generator,
        )

    def gathered(self, batch: GraphBatch) -> Any:
        """Moves a batch to the device; captured steps get PyG's own batch."""
        batch = batch.to(self.device)
        return batch.as_pyg() if self.options.capture else batch

    def loss(self, batch: Any) -> tuple[Tensor, int]:
        batch = GraphBatch.of_pyg(batch) if self.options.capture else batch
        logits = self.model(self.make_graph(batch), batch)
        return F.cross_entropy(logits.float(), batch.y), batch.y.numel()

    def evaluate(self) -> dict[str, float]:
        """Computes scores with OGB's Evaluator."""
        return {
            part: self.data.score(evaluation.logits(), self.ids[part])
            for part, evaluation in self.parts.items()
        }


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    command_line = parser(__doc__.split("\n\n", 1)[0], heads=True, datasets=DATASETS)
    add = command_line.add_argument
    add("--model", choices=tuple(MODELS), default="gin", help="which model")
    add("--batch-size", type=at_least(2), help="graphs per batch (default: the model's recipe)")
    add("--lr", type=above_zero, help="learning rate (default: the model's recipe)")
    add_options(command_line)
    options = command_line.parse_args(arguments)
    console = console or make_console()
    check_options(options)
    check_capture(options)
    device = parse_device(options.device)
    data = load_graphs(options.dataset, options.root, options.framework, download=options.download)
    recipe = replace(override(RECIPES[options.model], options), select_by=data.metric)
    task = GraphTask(options, data, recipe, device)
    sizes = "/".join(f"{ids.numel():,}" for ids in task.ids.values())
    graphs = data.dataset
    console.print(
        f"[bold]{graphs.name}[/bold]: {graphs.num_graphs:,} graphs, {graphs.codes.size(0):,} nodes,"
        f" {graphs.edge_index.size(1):,} directed edges, OGB's split {sizes}",
        *(f"[dim]{note}[/dim]" for note in data.notes),
        f"{options.model}, {options.framework} on {device}, {options.precision}: {recipe.layers} layers,"
        f" hidden {recipe.hidden}, dropout {recipe.dropout}, lr {recipe.lr}, {recipe.epochs} epochs in"
        f" batches of {recipe.batch_size}, {recipe.runs} run(s), best epoch by validation {recipe.select_by}",
        sep="\n",
        highlight=False,
    )
    settings = {name: getattr(options, name) for name in ("framework", "conv", "dataset", "model")}
    result = train_runs(options, settings, task.training, recipe, device=device)
    description = {
        "name": graphs.name,
        "graphs": graphs.num_graphs,
        "nodes": graphs.codes.size(0),
        "edges": graphs.edge_index.size(1),
        "split": sizes,
        "notes": list(data.notes),
    }
    log = report_results(options, device, description, recipe, [result], console)
    print_parts(console, [result])
    return log, [result]


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
