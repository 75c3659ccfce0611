"""Products of the rows of each group with the group's own matrix, in both plugins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._autocast import autocast


def grouped_product(x: Tensor, weight: Tensor, starts: tuple[int, ...]) -> Tensor:
    r"""Multiplies consecutive rows by the matrix of their group.

    .. math::
        \mathbf{y}_p = \mathbf{x}_p \mathbf{W}_{r(p)}

    :math:`r(p)` is the group of row p. With B > 1, matrices are block-diagonal with B blocks. There is one
    product per group. With B = 1, it is written directly into the group's rows of the result, without padding
    or copies. Under autocast, the result has the autocast dtype.

    Args:
        x: (P, B * I), with the rows of a group next to each other.
        weight: (R, I, O) for B = 1, or (R, B, I, O).
        starts: first row of each of the R groups, then P.

    Returns:
        (P, B * O), differentiable any number of times.

    Raises:
        ValueError: the sizes of ``x``, ``weight`` and ``starts`` do not fit together.
    """
    blocks = weight if weight.dim() == 4 else weight[:, None]
    if x.dim() != 2 or x.size(1) != blocks.size(1) * blocks.size(2):
        raise ValueError(
            f"x: expected {blocks.size(1) * blocks.size(2)} columns for weights {tuple(weight.shape)}, got "
            f"shape {tuple(x.shape)}"
        )
    if len(starts) != blocks.size(0) + 1 or starts[-1] != x.size(0):
        raise ValueError(f"starts: expected {blocks.size(0)} first rows, then {x.size(0)}, got {starts}")
    x, blocks = autocast(x, blocks)  # type: ignore[assignment]
    out: Tensor = _GroupedProduct.apply(x, blocks, starts)
    return out


def _by_block(rows: Tensor, num_blocks: int) -> Tensor:
    """A view (B, P, I) of rows (P, B * I)."""
    # The width is computed, because -1 fails for tensors without elements.
    return rows.view(rows.size(0), num_blocks, rows.size(1) // num_blocks).transpose(0, 1)


def _sizes(starts: tuple[int, ...]) -> list[int]:
    return [last - first for first, last in pairwise(starts)]


def _multiply(x: Tensor, weight: Tensor, starts: tuple[int, ...]) -> Tensor:
    # `split` and `unbind` make all views of a tensor in one call: with many groups, a call per view would
    # take longer than the products.
    num_blocks, sizes = weight.size(1), _sizes(starts)
    out = x.new_empty(x.size(0), num_blocks * weight.size(3))
    if num_blocks == 1:
        for rows, matrix, to in zip(x.split(sizes), weight[:, 0].unbind(), out.split(sizes), strict=True):
            torch.mm(rows, matrix, out=to)
        return out
    pieces = (_by_block(each, num_blocks).split(sizes, 1) for each in (x, out))
    for matrices, rows, to in zip(weight.unbind(), *pieces, strict=True):
        to.copy_(torch.bmm(rows, matrices))
    return out


def _outer(x: Tensor, grad: Tensor, like: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Gradients of the weights, by PyTorch's operators, which are differentiable again."""
    num_blocks, sizes = like.size(1), _sizes(starts)
    if not sizes:
        return torch.zeros_like(like)
    columns = _by_block(x, num_blocks).transpose(1, 2).split(sizes, 2)
    rows = _by_block(grad, num_blocks).split(sizes, 1)
    return torch.stack([torch.bmm(*pair) for pair in zip(columns, rows, strict=True)])


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: tuple[int, ...]) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.starts = starts
        return _multiply(x, weight, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = _GroupedProduct.apply(grad, weight.transpose(2, 3), ctx.starts)
            if ctx.needs_input_grad[1]:
                grad_weight = _outer(x, grad, weight, ctx.starts)
        return grad_x, grad_weight, None
