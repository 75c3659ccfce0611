"""Diagonals of a SparseTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastsparse_pyg.compat.torch_sparse.storage import SparseStorage

if TYPE_CHECKING:
    from fastsparse_pyg.compat.torch_sparse.tensor import SparseTensor


def _places(src: SparseTensor, k: int) -> Tensor:
    """Returns the rows in which the k-th diagonal has a position, int64."""
    rows, cols = src.sparse_sizes()
    first, last = max(0, -k), min(rows, cols - k)
    return torch.arange(first, max(last, first), device=src.device())


def remove_diag(src: SparseTensor, k: int = 0) -> SparseTensor:
    """The matrix without entries on its k-th diagonal."""
    row, col, value = src.coo()
    kept = row != col - k
    storage = SparseStorage(
        row[kept],
        None,
        col[kept],
        None if value is None else value[kept],
        src.sparse_sizes(),
        rowcount=_less(src.storage._rowcount, row[~kept]),
        colcount=_less(src.storage._colcount, col[~kept]),
        is_sorted=True,
        trust_data=True,
    )
    return src.from_storage(storage)


def _less(count: Tensor | None, gone: Tensor) -> Tensor | None:
    """Subtracts the removed entries from the counts per row or column; None if there are no counts."""
    return None if count is None else count - torch.bincount(gone, minlength=count.numel())


def set_diag(src: SparseTensor, values: Tensor | None = None, k: int = 0) -> SparseTensor:
    """The matrix with an entry at every position of its k-th diagonal.

    Args:
        src: sparse matrix.
        values: values of the diagonal, (length of the diagonal, ...); None: all are 1. Not used if ``src``
            has no values.
        k: number of the diagonal: 0 is the main diagonal, 1 the one above it, -1 the one below it.
    """
    src = remove_diag(src, k)
    row, col, value = src.coo()
    place = _places(src, k)
    if value is not None:
        if values is None:
            values = value.new_ones(place.numel(), *value.shape[1:])
        value = torch.cat([value, values.to(value.dtype).expand(place.numel(), *value.shape[1:])])
    rows, cols = torch.cat([row, place]), torch.cat([col, place + k])
    return type(src)(rows, None, cols, value, src.sparse_sizes(), False, True)


def fill_diag(src: SparseTensor, fill_value: float, k: int = 0) -> SparseTensor:
    """The matrix with the entry ``fill_value`` at every position of its k-th diagonal."""
    value = src.storage.value()
    if value is None:
        return set_diag(src, None, k)
    return set_diag(src, value.new_full((_places(src, k).numel(), *value.shape[1:]), fill_value), k)


def get_diag(src: SparseTensor) -> Tensor:
    """The main diagonal; 0 at positions without an entry."""
    row, col, value = src.coo()
    on = row == col
    value = torch.ones(row.numel(), device=row.device) if value is None else value
    out = value.new_zeros(min(src.sparse_sizes()), *value.shape[1:])
    return out.index_put((row[on],), value[on])
