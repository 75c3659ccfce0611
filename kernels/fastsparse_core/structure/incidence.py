"""Structures whose sources are the edges of another."""

from __future__ import annotations

import torch

from fastsparse_core.structure.adjacency import Adjacency


def incidence(adj: Adjacency) -> Adjacency:
    """The structure (num_dst, num_values) in which every edge is a source of its own destination.

    An aggregation over it sums features of edges; a sampled product gives every edge one with its
    destination.
    """

    def build() -> Adjacency:
        position = adj.edge_id
        if position is None:
            position = torch.arange(adj.num_edges, dtype=torch.int32, device=adj.device)
        # Values keep the order of the graph's own.
        shape = (adj.num_dst, adj.num_values)
        return Adjacency(adj.rowptr, position.int(), shape, edge_id=adj.edge_id, num_values=adj.num_values)

    found: Adjacency = adj.derived("fastsparse_core.structure.incidence", build)
    return found
