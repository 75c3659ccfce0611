"""One batch being drawn: parts of it are planned by bounds, run without waiting, then read and completed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.sampling.relations import ALL, Graph, Relation
from fastsparse_core.sampling.sample import Edges, Sample

#: Slots of the hops that are run together, at most; a hop alone may have more. 28 bytes each, and up to 36
#: for its place in the table.
_MOST_SLOTS = 2**23
#: Slots and nodes are numbered in 31 bits.
_LIMIT = 2**31
#: Places of the table per node, at least; then up to the next power of two.
_ROOM = 1.5
_MOST_TILES = 1024
#: In place of a hop: the edges between all nodes.
_INDUCED = -1


class Layout(NamedTuple):
    """How batches are drawn, see `NeighborSampler`."""

    replace: bool
    disjoint: bool
    induced: bool
    blocks: bool


class _Size(NamedTuple):
    """A number that the device knows: its place among the sizes, and a bound."""

    place: int
    most: int


class _Output:
    """Edges of steps that come to lie one behind the other."""

    def __init__(self, zero: _Size) -> None:
        self.end = zero  # number of edges so far
        self.most = 0
        self.place = self.row = self.edge_id = torch.empty(0)

    def allocate(self, device: torch.device) -> None:
        self.place, self.row = torch.empty(2, self.most, dtype=torch.int32, device=device)
        self.edge_id = torch.empty(self.most, dtype=torch.int64, device=device)


class _Step(NamedTuple):
    """A hop of one edge type, as planned."""

    number: int  # of the relation
    relation: Relation
    hop: int
    first: _Size
    end: _Size
    nodes_before: _Size
    nodes_after: _Size
    edges_before: _Size
    edges_after: _Size
    most_slots: int
    induced: bool
    output: _Output


class _Part:
    """Hops that run together."""

    def __init__(self) -> None:
        self.sizes = 2  # of which the first says that a node is none of the graph's, the second is always 0
        self.zero = _Size(1, 0)
        self.steps: list[_Step] = []
        self.outputs: dict[tuple[int, int], _Output] = {}  # by number of the relation, and hop if blocks
        self.ends: list[list[_Size]] = []  # numbers of nodes of every type after every hop
        self.slots = 0
        # Once it runs:
        self.lists: list[tuple[Tensor, Tensor | None]] = []  # ids, and seeds of disjoint sampling, by type
        self.table = self.values = self.read = torch.empty(0)
        self.node_table: Any = None
        self.event: torch.cuda.Event | None = None

    def size(self, most: int) -> _Size:
        self.sizes += 1
        return _Size(self.sizes - 1, most)


class _Nodes:
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


class Draw:
    """A batch that is being drawn; :meth:`finish` completes it.

    Args:
        graph: where to draw.
        layout: how.
        seeds: of every node type.
        seed: of the random numbers.
    """

    def __init__(self, graph: Graph, layout: Layout, seeds: list[Tensor], seed: int) -> None:
        self._graph, self._layout, self._seed = graph, layout, seed
        self._index = device_index(graph.device)
        self._nodes = [_Nodes(of_type) for of_type in seeds]
        if layout.disjoint:
            offset = 0
            for nodes in self._nodes:
                end = offset + nodes.ids.numel()
                nodes.seed_of = torch.arange(offset, end, dtype=torch.int32, device=graph.device)
                offset = end
        self._num_hops = graph.num_hops + layout.induced  # the last one collects edges
        self._hop = 0
        self._edges: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._counts: dict[int, list[int]] = {}
        self._sample: Sample | None = None
        self._start_part()

    def finish(self) -> Sample:
        """The batch; waits until it is drawn.

        Raises:
            ValueError: see :meth:`NeighborSampler.sample`.
        """
        if self._sample is None:
            self._finish_part()
            while self._hop < self._num_hops:
                self._start_part()
                self._finish_part()
            self._sample = self._assemble()
        return self._sample

    # ---------------------------------------------------------------- planning

    def _start_part(self) -> None:
        """Plans hops as far as bounds allow, and enqueues them."""
        part = _Part()
        counts = [nodes.ids.numel() for nodes in self._nodes]
        # Blocks begin anew with the first node.
        first = [part.size(0 if self._layout.blocks else nodes.begin) for nodes in self._nodes]
        end = [part.size(count) for count in counts]
        begin_sizes = list(zip(first, end, strict=True))
        while self._hop < self._num_hops:
            slots = self._slots_of_hop(first, end)
            most = sum(slots.values())
            if most > _MOST_SLOTS:
                if part.ends:
                    break
                slots = self._exact_slots(slots)
                most = sum(slots.values())
            elif part.ends and part.slots + most > _MOST_SLOTS:
                break
            if most >= _LIMIT:
                raise ValueError(
                    f"seeds: expected a batch of fewer than 2^31 edges, got up to {most}; give fewer"
                )
            part.slots += most
            first, end = self._plan_hop(part, slots, first, end)
            self._hop += 1
        self._part = part
        self._run(part, begin_sizes, end)

    def _is_induced(self) -> bool:
        return self._hop == self._graph.num_hops

    def _slots_of_hop(self, first: list[_Size], end: list[_Size]) -> dict[int, int]:
        """Bounds of the slots of every relation that has any."""
        slots = {}
        for number, relation in enumerate(self._graph.relations):
            rows = end[relation.dst]
            per_row = relation.most_entries if self._is_induced() else relation.most_slots(self._hop)
            is_at_end = first[relation.dst].place == rows.place  # the last hop added none
            if rows.most and per_row and (self._is_induced() or not is_at_end):
                slots[number] = rows.most * per_row
        return slots

    def _exact_slots(self, slots: dict[int, int]) -> dict[int, int]:
        """The same at the beginning of a part, where nodes are known; reads their degrees from the device."""
        exact = {}
        for number, most in slots.items():
            relation, nodes = self._graph.relations[number], self._nodes[self._graph.relations[number].dst]
            induced = self._is_induced()
            ids = nodes.ids if induced or self._layout.blocks else nodes.ids[nodes.begin :]
            if induced or relation.fanouts[self._hop] == ALL:
                # Ids that are out of range have no row; the kernels say so.
                valid = ids.clamp(0, max(relation.adjacency.num_dst - 1, 0))
                rowptr = relation.adjacency.rowptr
                most = int((rowptr[valid + 1] - rowptr[valid]).sum())
            else:
                most = ids.numel() * relation.fanouts[self._hop]
            exact[number] = most
        return exact

    def _plan_hop(
        self, part: _Part, slots: dict[int, int], first: list[_Size], end: list[_Size]
    ) -> tuple[list[_Size], list[_Size]]:
        """Adds a hop's steps; returns the nodes that the next hop is about."""
        last = list(end)
        induced = self._is_induced()
        for number, most_slots in slots.items():
            relation = self._graph.relations[number]
            key = (number, _INDUCED if induced else self._hop if self._layout.blocks else 0)
            output = part.outputs.setdefault(key, _Output(part.zero))
            before = last[relation.src]
            limit = _LIMIT if self._layout.disjoint else self._most_nodes(relation.src)
            after = part.size(min(before.most + most_slots, limit))
            edges_after = part.size(output.end.most + most_slots)
            part.steps.append(
                _Step(
                    number=number,
                    relation=relation,
                    hop=self._hop,
                    first=part.zero if induced else first[relation.dst],
                    end=end[relation.dst],
                    nodes_before=before,
                    nodes_after=after,
                    edges_before=output.end,
                    edges_after=edges_after,
                    most_slots=most_slots,
                    induced=induced,
                    output=output,
                )
            )
            output.end, output.most = edges_after, edges_after.most
            if not induced:
                last[relation.src] = after
        part.ends.append(last)
        return (first if self._layout.blocks else end), last

    def _most_nodes(self, node_type: int) -> int:
        """Of that type in a batch: seeds may repeat, other nodes do not."""
        return self._nodes[node_type].counts[0] + self._graph.num_nodes[node_type]

    # ---------------------------------------------------------------- running

    def _run(self, part: _Part, begin: list[tuple[_Size, _Size]], end: list[_Size]) -> None:
        device = self._graph.device
        part.lists = [self._room(nodes, size.most) for nodes, size in zip(self._nodes, end, strict=True)]
        num_nodes = self._graph.num_nodes
        bits = max(int(_ROOM * sum(size.most for size in end)).bit_length(), 8)
        # A place for every node where that takes no more memory than a table with keys, 3 words a place.
        has_keys = self._layout.disjoint or sum(num_nodes) > 3 << bits
        num_places = 1 << bits if has_keys else sum(num_nodes)
        if num_places >= _LIMIT:
            raise ValueError("seeds: expected a batch of fewer than 2^30 nodes; give fewer")
        part.table = torch.empty((3 if has_keys else 1) * num_places, dtype=torch.int32, device=device)
        part.values = torch.empty(part.sizes, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        most_slots = max((step.most_slots for step in part.steps), default=0) if on_gpu else 0
        slot_place = torch.empty(most_slots, dtype=torch.int32, device=device)
        slot_edge = torch.empty(most_slots, dtype=torch.int64, device=device)
        tile_counts = torch.empty(_MOST_TILES if on_gpu else 0, dtype=torch.int64, device=device)
        rows = [step.end.most + 1 for step in part.steps if on_gpu and self._has_pointers(step)]
        slot_ptr = torch.empty(max(rows, default=0), dtype=torch.int64, device=device)
        for output in part.outputs.values():
            output.allocate(device)

        first_places = [sum(num_nodes[:number]) for number in range(len(num_nodes))]
        lists = [
            _C.NodeList(
                ids.data_ptr(),
                0 if seed_of is None else seed_of.data_ptr(),
                num_nodes[number],
                first_places[number],
                number,
            )
            for number, (ids, seed_of) in enumerate(part.lists)
        ]
        address = part.values.data_ptr()
        first_nodes = []
        for of_type, nodes, sizes in zip(lists, self._nodes, begin, strict=True):
            counts = (sizes[0].most, nodes.ids.numel())
            first_nodes += [
                _C.FirstNodes(of_type, count, address + 8 * size.place)
                for count, size in zip(counts, sizes, strict=True)
                if count or size.most
            ]
        scratch = (slot_place.data_ptr(), slot_edge.data_ptr(), tile_counts.data_ptr())
        steps = []
        for step in part.steps:
            relation, output = step.relation, step.output
            known = (
                step.first,
                step.end,
                step.nodes_before,
                step.nodes_after,
                step.edges_before,
                step.edges_after,
            )
            weight, weight_sum = relation.weight, relation.weight_sum
            steps.append(
                _C.SampleStep(
                    relation.adjacency.plain_structure,
                    0 if weight is None else weight.data_ptr(),
                    0 if weight_sum is None else weight_sum.data_ptr(),
                    ALL if step.induced else relation.fanouts[step.hop],
                    self._layout.replace,
                    step.induced,
                    step.hop * len(self._graph.relations) + step.number,
                    lists[relation.dst],
                    lists[relation.src],
                    tuple(address + 8 * size.place for size in known),  # type: ignore[arg-type]
                    (output.place.data_ptr(), output.row.data_ptr(), output.edge_id.data_ptr()),
                    step.end.most,
                    step.most_slots,
                    (slot_ptr.data_ptr() if self._has_pointers(step) else 0, *scratch),
                )
            )
        table = part.table.data_ptr()
        keys = (table, table + 8 * num_places) if has_keys else (0, table)
        part.node_table = _C.NodeTable(*keys, num_places, bits)
        _C.sample_neighbors(
            part.node_table,
            address,
            part.sizes,
            self._seed,
            first_nodes,
            steps,
            self._index,
            queue(self._index),
        )
        part.read = part.values
        if on_gpu:
            part.read = torch.empty(part.sizes, dtype=torch.int64, pin_memory=True)
            part.read.copy_(part.values, non_blocking=True)
            part.event = torch.cuda.Event()
            part.event.record()

    def _has_pointers(self, step: _Step) -> bool:
        """Whether rows have as many slots as entries."""
        return step.induced or step.relation.fanouts[step.hop] == ALL

    def _room(self, nodes: _Nodes, most: int) -> tuple[Tensor, Tensor | None]:
        """Memory for the nodes there are and those that come."""
        count = nodes.ids.numel()
        ids = torch.empty(most, dtype=torch.int64, device=self._graph.device)
        ids[:count] = nodes.ids
        if nodes.seed_of is None:
            return ids, None
        seed_of = torch.empty(most, dtype=torch.int32, device=self._graph.device)
        seed_of[:count] = nodes.seed_of
        return ids, seed_of

    # ---------------------------------------------------------------- completing

    def _finish_part(self) -> None:
        """Reads the sizes, and keeps what was drawn in memory of that size."""
        part = self._part
        if part.event is not None:
            part.event.synchronize()
        sizes = part.read.tolist()
        if sizes[0]:
            self._raise_range()
        for number, (nodes, (ids, seed_of)) in enumerate(zip(self._nodes, part.lists, strict=True)):
            before = nodes.ids.numel()
            for ends in part.ends:
                end = ends[number]
                count = sizes[end.place] if end.most else 0
                nodes.begin = before
                if len(nodes.counts) <= self._graph.num_hops:
                    nodes.counts.append(count - before)
                before = count
            nodes.ids = ids[:before].clone()
            nodes.seed_of = None if seed_of is None else seed_of[:before].clone()
        for step in part.steps:
            if not step.induced:
                counts = self._counts.setdefault(step.number, [0] * self._graph.num_hops)
                counts[step.hop] = sizes[step.edges_after.place] - sizes[step.edges_before.place]
        for key, output in part.outputs.items():
            if key[1] == _INDUCED or not self._layout.induced:
                self._edges.setdefault(key, []).append(self._emit(output, sizes[output.end.place]))
        del self._part

    def _emit(self, output: _Output, num_edges: int) -> tuple[Tensor, Tensor, Tensor]:
        """The edges of an output: indices, sources in 32 bits, and positions."""
        edge_index, col, edge_id = self._empty_edges(num_edges)
        _C.emit_edges(
            self._part.node_table,
            output.place.data_ptr(),
            output.row.data_ptr(),
            output.edge_id.data_ptr(),
            num_edges,
            edge_index.data_ptr(),
            col.data_ptr(),
            edge_id.data_ptr(),
            self._index,
            queue(self._index),
        )
        return edge_index, col, edge_id

    def _empty_edges(self, num_edges: int) -> tuple[Tensor, Tensor, Tensor]:
        device = self._graph.device
        with torch.inference_mode(False):
            edge_index = torch.empty(2, num_edges, dtype=torch.int64, device=device)
            col = torch.empty(num_edges, dtype=torch.int32, device=device)
            return edge_index, col, torch.empty(num_edges, dtype=torch.int64, device=device)

    def _raise_range(self) -> None:
        for name, size, nodes in zip(self._graph.node_types, self._graph.num_nodes, self._nodes, strict=True):
            if nodes.ids.numel():
                low, high = (int(end) for end in torch.aminmax(nodes.ids))
                if low < 0 or high >= size:
                    of_type = f" of type {name!r}" if self._graph.is_hetero else ""
                    raise ValueError(
                        f"seeds: expected ids from 0 to {size - 1}{of_type}, got values from {low} to {high}"
                    )

    def _assemble(self) -> Sample:
        """What the caller gets."""
        graph = self._graph
        names = graph.node_types

        def of_nodes(values: list[Any]) -> Any:
            return dict(zip(names, values, strict=True)) if graph.is_hetero else values[0]

        def of_edges(values: list[Any]) -> Any:
            types = [relation.name for relation in graph.relations]
            return dict(zip(types, values, strict=True)) if graph.is_hetero else values[0]

        edges = blocks = None
        if self._layout.blocks:
            blocks = [
                of_edges([self._edges_of(number, hop) for number in range(len(graph.relations))])
                for hop in range(graph.num_hops)
            ]
        else:
            key = _INDUCED if self._layout.induced else 0
            edges = of_edges([self._edges_of(number, key) for number in range(len(graph.relations))])
        return Sample(
            nodes=of_nodes([nodes.ids for nodes in self._nodes]),
            seed_of=of_nodes([nodes.seed_of for nodes in self._nodes]) if self._layout.disjoint else None,
            num_nodes=of_nodes([nodes.counts for nodes in self._nodes]),
            edges=edges,
            blocks=blocks,
        )

    def _edges_of(self, number: int, key: int) -> Edges:
        """The edges of a relation: of a hop of blocks, induced ones, or all that were drawn (0)."""
        relation = self._graph.relations[number]
        parts = self._edges.get((number, key)) or [self._empty_edges(0)]
        if len(parts) > 1:
            indices, cols, ids = zip(*parts, strict=True)
            parts = [(torch.cat(indices, 1), torch.cat(cols), torch.cat(ids))]
        edge_index, col, edge_id = parts[0]
        hops = self._graph.num_hops
        num_dst, num_src = sum(self._nodes[relation.dst].counts), sum(self._nodes[relation.src].counts)
        most_entries = max(relation.most_slots(hop) for hop in range(hops))
        counts = self._counts.get(number, [0] * hops)
        if self._layout.blocks:
            num_dst = sum(self._nodes[relation.dst].counts[: key + 1])
            num_src = sum(self._nodes[relation.src].counts[: key + 2])
            most_entries, counts = relation.most_slots(key), [col.numel()]
        if self._layout.induced:
            most_entries, counts = relation.most_entries, [col.numel()]
        return Edges(edge_index, col, edge_id, counts, (num_dst, num_src), most_entries)
