"""Trains OGB's node property prediction, with OGB's loaders and Evaluators.

    python examples/ogb_node.py --dataset ogbn-arxiv --root data --download --model gcn --conv fast
    python examples/ogb_node.py --dataset ogbn-products --model sage --batching neighbor --framework dgl
    torchrun --nproc-per-node 4 examples/ogb_node.py --dataset ogbn-products --parallel fullgraph

Hyper-parameters are those of the leaderboard's example scripts, if there are any: see docs/ogb.md.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch
import torch.distributed as dist
from common.cli import above_zero, at_least, override, parse_device, parser, report_results, run
from common.errors import ExampleError
from common.frameworks import make_graph
from common.long_run import Training, add_options, check_options, train_runs
from common.node_models import MODELS, NodeRecipe
from common.ogb_tasks import OgbNodes, load_nodes
from common.parallel import ALONE, KINDS, Parallel, processes
from common.report import LayerResult, make_console, print_parts
from common.sampling import ALL, Batches, MiniBatch, Sampling, opened
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastsparse_core.sampling import FeatureTable

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
    """Returns the hyper-parameters of a dataset and a model.

    Raises:
        ExampleError: The whole graph does not fit into memory.
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
        # OGB has no examples of these models: attention gets a smaller learning rate, all else is equal.
        return replace(recipe, lr=min(recipe.lr, 2e-3 if model == "gat" else 1e-3), batch_norm=model == "gat")
    return recipe


@dataclass
class NodeTask:
    """Batches, loss and evaluation of a `Training` on one graph.

    Attributes:
        options: The command line.
        data: The graph, on the CPU.
        recipe: Hyper-parameters.
        device: Device that trains.
        parallel: The processes that train together.
    """

    options: argparse.Namespace
    data: OgbNodes
    recipe: NodeRecipe
    device: torch.device
    parallel: Parallel = ALONE

    def __post_init__(self) -> None:
        self.kind = MODELS[self.options.model]
        if self.parallel.kind == "fullgraph":
            self.take_rows()
            return
        # With DDP the first process evaluates.
        if "full" in (self.options.batching, self.options.inference) and self.parallel.is_first:
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
        self.loaders: dict[str, Batches] = {}
        if self.options.batching == "neighbor":
            self.features = FeatureTable(self.data.x, self.device)
            self.sampling = Sampling(
                self.options.framework,
                self.data,
                self.options.conv,
                self.device,
                self_loops=self.kind.self_loops,
            )

    def take_rows(self) -> None:
        """Selects this process's rows of the graph and of the nodes' data."""
        from fastsparse_core.distributed import PartitionedAdjacency, exchange_group, partition

        data, parallel = self.data, self.parallel
        # METIS, if it is installed, runs once; the first process sends the result to all.
        found = (
            [partition(data.edge_index, parallel.size, num_nodes=data.num_nodes)]
            if parallel.is_first
            else [None]
        )
        dist.broadcast_object_list(found, device=self.device)
        (parts,) = found
        mine = parts.owned_edges(data.edge_index[1], parallel.rank)
        source, target = (end[mine].to(self.device) for end in data.edge_index)
        # DGL's layers add no self loops.
        loops = "append" if self.kind.self_loops and self.options.framework == "dgl" else "keep"
        self.part = PartitionedAdjacency.from_coo(
            target, source, parts, group=exchange_group(), self_loops=loops, cache_inputs=True
        )
        self.graphs = [self.part] * self.recipe.layers
        self.x = parts.scatter(data.x, parallel.rank).to(self.device)
        is_train = torch.zeros(data.num_nodes, dtype=torch.bool)
        is_train[data.split["train"]] = True
        own = parts.scatter(is_train, parallel.rank)
        self.train = own.nonzero().flatten().to(self.device)
        self.train_y = parts.scatter(data.y, parallel.rank)[own].to(self.device)

    def batches(self, part: str) -> Batches:
        """Makes batches of a part of the split: ``own``: this process's nodes; ``all``: all neighbours."""
        if part not in self.loaders:
            everyone = part == "all"
            self.loaders[part] = self.sampling.batches(
                [ALL] if everyone else self.recipe.fanouts,
                torch.arange(self.data.num_nodes) if everyone else self.seeds(part),
                self.recipe.batch_size,
                shuffle=part == "own",
                workers=self.options.workers,
            )
        return self.loaders[part]

    def seeds(self, part: str) -> Tensor:
        """Returns the nodes of a part of the split; with ``own``, only this process's training nodes."""
        split = self.data.split
        return self.parallel.share(split["train"]) if part == "own" else split[part]

    def training(self, run: int) -> tuple[Training, str]:
        """Returns the `Training` of a run with a newly initialised model, and the layer's name."""
        model, name = self.kind.make(self.options, self.data, self.recipe)
        self.model = self.called = model.to(self.device)
        parallel = self.parallel
        if parallel.kind == "fullgraph":
            if self.device.type == "cuda":  # PyTorch's works there only
                self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
            training = Training(self.model, lambda: [None], 1, self.share_of_loss, self.evaluate, parallel)
        elif self.options.batching == "full":
            training = Training(
                self.model,
                lambda: [None],
                1,
                self.full_loss,
                self.evaluate,
                captures=self.options.capture,
            )
        else:
            if parallel.kind == "ddp":
                self.called = DistributedDataParallel(self.model)
            batches = self.batches("own")
            training = Training(
                self.model,
                lambda: batches,
                len(batches),
                self.batch_loss,
                self.evaluate,
                parallel,
                gather=self.gathered,
                captures=self.options.capture,
            )
        return training, name

    def share_of_loss(self, batch: None) -> tuple[Tensor, int]:
        """Returns this process's share of the mean loss over all training nodes, and their number."""
        logits = self.model(self.graphs, self.x)[self.train]
        everyone = self.data.split["train"].numel()
        if self.train.numel() == 0:  # the backward pass of the other processes still needs this process
            return logits.sum() * 0.0, everyone
        return self.data.loss(logits, self.train_y) * (self.train.numel() / everyone), everyone

    def full_loss(self, batch: None) -> tuple[Tensor, int]:
        return self.data.loss(self.model(self.graphs, self.x)[self.train], self.train_y), self.train.numel()

    def gathered(self, batch: MiniBatch) -> Any:
        """Returns a batch with its features and its seeds' labels, on the device."""
        x = self.features[batch.nodes.to(self.device)]
        y = self.data.y[batch.seeds.cpu()].to(self.device)
        return batch.holding(self.options.conv, self.device, x, y)

    def batch_loss(self, batch: Any) -> tuple[Tensor, int]:
        graphs, x, y = opened(batch, self.recipe.layers)
        return self.data.loss(self.called(graphs, x)[: y.size(0)], y), y.size(0)

    def batch_logits(self, batch: MiniBatch, x: Tensor, model: nn.Module) -> Tensor:
        return model(batch.graphs_on(self.options.conv, self.device), x)[: batch.seeds.numel()]

    def evaluate(self) -> dict[str, float]:
        """Computes scores with OGB's Evaluator, from logits as --inference says."""
        split = self.data.split
        if self.options.inference == "sampled":
            return {part: self.sampled_score(part) for part in split}
        layerwise = self.options.inference == "layerwise"
        logits = self.layerwise_logits() if layerwise else self.model(self.graphs, self.x)
        if self.parallel.kind == "fullgraph":
            logits = self.part.gather(logits)
        return {part: self.data.score(logits[nodes], nodes) for part, nodes in split.items()}

    def sampled_score(self, part: str) -> float:
        """Computes the score with as many sampled neighbours as in training."""
        pairs = []
        for batch in self.batches(part):
            x = self.features[batch.nodes.to(self.device)]
            pairs.append((self.batch_logits(batch, x, self.model).cpu(), batch.seeds.cpu()))
        logits, nodes = (torch.cat(column) for column in zip(*pairs, strict=True))
        return self.data.score(logits, nodes)

    def layerwise_logits(self) -> Tensor:
        """Computes logits of all nodes from all neighbours: each layer for all nodes, in batches."""
        x = self.data.x
        for index in range(self.recipe.layers):
            parts = []
            for batch in self.batches("all"):
                (graph,) = batch.graphs_on(self.options.conv, self.device)
                out = self.model.layer(index, graph, x[batch.nodes.cpu()].to(self.device))
                parts.append(out[: batch.seeds.numel()].cpu())
            x = torch.cat(parts)
        return x


def fanouts(text: str) -> tuple[int, ...]:
    """Type for argparse: a list of numbers of neighbours, such as 15,10,5."""
    return tuple(at_least(1)(part) for part in text.split(","))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, NodeRecipe]:
    """Parses the command line; returns the options and the hyper-parameters.

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
    add(
        "--parallel",
        choices=KINDS,
        help="several GPUs, under torchrun: own batches, or a part of the graph each",
    )
    add("--workers", type=at_least(0), default=0, help="processes that draw neighbours")
    add_options(command_line)
    options = command_line.parse_args(arguments)
    huge = options.dataset == "ogbn-papers100M"
    sampled = huge or options.parallel == "ddp"
    options.batching = options.batching or ("neighbor" if sampled else "full")
    options.inference = options.inference or ("sampled" if huge else "full")
    recipe = override(recipe_of(options.dataset, options.model, options.batching), options)
    wanted = {"ddp": "neighbor", "fullgraph": "full"}.get(options.parallel, options.batching)
    if options.batching != wanted:
        raise ExampleError(f"--parallel {options.parallel}: expected --batching {wanted}.")
    if options.parallel == "fullgraph" and options.conv != "fast":
        raise ExampleError(
            "--parallel fullgraph: expected --conv fast; the original layers cannot divide a graph."
        )
    if options.parallel == "fullgraph" and options.model == "maxk-sage":
        raise ExampleError("--parallel fullgraph: expected --model gcn, sage, gat or gt, got maxk-sage.")
    if options.capture and options.parallel:
        raise ExampleError("--capture: expected no --parallel; the two options cannot be combined.")
    if options.batching == "full" and options.inference != "full":
        raise ExampleError(f"--inference {options.inference}: expected full with --batching full.")
    if options.batching == "neighbor" and len(recipe.fanouts) != recipe.layers:
        given = ",".join(map(str, recipe.fanouts))
        raise ExampleError(f"--fanouts {given}: expected one number for each of --layers {recipe.layers}.")
    if options.inference == "layerwise" and MODELS[options.model].whole_graph:
        raise ExampleError(
            f"--inference layerwise: {options.model} needs the degrees in the whole graph, which a batch does"
            " not have: use --inference full, or sampled."
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
    check_options(options)
    with processes(options.parallel, parse_device(options.device)) as (parallel, device):
        if not parallel.is_first:
            options.json = options.plot = None
            console = Console(file=io.StringIO())
        return train(options, recipe, device, parallel, console or make_console())


def train(
    options: argparse.Namespace,
    recipe: NodeRecipe,
    device: torch.device,
    parallel: Parallel,
    console: Console,
) -> tuple[dict, list[LayerResult]]:
    """Loads the data, trains and reports; returns the same as `main`."""
    with parallel.first_alone():
        data = load_nodes(options.dataset, options.root, options.framework, download=options.download)
    recipe = replace(recipe, select_by=data.metric)
    drawn = f"batches of {recipe.batch_size} nodes with {list(recipe.fanouts)} neighbours"
    batching = "the whole graph" if options.batching == "full" else drawn
    if parallel.kind:
        batching += f", {parallel.size} processes ({parallel.kind})"
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
    settings |= {"parallel": parallel.kind, "processes": parallel.size} if parallel.kind else {}
    task = NodeTask(options, data, recipe, device, parallel)
    if parallel.kind == "fullgraph":
        console.print(f"[dim]{task.part}[/dim]", highlight=False)
    result = train_runs(options, settings, task.training, recipe, device=device, parallel=parallel)
    description = {
        "name": data.name,
        "nodes": data.num_nodes,
        "edges": data.num_edges,
        "split": sizes,
        "notes": list(data.notes),
    }
    log = report_results(options, device, description, recipe, [result], console)
    if options.batching == "neighbor":
        print_parts(console, [result])
    return log, [result]


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
