"""The padded objects that a captured step gets in place of DGL's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastsparse_core import Adjacency, recorded
from fastsparse_core.capturing.fresh_adjacency import FreshAdjacency
from fastsparse_core.capturing.padding import Capacity
from fastsparse_core.sampling import Edges
from fastsparse_dgl.block_data import Frame
from fastsparse_dgl.sampled_block import SampledBlock


class HeldEdges(Edges):
    """Edges of a captured step. Every replay of the step builds their structure again."""

    is_sorted = False

    @property
    def adjacency(self) -> Adjacency:
        """The structure."""
        run = recorded.current()
        assert run is not None  # only a captured step gets these edges
        source, destination = self.edge_index
        made: Adjacency = run.structure(
            self,
            "adjacency",
            lambda: FreshAdjacency(destination, source, self.shape, is_sorted=self.is_sorted),
        )
        return made


class HeldSortedEdges(HeldEdges):
    """Edges sorted by destination."""

    is_sorted = True


def held_edges(ends: Tensor, shape: tuple[int, int], *, is_sorted: bool) -> HeldEdges:
    """Wraps edges in memory that the captured step reads.

    Args:
        ends: sources and destinations (2, E).
        shape: (destinations, sources).
        is_sorted: whether the edges are sorted by destination.
    """
    count = ends.size(1)
    return (HeldSortedEdges if is_sorted else HeldEdges)(
        edge_index=ends, col=ends[0], edge_id=ends[0], counts=[count], shape=shape, most_entries=count
    )


class HeldGraph(SampledBlock):
    """A padded batch of graphs, with the part of DGLGraph's interface that layers and readouts use.

    Args:
        like: a DGL batch with the same types and number of graphs.
        ends: sources and destinations (2, E).
        frames: data of nodes and of edges.
        lengths: numbers of nodes and numbers of edges of all graphs.
        capacity: largest numbers of nodes and edges for which there is memory.
    """

    is_block = is_unibipartite = False
    is_homogeneous = True

    def __init__(
        self,
        like: Any,
        ends: Tensor,
        frames: Sequence[dict[str, Tensor]],
        lengths: Sequence[Tensor],
        capacity: Capacity,
    ) -> None:
        (etype,), (ntype,) = like.canonical_etypes, like.ntypes
        size = sum(capacity.nodes[0])
        edges = held_edges(ends, (size, size), is_sorted=False)
        nodes, of_edges = (
            Frame(data, count) for data, count in zip(frames, (size, ends.size(1)), strict=True)
        )
        by_space = {("src", ntype): nodes, ("dst", ntype): nodes, ("edge", etype): of_edges}
        super().__init__({etype: edges}, {ntype: size}, {ntype: size}, ends.device, ends.dtype, by_space)
        self.nodes = {ntype: self.srcnodes[ntype], None: self.srcnodes[ntype]}
        self.batch_size: int = like.batch_size
        self._lengths = lengths

    @property
    def ntypes(self) -> list[str]:
        """The only node type."""
        return self.srctypes

    @property
    def ndata(self) -> Any:
        """Tensors of the nodes by name."""
        return self.srcdata

    def num_nodes(self, ntype: str | None = None) -> int:
        """Number of nodes."""
        return self.num_src_nodes(ntype)

    number_of_nodes = num_nodes

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Number of nodes of every graph."""
        return self._lengths[0]

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        """Number of edges of every graph."""
        return self._lengths[1]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"graph.{name} is not available on a padded batch: use drop-in layers and readouts instead of "
            "DGL's own layers"
        )
