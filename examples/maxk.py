"""Trains a GNN with MaxK for several k and with ReLU, and compares accuracy, time and stored activations.

    python examples/maxk.py --framework pyg --operator sage --dataset planted --k 8 16 32 64 128
    python examples/maxk.py --dataset planted --recompute   stores only kept entries, aggregates twice

All models start from the same weights. Models with ReLU use FastSparse's drop-in layers, so the kernels are
the same.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch
import torch.nn.functional as F
from common.cli import at_least, parser, run, train_and_report
from common.data import NodeDataset
from common.errors import ExampleError
from common.frameworks import FRAMEWORKS, Framework, layer
from common.report import LayerResult, make_console
from common.training import Recipe
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

PLANETOID = Recipe(layers=3, hidden=256, weight_decay=5e-4, epochs=100, runs=10, normalise_features=True)

#: Hyper-parameters by dataset. MaxK-GNN's own models have three layers, 256 wide.
RECIPES = {
    "planted": Recipe(layers=3, hidden=256, lr=0.005, epochs=20, runs=2),
    "karate": Recipe(layers=3, hidden=64, epochs=60, runs=3),
    "cora": PLANETOID,
    "citeseer": PLANETOID,
    "pubmed": PLANETOID,
    "amazon-computers": Recipe(layers=3, hidden=256, lr=0.002, epochs=300, runs=5),
    "ogbn-arxiv": Recipe(layers=3, hidden=256, lr=0.005, epochs=500),
}

DEFAULT_KEPT = (8, 16, 32, 64, 128)


class SparseActivationGNN(nn.Module):
    """A linear layer, then graph convolutions, each of which gets activations of ReLU or MaxK with dropout.

    Args:
        framework: The framework of the layers.
        conv: Constructor ``conv(in_channels, out_channels)`` of the layer.
        in_channels: Width of the features.
        out_channels: Number of classes.
        recipe: Depth, width and dropout.
        stored: List to which the first step appends the bytes that each layer stores for the backward pass.
    """

    def __init__(
        self,
        framework: Framework,
        conv: Callable[..., nn.Module],
        in_channels: int,
        out_channels: int,
        recipe: Recipe,
        stored: list[int],
    ) -> None:
        super().__init__()
        self.framework = framework
        self.dropout = recipe.dropout
        self.lin_in = nn.Linear(in_channels, recipe.hidden)
        widths = [*[recipe.hidden] * recipe.layers, out_channels]
        self.convs = nn.ModuleList(conv(a, b) for a, b in itertools.pairwise(widths))
        self.stored = stored

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, classes) from features (num_nodes, in_channels)."""
        measure = not self.stored and torch.is_grad_enabled()
        x = self.lin_in(x)
        for conv in self.convs:
            with StoredBytes(self.parameters() if measure else None) as stored:
                x = self._layer(conv, graph, x)
            if measure:
                self.stored.append(stored.total())
        return x

    def _layer(self, conv: nn.Module, graph: Any, x: Tensor) -> Tensor:
        if not hasattr(conv, "maxk"):
            return self.framework.call(conv, graph, F.dropout(F.relu(x), self.dropout, self.training))
        kept = conv.maxk.compress(x)
        # Dropout is applied only to the kept values, because it does not change zeros.
        kept = kept.with_values(F.dropout(kept.values, self.dropout, self.training))
        return self.framework.call(conv, graph, kept)

    def first_layer(self) -> nn.Module:
        return self.lin_in


class StoredBytes:
    """In this context, counts the bytes that autograd stores for the backward pass, without parameters.

    Args:
        parameters: Tensors that are not counted, because they exist anyway; None: nothing is counted.
    """

    def __init__(self, parameters: Any) -> None:
        self.sizes: dict[int, int] = {}
        self.hooks = None
        if parameters is not None:
            self.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.parameters:
                # All of these tensors are alive until the backward pass, so their addresses are unique.
                self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> StoredBytes:
        if self.hooks is not None:
            self.hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(*exception)

    def total(self) -> int:
        return sum(self.sizes.values())


def recipe_of(dataset: NodeDataset) -> Recipe:
    """Returns the dataset's hyper-parameters; three layers of width 256 if `RECIPES` has none."""
    return RECIPES.get(dataset.name.lower().replace("_", "-"), Recipe(layers=3, hidden=256))


def make_model(
    framework: str,
    operator: str,
    activation: str,
    in_channels: int,
    num_classes: int,
    recipe: Recipe,
    stored: list[int],
    recompute: bool = False,
) -> tuple[nn.Module, str]:
    """Makes the model with one activation, ``relu`` or a number k; also returns the model's title.

    With ``recompute`` the layers with MaxK aggregate once more in the backward pass.

    Raises:
        ExampleError: k is larger than the width of the layers.
    """
    if activation == "relu":
        name, constructor = layer(framework, operator, "fast")
        title = f"{name}, ReLU"
    else:
        k = int(activation)
        if k > recipe.hidden:
            raise ExampleError(f"--k {k}: the layers are only {recipe.hidden} wide; see --hidden.")
        name, maxk_layer = layer(framework, f"maxk-{operator}", "fast")
        title = f"{name}, k = {k}" + (", recompute" if recompute else "")

        def constructor(num_in: int, num_out: int) -> nn.Module:
            return maxk_layer(num_in, num_out, k=k, recompute=recompute)

    model = SparseActivationGNN(FRAMEWORKS[framework], constructor, in_channels, num_classes, recipe, stored)
    return model, title


def check_kept(options: argparse.Namespace) -> None:
    """Checks, before data are loaded, that no k is larger than the width of the layers.

    Raises:
        ExampleError: A k is larger than the width in the recipe or in --hidden.
    """
    known = RECIPES.get(options.dataset.lower().replace("_", "-"), Recipe(layers=3, hidden=256))
    width = options.hidden or known.hidden
    if options.k is None:
        options.k = [k for k in DEFAULT_KEPT if k <= width]
    for k in options.k:
        if k > width:
            raise ExampleError(f"--k {k}: the layers are only {width} wide; see --hidden.")


def print_stored(console: Console, stored: dict[str, list[int]], results: Sequence[LayerResult]) -> None:
    """Prints how many bytes each layer stores for the backward pass."""
    table = Table(title="stored activations of each layer", title_justify="left")
    table.add_column("layer", no_wrap=True)
    for number in range(1, max(map(len, stored.values())) + 1):
        table.add_column(f"layer {number}", justify="right")
    if "relu" in stored:
        table.add_column("share of ReLU's", justify="right")
    for result in results:
        sizes = stored[result.conv]
        row = [result.layer, *(f"{size / 2**10:,.0f} KiB" for size in sizes)]
        if "relu" in stored:
            row.append(f"{sum(sizes) / sum(stored['relu']):.3f}")
        table.add_row(*row)
    console.print(table)


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    command_line = parser(__doc__.split("\n\n", 1)[0], conv=False)
    command_line.add_argument(
        "--operator", choices=("sage", "gcn"), default="sage", help="which graph convolution"
    )
    command_line.add_argument(
        "--k",
        type=at_least(1),
        nargs="+",
        help=f"kept entries per row (default: those of {', '.join(map(str, DEFAULT_KEPT))} that fit)",
    )
    command_line.add_argument("--no-relu", action="store_true", help="leave the comparison with ReLU out")
    command_line.add_argument(
        "--recompute",
        action="store_true",
        help="MaxK's layers aggregate once more in the backward pass, and store kept entries alone",
    )
    options = command_line.parse_args(arguments)
    console = console or make_console()
    check_kept(options)
    activations = [*([] if options.no_relu else ["relu"]), *map(str, dict.fromkeys(options.k))]
    stored: dict[str, list[int]] = {activation: [] for activation in activations}

    def model_of(
        framework: str, activation: str, in_channels: int, num_classes: int, recipe: Recipe
    ) -> tuple[nn.Module, str]:
        return make_model(
            framework,
            options.operator,
            activation,
            in_channels,
            num_classes,
            recipe,
            stored[activation],
            options.recompute,
        )

    log, results = train_and_report(
        options, recipe_of, model_of, console, convs=activations, extras={"stored_bytes": stored}
    )
    print_stored(console, stored, results)
    return log, results


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
