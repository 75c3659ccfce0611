"""Stores many small graphs as concatenated tensors, and gathers batches from them."""

from __future__ import annotations

import enum
import logging
import math
import operator
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from fastsparse_core import _C
from fastsparse_core.device import free_host_memory, place_of
from fastsparse_core.log import info_once
from fastsparse_core.ops._autocast import version_of
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.batch import adjacency_of_batch

_logger = logging.getLogger("fastsparse_core")

#: Share of the GPU's free memory that copies of the graphs may take; larger data sets stay on the host. The
#: same share limits copies in host memory.
_SHARE_OF_FREE = 0.5


#: Number of tensors in a group whose versions are compared together. Reading a version costs a few cache
#: misses: for 80,000 tensors (20,000 graphs), it would take as long as a third of a captured epoch.
_VERSIONS_AT_ONCE = 1024
#: Largest share of the time between two checks that comparing versions may take.
_SHARE_OF_CHECKS = 0.02


class NotStored(Exception):
    """Raised if graphs, or one of their attributes, cannot be stored. The message is the reason."""


class NothingToStore(NotStored):
    """Raised if there are no graphs; then no warning about a slow path is needed."""


class FieldKind(enum.IntEnum):
    """Ways to compute rows of a batch from rows of the dataset, with the numbers of gather_graphs.h."""

    COPY = 0
    ADD_INT64 = 1
    ADD_INT32 = 2
    GRAPH = 3
    FIRST = 4
    ROW_POINTER = 5
    SLICES = 6


#: Dtype of indices -> kind of field that turns them into indices of a batch.
ADDS = {torch.int64: FieldKind.ADD_INT64, torch.int32: FieldKind.ADD_INT32}


@dataclass(eq=False)
class Field:
    """A tensor of the dataset, and the way to compute the tensor of a batch from this tensor.

    A pointer is a tensor with the first row of every graph, then the number of rows. Fields refer to
    pointers by their index in the store.

    Attributes:
        tensor: rows of all graphs, concatenated along ``dim``, contiguous; None: nothing is read.
        rows: index of the pointer to the rows of each graph.
        kind: the way to compute the rows of a batch.
        added: if the values are indices: index of the pointer whose first row in the batch is added to the
            values. The second entry applies to the second index of the dimension before ``dim``, such as
            destinations.
        dim: dimension of the rows.
        dtype: dtype of the tensor.
        more_rows: number of rows that the result has in addition to the graphs' rows.
    """

    tensor: Tensor | None
    rows: int
    kind: FieldKind = FieldKind.COPY
    added: tuple[int, int] = (0, 0)
    dim: int = 0
    dtype: torch.dtype = torch.int64
    more_rows: int = 0
    before: tuple[int, ...] = field(init=False, default=())
    behind: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.tensor is not None:
            shape = tuple(self.tensor.shape)
            self.before, self.behind = shape[: self.dim], shape[self.dim + 1 :]
            self.dtype = self.tensor.dtype
        elif self.kind is FieldKind.FIRST:
            self.more_rows = 1

    @property
    def sized_by(self) -> int:
        """Index of the pointer that determines the number of rows of the result."""
        return 0 if self.kind is FieldKind.FIRST else self.rows

    def arguments(self) -> tuple[Tensor | None, int, int, int, int, int, int, int]:
        """The field in the form that `_C.gather_graphs` takes."""
        row_bytes = math.prod(self.behind) * self.dtype.itemsize
        num_rows = 0 if self.tensor is None else self.tensor.size(self.dim)
        return (
            self.tensor,
            math.prod(self.before),
            row_bytes,
            num_rows,
            self.rows,
            *self.added,
            int(self.kind),
        )


class Fields:
    """Fields that one kernel gathers together.

    Args:
        fields: the fields.
        device: device of the batches.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        self._shapes = [
            (item.before, item.sized_by, item.more_rows, item.behind, item.dtype) for item in fields
        ]
        self._arguments = [item.arguments() for item in fields]
        self._device = device

    def of(self, chosen: Chosen) -> list[Tensor]:
        """Gathers the tensors of a batch."""
        totals, device = chosen.totals, self._device
        out = [
            torch.empty((*before, totals[rows] + more, *behind), dtype=dtype, device=device)
            for before, rows, more, behind, dtype in self._shapes
        ]
        where, queue = place_of(device)
        _C.gather_graphs(
            fields=self._arguments,
            totals=totals,
            table=chosen.table,
            num_graphs=chosen.count,
            out=out,
            device=where,
            queue=queue,
        )
        return out


@dataclass(eq=False)
class Chosen:
    """Some graphs of a `GraphStore`, in the order of a batch.

    Attributes:
        count: number of graphs.
        totals: for every pointer, the total number of rows of the chosen graphs.
        first: for every pointer, the first row of each graph in the batch, then the number of rows, int64
            (number of pointers, count + 1), on the host.
        table: `first` and `source` for the kernels, on the device of the batch.
        source: for every pointer, the first row of each graph in the dataset, int64 (number of pointers,
            count), on the host.
    """

    count: int
    totals: tuple[int, ...]
    first: Tensor
    table: Tensor
    source: Tensor


class GraphStore:
    """The pointers and tensors of many graphs.

    A pointer is a tensor with the first row of every graph, then the number of rows. Pointer 0 has one row
    per graph.

    Args:
        num_graphs: number of graphs.
        device: device of the batches.

    Attributes:
        num_graphs: number of graphs.
        device: device of the batches.
    """

    def __init__(self, num_graphs: int, device: torch.device) -> None:
        self.num_graphs = num_graphs
        self.device = device
        self.pointers = [torch.arange(num_graphs + 1, device="cpu")]

    def add_counts(self, counts: Sequence[int] | Tensor) -> int:
        """Adds the pointer for the number of rows of every graph, (num_graphs,); returns its index."""
        pointer = torch.zeros(self.num_graphs + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(torch.as_tensor(counts, dtype=torch.int64, device="cpu"), 0, out=pointer[1:])
        return self.add_pointer(pointer)

    def add_pointer(self, pointer: Tensor) -> int:
        """Adds a pointer, int64 (num_graphs + 1,) on the CPU; returns its index or that of an equal one."""
        for nth, known in enumerate(self.pointers):
            if torch.equal(known, pointer):
                return nth
        self.pointers.append(pointer.contiguous())
        return len(self.pointers) - 1

    def counts(self, pointer: int) -> Tensor:
        """The number of rows of every graph, int64 (num_graphs,)."""
        return self.pointers[pointer].diff()

    def choose(self, index: Sequence[int] | Tensor, graph_at: Tensor | None = None) -> Chosen:
        """Chooses the graphs of a batch.

        Args:
            index: positions of the graphs, a sequence or a tensor. Negative positions count from the end.
            graph_at: number of the graph at every position, int64; None: position and number are equal.

        Raises:
            IndexError: a position is out of range.
        """
        count, pointers = len(index), self.pointers
        on_gpu = self.device.type == "cuda"
        host = torch.empty((len(pointers), 2, count + 1), dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        num_positions = self.num_graphs if graph_at is None else graph_at.numel()
        # The extension reads `index` directly if it is a contiguous int64 tensor on the CPU. Other tensors,
        # such as results of a user's sampler, are converted to a list.
        is_tensor = (
            type(index) is Tensor
            and index.dtype == torch.int64
            and index.is_cpu
            and index.dim() == 1
            and index.is_contiguous()
        )
        if type(index) is Tensor and not is_tensor:
            index = index.tolist()
        totals = _C.plan_graphs(
            index=None if is_tensor else index,  # type: ignore[arg-type]
            positions=index if is_tensor else None,  # type: ignore[arg-type]
            num_graphs=count,
            graph_at=graph_at,
            num_positions=num_positions,
            pointers=pointers,
            table=host,
        )
        table = host.to(self.device, non_blocking=True) if on_gpu else host
        first, source = host.unbind(1)
        # `first` is a copy, because callers could otherwise overwrite memory that kernels read.
        return Chosen(count, totals, first.clone(), table, source)


#: tensor of a dataset -> device -> (stamp of the tensor's content, weak reference to the copy)
_copies: Any = WeakIdKeyDictionary()


def check_free_memory(size: int) -> None:
    """Checks that copies of a dataset's tensors take at most half of the free host memory.

    The tensors may be mapped from a file that is larger than the memory (``torch.load(mmap=True)``). PyTorch
    does not tell which tensors are mapped, so only their sizes are checked.

    Args:
        size: bytes of all tensors that will be copied in host memory.

    Raises:
        NotStored: the copies would take more memory.
    """
    free = free_host_memory()
    if size > _SHARE_OF_FREE * free:
        raise NotStored(
            f"a copy of its graphs would take {size / 2**30:.2f} GiB, which is more than half of the "
            f"{free / 2**30:.2f} GiB of free host memory"
        )


def place_tensors(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors to a device if they take at most half of its free memory, else to page-locked memory.

    For the CPU, tensors that are on the CPU are not copied.

    Loaders of one dataset share the copies, which are freed with the last of these loaders.

    Args:
        tensors: contiguous tensors.
        device: device of the batches.

    Returns:
        The tensors on the device, or in page-locked memory of the host.
    """
    if device.type == "cpu":
        return [tensor.to(device) for tensor in tensors]
    placed = [_copy_of(tensor, device) for tensor in tensors]
    there = [copy for copy in placed if copy is not None]
    if len(there) == len(placed):
        return there
    missing = sum(tensor.nbytes for tensor, copy in zip(tensors, placed, strict=True) if copy is None)
    free, _ = torch.cuda.mem_get_info(device)
    size, fits = f"{missing / 2**30:.2f} GiB of graphs", missing <= _SHARE_OF_FREE * free
    if fits:
        info_once(_logger, f"{size} are copied to {device}, and batches are gathered there")
    else:
        info_once(
            _logger,
            f"{size} stay in page-locked memory of the host, which {device} reads over PCIe, because they "
            f"take more than half of the {free / 2**30:.2f} GiB that are free on {device}",
        )
    out = []
    for tensor, copy in zip(tensors, placed, strict=True):
        if copy is None:
            copy = tensor.to(device) if fits else tensor.cpu().pin_memory()
            _copies.setdefault(tensor, {})[device] = (_stamp(tensor), weakref.ref(copy))
        out.append(copy)
    torch.cuda.current_stream(device).synchronize()  # other streams will read the copies
    return out


def _copy_of(tensor: Tensor, device: torch.device) -> Tensor | None:
    if tensor.device == device:
        return tensor
    stamp, copy = _copies.get(tensor, {}).get(device, (None, None))
    return copy() if copy is not None and stamp == _stamp(tensor) else None


def _stamp(tensor: Tensor) -> Hashable:
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype


#: Approximate number of edges and nodes together that are sorted at a time.
_ROWS_AT_ONCE = 2**24


class StoredEdges:
    """The edges of one type in all graphs, with their structure.

    Args:
        store: store of the graphs.
        edge_index: field of the edges, (2, number of edges): sources and destinations, numbered within their
            graph.
        sources: index of the source nodes' pointer.
        destinations: index of the destination nodes' pointer.
    """

    def __init__(self, store: GraphStore, edge_index: Field, sources: int, destinations: int) -> None:
        self._store, self._edge_index = store, edge_index
        self.sources, self.destinations = sources, destinations

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._store.device

    def _parts(self) -> Iterator[tuple[Chosen, Tensor]]:
        """Yields batches of consecutive graphs, which cover all graphs, and their edges, int64 (2, E).

        The edges are processed in batches, because sorting all at once would take too much memory.
        """
        store, fields = self._store, Fields([self._edge_index], self._store.device)
        sizes = sum(store.counts(of) for of in (self._edge_index.rows, self.sources, self.destinations))
        assert isinstance(sizes, Tensor)
        before = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        start = 0
        while start < store.num_graphs:
            behind = int(torch.searchsorted(before, before[start] + _ROWS_AT_ONCE, right=True))
            end = max(start + 1, behind - 1)
            chosen = store.choose(range(start, end))
            yield chosen, fields.of(chosen)[0].long()
            start = end

    @cached_property
    def _facts(self) -> tuple[bool, bool]:
        """Two facts: every edge connects nodes of its graph; destinations ascend in every graph."""
        is_within = is_sorted = True
        with torch.inference_mode(False):
            for chosen, edges in self._parts():
                first = chosen.first.to(edges.device)
                graph = torch.arange(chosen.count, device=edges.device)
                graph = graph.repeat_interleave(
                    first[self._edge_index.rows].diff(), output_size=edges.size(1)
                )
                leaves = torch.zeros((), dtype=torch.bool, device=edges.device)
                for end, nodes in zip(edges, (self.sources, self.destinations), strict=True):
                    leaves |= ((end < first[nodes][graph]) | (end >= first[nodes][graph + 1])).any()
                is_within = is_within and not bool(leaves)
                is_sorted = is_sorted and bool((edges[1, 1:] >= edges[1, :-1]).all())
        return is_within, is_within and is_sorted

    @property
    def is_sorted(self) -> bool:
        """True if destinations ascend in every graph, and so in every batch."""
        return self._facts[1]

    @property
    def has_structure(self) -> bool:
        """True if every edge connects nodes of its graph."""
        return self._facts[0]

    @cached_property
    def structure(self) -> _StoredStructure:
        """The structure of all graphs."""
        with torch.inference_mode(False):
            return _StoredStructure(
                self._store, self._edge_index.rows, self.sources, self.destinations, self._parts()
            )


class BatchEdges:
    """The edges of a batch. Their structure is gathered at the first use, without sorting.

    Attributes:
        shape: (number of destinations, number of sources).
    """

    def __init__(self, edges: StoredEdges, chosen: Chosen) -> None:
        self._edges, self._chosen = edges, chosen
        self.shape = (chosen.totals[edges.destinations], chosen.totals[edges.sources])

    @property
    def device(self) -> torch.device:
        """Device of the structure."""
        return self._edges.device

    @property
    def is_sorted(self) -> bool:
        """True if destinations ascend in every graph of the dataset."""
        return self._edges.is_sorted

    @property
    def has_structure(self) -> bool:
        """True if `adjacency` can be made, because no edge of the dataset leaves its graph."""
        return self._edges.has_structure

    @property
    def has_loops(self) -> bool:
        """True if some edge of the batch is a loop."""
        return self._edges.structure.has_loops(self._chosen)

    @cached_property
    def adjacency(self) -> Adjacency:
        """The structure of the batch."""
        with torch.inference_mode(False):
            return self._edges.structure.of(self._chosen, self.shape)


class _StoredStructure:
    """The structures of all graphs, from which structures of batches are gathered.

    Rows, columns and entries are numbered within each graph.
    """

    def __init__(
        self,
        store: GraphStore,
        edges: int,
        sources: int,
        destinations: int,
        parts: Iterable[tuple[Chosen, Tensor]],
    ) -> None:
        forward: list[dict[str, Tensor]] = []
        backward: list[dict[str, Tensor]] = []
        loops: list[Tensor] = []
        is_symmetric = is_square = sources == destinations
        postponed: tuple[Adjacency, Chosen] | None = None
        for chosen, ends in parts:
            shape = chosen.totals[destinations], chosen.totals[sources]
            whole = Adjacency.from_coo(ends[1], ends[0], shape)
            is_symmetric = is_symmetric and bool(whole.symmetric)
            forward.append(_cut(whole, chosen, edges, destinations, sources))
            if postponed is not None:
                backward.append(_cut(postponed[0].t(), postponed[1], edges, sources, destinations))
            postponed = (whole, chosen) if is_symmetric and not backward else None
            if postponed is None:
                backward.append(_cut(whole.t(), chosen, edges, sources, destinations))
            if is_square:
                loops.append(_any_by_graph(whole.row_once() == whole.col, chosen.first[edges]))
        has_loops = torch.cat(loops) if loops else torch.zeros(0, dtype=torch.bool, device="cpu")
        #: True for every graph with a loop, bool (num_graphs,) on the CPU; None: no graph has a loop.
        self._loops = has_loops if bool(has_loops.any()) else None
        self._is_symmetric = is_symmetric
        self._forward = _RowsOfGraphs(store, edges, destinations, sources, forward)
        self._backward: _RowsOfGraphs | None = None
        if not is_symmetric:
            self._backward = _RowsOfGraphs(store, edges, sources, destinations, backward)
        rows = [self._forward] if self._backward is None else [self._forward, self._backward]
        self._fields = Fields([item for part in rows for item in part.fields], store.device)

    def has_loops(self, chosen: Chosen) -> bool:
        """Returns True if some edge of a batch is a loop."""
        return self._loops is not None and bool(self._loops[chosen.source[0, : chosen.count]].any())

    def of(self, chosen: Chosen, shape: tuple[int, int]) -> Adjacency:
        """The structure of a batch."""
        tensors = iter(self._fields.of(chosen))
        adjacency = self._forward.adjacency(chosen, shape, tensors)
        adjacency.symmetric = self._is_symmetric
        adjacency.has_loops = self.has_loops(chosen) if shape[0] == shape[1] else None
        if self._backward is not None:
            adjacency.keep_transpose(self._backward.adjacency(chosen, (shape[1], shape[0]), tensors))
        return adjacency


def _cut(whole: Adjacency, chosen: Chosen, edges: int, rows: int, columns: int) -> dict[str, Tensor]:
    """Cuts one structure of several graphs into tensors that are numbered within each graph.

    Args:
        whole: the structure.
        chosen: the graphs.
        edges: index of the entries' pointer.
        rows: index of the rows' pointer.
        columns: index of the columns' pointer.

    Returns:
        Name -> tensor. Row pointers, columns, positions and slices start from 0 in each graph.
    """
    first, device = chosen.first, whole.device

    def begins(pointer: int, of: int) -> Tensor:
        """For every row of one pointer, the first row of another pointer in the same graph."""
        return first[pointer][:-1].repeat_interleave(first[of].diff()).to(device)

    degree = whole.in_degree()
    entry = begins(edges, edges)
    order = whole.edge_id
    tensors = {
        "rowptr": whole.rowptr[:-1] - begins(edges, rows),
        "col": (whole.col - begins(columns, edges)).int(),
        "inv_degree": whole.inv_degree(),
        "with_loops": whole.inv_sqrt_degree(loops=1),
        "edge_id": ((torch.arange(entry.numel(), device=device) if order is None else order) - entry).int(),
        "has_empty_rows": _any_by_graph(degree == 0, first[rows]),
        "most_entries": degree.max().cpu() if degree.numel() else degree.new_zeros((), device="cpu"),
    }
    if device.type == "cuda":
        number = torch.arange(whole.num_dst, device=device) - begins(rows, rows)
        tensors["slices"] = torch.stack([tensors["rowptr"], degree + (number << 32)], dim=1)
    return tensors


class _RowsOfGraphs:
    """Compressed rows of all graphs.

    Args:
        store: store of the graphs.
        edges: index of the entries' pointer.
        rows: index of the rows' pointer.
        columns: index of the columns' pointer.
        parts: results of `_cut` for consecutive graphs.
    """

    def __init__(
        self, store: GraphStore, edges: int, rows: int, columns: int, parts: list[dict[str, Tensor]]
    ) -> None:
        #: Largest number of entries of a row.
        self._most_entries = max(int(part.pop("most_entries")) for part in parts)
        empty = torch.cat([part.pop("has_empty_rows") for part in parts])
        #: True for every graph that has a row without entries, bool (num_graphs,); None: no graph has one.
        self._empty = empty if bool(empty.any()) else None
        if len(parts) > 1:  # all parts together may exceed the device's memory
            parts = [{name: item.cpu() for name, item in part.items()} for part in parts]
        whole = {name: torch.cat([part[name] for part in parts]).contiguous() for name in parts[0]}
        order = whole["edge_id"]
        counts = store.counts(edges)
        given = torch.arange(order.numel(), device="cpu") - store.pointers[edges][:-1].repeat_interleave(
            counts
        )
        if torch.equal(order.cpu(), given.int()):
            del whole["edge_id"]
        kinds = {
            "rowptr": (rows, FieldKind.ROW_POINTER, edges),
            "col": (edges, FieldKind.ADD_INT32, columns),
            "inv_degree": (rows, FieldKind.COPY, 0),
            "with_loops": (rows, FieldKind.COPY, 0),
            "edge_id": (edges, FieldKind.ADD_INT32, edges),
            "slices": (rows, FieldKind.SLICES, edges),
        }
        self._names = list(whole)
        self.fields = []
        for name, tensor in zip(whole, place_tensors(list(whole.values()), store.device), strict=True):
            pointer, kind, added = kinds[name]
            more = int(kind is FieldKind.ROW_POINTER)
            self.fields.append(Field(tensor, pointer, kind, (added, added), more_rows=more))

    def adjacency(self, chosen: Chosen, shape: tuple[int, int], tensors: Iterator[Tensor]) -> Adjacency:
        """The structure of a batch, from the gathered fields."""
        found = dict(zip(self._names, tensors, strict=False))
        adjacency = adjacency_of_batch(
            found["rowptr"],
            found["col"],
            shape,
            found["inv_degree"],
            found.get("slices"),
            most_entries=self._most_entries,
            edge_id=found.get("edge_id"),
        )
        adjacency._of_rows.results["inv_sqrt_degree", torch.float32, 1] = found["with_loops"]
        graphs = chosen.source[0, : chosen.count]
        has_empty_rows = self._empty is not None and bool(self._empty[graphs].any())
        adjacency._of_rows.results["has_empty_rows"] = (has_empty_rows,)
        return adjacency


def _any_by_graph(flags: Tensor, pointer: Tensor) -> Tensor:
    """For every graph, True if some of its flags is set, bool (number of graphs,) on the CPU."""
    before = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)]).cpu()
    return before[pointer].diff() > 0


#: The objects of a dataset, and the selected positions.
Outline = tuple[list[Any], list[list[int]]]


def same_outline(one: Outline, two: Outline) -> bool:
    """Returns True if two outlines consist of the same objects and positions."""
    return _C.hold_same(containers=[one[0]], values=two[0]) and one[1] == two[1]


class Content:
    """Detects changes of a dataset after it was stored.

    Another object in one of the dictionaries is always detected. Writes in place are detected when the tensor
    that was written to is checked. Each call of `is_as_it_was` checks the next group of about
    `_VERSIONS_AT_ONCE` tensors, and further groups as long as the checks take at most `_SHARE_OF_CHECKS` of
    the time since the previous call.

    Args:
        mappings: dictionaries of the dataset.
        tensors: tensors of the dataset.
    """

    def __init__(self, mappings: list[dict[Any, Any]], tensors: list[Tensor]) -> None:
        self._mappings = mappings
        self._values = list(chain.from_iterable(map(dict.values, mappings)))
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        step = -(-len(tensors) // _VERSIONS_AT_ONCE)
        if step > 1:
            step += 1 - step % 2  # odd, so that few attributes are mixed in each part
        parts = [tensors[nth::step] for nth in range(step)]
        #: Groups of tensors that are checked together, and the sums of their versions; the next group is
        #: first.
        self._parts = deque((part, _sum_of_versions(part)) for part in parts)
        self._last_check = perf_counter()

    def is_as_it_was(self) -> bool:
        """Returns False if a dictionary has another object, or a checked tensor was written to."""
        begin = perf_counter()
        end = begin + _SHARE_OF_CHECKS * (begin - self._last_check)
        self._last_check = begin
        if not _C.hold_same(containers=self._mappings, values=self._values):
            return False
        for _ in range(len(self._parts)):
            self._parts.rotate(-1)
            part, versions = self._parts[0]
            if _sum_of_versions(part) != versions:
                return False
            if perf_counter() >= end:
                break
        return True


def _sum_of_versions(tensors: list[Tensor]) -> int:
    return sum(map(operator.attrgetter("_version"), tensors))


def drawn_batches(batch_sampler: Any, device: torch.device) -> Iterator[Any]:
    """Yields the batches of a sampler: int64 tensors for PyTorch's own samplers, else the sampler's items.

    Order and random numbers are the same as with PyTorch's samplers, but no Python loop runs over positions.

    Args:
        batch_sampler: the loader's batch sampler.
        device: device of the tensors.
    """
    order: Any = getattr(batch_sampler, "sampler", None)
    is_shuffled = type(order) is RandomSampler and not order.replacement
    count = len(order.data_source) if is_shuffled or type(order) is SequentialSampler else 0
    if not count or type(batch_sampler) is not BatchSampler or (is_shuffled and order.num_samples != count):
        yield from batch_sampler
        return
    if is_shuffled:
        generator = order.generator
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        positions = torch.randperm(count, generator=generator)
    else:
        positions = torch.arange(count, device="cpu")
    positions, size = positions.to(device), batch_sampler.batch_size
    whole = count // size * size
    yield from positions[:whole].split(size) if whole else ()
    if is_shuffled and order.generator is not None:
        # RandomSampler makes one more permutation at the end, which changes the user's generator.
        torch.randperm(count, generator=generator)
    if whole < count and not batch_sampler.drop_last:
        yield positions[whole:]


class StoredBatches(_SingleProcessDataLoaderIter):
    """Iterator over a loader: PyTorch chooses the samples, and a function makes the batches.

    Args:
        loader: a loader without worker processes.
        make: function that makes the batch of given positions.
    """

    def __init__(self, loader: Any, make: Callable[[Any], Any]) -> None:
        super().__init__(loader)
        self._sampler_iter = drawn_batches(loader.batch_sampler, torch.device("cpu"))
        self._make = make

    def _next_data(self) -> Any:
        index = self._next_index()
        batch = self._make(index if type(index) in (list, Tensor) else list(index))
        return pin_memory(batch) if self._pin_memory else batch
