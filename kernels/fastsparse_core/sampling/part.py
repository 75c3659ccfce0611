"""Hops of a batch that are drawn without waiting: what is planned of them, and how they are enqueued."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.sampling.relations import ALL, Graph, Relation

#: Slots and nodes are numbered in 31 bits.
LIMIT = 2**31
#: Places of the table per node, at least; then up to the next power of two.
_ROOM = 1.5
_MOST_TILES = 1024


class Layout(NamedTuple):
    """How batches are drawn, see `NeighborSampler`."""

    replace: bool
    disjoint: bool
    induced: bool
    blocks: bool


class Size(NamedTuple):
    """A number that the device knows: its place among the sizes, and a bound."""

    place: int
    most: int


class Output:
    """Edges of steps, one after the other."""

    def __init__(self, zero: Size) -> None:
        self.end = zero  # number of edges so far
        self.most = 0
        self.place = self.row = self.edge_id = torch.empty(0)

    def allocate(self, device: torch.device) -> None:
        """Sets memory aside for as many as there may be."""
        with torch.inference_mode(False):  # they may become results of the caller
            self.place, self.row = (
                torch.empty(self.most, dtype=torch.int32, device=device) for _ in range(2)
            )
            self.edge_id = torch.empty(self.most, dtype=torch.int64, device=device)


class Known(NamedTuple):
    """Numbers that the device knows while it runs a step: of rows, sources and edges."""

    first: Size
    end: Size
    nodes_before: Size
    nodes_after: Size
    edges_before: Size
    edges_after: Size


class Step(NamedTuple):
    """A hop of one edge type, as planned."""

    number: int  # of the relation
    relation: Relation
    hop: int
    fanout: int
    known: Known
    most_slots: int
    induced: bool
    output: Output


class Part:
    """Hops that run together."""

    def __init__(self) -> None:
        self.sizes = 2  # the first says that a node is not in the graph, the second is always 0
        self.zero = Size(1, 0)
        self.steps: list[Step] = []
        self.outputs: dict[tuple[int, int], Output] = {}  # by number of the relation, and hop if blocks
        self.ends: list[list[Size]] = []  # numbers of nodes of every type after every hop
        self.slots = 0
        # Once it runs:
        self.lists: list[tuple[Tensor, Tensor | None]] = []  # ids, and seeds of disjoint sampling, by type
        self.table = self.values = self.read = torch.empty(0)
        self.node_table: Any = None
        self.event: torch.cuda.Event | None = None

    def size(self, most: int) -> Size:
        """One number more that the device will know."""
        self.sizes += 1
        return Size(self.sizes - 1, most)


class Nodes:
    """The batch's nodes of one type so far.

    Attributes:
        ids: in the graph.
        seed_of: of disjoint sampling.
        begin: the first that the last hop added.
        counts: added by every hop.
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
    """Sets memory for a part aside, by bounds, and draws it; does not wait for a GPU.

    Args:
        part: as planned; gets what the rest of the attributes say.
        graph: where to draw.
        layout: how.
        nodes: the batch's so far, by type.
        begin: the nodes that the first hop is about, by type: the first one, and the one behind the last.
        end: how many nodes there will be, by type.
        seed: of the random numbers.

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
    """Memory for the nodes there are and those that come."""
    count = nodes.ids.numel()
    ids = nodes.ids.new_empty(most)
    ids[:count] = nodes.ids
    if nodes.seed_of is None:
        return ids, None
    seed_of = nodes.seed_of.new_empty(most)
    seed_of[:count] = nodes.seed_of
    return ids, seed_of


def _make_table(part: Part, layout: Layout, graph: Graph, most_nodes: int) -> None:
    """Where nodes find their numbers."""
    bits = max(int(_ROOM * most_nodes).bit_length(), 8)
    # A place for every node where that takes no more memory than a table with keys, 3 words a place.
    has_keys = layout.disjoint or sum(graph.num_nodes) > 3 << bits
    num_places = 1 << bits if has_keys else sum(graph.num_nodes)
    if num_places >= LIMIT:
        raise ValueError("seeds: expected a batch of fewer than 2^30 nodes; give fewer")
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
    """What the steps on a GPU use one after the other: a row's first slot, slots, counts of tiles."""
    steps = part.steps if device.type == "cuda" else []
    most_rows = max((step.known.end.most + 1 for step in steps if step.fanout == ALL), default=0)
    most_slots = max((step.most_slots for step in steps), default=0)
    return (
        torch.empty(most_rows, dtype=torch.int64, device=device),
        torch.empty(most_slots, dtype=torch.int32, device=device),
        torch.empty(most_slots, dtype=torch.int64, device=device),
        torch.empty(_MOST_TILES if steps else 0, dtype=torch.int64, device=device),
    )
