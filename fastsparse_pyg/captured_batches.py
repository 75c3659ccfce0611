"""PyG's graphs and batches as arguments of captured steps, and its readouts without padding."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.utils import scatter

from fastsparse_core.capturing import forms
from fastsparse_core.capturing.arguments import Argument, Held, register, tensor_key
from fastsparse_core.capturing.padding import MOST_HOPS, BatchPlaces, Room, Sizes
from fastsparse_pyg.caching import sampled_edges

# The package has a function of that name too.
_glob: Any = importlib.import_module("torch_geometric.nn.pool.glob")

#: Numbers of a batch that others have otherwise; those of hops are those of the room, where hops are padded.
_OF_ONE_BATCH = ("num_nodes", "num_sampled_nodes", "num_sampled_edges")
#: Indices of nodes; those of edges to predict are of seeds, which stay where they are.
_INDICES = ("edge_index", "edge_label_index")


class _DataArgument(Argument):
    """A whole graph: its tensors, with their sizes."""

    def __init__(self, data: Data, items: dict[str, Any]) -> None:
        tensors = {name: item for name, item in items.items() if isinstance(item, Tensor)}
        self.names = tuple(tensors)
        key = tuple((name, *tensor_key(item)) for name, item in tensors.items())
        super().__init__(data, (type(data), _others(items), *key), list(tensors.values()))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        return _with(self.value, dict(zip(self.names, tensors, strict=True)))


class _BatchArgument(Argument):
    """A batch of graphs, or of neighbours of seeds: any number of nodes and edges."""

    def __init__(self, data: Data, items: dict[str, Any]) -> None:
        self.items = {name: item for name, item in items.items() if isinstance(item, Tensor)}
        self.sizes = _sizes(data, items)
        counts = sum(self.sizes.nodes), sum(self.sizes.edges)
        self.kinds = kinds = {name: _kind(data, name, item, *counts) for name, item in self.items.items()}
        self.is_sorted = sampled_edges(data.edge_index) is not None
        self.num_graphs = data.ptr.numel() - 1 if "ptr" in self.items else 0
        hops = len(self.sizes.edges)
        key: list[Any] = [type(data), self.num_graphs, hops, self.is_sorted, _others(items)]
        for name, item in self.items.items():
            kind = kinds[name]
            shape = {"other": item.shape, "index": (kind,)}.get(kind, (kind, *item.shape[1:]))
            key.append((name, shape, item.dtype, item.device, item.requires_grad))
        super().__init__(data, tuple(key), list(self.items.values()))

    def hold(self, room: Room | None) -> Held:
        assert room is not None
        return _HeldBatch(self, room)


class _HeldBatch(Held):
    """Memory for a batch with padding: one graph more, of nodes that belong to no seed."""

    def __init__(self, like: _BatchArgument, room: Room) -> None:
        self._room, self._kinds = room, like.kinds
        self.num_graphs = like.num_graphs
        self.items = {name: self._memory(name, item) for name, item in like.items.items()}
        self.tensors = list(self.items.values())
        self.value = _with(like.value, self.items)
        for name in _OF_ONE_BATCH:
            if name in self.value:
                del self.value[name]
        if isinstance(self.value, Batch):
            self.value._slice_dict = self.value._inc_dict = None  # a batch is not taken apart with padding
        edge_index = self.items["edge_index"]
        self._places = BatchPlaces(room, edge_index.device)
        nodes, edges = self._places.nodes, self._places.edges
        self.value.num_nodes = nodes.starts[-1]
        self.rows = [*nodes.rows, *edges.rows]
        address = edge_index.untyped_storage().data_ptr()
        self.greatest = {(address, -1): nodes.starts[-1] - 1}
        if nodes.has_hops:  # which layers leave out: see PyG's `trim_to_layer`
            self.value.num_sampled_nodes, self.value.num_sampled_edges = list(room.nodes), list(room.edges)
            for rows, end in zip(edges.rows, nodes.starts[2:], strict=True):
                self.greatest[address, rows.room] = end - 1
        self.sorted = set()
        if like.is_sorted:
            self.sorted = {(address, edge_index.size(1))}
        self.batch = self.items.get("batch")
        if self.batch is not None:
            self.greatest[self.batch.untyped_storage().data_ptr(), -1] = self.num_graphs

    def _memory(self, name: str, like: Tensor) -> Tensor:
        kind, shape = self._kinds[name], list(like.shape)
        if kind == "index":
            shape[1] = sum(self._room.edges)
        elif kind == "node":
            shape[0] = sum(self._room.nodes)
        elif kind == "edge":
            shape[0] = sum(self._room.edges)
        elif name == "ptr":
            shape[0] += 1
        return like.new_zeros(shape)

    def write(self, argument: Argument) -> None:
        assert isinstance(argument, _BatchArgument)
        assert argument.sizes is not None
        places, rows = self._places, []
        for name, item in argument.items.items():
            held, kind = self.items[name], self._kinds[name]
            if kind == "node":
                rows.append((held, item, places.nodes))
            elif kind == "edge":
                rows.append((held, item, places.edges))
            elif name == "ptr":
                held[:-1].copy_(item)
                held[-1] = places.nodes.starts[-1]
            elif kind == "other":
                held.copy_(item)
        places.write(argument.sizes, (self.items["edge_index"], argument.items["edge_index"]), rows)
        if self.batch is not None:
            self.batch.masked_fill_(places.nodes.mask.logical_not(), self.num_graphs)


def _sizes(data: Data, items: dict[str, Any]) -> Sizes:
    """By hop, where attributes say how many there are of each, and are still true."""
    all_of_it = Sizes((int(data.num_nodes or 0),), (data.edge_index.size(1),))
    nodes, edges = items.get("num_sampled_nodes"), items.get("num_sampled_edges")
    if not isinstance(nodes, (list, tuple)) or not isinstance(edges, (list, tuple)):
        return all_of_it
    if any("index" in name and name not in _INDICES for name in items):
        return all_of_it
    by_hop = Sizes(tuple(map(int, nodes)), tuple(map(int, edges)))
    is_true = (sum(by_hop.nodes), sum(by_hop.edges)) == (all_of_it.nodes[0], all_of_it.edges[0])
    return by_hop if is_true and MOST_HOPS >= len(nodes) == len(edges) + 1 > 1 else all_of_it


def _others(items: dict[str, Any]) -> Hashable:
    """What a graph holds besides tensors, as far as it can be compared."""
    return tuple(
        (name, item if isinstance(item, (int, float, str)) else repr(item))
        for name, item in items.items()
        if name not in _OF_ONE_BATCH and not isinstance(item, Tensor)
    )


def _with(data: Data, items: dict[str, Tensor]) -> Data:
    data = copy.copy(data)
    for name, item in items.items():
        data[name] = item
    return data


def _argument_of(data: Data) -> Argument | None:
    is_batch = isinstance(data, Batch) and "batch" in data and "ptr" in data
    is_sampled = "batch_size" in data and "n_id" in data
    items = data.to_dict()
    edges = items.get("edge_index")
    if not (is_batch or is_sampled) or type(edges) is not Tensor or edges.dim() != 2:
        return _DataArgument(data, items)
    return _BatchArgument(data, items)


def _kind(data: Data, name: str, item: Tensor, num_nodes: int, num_edges: int) -> str:
    if name == "edge_index":
        return "index"
    if name in ("ptr", "input_id", "seed_time") or item.dim() == 0:
        return "other"
    if item.size(0) == num_nodes and (name in ("batch", "n_id", "x", "pos") or data.is_node_attr(name)):
        return "node"
    if item.size(0) == num_edges and (name == "e_id" or data.is_edge_attr(name)):
        return "edge"
    return "other"


@contextlib.contextmanager
def _readouts(held: list[Held]) -> Iterator[None]:
    """Readouts over the nodes of graphs give the batch's graphs alone."""
    batches = [item for item in held if isinstance(item, _HeldBatch) and item.batch is not None]
    if not batches:
        yield
        return

    def batch_of(index: Any) -> _HeldBatch | None:
        return next((item for item in batches if index is item.batch), None)

    def pool(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, **options: Any) -> Tensor:
        found = batch_of(index)
        if found is None:
            return scatter(src, index, dim=dim, dim_size=dim_size, **options)
        out = scatter(src, index, dim=dim, dim_size=found.num_graphs + 1, **options)
        return out.narrow(dim, 0, found.num_graphs)

    called = Aggregation.__call__

    def aggregate(
        self: Aggregation,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        **options: Any,
    ) -> Tensor:
        found = batch_of(index)
        if found is None:
            return called(self, x, index, ptr, dim_size, dim, **options)
        out = called(self, x, index, ptr, found.num_graphs + 1, dim, **options)
        outs = out if isinstance(out, list) else [out]  # of several reductions at once
        outs = [
            item.narrow(dim, 0, found.num_graphs) if item.size(dim) == found.num_graphs + 1 else item
            for item in outs
        ]
        return outs if isinstance(out, list) else outs[0]  # type: ignore[return-value]

    module: Any = _glob
    original = module.scatter
    module.scatter, Aggregation.__call__ = pool, aggregate
    try:
        yield
    finally:
        module.scatter, Aggregation.__call__ = original, called


register(Data, _argument_of)
forms.surroundings.append(_readouts)
