"""Computes the layers of a model for all nodes of a graph, layer by layer, in tiles of destinations."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastsparse_core.formats.compress import expand_rows, select_rows
from fastsparse_core.sampling.features import gather_on_cuda
from fastsparse_core.sampling.host_rows import HostRows, deferred
from fastsparse_core.structure.adjacency import Adjacency

#: Share of the free memory that a tile may take. The estimate of a tile's memory ignores the allocator's
#: rounding.
_TILE_SHARE = 0.6
#: Share of the free memory that is reserved for tiles when features or results are placed on the device.
_KEPT_FOR_TILES = 0.15
#: Share of the free memory for the first rows of a result, if the result and its source do not both fit.
_SHARE_HERE = 0.7
#: Share of the free memory for a group of columns of all features, if not all columns fit. The structure is
#: sent once for every group, so wider groups are faster.
_SHARE_OF_COLUMNS = 0.9
#: Kernels read rows in pieces of this many bytes, so the size of a group of columns is a multiple of it.
_ROW_BYTES = 16
#: Memory of a tile on the CPU, in bytes, if the caller set no limit.
_CPU_BYTES = 2**30
#: Largest number of entries of a tile, because positions of entries are int32.
_MOST_ENTRIES = 2**30
#: Number of bytes that are copied between the host and a GPU, or gathered for the GPU, at a time.
_PIECE_BYTES = 2**26
_NUM_BUFFERS = 4
#: Data on the host that is larger than this number of bytes is copied to page-locked buffers first, so that
#: the host does not wait for the GPU.
_STAGED_BYTES = 2**20
#: Share of a GPU's memory that `torch.cuda.set_per_process_memory_fraction` allows. Older versions of PyTorch
#: cannot return it; there it counts as 1.
_memory_share: Callable[[torch.device], float] = getattr(
    torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0
)


class Graph:
    """A whole graph, and derived numbers per node, such as degrees, which tiles index.

    Args:
        adj: square structure.
        device: device of the numbers.
    """

    def __init__(self, adj: Adjacency, device: torch.device) -> None:
        self.adj, self._device = adj, device
        self._found: dict[Hashable, Tensor] = {}

    def numbers(self, key: Hashable, build: Callable[[Adjacency], Tensor]) -> Tensor:
        """The result of ``build`` for the structure, on the device, cached.

        Args:
            key: name of the result in the cache.
            build: computes the numbers; called at most once per key.
        """
        if key not in self._found:
            self._found[key] = build(self.adj).to(self._device)
        return self._found[key]


@dataclass(frozen=True)
class Tile:
    """Some destinations and all of their neighbours.

    Attributes:
        adj: structure (num_dst, num_src).
        sources: features of the columns, (num_src, ...). If ``source_ids`` is given, the first columns are
            the destinations.
        own: features of the destinations, (num_dst, ...).
        ids: node ids of the destinations, int64 (num_dst,).
        source_ids: node ids of the columns, int64 (num_src,); None: all nodes.
        graph: the whole graph.
    """

    adj: Adjacency
    sources: Tensor
    own: Tensor
    ids: Tensor
    source_ids: Tensor | None
    graph: Graph

    def of_sources(self, factor: Tensor) -> Tensor:
        """Selects the factors of the columns.

        Args:
            factor: (num_nodes,), one per node of the graph.
        """
        return factor if self.source_ids is None else factor[self.source_ids]


@dataclass(frozen=True)
class Stage:
    """Describes how tiles compute a layer of a model.

    Attributes:
        name: name of the layer, for messages.
        compute: computes the results (num_dst, ...) from a tile and, if the sums were computed before, the
            tile's sums.
        reads: the features that the stage reads. ``"own"``: only the features of the destinations.
            ``"sources"``: the features of the tile's sources, which are gathered first. ``"columns"``: the
            stage only sums sources, so a tile may also have the features of all nodes.
        adds_loops: whether every destination gets one loop, in place of its own loops.
        reads_out_degree: whether the stage reads out-degrees, which must be those of the whole graph.
        sums: if the layer begins with sums over neighbours: computes these sums, (num_dst, width). Each
            column of the sums depends only on the same column of the sources. None: the layer does not begin
            with sums.
    """

    name: str
    compute: Callable[[Tile, Tensor | None], Tensor]
    reads: Literal["own", "sources", "columns"] = "sources"
    adds_loops: bool = False
    reads_out_degree: bool = False
    sums: Callable[[Tile], Tensor] | None = None


@dataclass(frozen=True)
class Placement:
    """Device, memory limit and processes of an inference.

    Attributes:
        device: device that computes the layers.
        memory: limit of used device memory in bytes; None: no limit.
        tile: number of destinations per tile; None: as many as fit.
        group: processes that divide the destinations; None: only this process.
    """

    device: torch.device
    memory: int | None = None
    tile: int | None = None
    group: Any = None

    def free(self) -> int:
        """Bytes that may still be allocated."""
        if self.device.type != "cuda":
            return _CPU_BYTES if self.memory is None else self.memory
        taken = torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        share = _memory_share(self.device)
        free = min(free + torch.cuda.memory_reserved(self.device), int(share * total)) - taken
        return free if self.memory is None else min(free, self.memory - taken)

    def fits(self, size: int) -> bool:
        """Returns whether the device has memory for ``size`` bytes in addition to tiles.

        Args:
            size: number of bytes.
        """
        return self.device.type != "cuda" or size <= (1 - _KEPT_FOR_TILES) * self.free()

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return 1 if self.group is None else dist.get_world_size(self.group)


@dataclass
class _Rows:
    """Features of some nodes.

    Attributes:
        data: features (num_rows, ...).
        ids: node of every row, int64, ascending; None: all nodes.
        place: row of every node, int32 (num_nodes,); None: the node id.
        is_given: whether the caller owns the features, so their memory is not freed.
    """

    data: Tensor
    ids: Tensor | None = None
    place: Tensor | None = None
    is_given: bool = False


@dataclass
class _Size:
    """Numbers of rows, entries and sources of a tile, or bytes for each of them."""

    rows: int
    entries: int
    sources: int

    def bytes(self, costs: _Size) -> int:
        return self.rows * costs.rows + self.entries * costs.entries + self.sources * costs.sources


def run(
    adj: Adjacency,
    x: Tensor,
    stages: Sequence[Stage],
    placement: Placement,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the last stage's result for some or all nodes.

    Args:
        adj: square structure on the device or on the CPU.
        x: features (num_nodes, ...) on the device or on the CPU, also memory-mapped.
        stages: the layers.
        placement: device, memory limit and processes.
        rows: nodes to compute results for, int64 (num_rows,); None: all.
        out: tensor for the results, (num_rows, ...); None: a new tensor on the device, or on the host if it
            does not fit on the device.
    """
    # event.record() uses the current device's stream. The model may be on another GPU.
    current = torch.cuda.device(placement.device) if placement.device.type == "cuda" else nullcontext()
    with current, torch.no_grad():
        order: Tensor | None = None
        if rows is not None:
            rows, order = rows.unique(return_inverse=True)
            if order.numel() == rows.numel() and bool((order[1:] > order[:-1]).all()):
                order = None
        with closing(_Tiles(adj, placement)) as tiles:
            wanted = [None if rows is None else rows.to(tiles.col.device)]
            for stage in reversed(stages):
                wanted.append(wanted[-1] if stage.reads == "own" else tiles.with_sources(wanted[-1]))
            wanted.reverse()
            stored = tiles.stored(x, wanted[0])
            for number, (stage, ids) in enumerate(zip(stages, wanted[1:], strict=True), 1):
                target = out if number == len(stages) and order is None else None
                result = tiles.layer(stage, stored, ids, target)
                del stored  # before the whole result is gathered in one place
                stored = tiles.rows(result.whole(), ids)
                del result
        found = stored.data
        if order is not None:
            found = found[order.to(found.device)]
            if out is not None:
                found = out.copy_(found)
    return found


class _Tiles:
    """Cuts a graph into tiles and computes layers on them."""

    def __init__(self, adj: Adjacency, placement: Placement) -> None:
        self._placement, self._device = placement, placement.device
        self._buffers = _Buffers()
        self._locked: list[int] = []  # addresses of page-locked memory
        self._memory_of_sums: Tensor | None = None
        self.num_nodes = adj.num_dst
        self.rowptr, self.col = adj.rowptr, adj.col
        if self.col.device != self._device and placement.fits(2 * (self.rowptr.nbytes + self.col.nbytes)):
            self.rowptr, self.col = self.rowptr.to(self._device), self._sent(self.col)
        self._graph = Graph(adj, self._device)
        self._host: HostRows | None = None
        self._size = _Size(0, 0, 0)  # size of the latest tile

    def close(self) -> None:
        """Waits for copies from the host, and unlocks the structure's memory."""
        try:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        finally:
            while self._locked:
                torch.cuda.cudart().cudaHostUnregister(self._locked.pop())

    # ---------------------------------------------------------------- nodes that are needed

    def with_sources(self, ids: Tensor | None) -> Tensor | None:
        """Ids of the given nodes and all of their sources, ascending; None: all nodes."""
        if ids is None:
            return None
        is_needed = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.col.device)
        is_needed[ids] = True
        upto = self._upto(ids)
        start = 0
        while start < ids.numel():
            stop = self._end(upto, start, _MOST_ENTRIES // 16, ids.numel())
            is_needed[self._entries(ids[start:stop])[1].long()] = True
            start = stop
        found = is_needed.nonzero().flatten()
        return None if found.numel() == self.num_nodes else found

    def stored(self, x: Tensor, ids: Tensor | None) -> _Rows:
        """The features that the first layer reads; if only some are needed, they are sent to the device."""
        x = x.contiguous()
        if x.device == self._device or ids is None:
            return _Rows(x, is_given=True)
        if not self._placement.fits(ids.numel() * x[:1].nbytes):
            return _Rows(x, is_given=True)  # every tile gathers the rows that it reads
        return self.rows(self._gathered(x, ids.to(self._device)), ids)

    def rows(self, data: Tensor, ids: Tensor | None) -> _Rows:
        """Wraps the features of some nodes."""
        if ids is None:
            return _Rows(data)
        place = torch.full((self.num_nodes,), -1, dtype=torch.int32, device=self._device)
        ids = ids.to(self._device)
        place[ids] = torch.arange(ids.numel(), dtype=torch.int32, device=self._device)
        return _Rows(data, ids, place)

    # ---------------------------------------------------------------- a layer

    def layer(self, stage: Stage, stored: _Rows, ids: Tensor | None, target: Tensor | None) -> _Result:
        """The results of a stage for some nodes.

        Args:
            stage: the layer.
            stored: the features that the layer reads.
            ids: the nodes, int64, ascending, on the structure's device; None: all nodes.
            target: tensor for the results; None: a new tensor.
        """
        placement, is_given = self._placement, stored.is_given
        if stored.data.device != self._device and placement.fits(stored.data.nbytes):
            stored = _Rows(self._sent(stored.data), stored.ids, stored.place)
            is_given = False
        count = self.num_nodes if ids is None else ids.numel()
        upto = self._upto(ids)
        first = self._compute(stage, stored, ids, 0, min(count, 1))
        shape = (count, *first.shape[1:])
        if target is not None and target.shape != shape:
            raise ValueError(
                f"out: expected shape {shape}, as the last layer gives, got {tuple(target.shape)}"
            )
        if width := self._width_of_columns(stage, stored, ids, first):
            return self._by_columns(stage, stored, width, first, target)
        self._memory_of_sums = None
        is_freed = stored.data.is_cuda and not is_given
        freed = stored.data.nbytes if is_freed else 0
        result = _Result(shape, first.dtype, placement, target, freed)
        budget = _TILE_SHARE * placement.free()
        costs = self._costs(stage, stored, first)
        entries, most_rows = self._limits(budget, costs)
        ranks, start = placement.num_ranks, 0
        rank = 0 if ranks == 1 else dist.get_rank(placement.group)
        while start < count:
            bounds = [start]
            while len(bounds) <= ranks:
                bounds.append(self._end(upto, bounds[-1], entries, min(bounds[-1] + most_rows, count)))
            begin, end = bounds[rank], bounds[rank + 1]
            try:
                part = self._compute(stage, stored, ids, begin, end) if end > begin else first[:0]
            except torch.OutOfMemoryError:
                if ranks > 1 or end - begin <= 1:
                    raise
                entries, most_rows = max(entries // 2, 1), max((end - begin) // 2, 1)
                torch.cuda.empty_cache()
                continue
            if ranks == 1:
                result.write(start, part)
            else:
                for place, piece in zip(bounds, self._exchanged(part, bounds), strict=False):
                    result.write(place, piece)
            del part  # frees memory before the next tile allocates as much
            start = bounds[-1]
            if placement.tile is None:
                growth = self._agreed([budget / max(self._size.bytes(costs), 1)])[0]
                growth = min(max(growth, 0.5), 2.0)
                entries = min(int(entries * growth) + 1, _MOST_ENTRIES)
                most_rows = int(most_rows * growth) + 1
        result.finish()
        return result

    def _width_of_columns(self, stage: Stage, stored: _Rows, ids: Tensor | None, first: Tensor) -> int:
        """Number of feature columns to send to the device at a time; 0: send gathered rows instead.

        A row is sent for every tile that reads it, at most once per entry. A column is sent once, but the
        structure is sent again for every group of columns, and the sums are written and read again.
        """
        data = stored.data
        is_all = ids is None and stored.ids is None and self._placement.num_ranks == 1
        if stage.sums is None or not is_all or data.dim() != 2 or data.device == self._device:
            return 0
        least = max(_ROW_BYTES // data.itemsize, 1)
        most = int(_SHARE_OF_COLUMNS * self._placement.free()) // max(self.num_nodes * data.itemsize, 1)
        if most < least:
            return 0
        parts = -(-data.size(1) // (most // least * least))
        structure = 0 if self.col.device == self._device else self.rowptr.nbytes + self.col.nbytes
        columns = parts * structure + 3 * data.nbytes
        if 2 * columns > self.col.numel() * data[:1].nbytes:
            return 0
        return -(-data.size(1) // (parts * least)) * least

    def _by_columns(
        self, stage: Stage, stored: _Rows, width: int, first: Tensor, target: Tensor | None
    ) -> _Result:
        """The results of a stage for all nodes. Sums are computed for ``width`` columns at a time.

        With F bytes of features, S of structure, R of results and P parts, 3 F + P S bytes are sent to the
        device (columns, features of destinations, sums; the structure) and F + R bytes come back. All but the
        structure is copied through page-locked buffers on the host.

        Args:
            stage: a layer with ``sums``.
            stored: the features of all nodes, on the host.
            width: number of columns.
            first: the result of one node, for its shape and dtype.
            target: tensor for the results; None: a new tensor.
        """
        data, placement = stored.data, self._placement
        self._lock_structure()
        sums = self._sums(stage, data, width)
        shape = (self.num_nodes, *first.shape[1:])
        if target is None and not stored.is_given and data.shape == shape and data.dtype == first.dtype:
            target = data  # a node's features are read before its result is written
        result = _Result(shape, first.dtype, placement, target, 0)

        def results(begin: int, end: int) -> Tensor:
            nodes = slice(begin, end)
            numbers = torch.arange(begin, end, device=self._device)
            own = self._sent(data[nodes])
            of_tile = torch.cat([self._sent(part[nodes]) for part in sums], 1)
            adj = self._structure(stage, *_no_entries(numbers), self.num_nodes, None)
            return stage.compute(Tile(adj, own, own, numbers, None, self._graph), of_tile)

        self._write_tiles(result, results, self._costs(stage, stored, first), None)
        return result

    def _sums(self, stage: Stage, data: Tensor, width: int) -> list[Tensor]:
        """A stage's sums on the host, (num_nodes, columns) each, of ``width`` columns or less at a time."""
        if self._memory_of_sums is None or self._memory_of_sums.nbytes < data.nbytes:
            self._memory_of_sums = None  # frees the old memory before the new memory is allocated
            self._memory_of_sums = torch.empty(data.nbytes, dtype=torch.uint8)
        memory = self._memory_of_sums[: data.nbytes].view(data.dtype)
        least = max(_ROW_BYTES // data.itemsize, 1)
        sums: list[Tensor] = []
        begin = 0
        while begin < data.size(1):
            part = data[:, begin : begin + width]
            stop = begin + part.size(1)
            target = memory[self.num_nodes * begin : self.num_nodes * stop].view(part.shape)
            try:
                self._sum_part(stage, part, target)
            except torch.OutOfMemoryError:
                if width <= least:
                    raise
                width = max(width // (2 * least), 1) * least
                continue
            sums.append(target)
            begin = stop
        return sums

    def _sum_part(self, stage: Stage, part: Tensor, target: Tensor) -> None:
        """Writes a stage's sums of some columns of the features to the host."""
        assert stage.sums is not None
        sum_neighbours = stage.sums
        sources = self._sent(part)

        def results(begin: int, end: int) -> Tensor:
            numbers = torch.arange(begin, end, device=self._device)
            rowptr, col = self._entries(slice(begin, end))
            rowptr, col = rowptr.to(self._device), _aligned(self._sent(col))
            adj = self._structure(stage, rowptr, col, self.num_nodes, None)
            return sum_neighbours(Tile(adj, sources, sources[begin:end], numbers, None, self._graph))

        result = _Result(part.shape, part.dtype, self._placement, target, 0)
        costs = _Size(rows=32 + 4 * part[:1].nbytes, entries=8, sources=0)
        self._write_tiles(result, results, costs, self.rowptr)

    def _write_tiles(
        self, result: _Result, results: Callable[[int, int], Tensor], costs: _Size, upto: Tensor | None
    ) -> None:
        """Writes the results of all nodes tile by tile. A tile is halved if memory runs out.

        Args:
            result: the rows are written to it.
            results: computes the results of the nodes from a first number to a last number, exclusive.
            costs: estimated memory of a tile.
            upto: see `_upto`; None: a tile reads no entries.
        """
        entries, rows = self._limits(_TILE_SHARE * self._placement.free(), costs)
        begin = 0
        try:
            while begin < self.num_nodes:
                last = min(begin + rows, self.num_nodes)
                end = last if upto is None else self._end(upto, begin, entries, last)
                try:
                    part = results(begin, end)
                except torch.OutOfMemoryError:
                    if end - begin <= 1:
                        raise
                    entries, rows = max(entries // 2, 1), max((end - begin) // 2, 1)
                    torch.cuda.empty_cache()
                    continue
                result.write(begin, part)
                del part  # frees memory before the next tile allocates as much
                begin = end
        finally:
            result.finish()

    def _lock_structure(self) -> None:
        """Page-locks the columns' memory in place, as they are sent once for each part of the features.

        If the driver refuses, for example because the memory is a file that is mapped for reading, the
        columns are sent through buffers, like the features.
        """
        if self._device.type != "cuda" or self.col.is_cuda or self._locked or self.col.is_pinned():
            return
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(self.col.data_ptr(), self.col.nbytes, 0) == runtime.cudaError.success:
            self._locked.append(self.col.data_ptr())
            return
        # The refusal remains CUDA's last error, which the next kernel launch reports. This launch clears it.
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def _costs(self, stage: Stage, stored: _Rows, first: Tensor) -> _Size:
        """Estimated bytes per row, per entry and per source of a tile."""
        source, result = stored.data[:1].nbytes, first[:1].nbytes
        ranks = self._placement.num_ranks
        pieces = 4 if ranks == 1 else 6 + ranks  # includes a tile of each process and buffers of the exchange
        costs = _Size(rows=32 + 2 * source + pieces * result, entries=4, sources=0)
        if self._is_gathered(stage, stored.data.device == self._device):
            is_transformed = stage.reads == "sources"
            costs.entries = 64 if stage.adds_loops else 24
            costs.sources = 32 + source + is_transformed * (source + 3 * result)
        elif stored.place is not None:
            costs.entries = 16
        return costs

    def _limits(self, budget: float, costs: _Size) -> tuple[int, int]:
        """Largest numbers of entries and rows of the first tile, if every entry had a different source."""
        entries = budget / (4 * (costs.entries + costs.sources))
        rows = budget / (4 * costs.rows)
        if self._placement.tile is not None:
            return _MOST_ENTRIES, self._placement.tile
        entries, rows = self._agreed([entries, rows])
        return min(max(int(entries), 1), _MOST_ENTRIES), max(int(rows), 1)

    def _agreed(self, numbers: list[float]) -> list[float]:
        """The minimum of each number over all processes."""
        if self._placement.num_ranks == 1:
            return numbers
        smallest = torch.tensor(numbers, dtype=torch.float64, device=self._wire)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._placement.group)
        return smallest.tolist()

    @property
    def _wire(self) -> torch.device:
        """Device of the tensors that processes exchange."""
        return torch.device("cpu") if dist.get_backend(self._placement.group) == "gloo" else self._device

    def _exchanged(self, part: Tensor, bounds: list[int]) -> list[Tensor]:
        """Collects the tiles of all processes."""
        sizes = [stop - start for start, stop in pairwise(bounds)]
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: part.size(0)] = part
        whole = padded.flatten().view(torch.uint8).to(self._wire)  # gloo does not support every dtype
        pieces = [torch.empty_like(whole) for _ in sizes]
        dist.all_gather(pieces, whole, group=self._placement.group)
        found = [piece.view(part.dtype).view(padded.shape) for piece in pieces]
        return [piece[:size] for piece, size in zip(found, sizes, strict=True)]

    # ---------------------------------------------------------------- a tile

    @staticmethod
    def _is_gathered(stage: Stage, is_here: bool) -> bool:
        return stage.reads == "sources" or (stage.reads == "columns" and not is_here)

    def _compute(self, stage: Stage, stored: _Rows, ids: Tensor | None, start: int, stop: int) -> Tensor:
        """A stage's results for the destinations from ``start`` to ``stop``."""
        nodes: Tensor | slice = slice(start, stop) if ids is None else ids[start:stop]
        numbers = torch.arange(start, stop, device=self._device) if ids is None else ids[start:stop]
        numbers = numbers.to(self._device)
        is_here = stored.data.device == self._device
        self._size = _Size(stop - start, 0, 0)
        if stage.reads == "own":
            if stored.ids is None and ids is None:
                own = self._sent(stored.data[nodes])
            else:
                own = self._features(stored, numbers)
            adj = self._structure(stage, *_no_entries(numbers), stop - start, numbers)
            return stage.compute(Tile(adj, own, own, numbers, numbers, self._graph), None)
        rowptr, col = self._entries(nodes)
        rowptr, col = rowptr.to(self._device), _aligned(self._sent(col))
        if not self._is_gathered(stage, is_here):
            if stored.ids is not None:
                assert stored.place is not None
                col = stored.place[col.long()]
            source_ids, sources = stored.ids, stored.data
            if stored.ids is None and ids is None:
                own = _aligned(stored.data[nodes])
            else:
                own = self._features(stored, numbers)
        else:
            source_ids, col = self._renumbered(numbers, col)
            sources = self._features(stored, source_ids)
            own = sources[: stop - start]
        self._size = _Size(stop - start, col.numel(), sources.size(0))
        adj = self._structure(stage, rowptr, col, sources.size(0), source_ids)
        return stage.compute(Tile(adj, sources, own, numbers, source_ids, self._graph), None)

    def _structure(
        self, stage: Stage, rowptr: Tensor, col: Tensor, num_src: int, source_ids: Tensor | None
    ) -> Adjacency:
        num_dst = rowptr.numel() - 1
        if stage.adds_loops:
            rowptr, col = _with_loops(rowptr, col)
        loops = () if stage.adds_loops else None
        adj = Adjacency(rowptr, col, (num_dst, num_src), loop_edge=loops, group_rows="none")
        adj.has_sorted_slices = not col.is_cuda
        if stage.reads_out_degree:
            degree = self._graph.numbers("out_degree", lambda whole: whole.out_degree())
            adj._built.results["out_degree"] = degree if source_ids is None else degree[source_ids]
        return adj

    def _renumbered(self, numbers: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of a tile's nodes, destinations first, and the position of every column among these nodes."""
        column = col.long()
        is_source = torch.zeros(self.num_nodes, dtype=torch.bool, device=self._device)
        is_source[column] = True
        is_source[numbers] = False
        source_ids = torch.cat([numbers, is_source.nonzero().flatten()])
        del is_source
        number = torch.empty(self.num_nodes, dtype=torch.int32, device=self._device)
        number[source_ids] = torch.arange(source_ids.numel(), dtype=torch.int32, device=self._device)
        return source_ids, number[column]

    def _sent(self, data: Tensor) -> Tensor:
        """Sends data to the device, contiguous. Page-locked data must not be changed before it is sent."""
        if self._device.type != "cuda" or data.is_cuda:
            return data.contiguous().to(self._device)
        if data.is_contiguous() and data.is_pinned():
            return data.to(self._device, non_blocking=True)
        if data.nbytes <= _STAGED_BYTES:
            return data.contiguous().to(self._device)
        out = torch.empty(data.shape, dtype=data.dtype, device=self._device)
        _send(data, out, self._buffers)
        return out

    def _features(self, stored: _Rows, nodes: Tensor) -> Tensor:
        return self._gathered(stored.data, nodes if stored.place is None else stored.place[nodes].long())

    def _gathered(self, table: Tensor, index: Tensor) -> Tensor:
        """Gathers rows of a table to the device."""
        if self._device.type != "cuda":
            return table.index_select(0, index)
        if table.is_cuda:
            return gather_on_cuda(table, index)
        out = torch.empty(index.numel(), *table.shape[1:], dtype=table.dtype, device=self._device)
        if not out.numel():
            return out
        if self._host is None:
            self._host = HostRows(self._device)
        rows = max(_PIECE_BYTES // out[0].nbytes, 1)
        with deferred() as gathers:
            for part, numbers in zip(out.split(rows), index.split(rows), strict=True):
                self._host.complete(table, numbers, part, None)
        for gather in gathers:
            gather.wait()
        return out

    # ---------------------------------------------------------------- rows

    def _upto(self, ids: Tensor | None) -> Tensor:
        """Number of entries before each of the given nodes, int64, then the number of all their entries."""
        if ids is None:
            return self.rowptr
        upto = torch.zeros(ids.numel() + 1, dtype=torch.int64, device=ids.device)
        torch.cumsum(self.rowptr[ids + 1] - self.rowptr[ids], 0, out=upto[1:])
        return upto

    @staticmethod
    def _end(upto: Tensor, start: int, entries: int, last: int) -> int:
        """End of the tile that begins at ``start``; a tile has at least one row."""
        if start >= last:
            return start
        end = int(torch.searchsorted(upto, upto[start] + entries, right=True)) - 1
        return min(max(end, start + 1), last)

    def _entries(self, nodes: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Row pointers and columns of some nodes, on the structure's device."""
        if isinstance(nodes, slice):
            rowptr = self.rowptr[nodes.start : nodes.stop + 1]
            first, last = int(rowptr[0]), int(rowptr[-1])
            return rowptr - first, self.col[first:last]
        return select_rows(self.rowptr, self.col, nodes)


def _no_entries(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Pointers and columns of rows without entries."""
    rowptr = torch.zeros(numbers.numel() + 1, dtype=torch.int64, device=numbers.device)
    return rowptr, rowptr[:0].int()


def _with_loops(rowptr: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Removes all loops, then adds one loop at the end of every row."""
    num_rows = rowptr.numel() - 1
    row = expand_rows(rowptr, col.numel())
    is_kept = col != row
    row, col = row[is_kept], col[is_kept]
    counts = torch.bincount(row, minlength=num_rows).add_(1)
    rowptr = torch.zeros_like(rowptr)
    torch.cumsum(counts, 0, out=rowptr[1:])
    merged = torch.empty(col.numel() + num_rows, dtype=torch.int32, device=col.device)
    # The number of loops before an entry is the number of rows before it.
    merged[torch.arange(col.numel(), device=col.device) + row] = col
    merged[rowptr[1:] - 1] = torch.arange(num_rows, dtype=torch.int32, device=col.device)
    return rowptr, merged


def _aligned(part: Tensor) -> Tensor:
    """Copies a part of a tensor that does not start at a multiple of 16 bytes, as kernels require."""
    return part.clone() if part.data_ptr() % 16 else part


def _send(data: Tensor, out: Tensor, buffers: _Buffers) -> None:
    """Copies data of the host to a GPU; while one piece is sent, the host copies the next.

    The data may be changed afterwards. The copies to the GPU are in the order of its current stream.
    """
    if not data.numel():
        return
    rows = max(_PIECE_BYTES // data[:1].nbytes, 1)
    for source, target in zip(data.split(rows), out.split(rows), strict=True):
        buffer = buffers.next(source)
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        buffers.used()


class _Buffers:
    """Page-locked buffers. A buffer is used again only after its last transfer has ended."""

    def __init__(self) -> None:
        self._memory: list[Tensor | None] = [None] * _NUM_BUFFERS
        self._free: list[torch.cuda.Event | Future[None] | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def next(self, like: Tensor) -> Tensor:
        """Memory for a piece with the shape and dtype of ``like``."""
        free = self._free[self._turn]
        if isinstance(free, Future):
            free.result()
        elif free is not None:
            free.synchronize()
        memory = self._memory[self._turn]
        if memory is None or memory.nbytes < like.nbytes:
            memory = torch.empty(max(like.nbytes, _PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
            self._memory[self._turn] = memory
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def used(self, until: Future[None] | None = None) -> None:
        """Marks the last buffer as in use until the stream reaches this point, or ``until`` is done."""
        if until is None:
            event = torch.cuda.Event()
            event.record()
            self._free[self._turn] = event
        else:
            self._free[self._turn] = until
        self._turn = (self._turn + 1) % _NUM_BUFFERS


class _Result:
    """A result that is written tile by tile; the host stores a tile while the GPU computes the next one.

    If a result fits on the device, but not together with its inputs, its first rows are on the device, and
    the other rows on the host until :meth:`whole`.

    Args:
        shape: shape (num_rows, ...).
        dtype: dtype of the rows.
        placement: device and memory limit.
        target: tensor for the rows; None: a new tensor on the device or the host.
        freed: bytes on the device that are freed before :meth:`whole` is called.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placement: Placement,
        target: Tensor | None,
        freed: int,
    ) -> None:
        self._placement, self._device = placement, placement.device
        self._num_here = 0
        size = math.prod(shape) * dtype.itemsize
        if target is None and not placement.fits(size):
            target = torch.empty(shape, dtype=dtype)
            here = int(_SHARE_HERE * placement.free())
            if placement.free() + freed - here >= size:
                self._num_here = here * shape[0] // size
        self._target = torch.empty(shape, dtype=dtype, device=self._device) if target is None else target
        self._here = torch.empty(self._num_here, *shape[1:], dtype=dtype, device=self._device)
        self._buffers: _Buffers | None = None
        self._stream: Any = None  # CUDA stream of the copies to the host
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def write(self, start: int, part: Tensor) -> None:
        """Writes consecutive rows.

        Args:
            start: number of the first row.
            part: the rows, (num_rows, ...).
        """
        count = min(max(self._num_here - start, 0), part.size(0))
        self._here[start : start + count] = part[:count]
        start, part = start + count, part[count:]
        target = self._target[start : start + part.size(0)]
        if target.device == part.device or target.is_cuda or not part.numel():
            target.copy_(part)
            return
        rows = max(_PIECE_BYTES // part[:1].nbytes, 1)
        if self._buffers is None:
            self._buffers, self._stream = _Buffers(), torch.cuda.Stream(self._device)
            self._worker = ThreadPoolExecutor(1, "fastsparse-results")
        assert self._worker is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for source, piece in zip(part.split(rows), target.split(rows), strict=True):
            buffer = self._buffers.next(source)
            arrived = torch.cuda.Event()
            with torch.cuda.stream(self._stream):
                buffer.copy_(source, non_blocking=True)
                arrived.record()
            stored = self._worker.submit(_store, piece, buffer, arrived, source)
            self._pending.append(stored)
            self._buffers.used(stored)

    def finish(self) -> None:
        """Waits until everything is written.

        Raises:
            Exception: the first error of a write.
        """
        if self._worker is None:
            return
        self._worker.shutdown()  # waits for all pieces
        pending, self._pending = self._pending, []
        self._buffers = self._worker = None
        for stored in pending:
            stored.result()

    def whole(self) -> Tensor:
        """Returns all rows in one tensor."""
        count = self._num_here
        if not count:
            return self._target
        if self._placement.free() >= self._target.nbytes:
            data = torch.empty_like(self._target, device=self._device)
            data[:count] = self._here
            _send(self._target[count:], data[count:], _Buffers())
            return data
        self._num_here = 0
        self.write(0, self._here)
        self.finish()
        return self._target


def _store(target: Tensor, buffer: Tensor, arrived: torch.cuda.Event, source: Tensor) -> None:
    """Copies a piece from its buffer. The argument ``source`` keeps memory on the GPU alive until then."""
    arrived.synchronize()
    with torch.no_grad():
        target.copy_(buffer)
