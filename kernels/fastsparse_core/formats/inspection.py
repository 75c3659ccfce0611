"""Checks edges before a structure is built from them, in one pass and with one read from the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.content import check_content
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.compress import expand_rows, row_pieces
from fastsparse_core.formats.row_split import RowSplit, unsplit_rows

#: Number of facts that the kernels write. EdgeFact in kernels/include/fastsparse/views.h lists them.
NUM_FACTS = 11
#: One launch inspects and sorts the edges, without a radix sort, up to this number of edges and of rows.
FEW_EDGES = _C.FEW_EDGES
#: Positions of additional facts about sorted edges: SortFact in kernels/include/fastsparse/sort_edges.h.
_IS_SORTED, _NUM_SLICES, _NUM_SLOTS, _NUM_SPLIT_ROWS = range(NUM_FACTS, NUM_FACTS + 4)
_SIGNED_TO_UNSIGNED = 2**64


class Inspection(NamedTuple):
    """Facts about edges or compressed rows, and tensors of the structure that they make if they are sorted.

    Attributes:
        rowptr: row pointers, int64 (num_rows + 1,); for edges, undefined if `rows_descend`.
        col: columns, int32 (num_edges,), undefined if some are out of range.
        inv_degree: inverse degrees as in `Adjacency.inv_degree`, float32 (num_rows,).
        most_row: largest row, read as an unsigned number, so that negative rows are too large.
        most_col: largest column, read as an unsigned number.
        most_edge_id: largest edge id, read as an unsigned number.
        rows_descend: True if the rows of the edges, or the pointers of compressed rows, do not ascend.
        cols_descend: True if the columns of some row do not ascend.
        checksum: for edges of square structures: 0 if the structure equals its transpose. If it does not, the
            checksum is 0 with a probability of 2^-64.
        has_empty_rows: True if some row has no entry.
        ends: first and last row pointer.
        has_loops: for edges of square structures: True if some edge is a loop.
        row_split: on CUDA, the work list of rows in row order. None if some row is longer than a slice; but
            `sort_edges` also makes the work list of such rows.
        order: if `sort_edges` sorted the edges, the position of each entry among the edges, int32
            (num_edges,); otherwise None.
        inv_sqrt_degree: only from `sort_edges`: `Adjacency.inv_sqrt_degree` with one more loop per node,
            float32 (num_rows,).
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
    has_loops: bool
    row_split: RowSplit | None
    order: Tensor | None = None
    inv_sqrt_degree: Tensor | None = None


class IndexFacts(NamedTuple):
    """Result of `inspect_indices`; `Inspection` describes the fields."""

    most_row: int
    most_col: int
    checksum: int
    cols_descend: bool = False
    has_loops: bool = False


def inspect_indices(row: Tensor, col: Tensor, *, square: bool) -> IndexFacts:
    """Computes facts about edges, but no row pointers or columns of their structure.

    Args:
        row: int32 or int64 (num_edges,), contiguous.
        col: like ``row``.
        square: True if the structure has as many columns as rows.
    """
    check_content("edges", row, col)
    num_edges, index = row.numel(), device_index(row.device)
    if num_edges == 0:
        return IndexFacts(0, 0, 0)
    # For 0 rows, the kernel still writes one row pointer. It is written after the facts and ignored.
    workspace = torch.empty(NUM_FACTS + 1, dtype=torch.int64, device=row.device) if index >= 0 else None
    facts = 0 if workspace is None else workspace.data_ptr()
    words = _C.inspect(
        row=row,
        col=col,
        edge_id=0,
        index_is_64bit=row.dtype == torch.int64,
        edge_id_is_64bit=False,
        num_edges=num_edges,
        num_rows=0,
        square=square,
        rowptr=facts + 8 * NUM_FACTS,
        col_out=0,
        inv_degree=0,
        slices=0,
        scratch=facts,
        device=index,
        queue=queue(index),
    )
    return IndexFacts(
        words[0] % _SIGNED_TO_UNSIGNED,
        words[1] % _SIGNED_TO_UNSIGNED,
        words[5],
        bool(words[4]),
        bool(words[10]),
    )


def inspect_square_rows(rowptr: Tensor, col: Tensor) -> IndexFacts:
    """Inspects the entries of valid compressed rows of a square structure, in pieces.

    The checksum is a sum of 64-bit hashes. It is 0 if the structure equals its transpose, and with a
    probability of 2^-64 if it does not.

    Args:
        rowptr: int64 (num_rows + 1,), contiguous.
        col: int32 (num_edges,), contiguous.
    """
    most_row, most_col, checksum, descend, loops = 0, 0, 0, False, False
    for first, last, part in row_pieces(rowptr, col):
        rows = rowptr[first : last + 1] - rowptr[first]
        found = inspect_indices(expand_rows(rows, part.numel()).add_(first), part, square=True)
        most_row, most_col = max(most_row, found.most_row), max(most_col, found.most_col)
        checksum += found.checksum
        descend, loops = descend or found.cols_descend, loops or found.has_loops
    return IndexFacts(most_row, most_col, checksum % _SIGNED_TO_UNSIGNED, descend, loops)


def inspect_edges(row: Tensor, col: Tensor, num_rows: int, longest: int, *, square: bool) -> Inspection:
    """Inspects edges. Their indices may be out of range.

    Args:
        row: int32 or int64 (num_edges,), contiguous.
        col: like ``row``.
        num_rows: number of rows.
        longest: largest number of entries per slice, for `Inspection.row_split`.
        square: True if the structure has as many columns as rows.
    """
    # For an address of edges, the kernel computes the pointers; empty tensors have none, so the kernel reads
    # the pointers, which are all 0.
    rowptr = (torch.empty if row.numel() else torch.zeros)(num_rows + 1, dtype=torch.int64, device=row.device)
    return _inspect(row, col, None, rowptr, longest, square)


def inspect_rows(
    rowptr: Tensor, col: Tensor, edge_id: Tensor | None, longest: int, *, copy: bool = True
) -> Inspection:
    """Inspects compressed rows. Their pointers and indices may be invalid.

    Args:
        rowptr: int64 (num_rows + 1,), contiguous.
        col: int32 or int64 (num_edges,), contiguous.
        edge_id: int32 or int64 (num_edges,), contiguous, or None.
        longest: largest number of entries per slice, for `Inspection.row_split`.
        copy: if True, `Inspection.col` is a new tensor even if ``col`` is int32.
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
    device, num_rows = col.device, rowptr.numel() - 1
    is_copied = copy or col.dtype != torch.int32
    col_out = torch.empty(col.numel(), dtype=torch.int32, device=device) if is_copied else col
    inv_degree = _empty_for_autograd(num_rows, device)
    check_content("edges", row, col, edge_id, rowptr, col_out)  # a mode may make fake outputs for real edges
    index = device_index(device)
    # Two words per row for its slice, then space for the facts.
    rows = num_rows + (NUM_FACTS + 1) // 2
    workspace = torch.empty(rows, 2, dtype=torch.int64, device=device) if index >= 0 else None
    slices = 0 if workspace is None else workspace.data_ptr()
    words = _C.inspect(
        row=row,
        col=col,
        edge_id=edge_id,
        index_is_64bit=col.dtype == torch.int64,
        edge_id_is_64bit=edge_id is not None and edge_id.dtype == torch.int64,
        num_edges=col.numel(),
        num_rows=num_rows,
        square=square,
        rowptr=rowptr,
        col_out=col_out if is_copied else None,
        inv_degree=inv_degree,
        slices=slices,
        scratch=slices + 16 * num_rows,
        device=index,
        queue=queue(index),
    )
    split = unsplit_rows(workspace, num_rows) if workspace is not None and words[9] <= longest else None
    return _found(words, rowptr, col_out, inv_degree, split)


def sort_edges(row: Tensor, col: Tensor, shape: tuple[int, int], longest: int) -> Inspection:
    """Inspects 1 to `FEW_EDGES` edges as `inspect_edges` does, and sorts them if needed.

    The edges are sorted by row and column, unless their rows ascend already. On CUDA, edges with very long
    rows are not sorted: the caller must sort them with :func:`fastsparse_core.formats.compress.compress`, and
    `Inspection.col` is undefined.

    Args:
        row: int32 or int64 (num_edges,), contiguous.
        col: like ``row``.
        shape: numbers of rows, 1 to `FEW_EDGES`, and columns.
        longest: largest number of entries per slice, for `Inspection.row_split`.

    Returns:
        The facts. `rowptr`, `inv_degree` and `row_split` always describe the sorted edges.
    """
    device, num_rows, num_edges = row.device, shape[0], row.numel()
    rowptr = torch.empty(num_rows + 1, dtype=torch.int64, device=device)
    col_out = torch.empty(num_edges, dtype=torch.int32, device=device)
    order = torch.empty(num_edges, dtype=torch.int32, device=device)
    inv_degree, inv_sqrt_degree = _empty_for_autograd(num_rows, device), _empty_for_autograd(num_rows, device)
    check_content("edges", row, col, rowptr)
    index, workspace = device_index(device), None
    if index >= 0:
        size, split_ptr, split_row = _C.sort_workspace(
            num_edges=num_edges, num_rows=num_rows, longest=longest
        )
        workspace = torch.empty(-(-size // 16), 2, dtype=torch.int64, device=device)
    words = _C.sort_edges(
        row=row,
        col=col,
        index_is_64bit=row.dtype is torch.int64,
        num_edges=num_edges,
        num_rows=num_rows,
        num_cols=shape[1],
        longest=longest,
        rowptr=rowptr,
        col_out=col_out,
        order=order,
        inv_degree=inv_degree,
        inv_sqrt_degree=inv_sqrt_degree,
        workspace=workspace,
        device=index,
        queue=queue(index),
    )
    split = None
    if workspace is not None:
        split = unsplit_rows(workspace, num_rows)
        if words[_NUM_SLOTS]:
            flat, cut = workspace.view(-1), words[_NUM_SPLIT_ROWS]
            split = RowSplit(
                workspace[: words[_NUM_SLICES]],
                flat.view(torch.int32)[split_row // 4 :][:cut],
                flat[split_ptr // 8 :][: cut + 1],
                words[_NUM_SLOTS],
            )
    order_or_none = order if words[_IS_SORTED] else None
    return _found(words, rowptr, col_out, inv_degree, split, order_or_none, inv_sqrt_degree)


def _found(
    words: tuple[int, ...],
    rowptr: Tensor,
    col: Tensor,
    inv_degree: Tensor,
    split: RowSplit | None,
    order: Tensor | None = None,
    inv_sqrt_degree: Tensor | None = None,
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
        bool(words[10]),
        split,
        order,
        inv_sqrt_degree,
    )


def _empty_for_autograd(length: int, device: torch.device) -> Tensor:
    """Allocates float32 (length,) outside of inference mode, because autograd may use the tensor later."""
    if not torch.is_inference_mode_enabled():
        return torch.empty(length, dtype=torch.float32, device=device)
    with torch.inference_mode(False):
        return torch.empty(length, dtype=torch.float32, device=device)
