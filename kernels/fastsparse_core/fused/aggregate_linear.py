"""Aggregation and linear maps of GraphSAGE as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import gpu, policy
from fastsparse_core.ops._aggregate_linear_launch import (
    aggregate_and_transform,
    are_plain,
    gradients_of_parameters,
    is_laid_out,
)
from fastsparse_core.ops._common import (
    CAST,
    DTYPE_CODE,
    Uncast,
    autocast_dtype,
    cast,
    is_first_derivative,
    is_plain_eager,
    product_in,
    sum_of_rows,
    without_autocast,
)
from fastsparse_core.ops._facts import scatters
from fastsparse_core.ops._spmm_plan import add_transposed, grad_of_features, launch_spmm
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.streams import fork
from fastsparse_core.structure.adjacency import Adjacency


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

    Under autocast each may be float32 too.

    Args:
        adj: structure.
        x: features of the sources.
        root: features of the destinations.
        weight: of the aggregated neighbours.
        bias: of the result, or None.
        root_weight: of the destinations.
    """
    (num_dst, num_src), width = adj.shape, weight.shape[1]
    if not (
        is_plain_eager(x)
        and not adj.is_partitioned
        and x.shape == (num_src, width)
        and root.shape == (num_dst, width)
        and root_weight.shape == weight.shape
        and x.device == adj.col.device
        and (root is x or starts_with(x, root))
    ):
        return False
    if not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        dtype = x.dtype
        return (
            dtype in DTYPE_CODE
            and weight.dtype == dtype == root_weight.dtype
            and (bias is None or bias.dtype == dtype)
        )
    autocast = autocast_dtype(x)
    given = (x.dtype,) if autocast is None else (autocast, torch.float32)
    return (
        x.dtype in DTYPE_CODE
        and autocast in (None, *CAST)
        and x.dtype in given
        and weight.dtype in given
        and root_weight.dtype in given
        and (bias is None or bias.dtype in given)
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
    (`policy.scatters`), on CUDA by atomics.

    Under autocast the linear maps are products in its dtype, as those of two linear layers. Neighbours are
    summed in that dtype or, where that moves fewer bytes (`policy.casts_first`), in float32, as PyG does.
    Gradients come in the dtypes of what they are of; those of a float32 bias are summed in float32, and so,
    on CUDA with torch 2.8 or later, are those of float32 weights.

    Args:
        adj: structure (num_dst, num_src), with num_dst <= num_src.
        x: features (num_src, width), as `can_aggregate_linear` asks for.
        weight: (out width, width).
        bias: (out width,) or None.
        root_weight: (out width, width).
        reduce: ``"sum"`` or ``"mean"``.

    Returns:
        (num_dst, out width), in the autocast dtype where that is on; differentiable, twice too.
    """
    scale, dtype = None, x.dtype
    if reduce == "mean":
        scale = adj.plans.get(("mean", dtype))
        if scale is None:
            scale = adj.inv_degree(torch.float64 if dtype == torch.float64 else torch.float32)
            adj.plans["mean", dtype] = scale
    algorithm = policy.requested("spmm", "auto")
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        dtype = autocast_dtype(x) or dtype
    recorded = torch.is_grad_enabled()  # which nobody can ask within apply
    return _AggregateLinear.apply(x, weight, bias, root_weight, scale, adj, algorithm, dtype, recorded)


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
        dtype: torch.dtype,
        recorded: bool,
    ) -> Tensor:
        ctx.given = (x.dtype, weight.dtype, None if bias is None else bias.dtype, root_weight.dtype)
        # Everything that is multiplied has one dtype, so autocast, where it is on, casts nothing more.
        num_dst, num_src = adj.shape
        needs_x, needs_weight, _, needs_root = ctx.needs_input_grad[:4]
        features, matrix, root_matrix = x, weight, root_weight
        if x.dtype != dtype and policy.casts_first(num_dst, num_src, adj.num_edges):
            features = x.to(dtype)
        # A part of what was cast would keep all of it until the backward pass.
        own = x if needs_root and num_dst < num_src else features
        own = own if num_dst == num_src else own[:num_dst]
        own = own if own.dtype == dtype else own.to(dtype)
        if weight.dtype != dtype or root_weight.dtype != dtype:
            matrix, root_matrix = cast(weight, dtype), cast(root_weight, dtype)
        if (
            _has_kernels(own.device)
            and _is_one_kernel(own, *matrix.t().shape)
            and are_plain(features, matrix, bias, root_matrix)
            and is_laid_out(features, matrix, root_matrix)
        ):
            bias = None if bias is None else bias.contiguous()
            out, sums = aggregate_and_transform(
                adj, features, matrix, bias, root_matrix, scale, algorithm, recorded and needs_weight
            )
        else:
            sums = launch_spmm(adj, features, None, scale, None, None, algorithm)
            sums = sums if sums.dtype == dtype else sums.to(dtype)
            if bias is not None and bias.dtype != dtype:
                bias = bias.to(dtype)
            out = F.linear(sums, matrix, bias)
            out.addmm_(own, root_matrix.t())
        ctx.adj, ctx.algorithm, ctx.dtype = adj, algorithm, dtype
        # What no gradient needs may be written before the backward pass, as with separate operators.
        ctx.uncast = ctx.root_uncast = None
        if needs_x and (matrix is not weight or root_matrix is not root_weight):
            ctx.uncast, ctx.root_uncast = Uncast.of(weight, matrix), Uncast.of(root_weight, root_matrix)
        ctx.save_for_backward(
            x if needs_x and (needs_weight or needs_root) else None,  # of second derivatives
            own if needs_root else None,
            sums if needs_weight else None,
            matrix if needs_x else None,
            root_matrix if needs_x else None,
            scale,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients if is_first_derivative(grad) else _differentiable
        return (*without_autocast(gradients, ctx, grad), None, None, None, None, None)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and gpu.has_wgmma(device)


def _is_one_kernel(own: Tensor, width: int, out_width: int) -> bool:
    device = own.device
    return _has_kernels(device) and policy.transforms_on_tensor_cores(
        own.dtype, own.size(0), width, out_width, gpu.profile_of(device)
    )


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, own, sums, matrix, root_matrix, scale = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_root = ctx.needs_input_grad[:4]
    _, weight_dtype, bias_dtype, root_dtype = ctx.given
    by_column = grad.t()

    def of_parameters() -> tuple[Tensor | None, ...]:
        if (
            needs_weight
            and needs_root
            and _is_one_kernel(own, own.size(1), grad.size(1))
            and is_laid_out(own, sums)
        ):
            return gradients_of_parameters(grad, sums, own, needs_bias)
        return (
            product_in(by_column, sums, weight_dtype) if needs_weight else None,
            sum_of_rows(grad, bias_dtype) if needs_bias else None,
            product_in(by_column, own, root_dtype) if needs_root else None,
        )

    if not needs_x:
        return (None, *of_parameters())
    parameters = fork(of_parameters, grad)
    grad_x = _grad_x(ctx, grad, matrix, root_matrix, scale)
    return (grad_x, *parameters())


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients of operators that have gradients again."""
    x, own, sums, matrix, root_matrix, scale = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_root = ctx.needs_input_grad[:4]
    x_dtype, weight_dtype, bias_dtype, root_dtype = ctx.given
    (num_dst, num_src), adj, dtype = ctx.adj.shape, ctx.adj, ctx.dtype
    grad_x = None
    if needs_x:
        matrix = matrix if ctx.uncast is None else ctx.uncast.cast_again(dtype)
        root_matrix = root_matrix if ctx.root_uncast is None else ctx.root_uncast.cast_again(dtype)
        grad_x = spmm(adj.t(valued=False), grad @ matrix, scale_src=scale, algorithm=ctx.algorithm)
        grad_x = (grad_x + F.pad(grad @ root_matrix, (0, 0, 0, num_src - num_dst))).to(x_dtype)
    if x is not None:  # else what was saved of it is constant
        features = cast(x, dtype)
        own = features[:num_dst]
        sums = spmm(adj, features, scale_dst=scale, algorithm=ctx.algorithm) if needs_weight else None
    return (
        grad_x,
        product_in(grad.t(), sums, weight_dtype, once=False) if needs_weight else None,
        grad.sum(0, dtype=bias_dtype) if needs_bias else None,
        product_in(grad.t(), own, root_dtype, once=False) if needs_root else None,
    )


def _grad_x(ctx: Any, grad: Tensor, matrix: Tensor, root_matrix: Tensor, scale: Tensor | None) -> Tensor:
    (num_dst, num_src), adj, dtype = ctx.adj.shape, ctx.adj, ctx.given[0]
    grad_sums = torch.mm(grad, matrix)
    if dtype == torch.float32 and scatters(adj, ctx.algorithm, grad.dtype, None):
        total = torch.empty(num_src, grad_sums.size(1), dtype=dtype, device=grad.device)
        own = total[:num_dst]
        if grad.dtype == dtype:
            torch.mm(grad, root_matrix, out=own)
        else:
            own.copy_(torch.mm(grad, root_matrix))
        return add_transposed(adj, grad_sums, None, scale, None, total, num_dst)
    total = grad_of_features(adj, grad_sums, None, scale, None, ctx.algorithm)
    total[:num_dst].addmm_(grad, root_matrix)
    return cast(total, dtype)
