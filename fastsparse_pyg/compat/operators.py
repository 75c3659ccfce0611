"""The operators of ``torch.ops.torch_sparse`` that PyG calls if torch_sparse is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_pyg.caching import lookup
from fastsparse_pyg.compat.torch_sparse import missing
from fastsparse_pyg.compat.torch_sparse.products import multiply


def provide() -> None:
    """Adds sparse products and conversions of pointers. Other operators raise an error with their name."""
    namespace = torch.ops.torch_sparse
    provided: dict[str, Callable[..., Any]] = {
        "spmm_sum": _spmm_sum,
        "spmm_mean": _spmm_mean,
        "spmm_min": _spmm_min,
        "spmm_max": _spmm_max,
        "ptr2ind": _ptr2ind,
        "ind2ptr": _ind2ptr,
    }
    provided |= {name: _refusal(name) for name in (*missing.METHODS, *missing.OPERATORS)}
    for name, call in provided.items():
        setattr(namespace, name, call)


def _product(rowptr: Tensor, col: Tensor, value: Tensor | None, matrix: Tensor, reduce: Any) -> Tensor:
    shape = (rowptr.numel() - 1, matrix.size(-2))
    adj = lookup(rowptr, (rowptr, col), shape, lambda: Adjacency.from_csr(rowptr, col, shape))
    return multiply(adj, value, matrix, reduce)


def _spmm_sum(
    row: Tensor | None,
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    colptr: Tensor | None,
    csr2csc: Tensor | None,
    matrix: Tensor,
) -> Tensor:
    return _product(rowptr, col, value, matrix, "sum")


def _spmm_mean(
    row: Tensor | None,
    rowptr: Tensor,
    col: Tensor,
    value: Tensor | None,
    rowcount: Tensor | None,
    colptr: Tensor | None,
    csr2csc: Tensor | None,
    matrix: Tensor,
) -> Tensor:
    return _product(rowptr, col, value, matrix, "mean")


def _spmm_min(rowptr: Tensor, col: Tensor, value: Tensor | None, matrix: Tensor) -> tuple[Tensor, None]:
    return _product(rowptr, col, value, matrix, "min"), None


def _spmm_max(rowptr: Tensor, col: Tensor, value: Tensor | None, matrix: Tensor) -> tuple[Tensor, None]:
    return _product(rowptr, col, value, matrix, "max"), None


def _ptr2ind(pointers: Tensor, num: int) -> Tensor:
    index = torch.arange(pointers.numel() - 1, device=pointers.device)
    return torch.repeat_interleave(index, pointers.diff(), output_size=num)


def _ind2ptr(index: Tensor, size: int) -> Tensor:
    return torch._convert_indices_from_coo_to_csr(index, size)


def _refusal(name: str) -> Callable[..., NoReturn]:
    return lambda *_, **__: missing.refuse(name)
