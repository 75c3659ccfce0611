"""Converts the caller's edges to the rows of a structure: checks, self loops, sorting, merging."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastsparse_core import gpu
from fastsparse_core.formats import lengths
from fastsparse_core.formats.compress import compress, expand_rows
from fastsparse_core.formats.inspection import (
    FEW_EDGES,
    IndexFacts,
    Inspection,
    inspect_edges,
    inspect_indices,
    inspect_rows,
    sort_edges,
)
from fastsparse_core.log import range_text

_INT32_MAX = 2**31 - 1
SelfLoops = Literal["keep", "append", "replace", "replace_if_some"]
_SELF_LOOPS = get_args(SelfLoops)


@dataclass(slots=True)
class CompressedRows:
    """The parts of a structure, with the names of :class:`fastsparse_core.Adjacency`.

    Attributes:
        found: results of checking the caller's edges, if the structure consists of exactly these edges;
            otherwise None.
    """

    rowptr: Tensor
    col: Tensor
    edge_id: Tensor | None = None
    num_values: int | None = None
    num_given: int | None = None
    loop_edge: Tensor | tuple[()] | None = None
    merge: tuple[Tensor, Tensor] | None = None
    symmetric: bool | None = None
    has_loops: bool | None = None
    has_sorted_slices: bool = True
    found: Inspection | None = None


def rows_of_edges(
    row: Tensor,
    col: Tensor,
    shape: tuple[int, int],
    duplicates: Literal["keep", "sum"],
    self_loops: SelfLoops,
) -> CompressedRows:
    """CompressedRows of edges that passed :func:`check_edges`, for :meth:`Adjacency.from_coo`.

    Raises:
        ValueError: an index is outside ``shape``.
    """
    row, col = row.contiguous(), col.contiguous()
    square = shape[0] == shape[1]
    facts: CompressedRows | IndexFacts
    if duplicates == "keep" and self_loops in ("keep", "replace_if_some"):
        facts = _as_given(row, col, shape, self_loops == "keep")
        if isinstance(facts, CompressedRows):
            return facts
    else:
        facts = inspect_indices(row, col, square=square)
        _check_range(facts, row, col, shape)
    num_given = num_values = row.numel()
    position: Tensor | None = None
    loop_edge: Tensor | tuple[()] | None = None
    if self_loops != "keep":
        row, col, position, loop_edge = insert_loops(row, col, min(shape), self_loops != "append")
        num_values += min(shape)
    rowptr, sorted_col, edge_id = compress(row, col, *shape)
    if position is not None:
        edge_id = position.index_select(0, edge_id)
    if duplicates == "sum":
        return _merged(rowptr, sorted_col, edge_id, num_given, loop_edge)
    return CompressedRows(
        rowptr,
        sorted_col,
        edge_id,
        num_values,
        num_given,
        loop_edge,
        symmetric=square and facts.checksum == 0,  # a loop equals its reverse: inserted loops change nothing
        has_sorted_slices=not row.is_cuda,
    )


def _as_given(
    row: Tensor, col: Tensor, shape: tuple[int, int], keeps_loops: bool
) -> CompressedRows | IndexFacts:
    """CompressedRows of the caller's edges as they are, without inserted loops and without merging.

    Edges whose rows ascend keep their order, unless the structure may be symmetric and its columns are not
    sorted. If the edges have loops that must be replaced, only the facts are returned.
    """
    square = shape[0] == shape[1]
    longest = lengths.slice_length(row.numel(), gpu.profile_of(row.device))
    are_few = min(row.numel(), shape[0]) > 0 and max(row.numel(), shape[0]) <= FEW_EDGES
    if are_few:
        found = sort_edges(row, col, shape, longest)
    else:
        found = inspect_edges(row, col, shape[0], longest, square=square)
    _check_range(found, row, col, shape)
    may_be_symmetric = square and found.checksum == 0
    has_loops = found.has_loops if square else None
    if not keeps_loops and has_loops is not False:
        return IndexFacts(found.most_row, found.most_col, found.checksum)
    stay = not (found.rows_descend or (found.cols_descend and may_be_symmetric))
    if are_few and not stay and found.order is None:
        found = found._replace(order=compress(row, col, *shape, out=(found.rowptr, found.col))[2])
    if are_few or stay:
        return CompressedRows(
            found.rowptr,
            found.col,
            found.order,
            symmetric=may_be_symmetric,
            has_loops=has_loops,
            found=found,
        )
    out = (found.rowptr, found.col)
    del found  # frees the other tensors of the inspection before the sort allocates memory
    rowptr, sorted_col, order = compress(row, col, *shape, out=out)
    return CompressedRows(
        rowptr,
        sorted_col,
        order,
        symmetric=may_be_symmetric,
        has_loops=has_loops,
        has_sorted_slices=not row.is_cuda,
    )


def _merged(
    rowptr: Tensor, col: Tensor, edge_id: Tensor, num_given: int, loop_edge: Tensor | tuple[()] | None
) -> CompressedRows:
    """Merges equal entries, which are adjacent because rows are sorted by column."""
    row = expand_rows(rowptr, col.numel())
    first = torch.ones(col.numel(), dtype=torch.bool, device=col.device)
    first[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
    merged = first.cumsum(0) - 1
    kept = torch.zeros(col.numel() + 1, dtype=torch.int64, device=col.device)
    torch.cumsum(first, 0, out=kept[1:])
    return CompressedRows(
        kept[rowptr],
        col[first],
        num_given=num_given,
        loop_edge=loop_edge,
        merge=(edge_id.long(), merged),
    )


def rows_of_pointers(
    rowptr: Tensor,
    col: Tensor,
    shape: tuple[int, int],
    edge_id: Tensor | None,
    *,
    num_values: int | None = None,
    copy: bool,
) -> CompressedRows:
    """Checks compressed rows, for :meth:`Adjacency.from_csr` and for pickled structures.

    Args:
        rowptr: as in `from_csr`.
        col: as in `from_csr`.
        shape: as in `from_csr`.
        edge_id: as in `from_csr`; with ``num_values``, distinct positions below ``num_values``.
        num_values: length of an edge-value tensor; None: the length of ``col``.
        copy: as in `from_csr`.

    Raises:
        TypeError: an argument is not an integer tensor.
        ValueError: lengths, devices or ranges do not fit together.
    """
    tensors = {"rowptr": rowptr, "col": col}
    if edge_id is not None:
        tensors["edge_id"] = edge_id
    for name, tensor in tensors.items():
        _check_index(name, tensor)
        if tensor.device != rowptr.device:
            raise ValueError(f"{name}: expected device {rowptr.device} like rowptr, got {tensor.device}")
    if rowptr.numel() != shape[0] + 1:
        raise ValueError(
            f"rowptr: expected num_dst + 1 = {shape[0] + 1} entries for shape {shape}, got {rowptr.numel()}"
        )
    if edge_id is not None and edge_id.numel() != col.numel():
        raise ValueError(f"edge_id: expected {col.numel()} positions, one per entry, got {edge_id.numel()}")
    rowptr = _own(rowptr, torch.int64) if copy else rowptr.detach().to(torch.int64).contiguous()
    col = col.detach().contiguous()
    edge_id = None if edge_id is None else edge_id.detach().contiguous()
    found = inspect_rows(
        rowptr,
        col,
        edge_id,
        lengths.slice_length(col.numel(), gpu.profile_of(col.device)),
        copy=copy,
    )
    if found.ends != (0, col.numel()) or found.rows_descend:
        raise ValueError(
            f"rowptr: expected ascending values from 0 to {col.numel()}, the length of col; "
            f"got {found.ends[0]} to {found.ends[1]}" + (", not ascending" if found.rows_descend else "")
        )
    if col.numel() and found.most_col >= shape[1]:
        _raise_range({"col": (col, shape[1], "num_src")})
    if num_values is None:
        num_values = col.numel()
    elif num_values < col.numel():
        raise ValueError(f"num_values: expected at least {col.numel()}, the length of col, got {num_values}")
    if edge_id is not None:
        if col.numel() and found.most_edge_id >= num_values:
            _raise_range({"edge_id": (edge_id, num_values, "num_values")})
        is_taken = torch.zeros(num_values, dtype=torch.bool, device=edge_id.device)
        is_taken.index_fill_(0, edge_id.long(), True)
        if is_taken.count_nonzero() != col.numel():
            raise ValueError(
                f"edge_id: expected a different position from 0 to {num_values - 1} for every entry, got a "
                "position twice"
            )
        edge_id = _own(edge_id, torch.int32 if num_values <= _INT32_MAX else torch.int64)
    return CompressedRows(rowptr, found.col, edge_id, num_values, found=found)


def check_edges(row: Tensor, col: Tensor, duplicates: str, self_loops: str) -> None:
    """Checks all preconditions of `rows_of_edges`, except that indices are inside the shape.

    Raises:
        TypeError: an argument is not an integer tensor.
        ValueError: lengths or devices differ, or an option is unknown.
    """
    _check_index("row", row)
    _check_index("col", col)
    if row.numel() != col.numel():
        raise ValueError(f"row and col: expected the same length, got {row.numel()} and {col.numel()}")
    if row.device != col.device:
        raise ValueError(f"row and col: expected one device, got {row.device} and {col.device}")
    if duplicates not in ("keep", "sum"):
        raise ValueError(f"duplicates: expected 'keep' or 'sum', got {duplicates!r}")
    if self_loops not in _SELF_LOOPS:
        expected = ", ".join(map(repr, _SELF_LOOPS))
        raise ValueError(f"self_loops: expected one of {expected}, got {self_loops!r}")


def _own(index: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in the given dtype, which the caller's later in-place edits do not change."""
    return index.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def insert_loops(
    row: Tensor, col: Tensor, count: int, replace: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | tuple[()]]:
    """Appends a loop (i, i) for every i < ``count`` to edges; with ``replace``, drops their own loops first.

    Returns:
        Rows; columns; the position of every edge in the caller's edges followed by the added loops (None: no
        edge was dropped); and ``loop_edge`` of `Adjacency`.
    """
    num_edges = row.numel()
    loop_edge: Tensor | tuple[()] = ()
    position: Tensor | None = None
    if replace:
        is_loop = row == col
        if is_loop.any():
            loops = torch.nonzero(is_loop).flatten()
            loop_edge = torch.full((count,), -1, dtype=torch.int64, device=row.device)
            loop_edge.scatter_reduce_(0, row[loops].long(), loops, "amax")
            kept = torch.nonzero(~is_loop).flatten()
            row, col = row[kept], col[kept]
            position = torch.cat([kept, torch.arange(num_edges, num_edges + count, device=row.device)])
            if num_edges + count <= _INT32_MAX:
                position = position.int()
    node = torch.arange(count, dtype=row.dtype, device=row.device)
    return torch.cat([row, node]), torch.cat([col, node]), position, loop_edge


def check_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape as two ints.

    Raises:
        TypeError: ``shape`` is not a pair of ints.
        ValueError: a size is negative or larger than 2^31 - 1.
    """
    try:
        num_dst, num_src = shape
        num_dst, num_src = operator.index(num_dst), operator.index(num_src)
    except (TypeError, ValueError) as error:
        raise TypeError(f"shape: expected (num_dst, num_src), two ints, got {shape!r}") from error
    if not (0 <= num_dst <= _INT32_MAX and 0 <= num_src <= _INT32_MAX):
        raise ValueError(f"shape: expected sizes from 0 to 2^31 - 1, got {tuple(shape)}")
    return num_dst, num_src


def _check_index(name: str, index: Tensor) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {index.dtype}; convert it with .long()")
    if index.dim() != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {tuple(index.shape)}")


def _check_range(found: Inspection | IndexFacts, row: Tensor, col: Tensor, shape: tuple[int, int]) -> None:
    if row.numel() and (found.most_row >= shape[0] or found.most_col >= shape[1]):
        _raise_range({"row": (row, shape[0], "num_dst"), "col": (col, shape[1], "num_src")})


def _raise_range(indices: dict[str, tuple[Tensor, int, str]]) -> None:
    """Raises an error that names the index tensor with values outside of 0 <= index < size."""
    for name, (index, size, size_name) in indices.items():
        low, high = (int(end) for end in torch.aminmax(index))
        if low < 0 or high >= size:
            expected = (
                f"indices from 0 to {size_name} - 1 = {size - 1}" if size else f"none for {size_name} = 0"
            )
            raise ValueError(f"{name}: expected {expected}, {range_text(low, high)}")
