"""Sums, products and reductions of a SparseTensor's values."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastsparse_core import scatter, segment_reduce

if TYPE_CHECKING:
    from fastsparse_pyg.compat.torch_sparse.tensor import SparseTensor


def reduction(src: SparseTensor, dim: int | None = None, reduce: str = "sum") -> Tensor:
    """Reduces all values (dim=None), per column (dim=0), per row (dim=1), or along a dimension of the values.

    As in torch_sparse, for a matrix without values a sum counts the entries, and every other reduction
    returns 1.
    """
    value = src.storage.value()
    name: Any = {"add": "sum"}.get(reduce, reduce)
    last = src.dim() - 1
    if dim is not None and not -last - 1 <= dim <= last:
        raise ValueError(f"dim: expected None or a dimension from 0 to {last}, got {dim}")
    dim = dim + last + 1 if dim is not None and dim < 0 else dim
    if value is None:
        return _without_values(src, dim, name)
    if dim == 1:
        return segment_reduce(value, src.storage.rowptr(), name)
    if dim == 0:
        return scatter(value, src.storage.col(), src.sparse_size(1), name)
    of_entries = () if dim is None else (dim - 1,)
    return getattr(torch, name if name in ("sum", "mean") else f"a{name}")(value, *of_entries)


def _without_values(src: SparseTensor, dim: int | None, name: str) -> Tensor:
    if name == "sum":
        if dim is None:
            return torch.tensor(src.nnz(), dtype=src.dtype(), device=src.device())
        counts = src.storage.rowcount() if dim == 1 else src.storage.colcount()
        return counts.to(src.dtype())
    size = () if dim is None else (src.sparse_size(1 - dim),)
    return torch.ones(size, dtype=src.dtype(), device=src.device())


def sum(src: SparseTensor, dim: int | None = None) -> Tensor:
    """Sums of the values."""
    return reduction(src, dim, "sum")


def mean(src: SparseTensor, dim: int | None = None) -> Tensor:
    """Means of the values that are stored."""
    return reduction(src, dim, "mean")


def min(src: SparseTensor, dim: int | None = None) -> Tensor:
    """Minima of the values that are stored."""
    return reduction(src, dim, "min")


def max(src: SparseTensor, dim: int | None = None) -> Tensor:
    """Maxima of the values that are stored."""
    return reduction(src, dim, "max")


def _of_entries(src: SparseTensor, other: Any) -> Any:
    """Returns the operand for every entry: from one number per row, per column, or for all entries."""
    if not isinstance(other, Tensor) or other.dim() == 0:
        return other
    rows, cols = src.sparse_sizes()
    row, col, _ = src.coo()
    if other.dim() >= 2 and other.size(0) == rows and other.size(1) == 1:
        return other.squeeze(1)[row]
    if other.dim() >= 2 and other.size(0) == 1 and other.size(1) == cols:
        return other.squeeze(0)[col]
    raise ValueError(
        f"other: expected shape ({rows}, 1, ...) or (1, {cols}, ...), got {tuple(other.shape)}; "
        "use .view(-1, 1) for one number per row, .view(1, -1) for one number per column"
    )


def mul(src: SparseTensor, other: Any) -> SparseTensor:
    """Multiplies by one number per row or column, or by another sparse matrix elementwise.

    The product of two sparse matrices has only the positions that both have.
    """
    if isinstance(other, type(src)):
        return _mul_matrices(src, other)
    return mul_nnz(src, _of_entries(src, other))


def mul_(src: SparseTensor, other: Any) -> SparseTensor:
    """Multiplies by one number per row or column, in place; see :func:`mul`."""
    return mul_nnz_(src, _of_entries(src, other))


def mul_nnz(src: SparseTensor, other: Any, layout: str | None = None) -> SparseTensor:
    """Multiplies the values by one number, or by one number per entry. A matrix without values has ones."""
    value = src.storage.value()
    other = _in_order(src, other, layout)
    if value is None:
        value = torch.ones(src.nnz(), dtype=src.dtype(), device=src.device())
        if isinstance(other, Tensor):
            value = value.to(other.dtype)
    if isinstance(other, Tensor):
        other = other.to(value.dtype)
        value = value.reshape(*value.shape, *[1] * (other.dim() - value.dim()))
    return src.set_value(value * other)


def mul_nnz_(src: SparseTensor, other: Any, layout: str | None = None) -> SparseTensor:
    """Does the same as :func:`mul_nnz`, in place."""
    value = src.storage.value()
    if value is None:
        return src.set_value_(mul_nnz(src, other, layout).storage.value())
    other = _in_order(src, other, layout)
    return src.set_value_(value.mul_(other.to(value.dtype) if isinstance(other, Tensor) else other))


def _in_order(src: SparseTensor, other: Any, layout: str | None) -> Any:
    """Returns an operand with one item per entry in row order; sorts it if ``layout`` is "csc"."""
    return other[src.storage.csc2csr()] if isinstance(other, Tensor) and layout == "csc" else other


def _keys(src: SparseTensor, cols: int) -> Tensor:
    row, col, _ = src.coo()
    return row * cols + col


def _mul_matrices(src: SparseTensor, other: SparseTensor) -> SparseTensor:
    src, other = src.coalesce(), other.coalesce()
    rows, cols = (builtins.max(sizes) for sizes in zip(src.sparse_sizes(), other.sparse_sizes(), strict=True))
    keys, others = _keys(src, cols), _keys(other, cols)
    at = torch.searchsorted(others, keys).clamp_(max=builtins.max(others.numel() - 1, 0))
    both = others[at] == keys if others.numel() else torch.zeros_like(keys, dtype=torch.bool)
    row, col, value = src.coo()
    second = other.storage.value()
    out = None if value is None else value[both]
    if second is not None:
        out = second[at[both]] if out is None else out * second[at[both]]
    return type(src)(row[both], None, col[both], out, (rows, cols), True, True)


def add(src: SparseTensor, other: Any) -> SparseTensor:
    """Adds one number per row or column to the values, or adds another sparse matrix.

    The sum of two sparse matrices has the positions of both.
    """
    if not isinstance(other, type(src)):
        return add_nnz(src, _of_entries(src, other))
    row, col, value = src.coo()
    other_row, other_col, other_value = other.coo()
    sizes = [builtins.max(pair) for pair in zip(src.sparse_sizes(), other.sparse_sizes(), strict=True)]
    both: Tensor | None = None
    if value is not None and other_value is not None:
        both = torch.cat([value, other_value])
    rows, cols = torch.cat([row, other_row]), torch.cat([col, other_col])
    return type(src)(rows, None, cols, both, (sizes[0], sizes[1]), False, True).coalesce("sum")


def add_nnz(src: SparseTensor, other: Any, layout: str | None = None) -> SparseTensor:
    """Adds one number, or one number per entry, to the values. A matrix without values has ones."""
    other = _in_order(src, other, layout)
    value = src.storage.value()
    if value is None:
        dtype = other.dtype if isinstance(other, Tensor) else src.dtype()
        value = torch.ones(src.nnz(), dtype=dtype, device=src.device())
    return src.set_value(value + (other.to(value.dtype) if isinstance(other, Tensor) else other))


def add_(src: SparseTensor, other: Any) -> SparseTensor:
    """Adds one number per row or column, in place; see :func:`add`."""
    return add_nnz_(src, _of_entries(src, other))


def add_nnz_(src: SparseTensor, other: Any, layout: str | None = None) -> SparseTensor:
    """Does the same as :func:`add_nnz`, in place."""
    value = src.storage.value()
    if value is None:
        return src.set_value_(add_nnz(src, other, layout).storage.value())
    other = _in_order(src, other, layout)
    return src.set_value_(value.add_(other.to(value.dtype) if isinstance(other, Tensor) else other))
