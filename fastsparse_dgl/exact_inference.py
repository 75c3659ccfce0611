"""Computes a model's exact results for all nodes of a graph, layer by layer, without sampling."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from fastsparse_core import Adjacency, spmm
from fastsparse_core.exact_inference import Framework, Stage, Tile, infer, small_graph
from fastsparse_dgl.caching import adjacency_of
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.layer_swap import as_drop_in, is_graph_layer
from fastsparse_dgl.nn import FastGINConv, FastGraphConv, FastSAGEConv
from fastsparse_dgl.nn.base import AggregationMixin


def inference(
    model: Module | list[Any] | tuple[Any, ...],
    graph: GraphLike,
    feat: Any,
    *,
    device: torch.device | str | None = None,
    rows: Tensor | None = None,
    out: Any = None,
    memory: int | None = None,
    tile: int | None = None,
    group: Any = None,
) -> Any:
    """Computes ``model(graph, feat)`` in evaluation mode layer by layer, for large graphs.

    Each layer is computed for all nodes (or for all nodes that ``rows`` depend on) before the next layer.
    Neighbours are not sampled, so the results equal those of the full forward pass up to rounding.
    Destinations are processed in tiles that fit into memory. Features and results of layers are stored on the
    device if they fit into its memory, otherwise on the host. No gradients are recorded.

    The model must be a loop over its graph layers with normalisation, activation and dropout between them. It
    must concatenate attention heads, except in the last layer, where it may average them. A run on a small
    graph finds out which functions are between the layers. For other models, pass the layers as a list, with
    row-wise functions between them.

    Args:
        model: module, or list of graph layers and functions.
        graph: DGLGraph with one node type and one edge type, or an ``Adjacency``, on ``device`` or on the
            CPU.
        feat: floating (N, F) tensor or NumPy array, on ``device`` or on the CPU, possibly a memory-mapped
            file.
        device: device that computes the layers; None: the device of the model.
        rows: nodes to compute results for, int64 (R,) or a bool mask (N,); None: all.
        out: floating tensor or NumPy array (R, ...) to write the results to, possibly a memory-mapped file;
            None: a new tensor.
        memory: limit of used GPU memory in bytes, including memory that is in use already; None: no limit.
        tile: largest number of destinations per tile; None: as many as fit.
        group: processes among which destinations are divided, for instance
            ``torch.distributed.group.WORLD`` under ``torchrun``. All processes must pass the same arguments,
            and get all results. None: this process only.

    Returns:
        The results, (R, ...), on the device if they fit there, else on the CPU; ``out`` if it was given.

    Raises:
        DGLError: ``graph`` is not a graph, or has several edge types.
        TypeError: an argument has another type.
        ValueError: sizes or devices do not fit, or the model cannot be computed layer by layer.

    Example:
        >>> import dgl, torch
        >>> from dgl.nn import SAGEConv
        >>> from fastsparse_dgl import inference
        >>> layers = [SAGEConv(8, 16, "mean"), torch.relu, SAGEConv(16, 3, "mean")]
        >>> graph = dgl.graph(([0, 1, 2, 3], [1, 2, 3, 0]))
        >>> inference(layers, graph, torch.randn(4, 8)).shape
        torch.Size([4, 3])
    """
    adj = adjacency_of(graph, getattr(graph, "device", torch.device("cpu")))
    options: dict[str, Any] = {"device": device, "rows": rows, "out": out, "memory": memory, "tile": tile}
    return infer(model, _FRAMEWORK, adj, feat, "feat", group=group, **options)


def _call(layer: Any, x: Tensor) -> Tensor:
    edges, num_nodes = small_graph()
    small = dgl.graph((edges[0], edges[1]), num_nodes=num_nodes)
    graph: Any = adjacency_of(small, x.device) if isinstance(layer, AggregationMixin) else small.to(x.device)
    if is_graph_layer(layer):
        result: Tensor = layer(graph, x)
        return result
    try:
        return layer(graph, x)
    except Exception:
        return layer(x, graph)


def _stage(name: str, layer: Any) -> Stage:
    fast = as_drop_in(layer)
    if not isinstance(fast, AggregationMixin):
        raise ValueError(f"model: expected layers that have a FastSparse drop-in, got {name}")

    def compute(tile: Tile, sums: Tensor | None) -> Tensor:
        result: Tensor
        if sums is not None:
            result = fast(_each_its_own(sums), (sums, tile.own))
        # If the destinations are the first sources, pass only the sources, to compute their maps only once.
        elif tile.own.data_ptr() == tile.sources.data_ptr():
            result = fast(tile.adj, tile.sources)
        else:
            result = fast(tile.adj, (tile.sources, tile.own))
        return result

    reads: Literal["columns", "sources"] = "columns" if _only_sums(fast) else "sources"
    reduce: Any = getattr(fast, "_aggre_type", None) or getattr(fast, "_aggregator_type", None)
    if reads == "sources" or reduce is None:
        return Stage(name, compute, reads, reads_out_degree=True)

    def neighbour_sums(tile: Tile) -> Tensor:
        return spmm(tile.adj, tile.sources, reduce=reduce)

    return Stage(name, compute, reads, sums=neighbour_sums)


def _each_its_own(sums: Tensor) -> Adjacency:
    """Returns a structure in which every node has only itself as neighbour, so sums change no features."""
    numbers = torch.arange(sums.size(0) + 1, device=sums.device)
    return Adjacency(numbers, numbers[:-1].int(), (sums.size(0), sums.size(0)))


def _only_sums(layer: Any) -> bool:
    """True if the first step of a layer is to sum the features of its sources."""
    if isinstance(layer, FastSAGEConv):
        return layer._aggre_type == "mean" and not layer._transform_first
    if isinstance(layer, FastGraphConv):
        return layer._in_feats <= layer._out_feats
    return isinstance(layer, FastGINConv)


def _heads_together(x: Tensor) -> Tensor:
    return x.flatten(1)


def _mean_of_heads(x: Tensor) -> Tensor:
    return x.mean(1)


_FRAMEWORK = Framework(
    is_layer=lambda item: isinstance(item, Module) and is_graph_layer(item),
    stage=_stage,
    call=_call,
    reshapes=(
        (None, None),
        (_heads_together, _mean_of_heads),
        (_heads_together, _heads_together),
        (_heads_together, None),
    ),
)
