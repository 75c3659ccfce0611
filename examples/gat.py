"""Trains a GAT with the framework's own layer and with its drop-in, and compares accuracy, time and memory.

    python examples/gat.py --framework pyg --conv both --dataset cora
    python examples/gat.py --attention gatv2 --dataset planted

The only difference between the two models is the layer class that `make_model` looks up.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch.nn.functional as F
from common.cli import parser, run, train_and_report
from common.data import NodeDataset
from common.errors import ExampleError
from common.frameworks import FRAMEWORKS, Framework, attention_layer, joined, layer
from common.report import LayerResult, make_console
from common.training import Recipe
from rich.console import Console
from torch import Tensor, nn

#: Veličković et al. (2018), section 3.3: 8 heads of 8 features, dropout 0.6 on features and on attention.
PLANETOID = Recipe(
    hidden=64, dropout=0.6, lr=5e-3, weight_decay=5e-4, epochs=300, runs=10, normalise_features=True
)

#: Hyper-parameters by dataset; `hidden` is the width of all heads together.
RECIPES = {
    "planted": Recipe(hidden=64, epochs=30, runs=2),
    "cora": PLANETOID,
    "citeseer": PLANETOID,
    "pubmed": PLANETOID,
    "karate": Recipe(hidden=16, heads=2, epochs=100),
    "minesweeper": Recipe(
        layers=5, hidden=64, dropout=0.2, lr=3e-3, epochs=200, runs=10, residual=True, select_by="roc_auc"
    ),
    "actor": Recipe(hidden=64, lr=5e-3, weight_decay=5e-4, epochs=200, runs=10),
    "ogbn-arxiv": Recipe(layers=3, hidden=128, heads=4, epochs=500),
}

#: Constructor (in_channels, channels per head, heads, concat) of an attention layer.
Attention = Callable[[int, int, int, bool], nn.Module]


class GAT(nn.Module):
    """Attention layers with ELU and dropout between the layers (Veličković et al., 2018).

    Args:
        framework: The framework of the layers.
        attention: Constructor of a layer.
        in_channels: Width of the features.
        out_channels: Number of classes.
        recipe: Depth, width, heads and dropout.
    """

    def __init__(
        self,
        framework: Framework,
        attention: Attention,
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        per_head = recipe.hidden // recipe.heads
        widths = [in_channels, *[recipe.hidden] * (recipe.layers - 1)]
        self.convs = nn.ModuleList(attention(width, per_head, recipe.heads, True) for width in widths[:-1])
        self.convs.append(attention(widths[-1], out_channels, 1, False))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        last = len(self.convs) - 1
        for i, conv in enumerate(self.convs):
            x = F.dropout(x, self.dropout, self.training)
            x = joined(self.framework.call(conv, graph, x), concat=i < last)
            if i < last:
                x = F.elu(x)
        return x

    def first_layer(self) -> nn.Module:
        return self.convs[0]


class ResidualGAT(nn.Module):
    """Residual blocks x + dropout(elu(conv(norm(x)))) between two linear maps; arguments as for `GAT`."""

    def __init__(
        self,
        framework: Framework,
        attention: Attention,
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        self.lin_in = nn.Linear(in_channels, recipe.hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(recipe.hidden) for _ in range(recipe.layers + 1))
        per_head = recipe.hidden // recipe.heads
        self.convs = nn.ModuleList(
            attention(recipe.hidden, per_head, recipe.heads, True) for _ in range(recipe.layers)
        )
        self.lin_out = nn.Linear(recipe.hidden, out_channels)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        x = self.lin_in(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            out = joined(self.framework.call(conv, graph, norm(x)), concat=True)
            x = x + F.dropout(F.elu(out), self.dropout, self.training)
        return self.lin_out(self.norms[-1](x))

    def first_layer(self) -> nn.Module:
        return self.lin_in


def recipe_of(dataset: NodeDataset) -> Recipe:
    """Returns the dataset's hyper-parameters; two layers of width 64 if `RECIPES` has none."""
    return RECIPES.get(dataset.name.lower().replace("_", "-"), Recipe())


def make_model(
    framework: str,
    conv: str,
    in_channels: int,
    num_classes: int,
    recipe: Recipe,
    *,
    operator: str = "gat",
) -> tuple[nn.Module, str]:
    """Makes the model with the ``reference`` or the ``fast`` layer; also returns the layer's name.

    Raises:
        ExampleError: The width is not a multiple of the number of heads.
    """
    if recipe.hidden % recipe.heads:
        raise ExampleError(f"--hidden {recipe.hidden}: expected a multiple of --heads {recipe.heads}.")
    name, constructor = layer(framework, operator, conv)
    attention = functools.partial(attention_layer, framework, constructor, recipe.dropout)
    model = ResidualGAT if recipe.residual else GAT
    return model(FRAMEWORKS[framework], attention, in_channels, num_classes, recipe), name


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    command_line = parser(__doc__.split("\n\n", 1)[0], heads=True)
    command_line.add_argument("--attention", choices=("gat", "gatv2"), default="gat", help="which attention")
    options = command_line.parse_args(arguments)
    make = functools.partial(make_model, operator=options.attention)
    return train_and_report(options, recipe_of, make, console or make_console())


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
