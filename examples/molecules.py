"""Trains classifiers of molecules that read the kinds of bonds, with the framework's layers and the drop-ins.

    python examples/molecules.py --model pna --plot curves.png
    python examples/molecules.py --framework dgl --model gps --conv fast
    python examples/molecules.py --dataset ogbg-molhiv --root data --model gine

The embedded data set is drawn from a seed. ogbg-molhiv needs OGB's raw files in --root, not the ogb package.
The only difference between the compared models is the class of the graph layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch
import torch.nn.functional as F
from common.cli import (
    above_zero,
    add_capture,
    at_least,
    check_capture,
    parser,
    run,
    train_graphs_and_report,
)
from common.errors import ExampleError
from common.frameworks import layer
from common.graph_data import GraphBatch, GraphDataset
from common.molecules import drawn_molecules, read_ogb_molecules
from common.report import LayerResult, make_console
from common.training import Recipe
from rich.console import Console
from torch import Tensor, nn

DATASETS = ("molecules", "ogbg-molhiv")

#: Hyper-parameters by dataset.
RECIPES = {
    "molecules": Recipe(
        layers=3, hidden=64, heads=4, dropout=0.0, lr=2e-3, epochs=15, runs=2, batch_size=128
    ),
    "ogbg-molhiv": Recipe(
        layers=4,
        hidden=80,
        heads=4,
        dropout=0.2,
        lr=1e-3,
        epochs=30,
        runs=3,
        batch_size=512,
        select_by="roc_auc",
    ),
}

#: Width of the bonds' features in attention and PNA. In GINE, they are as wide as the nodes' features.
BOND_WIDTH = 16
PNA = (["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"])

#: call(layer, graph, x, features of the edges).
CALLS: dict[str, Callable[[nn.Module, Any, Tensor, Tensor], Tensor]] = {
    "pyg": lambda layer, graph, x, edges: layer(x, graph, edges),
    "dgl": lambda layer, graph, x, edges: layer(graph, x, edges),
}


class Block(nn.Module):
    """A graph layer with batch norm and a skip connection.

    Args:
        framework: ``pyg`` or ``dgl``.
        conv: The layer, of equal width in and out, heads side by side or in a dimension of their own.
        recipe: Width and dropout.
        has_feed_forward: Whether a perceptron follows, as in transformers.
    """

    def __init__(self, framework: str, conv: nn.Module, recipe: Recipe, has_feed_forward: bool) -> None:
        super().__init__()
        width = recipe.hidden
        self.call, self.conv, self.dropout = CALLS[framework], conv, recipe.dropout
        self.norm = nn.BatchNorm1d(width)
        self.feed_forward = None
        if has_feed_forward:
            self.feed_forward = nn.Sequential(
                nn.Linear(width, 2 * width),
                nn.ReLU(),
                nn.Dropout(recipe.dropout),
                nn.Linear(2 * width, width),
            )
            self.last_norm = nn.BatchNorm1d(width)

    def forward(self, graph: Any, x: Tensor, edges: Tensor) -> Tensor:
        """Computes new features (num_nodes, width) from node features of the same shape and edge features."""
        out = F.dropout(self.call(self.conv, graph, x, edges).flatten(1), self.dropout, self.training)
        if self.feed_forward is None:
            return x + F.relu(self.norm(out))
        x = self.norm(x + out)
        return self.last_norm(x + self.feed_forward(x))


class MoleculeModel(nn.Module):
    """Blocks on embedded atoms and bonds, then the mean over each molecule's atoms.

    Args:
        blocks: The blocks.
        dataset: Numbers of kinds of atoms and bonds.
        recipe: Width.
        bond_width: Width of the bonds' features.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], dataset: GraphDataset, recipe: Recipe, bond_width: int
    ) -> None:
        super().__init__()
        assert dataset.edge_codes is not None
        self.atoms = _embeddings(dataset.codes, recipe.hidden)
        self.bonds = _embeddings(dataset.edge_codes, bond_width)
        self.blocks = nn.ModuleList(blocks)
        self.readout = nn.Linear(recipe.hidden, dataset.num_classes)

    def forward(self, graph: Any, batch: GraphBatch) -> Tensor:
        """Computes logits (molecules, classes)."""
        assert batch.edge_codes is not None
        x, edges = _embed(self.atoms, batch.codes), _embed(self.bonds, batch.edge_codes)
        for block in self.blocks:
            x = block(graph, x, edges)
        return self.readout(batch.mean(x))


def _embeddings(codes: Tensor, width: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Embedding(int(size) + 1, width) for size in codes.amax(0))


def _embed(embeddings: nn.ModuleList, codes: Tensor) -> Tensor:
    return torch.stack([table(code) for table, code in zip(embeddings, codes.t(), strict=True)]).sum(0)


#: Function that makes one layer: (framework, constructor of the layer, dataset, recipe) -> layer.
MakeLayer = Callable[[str, Callable[..., nn.Module], GraphDataset, Recipe], nn.Module]


def make_gine(
    framework: str, constructor: Callable[..., nn.Module], dataset: GraphDataset, recipe: Recipe
) -> nn.Module:
    """GINE with a perceptron of two layers."""
    width = recipe.hidden
    return constructor(
        nn.Sequential(
            nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
    )


def make_attention(
    framework: str, constructor: Callable[..., nn.Module], dataset: GraphDataset, recipe: Recipe
) -> nn.Module:
    """Attention over the bonds: PyG's TransformerConv, DGL's EdgeGATConv."""
    if recipe.hidden % recipe.heads:
        raise ExampleError(f"--hidden {recipe.hidden}: expected a multiple of --heads {recipe.heads}.")
    width = recipe.hidden // recipe.heads
    if framework == "pyg":
        return constructor(recipe.hidden, width, heads=recipe.heads, edge_dim=BOND_WIDTH)
    return constructor(recipe.hidden, BOND_WIDTH, width, recipe.heads)


def make_pna(
    framework: str, constructor: Callable[..., nn.Module], dataset: GraphDataset, recipe: Recipe
) -> nn.Module:
    """PNA with four aggregators and three scalers, normalised by the degrees of the atoms."""
    degree = torch.bincount(dataset.edge_index[1], minlength=dataset.codes.size(0))
    if framework == "pyg":
        return constructor(
            recipe.hidden, recipe.hidden, *PNA, deg=torch.bincount(degree), edge_dim=BOND_WIDTH
        )
    delta = float(torch.log(degree + 1.0).mean())
    return constructor(recipe.hidden, recipe.hidden, *PNA, delta, edge_feat_size=BOND_WIDTH)


#: --model -> (operator in `common.frameworks.LAYERS`, function that makes a layer, True for transformers).
MODELS: dict[str, tuple[str, MakeLayer, bool]] = {
    "pna": ("pna", make_pna, False),
    "gps": ("edge_attention", make_attention, True),
    "gine": ("gine", make_gine, False),
}


def make_model(
    kind: str, framework: str, conv: str, dataset: GraphDataset, recipe: Recipe
) -> tuple[nn.Module, str]:
    """Makes the classifier of ``--model`` with the ``reference`` or ``fast`` layer; also returns its name."""
    operator, make_layer, has_feed_forward = MODELS[kind]
    name, constructor = layer(framework, operator, conv)
    blocks = [
        Block(framework, make_layer(framework, constructor, dataset, recipe), recipe, has_feed_forward)
        for _ in range(recipe.layers)
    ]
    return MoleculeModel(blocks, dataset, recipe, recipe.hidden if kind == "gine" else BOND_WIDTH), name


def main(
    arguments: Sequence[str] | None = None, console: Console | None = None
) -> tuple[dict, list[LayerResult]]:
    """Runs the example; returns the log that --json writes, and the results.

    Args:
        arguments: Command line, by default the process's own.
        console: Where to print, by default standard output.
    """
    command_line = parser(__doc__.split("\n\n", 1)[0], heads=True, datasets=DATASETS, comparing=True)
    add = command_line.add_argument
    add("--model", choices=tuple(MODELS), default="pna", help="PNA, a GPS-style transformer, or GINE")
    add("--batch-size", type=at_least(2), help="molecules per step (default: the dataset's recipe)")
    add("--lr", type=above_zero, help="learning rate (default: the dataset's recipe)")
    add("--molecules", type=at_least(20), default=4000, help="number of molecules in the generated dataset")
    add_capture(command_line)
    options = command_line.parse_args(arguments)
    check_capture(options)
    options.features = "given"
    console = console or make_console()
    if options.dataset == "molecules":
        dataset = drawn_molecules(options.molecules, options.seed)
    else:
        dataset = read_ogb_molecules(options.dataset, options.root)

    def model_for(framework: str, conv: str, dataset: GraphDataset, recipe: Recipe) -> tuple[nn.Module, str]:
        return make_model(options.model, framework, conv, dataset, recipe)

    return train_graphs_and_report(options, dataset, RECIPES[options.dataset], model_for, console)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
