"""Products of a SparseTensor with dense and sparse matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core import spmm as spmm_rows

if TYPE_CHECKING:
    from fastsparse_pyg.compat.torch_sparse.tensor import SparseTensor


def spmm(src: SparseTensor, other: Tensor, reduce: str = "sum") -> Tensor:
    """The product with a dense matrix: sum (or add), mean, minimum or maximum over the entries of every row.

    Args:
        src: sparse matrix (M, N).
        other: dense floating-point tensor, (N,) or (..., N, K).
        reduce: how the terms of a row are reduced.
    """
    return multiply(src.storage.adjacency(), src.storage.value(), other, {"add": "sum"}.get(reduce, reduce))


def multiply(adj: Adjacency, value: Tensor | None, other: Tensor, reduce: Any) -> Tensor:
    """Multiplies a structure with these values by a dense tensor, (N,) or (..., N, K), along N."""
    rows = other[:, None] if other.dim() == 1 else other.movedim(-2, 0)
    value = None if value is None else value.to(other.dtype)
    out = spmm_rows(adj, rows.reshape(rows.size(0), rows.shape[1:].numel()), value, reduce)
    return out[:, 0] if other.dim() == 1 else out.reshape(adj.num_dst, *rows.shape[1:]).movedim(0, -2)


def spspmm(src: SparseTensor, other: SparseTensor, reduce: str = "sum") -> SparseTensor:
    """The product of two sparse matrices; ``reduce`` must be sum or add."""
    if reduce not in ("sum", "add"):
        raise NotImplementedError(f"reduce: expected 'sum' for two sparse matrices, got {reduce!r}")
    left, right = (it.to_torch_sparse_coo_tensor() for it in (src.coalesce(), other.coalesce()))
    dtype = torch.promote_types(left.dtype, right.dtype)
    if not dtype.is_floating_point:  # `torch.sparse.mm` needs floats; float64 is exact for integers to 2^53
        left, right = left.double(), right.double()
    out = torch.sparse.mm(left, right).coalesce()
    row, col = out.indices()
    has_value = src.has_value() or other.has_value()
    value = out.values().to(dtype) if has_value else None
    return type(src)(row, None, col, value, (src.sparse_size(0), other.sparse_size(1)), True, True)


def matmul(src: SparseTensor, other: Any, reduce: str = "sum") -> Any:
    """:func:`spmm` if ``other`` is a dense tensor, else :func:`spspmm`."""
    return spmm(src, other, reduce) if isinstance(other, Tensor) else spspmm(src, other, reduce)
