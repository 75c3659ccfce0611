"""Lets captured steps take DGL's graphs, batches and blocks, and removes padding from DGL's readouts.

A single graph must have the same structure in every call, because the recorded step reads this structure in
place. Batches and blocks are padded: the recorded step gets objects with padded memory, which drop-in layers
and readouts accept.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import scatter
from fastsparse_core.capturing import forms
from fastsparse_core.capturing.arguments import Argument, Held, register, same
from fastsparse_core.capturing.padding import MOST_HOPS, BatchPlaces, Capacity, Places, Sizes
from fastsparse_core.segment import rows_of
from fastsparse_dgl.block_data import Frame, Frames, Space, frames_of, read_before
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.held_graph import HeldGraph, held_edges
from fastsparse_dgl.sampled_block import EdgeType, SampledBlock

_segment: Any = importlib.import_module("dgl.ops.segment")

_Frame = dict[str, Tensor]


# ---------------------------------------------------------------- graphs


def _graph(graph: Any) -> Argument:
    if graph.is_block:
        raise TypeError("a single DGL block is not padded; pass the list of blocks")
    if graph.batch_size == 1:
        return _GraphArgument(graph)
    if len(graph.canonical_etypes) != 1 or len(graph.ntypes) != 1:
        raise TypeError("DGL's batches of graphs with several node or edge types are not padded")
    return _BatchArgument(graph)


class _GraphArgument(Argument):
    """A single graph. The structure is part of the step's key; the data are the tensors of the argument."""

    def __init__(self, graph: Any) -> None:
        frames = _frames_of_graph(graph)
        names = tuple(tuple(frame) for frame in frames)
        tensors = [item for frame in frames for item in frame.values()]
        super().__init__(graph, (type(graph), same(getattr(graph, "_graph", graph)), names), tensors)
        self.names = names

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        graph, given = self.value.local_var(), iter(tensors)
        views = [
            *(graph.nodes[name] for name in graph.ntypes),
            *map(graph.edges.__getitem__, graph.canonical_etypes),
        ]
        for view, names in zip(views, self.names, strict=True):
            for name in names:
                view.data[name] = next(given)
        return graph


def _frames_of_graph(graph: Any) -> list[_Frame]:
    """Data of the nodes of every type, and of the edges of every type."""
    views = [graph.nodes[name] for name in graph.ntypes] + [
        graph.edges[name] for name in graph.canonical_etypes
    ]
    return [_frame(view.data) for view in views]


def _frame(data: Mapping[str, Tensor]) -> _Frame:
    """Returns the user's data by name, without tensors that have a ``grad_fn``: a step computed them."""
    return {name: data[name] for name in sorted(data) if data[name].grad_fn is None}


def _key_of(frames: Sequence[_Frame]) -> tuple[Any, ...]:
    return tuple(
        tuple(
            (name, item.shape[1:], item.dtype, item.device, item.requires_grad)
            for name, item in frame.items()
        )
        for frame in frames
    )


# ---------------------------------------------------------------- batches of graphs


class _BatchArgument(Argument):
    """A batch of graphs."""

    sizes: Sizes

    def __init__(self, graph: Any) -> None:
        self.edges = torch.stack(graph.edges(order="eid"))
        self.lengths = [graph.batch_num_nodes(), graph.batch_num_edges()]
        self.num_graphs: int = graph.batch_size
        self.sizes = Sizes(((graph.num_nodes(),),), ((graph.num_edges(),),))
        self.frames = _frames_of_graph(graph)
        kinds = (type(graph), self.num_graphs, *graph.canonical_etypes[0])
        key = (*kinds, self.edges.dtype, self.edges.device, _key_of(self.frames))
        tensors = [item for frame in self.frames for item in frame.values()]
        super().__init__(graph, key, [self.edges, *tensors])

    def hold(self, capacity: Capacity | None) -> Held:
        assert capacity is not None
        return _HeldBatch(self, capacity)


class _HeldBatch(Held):
    """Memory for a padded batch. The padding is one additional graph, which readouts leave out."""

    def __init__(self, like: _BatchArgument, capacity: Capacity) -> None:
        self._places = BatchPlaces(capacity, like.edges.device)
        self._of_rows = [*self._places.nodes, *self._places.edges]
        self.num_graphs = like.num_graphs
        self._edges = like.edges.new_zeros(2, sum(capacity.edges[0]))
        self._frames = [
            {name: item.new_zeros(places.starts[-1], *item.shape[1:]) for name, item in frame.items()}
            for frame, places in zip(like.frames, self._of_rows, strict=True)
        ]
        self._lengths = [torch.zeros_like(item) for item in like.lengths]
        #: For nodes and for edges: the number of the graph to which each of them belongs, int64.
        self._of_graph = [
            torch.zeros(places.starts[-1], dtype=torch.int64, device=like.edges.device)
            for places in self._of_rows
        ]
        self.value = HeldGraph(like.value, self._edges, self._frames, self._lengths, capacity)
        self.tensors = [self._edges, *(item for frame in self._frames for item in frame.values())]
        self.rows = self._places.rows
        address = self._edges.untyped_storage().data_ptr()
        self.greatest = {(address, -1, -1): sum(capacity.nodes[0]) - 1}
        self.sorted = {(index.untyped_storage().data_ptr(), 0) for index in self._of_graph}

    def graph_of(self, lengths: Any) -> Tensor | None:
        """Returns the graph of every row if ``lengths`` are this batch's nodes or edges per graph."""
        found = (of for own, of in zip(self._lengths, self._of_graph, strict=True) if own is lengths)
        return next(found, None)

    def write(self, argument: Argument) -> None:
        assert isinstance(argument, _BatchArgument)
        rows = [
            (memory, given[name], places)
            for given, held, places in zip(argument.frames, self._frames, self._of_rows, strict=True)
            for name, memory in held.items()
        ]
        number = torch.arange(self.num_graphs, device=self._edges.device)
        counts = [sizes[0] for sizes in argument.sizes.kinds]
        for nth, (lengths, places) in enumerate(zip(argument.lengths, self._of_rows, strict=True)):
            self._lengths[nth].copy_(lengths)
            of_graph = number.repeat_interleave(lengths.to(number.device), output_size=counts[nth])
            rows.append((self._of_graph[nth], of_graph, places))
        self._places.write(argument.sizes, [(self._edges, argument.edges)], rows)
        for of_graph, places in zip(self._of_graph, self._of_rows, strict=True):
            of_graph.masked_fill_(places.mask.logical_not(), self.num_graphs)


@contextlib.contextmanager
def _stand_ins(held: list[Held]) -> Iterator[None]:
    """In this context, readouts omit the padding's graph. At its end, data that the step added is removed."""
    batches = [item for item in held if isinstance(item, _HeldBatch)]
    graphs = [item.value for item in batches]
    graphs += [block for item in held if isinstance(item, _HeldBlocks) for block in item.value]

    def graph_of(lengths: Any) -> tuple[Tensor, int] | None:
        found = ((item.graph_of(lengths), item.num_graphs) for item in batches)
        return next(((of_graph, count) for of_graph, count in found if of_graph is not None), None)

    def reduce(seglen: Any, value: Tensor, reducer: Any = "sum") -> Any:
        known = graph_of(seglen)
        if known is None:
            return reduced(seglen, value, reducer)
        of_graph, count = known
        return scatter(value, of_graph, count + 1, reducer)[:count]

    def repeat(input: Tensor, repeats: Any, dim: int) -> Any:
        known = graph_of(repeats)
        if known is None or dim != 0:
            return repeated(input, repeats, dim)
        of_graph, count = known
        return rows_of(input, of_graph.clamp(max=count - 1))

    reduced, repeated = _segment.segment_reduce, dgl.backend.repeat
    with contextlib.ExitStack() as stack:
        for graph in graphs:
            stack.enter_context(graph.local_scope())
        if batches:
            _segment.segment_reduce, dgl.backend.repeat = reduce, repeat
        try:
            yield
        finally:
            _segment.segment_reduce, dgl.backend.repeat = reduced, repeated


# ---------------------------------------------------------------- blocks


def _block(block: Any) -> Argument:
    raise TypeError("a single sampled block is not padded; pass the list of blocks")


def _blocks(blocks: Sequence[Any]) -> Argument | None:
    """Makes the argument for a list of blocks in the order of the layers; None for other kinds of lists."""
    if not blocks or not all(isinstance(block, SampledBlock) or _is_block(block) for block in blocks):
        return None
    if any(block.canonical_etypes != blocks[0].canonical_etypes for block in blocks):
        raise TypeError("blocks of different edge types are not padded")
    return _BlocksArgument(blocks)


def _is_block(item: Any) -> bool:
    return isinstance(item, dgl.DGLGraph) and item.is_block


class _BlocksArgument(Argument):
    """The blocks of a batch. Nodes are sorted by hop: a block's first nodes are those of the next block."""

    sizes: Sizes

    def __init__(self, blocks: Sequence[Any]) -> None:
        if len(blocks) >= MOST_HOPS:
            raise TypeError(f"more than {MOST_HOPS - 1} blocks are not padded")
        #: The last layer's block first, because hops are counted from the seeds.
        self.blocks = list(reversed(blocks))
        self.etypes: list[EdgeType] = list(blocks[0].canonical_etypes)
        self.ntypes: list[str] = list(dict.fromkeys([*blocks[0].srctypes, *blocks[0].dsttypes]))
        #: By edge type, then by block: sources and destinations (2, E), in the order of the edges' data.
        self.edges = [[_edges_of(block, etype) for block in self.blocks] for etype in self.etypes]
        self.sizes = Sizes(
            tuple(self._nodes(name) for name in self.ntypes),
            tuple(tuple(ends.size(1) for ends in hops) for hops in self.edges),
            tuple(
                (self.ntypes.index(source), self.ntypes.index(target)) for source, _, target in self.etypes
            ),
        )
        self.is_sorted = all(isinstance(block, SampledBlock) for block in self.blocks)
        self.frames = [_frames_of_block(block) for block in self.blocks]
        flat = [ends for hops in self.edges for ends in hops]
        frames = [frame for of_block in self.frames for frame in of_block]
        kinds = (tuple(type(block) for block in blocks), tuple(self.ntypes), tuple(self.etypes))
        key = (type(blocks), kinds, tuple((ends.dtype, ends.device) for ends in flat), _key_of(frames))
        super().__init__(blocks, key, [*flat, *(item for frame in frames for item in frame.values())])

    def _nodes(self, ntype: str) -> tuple[int, ...]:
        """Returns the number of nodes of a type that each hop adds."""

        def count(block: Any, side: str) -> int:
            names = block.srctypes if side == "src" else block.dsttypes
            return int(getattr(block, f"num_{side}_nodes")(ntype)) if ntype in names else 0

        counts = [count(self.blocks[0], "dst"), *(count(block, "src") for block in self.blocks)]
        new = [after - before for before, after in itertools.pairwise(counts)]
        if counts[1:-1] != [count(block, "dst") for block in self.blocks[1:]] or min(new) < 0:
            raise TypeError("blocks whose destinations are not the sources of the next are not padded")
        return (counts[0], *new)

    def hold(self, capacity: Capacity | None) -> Held:
        assert capacity is not None
        return _HeldBlocks(self, capacity)


class _HeldBlocks(Held):
    """Memory for the blocks of a batch with padding in every hop."""

    def __init__(self, like: _BlocksArgument, capacity: Capacity) -> None:
        given = [hops[0] for hops in like.edges]
        self._places = BatchPlaces(capacity, given[0].device)
        self._edges = [ends.new_zeros(2, sum(hops)) for ends, hops in zip(given, capacity.edges, strict=True)]
        self.greatest, self.sorted = {}, set()
        self._frames: list[list[tuple[_Frame, Places | None]]] = []
        made = [self._block(like, hop) for hop in range(len(like.blocks))]
        self.value = type(like.value)(reversed(made))
        held = (item for of_block in self._frames for frame, _ in of_block for item in frame.values())
        self.tensors = [*self._edges, *held]
        self.rows = [rows for places in self._places.nodes for rows in places.rows]

    def _block(self, like: _BlocksArgument, hop: int) -> SampledBlock:
        """The padded block that the recorded step gets in place of a block, with memory for its data."""
        block, places = like.blocks[hop], self._places
        num_src = {name: places.nodes[nth].starts[hop + 2] for nth, name in enumerate(like.ntypes)}
        num_dst = {name: places.nodes[nth].starts[hop + 1] for nth, name in enumerate(like.ntypes)}
        edges = {}
        for nth, etype in enumerate(like.etypes):
            starts = places.edges[nth].starts
            ends = self._edges[nth][:, starts[hop] : starts[hop + 1]]
            shape = (num_dst[etype[2]], num_src[etype[0]])
            edges[etype] = held_edges(ends, shape, is_sorted=like.is_sorted)
            address = ends.untyped_storage().data_ptr()
            for end, size in zip(ends, reversed(shape), strict=True):
                self.greatest[address, end.storage_offset(), end.numel()] = size - 1
        counts: dict[Space, int] = {("src", name): num_src[name] for name in block.srctypes}
        counts |= {("dst", name): num_dst[name] for name in block.dsttypes}
        counts |= {("edge", name): of_type.col.numel() for name, of_type in edges.items()}
        frames: Frames = {}
        held: list[tuple[_Frame, Places | None]] = []
        for (space, count), frame in zip(counts.items(), like.frames[hop], strict=True):
            memory = {name: item.new_zeros(count, *item.shape[1:]) for name, item in frame.items()}
            frames[space] = Frame(memory, count)
            held.append((memory, None if space[0] == "edge" else places.nodes[like.ntypes.index(space[1])]))
        self._frames.append(held)
        of_sources = {name: num_src[name] for name in block.srctypes}
        of_destinations = {name: num_dst[name] for name in block.dsttypes}
        return SampledBlock(edges, of_sources, of_destinations, places.device, frames=frames)

    def write(self, argument: Argument) -> None:
        assert isinstance(argument, _BlocksArgument)
        rows = []
        for given, of_block in zip(argument.frames, self._frames, strict=True):
            for frame, (memory, of_rows) in zip(given, of_block, strict=True):
                for name, item in frame.items():
                    if of_rows is None:  # edge data need no padding, because padded edges have no effect
                        memory[name][: item.size(0)].copy_(item)
                    else:
                        rows.append((memory[name], item, of_rows))
        edges = [
            (held, torch.cat(hops, dim=1)) for held, hops in zip(self._edges, argument.edges, strict=True)
        ]
        self._places.write(argument.sizes, edges, rows)


def _edges_of(block: Any, etype: EdgeType) -> Tensor:
    """Returns sources and destinations, (2, E), in the order of the edges' data."""
    if isinstance(block, SampledBlock):
        return block.edges.of(etype).edge_index
    return torch.stack(block.edges(order="eid", etype=etype))


def _frames_of_block(block: Any) -> list[_Frame]:
    """Data of the sources, destinations and edges of every type."""
    frames = block.frames if isinstance(block, SampledBlock) else frames_of(block)
    return [_frame(read_before(frame)) for frame in frames.values()]


register(dgl.DGLGraph, _graph)
register(SampledBlock, _block)
register(list, _blocks)
register(tuple, _blocks)
forms.surroundings.append(_stand_ins)
