"""Softmax over the entries of every row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._checks import check_heads, check_structure, is_partitioned
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import empty_values
from fastsparse_core.ops._registration import Operator, Structure, keep_alive, structure_of
from fastsparse_core.ops._segment_launch import softmax_of_rows
from fastsparse_core.ops.sddmm import sddmm
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


def edge_softmax(adj: Adjacency, score: Tensor) -> Tensor:
    r"""Softmax of the scores of the edges that share a destination.

    .. math::
        p_{ij} = \frac{\exp(s_{ij})}{\sum_{k \in \mathcal{N}(i)} \exp(s_{ik})}

    Args:
        adj: structure (num_dst, num_src).
        score: :math:`s`, (num_values,) or (num_values, H) in the caller's edge order, float64, float32,
            float16 or bfloat16.

    Returns:
        :math:`p` in the shape and dtype of ``score``, computed in float32 or wider; 0 for edges that self
        loops replaced, and in rows whose scores are all :math:`-\infty`. Differentiable any number of times.

    Raises:
        TypeError: the dtype is not supported.
        ValueError: the shape or the device does not fit, or there are more than 65535 heads on CUDA.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, edge_softmax
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 0]), (3, 3))
        >>> edge_softmax(adj, torch.tensor([1.0, 1.0, 7.0]))
        tensor([0.5000, 0.5000, 1.0000])
    """
    check_structure(adj)
    if not isinstance(score, Tensor) or score.dtype not in DTYPE_CODE:
        kind = score.dtype if isinstance(score, Tensor) else type(score).__name__
        raise TypeError(f"score: expected a floating tensor, got {kind}")
    if score.dim() not in (1, 2) or score.size(0) != adj.num_values:
        raise ValueError(
            f"score: expected shape ({adj.num_values},) or ({adj.num_values}, heads), "
            f"got {tuple(score.shape)}"
        )
    if score.device != adj.device:
        raise ValueError(
            f"score: expected device {adj.device} like the Adjacency, got {score.device}; move one with .to()"
        )
    if is_partitioned(adj):
        adj = adj.rows
    matrix = score[:, None] if score.dim() == 1 else score
    check_heads(matrix.size(1), score.device)
    weight: Tensor = _softmax_op(matrix, adj)
    return weight.reshape(score.shape)


def _launch(adj: Adjacency, matrix: Tensor, grad: Tensor | None) -> Tensor:
    """Softmax of the scores `matrix`; with `grad`, the gradient of a softmax whose result is `matrix`."""
    matrix = matrix.contiguous()
    grad = None if grad is None else grad.contiguous()
    out = empty_values(adj, matrix)
    if out.numel() == 0 or adj.num_edges == 0:
        return out
    return softmax_of_rows(adj, adj.plans.get("csr") or used_csr(adj), matrix, grad, out)


def _edge_softmax(score: Tensor, adjacency: Structure) -> Tensor:
    return _launch(structure_of(adjacency), score, None)


def _edge_softmax_backward(weight: Tensor, grad: Tensor, adjacency: Structure) -> Tensor:
    return _launch(structure_of(adjacency), weight, grad)


class _EdgeSoftmax(torch.autograd.Function):
    """ds = p (g - sum over the row of p g)."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, adjacency: Structure) -> Tensor:
        weight: Tensor = _softmax_op.below(score, adjacency)
        ctx.save_for_backward(weight)
        ctx.adjacency = adjacency
        ctx.keep_alive = keep_alive(adjacency)
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return _gradient_op(weight, grad, ctx.adjacency), None


class _EdgeSoftmaxBackward(torch.autograd.Function):
    """Derivatives of the gradient ds = p (g - R(p g)), where R gives every edge the sum of its row.

    With the incoming gradient u: ds is linear in g and self-adjoint, so dg = p (u - R(p u)). The derivative
    by p is dp = u (g - R(p g)) - g R(p u).
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, grad: Tensor, adjacency: Structure) -> Tensor:
        ctx.save_for_backward(weight, grad)
        ctx.adjacency = adjacency
        ctx.keep_alive = keep_alive(adjacency)
        return _gradient_op.below(weight, grad, adjacency)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        weight, grad = ctx.saved_tensors
        adj = structure_of(ctx.adjacency)

        def row_sums(value: Tensor) -> Tensor:
            ones = value.new_ones(adj.num_src, value.size(1))
            sums = spmm(adj, ones, value)
            return sddmm(adj, sums[:, :, None], ones[:, :, None])

        with torch.autocast(weight.device.type, enabled=False):
            grad_weight = outer * (grad - row_sums(weight * grad)) - grad * row_sums(weight * outer)
        return grad_weight, _gradient_op(weight, outer, ctx.adjacency), None


_softmax_op = Operator(_edge_softmax, lambda of: of.score.new_empty(of.score.shape), _EdgeSoftmax)
_gradient_op = Operator(
    _edge_softmax_backward, lambda of: of.weight.new_empty(of.weight.shape), _EdgeSoftmaxBackward
)
