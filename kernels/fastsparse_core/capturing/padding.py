"""Pads batches to the sizes of a record: which rows are padding, and their content.

The padding is a separate graph: its nodes are copies of the batch's first node, and its edges connect only
these nodes. So layers can process the padding like any graph, and it does not influence other nodes.
Functions that mix all rows have masked versions that ignore the padding (`masked_functions`).

Batches of sampled neighbours are padded hop by hop, because layers may drop hops, as PyG's ``trim_to_layer``
does. For example, two seeds with capacity 4 and three neighbours with capacity 5 are stored as follows:

    hop   0     0     0        0        1          1          1          1        1
    node  0     1     0        0        2          3          4          0        0
          seed  seed  padding  padding  neighbour  neighbour  neighbour  padding  padding
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
    """Numbers of nodes and edges of a batch by type, and also by hop if neighbours were sampled.

    Attributes:
        nodes: for every node type, the number of nodes per hop, seeds first; one number without hops.
        edges: for every edge type, the number of edges per hop, ordered by the hop of their destinations; one
            number without hops.
        ends: for every edge type, positions of its source and destination types in ``nodes``.
        starts: first node of every graph, then the number of nodes, on the CPU; None: not known.
    """

    nodes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int], ...] = ((0, 0),)
    starts: Tensor | None = field(default=None, compare=False)

    @property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of all node types, then of all edge types."""
        return self.nodes + self.edges

    @cached_property
    def largest_graph(self) -> int:
        """Number of nodes of the largest graph; 0: not known."""
        starts = self.starts
        return 0 if starts is None or starts.numel() < 2 else int(starts.diff().max())


@dataclass(frozen=True)
class Capacity(Sizes):
    """Numbers of nodes and edges to which batches are padded.

    For every type, the numbers of rows of the first hop, of the first two hops, and so on are odd, and they
    differ from those of all other types. So the number of rows of a tensor tells which nodes or edges the
    rows belong to.

    Attributes:
        spare: for every node type, the number of nodes at the end of every hop that are always padding. The
            padding's edges connect these nodes.
        largest: upper limit for the nodes of one graph, two or three times a power of two; 0: not known.
    """

    spare: tuple[tuple[int, ...], ...] = ()
    largest: int = 0

    def holds(self, sizes: Sizes) -> bool:
        """Returns whether a batch of these sizes fits, including the nodes that are always padding."""
        spare = self.spare + tuple((0,) * len(hops) for hops in self.edges)
        return all(
            count + least <= capacity
            for counts, leasts, capacities in zip(sizes.kinds, spare, self.kinds, strict=True)
            for count, least, capacity in zip(counts, leasts, capacities, strict=True)
        )

    def doubled(self) -> Capacity:
        """A capacity with twice as many nodes and edges."""
        nodes, edges = ([[2 * size for size in hops] for hops in kind] for kind in (self.nodes, self.edges))
        return _capacity(nodes, edges, self.ends, self.nodes, 2 * self.largest)

    def cut(self, tensor: Tensor, sizes: Sizes) -> Tensor:
        """Removes the rows of the padding from a tensor of a padded batch."""
        for capacities, counts in zip(self.kinds, sizes.kinds, strict=True):
            ends = list(itertools.accumulate(capacities))
            if tensor.dim() and tensor.size(0) in ends:
                hops = ends.index(tensor.size(0)) + 1
                starts = [0, *ends][:hops]
                parts = [tensor[start : start + count] for start, count in zip(starts, counts, strict=False)]
                return parts[0] if hops == 1 else torch.cat(parts)
        return tensor


def capacity_for(seen: Sequence[Sizes]) -> Capacity:
    """The capacity for batches like those seen so far, and for somewhat larger ones."""
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
    """The numbers of all batches, for every type and hop."""
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
    """A capacity of at least the given sizes, rounded up so that all sums over first hops are different."""
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
    """Tells which rows of a padded tensor belong to the batch.

    Attributes:
        capacity: number of rows of the tensor.
        mask: whether a row belongs to the batch, bool (capacity,).
        count: number of rows that belong to the batch, float32 ().
    """

    capacity: int
    mask: Tensor
    count: Tensor


class Places:
    """Positions of the rows of a padded batch, for one type of nodes or edges.

    Args:
        capacity: number of rows per hop.
        device: device of the tensors.

    Attributes:
        starts: first row of every hop, then the number of rows.
        mask: whether a row belongs to the batch, bool (rows,).
        ends: number of the batch's rows up to the end of every hop, float32 (hops,).
        rows: the `Rows` of the first hop, of the first two hops, and so on.
    """

    def __init__(self, capacity: Sequence[int], device: torch.device) -> None:
        self.starts = [0, *itertools.accumulate(capacity)]
        self.mask = torch.zeros(self.starts[-1], dtype=torch.bool, device=device)
        self.ends = torch.zeros(len(capacity), device=device)
        self.rows = [
            Rows(end, self.mask[:end], count) for end, count in zip(self.starts[1:], self.ends, strict=True)
        ]


class BatchPlaces:
    """Positions of all nodes and edges of a padded batch.

    Args:
        capacity: numbers of nodes and edges.
        device: device of the tensors.

    Attributes:
        device: device of the tensors.
        nodes: the `Places` of every node type.
        edges: the `Places` of every edge type.
    """

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self.nodes = [Places(hops, device) for hops in capacity.nodes]
        self.edges = [Places(hops, device) for hops in capacity.edges]
        self._padding = [self._edges_of_padding(nth).to(device) for nth in range(len(capacity.edges))]
        self.device = device

    @property
    def rows(self) -> list[Rows]:
        """The `Rows` of all node types, then of all edge types."""
        return [rows for places in (*self.nodes, *self.edges) for rows in places.rows]

    def write(
        self,
        sizes: Sizes,
        edges: Sequence[tuple[Tensor, Tensor]],
        rows: Sequence[tuple[Tensor, Tensor, Places]] = (),
    ) -> None:
        """Copies a batch into padded memory, without waiting for the GPU.

        Each launch copies one node type and one edge type.

        Args:
            sizes: numbers of nodes and edges of the batch.
            edges: for every edge type, the padded edges (written) and the edges of the batch, both (2, E)
                int32 or int64. Ends are numbers of nodes in the batch; they are converted to padded numbers.
            rows: for every tensor with a row per node or edge (of all hops or the first ones): the padded
                tensor (written), the tensor of the batch, and their `Places`. Padding gets copies of the
                first row.
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
        """Edges between the spare nodes, for all positions of an edge type.

        Destinations ascend in every hop; no edge is a loop.
        """
        capacity = self.capacity
        source, target = capacity.ends[nth]
        hops = []
        for hop, size in enumerate(capacity.edges[nth]):
            behind = min(hop + 1, len(capacity.nodes[source]) - 1)
            spare_sources, spare = capacity.spare[source][behind], capacity.spare[target][hop]
            nth_edge = torch.arange(size)
            # Padding takes the last positions, so only the edges in these positions are spread over nodes.
            span = min(size, 2 * _EDGES_PER_NODE * spare)
            end = (nth_edge - (size - span)).clamp(min=0) * spare // span
            if (source, behind) == (target, hop):
                start = (end + 1 + nth_edge % (spare - 1)) % spare
            else:
                start = nth_edge % spare_sources
            first_source = self.nodes[source].starts[behind + 1] - spare_sources
            hops.append(torch.stack([start + first_source, end + self.nodes[target].starts[hop + 1] - spare]))
        return torch.cat(hops, dim=1)
