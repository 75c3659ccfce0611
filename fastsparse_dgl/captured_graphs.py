"""DGL's graphs and blocks as arguments of captured steps: a graph that stays is read where it is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency, recorded
from fastsparse_core.capturing.arguments import Argument, Held, register, same
from fastsparse_core.capturing.fresh_adjacency import FreshAdjacency
from fastsparse_core.capturing.padding import MOST_HOPS, BatchPlaces, Room, Sizes
from fastsparse_core.sampling import Edges
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.sampled_block import SampledBlock


def _graph(graph: Any) -> Argument:
    if graph.is_block or len(graph.ntypes) != 1 or graph.batch_size != 1:
        raise TypeError("DGL's batches and heterogeneous graphs are not padded, nor blocks outside of a list")
    items = [frame[name] for frame in (graph.ndata, graph.edata) for name in sorted(frame)]
    return Argument(graph, (type(graph), same(graph)), items)


def _block(block: Any) -> Argument:
    raise TypeError("a sampled block is not padded by itself; pass the list of blocks")


def _blocks(blocks: Sequence[Any]) -> Argument | None:
    """The blocks of a batch, the first layer's first."""
    if not blocks or not all(isinstance(block, SampledBlock) or _is_block(block) for block in blocks):
        return None
    if any(len(block.canonical_etypes) != 1 for block in blocks):
        raise TypeError("blocks of several edge types are not padded")
    return _BlocksArgument(blocks)


def _is_block(item: Any) -> bool:
    return isinstance(item, dgl.DGLGraph) and item.is_block


class _BlocksArgument(Argument):
    """The blocks of a batch: its nodes by hop, whose first ones are the nodes of every later block."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        if len(blocks) >= MOST_HOPS:
            raise TypeError(f"more than {MOST_HOPS - 1} blocks are not padded")
        #: The last layer's first, as hops are counted.
        self.blocks = list(reversed(blocks))
        counts = [self.blocks[0].num_dst_nodes(), *(block.num_src_nodes() for block in self.blocks)]
        if counts[1:-1] != [block.num_dst_nodes() for block in self.blocks[1:]]:
            raise TypeError("blocks whose destinations are not the sources of the next are not padded")
        new = [after - before for before, after in itertools.pairwise(counts)]
        self.edges = [_edges_of(block) for block in self.blocks]
        self.sizes = Sizes((counts[0], *new), tuple(ends.size(1) for ends in self.edges))
        self.is_sorted = all(isinstance(block, SampledBlock) for block in self.blocks)
        self.frames = [_frames(block) for block in self.blocks]
        items = [frame[name] for frames in self.frames for frame in frames for name in frame]
        names = tuple(
            tuple((name, item.shape[1:], item.dtype, item.device, item.requires_grad) for name, item in frame)
            for frames in self.frames
            for frame in map(dict.items, frames)
        )
        kinds = tuple((type(block), block.canonical_etypes[0]) for block in blocks)
        key = (type(blocks), kinds, tuple((ends.dtype, ends.device) for ends in self.edges), names)
        super().__init__(blocks, key, [*self.edges, *items])

    def hold(self, room: Room | None) -> Held:
        assert room is not None
        return _HeldBlocks(self, room)


class _HeldBlocks(Held):
    """Memory for the blocks of a batch with padding in every hop."""

    def __init__(self, like: _BlocksArgument, room: Room) -> None:
        edges = like.edges[0]
        self._places = BatchPlaces(room, edges.device)
        nodes, of_edges = self._places.nodes, self._places.edges.starts
        self._edges = edges.new_zeros(2, sum(room.edges))
        self._frames, made = [], []
        address = self._edges.untyped_storage().data_ptr()
        self.greatest, self.sorted = {}, set()
        for hop, (block, frames) in enumerate(zip(like.blocks, like.frames, strict=True)):
            ends = self._edges[:, of_edges[hop] : of_edges[hop + 1]]
            shape = (nodes.starts[hop + 1], nodes.starts[hop + 2])
            rows = (shape[1], shape[0], ends.size(1))
            held = [
                {name: item.new_zeros(count, *item.shape[1:]) for name, item in frame.items()}
                for frame, count in zip(frames, rows, strict=True)
            ]
            made.append(_held_block(block, ends, shape, held, is_sorted=like.is_sorted))
            self._frames.append(held)
            self.greatest[address, ends.size(1)] = shape[1] - 1
        self.value = type(like.value)(reversed(made))
        self.tensors = [self._edges, *(x for held in self._frames for frame in held for x in frame.values())]
        self.rows = nodes.rows

    def write(self, argument: Argument) -> None:
        assert isinstance(argument, _BlocksArgument)
        assert argument.sizes is not None
        places, rows = self._places, []
        for given, held in zip(argument.frames, self._frames, strict=True):
            for nth, frame in enumerate(held):
                for name, memory in frame.items():
                    item = given[nth][name]
                    if nth == 2:  # what edges of padding hold reaches nothing
                        memory[: item.size(0)].copy_(item)
                    else:
                        rows.append((memory, item, places.nodes))
        places.write(argument.sizes, (self._edges, torch.cat(argument.edges, dim=1)), rows)


class _HeldEdges(Edges):
    """Edges whose structure is made anew in every run of the step."""

    is_sorted = False

    @property
    def adjacency(self) -> Adjacency:
        """The structure."""
        run = recorded.current()
        assert run is not None  # the block is nowhere else
        source, destination = self.edge_index
        made: Adjacency = run.structure(
            self,
            "adjacency",
            lambda: FreshAdjacency(destination, source, self.shape, is_sorted=self.is_sorted),
        )
        return made


class _HeldSortedEdges(_HeldEdges):
    """Edges that ascend by destination."""

    is_sorted = True


def _held_block(
    like: Any, ends: Tensor, shape: tuple[int, int], frames: Sequence[dict[str, Tensor]], *, is_sorted: bool
) -> SampledBlock:
    etype = like.canonical_etypes[0]
    source, _, destination = etype
    edges = (_HeldSortedEdges if is_sorted else _HeldEdges)(
        edge_index=ends,
        col=ends[0],
        edge_id=ends[0],
        counts=[ends.size(1)],
        shape=shape,
        most_entries=ends.size(1),
    )
    block = SampledBlock({etype: edges}, {source: shape[1]}, {destination: shape[0]}, ends.device)
    block.srcnodes[source] = SimpleNamespace(data=frames[0])
    block.dstnodes[destination] = SimpleNamespace(data=frames[1])
    block.edges.views[etype] = SimpleNamespace(data=frames[2])
    return block


def _edges_of(block: Any) -> Tensor:
    """Sources and destinations (2, E), in the order of the edges' data."""
    if isinstance(block, SampledBlock):
        return block.edges.of(block.canonical_etypes[0]).edge_index
    return torch.stack(block.edges(order="eid"))


def _frames(block: Any) -> list[dict[str, Tensor]]:
    """Data of sources, destinations and edges, by name."""
    frames: list[Mapping[str, Tensor]] = [block.srcdata, block.dstdata, block.edata]
    return [{name: frame[name] for name in sorted(frame)} for frame in frames]


register(dgl.DGLGraph, _graph)
register(SampledBlock, _block)
register(list, _blocks)
register(tuple, _blocks)
