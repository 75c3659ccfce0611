"""torch_sparse's functions on indices and values, and functions that create or join SparseTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastsparse_pyg.compat.torch_sparse.storage import SparseStorage
from fastsparse_pyg.compat.torch_sparse.tensor import SparseTensor


def t(src: SparseTensor) -> SparseTensor:
    """The transpose."""
    return src.t()


def cat(tensors: Sequence[SparseTensor], dim: int | tuple[int, int]) -> SparseTensor:
    """Joins matrices vertically (``dim=0``), horizontally (``dim=1``) or diagonally (``dim=(0, 1)``)."""
    if dim not in (0, 1, -1, (0, 1), [0, 1]):
        if not isinstance(dim, int):
            raise ValueError(f"dim: expected 0, 1 or (0, 1), got {dim}")
        values = [tensor.storage.value() for tensor in tensors]
        joined = torch.cat([value for value in values if value is not None], dim - 1)
        return tensors[0].set_value(joined)
    down, across = (dim == 0 or not isinstance(dim, int)), dim != 0
    rows: list[Tensor] = []
    cols: list[Tensor] = []
    first_row = first_col = most_rows = most_cols = 0
    for tensor in tensors:
        row, col, _ = tensor.coo()
        num_rows, num_cols = tensor.sparse_sizes()
        rows.append(row + first_row)
        cols.append(col + first_col)
        most_rows, most_cols = max(most_rows, num_rows), max(most_cols, num_cols)
        first_row += num_rows if down else 0
        first_col += num_cols if across else 0
    found = [tensor.storage.value() for tensor in tensors]
    value = None if any(it is None for it in found) else torch.cat([it for it in found if it is not None])
    sizes = (first_row if down else most_rows, first_col if across else most_cols)
    return SparseTensor(torch.cat(rows), None, torch.cat(cols), value, sizes, down, True)


def cat_diag(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Joins matrices along the diagonal."""
    return cat(tensors, (0, 1))


def _matrix(index: Tensor, value: Tensor | None, m: int, n: int) -> SparseTensor:
    return SparseTensor(index[0], None, index[1], value, (m, n), False, True)


def _parts(matrix: SparseTensor) -> tuple[Tensor, Tensor | None]:
    row, col, value = matrix.coo()
    return torch.stack([row, col]), value


def coalesce(
    index: Tensor, value: Tensor | None, m: int, n: int, op: str = "add"
) -> tuple[Tensor, Tensor | None]:
    """Sorts entries by (row, column) and merges entries at the same position."""
    return _parts(_matrix(index, value, m, n).coalesce(op))


def transpose(
    index: Tensor, value: Tensor | None, m: int, n: int, coalesced: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Entries of the transposed matrix; ``coalesced`` sorts and merges them."""
    swapped = index.flip(0)
    return coalesce(swapped, value, n, m) if coalesced else (swapped, value)


def spadd(
    indexA: Tensor, valueA: Tensor, indexB: Tensor, valueB: Tensor, m: int, n: int
) -> tuple[Tensor, Tensor | None]:
    """The sum of two sparse (m, n) matrices."""
    return coalesce(torch.cat([indexA, indexB], -1), torch.cat([valueA, valueB]), m, n)


def spmm(index: Tensor, value: Tensor, m: int, n: int, matrix: Tensor) -> Tensor:
    """The product of a sparse (m, n) matrix with a dense one."""
    dense = matrix[:, None] if matrix.dim() == 1 else matrix
    if not dense.is_floating_point():
        out = dense.new_zeros(*dense.shape[:-2], m, dense.size(-1))
        terms = dense.index_select(-2, index[1]) * value.to(dense.dtype)[:, None]
        return out.index_add(-2, index[0], terms)
    return _matrix(index, value, m, n).matmul(dense)


def spspmm(
    indexA: Tensor,
    valueA: Tensor,
    indexB: Tensor,
    valueB: Tensor,
    m: int,
    k: int,
    n: int,
    coalesced: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The product of a sparse (m, k) and a sparse (k, n) matrix.

    Entries at the same position are added first, also with ``coalesced=False``.
    """
    return _parts(_matrix(indexA, valueA, m, k).spspmm(_matrix(indexB, valueB, k, n)))


def eye(
    m: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Index and value of the identity."""
    index = torch.arange(m, device=device)
    return torch.stack([index, index]), torch.ones(m, dtype=dtype, device=device)


def to_torch_sparse(index: Tensor, value: Tensor, m: int, n: int) -> Tensor:
    """The matrix as a ``torch.sparse_coo`` tensor."""
    return torch.sparse_coo_tensor(index.detach(), value, (m, n), check_invariants=False)


def from_torch_sparse(A: Tensor) -> tuple[Tensor, Tensor]:
    """Index and value of a ``torch.sparse_coo`` tensor."""
    return A._indices().detach(), A._values()


def to_scipy(index: Tensor, value: Tensor, m: int, n: int) -> Any:
    """The matrix as a ``scipy.sparse`` matrix in coordinate format."""
    return _matrix(index, value, m, n).to_scipy("coo")


def from_scipy(A: Any) -> tuple[Tensor, Tensor]:
    """Index and value of a scipy.sparse matrix."""
    A = A.tocoo()
    row, col = torch.from_numpy(A.row).long(), torch.from_numpy(A.col).long()
    return torch.stack([row, col]), torch.from_numpy(A.data)


__all__ = [
    "SparseStorage",
    "cat",
    "cat_diag",
    "coalesce",
    "eye",
    "from_scipy",
    "from_torch_sparse",
    "spadd",
    "spmm",
    "spspmm",
    "t",
    "to_scipy",
    "to_torch_sparse",
    "transpose",
]
