"""Batch normalisation over the rows of a mask, whose number is known only on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.gpu import multiprocessors
from fastsparse_core.ops._dtypes import accumulation_dtype

#: The rows are divided into parts that thread blocks sum. `_PARTS` is the largest number of parts per
#: multiprocessor: so many thread blocks use the full memory bandwidth. `_ROWS_OF_PART` is the smallest number
#: of rows per part: with fewer rows, adding the sums of the parts would take longer than computing them.
_PARTS, _ROWS_OF_PART = 2, 16


def masked_batch_norm(
    x: Tensor,
    mask: Tensor,
    count: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    r"""`torch.nn.functional.batch_norm` in training, by mean and variance of the rows where ``mask`` is True.

    .. math::
        \mathbf{y}_i = \frac{\mathbf{x}_i - \mathrm{E}[\mathbf{x}]}
        {\sqrt{\mathrm{Var}[\mathbf{x}] + \epsilon}} \odot \mathbf{w} + \mathbf{b}

    All rows are normalised. Rows where ``mask`` is False get a gradient of 0.

    Args:
        x: features (N, width).
        mask: bool (N,).
        count: number of True entries of ``mask``, float32 ().
        weight: (width,); None: 1.
        bias: (width,); None: 0.
        running_mean: (width,), updated in place; None: no running mean.
        running_var: like ``running_mean``, updated with the unbiased variance.
        momentum: weight of the new mean and variance in the running ones.
        eps: added to the variance.

    Returns:
        (N, width), in the dtype of ``x``; differentiable once.
    """
    out: Tensor = _MaskedBatchNorm.apply(
        x, weight, bias, (mask, count), (running_mean, running_var), momentum, eps
    )
    return out


class _MaskedBatchNorm(torch.autograd.Function):
    """Takes three launches per pass on CUDA (kernels/cuda/batch_norm.cu); on the CPU, PyTorch's operators."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: tuple[Tensor, Tensor],
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> Tensor:
        x = x.contiguous()
        if _has_kernel(x, weight, bias, *running):
            out, mean, inverse = torch.empty_like(x), *x.new_empty(2, x.shape[1], dtype=torch.float32)
            mask, count = rows
            partial, device, stream = _partial(x), *place_of(x.device)
            _C.batch_norm(
                x=x,
                mask=mask,
                count=count,
                partial=partial,
                num_parts=partial.size(0),
                weight=weight,
                bias=bias,
                running_mean=running[0],
                running_var=running[1],
                momentum=momentum,
                eps=eps,
                out=out,
                mean=mean,
                inverse=inverse,
                device=device,
                queue=stream,
            )
        else:
            out, mean, inverse = _normalised(x, weight, bias, rows, running, momentum, eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.rows, ctx.bias_dtype = rows, None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        rows, grad = ctx.rows, grad.contiguous()
        if _has_kernel(x, weight):
            out, of_weight, of_bias = torch.empty_like(x), *torch.empty_like(mean.expand(2, -1))
            mask, count = rows
            partial, device, stream = _partial(x), *place_of(x.device)
            _C.batch_norm_backward(
                x=x,
                mask=mask,
                count=count,
                partial=partial,
                num_parts=partial.size(0),
                grad=grad,
                weight=weight,
                mean=mean,
                inverse=inverse,
                out=out,
                grad_weight=of_weight,
                grad_bias=of_bias,
                device=device,
                queue=stream,
            )
        else:
            out, of_weight, of_bias = _gradients(grad, x, weight, mean, inverse, rows)
        return (
            out,
            None if weight is None else of_weight.to(weight.dtype),
            None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype),
            *(None,) * 4,
        )


def _has_kernel(x: Tensor, *numbers: Tensor | None) -> bool:
    """Returns whether the CUDA kernels support a matrix and vectors with one number per column."""
    return (
        x.is_cuda
        and x.dtype != torch.float64
        and x.numel() > 0
        and all(item is None or (item.dtype == torch.float32 and item.is_contiguous()) for item in numbers)
    )


def _partial(x: Tensor) -> Tensor:
    """Scratch memory for two sums per column and part of the rows, float64 (parts, 2, width)."""
    num_parts = min(_PARTS * multiprocessors(x.device), -(-x.shape[0] // _ROWS_OF_PART))
    return x.new_empty(num_parts, 2, x.shape[1], dtype=torch.float64)


def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: tuple[Tensor, Tensor],
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, (is_named, count) = _widened(x), _columns(rows)
    mean = (wide * is_named).sum(0) / count
    centred = wide - mean
    var = (centred.square() * is_named).sum(0) / count
    unbiased = var * (count / (count - 1).clamp(min=1))
    for kept, now in zip(running, (mean, unbiased), strict=True):
        if kept is not None:
            kept.lerp_(now.to(kept.dtype), momentum)
    inverse = torch.rsqrt(var + eps)
    out = centred * inverse
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, inverse


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, rows: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    is_named, count = _columns(rows)
    wide, normal = _widened(grad) * is_named, (_widened(x) - mean) * inverse
    of_bias, of_weight = wide.sum(0), (wide * normal).sum(0)
    out = (wide - (of_bias + normal * of_weight) / count) * inverse * is_named
    return (out if weight is None else out * weight).to(x.dtype), of_weight, of_bias


def _widened(x: Tensor) -> Tensor:
    """Casts to the dtype in which sums are accumulated."""
    return x.to(accumulation_dtype(x.dtype))


def _columns(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The mask as a column, and the count, or 1 if the count is 0."""
    mask, count = rows
    return mask[:, None], count.clamp(min=1)
