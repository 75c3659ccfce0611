"""MaxK: the k largest entries of every row, and conversions between CBSR and dense rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.formats.cbsr import CBSR, ids_dtype
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.ops._registration import Operator


def maxk(x: Tensor, k: int) -> CBSR:
    r"""Keeps the k largest entries of every row.

    .. math::
        \mathrm{MaxK}(\mathbf{X})_{ic} = \begin{cases} x_{ic} & c \in \operatorname{top}_k(\mathbf{x}_i) \\
        0 & \text{else} \end{cases}

    MaxK is the nonlinearity of MaxK-GNN (section 3.1), in place of ReLU. The selection is exact. Among equal
    entries, the entries in lower columns are kept. NaN counts as the largest, as in :func:`torch.topk`.

    Args:
        x: (n, D), float64, float32, float16 or bfloat16, with any row stride and D at most 65,536. On a GPU,
            rows of up to 1,024 columns stay in registers, except in float64.
        k: number of entries to keep, from 1 to D.

    Returns:
        The kept entries of every row in the order of their columns: (n, k) values and ids. Other entries get
        a gradient of 0.

    Raises:
        TypeError: the dtype is not supported, or ``k`` is not an int.
        ValueError: ``x`` is not a matrix or too wide, or ``k`` is not from 1 to D.

    Examples:
        >>> import torch
        >>> from fastsparse_core import maxk
        >>> kept = maxk(torch.tensor([[1.0, 5.0, -2.0, 3.0], [0.0, 0.0, 0.0, -1.0]]), 2)
        >>> kept.ids.tolist(), kept.values.tolist()
        ([[1, 3], [0, 1]], [[5.0, 3.0], [0.0, 0.0]])
    """
    _check(x, k)
    values, ids = _maxk_op(x, k)
    return CBSR(values, ids, x.size(1))


def maxk_dense(x: Tensor, k: int) -> Tensor:
    """:func:`maxk` with a dense result, 0 at other entries; stores one bit per entry for the backward pass.

    Args:
        x: as for :func:`maxk`.
        k: as for :func:`maxk`.

    Raises:
        TypeError: as :func:`maxk`.
        ValueError: as :func:`maxk`.
    """
    _check(x, k)
    out: Tensor = _maxk_dense_op(x, k)[0]
    return out


def _check(x: Tensor, k: int) -> None:
    check_k(k)
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPE_CODE:
        raise TypeError(f"x: expected float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x: expected a matrix (n, D), got shape {tuple(x.shape)}")
    width = x.size(1)
    ids_dtype(width)
    if k > width:
        raise ValueError(f"k: expected at most {width}, the width of x, got {k}")


def check_k(k: int) -> None:
    """Raises an error unless ``k`` is a positive int.

    Raises:
        TypeError: ``k`` is not an int.
        ValueError: ``k`` is less than 1.
    """
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k: expected an int, got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"k: expected at least 1 kept entry in each row, got {k}")


def _maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    x = unit_stride(x)
    num_rows, width = x.shape
    values = x.new_empty(num_rows, k)
    ids = x.new_empty(num_rows, k, dtype=ids_dtype(width))
    if num_rows:
        device, queue = place_of(x.device)
        _C.maxk(x=x, k=k, values=values, ids=ids, device=device, queue=queue)
    return values, ids


def _maxk_dense(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    x = unit_stride(x)
    num_rows, width = x.shape
    out = x.new_empty(num_rows, width)
    kept = x.new_empty(num_rows, _num_words(width), dtype=torch.int32)
    if num_rows:
        device, queue = place_of(x.device)
        _C.maxk(x=x, k=k, out=out, kept=kept, device=device, queue=queue)
    return out, kept


def _num_words(width: int) -> int:
    """Number of 32-bit words that are needed for one bit per column."""
    return (width + 31) // 32


def _mask_rows(dense: Tensor, kept: Tensor) -> Tensor:
    """The entries of dense rows whose bits are set, 0 elsewhere."""
    dense, kept = unit_stride(dense), kept.contiguous()
    out = dense.new_empty(dense.shape)
    if out.numel():
        device, queue = place_of(dense.device)
        _C.mask_rows(dense=dense, kept=kept, out=out, device=device, queue=queue)
    return out


def write_out(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """Dense rows (n, width) of kept entries; bypasses PyTorch's dispatcher."""
    values, ids = values.contiguous(), ids.contiguous()
    out = values.new_empty(values.size(0), width)
    if out.numel():
        device, queue = place_of(values.device)
        _C.cbsr_to_dense(width=width, values=values, ids=ids, out=out, device=device, queue=queue)
    return out


def gather(dense: Tensor, ids: Tensor) -> Tensor:
    """The kept columns of dense rows, (n, k); bypasses PyTorch's dispatcher."""
    dense, ids = unit_stride(dense), ids.contiguous()
    out = dense.new_empty(dense.size(0), ids.size(1))
    if out.numel():
        device, queue = place_of(dense.device)
        _C.cbsr_gather(dense=dense, ids=ids, out=out, device=device, queue=queue)
    return out


class _MaxK(torch.autograd.Function):
    """The gradient of ``x`` is the gradient of the values in their columns, and 0 in other columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, ids = _maxk_op.below(x, k)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(ids)
        ctx.width = x.size(1)
        return values, ids

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return to_dense_op(grad, *ctx.saved_tensors, ctx.width), None


class _MaxKDense(torch.autograd.Function):
    """The gradient of ``x`` is the gradient of the result in the kept columns, and 0 in other columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        out, kept = _maxk_dense_op.below(x, k)
        ctx.mark_non_differentiable(kept)
        ctx.save_for_backward(kept)
        return out, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return _mask_rows_op(grad, *ctx.saved_tensors), None


class _MaskRows(torch.autograd.Function):
    """Masking is self-adjoint, so the backward pass is the same operator."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return _mask_rows_op.below(dense, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _mask_rows_op(grad, *ctx.saved_tensors), None


class _CbsrToDense(torch.autograd.Function):
    """Writes values into their columns; the backward pass gathers these columns."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(ids)
        return to_dense_op.below(values, ids, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_op(grad, *ctx.saved_tensors), None, None


class _CbsrGather(torch.autograd.Function):
    """Gathers the kept columns; the backward pass writes values into these columns."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.width = dense.size(1)
        return gather_op.below(dense, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return to_dense_op(grad, *ctx.saved_tensors, ctx.width), None


def _maxk_fake(of: Any) -> tuple[Tensor, Tensor]:
    num_rows, width = of.x.shape
    return of.x.new_empty(num_rows, of.k), of.x.new_empty(num_rows, of.k, dtype=ids_dtype(width))


def _maxk_dense_fake(of: Any) -> tuple[Tensor, Tensor]:
    num_rows, width = of.x.shape
    return of.x.new_empty(num_rows, width), of.x.new_empty(num_rows, _num_words(width), dtype=torch.int32)


_maxk_op = Operator(_maxk, _maxk_fake, _MaxK)
_maxk_dense_op = Operator(_maxk_dense, _maxk_dense_fake, _MaxKDense)
_mask_rows_op = Operator(_mask_rows, lambda of: of.dense.new_empty(of.dense.shape), _MaskRows)
to_dense_op = Operator(
    write_out, lambda of: of.values.new_empty(of.values.size(0), of.width), _CbsrToDense, "cbsr_to_dense"
)
gather_op = Operator(gather, lambda of: of.dense.new_empty(of.ids.shape), _CbsrGather, "cbsr_gather")
