"""Selects parts of a SparseTensor by ranges, indices or masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastsparse_pyg.compat.torch_sparse.tensor import SparseTensor


def _dimension(src: SparseTensor, dim: int) -> int:
    return dim + src.dim() if dim < 0 else dim


def _resized(src: SparseTensor, dim: int, size: int) -> tuple[int, int]:
    rows, cols = src.sparse_sizes()
    return (size, cols) if dim == 0 else (rows, size)


def narrow(src: SparseTensor, dim: int, start: int, length: int) -> SparseTensor:
    """``length`` rows (dim=0), columns (dim=1) or slices of the values (dim=2 and up) from ``start`` on."""
    dim = _dimension(src, dim)
    start = start + src.size(dim) if start < 0 else start
    if dim > 1:
        value = src.storage.value()
        assert value is not None
        return src.set_value(value.narrow(dim - 1, start, length))
    if dim == 0:
        rowptr, col, value = src.csr()
        part = rowptr.narrow(0, start, length + 1)
        first, last = int(part[0]), int(part[-1])
        value = None if value is None else value[first:last]
        return type(src)(
            None, part - part[0], col[first:last], value, (length, src.sparse_size(1)), True, True
        )
    row, col, value = src.coo()
    inside = (col >= start) & (col < start + length)
    value = None if value is None else value[inside]
    sizes = (src.sparse_size(0), length)
    return type(src)(row[inside], None, col[inside] - start, value, sizes, True, True)


def select(src: SparseTensor, dim: int, idx: int) -> SparseTensor:
    """One row, one column, or one slice of the values."""
    dim = _dimension(src, dim)
    if dim <= 1:
        return narrow(src, dim, idx, 1)
    value = src.storage.value()
    assert value is not None
    return src.set_value(value.select(dim - 1, idx))


def index_select(src: SparseTensor, dim: int, idx: Tensor) -> SparseTensor:
    """The rows or columns ``idx``, in that order; repeated ids give repeated rows or columns."""
    dim = _dimension(src, dim)
    if dim > 1:
        value = src.storage.value()
        assert value is not None
        return src.set_value(value.index_select(dim - 1, idx))
    pointers, minor, value = src.csr() if dim == 0 else src.csc()
    count = pointers.diff()[idx]
    major = torch.repeat_interleave(torch.arange(idx.numel(), device=idx.device), count)
    new_pointers = torch.zeros(idx.numel() + 1, dtype=torch.int64, device=idx.device)
    torch.cumsum(count, 0, out=new_pointers[1:])
    entry = torch.arange(major.numel(), device=idx.device) - new_pointers[major] + pointers[idx[major]]
    minor = minor[entry]
    value = None if value is None else value[entry]
    row, col = (major, minor) if dim == 0 else (minor, major)
    return type(src)(row, None, col, value, _resized(src, dim, idx.numel()), dim == 0, True)


def index_select_nnz(src: SparseTensor, idx: Tensor, layout: str | None = None) -> SparseTensor:
    """The entries with the numbers ``idx``, counted in row order, or in column order with layout "csc"."""
    if layout == "csc":
        idx = src.storage.csr2csc()[idx]
    row, col, value = src.coo()
    value = None if value is None else value[idx]
    return type(src)(row[idx], None, col[idx], value, src.sparse_sizes(), False, True)


def masked_select(src: SparseTensor, dim: int, mask: Tensor) -> SparseTensor:
    """The rows or columns where the mask is True."""
    return index_select(src, dim, mask.nonzero().flatten())


def masked_select_nnz(src: SparseTensor, mask: Tensor, layout: str | None = None) -> SparseTensor:
    """The entries where the mask is True; the mask is in row order, or in column order with layout "csc"."""
    if layout == "csc":
        mask = mask[src.storage.csc2csr()]
    row, col, value = src.coo()
    value = None if value is None else value[mask]
    return type(src)(row[mask], None, col[mask], value, src.sparse_sizes(), True, True)


def permute(src: SparseTensor, perm: Tensor) -> SparseTensor:
    """Permutes rows and columns: entry (i, j) of the result is entry (perm[i], perm[j]) of ``src``."""
    return index_select(index_select(src, 0, perm), 1, perm)


def at_index(src: SparseTensor, index: Any) -> SparseTensor:
    """Computes ``src[index]``. As in torch_sparse, an integer keeps its dimension (with size 1)."""
    items = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if at is not None:
        items[at : at + 1] = [slice(None)] * (src.dim() - len(items) + 1)
    out, dim = src, 0
    for item in items:
        if isinstance(item, (list, tuple)) or type(item).__module__ == "numpy":
            item = torch.as_tensor(item, device=src.device())
        if isinstance(item, bool) or item is None:
            raise TypeError(f"index: expected integers, slices and tensors, got {item!r}")
        if isinstance(item, int):
            out, dim = select(out, dim, item), dim + (dim < 2)
        elif isinstance(item, slice):
            if item.step not in (None, 1):
                raise ValueError(f"index: expected slices with step 1, got {item}")
            start, stop, _ = item.indices(out.size(dim))
            if (start, stop) != (0, out.size(dim)):
                out = narrow(out, dim, start, max(stop - start, 0))
            dim += 1
        elif isinstance(item, Tensor):
            if item.dtype in (torch.bool, torch.uint8):
                out = masked_select(out, dim, item.bool())
            else:
                out = index_select(out, dim, item.long())
            dim += 1
        else:
            raise TypeError(f"index: expected integers, slices and tensors, got {type(item).__name__}")
    return out
