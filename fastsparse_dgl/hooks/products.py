"""Products of rows with one matrix per segment or type, differentiable any number of times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_dgl.hooks.messages import without_autocast


def segment_matmul(a: Tensor, b: Tensor, lengths: list[int]) -> Tensor:
    """Multiplies every segment of rows with its own matrix.

    Args:
        a: rows, (sum of lengths, K).
        b: one matrix per segment, (segments, K, M).
        lengths: number of rows of every segment.
    """
    return _SegmentMatmul.apply(a, b, lengths)


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Permutes rows; its gradient is a gather too, not a scatter."""
    return _Permute.apply(x, order, inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return permuted(grad, inverse, order), None, None


class _SegmentMatmul(torch.autograd.Function):
    """C_i = A_i B_i; dA_i = dC_i B_i^T and dB_i = A_i^T dC_i."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, lengths: list[int]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.lengths = lengths
        out = a.new_empty(a.size(0), b.size(2))
        for rows, number in _segments(lengths):
            torch.mm(a[rows], b[number], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = None
        with without_autocast(grad):
            if ctx.needs_input_grad[0]:
                grad_a = _SegmentMatmul.apply(grad, b.transpose(1, 2), ctx.lengths)
            if ctx.needs_input_grad[1]:
                grad_b = _SegmentOuter.apply(a, grad, ctx.lengths)
        return grad_a, grad_b, None


class _SegmentOuter(torch.autograd.Function):
    """B_i = A_i^T C_i; dA_i = C_i dB_i^T and dC_i = A_i dB_i."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, c: Tensor, lengths: list[int]) -> Tensor:
        ctx.save_for_backward(a, c)
        ctx.lengths = lengths
        out = a.new_zeros(len(lengths), a.size(1), c.size(1))
        for rows, number in _segments(lengths):
            torch.mm(a[rows].t(), c[rows], out=out[number])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, c = ctx.saved_tensors
        grad_a = grad_c = None
        if ctx.needs_input_grad[0]:
            grad_a = _SegmentMatmul.apply(c, grad.transpose(1, 2), ctx.lengths)
        if ctx.needs_input_grad[1]:
            grad_c = _SegmentMatmul.apply(a, grad, ctx.lengths)
        return grad_a, grad_c, None


def _segments(lengths: list[int]) -> list[tuple[slice, int]]:
    """Yields (slice of the rows, number of the segment) for every segment that is not empty."""
    found, start = [], 0
    for number, length in enumerate(lengths):
        if length:
            found.append((slice(start, start + length), number))
        start += length
    return found
