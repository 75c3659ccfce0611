"""PyG's graphs in a `GraphStore`: `Batch.from_data_list` without a loop over the graphs of a batch.

PyG's `collate` treats an attribute by its name, its type and the graph's class. These are the same for every
batch, so the decision is made once: an attribute becomes a :class:`_Collator`, which makes its value, its
slices and its increments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.collate import _batch_and_ptr, _collate
from torch_geometric.data.storage import N_KEYS, EdgeStorage, NodeStorage, recursive_apply
from torch_geometric.typing import SparseTensor, TensorFrame

from fastsparse_core.graph_store import (
    ADDS,
    BatchEdges,
    Chosen,
    Content,
    Field,
    FieldKind,
    Fields,
    GraphStore,
    NothingToStore,
    NotStored,
    StoredEdges,
    check_free_memory,
    place_tensors,
)
from fastsparse_core.log import warn_once
from fastsparse_pyg.caching import remember_edges


class _Batching:
    """A batch that is being made.

    Attributes:
        chosen: the graphs of the batch.
        tensors: the gathered tensors.
        slices: first row of every graph, int64 (num_graphs + 1,), for every pointer.
    """

    def __init__(self, chosen: Chosen, tensors: list[Tensor]) -> None:
        self.chosen, self.tensors = chosen, tensors
        self.slices = chosen.first.unbind(0)
        self._graphs: list[int] | None = None

    @property
    def graphs(self) -> list[int]:
        """Numbers of the batch's graphs in the store."""
        if self._graphs is None:
            self._graphs = self.chosen.source[0].tolist()[: self.chosen.count]
        return self._graphs


#: (value, slices, increments) of an attribute of a batch.
_Made = tuple[Any, Any, Any]


class _Collator:
    """Makes one attribute of batches."""

    def make(self, batch: _Batching) -> _Made:
        """The attribute of a batch."""
        raise NotImplementedError

    def follow(self, stored: StoredGraphs) -> _Collator:
        """The collator that makes the vectors `..._batch` and `..._ptr` of `follow_batch`."""
        raise NotImplementedError


class _Rows(_Collator):
    """A tensor whose rows are gathered."""

    def __init__(self, nth: int, rows: int, added: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
        self.nth, self._rows, self.added, self._shape = nth, rows, added, shape

    def make(self, batch: _Batching) -> _Made:
        if self.added is None:
            increments = torch.zeros(batch.chosen.count, dtype=torch.int64, device="cpu")
        elif len(self.added) == 1:
            increments = batch.slices[self.added[0]][:-1]
        else:
            increments = torch.stack([batch.slices[nth][:-1] for nth in self.added], dim=1)
        if self._shape:
            increments = increments.view(-1, *self._shape)
        return batch.tensors[self.nth], batch.slices[self._rows], increments

    def follow(self, stored: StoredGraphs) -> _Collator:
        return stored.rows_of(self._rows)


class _Membership(_Collator):
    """The graph of every row, and the first row of every graph."""

    def __init__(self, graph: int, first: int) -> None:
        self._graph, self._first = graph, first

    def make(self, batch: _Batching) -> _Made:
        return batch.tensors[self._graph], batch.tensors[self._first], None


class _Objects(_Collator):
    """Values that PyG collates to a list."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def make(self, batch: _Batching) -> _Made:
        values = self._values
        return [values[graph] for graph in batch.graphs], batch.slices[0], None

    def follow(self, stored: StoredGraphs) -> _Collator:
        return stored.rows_of(0)


class _Nested(_Collator):
    """A dictionary or list of attributes."""

    def __init__(self, collators: Mapping[Any, _Collator] | Sequence[_Collator]) -> None:
        self._collators = collators

    def make(self, batch: _Batching) -> _Made:
        if isinstance(self._collators, Mapping):
            made = {key: collator.make(batch) for key, collator in self._collators.items()}
            value, slices, increments = ({key: item[k] for key, item in made.items()} for k in range(3))
            return value, slices, increments
        listed = [collator.make(batch) for collator in self._collators]
        return tuple([item[k] for item in listed] for k in range(3))  # type: ignore[return-value]

    def follow(self, stored: StoredGraphs) -> _Collator:
        if isinstance(self._collators, Mapping):
            return _Nested({key: collator.follow(stored) for key, collator in self._collators.items()})
        return _Nested([collator.follow(stored) for collator in self._collators])


class _ByPyG(_Collator):
    """An attribute that PyG's own code collates."""

    def __init__(self, name: Any, values: Sequence[Any], graphs: Sequence[Any], at: int, device: Any) -> None:
        self._name, self._values, self._all, self._at, self._device = name, values, graphs, at, device

    def make(self, batch: _Batching) -> _Made:
        graphs = [self._all[graph] for graph in batch.graphs]
        values = [self._values[graph] for graph in batch.graphs]
        stores = [graph.stores[self._at] for graph in graphs]
        value, slices, increments = _collate(self._name, values, graphs, stores, True)
        return self._moved(value), slices, increments

    def _moved(self, value: Any) -> Any:
        return recursive_apply(value, lambda item: item.to(self._device))

    def follow(self, stored: StoredGraphs) -> _Collator:
        return _FollowedByPyG(self)


class _FollowedByPyG(_Collator):
    def __init__(self, collator: _ByPyG) -> None:
        self._collator = collator

    def make(self, batch: _Batching) -> _Made:
        graph, first = _batch_and_ptr(self._collator.make(batch)[1])
        return self._collator._moved(graph), self._collator._moved(first), None


class _Store(NamedTuple):
    """The content of one store of a batch.

    Attributes:
        key: node or edge type; None in `Data`.
        collators: (name, collator of the attribute, collator of its `follow_batch` vectors or None).
        num_nodes: if `num_nodes` is an attribute: its value for every graph, and its index in ``collators``.
        members: the collator that makes `batch` and `ptr`, or None.
        edges: the structure of `edge_index`, or None if it is not known.
    """

    key: Any
    collators: list[tuple[str, _Collator, _Collator | None]]
    num_nodes: tuple[Sequence[Any], int] | None
    members: _Collator | None
    edges: StoredEdges | None


class StoredGraphs:
    """The stored graphs of a dataset; makes the same batches as `Batch.from_data_list`.

    Args:
        graphs: sequence of Data or HeteroData, all of one class with the same attributes.
        device: device of the batches.
        follow_batch: as in PyG's loader.
        exclude_keys: as in PyG's loader.
        collated: PyG's collated storage of the same graphs, which is read instead of them: one data object,
            and the slices of its attributes.

    Raises:
        NotStored: PyG's loader has to make the batches; the message tells why.
    """

    def __init__(
        self,
        graphs: Sequence[Any],
        device: torch.device,
        follow_batch: Sequence[str] | None,
        exclude_keys: Sequence[str] | None,
        collated: tuple[Any, Mapping[Any, Any]] | None = None,
    ) -> None:
        if not len(graphs):
            raise NothingToStore("the dataset is empty")
        self._graphs, self._device = graphs, device
        self._follow, self._exclude = set(follow_batch or ()), set(exclude_keys or ())
        self.store = GraphStore(len(graphs), device)
        self._fields: list[Field] = []
        self._default_dtype = torch.get_default_dtype()
        self._content: Content | None = None
        stores = None if collated is None else self._read_collated(*collated)
        self._stores: list[_Store] = self._read_graphs() if stores is None else stores
        like = graphs[0] if stores is None or collated is None else collated[0]
        with_content = [item for item in self._fields if item.tensor is not None]
        placed = place_tensors([item.tensor for item in with_content if item.tensor is not None], device)
        for item, tensor in zip(with_content, placed, strict=True):
            item.tensor = tensor
        self._gather = Fields(self._fields, device)
        self._like = Batch(_base_cls=type(like)).stores_as(like)

    def is_current(self) -> bool:
        """True if the graphs and the default dtype have not changed since the graphs were stored."""
        return torch.get_default_dtype() == self._default_dtype and (
            self._content is None or self._content.is_as_it_was()
        )

    def batch(self, index: Sequence[int], graph_at: Tensor | None = None) -> Any:
        """A batch of the graphs at the given positions.

        Args:
            index: positions in the dataset.
            graph_at: number of the stored graph for every position, int64; None if they are equal.

        Raises:
            IndexError: there is no such position.
        """
        chosen = self.store.choose(index, graph_at)
        batching = _Batching(chosen, self._gather.of(chosen))
        out = copy.copy(self._like)
        slice_dict: dict[Any, Any] = {}
        increments: dict[Any, Any] = {}
        for store, into in zip(self._stores, out.stores, strict=True):
            slices_of_store, increments_of_store = slice_dict, increments
            if store.key is not None and store.collators:
                slices_of_store = slice_dict[store.key] = {}
                increments_of_store = increments[store.key] = {}
            self._fill(store, batching, into, slices_of_store, increments_of_store)
        private = out.stores[0].__dict__
        private["_num_graphs"] = chosen.count
        private["_slice_dict"] = slice_dict
        private["_inc_dict"] = increments
        return out

    def _fill(
        self,
        store: _Store,
        batching: _Batching,
        into: Any,
        slice_dict: dict[Any, Any],
        increments: dict[Any, Any],
    ) -> None:
        """Writes the attributes of one store of a batch."""
        mapping = into._mapping
        at_nodes = -1 if store.num_nodes is None else store.num_nodes[1]
        for nth, (name, collator, followed) in enumerate(store.collators):
            if nth == at_nodes:
                self._set_num_nodes(store, batching, into)
            mapping[name], slice_dict[name], increments[name] = collator.make(batching)
            if followed is not None:
                graph, first, _ = followed.make(batching)
                if graph is not None:
                    mapping[f"{name}_batch"], mapping[f"{name}_ptr"] = graph, first
        if at_nodes == len(store.collators):
            self._set_num_nodes(store, batching, into)
        if store.members is not None:
            mapping["batch"], mapping["ptr"], _ = store.members.make(batching)
        if store.edges is not None and not torch.is_inference_mode_enabled():
            remember_edges(mapping["edge_index"], BatchEdges(store.edges, batching.chosen))

    @staticmethod
    def _set_num_nodes(store: _Store, batching: _Batching, into: Any) -> None:
        assert store.num_nodes is not None
        counts = store.num_nodes[0]
        values = [counts[graph] for graph in batching.graphs]
        into.__dict__["_num_nodes"] = values
        into._mapping["num_nodes"] = sum(values)

    # ---------------------------------------------------------------- attributes

    def _add(self, field: Field) -> int:
        self._fields.append(field)
        return len(self._fields) - 1

    def rows_of(self, pointer: int) -> _Collator:
        """The collator that makes the graph of every row, and the first row of every graph."""
        return _Membership(
            self._add(Field(None, pointer, FieldKind.GRAPH)), self._add(Field(None, pointer, FieldKind.FIRST))
        )

    def _rows(
        self,
        tensor: Tensor,
        dim: int,
        pointer: int,
        added: tuple[int, ...] | None,
        shape: tuple[int, ...] = (),
    ) -> _Collator:
        """The collator of an attribute whose values are concatenated in one tensor.

        Args:
            tensor: the values of all graphs.
            dim: dimension along which they are concatenated.
            pointer: index, in the store, of the pointer with the first row of every graph.
            added: indices, in the store, of the pointers whose first rows are added to the values; None:
                nothing is added.
            shape: shape of the increment of one graph.
        """
        if added is None:
            return _Rows(self._add(Field(tensor.contiguous(), pointer, dim=dim)), pointer, None, shape)
        kind = ADDS.get(tensor.dtype)
        if kind is None or (shape and tensor.dtype != torch.int64):
            raise NotStored(f"FastSparse does not add its increments (`__inc__`) to dtype {tensor.dtype}")
        if len(added) == 2 and tensor.shape[:dim] != (2,):
            raise NotStored("its increments have shape (2, 1), but its tensors do not have shape (2, n)")
        both = (added[0], added[-1])
        nth = self._add(Field(tensor.contiguous(), pointer, kind, both, dim))
        return _Rows(nth, pointer, added, shape)

    def _read_graphs(self) -> list[_Store]:
        """Reads the graphs one by one, for graphs without a collated storage."""
        graphs = self._graphs = list(self._graphs)
        first = graphs[0]
        if not isinstance(first, (Data, HeteroData)) or isinstance(first, Batch):
            raise NotStored(f"its items are of type {type(first).__name__}, not Data or HeteroData")
        if len(set(map(type, graphs))) > 1:
            raise NotStored("its graphs are of several classes")
        by_graph = [graph.stores for graph in graphs]
        keys = [store._key for store in by_graph[0]]
        if isinstance(first, HeteroData) and any([item._key for item in of] != keys for of in by_graph):
            raise NotStored("its graphs have different node or edge types")
        by_store = list(zip(*by_graph, strict=True))
        for stores in by_store:
            names = list(stores[0]._mapping)
            if any(list(store._mapping) != names for store in stores):
                raise NotStored("its graphs have different attributes, or the same in a different order")
        self._content = _content([store._mapping for stores in by_store for store in stores])
        values = chain.from_iterable(store._mapping.values() for stores in by_store for store in stores)
        tensors = (item for item in values if type(item) is Tensor and item.layout is torch.strided)
        check_free_memory(sum(item.nbytes for item in tensors if not item.is_cuda))
        counts: dict[Any, int] = {}
        for stores in by_store:
            if isinstance(stores[0], NodeStorage) and stores[0].can_infer_num_nodes:
                sizes = [int(store.num_nodes or 0) for store in stores]
                counts[stores[0]._key] = self.store.add_counts(sizes)
        return [self._read_store(at, stores, counts) for at, stores in enumerate(by_store)]

    def _read_store(self, at: int, stores: Sequence[Any], counts: Mapping[Any, int]) -> _Store:
        collators: list[tuple[str, _Collator, _Collator | None]] = []
        num_nodes = None
        for name in stores[0]._mapping:
            if name in self._exclude or name == "ptr":
                continue
            values = [store._mapping[name] for store in stores]
            if name == "num_nodes":
                num_nodes = (values, len(collators))
                continue
            num_fields = len(self._fields)
            try:
                collator = _collator_of(self, name, values, stores)
            except NotStored as reason:
                del self._fields[num_fields:]
                where = name if stores[0]._key is None else f"{stores[0]._key}.{name}"
                warn_once(
                    f"fastsparse_pyg.DataLoader: PyG's own code collates {where!r}, graph by graph, because "
                    f"{reason}. Give it the same type, dtype and dimensions in all graphs, or exclude "
                    f"it with exclude_keys=[{name!r}]"
                )
                collator = _ByPyG(name, values, self._graphs, at, self._device)
            collators.append((name, collator, collator.follow(self) if name in self._follow else None))
        return self._finished(stores[0]._key, collators, num_nodes, counts)

    def _finished(
        self,
        key: Any,
        collators: list[Any],
        num_nodes: tuple[Sequence[Any], int] | None,
        counts: Mapping[Any, int],
    ) -> _Store:
        """Makes a store of its collators; adds `batch` and `ptr`, and the structure of edges for layers."""
        members = self.rows_of(counts[key]) if key in counts else None
        collator = next((collator for name, collator, _ in collators if name == "edge_index"), None)
        ends = (key[0], key[2]) if isinstance(key, tuple) else (key, key)
        edges = None
        if isinstance(collator, _Rows) and collator.added and all(end in counts for end in ends):
            field = self._fields[collator.nth]
            sources, destinations = (counts[end] for end in ends)
            if field.added == (sources, destinations) and field.before == (2,) and not field.behind:
                edges = StoredEdges(self.store, field, sources, destinations)
        return _Store(key, collators, num_nodes, members, edges)

    def _read_collated(self, data: Any, slices: Mapping[Any, Any]) -> list[_Store] | None:
        """Reads PyG's collated storage in place of the graphs; None if it lacks information."""
        if type(data) not in (Data, HeteroData):
            return None
        try:
            names = {store._key: _collated_names(store, slices) for store in data.stores}
            counts = {
                store._key: self.store.add_counts(sizes)
                for store in data.node_stores
                if (sizes := _collated_sizes(store, slices, names[store._key])) is not None
            }
            stores = [self._read_collated_store(data, store, slices, names, counts) for store in data.stores]
        except NotStored:
            self.store, self._fields = GraphStore(len(self._graphs), self._device), []
            return None
        self._content = _content([store._mapping for store in data.stores])
        return stores

    def _read_collated_store(
        self, data: Any, store: Any, slices: Mapping[Any, Any], names: Mapping[Any, list[str]], counts: Any
    ) -> _Store:
        key = store._key
        of_store = slices if key is None else slices.get(key, {})
        collators: list[tuple[str, _Collator, _Collator | None]] = []
        num_nodes = None
        for name in names[key]:
            if name in self._exclude or name == "ptr":
                continue
            if name == "num_nodes":
                num_nodes = (store.__dict__["_num_nodes"], len(collators))
                continue
            value, pointer = store._mapping[name], of_store[name]
            if pointer.numel() != len(self._graphs) + 1:
                raise NotStored("its slices are for another number of graphs")
            collator: _Collator
            if type(value) is list and all(_is_object(item) for item in value):
                if not pointer.tolist() == list(range(len(value) + 1)):
                    raise NotStored("it is a list whose slices do not have one item per graph")
                collator = _Objects(value)
            elif _is_plain(value):
                dim = data.__cat_dim__(name, value, store) % value.dim()
                if bool((pointer.diff() < 0).any()) or pointer[0] < 0 or pointer[-1] > value.size(dim):
                    raise NotStored("its slices do not ascend, or are not within its rows")
                added, shape = _standard_added(data, store, name, counts)
                collator = self._rows(value, dim, self.store.add_pointer(pointer), added, shape)
            else:
                raise NotStored("it is neither a tensor nor a list")
            collators.append((name, collator, collator.follow(self) if name in self._follow else None))
        if key in counts and not _can_infer_num_nodes(names[key]):
            counts = {}
        return self._finished(key, collators, num_nodes, counts)


def _content(mappings: list[dict[str, Any]]) -> Content:
    values = chain.from_iterable(map(dict.values, mappings))
    return Content(mappings, [item for item in values if isinstance(item, Tensor)])


def _collator_of(stored: StoredGraphs, name: Any, values: list[Any], stores: Sequence[Any]) -> _Collator:
    """The collator that makes an attribute of batches, by the rules of PyG's `_collate`.

    Raises:
        NotStored: PyG's own code has to collate the attribute; the message tells why.
    """
    like = values[0]
    types = set(map(type, values))
    if types == {Tensor}:
        return _tensor_collator(stored, str(name), values, stores)
    if types in ({int}, {float}, {bool}):
        return _number_collator(stored, name, values, stores)
    if all(map(_is_object, values)):
        return _Objects(values)
    if len(types) > 1:
        raise NotStored(f"it is of several types ({', '.join(sorted(item.__name__ for item in types))})")
    if isinstance(like, Mapping):
        if any(item.keys() != like.keys() for item in values):
            raise NotStored("its dictionaries have different keys")
        of_key = {key: [item[key] for item in values] for key in like}
        return _Nested({key: _collator_of(stored, key, items, stores) for key, items in of_key.items()})
    if isinstance(like, Sequence):
        if any(len(item) != len(like) for item in values):
            raise NotStored("its lists have different lengths")
        columns = [[item[nth] for item in values] for nth in range(len(like))]
        return _Nested([_collator_of(stored, name, column, stores) for column in columns])
    raise NotStored(f"it is of type {type(like).__name__}")


def _is_object(value: Any) -> bool:
    """True if PyG collates such values to a list."""
    if isinstance(value, (Tensor, int, float, Mapping, TensorFrame, SparseTensor)):
        return False
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return not (is_list and isinstance(value[0], (Tensor, SparseTensor)))


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
        and not value.requires_grad
    )


def _tensor_collator(
    stored: StoredGraphs, name: str, values: list[Tensor], stores: Sequence[Any]
) -> _Collator:
    like, store = values[0], stores[0]
    data = store._parent()
    if not all(map(_is_plain, values)):
        raise NotStored("some of its tensors are sparse, nested or need gradients")
    if len({(item.dtype, item.device, item.dim()) for item in values}) > 1:
        raise NotStored("its tensors differ in dtype, device or number of dimensions")
    asked = zip(values, stores, strict=True)
    if _is_standard(data, "__cat_dim__"):
        asked = zip([like], [store], strict=True)
    dims: set[Any] = {item._parent().__cat_dim__(name, value, item) for value, item in asked}
    dim = dims.pop()
    if dims or not (dim is None or isinstance(dim, int)):
        raise NotStored("__cat_dim__ does not return the same dimension for all graphs")
    stacks = dim is None or like.dim() == 0
    axis = 0 if dim is None or stacks else dim % like.dim()
    if not stacks and dim not in (axis, axis - like.dim()):
        raise NotStored(f"it has no dimension {dim}")
    shapes = {item.shape if stacks else (item.shape[:axis], item.shape[axis + 1 :]) for item in values}
    if len(shapes) > 1:
        raise NotStored("its tensors have shapes that cannot be concatenated")
    added, shape = _increments(stored, name, values, stores)
    if stacks:
        return stored._rows(torch.stack(values), 0, 0, added, shape)
    pointer = stored.store.add_counts([item.size(axis) for item in values])
    return stored._rows(torch.cat(values, axis), axis, pointer, added, shape)


def _number_collator(stored: StoredGraphs, name: Any, values: list[Any], stores: Sequence[Any]) -> _Collator:
    added, shape = _increments(stored, name, values, stores)
    if shape:
        raise NotStored("its increments are tensors")
    try:
        numbers = torch.tensor(values, device="cpu")
    except (RuntimeError, OverflowError) as error:
        raise NotStored(str(error)) from error
    return stored._rows(numbers, 0, 0, added, shape)


def _increments(
    stored: StoredGraphs, name: Any, values: Sequence[Any], stores: Sequence[Any]
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Pointers of the increments by `__inc__`, None if all are 0; and the shape of one increment."""
    if _is_standard(stores[0]._parent(), "__inc__") and not _is_incremented(name):
        return None, ()
    try:
        found = [
            store._parent().__inc__(name, value, store) for value, store in zip(values, stores, strict=True)
        ]
        counts = torch.stack(found) if isinstance(found[0], Tensor) else torch.tensor(found, device="cpu")
    except Exception as error:
        raise NotStored(f"its increments cannot be found ({error})") from error
    if counts.dtype != torch.int64 or counts.dim() == 0:
        raise NotStored(f"its increments are of dtype {counts.dtype}")
    counts, shape = counts.cpu(), tuple(counts.shape[1:])
    if not shape:
        return ((stored.store.add_counts(counts),) if bool(counts.any()) else None), ()
    if shape != (2, 1):
        raise NotStored(f"its increments have shape {shape}")
    return (stored.store.add_counts(counts[:, 0, 0]), stored.store.add_counts(counts[:, 1, 0])), shape


def _is_standard(data: Any, method: str) -> bool:
    """True if a graph's class does not override this method of Data or HeteroData."""
    return getattr(type(data), method) in (getattr(Data, method), getattr(HeteroData, method))


def _is_incremented(name: Any) -> bool:
    """True if PyG's own `__inc__` may return something other than 0."""
    return not isinstance(name, str) or "batch" in name or "index" in name or name == "face"


# ---------------------------------------------------------------- PyG's own storage


def _collated_names(store: Any, slices: Mapping[Any, Any]) -> list[str]:
    """The attributes of a graph that PyG's `separate` takes from the collated storage, in its order."""
    key = store._key
    if key is not None and key not in slices and len(store):
        raise NotStored("a store has no slices")
    of_store = slices if key is None else slices.get(key, {})
    names = [name for name in of_store if name in store._mapping]
    if any(not isinstance(of_store[name], Tensor) or of_store[name].dim() != 1 for name in names):
        raise NotStored("its slices are nested")
    if "num_nodes" in names:
        raise NotStored("num_nodes has slices")
    return [*names, "num_nodes"] if "_num_nodes" in store.__dict__ else names


def _collated_sizes(
    store: Any, slices: Mapping[Any, Any], names: Sequence[str]
) -> Sequence[int] | Tensor | None:
    """The number of nodes of every graph, by the rules of `NodeStorage.num_nodes`."""
    if "num_nodes" in names:
        return [int(count or 0) for count in store.__dict__["_num_nodes"]]
    of_store = slices if store._key is None else slices.get(store._key, {})
    tensors = [name for name in names if isinstance(store._mapping[name], Tensor)]
    known = [name for name in tensors if name in N_KEYS] + [name for name in tensors if "node" in name]
    if known:
        return of_store[known[0]].diff()
    if _can_infer_num_nodes(names) or any("index" in name or name == "face" for name in names):
        raise NotStored("num_nodes cannot be taken from the slices")
    return None


def _can_infer_num_nodes(names: Sequence[str]) -> bool:
    store = NodeStorage()
    store._mapping = dict.fromkeys(names)
    return store.can_infer_num_nodes


def _standard_added(
    data: Any, store: Any, name: str, counts: Mapping[Any, int]
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Increments by PyG's own `__inc__`, in the form of `_increments`."""
    if "batch" in name:
        raise NotStored("its increments depend on its content")
    if isinstance(data, HeteroData):
        if not isinstance(store, EdgeStorage) or "index" not in name:
            return None, ()
        ends = (store._key[0], store._key[2])
        if any(end not in counts for end in ends):
            raise NotStored("num_nodes cannot be taken from the slices")
        return (counts[ends[0]], counts[ends[1]]), (2, 1)
    if "index" not in name and name != "face":
        return None, ()
    return (counts[store._key],), ()
