"""Sparse-dense product of an Adjacency with sparse rows (SSD)."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core.adjacency import Adjacency
from fastsparse_core.formats.cbsr import CBSR
from fastsparse_core.ops.spmm import spmm


def ssd(
    adj: Adjacency,
    cbsr: CBSR,
    value: Tensor | None = None,
    reduce: str = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """:func:`spmm` of the rows that a :class:`CBSR` stands for: ``spmm(adj, cbsr.to_dense(), ...)``."""
    return spmm(adj, cbsr.to_dense(), value, reduce, scale_dst=scale_dst, scale_src=scale_src, bias=bias)
