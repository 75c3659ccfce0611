"""Samples one batch in parts.

For each part, the host plans hops with upper bounds of their sizes, enqueues them without waiting for the
device, and then reads the actual sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.log import range_text
from fastsparse_core.sampling.part import LIMIT, Known, Layout, Nodes, Output, Part, Size, Step, enqueue
from fastsparse_core.sampling.relations import ALL, Graph
from fastsparse_core.sampling.sample import Edges, Sample

#: Largest number of slots (possible edges) of the hops in one part; a single hop may have more. A slot takes
#: 28 bytes of memory, and up to 36 bytes for its entry in the table of nodes.
_MOST_SLOTS = 2**23
#: Key, in place of the number of a hop, for the induced edges: all edges between the batch's nodes.
_INDUCED = -1


class Draw:
    """A batch whose sampling has started, from :meth:`NeighborSampler.start`; :meth:`finish` completes it.

    Args:
        graph: the graph to sample from.
        layout: options of the sampler.
        seeds: ids of the seeds, int64 (number of seeds,), one tensor per node type.
        seed: seed of the random numbers.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, NeighborSampler
        >>> ring = Adjacency.from_coo(torch.arange(6), torch.arange(6).roll(1), (6, 6))
        >>> draw = NeighborSampler(ring, [2]).start(torch.tensor([3]))
        >>> draw.finish().nodes
        tensor([3, 2])
    """

    def __init__(self, graph: Graph, layout: Layout, seeds: list[Tensor], seed: int) -> None:
        self._graph, self._layout, self._seed = graph, layout, seed
        self._index = device_index(graph.device)
        self._nodes = [Nodes(of_type) for of_type in seeds]
        if layout.disjoint:
            offset = 0
            for nodes in self._nodes:
                end = offset + nodes.ids.numel()
                nodes.seed_of = torch.arange(offset, end, dtype=torch.int32, device=graph.device)
                offset = end
        self._num_hops = graph.num_hops + layout.induced  # an additional hop collects the induced edges
        self._hop = 0
        self._edges: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self._counts: dict[int, list[int]] = {}
        self._sample: Sample | None = None
        self._start_part()

    def finish(self) -> Sample:
        """Waits until the batch is sampled, and returns it.

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
        """Plans as many hops as the limit of slots allows, and enqueues them."""
        part = Part()
        counts = [nodes.ids.numel() for nodes in self._nodes]
        # With blocks, every hop samples neighbours of all nodes again, beginning with the first node.
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
            if most >= LIMIT:
                raise ValueError(
                    f"seeds: expected a batch of fewer than 2^31 edges, got up to {most}; pass fewer seeds"
                )
            part.slots += most
            first, end = self._plan_hop(part, slots, first, end)
            self._hop += 1
        self._part = part
        enqueue(part, self._graph, self._layout, self._nodes, begin_sizes, end, self._seed)

    def _is_induced(self) -> bool:
        return self._hop == self._graph.num_hops

    def _slots_of_hop(self, first: list[Size], end: list[Size]) -> dict[int, int]:
        """Upper bounds of the number of slots, by number of the relation, for relations that have slots."""
        slots = {}
        for number, relation in enumerate(self._graph.relations):
            rows = end[relation.dst]
            per_row = relation.most_entries if self._is_induced() else relation.most_slots(self._hop)
            # True if the previous hop added no nodes of this type.
            is_at_end = first[relation.dst].place == rows.place
            if rows.most and per_row and (self._is_induced() or not is_at_end):
                slots[number] = rows.most * per_row
        return slots

    def _exact_slots(self, slots: dict[int, int]) -> dict[int, int]:
        """Replaces upper bounds of slots by tighter ones; waits for the device.

        Only for the first hop of a part: the ids of its nodes are already in memory.
        """
        exact = {}
        for number, most in slots.items():
            relation, nodes = self._graph.relations[number], self._nodes[self._graph.relations[number].dst]
            induced = self._is_induced()
            ids = nodes.ids if induced or self._layout.blocks else nodes.ids[nodes.begin :]
            if induced or relation.fanouts[self._hop] == ALL:
                # Ids out of range have no row. `_finish_part` raises the error, after the kernels found them.
                valid = ids.clamp(0, max(relation.adjacency.num_dst - 1, 0))
                rowptr = relation.adjacency.rowptr
                most = int((rowptr[valid + 1] - rowptr[valid]).sum())
            else:
                most = ids.numel() * relation.fanouts[self._hop]
            exact[number] = most
        return exact

    def _plan_hop(
        self, part: Part, slots: dict[int, int], first: list[Size], end: list[Size]
    ) -> tuple[list[Size], list[Size]]:
        """Adds the steps of a hop to a part.

        Returns:
            The range of nodes that the next hop samples from: first nodes and ends, by node type.
        """
        last = list(end)
        induced = self._is_induced()
        for number, most_slots in slots.items():
            relation = self._graph.relations[number]
            key = (number, _INDUCED if induced else self._hop if self._layout.blocks else 0)
            output = part.outputs.setdefault(key, Output(part.zero))
            before = last[relation.src]
            limit = LIMIT if self._layout.disjoint else self._most_nodes(relation.src)
            after = part.size(min(before.most + most_slots, limit))
            edges_after = part.size(output.end.most + most_slots)
            part.steps.append(
                Step(
                    number=number,
                    relation=relation,
                    hop=self._hop,
                    fanout=ALL if induced else relation.fanouts[self._hop],
                    known=Known(
                        first=part.zero if induced else first[relation.dst],
                        end=end[relation.dst],
                        nodes_before=before,
                        nodes_after=after,
                        edges_before=output.end,
                        edges_after=edges_after,
                    ),
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
        """Upper bound of the number of nodes of a type in a batch: only seeds may occur more than once."""
        return self._nodes[node_type].counts[0] + self._graph.num_nodes[node_type]

    # ---------------------------------------------------------------- completing

    def _finish_part(self) -> None:
        """Reads the sizes of a part, and copies the sampled nodes and edges to tensors of these sizes."""
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
            nodes.ids = _first(ids, before)
            nodes.seed_of = None if seed_of is None else _first(seed_of, before)
        for step in part.steps:
            if not step.induced:
                counts = self._counts.setdefault(step.number, [0] * self._graph.num_hops)
                counts[step.hop] = sizes[step.known.edges_after.place] - sizes[step.known.edges_before.place]
        for key, output in part.outputs.items():
            if key[1] == _INDUCED or not self._layout.induced:
                self._edges.setdefault(key, []).append(self._emit(output, sizes[output.end.place]))
        del self._part

    def _emit(self, output: Output, num_edges: int) -> tuple[Tensor, Tensor, Tensor]:
        """The edges of an output.

        Returns:
            Edge index, int64 (2, num_edges); sources, int32 (num_edges,); positions in the caller's edge
            order, int64 (num_edges,).
        """
        if self._graph.device.type == "cpu":
            with torch.inference_mode(False):
                edge_index = torch.empty(2, num_edges, dtype=torch.int64)
                col, edge_id = _first(output.place, num_edges), _first(output.edge_id, num_edges)
        else:
            edge_index, col, edge_id = self._empty_edges(num_edges)
        _C.emit_edges(
            table=self._part.node_table,
            place=output.place,
            row=output.row,
            edge_id=output.edge_id,
            num_edges=num_edges,
            edge_index=edge_index,
            col=col,
            edge_id_out=edge_id,
            device=self._index,
            queue=queue(self._index),
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
                        f"seeds: expected ids from 0 to {size - 1}{of_type}, {range_text(low, high)}"
                    )

    def _assemble(self) -> Sample:
        """Makes the result for the caller from the nodes and edges of all parts."""
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
        """The edges of a relation; ``key`` is the hop of a block, `_INDUCED`, or 0 for all sampled edges."""
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


def _first(memory: Tensor, count: int) -> Tensor:
    """The first ``count`` rows of memory that was allocated for an upper bound.

    The result is a copy, so that the unused memory is freed. On the CPU, it is a view if at least half of the
    memory is used, because copies took 8 % of a batch's time.
    """
    first = memory[:count]
    return first if memory.device.type == "cpu" and 2 * count >= memory.numel() else first.clone()
