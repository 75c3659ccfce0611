"""What must be known of edges before a structure is made of them: one pass, and one read from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.content import check_content
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.row_split import RowSplit, SliceCounts, unsplit_rows

#: Words that the kernels write, in the order of EdgeFact in kernels/include/fastsparse/views.h.
NUM_FACTS = 10
_SIGNED_TO_UNSIGNED = 2**64
_INT32_MAX = 2**31 - 1


class Inspection(NamedTuple):
    """Facts about edges or compressed rows, and what a structure of them consists of if they are sorted.

    Attributes:
        rowptr: int64 (num_rows + 1,); of edges: meaningful where `rows_descend` is False.
        col: int32 (num_edges,), the columns, meaningful where they are in range.
        inv_degree: float32 (num_rows,), as `Adjacency.inv_degree`.
        most_row: greatest row, beyond all valid ones where one is negative.
        most_col: the same of columns.
        most_edge_id: the same of edge ids.
        rows_descend: whether rows (compressed: pointers) come in another order than ascending.
        cols_descend: whether the columns of some row do.
        checksum: of a square structure given as edges: 0 where it equals its transpose, and with a chance of
            2^-64 where it does not.
        has_empty_rows: whether some row has no entry.
        ends: first and last of the row pointers.
        row_split: on CUDA the work list of rows that no slice has to cut, in row order; None where some row
            is longer than a slice.
    """

    rowptr: Tensor
    col: Tensor
    inv_degree: Tensor
    most_row: int
    most_col: int
    most_edge_id: int
    rows_descend: bool
    cols_descend: bool
    checksum: int
    has_empty_rows: bool
    ends: tuple[int, int]
    row_split: RowSplit | None


def inspect_edges(row: Tensor, col: Tensor, num_rows: int, longest: int, *, square: bool) -> Inspection:
    """Looks at edges whose indices may be anything.

    Args:
        row: int32 or int64 (num_edges,), contiguous.
        col: like ``row``.
        num_rows: number of rows.
        longest: entries of a slice, for `Inspection.row_split`.
        square: whether there are as many columns as rows.
    """
    # An empty tensor has no address, which says that pointers are given: without edges all of them are 0.
    rowptr = (torch.empty if row.numel() else torch.zeros)(num_rows + 1, dtype=torch.int64, device=row.device)
    return _inspect(row, col, None, rowptr, longest, square)


def inspect_rows(
    rowptr: Tensor, col: Tensor, edge_id: Tensor | None, longest: int, *, copy: bool = True
) -> Inspection:
    """Looks at compressed rows whose pointers and indices may be anything.

    Args:
        rowptr: int64 (num_rows + 1,), contiguous.
        col: int32 or int64 (num_edges,), contiguous.
        edge_id: int32 or int64 (num_edges,), contiguous, or None.
        longest: entries of a slice, for `Inspection.row_split`.
        copy: whether `Inspection.col` is another tensor than ``col`` where that is int32.
    """
    return _inspect(None, col, edge_id, rowptr, longest, False, copy)


def _inspect(
    row: Tensor | None,
    col: Tensor,
    edge_id: Tensor | None,
    rowptr: Tensor,
    longest: int,
    square: bool,
    copy: bool = True,
) -> Inspection:
    check_content("edges", row, col, edge_id, rowptr)
    device, num_rows = col.device, rowptr.numel() - 1
    index = device_index(device)
    is_copied = copy or col.dtype != torch.int32
    col_out = torch.empty(col.numel(), dtype=torch.int32, device=device) if is_copied else col
    inv_degree = _empty_for_autograd(num_rows, device)
    check_content("edges", col_out)  # a mode may give fake memory to real edges
    # Two words for every row's slice, and behind them room for the facts.
    room = torch.empty(num_rows + NUM_FACTS // 2, 2, dtype=torch.int64, device=device) if index >= 0 else None
    slices = 0 if room is None else room.data_ptr()
    words = _C.inspect(
        0 if row is None else row.data_ptr(),
        col.data_ptr(),
        0 if edge_id is None else edge_id.data_ptr(),
        col.dtype == torch.int64,
        edge_id is not None and edge_id.dtype == torch.int64,
        col.numel(),
        num_rows,
        square,
        rowptr.data_ptr(),
        col_out.data_ptr() if is_copied else 0,
        inv_degree.data_ptr(),
        slices,
        slices + 16 * num_rows,
        index,
        queue(index),
    )
    split = unsplit_rows(room[:num_rows]) if room is not None and words[9] <= longest else None
    return _found(rowptr, col_out, inv_degree, words, split)


def _found(
    rowptr: Tensor, col: Tensor, inv_degree: Tensor, words: Sequence[int], split: RowSplit | None
) -> Inspection:
    return Inspection(
        rowptr,
        col,
        inv_degree,
        words[0] % _SIGNED_TO_UNSIGNED,
        words[1] % _SIGNED_TO_UNSIGNED,
        words[2] % _SIGNED_TO_UNSIGNED,
        bool(words[3]),
        bool(words[4]),
        words[5],
        bool(words[6]),
        (words[7], words[8]),
        split,
    )


def _empty_for_autograd(length: int, device: torch.device) -> Tensor:
    """float32 numbers that are kept: they must serve autograd later, wherever they are made."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(length, dtype=torch.float32, device=device)
    with torch.inference_mode(False):
        return torch.empty(length, dtype=torch.float32, device=device)


class SortedEdges(NamedTuple):
    """Edges that were sorted by (row, column) while they were inspected.

    Attributes:
        order: the position in the input of every sorted edge, int32 where that fits, else int64.
        counted: on CUDA the slices of their rows.
    """

    order: Tensor
    counted: SliceCounts | None


def inspect_and_sort(
    row: Tensor, col: Tensor, shape: tuple[int, int], longest: int
) -> tuple[Inspection, SortedEdges | None]:
    """Looks at edges, and sorts them in the same call, which waits for the device once.

    On CUDA they are sorted whatever they are; on the CPU where they are in range and come neither sorted by
    row nor, in a structure that may be symmetric, by (row, column).

    Args:
        row: int32 or int64 (num_edges,), contiguous, not empty.
        col: like ``row``.
        shape: (num_rows, num_cols).
        longest: entries of a slice.

    Returns:
        The facts, with the sorted edges in `rowptr` and `col` where they were sorted, and their order.
    """
    num_edges, device = row.numel(), row.device
    rowptr = torch.empty(shape[0] + 1, dtype=torch.int64, device=device)
    col_out = torch.empty(num_edges, dtype=torch.int32, device=device)
    check_content("edges", row, col, col_out)
    index = device_index(device)
    is_long = num_edges > _INT32_MAX
    order = torch.empty(num_edges, dtype=torch.int64 if is_long else torch.int32, device=device)
    inv_degree = _empty_for_autograd(shape[0], device)
    is_64bit, counts, scratch, size = row.dtype == torch.int64, None, None, 0
    if index >= 0:
        counts = torch.empty(_C.num_row_split_counts(shape[0]), dtype=torch.int64, device=device)
        size = _C.inspect_and_sort_scratch_bytes(is_64bit, num_edges, *shape, index)
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
    words = _C.inspect_and_sort(
        row.data_ptr(),
        col.data_ptr(),
        is_64bit,
        num_edges,
        *shape,
        rowptr.data_ptr(),
        col_out.data_ptr(),
        inv_degree.data_ptr(),
        order.data_ptr(),
        is_long,
        longest,
        0 if counts is None else counts.data_ptr(),
        0 if scratch is None else scratch.data_ptr(),
        size,
        index,
        queue(index),
    )
    found = _found(rowptr, col_out, inv_degree, words, None)
    if not words[NUM_FACTS]:
        return found, None
    counted = None if counts is None else SliceCounts(longest, counts, *words[NUM_FACTS + 1 :])
    return found, SortedEdges(order, counted)
