"""Reductions of consecutive rows: the few that DGL's readouts need, behind one door."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import Adjacency, spmm


def segment_reduce(x: Tensor, offsets: Tensor, reduce: str) -> Tensor:
    """Reduces every segment of the rows of ``x``; segments without rows give 0.

    Args:
        x: (offsets[-1], ...), floating.
        offsets: first row of every segment and the end of the last, (num_segments + 1,), integers.
        reduce: ``"sum"``, ``"max"`` or ``"min"``; ties go to the first row.

    Returns:
        (num_segments, ...); differentiable.
    """
    return spmm(_segments(offsets, x), x, reduce=reduce, algorithm="csr")


def scatter_add(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums the rows of ``x`` that have the same index, (size, ...); differentiable."""
    if not x.is_floating_point():
        return x.new_zeros(size, *x.shape[1:]).index_add_(0, index, x)
    rows = torch.arange(x.size(0), device=x.device, dtype=index.dtype)
    return spmm(Adjacency.from_coo(index, rows, (size, x.size(0)), group_rows="none"), x, algorithm="csr")


def _segments(offsets: Tensor, x: Tensor) -> Adjacency:
    column = torch.arange(x.size(0), dtype=torch.int32, device=x.device)
    shape = (offsets.numel() - 1, x.size(0))
    return Adjacency(offsets.to(x.device, torch.int64), column, shape, group_rows="none")
