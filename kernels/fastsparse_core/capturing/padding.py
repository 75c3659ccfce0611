"""Batches padded to sizes of a record: where rows of padding are, and what they hold.

Padding is a graph of its own: nodes that copy the batch's first one, with edges among themselves. So
whatever a layer does per node, edge or graph has a meaning there too, and reaches nothing else. What mixes
all rows has a twin that leaves them out (`twins`).

Of sampled neighbours every hop is padded by itself, so that layers may leave hops out, as PyG's
``trim_to_layer`` does. Rows of two seeds and three neighbours, with room for four and five:

    hop    0  0  0  0  1  1  1  1  1
    taken  0  1  0  0  2  3  4  0  0
           seeds |     neighbours |
                 padding          padding
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Room beyond the greatest size seen, as a share of it; where sizes vary by more, as much as they vary.
ROOM = 1 / 64
#: Entries of padding for each of its nodes, about, as far as sizes seen tell: a row is not cut.
_EDGES_PER_NODE = 8


@dataclass(frozen=True)
class Sizes:
    """How many nodes and edges a batch has, by hop where it consists of sampled neighbours.

    Attributes:
        nodes: those of every hop, seeds first; or all.
        edges: those of every hop, whose destinations are in the hop before; or all.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Room(Sizes):
    """How many nodes and edges there is room for. No two sums of the first hops are equal, and all are odd.

    Attributes:
        spare: how many nodes of every hop, the last ones, are always padding: edges of padding connect them.
    """

    spare: tuple[int, ...]

    def holds(self, sizes: Sizes) -> bool:
        """Whether a batch of those sizes fits."""
        return all(
            count + spare <= room
            for count, spare, room in zip(sizes.nodes, self.spare, self.nodes, strict=True)
        ) and all(count <= room for count, room in zip(sizes.edges, self.edges, strict=True))

    def doubled(self) -> Room:
        """Much more room."""
        return _room([2 * size for size in self.nodes], [2 * size for size in self.edges], self.nodes)

    def cut(self, tensor: Tensor, sizes: Sizes) -> Tensor:
        """The batch's rows of a tensor with rows of padding."""
        for rooms, counts in ((self.nodes, sizes.nodes), (self.edges, sizes.edges)):
            ends = list(itertools.accumulate(rooms))
            if tensor.dim() and tensor.size(0) in ends:
                hops = ends.index(tensor.size(0)) + 1
                starts = [0, *ends][:hops]
                parts = [tensor[start : start + count] for start, count in zip(starts, counts, strict=False)]
                return parts[0] if hops == 1 else torch.cat(parts)
        return tensor


def room_for(seen: Sequence[Sizes]) -> Room:
    """Room for batches like those seen, and somewhat larger ones."""
    nodes, edges = (list(zip(*(getattr(sizes, name) for sizes in seen))) for name in ("nodes", "edges"))  # noqa: B905
    more_edges = [max(_more(column), 8) for column in edges]
    spare = []
    for hop in range(len(nodes)):
        around = more_edges[max(hop - 1, 0) : hop + 1]  # its nodes are sources and destinations of these
        spare.append(max(*(count // _EDGES_PER_NODE for count in around), 4))
    rooms = [max(column) + _more(column) + least for column, least in zip(nodes, spare, strict=True)]
    return _room(
        rooms, [max(column) + more for column, more in zip(edges, more_edges, strict=True)], tuple(spare)
    )


def _more(column: Sequence[int]) -> int:
    return max(max(column) - min(column), int(max(column) * ROOM))


def _room(nodes: Sequence[int], edges: Sequence[int], spare: tuple[int, ...]) -> Room:
    """Room of at least those sizes: rows of nodes and of edges are told apart by their number."""
    sums: set[int] = set()
    made: list[tuple[int, ...]] = []
    for sizes in (nodes, edges):
        rooms: list[int] = []
        for size in sizes:
            total = sum(rooms) + size
            total += 1 - total % 2
            while total in sums:
                total += 2
            sums.add(total)
            rooms.append(total - sum(rooms))
        made.append(tuple(rooms))
    return Room(made[0], made[1], spare)


@dataclass(frozen=True)
class Rows:
    """Which rows of tensors with so many rows are the batch's.

    Attributes:
        room: number of rows.
        mask: bool (room,).
        count: how many are the batch's, float32 ().
    """

    room: int
    mask: Tensor
    count: Tensor


class Places:
    """Where the rows of a batch are in memory with room for more.

    Args:
        room: number of rows, by hop.
        device: of the tensors.

    Attributes:
        starts: the first row of every hop, and the number of all.
        rows: those of the first hop, of the first two, ...
        taken: int64, the row of the batch that every row holds: of padding the first.
        ends: int64, ends of the hops in the batch.
        moved: int64, by how much rows of every hop come later than in the batch.
    """

    def __init__(self, room: Sequence[int], device: torch.device) -> None:
        self.starts = [0, *itertools.accumulate(room)]
        total = self.starts[-1]
        self._row = torch.arange(total, device=device)
        hops = torch.arange(len(room)).repeat_interleave(torch.tensor(room))
        self._hop = hops.to(device) if len(room) > 1 else torch.zeros(1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(total, dtype=torch.bool, device=device)
        self.taken = torch.zeros(total, dtype=torch.int64, device=device)
        self.ends = self.moved = torch.zeros(len(room), dtype=torch.int64, device=device)
        counts = torch.zeros(len(room), device=device)
        self._counts = counts
        self.rows = [Rows(end, self.mask[:end], counts[hop]) for hop, end in enumerate(self.starts[1:])]

    @property
    def has_hops(self) -> bool:
        """Whether there are several."""
        return len(self.rows) > 1

    def numbers(self, counts: Sequence[int]) -> list[int]:
        """What `write` reads on the device, of a batch with so many rows."""
        ends = list(itertools.accumulate(counts))
        starts = [0, *ends]
        last = [start + count for start, count in zip(self.starts, counts, strict=False)]
        moved = [start - first for start, first in zip(self.starts, starts, strict=False)][: len(counts)]
        return [*ends, *moved, *last]

    def write(self, numbers: Tensor) -> None:
        """Says which rows are the batch's."""
        self.ends, self.moved, last = numbers.view(3, -1)
        torch.lt(self._row, last[self._hop], out=self.mask)
        torch.sub(self._row, self.moved[self._hop], out=self.taken)
        self.taken.mul_(self.mask)
        self._counts.copy_(self.ends)


class BatchPlaces:
    """Where the nodes and edges of a batch are.

    Args:
        room: for them.
        device: of the tensors.

    Attributes:
        nodes: places of nodes.
        edges: places of edges.
    """

    def __init__(self, room: Room, device: torch.device) -> None:
        self.room = room
        self.nodes, self.edges = Places(room.nodes, device), Places(room.edges, device)
        self._padding = _edges_of_padding(room, self.nodes.starts).to(device)

    def write(self, sizes: Sizes) -> None:
        """Says how many there are of everything."""
        numbers = self.nodes.numbers(sizes.nodes)
        of_nodes = len(numbers)
        numbers += self.edges.numbers(sizes.edges)
        device = self._padding.device
        if device.type == "cuda":  # the host does not wait
            held = torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)
        else:
            held = torch.tensor(numbers, device=device)
        self.nodes.write(held[:of_nodes])
        self.edges.write(held[of_nodes:])

    def write_edges(self, held: Tensor, edge_index: Tensor) -> None:
        """Copies edges (2, E), between nodes as numbered in the batch; those of padding connect padding."""
        padding = self._padding.to(held.dtype)
        if not edge_index.size(1):
            held.copy_(padding)
            return
        ends = edge_index.index_select(1, self.edges.taken)
        if self.nodes.has_hops:
            ends = ends + self.nodes.moved[torch.bucketize(ends.long(), self.nodes.ends, right=True)]
        torch.where(self.edges.mask, ends.to(held.dtype), padding, out=held)


def write_rows(held: Tensor, tensor: Tensor, places: Places) -> None:
    """Copies rows, of all hops or of the first ones, to their places; those of padding copy the first one."""
    if tensor.size(0):
        torch.index_select(tensor.detach(), 0, places.taken[: held.size(0)], out=held)
    else:
        held.zero_()


def _edges_of_padding(room: Room, starts: Sequence[int]) -> Tensor:
    """Edges for all places, which connect spare nodes; destinations ascend in every hop, none is a loop."""
    hops = []
    for hop, size in enumerate(room.edges):
        source = min(hop + 1, len(room.nodes) - 1)
        spare_sources, spare = room.spare[source], room.spare[hop]
        nth = torch.arange(size)
        # Padding takes the last places: so they are spread, and not the first.
        span = min(size, 2 * _EDGES_PER_NODE * spare)
        end = (nth - (size - span)).clamp(min=0) * spare // span
        if source == hop:
            start = (end + 1 + nth % (spare - 1)) % spare
        else:
            start = nth % spare_sources
        hops.append(torch.stack([start + starts[source + 1] - spare_sources, end + starts[hop + 1] - spare]))
    return torch.cat(hops, dim=1)
