"""Trains an AGNN with the framework's own layer and with its drop-in, and compares accuracy, time and memory.

    python examples/agnn.py --framework pyg --conv both --dataset cora

The only difference between the two models is the layer class that `make_model` looks up.
"""

from __future__ import annotations

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

PLANETOID = Recipe(hidden=16, weight_decay=5e-4, epochs=200, runs=10, normalise_features=True)

#: Hyper-parameters by dataset; `layers` is the number of propagations.
RECIPES = {
    "planted": Recipe(hidden=64, lr=0.02, epochs=30, runs=2),
    "cora": PLANETOID,
    "citeseer": PLANETOID,
    "pubmed": PLANETOID,
    "karate": Recipe(hidden=16, epochs=100),
    "minesweeper": Recipe(hidden=64, dropout=0.2, epochs=200, runs=10, select_by="roc_auc"),
    "actor": Recipe(hidden=64, weight_decay=5e-4, epochs=200, runs=10),
}


class AGNN(nn.Module):
    """Two linear maps with propagations by cosine attention between them (Thekumparampil et al., 2018).

    Args:
        framework: The framework of the layers.
        propagations: The layers, whose only parameter is the temperature of the attention.
        in_channels: Width of the features.
        out_channels: Number of classes.
        recipe: Width and dropout.
    """

    def __init__(
        self,
        framework: Framework,
        propagations: Sequence[nn.Module],
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        self.lin_in = nn.Linear(in_channels, recipe.hidden)
        self.convs = nn.ModuleList(propagations)
        self.lin_out = nn.Linear(recipe.hidden, out_channels)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        x = F.relu(self.lin_in(F.dropout(x, self.dropout, self.training)))
        for conv in self.convs:
            x = self.framework.call(conv, graph, x)
        return self.lin_out(F.dropout(x, self.dropout, self.training))

    def first_layer(self) -> nn.Module:
        return self.lin_in


def propagation(framework: str, constructor: Callable[..., nn.Module], *, trained: bool) -> nn.Module:
    """Makes one layer, with a temperature that is trained or fixed at 1."""
    return constructor(requires_grad=trained) if framework == "pyg" else constructor(learn_beta=trained)


def recipe_of(dataset: NodeDataset) -> Recipe:
    """Returns the dataset's hyper-parameters; two propagations of width 64 if `RECIPES` has none."""
    return RECIPES.get(dataset.name.lower().replace("_", "-"), Recipe())


def make_model(
    framework: str, conv: str, in_channels: int, num_classes: int, recipe: Recipe
) -> tuple[nn.Module, str]:
    """Makes the model with the ``reference`` or the ``fast`` layer; also returns the layer's name.

    The first temperature is fixed, the others are trained, as in the authors' two-layer model for Cora.
    """
    name, constructor = layer(framework, "agnn", conv)
    propagations = [propagation(framework, constructor, trained=place > 0) for place in range(recipe.layers)]
    return AGNN(FRAMEWORKS[framework], propagations, in_channels, num_classes, recipe), name


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
