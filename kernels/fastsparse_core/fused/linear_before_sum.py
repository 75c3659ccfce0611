"""Linear maps whose results are summed over edges; the original layers sum before the linear map."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.fused.weight_gradient import weight_gradient
from fastsparse_core.ops._autocast import autocast, is_any_autocast_enabled, without_autocast
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._sum_of_rows import sum_of_rows


def linear_before_sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_parts: int = 1,
    part_width: int | None = None,
) -> Tensor:
    """``torch.nn.functional.linear``, but rows with a gradient of 0 do not change the weight's gradient.

    So NaN or infinity in the features of a node without outgoing edges does not affect the weight's gradient.
    The original layer, which sums first, behaves the same (`weight_gradient`).

    Args:
        x: features (..., F).
        weight: (out width, F).
        bias: (out width,) or None.
        num_parts: number of parts of the result, its first columns, that are summed over different edges.
        part_width: number of columns of a part; None: all.

    Returns:
        (..., out width), which callers must not edit in place; differentiable twice.
    """
    if (
        not torch.is_grad_enabled()
        or not weight.requires_grad
        or not is_plain_eager(x)
        or type(weight) not in PLAIN
        or (bias is not None and type(bias) not in PLAIN)
        or x.dim() < 2
    ):
        return F.linear(x, weight, bias)
    if is_any_autocast_enabled():
        x, weight, bias = autocast(x, weight, bias)  # type: ignore[assignment]
    apply = _LinearBeforeSum.apply if is_wrapped(x) else _apply
    out: Tensor = apply(x, weight, bias, (num_parts, part_width))
    return out


class _LinearBeforeSum(torch.autograd.Function):
    """dX = dY W, dW = dY^T X without rows whose gradient is 0, db = sum of dY."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[int, int | None]
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.parts = parts
        # Tensors that no gradient needs are not saved, so callers may overwrite them, as with a linear layer.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_any_autocast_enabled():
            return (*without_autocast(_gradients, ctx, grad), None)
        return (*_gradients(ctx, grad), None)


_apply = direct(_LinearBeforeSum)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    once = is_first_derivative(grad)
    # Batches of gradients (is_grads_batched=True) support `reshape`, but not `flatten`.
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    return (
        grad @ weight if needs_x else None,
        weight_gradient(rows, x.flatten(0, -2), x.dtype, once, *ctx.parts) if needs_weight else None,
        sum_of_rows(rows, grad.dtype, once) if needs_bias else None,
    )
