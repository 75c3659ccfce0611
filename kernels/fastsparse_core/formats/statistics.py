"""Counts vectors, zeros, instructions and bytes of a structure's formats (FlashSparse, tables 2 and 7)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fastsparse_core.formats.bsb import BLOCK, HEIGHT, QUAD, QUAD_BYTES, vectors_together
from fastsparse_core.formats.grouping import Rows, vectors_per_window

#: SR-BCRS pads the number of vectors of a window to a multiple of this number: the k of m16n8k8, the paper's
#: instruction for 16-bit values.
_PADDING = 8


@dataclass(frozen=True)
class FormatStatistics:
    """Counts for one structure and one grouping of its rows.

    "8x1" and "16x1" mean windows of 8 and of 16 rows. A window of 16 rows consists of two windows of 8 rows.
    Without FlashSparse's exchange of operands (section 3.2), the instruction needs windows of 16 rows.

    Attributes:
        num_edges: number of entries.
        vectors_8x1: number of non-zero vectors; every repetition of an edge counts as another vector.
        vectors_16x1: number of non-zero vectors in windows of 16 rows.
        zeros_8x1: number of zeros inside the vectors (table 2).
        zeros_16x1: number of zeros inside the vectors of windows of 16 rows.
        mma_8x1: number of instructions m16n8k16 in a product with 16 features: one per 16 vectors.
        mma_16x1: number of these instructions for windows of 16 rows: two per 16 vectors, each for 8 features
            (figure 14).
        bsb_bytes: bytes of binary sparse blocks, without the positions of edge values.
        me_bcrs_bytes: bytes of ME-BCRS with 16-bit values and 32-bit indices (section 3.5).
        sr_bcrs_bytes: bytes of SR-BCRS: ME-BCRS padded to 8 vectors, with two pointers per window (table 7).
        csr_bytes: bytes of CSR with 16-bit values and 32-bit indices.
    """

    num_edges: int
    vectors_8x1: int
    vectors_16x1: int
    zeros_8x1: int
    zeros_16x1: int
    mma_8x1: int
    mma_16x1: int
    bsb_bytes: int
    me_bcrs_bytes: int
    sr_bcrs_bytes: int
    csr_bytes: int


def statistics(adj: Rows, window_row: Tensor | None = None) -> FormatStatistics:
    """Counts vectors, zeros, instructions and bytes without building the formats.

    Args:
        adj: the structure.
        window_row: result of :func:`~fastsparse_core.formats.grouping.group_rows`; None: consecutive rows.
    """
    low = vectors_per_window(adj, window_row)
    high = vectors_per_window(adj, window_row, height=2 * HEIGHT)
    num_edges, num_windows = adj.num_edges, low.numel()
    vectors, tall_vectors = int(low.sum()), int(high.sum())
    padded = _rounded(low, _PADDING) * _PADDING
    blocks, quads = _rounded(low, BLOCK), _rounded(low, QUAD)
    if vectors_together(quads, blocks, adj.num_dst, num_edges) == BLOCK:
        quads = blocks * (BLOCK // QUAD)
    grouping = 0 if window_row is None else window_row.nbytes
    return FormatStatistics(
        num_edges=num_edges,
        vectors_8x1=vectors,
        vectors_16x1=tall_vectors,
        zeros_8x1=HEIGHT * vectors - num_edges,
        zeros_16x1=2 * HEIGHT * tall_vectors - num_edges,
        mma_8x1=blocks,
        mma_16x1=2 * _rounded(high, BLOCK),
        bsb_bytes=4 * (num_windows + 1) + QUAD_BYTES * quads + grouping,
        me_bcrs_bytes=4 * (num_windows + 1) + (4 + 2 * HEIGHT) * vectors + grouping,
        sr_bcrs_bytes=4 * 2 * num_windows + (4 + 2 * HEIGHT) * padded + grouping,
        csr_bytes=4 * (adj.num_dst + 1) + (4 + 2) * num_edges,
    )


def _rounded(vectors: Tensor, multiple: int) -> int:
    """Number of groups of ``multiple`` vectors, if no group spans two windows."""
    return int(((vectors + (multiple - 1)) // multiple).sum())
