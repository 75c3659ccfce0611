"""Results of neighbour sampling."""

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
        edge_index: int64 (2, num_edges), sources, then destinations.
        col: int32 (num_edges,), the sources again, as `Adjacency` stores them.
        edge_id: int64 (num_edges,), positions of the edges in the caller's edge order.
        counts: number of edges of every hop, in the order of the edges; a single number for a block and for
            ``induced``.
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
        """Always True: the edges are sorted by destination."""
        return True

    @property
    def has_structure(self) -> bool:
        """Always True: `adjacency` can be built."""
        return True

    @property
    def has_loops(self) -> bool | None:
        """Always None: sampling does not check whether some edge is a loop."""
        return None

    @functools.cached_property
    def adjacency(self) -> Adjacency:
        """The edges as a structure. Building it neither waits for the device nor checks the edges."""
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
        """Row pointers, int64 (num_dst + 1,): the range of edges of every destination."""
        return self.adjacency.rowptr

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Edges:
        """Copies the edges and their structure to another device.

        Args:
            device: target device.
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
        nodes: ids of the batch's nodes in the graph, int64 (number of nodes,): first the seeds in the
            caller's order, then the new nodes of every hop. With ``disjoint``, an id occurs once per subgraph
            that contains the node; otherwise only ids of seeds may occur twice.
        seed_of: with ``disjoint``, number of the seed whose subgraph a node belongs to, int32 (number of
            nodes,); otherwise None.
        num_nodes: list of the number of seeds, then the number of new nodes of every hop.
        edges: :class:`Edges` between these nodes; None with ``blocks``.
        blocks: with ``blocks``, a list of :class:`Edges`, one per hop, starting at the seeds; otherwise None.
            The destinations of a block are the nodes of all earlier hops (in the first block, the seeds). Its
            sources are the destinations, then the nodes that the hop added.

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
