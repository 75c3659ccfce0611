"""Weighted sum over neighbours and the linear maps of GraphConv as one node of autograd's graph.

Separate operators have six nodes, which steps on small graphs would wait for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import is_any_autocast_enabled, without_autocast
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import direct, is_first_derivative, is_plain_eager, is_wrapped, kind_of
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops._weight_gradient import weight_gradient
from fastsparse_core.ops.sddmm import sddmm, sddmm_kernel
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


def weighted_linear(
    adj: Adjacency,
    x: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor,
    reduce: str,
    *,
    transform_first: bool = False,
) -> Tensor | None:
    r"""Transforms the weighted sums, or means, over the neighbours and the node's own features.

    .. math::
        \mathbf{y}_i = \mathbf{W} \bigoplus_{j \in \mathcal{N}(i)} v_{ij} \mathbf{x}_j + \mathbf{W}_r
        \mathbf{x}_i + \mathbf{b}

    Equal to ``spmm`` and two linear maps up to rounding; results and gradients are added in place by the
    products themselves.

    Args:
        adj: square structure.
        x: features (num_nodes, width), which `is_plain_eager`.
        value: (num_values,), one per edge in the caller's order.
        weight: (out width, width).
        bias: (out width,) or None.
        root_weight: (out width, width).
        reduce: ``"sum"`` or ``"mean"``.
        transform_first: whether neighbours are summed after the linear map, which pays where that is narrow.

    Returns:
        (num_nodes, out width), differentiable, twice too. None: autocast, or dtypes and sizes that do not go
        together.
    """
    key = (
        "weighted_linear",
        kind_of(x),
        kind_of(value),
        kind_of(weight),
        None if bias is None else kind_of(bias),
        kind_of(root_weight),
        transform_first,
    )
    serves = adj.plans.get(key)
    if serves is None:
        serves = adj.plans[key] = _serves(adj, x, value, weight, bias, root_weight)
    if (
        not serves
        or is_any_autocast_enabled()
        or not is_plain_eager(value)
        or (bias is not None and bias.is_neg())
    ):
        return None
    scale = (
        adj.inv_degree(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if reduce == "mean"
        else None
    )
    rest = (adj, scale, policy.requested("spmm", "auto"), transform_first)
    if torch.is_grad_enabled():
        apply = _WeightedLinear.apply if is_wrapped(x) or is_wrapped(value) else _apply
        out: Tensor = apply(x, value, weight, bias, root_weight, *rest)
        return out
    return _compute(x, value, weight, bias, root_weight, *rest)[0]


def _serves(
    adj: Adjacency, x: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, root_weight: Tensor
) -> bool:
    return (
        type(adj) is Adjacency
        and adj.num_dst == adj.num_src
        and x.layout is torch.strided
        and x.shape == (adj.num_src, weight.shape[-1])
        and weight.dim() == 2
        and root_weight.shape == weight.shape
        and value.shape == (adj.num_values,)
        and x.dtype in DTYPE_CODE
        and x.device == adj.col.device
        and all(
            each.dtype == x.dtype and each.device == x.device
            for each in (value, weight, bias, root_weight)
            if each is not None
        )
    )


def _compute(
    x: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor,
    adj: Adjacency,
    scale: Tensor | None,
    algorithm: str,
    transform_first: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and what the neighbours' weight met: their sums; or, where it comes first, its result."""
    if transform_first:
        met = F.linear(x, weight)
        out = launch_spmm(adj, met, value, scale, None, bias, algorithm)
    else:
        met = launch_spmm(adj, x, value, scale, None, None, algorithm)
        out = F.linear(met, weight, bias)
    return out.addmm_(x, root_weight.t()), met


class _WeightedLinear(torch.autograd.Function):
    """dX = A^T (dY W) + dY W_r; dv = sddmm(dY W, X); dW = dY^T (A X); dW_r = dY^T X; db = sum of dY.

    Where the linear map came first: dX = (A^T dY) W + dY W_r; dv = sddmm(dY, X W^T); dW = (A^T dY)^T X.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, value, weight, bias, root_weight, *rest = arguments
        needs_x, needs_value, needs_weight, *_ = ctx.needs_input_grad
        out, met = _compute(*arguments)
        ctx.rest, ctx.bias_dtype = rest, None if bias is None else bias.dtype
        # What no gradient needs may be written before the backward pass, as with separate operators.
        ctx.save_for_backward(
            x,
            value,
            weight if needs_x or needs_value else None,
            root_weight if needs_x else None,
            met if (needs_value if rest[-1] else needs_weight) else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_first_derivative(grad):
            gradients = _gradients
            grad = unit_stride(grad)
        else:
            gradients = _differentiable
        return (*without_autocast(gradients, ctx, grad), None, None, None, None)


_apply = direct(_WeightedLinear)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, value, weight, root_weight, met = ctx.saved_tensors
    needs_x, needs_value, needs_weight, needs_bias, needs_root, *_ = ctx.needs_input_grad
    adj, scale, algorithm, transform_first = ctx.rest
    grad_x = grad_value = grad_weight = None
    by_column = grad.t()
    if transform_first:
        at_dst, at_src = grad, met
        if needs_x or needs_weight:
            back = grad_of_features(adj, grad, value, scale, None, algorithm)
        if needs_weight:
            grad_weight = weight_gradient(back, x, x.dtype, True)
        if needs_x:
            grad_x = torch.mm(back, weight)
    else:
        at_src = x
        if needs_weight:
            grad_weight = torch.mm(by_column, met)
        if needs_x or needs_value:
            at_dst = torch.mm(grad, weight)
        if needs_x:
            grad_x = grad_of_features(adj, at_dst, value, scale, None, algorithm)
    if needs_x:
        grad_x.addmm_(grad, root_weight)  # type: ignore[union-attr]
    if needs_value:
        asked = algorithm if algorithm in policy.SDDMM_ALGORITHMS else "csr"
        of_values = (value.shape[0], 1, value.dtype, adj.handle, asked, False)
        grad_value = sddmm_kernel(at_dst, at_src, scale, None, *of_values).view(-1)
    return (
        grad_x,
        grad_value,
        grad_weight,
        sum_of_rows(grad, ctx.bias_dtype, True) if needs_bias else None,
        torch.mm(by_column, x) if needs_root else None,
    )


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients of operators that have gradients again."""
    x, value, weight, root_weight, _ = ctx.saved_tensors
    needs_x, needs_value, needs_weight, needs_bias, needs_root, *_ = ctx.needs_input_grad
    adj, scale, algorithm, _ = ctx.rest
    grad_x = grad_value = grad_weight = None
    if needs_x or needs_value:
        at_dst = grad @ weight
    if needs_x:
        turned = spmm(adj.t(), at_dst, value, scale_src=scale, algorithm=algorithm)
        grad_x = turned + grad @ root_weight
    if needs_value:
        grad_value = sddmm(adj, at_dst, x, scale_dst=scale)
    if needs_weight:
        grad_weight = grad.t() @ spmm(adj, x, value, scale_dst=scale, algorithm=algorithm)
    return (
        grad_x,
        grad_value,
        grad_weight,
        grad.sum(0) if needs_bias else None,
        grad.t() @ x if needs_root else None,
    )
