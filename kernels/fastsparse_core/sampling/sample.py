"""What neighbour sampling returns."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.batch import adjacency_of_batch


@dataclass(frozen=True, eq=False)
class Edges:
    """Sampled edges of one type, sorted by destination. Nodes are numbered as in the batch.

    Attributes:
        edge_index: int64 (2, num_edges), sources and destinations.
        col: int32 (num_edges,), the sources.
        edge_id: int64 (num_edges,), positions of the edges in the caller's edge order.
        counts: number of edges of every hop, in the order of the edges.
        shape: (num_dst, num_src), the numbers of possible destinations and sources.
        most_entries: upper bound of the number of edges per destination, known without reading from the
            device.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, NeighborSampler
        >>> ring = Adjacency.from_coo(torch.arange(6), torch.arange(6).roll(1), (6, 6))
        >>> edges = NeighborSampler(ring, [2, 2]).sample(torch.tensor([3])).edges
        >>> edges.edge_index
        tensor([[1, 2],
                [0, 1]])
    """

    edge_index: Tensor
    col: Tensor
    edge_id: Tensor
    counts: list[int]
    shape: tuple[int, int]
    most_entries: int

    @property
    def is_sorted(self) -> bool:
        """True: destinations ascend."""
        return True

    @property
    def has_structure(self) -> bool:
        """Whether `adjacency` can be made."""
        return True

    @property
    def has_loops(self) -> bool | None:
        """Whether some edge is a loop; None: not checked yet."""
        return None

    @functools.cached_property
    def adjacency(self) -> Adjacency:
        """The edges as a structure, built without reading from the device or checking them again."""
        device, (num_dst, _) = self.col.device, self.shape
        with torch.inference_mode(False):
            rowptr = torch.empty(num_dst + 1, dtype=torch.int64, device=device)
            inv_degree = torch.empty(num_dst, dtype=torch.float32, device=device)
            slices = (
                torch.empty(num_dst, 2, dtype=torch.int64, device=device) if device.type == "cuda" else None
            )
        where, queue = place_of(device)
        _C.emit_rows(
            row=self.edge_index[1],
            num_edges=self.col.numel(),
            num_rows=num_dst,
            rowptr=rowptr,
            inv_degree=inv_degree,
            slices=slices,
            device=where,
            queue=queue,
        )
        return adjacency_of_batch(
            rowptr, self.col, self.shape, inv_degree, slices, most_entries=self.most_entries
        )

    @property
    def rowptr(self) -> Tensor:
        """int64 (num_dst + 1,), the range of edges of every destination."""
        return self.adjacency.rowptr

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Edges:
        """The same edges on another device, and their structure.

        Args:
            device: the target.
            non_blocking: as in :meth:`torch.Tensor.to`.
        """
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("edge_index", "col", "edge_id")
        }
        edges = replace(self, **moved)
        edges.__dict__["adjacency"] = self.adjacency.to(device, non_blocking)
        return edges


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch of nodes with sampled neighbours.

    For a graph with several types, the fields are dicts by node type or by edge type.

    Attributes:
        nodes: int64, ids of the batch's nodes in the graph: first the seeds as they were given, then the new
            nodes of every hop, each once.
        seed_of: int32, with ``disjoint``: number of the seed whose subgraph a node belongs to; otherwise
            None.
        num_nodes: number of nodes of every hop; the first is the number of seeds.
        edges: :class:`Edges` between these nodes; None with ``blocks``.
        blocks: with ``blocks``: :class:`Edges` of every hop, starting at the seeds; otherwise None.
            Destinations are the nodes of the hops before; sources are these and the nodes that the hop added.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, NeighborSampler
        >>> ring = Adjacency.from_coo(torch.arange(6), torch.arange(6).roll(1), (6, 6))
        >>> sample = NeighborSampler(ring, [2, 2]).sample(torch.tensor([3]))
        >>> sample.nodes, sample.num_nodes
        (tensor([3, 2, 1]), [1, 1, 1])
    """

    nodes: Any
    seed_of: Any
    num_nodes: Any
    edges: Any
    blocks: Any
