"""Lets captured steps take PyG's graphs and batches as arguments, and removes padding from PyG's readouts."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Hashable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.utils import scatter, to_dense_batch

from fastsparse_core import recorded
from fastsparse_core.capturing import forms
from fastsparse_core.capturing.arguments import Argument, Held, mark_of, register, tensor_key
from fastsparse_core.capturing.padding import MOST_HOPS, BatchPlaces, Capacity, Sizes
from fastsparse_core.capturing.refused import cures
from fastsparse_pyg.caching import known_edges

_glob: Any = importlib.import_module("torch_geometric.nn.pool.glob")

#: PyG's `to_dense_batch`, and a copy of this function. While a step is recorded, the code object of PyG's
#: function is replaced. Replacing its name in every module that imported it would take 10 ms.
_dense_function: Any = inspect.unwrap(to_dense_batch)
_dense_of_pyg: Any = FunctionType(
    _dense_function.__code__, _dense_function.__globals__, argdefs=_dense_function.__defaults__
)
#: The function that runs when `to_dense_batch` is called while its code object is replaced.
_dense_now: Any = _dense_of_pyg

#: Attributes that differ between batches, so they are not part of a captured step's key. If hops are padded,
#: the numbers of nodes and edges per hop are set to the capacities.
_OF_ONE_BATCH = ("num_nodes", "num_sampled_nodes", "num_sampled_edges")
#: Names of node indices that padding supports. `edge_label_index` refers to seeds, whose positions do not
#: change under padding.
_INDICES = ("edge_index", "edge_label_index")


#: Types of attributes that cannot be edited in place.
_IMMUTABLE = (int, float, str, type(None))


class _DataArgument(Argument):
    """A whole graph, whose tensors have the same sizes in every call."""

    def __init__(self, data: Any) -> None:
        tensors = _tensors(data)
        self.names = tuple(tensors)
        key = tuple((name, *tensor_key(item)) for name, item in tensors.items())
        super().__init__(data, (type(data), _others(data), *key), list(tensors.values()))
        # Edits of other objects, such as lists, cannot be detected. Then the graph never counts as unchanged.
        stores = [dict(store._mapping) for store in data.stores]
        values = [item for store in stores for item in store.values()]
        self._stores = stores if all(isinstance(item, (Tensor, *_IMMUTABLE)) for item in values) else None
        self._marks = [mark_of(item) for item in self.tensors]

    def is_as_given(self) -> bool:
        stores = self._stores
        if stores is None or [mark_of(item) for item in self.tensors] != self._marks:
            return False
        found = [store._mapping for store in self.value.stores]
        return len(found) == len(stores) and all(map(_are_same, found, stores))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        return _with(self.value, dict(zip(self.names, tensors, strict=True)))


class _BatchArgument(Argument):
    """A batch of graphs, or of sampled neighbours; its numbers of nodes and edges may vary.

    Attributes:
        items: the batch's tensors, by (position of their store, name).
        kinds: for every tensor, the kind of its rows ("node", "edge", "index" or "other"), and the position
            of their node or edge type.
        is_sorted: for every edge type, True if the edges are known to be sorted by destination.
    """

    sizes: Sizes

    def __init__(self, data: Any) -> None:
        self.items = _tensors(data)
        node_stores, edge_stores = _typed(data)
        stores = data.stores
        places = {
            id(store): nth for of_type in (node_stores, edge_stores) for nth, store in enumerate(of_type)
        }
        self.kinds = {
            (at, name): (_kind(stores[at], name, item), places.get(id(stores[at]), 0))
            for (at, name), item in self.items.items()
        }
        self.sizes = _sizes(data)
        known = [known_edges(store.edge_index) for store in edge_stores]
        self.is_sorted = [edges is not None and edges.is_sorted for edges in known]
        self.num_graphs = node_stores[0].ptr.numel() - 1 if "ptr" in node_stores[0] else 0
        hops = len(self.sizes.edges[0])
        key: list[Any] = [type(data), self.num_graphs, hops, tuple(self.is_sorted)]
        key.append(_others(data, self.num_graphs))
        for name, item in self.items.items():
            kind = self.kinds[name]
            shape = {"other": item.shape, "index": ()}.get(kind[0], item.shape[1:])
            key.append((name, kind, shape, item.dtype, item.device, item.requires_grad))
        super().__init__(data, tuple(key), list(self.items.values()))

    def hold(self, capacity: Capacity | None) -> Held:
        assert capacity is not None
        return _HeldBatch(self, capacity)


class _HeldBatch(Held):
    """Memory for a padded batch. The nodes of the padding form one additional graph."""

    def __init__(self, like: _BatchArgument, capacity: Capacity) -> None:
        self._capacity, self._kinds = capacity, like.kinds
        self.num_graphs = like.num_graphs
        self.items = {name: self._memory(name, item) for name, item in like.items.items()}
        self.tensors = list(self.items.values())
        self.value = _with(like.value, self.items)
        for store in self.value.stores:
            for name, item in list(store.items()):
                if _is_of_one_batch(name, item, like.num_graphs):
                    del store[name]
        if isinstance(self.value, Batch):
            self.value._slice_dict = self.value._inc_dict = None  # a padded batch cannot be split into graphs
        self._places = places = BatchPlaces(capacity, self.tensors[0].device)
        self.rows = places.rows
        self.greatest, self.sorted = {}, set()
        node_stores, edge_stores = _typed(self.value)
        for nth, (store, nodes) in enumerate(zip(node_stores, places.nodes, strict=True)):
            store.num_nodes = nodes.starts[-1]
            if len(nodes.rows) > 1:  # PyG's `trim_to_layer` reads these numbers
                store.num_sampled_nodes = list(capacity.nodes[nth])
        for nth, store in enumerate(edge_stores):
            self._know_edges(store.edge_index, nth, like.is_sorted[nth])
            if len(capacity.nodes[0]) > 1:
                store.num_sampled_edges = list(capacity.edges[nth])
        #: (`batch` vector, positions of the nodes) for every node type that has a `batch` vector.
        self.batches = [
            (item, places.nodes[self._kinds[at, name][1]])
            for (at, name), item in self.items.items()
            if name == "batch"
        ]
        self._starts = self.items.get((0, "ptr"))
        for batch, _ in self.batches:
            self.greatest[batch.untyped_storage().data_ptr(), -1, -1] = self.num_graphs

    @property
    def knows_largest(self) -> bool:
        """True if the size of the largest graph and the first node of every graph are known."""
        return self._capacity.largest > 0 and self._starts is not None

    def dense(self, x: Tensor, fill_value: Any) -> tuple[Tensor, Tensor]:
        """PyG's ``to_dense_batch`` of the batch's nodes; the capacity is the number of entries per graph.

        Rows of padding are written to one entry behind all graphs, which is cut off.
        """
        self.needs_largest = True
        (batch, _), width, starts = self.batches[0], self._capacity.largest, self._starts
        assert starts is not None
        count = self.num_graphs * width
        entry = torch.arange(x.size(0), device=x.device) - starts[batch] + batch * width
        entry = entry.masked_fill(batch == self.num_graphs, count)
        out = x.new_full((count + 1, *x.shape[1:]), fill_value).index_copy(0, entry, x)
        is_node = torch.zeros(count + 1, dtype=torch.bool, device=x.device).index_fill_(0, entry, True)
        mask = is_node[:count].view(self.num_graphs, width)
        run = recorded.current()
        assert run is not None
        run.masks.append((mask, entry.clamp(max=count - 1)))
        return out[:count].view(self.num_graphs, width, *x.shape[1:]), mask

    def _know_edges(self, edge_index: Tensor, nth: int, is_sorted: bool) -> None:
        """Stores the largest node id of the edges of a type: of all edges, and of those of the first hops."""
        address, behind = edge_index.untyped_storage().data_ptr(), edge_index.size(1)
        source, target = (self._places.nodes[kind].starts for kind in self._capacity.ends[nth])
        self.greatest[address, -1, -1] = max(source[-1], target[-1]) - 1
        for hop, rows in enumerate(self._places.edges[nth].rows):
            self.greatest[address, 0, rows.capacity] = source[min(hop + 2, len(source) - 1)] - 1
            self.greatest[address, behind, rows.capacity] = target[hop + 1] - 1
        if is_sorted:
            self.sorted.add((address, behind))

    def _memory(self, name: tuple[int, str], like: Tensor) -> Tensor:
        (kind, nth), shape = self._kinds[name], list(like.shape)
        if kind == "index":
            shape[1] = sum(self._capacity.edges[nth])
        elif kind in ("node", "edge"):
            shape[0] = sum((self._capacity.nodes if kind == "node" else self._capacity.edges)[nth])
        elif name[1] == "ptr":
            shape[0] += 1
        return like.new_zeros(shape)

    def write(self, argument: Argument) -> None:
        assert isinstance(argument, _BatchArgument)
        places, rows = self._places, []
        edges: dict[int, tuple[Tensor, Tensor]] = {}
        for name, item in argument.items.items():
            held, (kind, nth) = self.items[name], self._kinds[name]
            if kind == "index":
                edges[nth] = (held, item)
            elif name[1] == "ptr":
                held[:-1].copy_(item)
                held[-1].fill_(places.nodes[nth].starts[-1])  # an assignment would wait for the GPU
            elif kind == "other":
                held.copy_(item)
            else:
                rows.append((held, item, (places.nodes if kind == "node" else places.edges)[nth]))
        places.write(argument.sizes, [edges[nth] for nth in range(len(edges))], rows)
        for batch, nodes in self.batches:
            batch.masked_fill_(nodes.mask.logical_not(), self.num_graphs)


def _are_same(found: dict[str, Any], given: dict[str, Any]) -> bool:
    """True if two dictionaries hold the same objects."""
    if found.keys() != given.keys():
        return False
    for name, item in given.items():  # noqa: SIM110 (a generator takes the host longer)
        if found[name] is not item:
            return False
    return True


def _typed(data: Any) -> tuple[list[Any], list[Any]]:
    """Returns the stores of the node types and of the edge types. `Data` has one store for both."""
    if isinstance(data, HeteroData):
        return data.node_stores, data.edge_stores
    return data.stores, data.stores


def _tensors(data: Any) -> dict[tuple[int, str], Tensor]:
    """The tensors of a graph, by (position of their store, name)."""
    return {
        (at, name): item
        for at, store in enumerate(data.stores)
        for name, item in store.items()
        if isinstance(item, Tensor)
    }


def _sizes(data: Any) -> Sizes:
    """Returns the numbers of nodes and edges, per hop if the batch's `num_sampled_*` are up to date."""
    node_stores, edge_stores = _typed(data)
    ends: tuple[tuple[int, int], ...] = ((0, 0),)
    if isinstance(data, HeteroData):
        types = data.node_types
        ends = tuple((types.index(source), types.index(target)) for source, _, target in data.edge_types)
    counts = [int(store.num_nodes or 0) for store in node_stores]
    edge_counts = [store.edge_index.size(1) for store in edge_stores]
    starts = _starts_of_graphs(data)
    all_of_it = Sizes(tuple((n,) for n in counts), tuple((n,) for n in edge_counts), ends, starts)
    if any("index" in name and name not in _INDICES for store in data.stores for name in store):
        return all_of_it
    nodes = _hops(node_stores, "num_sampled_nodes", counts)
    edges = _hops(edge_stores, "num_sampled_edges", edge_counts)
    if nodes is None or edges is None or len(nodes[0]) != len(edges[0]) + 1 or not edges[0]:
        return all_of_it
    return Sizes(nodes, edges, ends) if len(nodes[0]) <= MOST_HOPS else all_of_it


def _starts_of_graphs(data: Any) -> Tensor | None:
    """Returns the first node of every graph of a batch; None if the loader stored no slices on the CPU."""
    slices = None if isinstance(data, HeteroData) else getattr(data, "_slice_dict", None)
    if not slices:
        return None
    starts = slices.get("x")
    return starts if isinstance(starts, Tensor) and starts.device.type == "cpu" else None


def _hops(stores: list[Any], name: str, counts: list[int]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the numbers of nodes or edges per hop for every type; None if missing or out of date."""
    hops = [store.get(name) for store in stores]
    if not all(isinstance(item, (list, tuple)) for item in hops):
        return None
    found = tuple(tuple(map(int, item)) for item in hops)
    is_true = [sum(item) for item in found] == counts and len({len(item) for item in found}) == 1
    return found if is_true else None


def _is_of_one_batch(name: str, item: Any, num_graphs: int) -> bool:
    """True if an attribute's value differs between batches, such as a list with one name per graph."""
    is_list = isinstance(item, list) and len(item) == num_graphs > 0
    return name in _OF_ONE_BATCH or (is_list and not any(isinstance(part, Tensor) for part in item))


def _others(data: Any, num_graphs: int = 0) -> Hashable:
    """Returns a key of the attributes that are not tensors; objects other than simple values by `repr`."""
    return tuple(
        (store._key, name, item if isinstance(item, (int, float, str)) else repr(item))
        for store in data.stores
        for name, item in [("type", store._key), *store.items()]
        if not isinstance(item, Tensor) and not _is_of_one_batch(name, item, num_graphs)
    )


def _with(data: Any, items: dict[tuple[int, str], Tensor]) -> Any:
    data = copy.copy(data)
    stores = data.stores
    for (at, name), item in items.items():
        stores[at][name] = item
    return data


def _argument_of(data: Any) -> Argument:
    node_stores, edge_stores = _typed(data)
    is_batch = isinstance(data, Batch) and all("batch" in store and "ptr" in store for store in node_stores)
    names = {name for store in data.stores for name in store}
    is_sampled = "n_id" in names and not names.isdisjoint(("batch_size", "input_id"))
    edges = [store.get("edge_index") for store in edge_stores]
    if not edges or not all(type(item) is Tensor and item.dim() == 2 for item in edges):
        return _DataArgument(data)
    return _BatchArgument(data) if is_batch or is_sampled else _DataArgument(data)


def _kind(store: Any, name: str, item: Tensor) -> str:
    if name == "edge_index":
        return "index"
    if name in ("ptr", "input_id", "seed_time") or item.dim() == 0:
        return "other"
    if isinstance(store, NodeStorage) and (
        name in ("batch", "n_id", "x", "pos")
        or (store.is_node_attr(name) and item.size(0) == store.num_nodes)
    ):
        return "node"
    if isinstance(store, EdgeStorage) and (
        name == "e_id" or (store.is_edge_attr(name) and item.size(0) == store.num_edges)
    ):
        return "edge"
    return "other"


@contextlib.contextmanager
def _readouts(held: list[Held]) -> Iterator[None]:
    """Within this context, readouts return only the graphs of the batch, without the graph of the padding."""
    global _dense_now
    known = {
        id(batch): item for item in held if isinstance(item, _HeldBatch) for batch, _ in item.batches
    }  # the ids stay valid, because the recorded step references these tensors
    if not known:
        yield
        return

    def batch_of(index: Any) -> _HeldBatch | None:
        return known.get(id(index))

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
        outs = out if isinstance(out, list) else [out]  # a list if several reductions are computed at once
        outs = [
            item.narrow(dim, 0, found.num_graphs) if item.size(dim) == found.num_graphs + 1 else item
            for item in outs
        ]
        return outs if isinstance(out, list) else outs[0]  # type: ignore[return-value]

    def dense(
        x: Tensor,
        batch: Tensor | None = None,
        fill_value: Any = 0.0,
        max_num_nodes: int | None = None,
        batch_size: int | None = None,
    ) -> Any:
        found = batch_of(batch)
        if (
            found is None
            or max_num_nodes is not None
            or batch_size not in (None, found.num_graphs)
            or not found.knows_largest
        ):
            return _dense_of_pyg(x, batch, fill_value, max_num_nodes, batch_size)
        return found.dense(x, fill_value)

    module: Any = _glob
    before = module.scatter, called, _dense_now, _dense_function.__code__
    module.scatter, Aggregation.__call__, _dense_now = pool, aggregate, dense
    _dense_function.__code__ = _call_dense_now.__code__
    try:
        yield
    finally:
        module.scatter, Aggregation.__call__, _dense_now, _dense_function.__code__ = before


def _call_dense_now(
    x: Any, batch: Any = None, fill_value: Any = 0.0, max_num_nodes: Any = None, batch_size: Any = None
) -> Any:
    """Replaces the code of `to_dense_batch`. It runs with the globals of PyG's module, hence the import."""
    import sys

    dense_now: Any = sys.modules["fastsparse_pyg.captured_batches"]._dense_now
    return dense_now(x, batch, fill_value, max_num_nodes, batch_size)


#: PyG function whose result has a size that depends on data -> advice to the user.
cures |= {
    **dict.fromkeys(
        ("negative_sampling", "batched_negative_sampling", "structured_negative_sampling"),
        "Draw with fastsparse_core.sampling.negative_edges(adj, count), which needs no size from the GPU",
    ),
    **dict.fromkeys(
        ("dropout_edge", "dropout_node", "dropout_path", "dropout_adj"),
        "To drop edges with probability p, pass edge_weight=(torch.rand(num_edges, device=...) >= p).float() "
        "to the layers instead",
    ),
    **dict.fromkeys(("to_dense_batch", "to_dense_adj"), "Pass batch_size and max_num_nodes to it"),
}
register(Data, _argument_of)
register(HeteroData, _argument_of)
forms.surroundings.append(_readouts)
