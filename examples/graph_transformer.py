"""Trains graph transformers with the framework's message passing and with the drop-in layer.

    python examples/graph_transformer.py --framework pyg --conv both --dataset planted
    FASTSPARSE_DATA=data python examples/graph_transformer.py --dataset molhiv --conv fast

A dataset with one graph trains a classifier of its nodes; one with many small graphs (molhiv, proteins)
trains a classifier of graphs in batches. The only difference between the compared models is the layer class.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch.nn.functional as F
from common.cli import parser, run, train_and_report, train_graphs_and_report
from common.data import NodeDataset
from common.errors import ExampleError
from common.frameworks import FRAMEWORKS, Framework, layer
from common.graph_data import GraphBatch, GraphDataset, find_graphs
from common.report import LayerResult, make_console
from common.training import Recipe
from rich.console import Console
from torch import Tensor, nn

#: Hyper-parameters by dataset with one graph.
RECIPES = {
    "planted": Recipe(hidden=64, lr=1e-3, dropout=0.2, epochs=30, runs=2),
    "cora": Recipe(lr=1e-3, weight_decay=5e-4, epochs=200, runs=10, normalise_features=True),
    "karate": Recipe(hidden=16, heads=2, lr=3e-3, epochs=100),
    "minesweeper": Recipe(
        layers=5, hidden=64, dropout=0.2, lr=1e-3, epochs=300, runs=10, select_by="roc_auc"
    ),
    "actor": Recipe(lr=1e-3, weight_decay=5e-4, epochs=200, runs=10),
}

#: Hyper-parameters by dataset with many graphs.
GRAPH_RECIPES = {
    "molhiv": Recipe(
        layers=4, hidden=80, dropout=0.1, lr=1e-3, epochs=30, runs=3, batch_size=512, select_by="roc_auc"
    ),
}


class NodeTransformer(nn.Module):
    """Graph transformer layers between two linear maps, for nodes.

    Args:
        framework: The framework of the layers.
        layers: The layers, all of width `recipe.hidden`.
        in_channels: Width of the features.
        out_channels: Number of classes.
        recipe: Width and dropout.
    """

    def __init__(
        self,
        framework: Framework,
        layers: Sequence[nn.Module],
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        self.lin_in = nn.Linear(in_channels, recipe.hidden)
        self.layers = nn.ModuleList(layers)
        self.lin_out = nn.Linear(recipe.hidden, out_channels)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        x = self.lin_in(F.dropout(x, self.dropout, self.training))
        for one in self.layers:
            x = self.framework.call(one, graph, x)
        return self.lin_out(F.dropout(x, self.dropout, self.training))

    def first_layer(self) -> nn.Module:
        return self.lin_in


class GraphTransformer(nn.Module):
    """Graph transformer layers on embedded categories, then the mean over each graph's nodes.

    Args:
        framework: The framework of the layers.
        layers: The layers, all of width `recipe.hidden`.
        code_sizes: Number of categories of each feature.
        out_channels: Number of classes.
        recipe: Width.
    """

    def __init__(
        self,
        framework: Framework,
        layers: Sequence[nn.Module],
        code_sizes: Sequence[int],
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.embeddings = nn.ModuleList(nn.Embedding(size, recipe.hidden) for size in code_sizes)
        self.layers = nn.ModuleList(layers)
        self.readout = nn.Sequential(
            nn.Linear(recipe.hidden, recipe.hidden // 2),
            nn.ReLU(),
            nn.Linear(recipe.hidden // 2, out_channels),
        )

    def forward(self, graph: Any, batch: GraphBatch) -> Tensor:
        """Computes logits (graphs, classes)."""
        x = sum(embedding(code) for embedding, code in zip(self.embeddings, batch.codes.t(), strict=True))
        for one in self.layers:
            x = self.framework.call(one, graph, x)
        return self.readout(batch.mean(x))


def make_layers(
    framework: str, conv: str, recipe: Recipe, norm: str
) -> tuple[list[nn.Module], str, Framework]:
    """Returns the layers of a model, their name and the framework.

    Raises:
        ExampleError: The width is not a multiple of the number of heads.
    """
    if recipe.hidden % recipe.heads:
        raise ExampleError(f"--hidden {recipe.hidden}: expected a multiple of --heads {recipe.heads}.")
    name, constructor = layer(framework, "graph_transformer", conv)
    options = (recipe.hidden, recipe.hidden, recipe.heads, recipe.dropout, recipe.dropout, norm)
    return [constructor(*options) for _ in range(recipe.layers)], name, FRAMEWORKS[framework]


def make_model(
    framework: str, conv: str, in_channels: int, num_classes: int, recipe: Recipe
) -> tuple[nn.Module, str]:
    """Makes the node classifier with the ``reference`` or ``fast`` layer; also returns the layer's name."""
    layers, name, calls = make_layers(framework, conv, recipe, "layer")
    return NodeTransformer(calls, layers, in_channels, num_classes, recipe), name


def make_graph_model(
    framework: str, conv: str, dataset: GraphDataset, recipe: Recipe
) -> tuple[nn.Module, str]:
    """Makes the graph classifier, with batch norms as in the paper; also returns the layer's name."""
    layers, name, calls = make_layers(framework, conv, recipe, "batch")
    return GraphTransformer(calls, layers, dataset.code_sizes(), dataset.num_classes, recipe), name


def recipe_of(dataset: NodeDataset) -> Recipe:
    """Returns the dataset's hyper-parameters; two layers of width 64 if `RECIPES` has none."""
    return RECIPES.get(dataset.name.lower().replace("_", "-"), Recipe(lr=1e-3))


def graph_recipe_of(dataset: GraphDataset) -> Recipe:
    """Returns the hyper-parameters for a dataset of many small graphs."""
    default = Recipe(layers=4, hidden=64, dropout=0.1, lr=1e-3, epochs=100, batch_size=128)
    return GRAPH_RECIPES.get(dataset.name.lower().replace("_", "-"), default)


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    options = parser(__doc__.split("\n\n", 1)[0], heads=True).parse_args(arguments)
    console = console or make_console()
    graphs = find_graphs(options.dataset, options.root)
    if graphs is None:
        return train_and_report(options, recipe_of, make_model, console)
    return train_graphs_and_report(options, graphs, graph_recipe_of(graphs), make_graph_model, console)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
