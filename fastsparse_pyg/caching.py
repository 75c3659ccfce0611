"""Structures remembered per graph tensor, so that a training loop converts each graph once.

The key is the tensor that the user holds (`edge_index`, a sparse matrix, an `EdgeIndex`), weakly and by
identity: an entry dies with it. The stamp is all that can be seen of its content without reading it: version
counter, address, shape, dtype, device. Every in-place write through PyTorch, views included, raises the
version. What PyTorch itself does not see stays unseen here too: writes through `.data`, `.numpy()` or DLPack;
call :func:`clear_cache` after those.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric import EdgeIndex

from fastsparse_core import Adjacency, recorded, traced
from fastsparse_core.cache import AdjacencyCache, CacheInfo, Sightings
from fastsparse_core.graph_store import BatchEdges
from fastsparse_core.log import warn_once
from fastsparse_core.sampling import Edges

#: Number of edge lists of one size that count as the user's own graphs; further ones are compared with them.
_MANY = 2
_MOST_STRANGERS = 16
#: How often a new edge list may be used before the next one: about the number of layers of a model.
SIGHTS = 3

#: The part of a plain tensor's stamp that is read at once, its device last.
stamp_attributes = attrgetter("_version", "shape", "dtype", "device")

logger = logging.getLogger("fastsparse_pyg")

layer_cache = AdjacencyCache("fastsparse_pyg")
_of_batches: Any = WeakIdKeyDictionary()  # edge_index of a loader's batch -> (its stamp, the loader's edges)
#: Number of unknown edge lists of one size, and the last of them if there were many.
_strangers: OrderedDict[Hashable, tuple[int, Tensor | None, Adjacency | None]] = OrderedDict()
_met = Sightings()  # uses of new edge lists by layers
_unit_values: Any = WeakIdKeyDictionary()  # sparse matrix -> (stamp of its values, whether all of them are 1)


def lookup(
    key: object, parts: tuple[Tensor, ...], options: Hashable, build: Callable[[], Adjacency]
) -> Adjacency:
    """The cached structure of a graph object, built on a miss.

    Args:
        key: the object that the user holds; must be weakly referenceable. The result must not keep it alive.
        parts: tensors whose content decides the structure; a change in any of them rebuilds it.
        options: what else decides the structure.
        build: makes it.
    """
    try:
        stamp = tuple([stamp_of(part) for part in parts])
    except (
        RuntimeError
    ):  # inference tensors have no version counter, so an in-place edit could not be noticed
        warn_once(
            "the graph is converted in every forward pass, which is slow: it was made in inference mode, "
            "where PyTorch does not count edits. Make it outside of torch.inference_mode(), or pass "
            "`fastsparse_pyg.prepare(edge_index)`"
        )
        return _build_outside_inference_mode(build)
    if torch.is_inference_mode_enabled():
        build = functools.partial(_build_outside_inference_mode, build)
    return layer_cache.lookup(key, stamp, options, build)


def recognise(edges: Tensor, options: Hashable, build: Callable[[], Adjacency]) -> Adjacency:
    """The structure of the last edge list with the same size and content, if there were several of that size.

    Args:
        edges: an edge list that no entry of the cache is of.
        options: what else decides the structure.
        build: makes it.
    """
    run = recorded.current()
    if run is not None:
        return run.structure(edges, options, build)
    key = (edges.shape, edges.dtype, edges.device, options)
    count, known, adjacency = _strangers.pop(key, (0, None, None))
    if known is None or adjacency is None or not torch.equal(known, edges):
        adjacency = build()
        # Two that live long are the user's own; a third one is a copy that a layer makes.
        known = edges.clone() if count >= _MANY else None
    _strangers[key] = (count + 1, known, adjacency if known is not None else None)
    while len(_strangers) > _MOST_STRANGERS:
        _strangers.popitem(last=False)
    return adjacency


def is_new(edges: Tensor) -> bool:
    """Whether an edge list came at most `SIGHTS` times with this one, and no structure of it exists."""
    if _met.of(edges):
        return _met.count(edges) <= SIGHTS
    if layer_cache.holds(edges) or (len(_of_batches) and edges in _of_batches):
        return False
    _met.count(edges)
    return True


def stamp_of(tensor: Tensor) -> Hashable:
    """What can be seen of a tensor's content without reading it.

    Raises:
        RuntimeError: for inference tensors, which do not count their versions.
    """
    if isinstance(tensor, EdgeIndex):  # a wrapper: it has a version of its own, and no address
        return tensor._version, stamp_of(tensor._data)
    return tensor.data_ptr(), tensor.stride(), stamp_attributes(tensor)


def remember_sampled(edges: Edges) -> Tensor:
    """The `edge_index` of a sampled batch. Layers build its structure without sorting or checking.

    Returns:
        A new tensor, which must be the one that the layers get: what is remembered goes with it.
    """
    edge_index = edges.edge_index.view(2, -1)  # the entry belongs to the other one
    remember_edges(edge_index, edges)
    return edge_index


def remember_edges(edge_index: Tensor, edges: Edges | BatchEdges) -> None:
    """Keeps what a loader knows of a batch's edges, as long as its `edge_index` lives.

    Args:
        edge_index: of the batch.
        edges: must not hold `edge_index`.
    """
    _of_batches[edge_index] = (stamp_of(edge_index), edges)


def known_edges(edge_index: Tensor) -> Edges | BatchEdges | None:
    """What a loader knows of a batch's edges, unless `edge_index` is another tensor or was written to."""
    entry = _of_batches.get(edge_index) if len(_of_batches) else None
    return entry[1] if entry is not None and entry[0] == stamp_of(edge_index) else None


def has_unit_values(matrix: Tensor, values: Tensor) -> bool:
    """Whether all values of a sparse matrix are 1; read from the device once per state of the values."""
    try:
        stamp = stamp_of(values)
    except RuntimeError:
        return False
    entry = _unit_values.get(matrix)
    if entry is not None and entry[0] == stamp:
        return entry[1]
    are_ones = bool((values == 1).all())
    _unit_values[matrix] = (stamp, are_ones)
    return are_ones


def _build_outside_inference_mode(build: Callable[[], Adjacency]) -> Adjacency:
    if not torch.is_inference_mode_enabled():
        return build()
    # A structure that is first built during evaluation under inference_mode must support training later.
    with torch.inference_mode(False):
        return build()


def cache_info() -> CacheInfo:
    """Returns hits, misses, stale entries, entries and bytes of the cache of converted graphs.

    Returns:
        The counters since the last :func:`clear_cache`.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGCNConv, cache_info, clear_cache
        >>> clear_cache()
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> y = FastGCNConv(8, 4)(x, edge_index)
        >>> cache_info().entries
        1
    """
    return layer_cache.info()


def clear_cache() -> None:
    """Frees every cached structure and resets the counters; layers rebuild what they need.

    Example:
        >>> from fastsparse_pyg import cache_info, clear_cache
        >>> clear_cache()
        >>> cache_info().entries
        0
    """
    layer_cache.clear()
    traced.clear()
    _strangers.clear()
    _met.clear()
    _unit_values.clear()
