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

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue

#: Hops of a batch that are padded by themselves, at most; as in kernels/include/fastsparse/place_batch.h.
MOST_HOPS = 16
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
        mask: bool, which rows are the batch's.
        ends: float32, ends of the hops in the batch.
        rows: those of the first hop, of the first two, ...
    """

    def __init__(self, room: Sequence[int], device: torch.device) -> None:
        self.starts = [0, *itertools.accumulate(room)]
        self.mask = torch.zeros(self.starts[-1], dtype=torch.bool, device=device)
        self.ends = torch.zeros(len(room), device=device)
        self.rows = [
            Rows(end, self.mask[:end], count) for end, count in zip(self.starts[1:], self.ends, strict=True)
        ]

    @property
    def has_hops(self) -> bool:
        """Whether there are several."""
        return len(self.rows) > 1


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
        nodes, edges = self.nodes, self.edges
        self._marks = (
            nodes.mask.data_ptr(),
            edges.mask.data_ptr(),
            nodes.ends.data_ptr(),
            edges.ends.data_ptr(),
        )

    def write(
        self,
        sizes: Sizes,
        edges: tuple[Tensor, Tensor],
        rows: Sequence[tuple[Tensor, Tensor, Places]] = (),
    ) -> None:
        """Copies a batch, by one launch that nothing waits for.

        Args:
            sizes: how many there are of everything.
            edges: where they come to lie and the batch's, (2, E) int32 or int64, between nodes as numbered in
                the batch; those of padding connect padding.
            rows: tensors with a row per node or per edge, of all hops or of the first ones: where they come
                to lie, the batch's, and which of the two they are of. Rows of padding copy the first one.
        """
        held, edge_index = edges[0], edges[1].detach().contiguous()
        given = [(to, item.detach().contiguous(), places is self.edges) for to, item, places in rows]
        index = device_index(held.device)
        _C.place_batch(
            self.nodes.starts,
            list(itertools.accumulate(sizes.nodes)),
            self.edges.starts,
            list(itertools.accumulate(sizes.edges)),
            (
                edge_index.data_ptr(),
                held.data_ptr(),
                self._padding.data_ptr(),
                held.dtype == torch.int64,
            ),
            self._marks,
            [
                (
                    item.data_ptr(),
                    to.data_ptr(),
                    to.size(0),
                    to.nbytes // to.size(0),
                    is_of_edges,
                    not item.size(0),
                )
                for to, item, is_of_edges in given
                if to.numel()
            ],
            index,
            queue(index),
        )


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
