"""Trains OGB's node property prediction, with OGB's loaders and Evaluators.

    python examples/ogb_node.py --dataset ogbn-arxiv --root data --download --model gcn --conv fast
    python examples/ogb_node.py --dataset ogbn-products --model sage --batching neighbor --framework dgl

Hyper-parameters are those of the leaderboard's example scripts where there are any: see docs/ogb.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from common.cli import above_zero, at_least, override, parse_device, parser, report_results, run
from common.errors import ExampleError
from common.frameworks import make_graph
from common.long_run import Training, add_options, check_options, train_runs
from common.node_models import MODELS, NodeRecipe
from common.ogb_tasks import OgbNodes, load_nodes
from common.report import LayerResult, make_console
from common.sampling import ALL, Batches, MiniBatch, PygBatches, Sampling
from rich.console import Console
from torch import Tensor

DATASETS = ("ogbn-arxiv", "ogbn-products", "ogbn-proteins", "ogbn-papers100M")


#: OGB's examples/nodeproppred/*/gnn.py: three layers of width 256.
_OGB = NodeRecipe(layers=3, hidden=256, heads=4, dropout=0.5, lr=0.01, runs=1)
_ARXIV = replace(_OGB, epochs=500, batch_norm=True, batch_size=1024)
_PROTEINS = replace(_OGB, dropout=0.0, epochs=1000, eval_every=5, batch_size=1024)
#: PyG's examples/ogbn_train.py.
_PAPERS = replace(_OGB, lr=3e-3, epochs=10, batch_size=1024)

#: (dataset, batching) -> hyper-parameters of GCN and GraphSAGE.
RECIPES = {
    ("ogbn-arxiv", "full"): _ARXIV,
    ("ogbn-arxiv", "neighbor"): replace(_ARXIV, lr=3e-3, epochs=50),
    ("ogbn-products", "full"): replace(_OGB, epochs=300),
    # PyG's examples/ogbn_products_sage.py.
    ("ogbn-products", "neighbor"): replace(_OGB, lr=3e-3, epochs=20, batch_size=1024, fanouts=(15, 10, 5)),
    ("ogbn-proteins", "full"): _PROTEINS,
    ("ogbn-proteins", "neighbor"): replace(_PROTEINS, lr=3e-3, epochs=100),
    ("ogbn-papers100M", "neighbor"): _PAPERS,
}


def recipe_of(dataset: str, model: str, batching: str) -> NodeRecipe:
    """The hyper-parameters of a dataset and a model.

    Raises:
        ExampleError: The whole graph does not fit.
    """
    if (dataset, batching) not in RECIPES:
        raise ExampleError(f"--batching {batching}: {dataset} is too large to train on as a whole.")
    recipe = RECIPES[dataset, batching]
    if model == "gat" and (dataset, batching) == ("ogbn-products", "neighbor"):
        # PyG's examples/ogbn_products_gat.py: four heads of width 128.
        fanouts = (10, 10, 5)
        return replace(
            recipe, hidden=512, lr=1e-3, epochs=100, batch_size=512, fanouts=fanouts, eval_every=10
        )
    if model in ("gat", "gt"):
        # OGB has no example of these: a smaller step for attention, no other change.
        return replace(recipe, lr=min(recipe.lr, 2e-3 if model == "gat" else 1e-3), batch_norm=model == "gat")
    return recipe


@dataclass
class NodeTask:
    """What `Training` needs for one graph: batches, loss and evaluation.

    Attributes:
        options: The command line.
        data: The graph, on the CPU.
        recipe: Hyper-parameters.
        device: Where to train.
    """

    options: argparse.Namespace
    data: OgbNodes
    recipe: NodeRecipe
    device: torch.device

    def __post_init__(self) -> None:
        self.kind = MODELS[self.options.model]
        self.needs_graph = "full" in (self.options.batching, self.options.inference)
        if self.needs_graph:
            self.x = self.data.x.to(self.device)
            graph = make_graph(
                self.options.framework,
                self.data,
                self.options.conv,
                self.device,
                self_loops=self.kind.self_loops,
            )
            self.graphs = [graph] * self.recipe.layers
        self.train = self.data.split["train"].to(self.device)
        self.train_y = self.data.y[self.data.split["train"]].to(self.device)
        self.loaders: dict[str, Batches | PygBatches] = {}
        if self.options.batching == "neighbor":
            self.sampling = Sampling(self.options.framework, self.data, self_loops=self.kind.self_loops)

    def batches(self, part: str) -> Batches | PygBatches:
        """Batches of a part of the split as in training; of ``all`` nodes with all their neighbours."""
        if part not in self.loaders:
            everyone = part == "all"
            self.loaders[part] = self.sampling.batches(
                [ALL] if everyone else self.recipe.fanouts,
                torch.arange(self.data.num_nodes) if everyone else self.data.split[part],
                self.recipe.batch_size,
                shuffle=part == "train",
                workers=self.options.workers,
            )
        return self.loaders[part]

    def training(self, run: int) -> tuple[Training, str]:
        """The model of a run, freshly drawn, and how to train it."""
        model, name = self.kind.make(self.options, self.data, self.recipe)
        self.model = model.to(self.device)
        if self.options.batching == "full":
            training = Training(self.model, lambda: [None], 1, self.full_loss, self.evaluate)
        else:
            batches = self.batches("train")
            training = Training(self.model, lambda: batches, len(batches), self.batch_loss, self.evaluate)
        return training, name

    def full_loss(self, batch: None) -> tuple[Tensor, int]:
        return self.data.loss(self.model(self.graphs, self.x)[self.train], self.train_y), self.train.numel()

    def batch_loss(self, batch: MiniBatch) -> tuple[Tensor, int]:
        y = self.data.y[batch.seeds].to(self.device)
        return self.data.loss(self.batch_logits(batch), y), batch.seeds.numel()

    def batch_logits(self, batch: MiniBatch) -> Tensor:
        x = self.data.x[batch.nodes].to(self.device)
        return self.model(batch.graphs_on(self.options.conv, self.device), x)[: batch.seeds.numel()]

    def evaluate(self) -> dict[str, float]:
        """Scores by OGB's Evaluator, with the logits that --inference asks for."""
        split = self.data.split
        if self.options.inference == "sampled":
            return {part: self.sampled_score(part) for part in split}
        layerwise = self.options.inference == "layerwise"
        logits = self.layerwise_logits() if layerwise else self.model(self.graphs, self.x)
        return {part: self.data.score(logits[nodes], nodes) for part, nodes in split.items()}

    def sampled_score(self, part: str) -> float:
        """The score with as many neighbours as in training."""
        pairs = [(self.batch_logits(batch).cpu(), batch.seeds) for batch in self.batches(part)]
        logits, nodes = (torch.cat(column) for column in zip(*pairs, strict=True))
        return self.data.score(logits, nodes)

    def layerwise_logits(self) -> Tensor:
        """Logits of all nodes from all neighbours, one layer after the other for all nodes in batches."""
        x = self.data.x
        for index in range(self.recipe.layers):
            parts = []
            for batch in self.batches("all"):
                (graph,) = batch.graphs_on(self.options.conv, self.device)
                out = self.model.layer(index, graph, x[batch.nodes].to(self.device))
                parts.append(out[: batch.seeds.numel()].cpu())
            x = torch.cat(parts)
        return x


def fanouts(text: str) -> tuple[int, ...]:
    """A list of numbers of neighbours, for argparse."""
    return tuple(at_least(1)(part) for part in text.split(","))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, NodeRecipe]:
    """The command line and the hyper-parameters it asks for.

    Raises:
        ExampleError: Options do not go together.
    """
    command_line = parser(__doc__.split("\n\n", 1)[0], heads=True, datasets=DATASETS)
    add = command_line.add_argument
    add("--model", choices=tuple(MODELS), default="gcn", help="which model")
    add("--batching", choices=("full", "neighbor"), help="whole graph or sampled neighbours (default: full)")
    add("--inference", choices=("full", "layerwise", "sampled"), help="how to evaluate (default: full)")
    add("--batch-size", type=at_least(1), help="nodes per batch (default: the dataset's recipe)")
    add("--fanouts", type=fanouts, help="neighbours per hop, as 15,10,5 (default: the dataset's recipe)")
    add("--lr", type=above_zero, help="learning rate (default: the dataset's recipe)")
    add("--workers", type=at_least(0), default=0, help="processes that draw neighbours")
    add_options(command_line)
    options = command_line.parse_args(arguments)
    huge = options.dataset == "ogbn-papers100M"
    options.batching = options.batching or ("neighbor" if huge else "full")
    options.inference = options.inference or ("sampled" if huge else "full")
    recipe = override(recipe_of(options.dataset, options.model, options.batching), options)
    if options.batching == "full" and options.inference != "full":
        raise ExampleError(f"--inference {options.inference}: expected full where --batching is full.")
    if options.batching == "neighbor" and len(recipe.fanouts) != recipe.layers:
        given = ",".join(map(str, recipe.fanouts))
        raise ExampleError(f"--fanouts {given}: expected one number for each of --layers {recipe.layers}.")
    if options.inference == "layerwise" and MODELS[options.model].whole_graph:
        raise ExampleError(
            f"--inference layerwise: {options.model} weighs neighbours by degrees that a batch does not show:"
            " use --inference full, or sampled."
        )
    return options, recipe


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    options, recipe = parse(arguments)
    console = console or make_console()
    check_options(options)
    device = parse_device(options.device)
    data = load_nodes(options.dataset, options.root, options.framework, download=options.download)
    recipe = replace(recipe, select_by=data.metric)
    drawn = f"batches of {recipe.batch_size} nodes with {list(recipe.fanouts)} neighbours"
    batching = "the whole graph" if options.batching == "full" else drawn
    sizes = "/".join(f"{nodes.numel():,}" for nodes in data.split.values())
    console.print(
        f"[bold]{data.name}[/bold]: {data.num_nodes:,} nodes, {data.num_edges:,} directed edges,"
        f" {data.x.size(1)} features, {data.num_outputs} outputs, OGB's split {sizes}",
        *(f"[dim]{note}[/dim]" for note in data.notes),
        f"{options.model}, {options.framework} on {device}, {options.precision}: {recipe.layers} layers,"
        f" hidden {recipe.hidden}, dropout {recipe.dropout}, lr {recipe.lr}, {recipe.epochs} epochs,"
        f" {recipe.runs} run(s), best epoch by validation {recipe.select_by}",
        f"trained on {batching}, {options.inference} inference",
        sep="\n",
        highlight=False,
    )
    names = ("framework", "conv", "dataset", "model", "batching", "inference")
    settings = {name: getattr(options, name) for name in names}
    task = NodeTask(options, data, recipe, device)
    result = train_runs(options, settings, task.training, recipe, device=device)
    description = {
        "name": data.name,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "split": sizes,
        "notes": list(data.notes),
    }
    return report_results(options, device, description, recipe, [result], console), [result]


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
