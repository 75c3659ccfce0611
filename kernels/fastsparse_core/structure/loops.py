"""A structure without its self loops."""

from __future__ import annotations

import torch

from fastsparse_core.structure.adjacency import Adjacency


def without_self_loops(adj: Adjacency) -> Adjacency:
    """The structure without its self loops; edge values keep the order and the number that they had."""

    def build() -> Adjacency:
        row, col = adj.row(), adj.col
        kept = torch.nonzero(row != col).flatten()
        rowptr = torch.zeros_like(adj.rowptr)
        torch.cumsum(torch.bincount(row[kept], minlength=adj.num_dst), 0, out=rowptr[1:])
        edge_id = kept.to(torch.int32) if adj.edge_id is None else adj.edge_id[kept]
        return Adjacency(rowptr, col[kept], adj.shape, edge_id=edge_id, num_values=adj.num_values)

    return adj.derived("fastsparse_core.structure.without_self_loops", build)
