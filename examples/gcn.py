"""Trains a GCN with the framework's own layer and with its drop-in, and compares accuracy, time and memory.

    python examples/gcn.py --framework pyg --conv both --dataset planted --plot demo.png

The only difference between the two models is the layer class that `make_model` looks up.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch.nn.functional as F
from common.cli import parser, run, train_and_report
from common.data import NodeDataset
from common.frameworks import FRAMEWORKS, Framework, layer
from common.report import LayerResult, make_console
from common.training import Recipe
from rich.console import Console
from torch import Tensor, nn

PLANETOID = Recipe(
    hidden=16, weight_decay=5e-4, decay_first_layer_only=True, epochs=200, runs=10, normalise_features=True
)

#: Hyper-parameters by dataset. In Minesweeper, neighbours rarely have the same label, so a plain GCN hardly
#: learns the labels. Residual blocks with layer norms learn them (Platonov et al., 2023).
RECIPES = {
    "planted": Recipe(hidden=64, lr=0.02, epochs=30, runs=2),
    "cora": PLANETOID,
    "citeseer": PLANETOID,
    "pubmed": PLANETOID,
    "karate": Recipe(hidden=16, epochs=100),
    "minesweeper": Recipe(
        layers=5, hidden=64, dropout=0.2, lr=3e-3, epochs=200, runs=10, residual=True, select_by="roc_auc"
    ),
    "ogbn-arxiv": Recipe(layers=3, hidden=256, epochs=500),
}


class GCN(nn.Module):
    """Graph convolutions with ReLU and dropout between the layers (Kipf and Welling, 2017).

    Args:
        framework: The framework of the layers.
        conv: Constructor ``conv(in_channels, out_channels)`` of the layer.
        in_channels: Width of the features.
        out_channels: Number of classes.
        recipe: Depth, width and dropout.
    """

    def __init__(
        self,
        framework: Framework,
        conv: Callable[..., nn.Module],
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        widths = [in_channels, *[recipe.hidden] * (recipe.layers - 1), out_channels]
        self.convs = nn.ModuleList(conv(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        for i, conv in enumerate(self.convs):
            if i:
                x = F.relu(x)
            x = F.dropout(x, self.dropout, self.training)
            x = self.framework.call(conv, graph, x)
        return x

    def first_layer(self) -> nn.Module:
        return self.convs[0]


class ResidualGCN(nn.Module):
    """Residual blocks x + dropout(relu(conv(norm(x)))) between two linear maps; arguments as for `GCN`."""

    def __init__(
        self,
        framework: Framework,
        conv: Callable[..., nn.Module],
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        self.lin_in = nn.Linear(in_channels, recipe.hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(recipe.hidden) for _ in range(recipe.layers + 1))
        self.convs = nn.ModuleList(conv(recipe.hidden, recipe.hidden) for _ in range(recipe.layers))
        self.lin_out = nn.Linear(recipe.hidden, out_channels)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        x = self.lin_in(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = x + F.dropout(F.relu(self.framework.call(conv, graph, norm(x))), self.dropout, self.training)
        return self.lin_out(self.norms[-1](x))

    def first_layer(self) -> nn.Module:
        return self.lin_in


def recipe_of(dataset: NodeDataset) -> Recipe:
    """Returns the dataset's hyper-parameters; two layers of width 64 if `RECIPES` has none."""
    return RECIPES.get(dataset.name.lower().replace("_", "-"), Recipe())


def make_model(
    framework: str, conv: str, in_channels: int, num_classes: int, recipe: Recipe
) -> tuple[nn.Module, str]:
    """Makes the model with the ``reference`` or the ``fast`` layer; also returns the layer's name."""
    name, constructor = layer(framework, "gcn", conv)
    model = ResidualGCN if recipe.residual else GCN
    return model(FRAMEWORKS[framework], constructor, in_channels, num_classes, recipe), name


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    options = parser(__doc__.split("\n\n", 1)[0]).parse_args(arguments)
    return train_and_report(options, recipe_of, make_model, console or make_console())


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
