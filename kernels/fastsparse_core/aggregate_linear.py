"""Aggregation and linear maps of GraphSAGE as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import choose
from fastsparse_core.adjacency import Adjacency
from fastsparse_core.captured_step import fork
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    is_first_derivative,
    is_plain_eager,
    sum_of_rows,
    without_autocast,
)
from fastsparse_core.ops._spmm_launch import add_transposed, grad_of_features, product
from fastsparse_core.ops.spmm import spmm


def starts_with(x: Tensor, root: Tensor) -> bool:
    """Whether ``root`` is ``x[:n]``, or ``x`` itself, to autograd too, and nobody watches its gradient.

    Args:
        x: matrix.
        root: matrix of the same width.
    """
    if root is x:
        return True
    return (
        # A sibling would have its gradient added to that of x: who watches x would see it.
        (not x._is_view() or (x._backward_hooks is None and not x.retains_grad))
        and root._is_view()
        and root._base is (x._base if x._is_view() else x)
        and root.data_ptr() == x.data_ptr()
        and root.stride() == x.stride()
        and root.shape[0] <= x.shape[0]
        and root.requires_grad == x.requires_grad
        and root.requires_grad != root.is_leaf  # a view made under no_grad is a leaf
        and root._backward_hooks is None
        and not root.retains_grad
    )


def can_aggregate_linear(
    adj: Adjacency, x: Tensor, root: Tensor, weight: Tensor, bias: Tensor | None, root_weight: Tensor
) -> bool:
    """Whether :func:`aggregate_linear` serves a call: matrices of one dtype, watched by nothing but autograd.

    Args:
        adj: structure.
        x: features of the sources.
        root: features of the destinations.
        weight: of the aggregated neighbours.
        bias: of the result, or None.
        root_weight: of the destinations.
    """
    (num_dst, num_src), dtype, device = adj.shape, x.dtype, x.device
    width = weight.shape[1]
    return (
        is_plain_eager(x)
        and not adj.is_partitioned
        and x.shape == (num_src, width)
        and root.shape == (num_dst, width)
        and root_weight.shape == weight.shape
        and dtype in DTYPE_CODE
        and weight.dtype == dtype == root_weight.dtype
        and (bias is None or bias.dtype == dtype)
        and device == adj.device
        and starts_with(x, root)
        and not torch.is_autocast_enabled(device.type)
    )


def aggregate_linear(
    adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None, root_weight: Tensor, reduce: str
) -> Tensor:
    r"""Aggregates the neighbours' features and transforms them and the node's own.

    .. math::
        \mathbf{y}_i = \mathbf{W} \bigoplus_{j \in \mathcal{N}(i)} \mathbf{x}_j + \mathbf{W}_r \mathbf{x}_i
        + \mathbf{b}

    with :math:`\bigoplus` a sum or mean; the destinations are the first sources. Equal to ``spmm`` and two
    linear maps up to rounding, in fewer steps: their results and gradients are added in place by the products
    themselves. The gradient of the features of a structure that is new comes without its transpose
    (`choose.scatters`), on CUDA by atomics.

    Args:
        adj: structure (num_dst, num_src), with num_dst <= num_src.
        x: features (num_src, width), as `can_aggregate_linear` asks for.
        weight: (out width, width).
        bias: (out width,) or None.
        root_weight: (out width, width).
        reduce: ``"sum"`` or ``"mean"``.

    Returns:
        (num_dst, out width); differentiable, twice too.
    """
    scale = None
    if reduce == "mean":
        scale = adj.inv_degree(torch.float64 if x.dtype == torch.float64 else torch.float32)
    algorithm = choose.requested("spmm", "auto")
    return _AggregateLinear.apply(x, weight, bias, root_weight, scale, adj, algorithm)


class _AggregateLinear(torch.autograd.Function):
    """dX = A^T (dY W), onto dY W_r; dW = dY^T (A X); dW_r = dY^T X; db = sum of dY."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        root_weight: Tensor,
        scale: Tensor | None,
        adj: Adjacency,
        algorithm: str,
    ) -> Tensor:
        num_dst = adj.num_dst
        sums = product(adj, x, None, scale, None, None, algorithm)
        out = torch.mm(sums, weight.t()) if bias is None else torch.addmm(bias, sums, weight.t())
        out.addmm_(x[:num_dst], root_weight.t())
        ctx.adj, ctx.algorithm, ctx.num_src = adj, algorithm, x.size(0)
        # What no gradient needs may be written before the backward pass, as with separate operators.
        needs_x, needs_weight, _, needs_root = ctx.needs_input_grad[:4]
        ctx.save_for_backward(
            x if needs_weight or needs_root else None,
            sums if needs_weight else None,
            weight if needs_x else None,
            root_weight if needs_x else None,
            scale,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients if is_first_derivative(grad) else _differentiable
        return (*without_autocast(gradients, ctx, grad), None, None, None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, sums, weight, root_weight, scale = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_root = ctx.needs_input_grad[:4]
    by_column = grad.t()

    def of_parameters() -> tuple[Tensor | None, ...]:
        return (
            torch.mm(by_column, sums) if needs_weight else None,
            sum_of_rows(grad) if needs_bias else None,
            torch.mm(by_column, x[: grad.size(0)]) if needs_root else None,
        )

    if not needs_x:
        return (None, *of_parameters())
    parameters = fork(of_parameters)
    grad_x = _grad_x(ctx, grad, ctx.num_src, weight, root_weight, scale)
    return (grad_x, *parameters())


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients of operators that have gradients again."""
    x, _, weight, root_weight, scale = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_root = ctx.needs_input_grad[:4]
    adj, num_dst = ctx.adj, grad.size(0)
    grad_x = grad_weight = None
    if needs_x:
        grad_x = spmm(adj.t(), grad @ weight, scale_src=scale, algorithm=ctx.algorithm)
        grad_x = grad_x + F.pad(grad @ root_weight, (0, 0, 0, ctx.num_src - num_dst))
    if needs_weight:
        grad_weight = grad.t() @ spmm(adj, x, scale_dst=scale, algorithm=ctx.algorithm)
    return (
        grad_x,
        grad_weight,
        grad.sum(0) if needs_bias else None,
        grad.t() @ x[:num_dst] if needs_root else None,
    )


def _grad_x(
    ctx: Any, grad: Tensor, num_src: int, weight: Tensor, root_weight: Tensor, scale: Tensor | None
) -> Tensor:
    adj, num_dst = ctx.adj, grad.size(0)
    grad_sums = torch.mm(grad, weight)
    if grad.dtype == torch.float32 and choose.scatters(adj, ctx.algorithm, grad.dtype, None):
        total = torch.empty(num_src, grad_sums.size(1), dtype=torch.float32, device=grad.device)
        torch.mm(grad, root_weight, out=total[:num_dst])
        return add_transposed(adj, grad_sums, None, scale, None, total, num_dst)
    total = grad_of_features(adj, grad_sums, None, scale, None, ctx.algorithm)
    total[:num_dst].addmm_(grad, root_weight)
    return total
