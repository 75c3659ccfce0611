"""Gathers rows per edge and sums them per node, for callers that already have the sorted segments.

The results are the same as those of the segment operators, in less time on the host. Second derivatives use
the segment operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastsparse_core.ops._eager import direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._segment import gather_op, reduce_op, softmax_op
from fastsparse_core.ops._segment_launch import gather_rows, launch_softmax, sum_rows
from fastsparse_core.structure.segments import Segments


class End(Protocol):
    """One end of all edges: the node at this end of every edge, and the edges of every node."""

    @property
    def index(self) -> Tensor:
        """Node of every edge, int32 or int64 (num_edges,)."""

    def find(self, *_: Any) -> Segments:
        """The segments of `index`."""


def lift(matrices: Sequence[Tensor], ends: Sequence[End]) -> tuple[Tensor, ...]:
    """Gathers rows of several matrices per edge, ``matrices[k]`` at ``ends[k]``, with one autograd node.

    Args:
        matrices: floating (num_nodes, ...); either all or none of them require gradients.
        ends: for each matrix, the end of the edges at which it is gathered.
    """
    if all(map(is_plain_eager, matrices)):
        if not (matrices[0].requires_grad and torch.is_grad_enabled()):
            return tuple([_rows(matrix, end.index) for matrix, end in zip(matrices, ends, strict=True)])
        wrapped = any(map(is_wrapped, matrices))
        lifted: tuple[Tensor, ...] = (_Lift.apply if wrapped else _apply_lift)(ends, *matrices)
        return lifted
    return tuple(_lift_by_operator(matrix, end) for matrix, end in zip(matrices, ends, strict=True))


def sum_edges(rows: Tensor, end: End, num_nodes: int, *, mean: bool = False) -> Tensor:
    """Sum, or mean, over the edges of every node, (num_nodes, ...).

    Args:
        rows: floating (num_edges, ...), without PyTorch's negative bit.
        end: the end of the edges.
        num_nodes: number of nodes.
        mean: whether to divide by the number of edges of each node.
    """
    how = "mean" if mean else "sum"
    if not is_plain_eager(rows):
        total = reduce_op(_as_matrix(rows), end.index, None, num_nodes, how, find=end.find)[0]
        return total.reshape(num_nodes, *rows.shape[1:])
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return _sum(rows, end.find(), how)
    out: Tensor = (_SumEdges.apply if is_wrapped(rows) else _apply_sum)(rows, end.index, end, how)
    return out


def softmax_sum(rows: Tensor, end: End, num_nodes: int) -> Tensor:
    """Sum over the edges of every node, weighted by the softmax of the same rows, (num_nodes, F).

    Args:
        rows: floating (num_edges, F), without PyTorch's negative bit.
        end: the end of the edges.
        num_nodes: number of nodes.
    """
    if is_plain_eager(rows) and rows.requires_grad and torch.is_grad_enabled() and not is_wrapped(rows):
        out: Tensor = _apply_softmax_sum(rows, end.index, end, num_nodes)
        return out
    return _softmax_sum(rows, end, num_nodes)


def _softmax_sum(rows: Tensor, end: End, num_nodes: int) -> Tensor:
    weights = softmax_op(rows, end.index, None, num_nodes, find=end.find)
    return sum_edges(rows * weights, end, num_nodes)


def _as_matrix(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 else rows.reshape(rows.shape[0], rows.shape[1:].numel())


def _rows(matrix: Tensor, index: Tensor) -> Tensor:
    if not matrix.is_cuda:
        return matrix.index_select(0, index)
    out = gather_rows(_as_matrix(matrix), index)
    return out if matrix.dim() == 2 else out.view(index.numel(), *matrix.shape[1:])


def _sum(rows: Tensor, segments: Segments, how: str) -> Tensor:
    out = sum_rows(_as_matrix(rows), segments, how)
    return out if rows.dim() == 2 else out.view(segments.num_segments, *rows.shape[1:])


def _lift_by_operator(matrix: Tensor, end: End) -> Tensor:
    rows: Tensor = gather_op(_as_matrix(matrix), end.index, None, end.index.numel(), find=end.find)
    return rows.reshape(-1 if rows.numel() else end.index.numel(), *matrix.shape[1:])


class _Lift(torch.autograd.Function):
    """Gathers rows per edge; the gradient sums over the edges of every node."""

    @staticmethod
    def forward(ctx: Any, ends: Sequence[End], *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.ends, ctx.shapes = ends, [matrix.shape for matrix in matrices]
        ctx.set_materialize_grads(False)
        return tuple([_rows(matrix, end.index) for matrix, end in zip(matrices, ends, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None]
        for grad, end, shape in zip(grads, ctx.ends, ctx.shapes, strict=True):
            if grad is None:
                found.append(None)
            elif is_first_derivative(grad):
                found.append(_sum(grad, end.find(), "sum"))
            else:
                found.append(sum_edges(grad, end, shape[0]))
        return tuple(found)


class _SumEdges(torch.autograd.Function):
    """Sums over the edges of every node; the gradient gathers the node's gradient at each of its edges."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, end: End, how: str) -> Tensor:
        ctx.save_for_backward(index)
        ctx.end, ctx.is_mean = end, how == "mean"
        return _sum(rows, end.find(), how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        if ctx.is_mean:
            count = ctx.end.find().count.view(-1, *[1] * (grad.dim() - 1))
            grad = (grad / count).to(grad.dtype)
        rows = _rows(grad, index) if is_first_derivative(grad) else _lift_by_operator(grad, ctx.end)
        return rows, None, None, None


class _SoftmaxSum(torch.autograd.Function):
    """With weights p and the gradient g of an edge's node: dm = p (m g - sum of p m g of the node) + p g."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, end: End, num_nodes: int) -> Tensor:
        weights = launch_softmax(rows, None, end.find)
        ctx.save_for_backward(rows, weights, index)
        ctx.end, ctx.num_nodes = end, num_nodes
        return _sum(rows * weights, end.find(), "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, index = ctx.saved_tensors
        if not is_first_derivative(grad):
            compute = lambda x: _softmax_sum(x, ctx.end, ctx.num_nodes)  # noqa: E731
            return *unfused_gradients(compute, grad, (rows,), (True,)), None, None, None
        at_edges = _rows(grad, index)
        found = launch_softmax(weights, at_edges * rows, ctx.end.find)
        return found.addcmul_(weights, at_edges), None, None, None


_apply_lift, _apply_sum, _apply_softmax_sum = direct(_Lift), direct(_SumEdges), direct(_SoftmaxSum)
