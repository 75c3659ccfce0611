"""Linear map and aggregation of GCN as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._common import (
    CAST,
    DTYPE_CODE,
    PLAIN,
    Uncast,
    autocast_dtype,
    check_scale,
    is_first_derivative,
    is_plain_eager,
    product_in,
    sum_of_rows,
    without_autocast,
)
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


def can_convolve(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out_by_in: bool,
    aggregate_first: bool,
) -> bool:
    """Whether :func:`graph_convolution` serves a call: plain matrices on one device, nothing being traced.

    Args:
        adj: structure.
        x: features of the sources.
        weight: of the linear map.
        bias: of the result, or None.
        out_by_in: as for :func:`graph_convolution`.
        aggregate_first: as for :func:`graph_convolution`.
    """
    device, dtype = x.device, x.dtype
    if not (
        is_plain_eager(x)
        and type(weight) in PLAIN
        and not adj.is_partitioned
        and x.dim() == 2 == weight.dim()
        and x.layout is torch.strided is weight.layout
        and x.shape[0] == adj.num_src
        and device == adj.col.device == weight.device
    ):
        return False
    if bias is not None and not (
        type(bias) in PLAIN
        and not bias.is_neg()
        and bias.device == device
        and bias.dtype == weight.dtype
        and bias.shape == (weight.shape[0 if out_by_in else 1],)
    ):
        return False
    needs_grad = x.requires_grad
    if aggregate_first and needs_grad:
        return False
    if not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        return dtype == weight.dtype and dtype in DTYPE_CODE
    autocast = autocast_dtype(x)
    if needs_grad and dtype != autocast:
        return False  # they would have to be kept as they came, for second derivatives
    return dtype in CAST and weight.dtype in CAST


class _Convolution(NamedTuple):
    """What a graph convolution is, besides its tensors with gradients."""

    adj: Adjacency
    scale_dst: Tensor | None
    scale_src: Tensor | None
    out_by_in: bool
    aggregate_first: bool
    relu: bool
    algorithm: str
    dtype: torch.dtype


def graph_convolution(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out_by_in: bool,
    aggregate_first: bool,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    r"""Transforms the neighbours' features and aggregates them, in the order that the caller says.

    .. math::
        \mathbf{y}_i = s_i \sum_{j \in \mathcal{N}(i)} t_j \, \mathbf{x}_j \mathbf{W} + \mathbf{b}

    Equal to ``spmm`` and a linear map up to rounding, under autocast too. There the bias' gradient is a sum
    in its own dtype and, on CUDA and with torch 2.8 or later, so is that of a float32 weight.

    Args:
        adj: structure (num_dst, num_src).
        x: features (num_src, in width), as `can_convolve` asks for.
        weight: (out width, in width) or (in width, out width).
        bias: (out width,) or None.
        out_by_in: whether the weight is (out width, in width).
        aggregate_first: whether neighbours are summed before the linear map. Only for features without
            gradient, whose sums alone are kept then.
        scale_dst: constant s, (num_dst,); None: 1.
        scale_src: constant t, (num_src,); None: 1.
        relu: whether negative results become 0.

    Returns:
        (num_dst, out width), in the autocast dtype where that is on; differentiable, twice too.

    Raises:
        ValueError: features that are aggregated first require a gradient.
    """
    scales = (scale_dst, scale_src)
    key = ("scales of a convolution", x.dtype)
    checked = adj.plans.get(key)
    if checked is None or checked[0] is not scale_dst or checked[1] is not scale_src:
        one_scale = scale_src is scale_dst and adj.num_src == adj.num_dst
        scale_dst = check_scale("scale_dst", scale_dst, adj.num_dst, x)
        scale_src = scale_dst if one_scale else check_scale("scale_src", scale_src, adj.num_src, x)
        if scale_dst is scales[0] and scale_src is scales[1]:
            adj.plans[key] = scales  # what a structure keeps comes again and again
    dtype = x.dtype
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        dtype = autocast_dtype(x) or dtype
    algorithm = policy.requested("spmm", "auto")
    how = _Convolution(adj, scale_dst, scale_src, out_by_in, aggregate_first, relu, algorithm, dtype)
    if not torch.is_grad_enabled():
        return _convolve(how, x, weight, bias)[0]
    if aggregate_first and x.requires_grad:
        raise ValueError("x: expected features without gradient where they are aggregated first")
    return _GraphConvolution.apply(x, weight, bias, how)


def _convolve(
    how: _Convolution, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the features and the weight as they were multiplied."""
    dtype = how.dtype
    features = x if x.dtype == dtype else x.to(dtype)
    matrix = weight if weight.dtype == dtype else weight.to(dtype)
    aggregate = (None, how.scale_dst, how.scale_src)
    if not how.aggregate_first:
        transformed = F.linear(features, matrix) if how.out_by_in else torch.mm(features, matrix)
        out = launch_spmm(how.adj, transformed, *aggregate, bias, how.algorithm, how.relu)
        return out, features, matrix
    features = launch_spmm(how.adj, features, *aggregate, None, how.algorithm)
    bias = None if bias is None else bias.to(dtype)
    if how.out_by_in:
        out = F.linear(features, matrix, bias)
    else:
        out = torch.mm(features, matrix) if bias is None else torch.addmm(bias, features, matrix)
    return out.relu_() if how.relu else out, features, matrix


class _GraphConvolution(torch.autograd.Function):
    """dW = X^T A^T dY, dX = (A^T dY) W^T, db = sum of dY; dW = (A X)^T dY where A X came first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _Convolution) -> Tensor:
        out, features, matrix = _convolve(how, x, weight, bias)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.how, ctx.weight_dtype = how, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # What no gradient needs may be written before the backward pass, as with separate operators.
        ctx.uncast = Uncast.of(weight, matrix) if needs_x else None
        ctx.save_for_backward(
            features if needs_weight else None, matrix if needs_x else None, out if how.relu else None
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*without_autocast(_gradients, ctx, grad), None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    how, (features, matrix, rectified) = ctx.how, ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    # Else all of it is made of operators that have gradients again.
    once = is_first_derivative(grad)
    if rectified is not None:
        grad = grad.masked_fill(rectified <= 0, 0)
    grad_x = grad_weight = None
    grad_bias = sum_of_rows(grad, ctx.bias_dtype) if needs_bias else None
    if not how.aggregate_first and (needs_x or needs_weight):
        if once:
            grad = grad_of_features(how.adj, grad, None, how.scale_dst, how.scale_src, how.algorithm)
        else:
            scales = {"scale_dst": how.scale_src, "scale_src": how.scale_dst}
            grad = spmm(how.adj.t(valued=False), grad, **scales, algorithm=how.algorithm)
    if needs_weight:
        left, right = (grad.t(), features) if how.out_by_in else (features.t(), grad)
        grad_weight = product_in(left, right, ctx.weight_dtype, once)
    if needs_x:
        matrix = matrix if once or ctx.uncast is None else ctx.uncast.cast_again(how.dtype)
        grad_x = torch.mm(grad, matrix if how.out_by_in else matrix.t())
    return grad_x, grad_weight, grad_bias
