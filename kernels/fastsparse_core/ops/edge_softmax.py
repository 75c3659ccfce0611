"""Softmax over the entries of every row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._checks import check_heads, check_structure, is_partitioned
from fastsparse_core.ops._dtypes import DTYPE_CODE, accumulation_dtype
from fastsparse_core.ops._edge_values import empty_values
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._handles import keep_alive
from fastsparse_core.ops._registration import register, run
from fastsparse_core.ops._segment_launch import softmax_of_rows
from fastsparse_core.ops.sddmm import sddmm
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency, from_handle


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
    return torch.ops.fastsparse.edge_softmax.default(matrix, adj.handle).reshape(score.shape)


def _launch(adj: Adjacency, matrix: Tensor, grad: Tensor | None) -> Tensor:
    """Softmax of `matrix`, or, with `grad`, its gradient from the weights that `matrix` then holds."""
    matrix = matrix.contiguous()
    grad = None if grad is None else grad.contiguous()
    out = empty_values(adj, matrix)
    if out.numel() == 0 or adj.num_edges == 0:
        return out
    return softmax_of_rows(adj, used_csr(adj), matrix, grad, out)


def _edge_softmax(score: Tensor, adjacency: int) -> Tensor:
    return _launch(from_handle(adjacency), score, None)


def _edge_softmax_backward(weight: Tensor, grad: Tensor, adjacency: int) -> Tensor:
    return _launch(from_handle(adjacency), weight, grad)


class _EdgeSoftmax(torch.autograd.Function):
    """ds = p (g - sum over the row of p g)."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, adjacency: int) -> Tensor:
        weight = run("edge_softmax", score, score, adjacency)
        ctx.save_for_backward(weight)
        ctx.adjacency = adjacency
        ctx.keep_alive = keep_alive(adjacency)
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return torch.ops.fastsparse.edge_softmax_backward.default(weight, grad, ctx.adjacency), None
        # Of operators that have gradients again.
        adj, wide = from_handle(ctx.adjacency), accumulation_dtype(weight.dtype)
        with torch.autocast(weight.device.type, enabled=False):
            p, g = weight.to(wide), grad.to(wide)
            ones = p.new_ones(adj.num_src, p.size(1))
            sums = spmm(adj, ones, p * g)
            grad_score = p * (g - sddmm(adj, sums[:, :, None], ones[:, :, None]))
        return grad_score.to(weight.dtype), None


register(_edge_softmax, lambda of: of.score.new_empty(of.score.shape), _EdgeSoftmax)
register(_edge_softmax_backward, lambda of: of.weight.new_empty(of.weight.shape))
