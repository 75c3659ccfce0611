"""The ends of every edge, and the edges of every destination as segments of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.segments import Segments


def edge_ends(adj: Adjacency) -> Tensor:
    """Source and destination of every edge, in the order of the edge values, int64 (2, num_values).

    If inserted loops replaced self loops of the caller, source and destination of the replaced loops are 0.
    """

    def build() -> Tensor:
        ends = torch.stack((adj.col.long(), adj.row().long()))
        if adj.edge_id is None:
            return ends
        return ends.new_zeros(2, adj.num_values).index_copy_(1, adj.edge_id.long(), ends)

    return adj.derived("fastsparse_core.structure.edge_ends", build)


def edge_segments(adj: Adjacency) -> Segments:
    """The edges of every destination, as segments of the rows of a matrix in the caller's edge order."""

    def build() -> Segments:
        split = adj.row_split if adj.device.type == "cuda" else None  # kernels on the CPU use no work list
        return Segments(adj.rowptr, adj.edge_id, adj.num_edges, split)

    return adj.derived("fastsparse_core.structure.edge_segments", build)
