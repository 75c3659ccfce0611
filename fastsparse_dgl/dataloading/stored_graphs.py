"""DGL's graphs and labels in a `GraphStore`: `dgl.batch` without a loop over the graphs of a batch.

All items of a dataset have the same form: a graph, a graph and its label, a dictionary, and so on. Therefore
the form is examined once, and each part of it becomes a function that makes this part of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsparse_core.graph_store import (
    ADDS,
    BatchEdges,
    Chosen,
    Content,
    Field,
    Fields,
    GraphStore,
    NothingToStore,
    NotStored,
    StoredEdges,
    check_free_memory,
    place_tensors,
)
from fastsparse_dgl.caching import remember_edges
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.device_graph import DeviceIndex

_FORMATS = ["coo", "csr", "csc"]


class _Batching:
    """A batch that is being made.

    Attributes:
        chosen: the items of the batch.
        tensors: gathered tensors on the device of the batches.
        ends: gathered ends of edges on the host.
    """

    def __init__(self, chosen: Chosen, tensors: list[Tensor], ends: list[Tensor]) -> None:
        self.chosen, self.tensors, self.ends = chosen, tensors, ends
        self.first = chosen.first.unbind(0)


_Collator = Callable[[_Batching], Any]


class StoredGraphs:
    """The stored items of a dataset; makes the same batches as DGL's `GraphDataLoader`.

    Args:
        items: the items of the dataset, in its order.
        device: device of the batches.
        collate: DGL's function, for parts of the items that are not stored.

    Raises:
        NotStored: DGL's loader has to make the batches; the message tells why.
    """

    def __init__(
        self, items: Sequence[Any], device: torch.device, collate: Callable[[list[Any]], Any]
    ) -> None:
        if not items:
            raise NothingToStore("the dataset is empty")
        check_free_memory(sum(map(_num_bytes, items)))
        self.store = GraphStore(len(items), device)
        #: Store of the edges' ends on the host, because DGL makes graphs from a structure on the host.
        self.host = self.store
        if device.type != "cpu":
            self.host = GraphStore(len(items), torch.device("cpu"))
            self.host.pointers = self.store.pointers
        self._collate = collate
        self._fields: list[Field] = []
        self._ends: list[Field] = []
        self._mappings: list[dict[Any, Any]] = []
        self._tensors: list[Tensor] = []
        self._graphs: list[Any] = []
        self._collator = self._collator_of(list(items))
        if not self._graphs:
            raise NotStored("it has no graphs")
        self._handles = [graph._graph for graph in self._graphs]
        self._content = Content(self._mappings, self._tensors)
        given = [item.tensor for item in self._fields if item.tensor is not None]
        for item, tensor in zip(self._fields, place_tensors(given, device), strict=True):
            item.tensor = tensor
        self._gather, self._gather_ends = Fields(self._fields, device), Fields(self._ends, self.host.device)

    def is_current(self) -> bool:
        """True if the graphs have not changed since they were stored."""
        handles = [graph._graph for graph in self._graphs]
        is_same = all(one is two for one, two in zip(handles, self._handles, strict=True))
        return is_same and self._content.is_as_it_was()

    def batch(self, index: Sequence[int]) -> Any:
        """A batch of the items at the given positions.

        Raises:
            IndexError: there is no such position.
        """
        chosen = self.store.choose(index)
        on_host = chosen if self.host is self.store else self.host.choose(index)
        return self._collator(_Batching(chosen, self._gather.of(chosen), self._gather_ends.of(on_host)))

    # ---------------------------------------------------------------- items

    def add(self, tensor: Tensor, pointer: int) -> int:
        """Adds a tensor whose rows are those of pointer number ``pointer``; returns the tensor's position."""
        self._fields.append(Field(tensor.contiguous(), pointer))
        return len(self._fields) - 1

    def add_ends(self, ends: Tensor, pointer: int, nodes: tuple[int, int]) -> tuple[int, StoredEdges]:
        """Adds the ends (2, num_edges) of all edges; returns their position and the edges of batches."""
        field = Field(ends, pointer, ADDS[ends.dtype], nodes, 1)
        self._ends.append(field)
        own = field
        if self.host is not self.store:
            own = Field(ends.to(self.store.device), pointer, ADDS[ends.dtype], nodes, 1)
        return len(self._ends) - 1, StoredEdges(self.store, own, *nodes)

    def watch(self, mapping: dict[Any, Any], tensors: Sequence[Tensor]) -> None:
        """Adds a dictionary and tensors to the objects that are checked for changes."""
        self._mappings.append(mapping)
        self._tensors += tensors

    def _collator_of(self, values: list[Any], kind: type = list) -> _Collator:
        """Returns the function that makes one part of a batch; DGL's `collate` gets values in a ``kind``."""
        like = values[0]
        kinds = set(map(type, values))
        if isinstance(like, dgl.DGLGraph):
            self._graphs += values
            return _graphs_collator(self, values)
        if kinds == {np.ndarray} and like.dtype.kind in "biuf":
            values, kinds = [torch.as_tensor(item, device="cpu") for item in values], {Tensor}
            like = values[0]
        if kinds == {Tensor}:
            alike = {(item.shape, item.dtype, item.device, item.requires_grad) for item in values}
            if len(alike) > 1 or like.requires_grad or like.layout is not torch.strided:
                raise NotStored("labels differ in shape, dtype or device, are not dense, or need gradients")
            self._tensors += values
            return self._stacked(torch.stack(values))
        if kinds in ({int}, {bool}):
            return self._stacked(torch.tensor(values, device="cpu"))
        if kinds == {float}:
            return self._stacked(torch.tensor(values, dtype=torch.float64, device="cpu"))
        if len(kinds) == 1 and isinstance(like, Mapping):
            if any(item.keys() != like.keys() for item in values):
                raise NotStored("its dictionaries have different keys")
            self._mappings += [item for item in values if isinstance(item, dict)]
            collators = {key: self._collator_of([item[key] for item in values]) for key in like}
            return lambda batch: {key: collator(batch) for key, collator in collators.items()}
        if len(kinds) == 1 and isinstance(like, Sequence) and not isinstance(like, (str, bytes)):
            if any(len(item) != len(like) for item in values):
                raise NotStored("its tuples have different lengths")
            columns = [self._collator_of([item[nth] for item in values], tuple) for nth in range(len(like))]
            if hasattr(like, "_fields"):
                return lambda batch: type(like)(*(collator(batch) for collator in columns))
            return lambda batch: [collator(batch) for collator in columns]
        collate = self._collate
        return lambda batch: collate(kind(values[nth] for nth in batch.chosen.source[0].tolist()[:-1]))

    def _stacked(self, tensor: Tensor) -> _Collator:
        place = self.add(tensor, 0)
        return lambda batch: batch.tensors[place]


def _num_bytes(value: Any) -> int:
    """Returns the bytes of host memory that a copy of an item, or of a part of an item, takes."""
    if isinstance(value, dgl.DGLGraph):
        ends = sum(map(value.num_edges, value.canonical_etypes)) * 2 * value.idtype.itemsize
        frames = (*value._node_frames, *value._edge_frames)
        # Reading `frame[name]` would gather the rows of a subgraph, which DGL delays until they are read.
        rows = [(frame.num_rows, scheme) for frame in frames for scheme in frame.schemes.values()]
        return ends + sum(count * math.prod(each.shape) * each.dtype.itemsize for count, each in rows)
    if isinstance(value, Tensor):
        return 0 if value.is_cuda or value.layout is not torch.strided else value.nbytes
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    is_sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return sum(map(_num_bytes, value)) if is_sequence else 0


def _graphs_collator(stored: StoredGraphs, graphs: list[Any]) -> _Collator:
    """Returns the function that makes a batch of graphs by the rules of `dgl.batch`.

    Raises:
        NotStored: the graphs cannot be stored together; the message tells why.
    """
    like = graphs[0]
    if not all(isinstance(graph, dgl.DGLGraph) for graph in graphs):
        raise NotStored("its graphs are of several types")
    described = {(tuple(graph.ntypes), tuple(graph.canonical_etypes), graph.idtype) for graph in graphs}
    if len(described) > 1:
        raise NotStored("its graphs differ in node types, edge types or idtype")
    if any(isinstance(graph._graph, DeviceIndex) or graph.device.type != "cpu" for graph in graphs):
        raise NotStored("some of its graphs are on a GPU")
    if any(graph.is_block or graph.batch_size != 1 for graph in graphs):
        raise NotStored("some of its graphs are blocks or batches")
    if any(sum(map(len, graph.formats().values())) != len(_FORMATS) for graph in graphs):
        raise NotStored("some of its graphs are restricted to some sparse formats")
    return _Graphs(stored, graphs, like)


class _Graphs:
    """Graphs of one schema.

    Args:
        stored: the object to which the graphs' tensors are added.
        graphs: the graphs.
        like: one of the graphs.
    """

    def __init__(self, stored: StoredGraphs, graphs: list[Any], like: Any) -> None:
        self._stored, self._all = stored, graphs
        #: Dtype of the numbers of nodes and edges of a batch. In DGL 1.1 it is int64 for all graphs.
        self._dtype_of_counts = dgl.batch([like]).batch_num_nodes(like.ntypes[0]).dtype
        #: Pointers of the node and edge types for which graphs without such nodes or edges have other data.
        self._uneven: list[int] = []
        self._ntypes, self._canonical = list(like.ntypes), list(like.canonical_etypes)
        self._metagraph = like._graph.metagraph
        add_counts = stored.store.add_counts
        self._nodes = [add_counts([graph.num_nodes(name) for graph in graphs]) for name in self._ntypes]
        self._edges: list[int] = []
        self._ends: list[tuple[int, StoredEdges]] = []
        for name in self._canonical:
            pairs = [torch.stack(graph.edges(etype=name, order="eid")) for graph in graphs]
            self._edges.append(add_counts([pair.size(1) for pair in pairs]))
            nodes = tuple(self._nodes[self._ntypes.index(end)] for end in (name[0], name[2]))
            self._ends.append(stored.add_ends(torch.cat(pairs, 1), self._edges[-1], nodes))  # type: ignore[arg-type]
        self._node_data = [
            self._add_frames([graph._node_frames[nth] for graph in graphs], pointer)
            for nth, pointer in enumerate(self._nodes)
        ]
        self._edge_data = [
            self._add_frames([graph._edge_frames[nth] for graph in graphs], pointer)
            for nth, pointer in enumerate(self._edges)
        ]

    def _add_frames(self, frames: list[Any], pointer: int) -> dict[str, int]:
        """Adds the data of a node or edge type; returns positions by name. Empty frames may lack data."""
        counts = self._stored.store.counts(pointer)
        filled = [frame for frame, count in zip(frames, counts.tolist(), strict=True) if count] or frames
        schemas = [frame.schemes for frame in filled]
        if any(dict(schema) != dict(schemas[0]) for schema in schemas):
            raise NotStored("the data of its graphs differ in name, shape or dtype")
        if any(dict(frame.schemes) != dict(schemas[0]) for frame in frames):
            self._uneven.append(pointer)
        for frame in frames:
            columns = [column.data for column in frame._columns.values()]
            if any(not isinstance(item, Tensor) or item.requires_grad for item in columns):
                raise NotStored("some data of its graphs is not a tensor or needs gradients")
            self._stored.watch(frame._columns, columns)
        return {
            name: self._stored.add(torch.cat([frame[name] for frame in filled]), pointer)
            for name in schemas[0]
        }

    def __call__(self, batch: _Batching) -> Any:
        totals, first, device = batch.chosen.totals, batch.first, self._stored.store.device
        if any(totals[pointer] == 0 for pointer in self._uneven):  # such a batch gets the empty graphs' data
            return dgl.batch([self._all[nth] for nth in batch.chosen.source[0].tolist()[:-1]]).to(device)
        relations = []
        for (source, _, target), (place, _) in zip(self._canonical, self._ends, strict=True):
            sizes = [totals[self._nodes[self._ntypes.index(end)]] for end in (source, target)]
            ends = batch.ends[place]
            kinds = 1 if source == target else 2
            make = dgl.heterograph_index.create_unitgraph_from_coo
            relations.append(make(kinds, *sizes, ends[0], ends[1], _FORMATS))
        index = relations[0]
        if len(self._ntypes) > 1 or len(relations) > 1:
            sizes = [totals[pointer] for pointer in self._nodes]
            make = dgl.heterograph_index.create_heterograph_from_relations
            index = make(self._metagraph, relations, dgl.utils.toindex(sizes, "int64"))
        graph = dgl.DGLGraph(index, self._ntypes, [name[1] for name in self._canonical])
        if device.type != "cpu":
            graph = graph.to(device)
        counts = {
            pointer: first[pointer].diff().to(device, self._dtype_of_counts) for pointer in range(len(first))
        }
        graph.set_batch_num_nodes(
            {name: counts[of] for name, of in zip(self._ntypes, self._nodes, strict=True)}
        )
        graph.set_batch_num_edges(
            {name: counts[of] for name, of in zip(self._canonical, self._edges, strict=True)}
        )
        for frames, data in ((graph._node_frames, self._node_data), (graph._edge_frames, self._edge_data)):
            for frame, places in zip(frames, data, strict=True):
                frame.update({name: batch.tensors[place] for name, place in places.items()})
        if len(relations) == 1 and not torch.is_inference_mode_enabled():
            remember_edges(graph, BatchEdges(self._ends[0][1], batch.chosen))
        return graph
