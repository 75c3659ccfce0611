"""Aggregation by relation and the relations' linear maps (RGCN) as one node of autograd's graph.

With a row for every pair of a destination and a relation, those of a destination beside each other, one
product adds up the relations. Pairs without edges have rows too, so this serves small graphs only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import is_any_autocast_enabled, without_autocast
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import direct, is_first_derivative, is_wrapped
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


def relational_linear(
    adj: Adjacency, x: Tensor, weight: Tensor, root: Tensor | None, bias: Tensor | None, reduce: str
) -> Tensor | None:
    r"""Transforms the neighbours' sums, or means, of every relation and the node's own features.

    .. math::
        \mathbf{y}_i = \sum_r \Big( \bigoplus_{j \in \mathcal{N}_r(i)} \mathbf{x}_j \Big) \mathbf{W}_r +
        \mathbf{x}_i \mathbf{W} + \mathbf{b}

    Args:
        adj: structure (num_dst * R, num_src), the relations of a destination beside each other.
        x: features (num_src, width), which `is_plain_eager`.
        weight: (R, width, out width).
        root: (width, out width), where the destinations are the sources, or None.
        bias: (out width,) or None.
        reduce: ``"sum"`` or ``"mean"``.

    Returns:
        (num_dst, out width), differentiable, twice too. None: autocast, or dtypes that do not go together.
    """
    given = [each for each in (x, weight, root, bias) if each is not None]
    if (
        is_any_autocast_enabled()
        or x.dtype not in DTYPE_CODE
        or any(each.dtype != x.dtype or each.device != x.device or each.is_neg() for each in given)
        or x.shape != (adj.num_src, weight.shape[1])
        or x.layout is not torch.strided
        or x.device != adj.col.device
    ):
        return None
    scale = None
    if reduce == "mean":
        scale = adj.inv_degree(torch.float64 if x.dtype == torch.float64 else torch.float32)
    rest = (adj, scale, policy.requested("spmm", "auto"))
    if torch.is_grad_enabled():
        apply = _RelationalLinear.apply if any(is_wrapped(each) for each in given) else _apply
        out: Tensor = apply(x, weight, root, bias, *rest)
        return out
    return _compute(x, weight, root, bias, *rest)[0]


def _compute(
    x: Tensor,
    weight: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    adj: Adjacency,
    scale: Tensor | None,
    algorithm: str,
) -> tuple[Tensor, Tensor]:
    """The result and the relations' sums, those of a destination in one row."""
    sums = launch_spmm(adj, x, None, scale, None, None, algorithm)
    sums = sums.view(-1, weight.shape[0] * weight.shape[1])
    matrix = weight.reshape(-1, weight.shape[2])
    out = torch.mm(sums, matrix) if bias is None else torch.addmm(bias, sums, matrix)
    return out if root is None else out.addmm_(x, root), sums


class _RelationalLinear(torch.autograd.Function):
    """dX = A^T (dY W^T) + dY W_root^T; dW = (A X)^T dY; dW_root = X^T dY; db = sum of dY."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, weight, root, _, *rest = arguments
        needs_x, needs_weight, needs_root, *_ = ctx.needs_input_grad
        out, sums = _compute(*arguments)
        ctx.rest, ctx.shape = rest, weight.shape
        ctx.save_for_backward(
            x if needs_weight or needs_root else None,
            weight if needs_x else None,
            root if needs_x else None,
            sums if needs_weight else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_first_derivative(grad):
            return (*without_autocast(_gradients, ctx, unit_stride(grad)), None, None, None)
        return (*without_autocast(_differentiable, ctx, grad), None, None, None)


_apply = direct(_RelationalLinear)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, root, sums = ctx.saved_tensors
    needs_x, needs_weight, needs_root, needs_bias, *_ = ctx.needs_input_grad
    adj, scale, algorithm = ctx.rest
    grad_x = None
    if needs_x:
        grad_sums = torch.mm(grad, weight.reshape(-1, ctx.shape[2]).t()).view(-1, ctx.shape[1])
        grad_x = grad_of_features(adj, grad_sums, None, scale, None, algorithm)
        if root is not None:
            grad_x.addmm_(grad, root.t())
    return (
        grad_x,
        torch.mm(sums.t(), grad).view(ctx.shape) if needs_weight else None,
        torch.mm(x.t(), grad) if needs_root else None,
        sum_of_rows(grad, grad.dtype, True) if needs_bias else None,
    )


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients of operators that have gradients again."""
    x, weight, root, _ = ctx.saved_tensors
    needs_x, needs_weight, needs_root, needs_bias, *_ = ctx.needs_input_grad
    adj, scale, algorithm = ctx.rest
    num_relations, width, out_width = ctx.shape
    grad_x = grad_weight = None
    if needs_x:
        grad_sums = (grad @ weight.reshape(-1, out_width).t()).view(-1, width)
        grad_x = spmm(adj.t(valued=False), grad_sums, scale_src=scale, algorithm=algorithm)
        if root is not None:
            grad_x = grad_x + grad @ root.t()
    if needs_weight:
        sums = spmm(adj, x, scale_dst=scale, algorithm=algorithm).view(-1, num_relations * width)
        grad_weight = (sums.t() @ grad).view(ctx.shape)
    return (
        grad_x,
        grad_weight,
        x.t() @ grad if needs_root else None,
        grad.sum(0) if needs_bias else None,
    )
