"""The models of ``ogb_node.py --model``, which take whole graphs as well as mini-batches.

A new model is a function that puts layers into a `NodeModel`, and a line in `MODELS`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .errors import ExampleError
from .frameworks import FRAMEWORKS, Framework, attention_layer, joined, layer
from .long_run import LongRecipe
from .ogb_tasks import OgbNodes


class Options(Protocol):
    """The options of the command line that the models read."""

    framework: str
    conv: str
    batching: str


@dataclass(frozen=True)
class NodeRecipe(LongRecipe):
    """Hyper-parameters of one dataset and model; `hidden` is the width of all heads together.

    Attributes:
        batch_norm: Whether batch norms follow all layers but the last.
        fanouts: Neighbours drawn for a node, for those, ...; for batches.
    """

    batch_norm: bool = False
    fanouts: tuple[int, ...] = (10, 10, 10)


class NodeModel(nn.Module):
    """Graph layers with a module after each, for whole graphs and for mini-batches.

    Args:
        framework: The framework of the layers.
        convs: The layers.
        after: One module per layer, which is applied to the layer's result.
        skips: Linear maps of what a layer takes, added to what it gives; none if empty.
        before: Module that is applied to the features first, or None.
    """

    def __init__(
        self,
        framework: Framework,
        convs: Sequence[nn.Module],
        after: Sequence[nn.Module],
        skips: Sequence[nn.Module] = (),
        before: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.before = before or nn.Identity()
        self.convs = nn.ModuleList(convs)
        self.skips = nn.ModuleList(skips)
        self.after = nn.ModuleList(after)

    def layer(self, index: int, graph: Any, x: Tensor) -> Tensor:
        """Applies one layer and its module; the result has a row per destination of the graph."""
        if index == 0:
            x = self.before(x)
        out = joined(self.framework.call(self.convs[index], graph, x), concat=index < len(self.convs) - 1)
        if self.skips:
            out = out + self.skips[index](x[: out.size(0)])
        return self.after[index](out)

    def forward(self, graphs: Sequence[Any], x: Tensor) -> Tensor:
        """Computes logits from one graph per layer and the features of the first graph's sources."""
        for index, graph in enumerate(graphs):
            x = self.layer(index, graph, x)
        return x


def between(recipe: NodeRecipe, activation: Callable[[], nn.Module]) -> list[nn.Module]:
    """Makes the modules after the layers: optional batch norm, activation, dropout; none after the last."""
    norm = nn.BatchNorm1d if recipe.batch_norm else nn.Identity
    hidden = [
        nn.Sequential(norm(recipe.hidden), activation(), nn.Dropout(recipe.dropout))
        for _ in range(recipe.layers - 1)
    ]
    return [*hidden, nn.Identity()]


def widths_of(data: OgbNodes, recipe: NodeRecipe) -> list[tuple[int, int]]:
    """Returns (input width, output width) for every layer."""
    widths = [data.x.size(1), *[recipe.hidden] * (recipe.layers - 1), data.num_outputs]
    return list(itertools.pairwise(widths))


def make_gcn(options: Options, data: OgbNodes, recipe: NodeRecipe) -> tuple[nn.Module, str]:
    """GCN as in OGB's examples."""
    name, constructor = layer(options.framework, "gcn", options.conv)
    # The layer may cache the graph only if it is the same in every step.
    extra = {"cached": options.batching == "full"} if options.framework == "pyg" else {}
    convs = [constructor(*widths, **extra) for widths in widths_of(data, recipe)]
    return NodeModel(FRAMEWORKS[options.framework], convs, between(recipe, nn.ReLU)), name


def make_sage(options: Options, data: OgbNodes, recipe: NodeRecipe) -> tuple[nn.Module, str]:
    """GraphSAGE with means, as in OGB's examples."""
    name, constructor = layer(options.framework, "sage", options.conv)
    convs = [constructor(*widths) for widths in widths_of(data, recipe)]
    return NodeModel(FRAMEWORKS[options.framework], convs, between(recipe, nn.ReLU)), name


def make_maxk_sage(options: Options, data: OgbNodes, recipe: NodeRecipe) -> tuple[nn.Module, str]:
    """GraphSAGE after a linear map; MaxK keeps one of 8 features before every layer, as in MaxK-GNN."""
    from fastsparse_core import MaxK

    k = max(recipe.hidden // 8, 1)
    name, constructor = layer(options.framework, "maxk-sage", options.conv)
    keep: Callable[[], nn.Module] = functools.partial(MaxK, k)
    if options.conv == "fast":  # the fast layers apply MaxK themselves
        constructor, keep = functools.partial(constructor, k=k), nn.Identity
    convs = [constructor(recipe.hidden, out) for _, out in widths_of(data, recipe)]
    after = [nn.Sequential(each, keep()) for each in between(recipe, nn.Identity)[:-1]]
    before = nn.Sequential(nn.Linear(data.x.size(1), recipe.hidden), keep())
    return NodeModel(FRAMEWORKS[options.framework], convs, [*after, nn.Identity()], before=before), name


def make_gat(options: Options, data: OgbNodes, recipe: NodeRecipe) -> tuple[nn.Module, str]:
    """GAT with linear skips, as in PyG's example for ogbn-products."""
    heads = _checked_heads(recipe)
    name, constructor = layer(options.framework, "gat", options.conv)
    attention = functools.partial(attention_layer, options.framework, constructor, 0.0)
    widths = widths_of(data, recipe)
    convs = [attention(a, b // heads, heads, True) for a, b in widths[:-1]]
    convs.append(attention(*widths[-1], heads, False))
    skips = [nn.Linear(a, b) for a, b in widths]
    return NodeModel(FRAMEWORKS[options.framework], convs, between(recipe, nn.ELU), skips), name


def make_gt(options: Options, data: OgbNodes, recipe: NodeRecipe) -> tuple[nn.Module, str]:
    """Graph transformer layers with layer norms between two linear maps."""
    heads = _checked_heads(recipe)
    name, constructor = layer(options.framework, "graph_transformer", options.conv)
    width, dropout = recipe.hidden, recipe.dropout
    convs = [constructor(width, width, heads, dropout, 0.0, "layer") for _ in range(recipe.layers)]
    after = [nn.Identity() for _ in convs[1:]]
    last = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, data.num_outputs))
    before = nn.Linear(data.x.size(1), width)
    return NodeModel(FRAMEWORKS[options.framework], convs, [*after, last], before=before), name


def _checked_heads(recipe: NodeRecipe) -> int:
    if recipe.hidden % recipe.heads:
        raise ExampleError(f"--hidden {recipe.hidden}: expected a multiple of --heads {recipe.heads}.")
    return recipe.heads


@dataclass(frozen=True)
class Model:
    """A model that ``--model`` names.

    Attributes:
        make: ``make(options, data, recipe)`` returns the model and its layer's name.
        self_loops: Whether DGL's graph needs self loops, because only PyG's layer adds them by itself.
        whole_graph: Whether a layer's result depends on more than a node's neighbours.
    """

    make: Callable[[Options, OgbNodes, NodeRecipe], tuple[nn.Module, str]]
    self_loops: bool = False
    whole_graph: bool = False


MODELS = {
    # GCN weights a neighbour by its degree in the whole graph, which a mini-batch does not contain.
    "gcn": Model(make_gcn, self_loops=True, whole_graph=True),
    "sage": Model(make_sage),
    "maxk-sage": Model(make_maxk_sage),
    "gat": Model(make_gat, self_loops=True),
    "gt": Model(make_gt),
}
