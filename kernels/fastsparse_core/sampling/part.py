"""Part of a batch: hops that are planned on the host and then enqueued without waiting for the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.sampling.relations import ALL, Graph, Relation

#: The numbers of slots and nodes are below this limit, because they are stored in 31 bits.
LIMIT = 2**31
#: Smallest number of table places per node; the table's size is rounded up to a power of two.
_ROOM = 1.5
_MOST_TILES = 1024


class Layout(NamedTuple):
    """Options of `NeighborSampler`, which describes them."""

    replace: bool
    disjoint: bool
    induced: bool
    blocks: bool


class Size(NamedTuple):
    """A number of nodes or edges that the device computes.

    Attributes:
        place: position of the number in `Part.values`.
        most: upper bound, which the host computes.
    """

    place: int
    most: int


class Output:
    """Sampled edges of several steps, concatenated.

    Attributes:
        end: number of edges after the steps that were added so far.
        most: upper bound of the number of edges.
        place: position of every edge's source in the table of nodes, on the CPU number of the source in the
            batch, int32 (most,).
        row: number of every edge's destination in the batch, int32 (most,).
        edge_id: position of every edge in the caller's order, int64 (most,).
    """

    def __init__(self, zero: Size) -> None:
        self.end = zero
        self.most = 0
        self.place = self.row = self.edge_id = torch.empty(0)

    def allocate(self, device: torch.device) -> None:
        """Allocates memory for the largest possible number of edges."""
        with torch.inference_mode(False):  # the tensors may be returned to the caller
            self.place, self.row = (
                torch.empty(self.most, dtype=torch.int32, device=device) for _ in range(2)
            )
            self.edge_id = torch.empty(self.most, dtype=torch.int64, device=device)


class Known(NamedTuple):
    """Ranges of a step, which the device computes.

    Attributes:
        first: first node, of the destinations' type, whose neighbours are sampled.
        end: one past the last such node.
        nodes_before: number of nodes of the sources' type before the step.
        nodes_after: number of nodes of the sources' type after the step.
        edges_before: number of edges in the output before the step.
        edges_after: number of edges in the output after the step.
    """

    first: Size
    end: Size
    nodes_before: Size
    nodes_after: Size
    edges_before: Size
    edges_after: Size


class Step(NamedTuple):
    """The planned sampling of one edge type in one hop."""

    number: int  # number of the relation
    relation: Relation
    hop: int
    fanout: int
    known: Known
    most_slots: int
    induced: bool
    output: Output


class Part:
    """Hops that are enqueued together."""

    def __init__(self) -> None:
        self.sizes = 2  # the first shows whether a seed is not in the graph, the second is always 0
        self.zero = Size(1, 0)
        self.steps: list[Step] = []
        self.outputs: dict[tuple[int, int], Output] = {}  # by (number of the relation, hop of the block or 0)
        self.ends: list[list[Size]] = []  # after every hop, the number of nodes of every type
        self.slots = 0
        # `enqueue` sets the following attributes.
        self.lists: list[tuple[Tensor, Tensor | None]] = []  # ids, and seeds of disjoint sampling, by type
        self.table = self.values = self.read = torch.empty(0)
        self.node_table: Any = None
        self.event: torch.cuda.Event | None = None

    def size(self, most: int) -> Size:
        """Reserves memory for a number that the device will compute; ``most`` is its upper bound."""
        self.sizes += 1
        return Size(self.sizes - 1, most)


class Nodes:
    """The batch's nodes of one type so far.

    Attributes:
        ids: ids of the nodes in the graph, int64 (number of nodes,).
        seed_of: for disjoint sampling, the number of the seed of every node's subgraph, int32 (number of
            nodes,); otherwise None.
        begin: position of the first node that the latest hop added.
        counts: number of nodes that every hop added, starting with the seeds.
    """

    def __init__(self, seeds: Tensor) -> None:
        self.ids = seeds
        self.seed_of: Tensor | None = None
        self.begin = 0
        self.counts = [seeds.numel()]


def enqueue(
    part: Part,
    graph: Graph,
    layout: Layout,
    nodes: Sequence[Nodes],
    begin: Sequence[tuple[Size, Size]],
    end: Sequence[Size],
    seed: int,
) -> None:
    """Allocates memory for a part by its upper bounds and enqueues its sampling; does not wait for a GPU.

    Args:
        part: the planned part; this function sets its remaining attributes.
        graph: the graph to sample from.
        layout: options of the sampler.
        nodes: the batch's nodes so far, by type.
        begin: the range of nodes that the first hop samples from, by type: (first, one past the last).
        end: number of nodes after the part, by type.
        seed: seed of the random numbers.

    Raises:
        ValueError: the batch may have too many nodes.
    """
    device = graph.device
    part.lists = [_buffer(of_type, size.most) for of_type, size in zip(nodes, end, strict=True)]
    _make_table(part, layout, graph, sum(size.most for size in end))
    part.values = torch.empty(part.sizes, dtype=torch.int64, device=device)
    for output in part.outputs.values():
        output.allocate(device)
    first_places = itertools.accumulate(graph.num_nodes, initial=0)
    lists = [
        _C.NodeList(
            node=ids, seed=seed_of, num_nodes=graph.num_nodes[number], first_place=first_place, type=number
        )
        for number, ((ids, seed_of), first_place) in enumerate(zip(part.lists, first_places, strict=False))
    ]
    address = part.values.data_ptr()
    first_nodes = []
    for of_type, given, sizes in zip(lists, nodes, begin, strict=True):
        counts = (sizes[0].most, given.ids.numel())
        first_nodes += [
            _C.FirstNodes(list=of_type, count=count, count_out=address + 8 * size.place)
            for count, size in zip(counts, sizes, strict=True)
            if count or size.most
        ]
    slot_ptr, slot_place, slot_edge, tile_counts = _scratch(part, device)
    steps = [
        _C.SampleStep(
            structure=step.relation.adjacency.plain_structure,
            weight=step.relation.weight,
            weight_sum=step.relation.weight_sum,
            fanout=step.fanout,
            replace=layout.replace,
            induced=step.induced,
            number=step.hop * len(graph.relations) + step.number,
            dst=lists[step.relation.dst],
            src=lists[step.relation.src],
            first_row=address + 8 * step.known.first.place,
            end_row=address + 8 * step.known.end.place,
            nodes_before=address + 8 * step.known.nodes_before.place,
            nodes_after=address + 8 * step.known.nodes_after.place,
            edges_before=address + 8 * step.known.edges_before.place,
            edges_after=address + 8 * step.known.edges_after.place,
            place=step.output.place,
            row=step.output.row,
            edge_id=step.output.edge_id,
            most_rows=step.known.end.most,
            most_slots=step.most_slots,
            slot_ptr=slot_ptr if step.fanout == ALL else None,
            slot_place=slot_place,
            slot_edge=slot_edge,
            tile_counts=tile_counts,
        )
        for step in part.steps
    ]
    where, queue = place_of(device)
    _C.sample_neighbors(
        table=part.node_table,
        sizes=address,
        num_sizes=part.sizes,
        seed=seed,
        first_nodes=first_nodes,
        steps=steps,
        device=where,
        queue=queue,
    )
    part.read = part.values
    if device.type == "cuda":
        part.read = torch.empty(part.sizes, dtype=torch.int64, pin_memory=True)
        part.read.copy_(part.values, non_blocking=True)
        part.event = torch.cuda.Event()
        part.event.record()


def _buffer(nodes: Nodes, most: int) -> tuple[Tensor, Tensor | None]:
    """Allocates memory for ``most`` nodes of a type, and copies the present nodes to its beginning."""
    count = nodes.ids.numel()
    ids = nodes.ids.new_empty(most)
    ids[:count] = nodes.ids
    if nodes.seed_of is None:
        return ids, None
    seed_of = nodes.seed_of.new_empty(most)
    seed_of[:count] = nodes.seed_of
    return ids, seed_of


def _make_table(part: Part, layout: Layout, graph: Graph, most_nodes: int) -> None:
    """Makes the table that maps nodes of the graph to their numbers in the batch."""
    bits = max(int(_ROOM * most_nodes).bit_length(), 8)
    # One place per node of the graph, unless a hash table with keys (3 words per place) takes less memory.
    has_keys = layout.disjoint or sum(graph.num_nodes) > 3 << bits
    num_places = 1 << bits if has_keys else sum(graph.num_nodes)
    if num_places >= LIMIT:
        raise ValueError("seeds: expected a batch of fewer than 2^30 nodes; pass fewer seeds")
    words = (3 if has_keys else 1) * num_places
    part.table = torch.empty(words, dtype=torch.int32, device=graph.device)
    table = part.table.data_ptr()
    part.node_table = _C.NodeTable(
        key=table if has_keys else None,
        value=table + 8 * num_places if has_keys else table,
        num_places=num_places,
        bits=bits,
    )


def _scratch(part: Part, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates scratch memory, which the steps on a GPU use one after the other.

    Returns:
        The first slot of every row; the place and the edge of every slot; and counts of tiles.
    """
    steps = part.steps if device.type == "cuda" else []
    most_rows = max((step.known.end.most + 1 for step in steps if step.fanout == ALL), default=0)
    most_slots = max((step.most_slots for step in steps), default=0)
    return (
        torch.empty(most_rows, dtype=torch.int64, device=device),
        torch.empty(most_slots, dtype=torch.int32, device=device),
        torch.empty(most_slots, dtype=torch.int64, device=device),
        torch.empty(_MOST_TILES if steps else 0, dtype=torch.int64, device=device),
    )
