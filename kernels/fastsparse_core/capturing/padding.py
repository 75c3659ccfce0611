"""Batches padded to sizes of a record: where rows of padding are, and what they hold.

Padding is a graph of its own: nodes that copy the batch's first one, with edges among themselves. So
whatever a layer does per node, edge or graph has a meaning there too, and reaches nothing else. What mixes
all rows has a masked version that leaves them out (`masked_functions`).

With sampled neighbours, every hop is padded separately, so that layers may leave hops out, as PyG's
``trim_to_layer`` does. Rows of two seeds and three neighbours, with space for four and five:

    hop    0  0  0  0  1  1  1  1  1
    taken  0  1  0  0  2  3  4  0  0
           seeds |     neighbours |
                 padding          padding
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of

#: Largest number of hops of a batch that are padded separately; as in
#: kernels/include/fastsparse/place_batch.h.
MOST_HOPS = 16
#: Spare capacity, as a share of the largest size seen. It is larger if sizes vary by more.
ROOM = 1 / 64
#: Approximate number of padded entries per padded node, so that no row needs to be cut.
_EDGES_PER_NODE = 8
#: Starts and ends of zero hops, for nodes or edges.
_NONE: tuple[list[int], list[int]] = ([0], [])


@dataclass(frozen=True)
class Sizes:
    """How many nodes and edges a batch has, by type, and by hop where it consists of sampled neighbours.

    Attributes:
        nodes: of every node type, those of every hop, seeds first; or all.
        edges: of every edge type, those of every hop, whose destinations are in the hop before; or all.
        ends: of every edge type, the types of sources and destinations, by their place in ``nodes``.
        starts: on the CPU, where the nodes of every graph begin, and their number; None: not known.
    """

    nodes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int], ...] = ((0, 0),)
    starts: Tensor | None = field(default=None, compare=False)

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Those of all node types, then of all edge types."""
        return self.nodes + self.edges

    @cached_property
    def largest_graph(self) -> int:
        """How many nodes it has; 0: not known."""
        starts = self.starts
        return 0 if starts is None or starts.numel() < 2 else int(starts.diff().max())


@dataclass(frozen=True)
class Capacity(Sizes):
    """How many nodes and edges there is space for. No two sums of the first hops are equal, and all are odd.

    Attributes:
        spare: of every node type, how many nodes of every hop, the last ones, are always padding: edges of
            padding connect them.
        largest: nodes of the largest graph, two or three times a power of two; 0: not known.
    """

    spare: tuple[tuple[int, ...], ...] = ()
    largest: int = 0

    def holds(self, sizes: Sizes) -> bool:
        """Whether a batch of those sizes fits."""
        spare = self.spare + tuple((0,) * len(hops) for hops in self.edges)
        return all(
            count + least <= capacity
            for counts, leasts, capacities in zip(sizes.kinds, spare, self.kinds, strict=True)
            for count, least, capacity in zip(counts, leasts, capacities, strict=True)
        )

    def doubled(self) -> Capacity:
        """Much more capacity."""
        nodes, edges = ([[2 * size for size in hops] for hops in kind] for kind in (self.nodes, self.edges))
        return _capacity(nodes, edges, self.ends, self.nodes, 2 * self.largest)

    def cut(self, tensor: Tensor, sizes: Sizes) -> Tensor:
        """The batch's rows of a tensor with rows of padding."""
        for capacities, counts in zip(self.kinds, sizes.kinds, strict=True):
            ends = list(itertools.accumulate(capacities))
            if tensor.dim() and tensor.size(0) in ends:
                hops = ends.index(tensor.size(0)) + 1
                starts = [0, *ends][:hops]
                parts = [tensor[start : start + count] for start, count in zip(starts, counts, strict=False)]
                return parts[0] if hops == 1 else torch.cat(parts)
        return tensor


def capacity_for(seen: Sequence[Sizes]) -> Capacity:
    """Capacity for batches like those seen, and somewhat larger ones."""
    nodes = _columns([sizes.nodes for sizes in seen])
    edges = _columns([sizes.edges for sizes in seen])
    ends = seen[-1].ends
    more_edges = [[max(_more(column), 8) for column in hops] for hops in edges]
    spare = []
    for kind, hops in enumerate(nodes):
        around = [[4] for _ in hops]
        for (source, target), mores in zip(ends, more_edges, strict=True):
            for hop, more in enumerate(mores):
                if source == kind:
                    around[min(hop + 1, len(hops) - 1)].append(more // _EDGES_PER_NODE)
                if target == kind:
                    around[hop].append(more // _EDGES_PER_NODE)
        spare.append(tuple(map(max, around)))
    capacities = [
        [max(column) + _more(column) + least for column, least in zip(hops, of_kind, strict=True)]
        for hops, of_kind in zip(nodes, spare, strict=True)
    ]
    more_capacities = [
        [max(column) + more for column, more in zip(hops, mores, strict=True)]
        for hops, mores in zip(edges, more_edges, strict=True)
    ]
    graphs = [sizes.largest_graph for sizes in seen]
    largest = _rounded_up(max(graphs)) if all(graphs) else 0
    return _capacity(capacities, more_capacities, ends, tuple(spare), largest)


def _rounded_up(size: int) -> int:
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def _columns(kinds: Sequence[tuple[tuple[int, ...], ...]]) -> list[list[tuple[int, ...]]]:
    """What all batches have, of every type and hop."""
    return [list(zip(*hops, strict=True)) for hops in zip(*kinds, strict=True)]


def _more(column: Sequence[int]) -> int:
    return max(max(column) - min(column), int(max(column) * ROOM))


def _capacity(
    nodes: Sequence[Sequence[int]],
    edges: Sequence[Sequence[int]],
    ends: tuple[tuple[int, int], ...],
    spare: tuple[tuple[int, ...], ...],
    largest: int,
) -> Capacity:
    """Capacity of at least those sizes: rows of all kinds are distinguished by their number."""
    sums: set[int] = set()
    made: list[tuple[int, ...]] = []
    for sizes in (*nodes, *edges):
        capacities: list[int] = []
        for size in sizes:
            total = sum(capacities) + size
            total += 1 - total % 2
            while total in sums:
                total += 2
            sums.add(total)
            capacities.append(total - sum(capacities))
        made.append(tuple(capacities))
    return Capacity(tuple(made[: len(nodes)]), tuple(made[len(nodes) :]), ends, spare=spare, largest=largest)


@dataclass(frozen=True)
class Rows:
    """Which rows of tensors with so many rows are the batch's.

    Attributes:
        capacity: number of rows.
        mask: bool (capacity,).
        count: how many are the batch's, float32 ().
    """

    capacity: int
    mask: Tensor
    count: Tensor


class Places:
    """Where the rows of a batch are in memory with space for more.

    Args:
        capacity: number of rows, by hop.
        device: of the tensors.

    Attributes:
        starts: the first row of every hop, and the number of all.
        mask: bool, which rows are the batch's.
        ends: float32, ends of the hops in the batch.
        rows: those of the first hop, of the first two, ...
    """

    def __init__(self, capacity: Sequence[int], device: torch.device) -> None:
        self.starts = [0, *itertools.accumulate(capacity)]
        self.mask = torch.zeros(self.starts[-1], dtype=torch.bool, device=device)
        self.ends = torch.zeros(len(capacity), device=device)
        self.rows = [
            Rows(end, self.mask[:end], count) for end, count in zip(self.starts[1:], self.ends, strict=True)
        ]


class BatchPlaces:
    """Where the nodes and edges of a batch are.

    Args:
        capacity: for them.
        device: of the tensors.

    Attributes:
        device: of the tensors.
        nodes: places of the nodes of every type.
        edges: places of the edges of every type.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self.nodes = [Places(hops, device) for hops in capacity.nodes]
        self.edges = [Places(hops, device) for hops in capacity.edges]
        self._padding = [self._edges_of_padding(nth).to(device) for nth in range(len(capacity.edges))]
        self.device = device

    @property
    def rows(self) -> list[Rows]:
        """Of all nodes and edges."""
        return [rows for places in (*self.nodes, *self.edges) for rows in places.rows]

    def write(
        self,
        sizes: Sizes,
        edges: Sequence[tuple[Tensor, Tensor]],
        rows: Sequence[tuple[Tensor, Tensor, Places]] = (),
    ) -> None:
        """Copies a batch; nothing waits, and a type of nodes and one of edges share a launch.

        Args:
            sizes: how many there are of everything.
            edges: of every edge type, the padded ones and the batch's, (2, E) int32 or int64, between
                nodes as numbered in the batch; those of padding connect padding.
            rows: tensors with a row per node or per edge, of all hops or of the first ones: the padded
                one, the batch's, and their places. Rows of padding copy the first one.
        """
        nodes, of_edges = (
            [
                (places.starts, list(itertools.accumulate(counts)))
                for places, counts in zip(*kinds, strict=True)
            ]
            for kinds in ((self.nodes, sizes.nodes), (self.edges, sizes.edges))
        )
        given = [(to, item.detach().contiguous(), places) for to, item, places in rows if to.numel()]
        edges = [(to, item.detach().contiguous()) for to, item in edges]
        device, stream = place_of(self.device)
        for nth in range(max(len(nodes), len(edges))):
            has_nodes, has_edges = nth < len(nodes), nth < len(edges)
            source, target = self.capacity.ends[nth] if has_edges else (0, 0)
            to, ends = edges[nth] if has_edges else (None, None)
            own = [self.nodes[nth] if has_nodes else None, self.edges[nth] if has_edges else None]
            _C.place_batch(
                nodes=nodes[nth] if has_nodes else _NONE,
                edges=of_edges[nth] if has_edges else _NONE,
                sources=nodes[source],
                targets=nodes[target],
                node_mask=getattr(own[0], "mask", None),
                edge_mask=getattr(own[1], "mask", None),
                node_ends=getattr(own[0], "ends", None),
                edge_ends=getattr(own[1], "ends", None),
                edge_index=ends,
                edge_index_out=to,
                padding=None if to is None else self._padding[nth],
                edge_index_is_64bit=to is not None and to.dtype == torch.int64,
                tensors=[
                    (
                        item,
                        memory,
                        memory.size(0),
                        memory.nbytes // memory.size(0),
                        places is own[1],
                        not item.size(0),
                    )
                    for memory, item, places in given
                    if places in own
                ],
                device=device,
                queue=stream,
            )

    def _edges_of_padding(self, nth: int) -> Tensor:
        """Edges for all places, which connect spare nodes.

        Destinations ascend in every hop; no edge is a loop.
        """
        capacity = self.capacity
        source, target = capacity.ends[nth]
        hops = []
        for hop, size in enumerate(capacity.edges[nth]):
            behind = min(hop + 1, len(capacity.nodes[source]) - 1)
            spare_sources, spare = capacity.spare[source][behind], capacity.spare[target][hop]
            nth_edge = torch.arange(size)
            # Padding takes the last places, so only their ends are spread over nodes.
            span = min(size, 2 * _EDGES_PER_NODE * spare)
            end = (nth_edge - (size - span)).clamp(min=0) * spare // span
            if (source, behind) == (target, hop):
                start = (end + 1 + nth_edge % (spare - 1)) % spare
            else:
                start = nth_edge % spare_sources
            first_source = self.nodes[source].starts[behind + 1] - spare_sources
            hops.append(torch.stack([start + first_source, end + self.nodes[target].starts[hop + 1] - spare]))
        return torch.cat(hops, dim=1)
