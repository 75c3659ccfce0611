"""Aggregation and linear maps of GraphSAGE as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from dataclasses import dataclass
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
from fastsparse_core.ops._autocast import (
    CAST,
    Uncast,
    autocast_dtype,
    is_any_autocast_enabled,
    product_in,
    without_autocast,
)
from fastsparse_core.ops._dtypes import DTYPE_CODE, cast
from fastsparse_core.ops._eager import direct, is_first_derivative, is_wrapped, kind_of
from fastsparse_core.ops._facts import scatters
from fastsparse_core.ops._kept_results import saved_tensors
from fastsparse_core.ops._operands import zero_padded
from fastsparse_core.ops._spmm_plan import add_transposed, grad_of_features, launch_spmm
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops._weight_gradient import weight_gradient
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """What calls on like tensors share, kept by the structure.

    Attributes:
        serves: whether :func:`aggregate_linear` serves a layer that asks.
        scale: of the sums, (num_dst,), for a mean; None: 1.
        algorithm: of the sum.
        dtype: of the products.
        given: dtypes of x, weight, bias and root_weight.
        casts_first: whether features are cast before they are summed.
        transforms: whether one kernel serves both linear maps, as far as sizes go.
        are_plain: whether it may take the parameters' addresses.
        width: of the features.
        columns: of what is multiplied where the features need no gradient: theirs, perhaps zeros behind them.
        transform_first: whether neighbours are summed after the linear map.
    """

    serves: bool
    scale: Tensor | None
    algorithm: str
    dtype: torch.dtype
    given: tuple[Any, ...]
    casts_first: bool
    transforms: bool
    are_plain: bool
    width: int
    columns: int
    transform_first: bool


def aggregate_linear(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor,
    reduce: str,
    *,
    root: Tensor | None = None,
    transform_first: bool = False,
) -> Tensor | None:
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
        x: features (num_src, width), which `is_plain_eager`.
        weight: (out width, width).
        bias: (out width,) or None.
        root_weight: (out width, width).
        reduce: ``"sum"`` or ``"mean"``.
        root: the destinations' features, where they may be others than the first of ``x``.
        transform_first: whether neighbours are summed after the linear map, which pays where that is narrow.

    Returns:
        (num_dst, out width), in the autocast dtype where that is on; differentiable, twice too. None where
        ``root`` is given and PyTorch has to multiply: features that are not the first of ``x``
        (`starts_with`), or sizes and dtypes that do not go together.
    """
    key = (
        kind_of(x),
        kind_of(weight),
        None if bias is None else kind_of(bias),
        kind_of(root_weight),
        reduce,
        transform_first,
        autocast_dtype(x) if is_any_autocast_enabled() else None,
        policy.requested("spmm", "auto"),
    )
    plan: _Plan | None = adj.plans.get(key)
    if plan is None:
        plan = adj.plans[key] = _plan(adj, x, weight, bias, root_weight, reduce, transform_first, key[-1])
    if root is not None and not (
        plan.serves
        and root.shape[0] == adj.num_dst
        and (root is x or starts_with(x, root))
        and not (transform_first and bias is not None and bias.is_neg())
    ):
        return None
    if torch.is_grad_enabled():
        apply = _AggregateLinear.apply if is_wrapped(x) else _apply
        return apply(x, weight, bias, root_weight, adj, plan)
    return _compute(plan, adj, x, weight, bias, root_weight, plan.columns, False)[0]


def _plan(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor,
    reduce: str,
    transform_first: bool,
    algorithm: str,
) -> _Plan:
    scale = None
    if reduce == "mean":
        scale = adj.inv_degree(torch.float64 if x.dtype == torch.float64 else torch.float32)
    dtype = autocast_dtype(x) or x.dtype
    casts_first = x.dtype != dtype and (
        transform_first or policy.casts_first(adj.num_dst, adj.num_src, adj.num_edges)
    )
    transforms = (
        not transform_first
        and _has_kernels(x.device)
        and weight.dim() == 2
        and policy.transforms_on_tensor_cores(
            dtype, adj.num_dst, weight.shape[1], weight.shape[0], gpu.profile_of(x.device)
        )
    )
    plain = are_plain(x, weight, bias, root_weight)
    width = columns = x.shape[-1]
    if not transform_first:
        sizes = (adj.num_dst, width, weight.shape[0])
        columns = policy.columns_of_products(dtype, *sizes, gpu.profile_of(x.device), on_gpu=x.is_cuda)
    return _Plan(
        # The kernel of a sum takes the bias by its address.
        _serves(adj, x, weight, bias, root_weight) and (plain or not transform_first),
        scale,
        algorithm,
        dtype,
        (x.dtype, weight.dtype, None if bias is None else bias.dtype, root_weight.dtype),
        casts_first,
        transforms,
        plain,
        width,
        columns,
        transform_first,
    )


def _serves(adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None, root_weight: Tensor) -> bool:
    """Whether matrices fit together and are of one dtype; under autocast each may be float32 too."""
    if (
        adj.is_partitioned
        or x.shape != (adj.num_src, weight.shape[-1])
        or x.layout is not torch.strided
        or root_weight.shape != weight.shape
        or x.device != adj.col.device
    ):
        return False
    dtypes = [tensor.dtype for tensor in (weight, bias, root_weight) if tensor is not None]
    autocast = autocast_dtype(x)
    if autocast is None:
        return x.dtype in DTYPE_CODE and all(dtype == x.dtype for dtype in dtypes)
    given = (autocast, torch.float32)
    return autocast in CAST and x.dtype in given and all(dtype in given for dtype in dtypes)


def _compute(
    plan: _Plan,
    adj: Adjacency,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor,
    columns: int,
    keeps_sums: bool,
    keeps_own: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The result, the destinations' features, what the neighbours' weight met and both weights as multiplied.

    That are the neighbours' sums or, where the linear map comes first, the features.
    """
    scale, algorithm, dtype, transform_first = plan.scale, plan.algorithm, plan.dtype, plan.transform_first
    num_dst, num_src = adj.shape
    if columns != plan.width:
        padded = zero_padded(x, columns)
        x = x if padded is None else padded
    # Everything that is multiplied has one dtype, so autocast, where it is on, casts nothing more.
    features = x.to(dtype) if plan.casts_first else x
    # A part of what was cast would keep all of it until the backward pass.
    own = x if keeps_own and num_dst < num_src and not transform_first else features
    own = own if num_dst == num_src else own[:num_dst]
    own = _multiplied(own, dtype, columns)
    matrix, root_matrix = _multiplied(weight, dtype, columns), _multiplied(root_weight, dtype, columns)
    sums: Tensor | None = features
    if transform_first:
        out = launch_spmm(adj, F.linear(features, matrix), None, scale, None, bias, algorithm)
        out.addmm_(own, root_matrix.t())
    elif (
        plan.transforms
        and plan.are_plain
        and is_laid_out(features, matrix, root_matrix)
        and features.dtype is dtype
    ):
        bias = None if bias is None else bias.contiguous()
        out, sums = aggregate_and_transform(
            adj, features, matrix, bias, root_matrix, scale, algorithm, keeps_sums
        )
    else:
        sums = launch_spmm(adj, features, None, scale, None, None, algorithm)
        sums = _multiplied(sums, dtype, columns)
        out = F.linear(sums, matrix, bias if bias is None or bias.dtype is dtype else bias.to(dtype))
        out.addmm_(own, root_matrix.t())
    return out, own, sums, matrix, root_matrix


def _multiplied(x: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """A matrix as a product takes it: in its dtype, with zeros behind its own columns."""
    width = x.shape[1]
    if width == columns:
        return x if x.dtype is dtype else x.to(dtype)  # not `cast`: a warm layer makes few calls
    out = x.new_empty(x.shape[0], columns, dtype=dtype)
    out[:, width:] = 0
    out[:, :width] = x
    return out


class _AggregateLinear(torch.autograd.Function):
    """dX = A^T (dY W), onto dY W_r; dW = dY^T (A X); dW_r = dY^T X; db = sum of dY.

    Where the linear map came first: dX = (A^T dY) W, onto dY W_r; dW = (A^T dY)^T X.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        root_weight: Tensor,
        adj: Adjacency,
        plan: _Plan,
    ) -> Tensor:
        needs_x, needs_weight, _, needs_root, _, _ = ctx.needs_input_grad
        out, own, sums, matrix, root_matrix = _compute(
            plan,
            adj,
            x,
            weight,
            bias,
            root_weight,
            plan.width if needs_x else plan.columns,
            needs_weight,
            needs_root,
        )
        ctx.adj, ctx.plan, ctx.saves_own_as_x = adj, plan, own is x
        # What no gradient needs may be written before the backward pass, as with separate operators.
        ctx.uncast = ctx.root_uncast = None
        if needs_x and (matrix is not weight or root_matrix is not root_weight):
            ctx.uncast, ctx.root_uncast = Uncast.of(weight, matrix), Uncast.of(root_weight, root_matrix)
        ctx.save_for_backward(
            # x is for second derivatives. What is saved twice is unpacked twice.
            x if needs_x and (needs_weight or needs_root) and own is not x else None,
            own if needs_root or (needs_x and needs_weight and own is x) else None,
            sums if needs_weight else None,
            matrix if needs_x else None,
            root_matrix if needs_x else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients if is_first_derivative(grad) else _differentiable
        return (*without_autocast(gradients, ctx, grad), None, None)


_apply = direct(_AggregateLinear)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and gpu.has_wgmma(device)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    plan: _Plan = ctx.plan
    if plan.transform_first:
        return _gradients_before_sums(ctx, grad)
    _, own, sums, matrix, root_matrix = saved_tensors(ctx, (0,), True)
    needs_x, needs_weight, needs_bias, needs_root, _, _ = ctx.needs_input_grad
    _, weight_dtype, bias_dtype, root_dtype = plan.given

    def of_parameters() -> tuple[Tensor | None, ...]:
        if plan.transforms and needs_weight and needs_root and is_laid_out(own, sums):
            return gradients_of_parameters(grad, sums, own, needs_bias)
        by_column = grad.t()
        return (
            _of_weight(plan, product_in(by_column, sums, weight_dtype)) if needs_weight else None,
            sum_of_rows(grad, bias_dtype, True) if needs_bias else None,
            _of_weight(plan, product_in(by_column, own, root_dtype)) if needs_root else None,
        )

    if not needs_x:
        return (None, *of_parameters())
    parameters = fork(of_parameters, grad)
    grad_x = _grad_x(plan, ctx.adj, grad, matrix, root_matrix)
    return (grad_x, *parameters())


def _of_weight(plan: _Plan, product: Tensor) -> Tensor:
    """The gradient of a weight without that of the zeros behind it."""
    return product if plan.columns == plan.width else product[:, : plan.width]


def _gradients_before_sums(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients where neighbours were summed after the linear map."""
    _, own, features, matrix, root_matrix = saved_tensors(ctx, (0,), True)
    needs_x, needs_weight, needs_bias, needs_root, *_ = ctx.needs_input_grad
    plan: _Plan = ctx.plan
    x_dtype, weight_dtype, bias_dtype, root_dtype = plan.given
    grad_x = grad_weight = None
    if needs_x or needs_weight:
        transformed = grad_of_features(ctx.adj, grad, None, plan.scale, None, plan.algorithm)
    if needs_weight:
        grad_weight = weight_gradient(transformed, features, weight_dtype, True)
    if needs_x:
        total = torch.mm(transformed, matrix)
        num_dst, num_src = ctx.adj.shape
        (total if num_dst == num_src else total[:num_dst]).addmm_(grad, root_matrix)
        grad_x = cast(total, x_dtype)
    return (
        grad_x,
        grad_weight,
        sum_of_rows(grad, bias_dtype, True) if needs_bias else None,
        product_in(grad.t(), own, root_dtype) if needs_root else None,
    )


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients of operators that have gradients again."""
    x, own, sums, matrix, root_matrix = saved_tensors(ctx, (0,), False)
    needs_x, needs_weight, needs_bias, needs_root, *_ = ctx.needs_input_grad
    x = own if needs_x and ctx.saves_own_as_x else x
    (num_dst, num_src), adj, plan = ctx.adj.shape, ctx.adj, ctx.plan
    x_dtype, weight_dtype, bias_dtype, root_dtype = plan.given
    scale, dtype, algorithm = plan.scale, plan.dtype, plan.algorithm
    grad_x = transformed = None
    if plan.transform_first and (needs_x or needs_weight):
        transformed = spmm(adj.t(valued=False), grad, scale_src=scale, algorithm=algorithm)
    if needs_x:
        matrix = matrix if ctx.uncast is None else ctx.uncast.cast_again(dtype)
        root_matrix = root_matrix if ctx.root_uncast is None else ctx.root_uncast.cast_again(dtype)
        if plan.transform_first:
            grad_x = transformed @ matrix
        else:
            grad_x = spmm(adj.t(valued=False), grad @ matrix, scale_src=scale, algorithm=algorithm)
        grad_x = (grad_x + F.pad(grad @ root_matrix, (0, 0, 0, num_src - num_dst))).to(x_dtype)
    if x is not None:  # else what was saved of it is constant
        features = cast(x, dtype)
        own, sums = features[:num_dst], features
        if needs_weight and not plan.transform_first:
            sums = spmm(adj, features, scale_dst=scale, algorithm=algorithm)
    grad_weight = None
    if needs_weight and transformed is not None:
        grad_weight = weight_gradient(transformed, sums, weight_dtype, False)
    elif needs_weight:
        grad_weight = _of_weight(plan, product_in(grad.t(), sums, weight_dtype, once=False))
    return (
        grad_x,
        grad_weight,
        grad.sum(0, dtype=bias_dtype) if needs_bias else None,
        _of_weight(plan, product_in(grad.t(), own, root_dtype, once=False)) if needs_root else None,
    )


def _grad_x(plan: _Plan, adj: Adjacency, grad: Tensor, matrix: Tensor, root_matrix: Tensor) -> Tensor:
    num_dst, num_src = adj.shape
    dtype, scale, algorithm = plan.given[0], plan.scale, plan.algorithm
    grad_sums = torch.mm(grad, matrix)
    if dtype == torch.float32 and not adj.symmetric and scatters(adj, algorithm, grad.dtype, None):
        total = torch.empty(num_src, grad_sums.size(1), dtype=dtype, device=grad.device)
        own = total[:num_dst]
        if grad.dtype == dtype:
            torch.mm(grad, root_matrix, out=own)
        else:
            own.copy_(torch.mm(grad, root_matrix))
        return add_transposed(adj, grad_sums, None, scale, None, total, num_dst)
    total = grad_of_features(adj, grad_sums, None, scale, None, algorithm)
    own = total if num_dst == num_src else total[:num_dst]
    own.addmm_(grad, root_matrix)
    return cast(total, dtype)
