"""A cache of structures per graph.

Nothing is stored on the DGLGraph itself. It is a wrapper: ``to``, ``clone``, ``local_var`` and pickling copy
its attributes, and in-place changes such as ``add_edges`` keep them, so stored structures would become wrong.
The cache is keyed on ``graph._graph``, the handle of DGL's C++ object. DGL replaces the handle whenever the
structure changes, so a changed graph never finds an old entry. The key is a weak reference, so an entry is
freed with the last graph that uses it.

The slice ``graph[etype]`` of a heterogeneous graph gets a new handle every time, for the same C++ object.
:func:`relation` makes slices that share the first handle, which is stored until the whole graph's handle is
freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fastsparse_core import Adjacency
from fastsparse_core.cache import AdjacencyCache, CacheInfo
from fastsparse_core.graph_store import BatchEdges
from fastsparse_core.locks import ForkSafeLock
from fastsparse_core.log import warn_once
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import (
    GraphLike,
    adjacency_from_graph,
    adjacency_from_index,
    check_graph,
    inv_degree_with_self,
    other_device,
)

_cache = AdjacencyCache("fastsparse_dgl")

#: The attribute is private, but no other object in DGL is replaced exactly when the structure changes. If a
#: version of DGL does not have this attribute, nothing is cached.
_HANDLE = "_graph"

#: Handle of a graph -> number of an edge type -> handle of the slice of that edge type.
_relations: Any = WeakIdKeyDictionary()
_relations_lock = ForkSafeLock()
#: Handle of a batch -> the batch's edges, with the structure that the loader knows.
_of_batches: Any = WeakIdKeyDictionary()


def relation(graph: GraphLike, etype: Any) -> GraphLike:
    """Returns ``graph[etype]`` with the same handle every time, so that its structure is in the cache.

    Args:
        graph: DGLGraph.
        etype: one edge type.
    """
    part = graph[etype]
    if _keeps_structure(graph):
        return part
    handle = getattr(graph, _HANDLE, None)
    if handle is not None:
        number = graph.get_etype_id(etype)
        setattr(part, _HANDLE, first_relation(handle, number, lambda: getattr(part, _HANDLE)))
    return part


def first_relation(handle: Any, number: int, make: Callable[[], Any]) -> Any:
    """Returns the handle that was made first for an edge type of a graph. Makes a handle if there is none.

    Args:
        handle: handle of the whole graph.
        number: number of the edge type.
        make: function that makes a handle if there is none yet.
    """
    with _relations_lock:
        kept = _relations.get(handle, {}).get(number)
        if kept is None:
            kept = make()
            if kept is not handle:  # an entry that references its own key would never be freed
                _relations.setdefault(handle, {})[number] = kept
        return kept


def adjacency_of_index(index: Any, device: torch.device) -> Adjacency:
    """Does the same as :func:`adjacency_of` for a ``HeteroGraphIndex`` with one edge type."""
    return _cache.lookup(
        index, None, device, lambda: _known(index, device) or adjacency_from_index(index, device)
    )


def adjacency_of(graph: GraphLike, device: torch.device) -> Adjacency:
    """Returns the Adjacency of a graph on a device, which is cached until the graph changes or is freed.

    Args:
        graph: DGLGraph, SampledBlock, or Adjacency (which is returned as it is).
        device: device of the features, with an index for CUDA. A graph on another device is copied once.

    Raises:
        DGLError: ``graph`` is of another type, is an Adjacency on another device, or has several edge types;
            or ``device`` is neither a CPU nor a CUDA device.
    """
    if isinstance(graph, Adjacency):
        if graph.device != device:
            raise other_device(device, graph.device)
        return graph
    if getattr(type(graph), "keeps_structure", False):  # `_keeps_structure`, inlined to save the call
        return adjacency_of(graph.adjacency, device)
    handle = getattr(graph, _HANDLE, None)
    if handle is None:
        check_graph(graph)
        warn_once(
            f"graphs are converted in every forward pass, which is slow: DGL {dgl.__version__} has no "
            "`DGLGraph._graph`, the cache's key. Install DGL 2.1.0, or pass `fastsparse_dgl.prepare(graph)`"
        )
        return adjacency_from_graph(graph, device)
    host = getattr(handle, "host", handle)  # `_on_host`, inlined too
    return _cache.lookup(host, None, device, lambda: _build(graph, device))


def _keeps_structure(graph: GraphLike) -> bool:
    """True if the graph is a :class:`fastsparse_dgl.SampledBlock`, which stores its own structure."""
    return getattr(type(graph), "keeps_structure", False)


def _on_host(handle: Any) -> Any:
    """Returns DGL's handle on the CPU, with which graphs that `enable()` moved to a GPU share structures."""
    return getattr(handle, "host", handle)


def _build(graph: GraphLike, device: torch.device) -> Adjacency:
    check_graph(graph)
    return _known(_on_host(getattr(graph, _HANDLE)), device) or adjacency_from_graph(graph, device)


def _known(handle: Any, device: torch.device) -> Adjacency | None:
    """Returns the structure of a :class:`fastsparse_dgl.GraphDataLoader`'s batch; None for other graphs."""
    edges = _of_batches.get(handle) if len(_of_batches) else None
    if edges is None or edges.device != device or not edges.has_structure:
        return None
    found: Adjacency = edges.adjacency
    return found


def remember_edges(graph: GraphLike, edges: BatchEdges) -> None:
    """Stores a loader's edges of a batch (with their structure) as long as the graph has this structure."""
    handle = getattr(graph, _HANDLE, None)
    if handle is not None:
        _of_batches[_on_host(handle)] = edges


def remember(graph: GraphLike, device: torch.device, adjacency: Adjacency) -> None:
    """Caches a structure that was built together with a graph, so that :func:`adjacency_of` finds it."""
    handle = getattr(graph, _HANDLE, None)
    if handle is not None:
        _cache.lookup(_on_host(handle), None, device, lambda: adjacency)


def prepare(
    graph: GraphLike,
    device: torch.device | str | int | None = None,
    *,
    etype: Any = None,
    backward: bool = True,
) -> Adjacency:
    """Converts a graph now, and builds what layers would build in their first forward and backward pass.

    The layers find the result in the cache, so you may ignore the returned Adjacency. You can also pass it in
    place of the graph to every layer except ``FastHeteroGraphConv``. Under ``torch.compile``, pass it,
    because a DGLGraph causes graph breaks.

    Args:
        graph: DGLGraph (homogeneous, block, bipartite or batched), or an Adjacency.
        device: device of the features; None: the graph's device.
        etype: edge type, for a graph with several. :class:`fastsparse_dgl.FastHeteroGraphConv` finds the
            result in the cache; pass the Adjacency to other layers.
        backward: whether to also build the transposed structure, which training needs.

    Returns:
        The structure, rows = destinations, with edge values in the order of DGL's edge ids.

    Raises:
        DGLError: ``graph`` is not a graph, or it has several edge types and ``etype`` is not given.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import prepare
        >>> prepare(dgl.graph(([0, 1, 2], [1, 2, 0]))).shape
        (3, 3)
    """
    if isinstance(graph, Adjacency):
        adjacency = graph if device is None else graph.to(_with_index(device))
    else:
        check_graph(graph)
        target = graph.device if device is None else _with_index(device)
        number = graph.get_etype_id(etype)
        if len(graph.canonical_etypes) > 1:
            graph = relation(graph, graph.canonical_etypes[number])
        adjacency = adjacency_of(graph, target)
    adjacency.has_empty_rows()
    adjacency.inv_out_degree()
    inv_degree_with_self(adjacency)
    return adjacency.prepare(backward=backward)


def _with_index(device: torch.device | str | int) -> torch.device:
    """Returns the device as tensors report it: ``cuda`` becomes the current device, such as ``cuda:0``."""
    return torch.empty(0, device=device).device


def cache_info() -> CacheInfo:
    """Returns hits, misses, stale entries, entries and bytes of the cache of converted graphs.

    Returns:
        The counters since the last :func:`clear_cache`.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import cache_info, clear_cache, prepare
        >>> clear_cache()
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> adj = prepare(graph)
        >>> cache_info().entries
        1
    """
    return _cache.info()


def clear_cache() -> None:
    """Frees every cached structure and resets the counters; layers rebuild what they need.

    Example:
        >>> from fastsparse_dgl import cache_info, clear_cache
        >>> clear_cache()
        >>> cache_info().entries
        0
    """
    _cache.clear()
