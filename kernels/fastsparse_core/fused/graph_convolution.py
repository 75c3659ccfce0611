"""Linear map and aggregation of GCN as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import (
    CAST,
    Uncast,
    autocast_dtype,
    is_any_autocast_enabled,
    product_in,
    without_autocast,
)
from fastsparse_core.ops._checks import check_scale
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_wrapped, kind_of
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm, with_loops
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


@dataclass(frozen=True, slots=True)
class _Plan:
    """What calls on like tensors share, kept by the structure; it does not keep the structure.

    Attributes:
        scale_dst: constant (num_dst,) or None.
        scale_src: constant (num_src,) or None.
        given_dst: ``scale_dst`` as the callers give it.
        given_src: ``scale_src`` likewise.
        out_by_in: whether the weight is (out width, in width).
        aggregate_first: whether neighbours are summed before the linear map.
        relu: whether negative results become 0.
        loop: value of the loops that every node gets; None: none.
        algorithm: of the sum.
        dtype: of the products.
        weight_dtype: of the weight as the callers give it.
        bias_dtype: of the bias; None without.
    """

    scale_dst: Tensor | None
    scale_src: Tensor | None
    given_dst: Tensor | None
    given_src: Tensor | None
    out_by_in: bool
    aggregate_first: bool
    relu: bool
    loop: Tensor | None
    algorithm: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def graph_convolution(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out_by_in: bool,
    aggregate_first: bool,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    relu: bool = False,
    add_loops: bool = False,
) -> Tensor | None:
    r"""Transforms the neighbours' features and aggregates them, in the order that the caller says.

    .. math::
        \mathbf{y}_i = s_i \sum_{j \in \mathcal{N}(i)} t_j \, \mathbf{x}_j \mathbf{W} + \mathbf{b}

    Equal to ``spmm`` and a linear map up to rounding, under autocast too. There the bias' gradient is a sum
    in its own dtype and, on CUDA and with torch 2.8 or later, so is that of a float32 weight.

    It serves plain matrices on one device, of one dtype or what autocast makes of them.

    Args:
        adj: structure (num_dst, num_src).
        x: features (num_src, in width), which `is_plain_eager`.
        weight: (out width, in width) or (in width, out width).
        bias: (out width,) or None.
        out_by_in: whether the weight is (out width, in width).
        aggregate_first: whether neighbours are summed before the linear map. Only for features without
            gradient, whose sums alone are kept then.
        scale_dst: constant s, (num_dst,); None: 1.
        scale_src: constant t, (num_src,); None: 1.
        relu: whether negative results become 0.
        add_loops: whether every node is a neighbour of its own too, of a square structure without loops.

    Returns:
        (num_dst, out width), in the autocast dtype where that is on; differentiable, twice too. None where it
        does not serve the call.
    """
    if weight is None:
        return None
    key = (
        kind_of(x),
        kind_of(weight),
        None if bias is None else kind_of(bias),
        out_by_in,
        aggregate_first,
        relu,
        add_loops,
        autocast_dtype(x) if is_any_autocast_enabled() else None,
        policy.requested("spmm", "auto"),
    )
    plan: _Plan | None = adj.plans.get(key)
    if plan is None or plan.given_dst is not scale_dst or plan.given_src is not scale_src:
        dtype = _product_dtype(adj, x, weight, bias, out_by_in, aggregate_first)
        if dtype is None:
            return None
        plan = adj.plans[key] = _Plan(
            *_checked_scales(adj, x, scale_dst, scale_src),
            scale_dst,
            scale_src,
            out_by_in,
            aggregate_first,
            relu,
            one(x.device, torch.float64 if dtype == torch.float64 else torch.float32) if add_loops else None,
            key[-1],
            dtype,
            weight.dtype,
            None if bias is None else bias.dtype,
        )
    if bias is not None and bias.is_neg():
        return None
    if not torch.is_grad_enabled():
        return _convolve(plan, adj, x, weight, bias)[0]
    out: Tensor = (_GraphConvolution.apply if is_wrapped(x) else _apply)(x, weight, bias, adj, plan)
    return out


@functools.cache
def one(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The number 1 on a device, for loops."""
    with torch.inference_mode(False):
        return torch.ones((), dtype=dtype, device=device)


def _product_dtype(
    adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None, out_by_in: bool, aggregate_first: bool
) -> torch.dtype | None:
    """The dtype in which a call multiplies; None where it is others' to serve."""
    device, dtype = x.device, x.dtype
    if (
        type(weight) not in PLAIN
        or adj.is_partitioned
        or x.dim() != 2
        or weight.dim() != 2
        or x.layout is not torch.strided
        or weight.layout is not torch.strided
        or x.shape[0] != adj.num_src
        or device != adj.col.device
        or device != weight.device
    ):
        return None
    if bias is not None and (
        type(bias) not in PLAIN
        or bias.device != device
        or bias.dtype != weight.dtype
        or bias.shape != (weight.shape[0 if out_by_in else 1],)
    ):
        return None
    if aggregate_first and x.requires_grad:
        return None
    autocast = autocast_dtype(x)
    if autocast is None:
        return dtype if dtype == weight.dtype and dtype in DTYPE_CODE else None
    if x.requires_grad and dtype != autocast:
        return None  # they would have to be kept as they came, for second derivatives
    return autocast if dtype in CAST and weight.dtype in CAST else None


def _checked_scales(
    adj: Adjacency, x: Tensor, scale_dst: Tensor | None, scale_src: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    same = scale_src is scale_dst and adj.num_src == adj.num_dst
    scale_dst = check_scale("scale_dst", scale_dst, adj.num_dst, x)
    return scale_dst, scale_dst if same else check_scale("scale_src", scale_src, adj.num_src, x)


def _convolve(
    plan: _Plan, adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the features and the weight as they were multiplied."""
    dtype = plan.dtype
    features = x if x.dtype is dtype else x.to(dtype)
    matrix = weight if weight.dtype is dtype else weight.to(dtype)
    if not plan.aggregate_first:
        transformed = F.linear(features, matrix) if plan.out_by_in else torch.mm(features, matrix)
        scales = (plan.scale_dst, plan.scale_src)
        out = launch_spmm(adj, transformed, None, *scales, bias, plan.algorithm, plan.relu, plan.loop)
        return out, features, matrix
    features = launch_spmm(
        adj, features, None, plan.scale_dst, plan.scale_src, None, plan.algorithm, loop=plan.loop
    )
    if bias is not None and bias.dtype is not dtype:
        bias = bias.to(dtype)
    if plan.out_by_in:
        out = F.linear(features, matrix, bias)
    else:
        out = torch.mm(features, matrix) if bias is None else torch.addmm(bias, features, matrix)
    return out.relu_() if plan.relu else out, features, matrix


class _GraphConvolution(torch.autograd.Function):
    """dW = X^T A^T dY, dX = (A^T dY) W^T, db = sum of dY; dW = (A X)^T dY where A X came first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, adj: Adjacency, plan: _Plan
    ) -> Tensor:
        out, features, matrix = _convolve(plan, adj, x, weight, bias)
        needs_x, needs_weight, _, _, _ = ctx.needs_input_grad
        ctx.held = adj, plan, Uncast.of(weight, matrix) if needs_x and matrix is not weight else None
        # What no gradient needs may be written before the backward pass, as with separate operators.
        ctx.save_for_backward(
            features if needs_weight else None, matrix if needs_x else None, out if plan.relu else None
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return without_autocast(_gradients, ctx, grad)


_apply = direct(_GraphConvolution)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, matrix, rectified = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
    adj, plan, uncast = ctx.held
    # Else all of it is made of operators that have gradients again.
    once = is_first_derivative(grad)
    if rectified is not None:
        grad = grad.masked_fill(rectified <= 0, 0)
    grad_x = grad_weight = None
    grad_bias = sum_of_rows(grad, plan.bias_dtype, once) if needs_bias else None
    if not plan.aggregate_first and (needs_x or needs_weight):
        if once:
            grad = grad_of_features(
                adj, grad, None, plan.scale_dst, plan.scale_src, plan.algorithm, plan.loop
            )
        else:
            scales = {"scale_dst": plan.scale_src, "scale_src": plan.scale_dst}
            back = spmm(adj.t(valued=False), grad, **scales, algorithm=plan.algorithm)
            grad = back if plan.loop is None else with_loops(back, grad, **scales, loop=plan.loop)
    if needs_weight:
        left, right = (grad.t(), features) if plan.out_by_in else (features.t(), grad)
        grad_weight = product_in(left, right, plan.weight_dtype, once)
    if needs_x:
        matrix = matrix if once or uncast is None else uncast.cast_again(plan.dtype)
        grad_x = torch.mm(grad, matrix if plan.out_by_in else matrix.t())
    return grad_x, grad_weight, grad_bias, None, None
