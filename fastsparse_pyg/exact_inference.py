"""Computes a model's exact results for all nodes of a graph, layer by layer, without sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GCNConv, MessagePassing

from fastsparse_core import Adjacency, spmm
from fastsparse_core.exact_inference import Framework, Stage, Tile, infer, small_graph
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_pyg.graph import resolve, to_edge_index, values_of
from fastsparse_pyg.layer_swap import as_drop_in
from fastsparse_pyg.nn import FastGINConv, FastGraphConv, FastSAGEConv
from fastsparse_pyg.nn.base import REDUCE, FastConv


def inference(
    model: Module | list[Any] | tuple[Any, ...],
    data: Any,
    *,
    device: torch.device | str | None = None,
    rows: Tensor | None = None,
    out: Any = None,
    memory: int | None = None,
    tile: int | None = None,
    group: Any = None,
) -> Any:
    """Computes ``model(data.x, data.edge_index)`` in evaluation mode layer by layer, for large graphs.

    Each layer is computed for all nodes (or for all nodes that ``rows`` depend on) before the next layer.
    Neighbours are not sampled, so the results equal those of the full forward pass up to rounding.
    Destinations are processed in tiles that fit into memory. Features and results of layers are stored on the
    device if they fit into its memory, otherwise on the host. No gradients are recorded.

    The model must be a loop over its graph layers with normalisation, activation and dropout between them,
    such as PyG's ``GraphSAGE``, ``GCN`` and ``GAT`` without jumping knowledge. A run on a small graph finds
    out which functions are between the layers. For other models, pass the layers as a list, with row-wise
    functions between them.

    Args:
        model: module, or list of graph layers and functions.
        data: object with ``x``, a floating (N, F) tensor or NumPy array on ``device`` or the CPU, possibly a
            memory-mapped file. Its ``edge_index`` or ``adj_t`` is an int32 or int64 tensor (2, E), a matrix
            without values or an ``Adjacency``.
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
        TypeError: an argument has another type.
        ValueError: sizes or devices do not fit, or the model cannot be computed layer by layer.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.nn.models import GraphSAGE
        >>> from fastsparse_pyg import inference
        >>> data = Data(x=torch.randn(4, 8), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        >>> inference(GraphSAGE(8, 16, num_layers=2, out_channels=3), data).shape
        torch.Size([4, 3])
    """
    edges = getattr(data, "edge_index", None)
    if edges is None:
        edges = getattr(data, "adj_t", None)
    x = getattr(data, "x", None)
    if edges is None or x is None:
        missing = "x" if x is None else "edge_index or adj_t"
        raise ValueError(
            f"data: expected features x and edges, got a {type(data).__name__} without {missing}"
        )
    if values_of(edges) is not None:
        raise ValueError(
            "data.adj_t: expected a matrix without values, got one with values; inference() does not support "
            "edge weights"
        )
    place = edges.device() if callable(edges.device) else edges.device
    adj = resolve(edges, len(x), len(x), place)
    options: dict[str, Any] = {"device": device, "rows": rows, "out": out, "memory": memory, "tile": tile}
    return infer(model, _FRAMEWORK, adj, x, "data.x", group=group, **options)


def _call(layer: Any, x: Tensor) -> Tensor:
    edges, _ = small_graph()
    result: Tensor = layer(x, edges.to(x.device))
    return result


@contextlib.contextmanager
def _without_caches(modules: Iterable[Module]) -> Iterator[None]:
    """Within this context, layers with ``cached=True`` neither use nor replace their cached graph."""
    kept = [(module, dict(vars(module))) for module in modules if vars(module).get("cached") is True]
    try:
        for module, state in kept:
            vars(module).update({name: None for name in state if "_cached" in name}, cached=False)
        yield
    finally:
        for module, state in kept:
            vars(module).clear()
            vars(module).update(state)


def _stage(name: str, layer: Any) -> Stage:
    if layer.flow != "source_to_target":
        raise ValueError(f"model: expected flow='source_to_target', got {layer.flow!r} for {name}")
    if isinstance(layer, GCNConv):
        return _gcn_stage(name, layer)
    fast = as_drop_in(layer)
    if not isinstance(fast, FastConv):

        def by_pyg(tile: Tile, sums: Tensor | None) -> Tensor:
            result: Tensor = layer((tile.sources, tile.own), to_edge_index(tile.adj, layer.flow))
            return result

        return Stage(name, by_pyg)

    def compute(tile: Tile, sums: Tensor | None) -> Tensor:
        result: Tensor
        if sums is None:
            result = fast((tile.sources, tile.own), tile.adj)
        else:
            result = fast._after_sum(sums, tile.own)
        return result

    loops = bool(vars(fast).get("add_self_loops", False))
    if not _only_sums(fast):
        return Stage(name, compute, adds_loops=loops)
    reduce = REDUCE[type(fast.aggr_module)]

    def neighbour_sums(tile: Tile) -> Tensor:
        return spmm(tile.adj, tile.sources, reduce=reduce)

    return Stage(name, compute, "columns", loops, sums=neighbour_sums)


def _only_sums(layer: Any) -> bool:
    """True if the first step of a layer is to sum the features of its sources."""
    if type(layer.aggr_module) not in REDUCE:
        return False
    if isinstance(layer, FastGINConv):
        return True
    if not isinstance(layer, (FastSAGEConv, FastGraphConv)):
        return False
    width = layer.in_channels[0] if isinstance(layer.in_channels, tuple) else layer.in_channels
    return not getattr(layer, "project", False) and 0 < width <= layer.out_channels


def _gcn_stage(name: str, layer: Any) -> Stage:
    r"""Makes the stage of a GCN layer, with degrees and missing self loops of the whole graph, not of a tile.

    .. math:: s_i \sum_{j \in N(i)} s_j x_j + c_i s_i^2 x_i

    where :math:`c_i` is 1 minus the number of self loops of node :math:`i`. Without edge weights, PyG's loops
    have weight 1 even with ``improved=True``.
    """
    key = ("GCN", layer.normalize, layer.add_self_loops)
    has_factors, adds_loops = layer.normalize, layer.normalize and layer.add_self_loops

    def missing_loops(adj: Adjacency) -> Tensor:
        return 1 - adj.loop_count()

    def factors(adj: Adjacency, dtype: torch.dtype) -> Tensor:
        degree = adj.in_degree()
        if adds_loops:
            degree = degree + missing_loops(adj)
        return degree.to(dtype).pow_(-0.5).nan_to_num_(posinf=0.0)

    transforms_first = layer.out_channels < layer.in_channels

    def scale_of(tile: Tile) -> Tensor:
        dtype = accumulation_dtype(tile.sources.dtype)
        return tile.graph.numbers((*key, dtype), lambda adj: factors(adj, dtype))

    def neighbour_sums(tile: Tile) -> Tensor:
        if not has_factors:
            return spmm(tile.adj, tile.sources)
        scale = scale_of(tile)
        return spmm(tile.adj, tile.sources, scale_dst=scale[tile.ids], scale_src=tile.of_sources(scale))

    def compute(tile: Tile, sums: Tensor | None) -> Tensor:
        if transforms_first:
            sources = layer.lin(tile.sources)
            tile = replace(tile, sources=sources, own=sources[: tile.own.size(0)])
        out = neighbour_sums(tile) if sums is None else sums
        if adds_loops:
            loops = tile.graph.numbers((*key, "loops"), missing_loops)[tile.ids]
            weight = loops * scale_of(tile)[tile.ids].square()
            out = torch.addcmul(out, tile.own.to(out.dtype), weight.to(out.dtype).unsqueeze(1))
        if not transforms_first:
            out = layer.lin(out)
        return out if layer.bias is None else out + layer.bias

    if transforms_first:
        return Stage(name, compute)
    return Stage(name, compute, "columns", sums=neighbour_sums)


_FRAMEWORK = Framework(
    is_layer=lambda item: isinstance(item, MessagePassing),
    stage=_stage,
    call=_call,
    preserved=_without_caches,
)
