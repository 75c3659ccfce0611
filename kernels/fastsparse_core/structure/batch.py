"""Structures of sampled batches, and of batches of whole graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import gpu
from fastsparse_core.formats import lengths
from fastsparse_core.formats.row_split import unsplit_rows
from fastsparse_core.structure.adjacency import Adjacency


def adjacency_of_batch(
    rowptr: Tensor,
    col: Tensor,
    shape: tuple[int, int],
    inv_degree: Tensor,
    slices: Tensor | None,
    *,
    most_entries: int,
    edge_id: Tensor | None = None,
) -> Adjacency:
    """Makes the structure of a batch from tensors that a kernel wrote, without checks.

    Args:
        rowptr: int64 (num_dst + 1,).
        col: int32 (num_edges,).
        shape: (num_dst, num_src).
        inv_degree: as in :meth:`Adjacency.inv_degree`.
        slices: on CUDA, the work list in which every row is one slice, in row order, int64 (num_dst, 2); it
            is used if no row is longer than a slice. None on the CPU.
        most_entries: upper bound of the number of entries per row.
        edge_id: as in :class:`Adjacency`, (num_edges,).
    """
    adjacency = Adjacency(rowptr, col, shape, edge_id=edge_id)
    adjacency.symmetric = False
    adjacency._of_rows.results[("inv_degree", torch.float32)] = inv_degree
    if slices is not None and most_entries <= lengths.slice_length(col.numel(), gpu.profile_of(col.device)):
        adjacency._of_rows.results["row_split"] = unsplit_rows(slices)
        adjacency.has_sorted_slices = False
    if edge_id is None:
        adjacency.usage.scattered = 0
    return adjacency
