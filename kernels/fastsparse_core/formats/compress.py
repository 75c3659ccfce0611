"""Sorts edges into compressed rows (CUB radix sort on the GPU, counting sort on the CPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, place_of, queue

INT32_MAX = 2**31 - 1
#: Number of entries that are processed at a time, if processing all at once would take too much memory.
_PIECE_ENTRIES = 2**26
#: All entries are sorted at once if this takes at most this number of bytes of scratch memory.
_MOST_SCRATCH = 2**32


def compress(
    major: Tensor,
    minor: Tensor,
    num_major: int,
    num_minor: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts edges stably by (major index, minor index).

    Args:
        major: int32 or int64 (num_edges,), contiguous, in [0, num_major).
        minor: int32 or int64 (num_edges,), contiguous, in [0, num_minor).
        num_major: number of compressed rows.
        num_minor: number of columns, at most 2^31 - 1.
        out: tensors for the first two results, in their shapes and dtypes; None: new tensors.

    Returns:
        ``(major_ptr, minor, order)``: pointers, int64 (num_major + 1,); sorted minor indices, int32
        (num_edges,); and the position of every sorted edge in the input, int32 if it fits, else int64.
    """
    order = _empty_order(major.numel(), major.device)
    major_ptr, minor = _compress(major, minor, num_major, num_minor, order, out)
    return major_ptr, minor, order


def compress_pairs(major: Tensor, minor: Tensor, num_major: int, num_minor: int) -> tuple[Tensor, Tensor]:
    """Like :func:`compress`, without ``order``, which saves a third to half of the bytes."""
    return _compress(major, minor, num_major, num_minor, None)


def sort_rows(major: Tensor, num_major: int) -> tuple[Tensor, Tensor]:
    """Like :func:`compress` without a minor index; returns ``(major_ptr, order)``. The sort is stable.

    On a GPU, ``major`` may contain any numbers. The entries outside of [0, num_major) come last in ``order``,
    from position ``major_ptr[-1]`` on.
    """
    order = _empty_order(major.numel(), major.device)
    return _compress(major, None, num_major, num_major, order)[0], order


def _compress(
    major: Tensor,
    minor: Tensor | None,
    num_major: int,
    num_minor: int,
    order: Tensor | None,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    may_cut: bool = True,
) -> tuple[Tensor, Tensor]:
    assert major.is_contiguous()
    assert minor is None or minor.is_contiguous()
    num_edges = major.numel()
    device = major.device
    if out is None:
        out = _empty_rows(num_major, 0 if minor is None else num_edges, device)
    major_ptr, minor_out = out
    if num_edges == 0:
        return major_ptr.zero_(), minor_out
    args = _C.CompressArgs(
        major=major,
        minor=minor,
        index_is_64bit=major.dtype == torch.int64,
        num_edges=num_edges,
        num_major=num_major,
        num_minor=num_minor,
        sort_minor=minor is not None,
        major_ptr=major_ptr,
        minor_out=minor_out,
        order=order,
        order_is_64bit=num_edges > INT32_MAX,
    )
    index = device_index(device)
    size = _C.compress_scratch_bytes(args=args, device=index)
    if minor is not None and may_cut and size > _MOST_SCRATCH:

        def parts() -> Iterator[tuple[Tensor, Tensor]]:
            return zip(major.split(_PIECE_ENTRIES), minor.split(_PIECE_ENTRIES), strict=True)

        _sort_in_pieces(parts, num_major, num_minor, order, out)
        return out
    scratch = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    _C.compress(args=args, scratch=scratch, scratch_bytes=size, device=index, queue=queue(index))
    return major_ptr, minor_out


def _sort_in_pieces(
    parts: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    num_major: int,
    num_minor: int,
    order: Tensor | None,
    out: tuple[Tensor, Tensor],
) -> None:
    """Does the same as :func:`compress`, but sorts one range of major indices at a time.

    For every range of about `_PIECE_ENTRIES` entries, this function reads all edges once. A single sort would
    need additional memory as large as its input and its result together.

    Args:
        parts: function that yields all edges (major, minor) in their order, in pieces.
        num_major: as in :func:`compress`.
        num_minor: as in :func:`compress`.
        order: tensor for the positions of the sorted edges; None: they are not needed.
        out: tensors for ``major_ptr`` and the sorted minor indices.
    """
    major_ptr, minor_out = out
    count = torch.zeros(num_major, dtype=torch.int64, device=major_ptr.device)
    for major, _ in parts():
        count += torch.bincount(major, minlength=num_major)
    major_ptr[0] = 0
    torch.cumsum(count, 0, out=major_ptr[1:])
    del count
    for first, last, minor_part in row_pieces(major_ptr, minor_out):
        majors = torch.empty_like(minor_part)
        minors = torch.empty_like(minor_part)
        positions = None if order is None else torch.empty_like(minor_part, dtype=order.dtype)
        filled = before = 0
        for major, minor in parts():
            found = ((major >= first) & (major < last)).nonzero().flatten()
            end = filled + found.numel()
            majors[filled:end] = major[found] - first
            minors[filled:end] = minor[found]
            if positions is not None:
                positions[filled:end] = found + before
            filled, before = end, before + major.numel()
        sorted_order = None if order is None else _empty_order(filled, majors.device)
        pointers = torch.empty(last - first + 1, dtype=torch.int64, device=majors.device)
        place = (pointers, minor_part)
        _compress(majors, minors, last - first, num_minor, sorted_order, place, may_cut=False)
        if order is not None and positions is not None and sorted_order is not None:
            begin = minor_part.storage_offset() - minor_out.storage_offset()
            order[begin : begin + filled] = positions[sorted_order]


def _empty_rows(num_rows: int, num_edges: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocates the pointers and columns of compressed rows."""
    return torch.empty(num_rows + 1, dtype=torch.int64, device=device), torch.empty(
        num_edges, dtype=torch.int32, device=device
    )


def _empty_order(num_edges: int, device: torch.device) -> Tensor:
    """Allocates memory for the position of every edge: int32 if all positions fit, else int64."""
    return torch.empty(num_edges, dtype=torch.int64 if num_edges > INT32_MAX else torch.int32, device=device)


def transpose(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the entries of compressed rows by (column, row).

    Args:
        rowptr: int64 (num_rows + 1,), contiguous, ascending from 0 to the number of entries.
        col: int32 (num_edges,), contiguous.
        num_cols: number of columns.

    Returns:
        ``(colptr, row, order)``: pointers, int64 (num_cols + 1,); rows, int32 (num_edges,); and the previous
        position of every entry, (num_edges,), int32 if it fits, else int64.
    """
    order = _empty_order(col.numel(), col.device)
    return *_transpose(rowptr, col, num_cols, order), order


def transpose_pairs(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor]:
    """Like :func:`transpose`, without ``order``."""
    return _transpose(rowptr, col, num_cols, None)


def _transpose(rowptr: Tensor, col: Tensor, num_cols: int, order: Tensor | None) -> tuple[Tensor, Tensor]:
    num_edges, num_rows, device = col.numel(), rowptr.numel() - 1, col.device
    colptr, row = _empty_rows(num_cols, num_edges, device)
    if num_edges == 0:
        return colptr.zero_(), row
    index = device_index(device)
    size = _C.transpose_scratch_bytes(
        num_rows=num_rows, num_cols=num_cols, num_edges=num_edges, keeps_order=order is not None, device=index
    )
    if size > _MOST_SCRATCH:

        def parts() -> Iterator[tuple[Tensor, Tensor]]:
            for first, last, part in row_pieces(rowptr, col):
                pointers = rowptr[first : last + 1] - rowptr[first]
                yield part, expand_rows(pointers, part.numel()).add_(first)

        _sort_in_pieces(parts, num_cols, num_rows, order, (colptr, row))
        return colptr, row
    scratch = torch.empty(size, dtype=torch.uint8, device=device)
    _C.transpose(
        rowptr=rowptr,
        col=col,
        num_rows=num_rows,
        num_cols=num_cols,
        num_edges=num_edges,
        colptr=colptr,
        row_out=row,
        order=order,
        scratch=scratch,
        scratch_bytes=size,
        device=index,
        queue=queue(index),
    )
    return colptr, row


def reverse_entries(rowptr: Tensor, col: Tensor, edge_id: Tensor | None) -> Tensor:
    """Finds the id of the reverse entry (j, i) of every entry (i, j), without a sort.

    The structure must equal its transpose.

    Args:
        rowptr: int64 (num_rows + 1,), contiguous, ascending from 0 to the number of entries.
        col: int32 (num_edges,), contiguous, ascending in every row.
        edge_id: id of every entry, int32 or int64 (num_edges,); None: the position of the entry.

    Returns:
        The ids (num_edges,), in the dtype of ``edge_id``.
    """
    out = _empty_order(col.numel(), col.device) if edge_id is None else torch.empty_like(edge_id)
    device, stream = place_of(col.device)
    _C.reverse_entries(
        rowptr=rowptr,
        col=col,
        edge_id=edge_id,
        num_rows=rowptr.numel() - 1,
        num_edges=col.numel(),
        id_out=out,
        id_is_64bit=out.dtype == torch.int64,
        device=device,
        queue=stream,
    )
    return out


def row_pieces(rowptr: Tensor, col: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yields compressed rows in pieces of about 67 million entries, or more if a row is longer.

    Args:
        rowptr: int64 (num_rows + 1,), ascending from 0 to the number of entries.
        col: (num_edges,).

    Yields:
        The first row of a piece, its last row plus one, and the columns of its entries.
    """
    num_rows, num_edges = rowptr.numel() - 1, col.numel()
    wanted = torch.tensor(range(_PIECE_ENTRIES, num_edges, _PIECE_ENTRIES), device=rowptr.device)
    cuts = torch.searchsorted(rowptr, wanted.long()).tolist()
    first, ends = 0, sorted({*cuts, num_rows})
    starts = rowptr[torch.tensor([0, *ends], device=rowptr.device)].tolist()
    for end, (start, stop) in zip(ends, pairwise(starts), strict=True):
        if end > first:
            yield first, end, col[start:stop]
        first = end


def select_rows(rowptr: Tensor, col: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Selects compressed rows. Waits for the device.

    Args:
        rowptr: int32 or int64 (num_rows + 1,).
        col: (num_edges,), on any device.
        ids: numbers of the rows, int64 (num_selected,), on the device of ``rowptr``.

    Returns:
        Pointers of the selected rows, int64 (num_selected + 1,), starting with 0; and their columns.
    """
    begin = rowptr[ids]
    selected = torch.zeros(ids.numel() + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(rowptr[ids + 1] - begin, 0, out=selected[1:])
    num_edges = int(selected[-1])
    entry = torch.arange(num_edges, device=ids.device)
    entry += (begin - selected[:-1]).repeat_interleave(selected.diff(), output_size=num_edges)
    return selected, col[entry.to(col.device)]


def expand_rows(rowptr: Tensor, num_edges: int) -> Tensor:
    """Row of every entry, int32 (num_edges,), of compressed rows.

    Args:
        rowptr: int64 (num_rows + 1,), contiguous, ascending from 0 to ``num_edges``.
        num_edges: number of entries.
    """
    row = torch.empty(num_edges, dtype=torch.int32, device=rowptr.device)
    device, stream = place_of(rowptr.device)
    _C.expand_rows(
        rowptr=rowptr, num_rows=rowptr.numel() - 1, num_edges=num_edges, row=row, device=device, queue=stream
    )
    return row
