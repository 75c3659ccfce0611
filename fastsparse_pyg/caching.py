"""A cache of structures per graph tensor, so that a training loop converts each graph once.

The key is the tensor that the user holds (`edge_index`, a sparse matrix, an `EdgeIndex`). It is compared by
identity and referenced weakly, so an entry is freed with its tensor. Each entry has a stamp, which shows
changes of the tensor without reading its content: version counter, address, strides, shape, dtype and device.
Every in-place write through PyTorch, also through a view, raises the version counter. Writes that bypass the
counter (`.data`, `.numpy()`, DLPack) are not detected: call :func:`clear_cache` after them.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric import EdgeIndex

from fastsparse_core import Adjacency, recorded, traced
from fastsparse_core.cache import AdjacencyCache, CacheInfo, Sightings
from fastsparse_core.graph_store import BatchEdges
from fastsparse_core.log import warn_once
from fastsparse_core.sampling import Edges

P = ParamSpec("P")
T = TypeVar("T")

#: The first `_MANY` edge lists of a size that are not in the cache are taken for the user's own graphs. After
#: them, a copy of the last edge list is stored, and every new edge list is compared with this copy.
_MANY = 2
_MOST_STRANGERS = 16
#: An edge list counts as new during its first `SIGHTS` uses, because a model with 3 layers uses it 3 times.
SIGHTS = 3

#: Reads these four items of a plain tensor's stamp in one call; the device is the last item.
stamp_attributes = attrgetter("_version", "shape", "dtype", "device")

logger = logging.getLogger("fastsparse_pyg")

layer_cache = AdjacencyCache("fastsparse_pyg")
_of_batches: Any = WeakIdKeyDictionary()  # edge_index of a loader's batch -> (its stamp, the loader's edges)
#: (Shape and options) -> (number of edge lists that were not in the cache, a copy of the last of these edge
#: lists, its structure). The last two are None for the first `_MANY` edge lists.
_strangers: OrderedDict[Hashable, tuple[int, Tensor | None, Adjacency | None]] = OrderedDict()
_met = Sightings()  # uses of new edge lists by layers
_unit_values: Any = WeakIdKeyDictionary()  # sparse matrix -> (stamp of its values, True if all values are 1)


def lookup(
    key: object, parts: tuple[Tensor, ...], options: Hashable, build: Callable[[], Adjacency]
) -> Adjacency:
    """Returns the cached structure of a graph object. Builds the structure if it is not in the cache.

    Args:
        key: the object that the user holds; must be weakly referenceable. The result must not keep it alive.
        parts: tensors whose content decides the structure. If any of them changed, the structure is rebuilt.
        options: everything else that the structure depends on.
        build: function that makes the structure.
    """
    try:
        stamp = tuple(map(stamp_of, parts))
    except RuntimeError:  # inference tensors have no version counter, so in-place edits cannot be detected
        warn_once(
            "edge_index is converted in every forward pass, which is slow: it was created in inference mode, "
            "where PyTorch does not track edits. Use torch.no_grad() instead of torch.inference_mode(), or "
            "create edge_index before entering inference mode"
        )
        return layer_cache.count_miss(outside_inference_mode(build))
    if torch.is_inference_mode_enabled():
        # A structure that is first built during evaluation under inference_mode must support training later.
        build = outside_inference_mode(build)
    return layer_cache.lookup(key, stamp, options, build)


def recognise(edges: Tensor, options: Hashable, build: Callable[[], Adjacency]) -> Adjacency:
    """Returns the structure of an edge list, for layers that make a new edge list in every call.

    From the fourth edge list of a shape on, the structure of the previous one is reused if both have the same
    content.

    Args:
        edges: an edge list that is not in the cache.
        options: everything else that the structure depends on.
        build: function that makes the structure.
    """
    run = recorded.current()
    if run is not None:
        return run.structure(edges, options, build)
    key = (edges.shape, edges.dtype, edges.device, options)
    count, known, adjacency = _strangers.pop(key, (0, None, None))
    if known is None or adjacency is None or not torch.equal(known, edges):
        adjacency = build()
        # The first two edge lists of a size are taken for the user's own graphs. A third one is probably a
        # copy that a layer makes in every call, so it is stored and compared with the next edge list.
        known = edges.clone() if count >= _MANY else None
    _strangers[key] = (count + 1, known, adjacency if known is not None else None)
    while len(_strangers) > _MOST_STRANGERS:
        _strangers.popitem(last=False)
    return adjacency


def is_new(edges: Tensor) -> bool:
    """True if an edge list has been used at most `SIGHTS` times, this use included, and is not converted.

    The result is False if the edge list before it was used `SIGHTS` times, because the next batch's edge list
    will be used as often.
    """
    if not _met.of(edges) and (layer_cache.holds(edges) or (len(_of_batches) and edges in _of_batches)):
        return False
    return _met.count(edges) <= SIGHTS and _met.previous < SIGHTS


def stamp_of(tensor: Tensor) -> Hashable:
    """Properties of a tensor that change when its content is edited through PyTorch; reads no content.

    Raises:
        RuntimeError: for inference tensors, which have no version counter.
    """
    if isinstance(tensor, EdgeIndex):  # a wrapper: it has a version of its own, and no address
        return tensor._version, stamp_of(tensor._data)
    return tensor.data_ptr(), tensor.stride(), stamp_attributes(tensor)


def remember_sampled(edges: Edges) -> Tensor:
    """The `edge_index` of a sampled batch, whose structure layers build without sorting or checking.

    Returns:
        A new tensor. Pass this tensor to the layers: the structure is found by the tensor's identity.
    """
    edge_index = edges.edge_index.view(2, -1)  # `edges` keeps its own tensor alive, so that cannot be the key
    remember_edges(edge_index, edges)
    return edge_index


def remember_edges(edge_index: Tensor, edges: Edges | BatchEdges) -> None:
    """Stores a loader's edges of a batch (with their structure) until the batch's `edge_index` is freed.

    Args:
        edge_index: edges of the batch, (2, E).
        edges: the same edges in the loader's form. It must not reference `edge_index`, otherwise the entry is
            never freed.
    """
    _of_batches[edge_index] = (stamp_of(edge_index), edges)


def known_edges(edge_index: Tensor) -> Edges | BatchEdges | None:
    """Returns the loader's edges for an `edge_index`; None if none are stored, or it was edited since."""
    entry = _of_batches.get(edge_index) if len(_of_batches) else None
    return entry[1] if entry is not None and entry[0] == stamp_of(edge_index) else None


def has_unit_values(matrix: Tensor, values: Tensor) -> bool:
    """True if all values of a sparse matrix are 1. The values are read again only if they were edited."""
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


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that it makes tensors with a version counter even under inference mode."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called


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
