"""Adds biases to tall matrices, because PyTorch sums the biases' gradients slowly (`sum_of_rows`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import recorded
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._sum_of_rows import sum_of_rows

#: Number of rows from which FastSparse's sum is faster, although its node in autograd's graph takes 10 us of
#: host time. Recorded steps always use it.
_TALL = 32_768


def add_bias(out: Tensor, bias: Tensor) -> Tensor:
    """``out + bias``, in the dtype of ``out``.

    Args:
        out: (N, ...).
        bias: has the shape of a row of ``out``, or broadcasts to that shape.
    """
    if torch.is_grad_enabled() and out.shape[1:] == bias.shape and _sums_by_itself(out, bias):
        return _Bias.apply(out, bias, False)
    return out + bias.to(out.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``torch.nn.functional.linear``.

    Args:
        x: features (..., F).
        weight: (out width, F).
        bias: (out width,) or None.
    """
    if bias is None or not torch.is_grad_enabled() or x.dim() != 2 or not _sums_by_itself(x, bias):
        return F.linear(x, weight, bias)
    return _Bias.apply(F.linear(x, weight, bias.detach()), bias, True)


def _sums_by_itself(rows: Tensor, bias: Tensor) -> bool:
    return (
        rows.is_cuda
        and is_plain_eager(rows)  # before the size is read, because a trace would specialize on it
        and (rows.size(0) >= _TALL or recorded.current() is not None)
        and bias.requires_grad
        and is_plain_eager(bias.detach())
    )


class _Bias(torch.autograd.Function):
    """Adds a bias, unless it was already added outside of autograd (``is_added``); db = sum of dY."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor, is_added: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.bias_dtype = bias.dtype
        if is_added:
            ctx.mark_dirty(out)  # unlike a view, the result may be edited in place
            return out
        return out + bias.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if grad is None or not ctx.needs_input_grad[1]:
            return grad, None, None
        return grad, sum_of_rows(grad, ctx.bias_dtype), None
