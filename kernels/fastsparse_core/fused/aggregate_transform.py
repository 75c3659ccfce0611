"""Aggregation and linear maps of a layer in one node of autograd's graph, to save host time.

GCN, GraphSAGE, GraphConv and GIN use it. RGCN uses it if nodes times relations are few
(docs/dev/decisions/one_node.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import gpu, policy
from fastsparse_core.fused.aggregate_linear_launch import (
    aggregate_and_transform,
    gradients_of_parameters,
    is_laid_out,
)
from fastsparse_core.fused.weight_gradient import weight_gradient
from fastsparse_core.ops._autocast import (
    CAST,
    Uncast,
    autocast_dtype,
    is_any_autocast_enabled,
    product_in,
    without_autocast,
)
from fastsparse_core.ops._checks import check_scale
from fastsparse_core.ops._dtypes import DTYPE_CODE, accumulation_dtype, cast
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_plain_eager, is_wrapped, kind_of
from fastsparse_core.ops._facts import scatters
from fastsparse_core.ops._kept_results import saved_tensors
from fastsparse_core.ops._operands import zero_padded
from fastsparse_core.ops._registration import FusedOperator, fits_one_operator
from fastsparse_core.ops._spmm_plan import add_transposed, grad_of_features, launch_spmm, with_loops
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.sddmm import sddmm, sddmm_kernel
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.streams import fork
from fastsparse_core.structure.adjacency import Adjacency

#: The 1 of ``1 + eps`` as a tensor, because PyTorch would convert a Python number to a tensor in every call.
_ONE = {dtype: torch.ones((), dtype=dtype, device="cpu") for dtype in DTYPE_CODE}


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
    norms: tuple[str, str] = ("", ""),
) -> Tensor | None:
    r"""Transforms the neighbours' features and aggregates them, in the order that the caller chooses.

    .. math::
        \mathbf{y}_i = s_i \sum_{j \in \mathcal{N}(i)} t_j \, \mathbf{x}_j \mathbf{W} + \mathbf{b}

    Args:
        adj: structure (num_dst, num_src).
        x: features (num_src, in width); `may_be_one_node` must be true for them.
        weight: (out width, in width) or (in width, out width).
        bias: (out width,) or None.
        out_by_in: whether the weight is (out width, in width).
        aggregate_first: whether neighbours are summed before the linear map. Allowed only if the features
            need no gradient; then only their sums are stored.
        scale_dst: constant s, (num_dst,); None: 1.
        scale_src: constant t, (num_src,); None: 1.
        relu: whether negative results become 0.
        add_loops: whether to add a self loop to every node; for square structures without self loops.
        norms: names of the methods of ``adj`` that return s and t, "" for None. A trace contains these names
            in place of s and t.

    Returns:
        (num_dst, out width), or None if separate operators have to run (`_in_one_node`).
    """
    if weight is None or (aggregate_first and x.requires_grad):
        return None
    if not is_plain_eager(x):
        weight = weight if out_by_in else weight.t()
        options: Any = {"norms": norms, "adds_loops": add_loops, "transform_first": not aggregate_first}
        out = _traced(adj, x, weight, bias, **options)
        return out if out is None or not relu else out.relu()
    form = (out_by_in, not aggregate_first, "sum", relu, add_loops, False)
    return _in_one_node(adj, form, x, None, weight, bias, None, None, scale_dst, scale_src)


@functools.cache
def one(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The number 1 on a device, the value of added self loops."""
    with torch.inference_mode(False):
        return torch.ones((), dtype=dtype, device=device)


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
    r"""Aggregates the neighbours' features; adds linear maps of the result and of the node's own features.

    .. math::
        \mathbf{y}_i = \mathbf{W} \bigoplus_{j \in \mathcal{N}(i)} \mathbf{x}_j + \mathbf{W}_r \mathbf{x}_i
        + \mathbf{b}

    with :math:`\bigoplus` a sum or mean. The destinations are the first sources. Under autocast, neighbours
    are summed in float32, as in PyG, or, if that moves fewer bytes (`policy.casts_first`), in the autocast
    dtype.

    Args:
        adj: structure (num_dst, num_src), with num_dst <= num_src.
        x: features (num_src, width); `may_be_one_node` must be true for them.
        weight: (out width, width).
        bias: (out width,) or None.
        root_weight: (out width, width).
        reduce: ``"sum"`` or ``"mean"``.
        root: the destinations' features, if the caller has them as a separate tensor.
        transform_first: whether neighbours are summed after the linear map, which is worthwhile if its result
            is narrow.

    Returns:
        (num_dst, out width), or None as in `_in_one_node`; also None if ``root`` is not the first rows of
        ``x`` (`starts_with`).
    """
    if not is_plain_eager(x):
        if root is not None and root is not x:
            return None
        norms = ("inv_degree" if reduce == "mean" else "", "")
        return _traced(adj, x, weight, bias, root_weight, norms=norms, transform_first=transform_first)
    if root is not None and not (root.shape[0] == adj.num_dst and (root is x or starts_with(x, root))):
        return None
    form = (True, transform_first, reduce, False, False, False)
    return _in_one_node(adj, form, x, None, weight, bias, root_weight)


def starts_with(x: Tensor, root: Tensor) -> bool:
    """True if ``root`` is ``x[:n]`` or ``x`` itself, also for autograd, and no hook reads its gradient.

    Args:
        x: matrix.
        root: matrix of the same width.
    """
    if root is x:
        return True
    return (
        # If both are views of one tensor and a hook reads the gradient of x, the gradient of root must not be
        # added to it.
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
    r"""Linear maps of weighted sums, or means, of the neighbours' features, and of the node's own features.

    .. math::
        \mathbf{y}_i = \mathbf{W} \bigoplus_{j \in \mathcal{N}(i)} v_{ij} \mathbf{x}_j + \mathbf{W}_r
        \mathbf{x}_i + \mathbf{b}

    Args:
        adj: square structure.
        x: features (num_nodes, width); `is_plain_eager` must be true for them.
        value: (num_values,), one per edge in the caller's order.
        weight: (out width, width).
        bias: (out width,) or None.
        root_weight: (out width, width).
        reduce: ``"sum"`` or ``"mean"``.
        transform_first: whether neighbours are summed after the linear map, which is worthwhile if its result
            is narrow.

    Returns:
        (num_nodes, out width), or None if separate operators have to run (`_in_one_node`).
    """
    if type(adj) is not Adjacency or adj.num_dst != adj.num_src or not is_plain_eager(value):
        return None
    form = (True, transform_first, reduce, False, False, False)
    return _in_one_node(adj, form, x, value, weight, bias, root_weight)


def aggregate_and_self(adj: Adjacency, x: Tensor, eps: Tensor) -> Tensor | None:
    r"""Sums the features of the neighbours and of the node itself.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j + (1 + \epsilon) \, \mathbf{x}_i

    The node's own part is computed as one more entry of its row. Under autocast, the result has the autocast
    dtype, so callers must pass it to a linear layer, which would cast it anyway.

    Args:
        adj: square structure.
        x: features (N, width); `may_be_one_node` must be true for them.
        eps: one number, which gets no gradient.

    Returns:
        (N, width), or None as in `_in_one_node`; also None if ``eps`` requires a gradient.
    """
    dtype = eps.dtype
    if (
        eps.requires_grad
        or type(eps) not in PLAIN
        or eps.numel() != 1
        or eps.dim() > 1
        or eps.device != x.device
        or adj.num_src != adj.num_dst
        or dtype not in _ONE
        or (
            dtype is not x.dtype
            and not (is_any_autocast_enabled() and {dtype, x.dtype} == {torch.float32, autocast_dtype(x)})
        )
    ):
        return None
    if not is_plain_eager(x):
        return _traced(adj, x, None, eps=eps)
    if type(adj) is not Adjacency:
        return None
    return _in_one_node(
        adj, (True, True, "sum", False, False, False), x, None, None, None, None, _one_more(eps)
    )


def _one_more(eps: Tensor) -> Tensor:
    """``1 + eps`` in the accumulation dtype."""
    loop = eps + _ONE[eps.dtype]
    return loop.float() if loop.dtype.itemsize == 2 else loop


def relational_linear(
    adj: Adjacency, x: Tensor, weight: Tensor, root: Tensor | None, bias: Tensor | None, reduce: str
) -> Tensor | None:
    r"""Linear maps of the neighbours' sums, or means, of every relation, and of the node's own features.

    .. math::
        \mathbf{y}_i = \sum_r \Big( \bigoplus_{j \in \mathcal{N}_r(i)} \mathbf{x}_j \Big) \mathbf{W}_r +
        \mathbf{x}_i \mathbf{W} + \mathbf{b}

    Args:
        adj: structure (num_dst * R, num_src), with the relations of a destination next to each other.
        x: features (num_src, width); `is_plain_eager` must be true for them.
        weight: (R, width, out width).
        root: (width, out width), only if the destinations are the sources; or None.
        bias: (out width,) or None.
        reduce: ``"sum"`` or ``"mean"``.

    Returns:
        (num_dst, out width), or None if separate operators have to run (`_in_one_node`).
    """
    form = (False, False, reduce, False, False, True)
    return _in_one_node(adj, form, x, None, weight, bias, root)


# ---------------------------------------------------------------- the node


class _Form(NamedTuple):
    """Options of a layer, without its tensors.

    Attributes:
        out_by_in: whether weights are (out width, in width); otherwise, (in width, out width).
        transform_first: whether neighbours are summed after the linear map.
        reduce: ``"sum"`` or ``"mean"``.
        relu: whether negative results become 0.
        adds_loops: whether a self loop is added to every node.
        is_stacked: whether there is one weight per relation, (R, in width, out width). Then the structure is
            (num_dst * R, num_src), with the relations of a destination next to each other.
    """

    out_by_in: bool
    transform_first: bool
    reduce: str
    relu: bool
    adds_loops: bool
    is_stacked: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """Values that calls share if their tensors have the same dtypes, shapes, devices and layouts.

    The structure stores its plans, so a plan must not refer to the structure.

    Attributes:
        out_by_in: as in the form.
        transform_first: as in the form; True if there is no linear map.
        relu: as in the form.
        is_stacked: as in the form.
        given_dst: the caller's factors of the destinations.
        given_src: the caller's factors of the sources.
        scale_dst: (num_dst,), in the form that kernels read, or None.
        scale_src: (num_src,), in the form that kernels read, or None.
        loop: value of the self loops that the form adds; None: none.
        algorithm: algorithm of the sum.
        dtype: dtype of the products.
        given: dtypes of x, weight, bias and root_weight.
        num_rows: number of rows of the result.
        is_sage: whether two linear maps follow sums without edge values, a case with special kernels.
        casts_first: whether features are cast before they are summed.
        transforms: whether one kernel can compute both linear maps for these sizes.
        width: width of the features.
        columns: number of columns to which features are padded with zeros before they are multiplied, if they
            need no gradient; 0: no padding.
    """

    out_by_in: bool
    transform_first: bool
    relu: bool
    is_stacked: bool
    given_dst: Tensor | None
    given_src: Tensor | None
    scale_dst: Tensor | None
    scale_src: Tensor | None
    loop: Tensor | None
    algorithm: str
    dtype: torch.dtype
    given: tuple[Any, ...]
    num_rows: int
    is_sage: bool
    casts_first: bool
    transforms: bool
    width: int
    columns: int


#: The structure, the plan, and the value of self loops. None of their tensors has a gradient.
_Call = tuple[Adjacency, _Plan, Tensor | None]


def _in_one_node(
    adj: Adjacency,
    form: tuple[bool, bool, str, bool, bool, bool],
    x: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    root_weight: Tensor | None,
    loop: Tensor | None = None,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor | None:
    r"""Sums the neighbours' features; adds linear maps of the sums and of the node's own features.

    .. math::
        \mathbf{y}_i = s_i \Big( \sum_{j \in \mathcal{N}(i)} v_{ij} \, t_j \, \mathbf{x}_j + l \, t_i \,
        \mathbf{x}_i \Big) \mathbf{W} + \mathbf{x}_i \mathbf{W}_r + \mathbf{b}

    The result equals that of ``spmm`` and linear maps up to rounding. It takes fewer steps, because products
    add to results and gradients in place. For a new structure, the gradient of the features is computed
    without its transpose (`policy.scatters`), on CUDA with atomics.

    Under autocast, products are computed in the autocast dtype, and gradients have the dtype of the tensor
    that they belong to. The gradient of a float32 bias is summed in float32. On CUDA with torch 2.8 or later,
    the gradient of float32 weights is summed in float32 too.

    Args:
        adj: structure (num_dst, num_src).
        form: fields of a `_Form` as a plain tuple, which is faster to create.
        x: features (num_src, in width); `is_plain_eager` must be true for them. With ``root_weight``, the
            destinations are the first sources.
        value: edge values (num_values,) in the dtype of ``x``; None: 1.
        weight: multiplied by the sums, in the layout of ``form``; None: no linear map.
        bias: (out width,) or None.
        root_weight: weight of the nodes' own features, in the shape of one weight; or None.
        loop: value of the self loops, one constant in the accumulation dtype; None: 1 if the form adds loops.
        scale_dst: constant s, (num_dst,); None: 1, or the inverse degree for a mean.
        scale_src: constant t, (num_src,); None: 1.

    Returns:
        (num_dst, out width), under autocast in the autocast dtype; differentiable twice. None if separate
        operators have to run, because dtypes, devices or sizes do not fit.
    """
    key = (
        form,
        kind_of(x),
        None if value is None else kind_of(value),
        None if weight is None else kind_of(weight),
        None if bias is None else kind_of(bias),
        None if root_weight is None else kind_of(root_weight),
        autocast_dtype(x) if is_any_autocast_enabled() else None,
        policy.eager_requests().get("spmm", "auto"),
    )
    plan: _Plan | None = adj.plans.get(key)
    if plan is None or plan.given_dst is not scale_dst or plan.given_src is not scale_src:
        dtype = _product_dtype(adj, _Form(*form), x, value, weight, bias, root_weight)
        if dtype is None:
            return None
        plan = _plan(adj, _Form(*form), x, value, weight, bias, root_weight, dtype, (scale_dst, scale_src))
        adj.plans[key] = plan
    if bias is not None and bias.is_neg():
        return None
    call = (adj, plan, plan.loop if loop is None else loop)
    if not torch.is_grad_enabled() or (weight is None and not x.requires_grad):
        return _compute(x, value, weight, bias, root_weight, call, plan.columns)[0]
    wrapped = is_wrapped(x) or (value is not None and is_wrapped(value))
    apply = _AggregateTransform.apply if wrapped else _apply
    out: Tensor = apply(x, value, weight, bias, root_weight, call)
    return out


def _product_dtype(
    adj: Adjacency,
    form: _Form,
    x: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    root_weight: Tensor | None,
) -> torch.dtype | None:
    """The dtype of the matrix products of a call; None if separate operators have to run."""
    others = [each for each in (value, weight, bias, root_weight) if each is not None]
    if (
        adj.is_partitioned
        or x.dim() != 2
        or x.layout is not torch.strided
        or x.shape[0] != adj.num_src
        or x.device != adj.col.device
        or any(
            type(each) not in PLAIN or each.device != x.device or each.layout is not torch.strided
            for each in others
        )
        or (value is not None and (value.dtype != x.dtype or value.shape != (adj.num_values,)))
    ):
        return None
    if weight is not None:
        shape = weight.shape
        if len(shape) != (3 if form.is_stacked else 2):
            return None
        if bias is not None and bias.shape != (shape[0 if form.out_by_in else -1],):
            return None
        if root_weight is not None and root_weight.shape != shape[-2:]:
            return None
        # If the width of x does not fit a single linear map, PyTorch raises its own error later.
        fits = x.shape[1] == shape[-1 if form.out_by_in else -2]
        if not fits and (form.is_stacked or root_weight is not None):
            return None
    dtypes = {x.dtype, *(each.dtype for each in others)}
    autocast = autocast_dtype(x)
    if autocast is None:
        return x.dtype if len(dtypes) == 1 and x.dtype in DTYPE_CODE else None
    if autocast not in CAST or not dtypes <= {autocast, torch.float32}:
        return None
    # Second derivatives would need the original features, but separate operators store only the cast ones.
    keeps_more = x.requires_grad and x.dtype != autocast and not form.is_stacked
    return None if keeps_more and weight is not None and root_weight is None else autocast


def _plan(
    adj: Adjacency,
    form: _Form,
    x: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    root_weight: Tensor | None,
    dtype: torch.dtype,
    given_scales: tuple[Tensor | None, Tensor | None],
) -> _Plan:
    scale_dst, scale_src = given_scales
    same = scale_src is scale_dst and adj.num_src == adj.num_dst
    scale_dst = check_scale("scale_dst", scale_dst, adj.num_dst, x)
    scale_src = scale_dst if same else check_scale("scale_src", scale_src, adj.num_src, x)
    if form.reduce == "mean":
        scale_dst = adj.inv_degree(accumulation_dtype(x.dtype))
    width, columns = x.shape[1], 0
    is_sage = transforms = False
    if value is None and weight is not None and root_weight is not None:
        is_sage = not (form.transform_first or form.is_stacked)
    if is_sage and weight is not None:
        sizes = (dtype, adj.num_dst, width, weight.shape[0], gpu.profile_of(x.device))
        transforms = _has_kernels(x.device) and policy.transforms_on_tensor_cores(*sizes)
        columns = policy.columns_of_products(*sizes, on_gpu=x.is_cuda)
        columns = 0 if columns == width else columns
    return _Plan(
        form.out_by_in,
        form.transform_first or weight is None,
        form.relu,
        form.is_stacked,
        *given_scales,
        scale_dst,
        scale_src,
        one(x.device, accumulation_dtype(x.dtype)) if form.adds_loops else None,
        policy.eager_requests().get("spmm", "auto"),
        dtype,
        tuple(None if each is None else each.dtype for each in (x, weight, bias, root_weight)),
        adj.num_dst // weight.shape[0] if form.is_stacked and weight is not None else adj.num_dst,
        is_sage,
        x.dtype != dtype and not (is_sage and not policy.casts_first(*adj.shape, adj.num_edges)),
        transforms,
        width,
        columns,
    )


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and gpu.has_wgmma(device)


def _compute(
    x: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    root_weight: Tensor | None,
    call: _Call,
    columns: int,
    keeps_met: bool = False,
    keeps_own: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Computes the layer's result, without autograd.

    Returns:
        The result; the features as they were cast; the input of the second step: the sums, or the transformed
        features that are summed; the destinations' features, the weight and the root weight as they were
        multiplied.
    """
    adj, plan, loop = call
    dtype, num_rows, scale_dst, scale_src = plan.dtype, plan.num_rows, plan.scale_dst, plan.scale_src
    if columns:
        padded = zero_padded(x, columns)
        x = x if padded is None else padded
    # All operands have one dtype, so autocast casts nothing more.
    features = x.to(dtype) if plan.casts_first else x
    own: Any = None
    matrix: Any = None
    root_matrix: Any = None
    if weight is not None:
        matrix = weight if weight.dtype is dtype and not columns else _multiplied(weight, dtype, columns)
    if root_weight is not None:
        is_part = num_rows < adj.num_src
        # A slice of the cast features would keep all of them in memory until the backward pass.
        own = x if keeps_own and is_part and not plan.transform_first else features
        own = own[:num_rows] if is_part else own
        root_matrix = root_weight
        if columns or own.dtype is not dtype:
            own = _multiplied(own, dtype, columns)
        if columns or root_weight.dtype is not dtype:
            root_matrix = _multiplied(root_weight, dtype, columns)
    met: Any = features
    if plan.transform_first:
        if matrix is not None:
            met = F.linear(features, matrix) if plan.out_by_in else torch.mm(features, matrix)
        out = launch_spmm(adj, met, value, scale_dst, scale_src, bias, plan.algorithm, plan.relu, loop)
    elif plan.transforms and features.dtype is dtype and is_laid_out(features, matrix, root_matrix):
        operands = (features, matrix, None if bias is None else bias.contiguous(), root_matrix)
        out, met = aggregate_and_transform(adj, *operands, scale_dst, plan.algorithm, keeps_met)
        return out, features, met, own, matrix, root_matrix
    else:
        met = launch_spmm(adj, features, value, scale_dst, scale_src, None, plan.algorithm, False, loop)
        if plan.is_stacked:
            met = met.view(num_rows, -1)
        if columns or met.dtype is not dtype:
            met = _multiplied(met, dtype, columns)
        bias = bias if bias is None or bias.dtype is dtype else bias.to(dtype)
        flat = matrix.reshape(met.shape[1], -1) if plan.is_stacked else matrix
        if plan.out_by_in:
            out = F.linear(met, flat, bias)
        else:
            out = torch.mm(met, flat) if bias is None else torch.addmm(bias, met, flat)
        if plan.relu:
            out.relu_()
    if own is not None:
        out.addmm_(own, root_matrix.t() if plan.out_by_in else root_matrix)
    return out, features, met, own, matrix, root_matrix


def _multiplied(x: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """A matrix in the dtype of a product, padded with zeros to ``columns`` (0: not padded)."""
    width = x.shape[1]
    if not columns or width == columns:
        return x if x.dtype is dtype else x.to(dtype)  # not `cast`: a warm layer makes few calls
    out = x.new_empty(x.shape[0], columns, dtype=dtype)
    out[:, width:] = 0
    out[:, :width] = x
    return out


class _AggregateTransform(torch.autograd.Function):
    """With A including scales and self loops, Y = (A X) W + X W_r + b.

    Sums first: dX = A^T (dY W^T) + dY W_r^T; dW = (A X)^T dY; dv = sddmm(dY W^T, X).
    Linear map first: dX = (A^T dY) W^T + dY W_r^T; dW = X^T (A^T dY); dv = sddmm(dY, X W).
    In both orders dW_r = X^T dY and db = sum of dY.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        root_weight: Tensor | None,
        call: _Call,
    ) -> Tensor:
        needs_x, needs_value, needs_weight, _, needs_root, _ = ctx.needs_input_grad
        plan = call[1]
        columns = 0 if needs_x else plan.columns
        out, features, met, own, matrix, root_matrix = _compute(
            x, value, weight, bias, root_weight, call, columns, needs_weight, needs_root
        )
        needs_matrix = needs_x or needs_value
        uncast = root_uncast = None
        if needs_matrix and (matrix is not weight or root_matrix is not root_weight):
            given: Any = ((weight, matrix), (root_weight, root_matrix))
            uncast, root_uncast = (Uncast.of(*each) for each in given)
        # Tensors that no gradient needs are not saved, so callers may overwrite them, as with separate
        # operators.
        transform_first = plan.transform_first
        keeps_features = needs_value or (needs_weight and transform_first)
        # Second derivatives need x. It is not saved twice, because unpacking takes host time.
        keeps_x = needs_x and (needs_value or needs_weight or needs_root)
        if keeps_x and ((keeps_features and features is x) or (needs_root and own is x)):
            keeps_x = False
        ctx.held = call, uncast, root_uncast, keeps_x
        ctx.save_for_backward(
            x if keeps_x else None,
            value,
            features if keeps_features else None,
            met if (needs_value if transform_first else needs_weight) else None,
            own if needs_root else None,
            matrix if needs_matrix else None,
            root_matrix if needs_x else None,
            out if plan.relu else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_any_autocast_enabled():
            return (*without_autocast(_gradients, ctx, grad), None)
        return (*_gradients(ctx, grad), None)


_apply = direct(_AggregateTransform)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    once = is_first_derivative(grad)  # otherwise, operators with gradients of their own are used
    (adj, plan, loop), uncast, root_uncast, keeps_x = ctx.held
    saved = saved_tensors(ctx, (0,), once) if keeps_x else ctx.saved_tensors
    x, value, features, met, own, matrix, root_matrix, rectified = saved
    needed = ctx.needs_input_grad
    needs_x, needs_value, needs_weight, needs_bias, needs_root, _ = needed
    x_dtype, weight_dtype, bias_dtype, root_dtype = plan.given
    transform_first, scale_dst, scale_src = plan.transform_first, plan.scale_dst, plan.scale_src
    if rectified is not None:
        grad = grad.masked_fill(rectified <= 0, 0)
    if not once:
        matrix = matrix if uncast is None else uncast.cast_again(plan.dtype)
        root_matrix = root_matrix if root_uncast is None else root_uncast.cast_again(plan.dtype)
        x = next((each for each in (x, features, own) if each is not None), None)
        if x is not None:
            features = cast(x, plan.dtype)
            own = features[: plan.num_rows]
        if transform_first and needs_value:
            met = features @ (matrix.t() if plan.out_by_in else matrix)
        elif needs_weight and not transform_first and (needs_x or needs_value):  # otherwise sums are constant
            met = _differentiable_sum(plan, adj, features, value, loop).view(plan.num_rows, -1)
    if matrix is not None and not plan.out_by_in:
        matrix = (matrix.reshape(-1, matrix.shape[2]) if plan.is_stacked else matrix).t()
    grad_x: Any = None
    grad_weight = grad_value = None
    if transform_first:
        at_dst, at_src = grad, met
        grad_bias = sum_of_rows(grad, bias_dtype, once) if needs_bias else None
        if once and (needs_x or needs_weight):
            back = grad_of_features(adj, grad, value, scale_dst, scale_src, plan.algorithm, loop)
        elif needs_x or needs_weight:
            back = _differentiable_sum(plan, adj, grad, value, loop, back=True)
        if needs_weight and root_dtype is None:
            left, right = (back.t(), features) if plan.out_by_in else (features.t(), back)
            is_same = back.dtype is weight_dtype
            grad_weight = torch.mm(left, right) if is_same else product_in(left, right, weight_dtype, once)
        elif needs_weight:  # the original layer sums before the linear map
            grad_weight = weight_gradient(back, features, weight_dtype, once, out_by_in=plan.out_by_in)
        if needs_x:
            grad_x = back if matrix is None else torch.mm(back, matrix)
        grad_root = _of_weight(plan, grad, own, root_dtype, once) if needs_root else None
    else:
        operands = (plan, needed, grad, met, own, once)
        parameters = None
        if needs_x and plan.is_sage and once:
            parameters = fork(functools.partial(_of_parameters, *operands), grad)
        if needs_x or needs_value:
            at_dst, at_src = torch.mm(grad, matrix), features
        if needs_x and plan.is_sage and once:
            grad_x = _onto_root(plan, adj, at_dst, grad, root_matrix)
            root_matrix = root_matrix if grad_x is None else None
        if needs_x and grad_x is None:
            grad_sums = at_dst.view(-1, plan.width) if plan.is_stacked else at_dst
            if once:
                grad_x = grad_of_features(adj, grad_sums, value, scale_dst, scale_src, plan.algorithm, loop)
            else:
                grad_x = _differentiable_sum(plan, adj, grad_sums, value, loop, back=True)
    if needs_x:
        if root_matrix is not None:
            root_matrix = root_matrix if plan.out_by_in else root_matrix.t()
            num_more = grad_x.shape[0] - plan.num_rows
            if once:
                (grad_x[: plan.num_rows] if num_more else grad_x).addmm_(grad, root_matrix)
            else:
                grad_x = grad_x + F.pad(grad @ root_matrix, (0, 0, 0, num_more))
        if grad_x.dtype is not x_dtype:
            grad_x = grad_x.to(x_dtype)
    if needs_value:
        grad_value = _of_value(plan, adj, at_dst, at_src, value, once)
    if not transform_first:
        found = parameters() if parameters is not None else _of_parameters(*operands)
        grad_weight, grad_bias, grad_root = found
    return grad_x, grad_value, grad_weight, grad_bias, grad_root


def _of_parameters(
    plan: _Plan, needed: tuple[bool, ...], grad: Tensor, sums: Tensor, own: Tensor, once: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of weight, bias and root weight, if the linear map comes after the sums."""
    _, _, needs_weight, needs_bias, needs_root, _ = needed
    _, weight_dtype, bias_dtype, root_dtype = plan.given
    if plan.transforms and once and needs_weight and needs_root and is_laid_out(own, sums):
        return gradients_of_parameters(grad, sums, own, needs_bias)
    if plan.out_by_in and not plan.columns and grad.dtype is weight_dtype and root_dtype is weight_dtype:
        by_column = grad.t()
        return (
            torch.mm(by_column, sums) if needs_weight else None,
            sum_of_rows(grad, bias_dtype, once) if needs_bias else None,
            torch.mm(by_column, own) if needs_root else None,
        )
    grad_weight = _of_weight(plan, grad, sums, weight_dtype, once) if needs_weight else None
    if plan.is_stacked and grad_weight is not None:
        grad_weight = grad_weight.view(-1, plan.width, grad_weight.shape[1])
    return (
        grad_weight,
        sum_of_rows(grad, bias_dtype, once) if needs_bias else None,
        _of_weight(plan, grad, own, root_dtype, once) if needs_root else None,
    )


def _of_weight(plan: _Plan, grad: Tensor, rows: Tensor, dtype: torch.dtype, once: bool) -> Tensor:
    """The gradient of a weight that was multiplied by these rows, without the columns of the padding."""
    left, right = (grad.t(), rows) if plan.out_by_in else (rows.t(), grad)
    product = torch.mm(left, right) if grad.dtype is dtype else product_in(left, right, dtype, once)
    return product[:, : plan.width] if plan.columns else product


def _of_value(
    plan: _Plan, adj: Adjacency, at_dst: Tensor, at_src: Tensor, value: Tensor, once: bool
) -> Tensor:
    """The edge values' gradient from the sums' gradients ``at_dst`` and the summed features ``at_src``."""
    scales = (plan.scale_dst, plan.scale_src)
    if not once:
        return sddmm(adj, at_dst, at_src, scale_dst=scales[0], scale_src=scales[1])
    algorithm = plan.algorithm if plan.algorithm in policy.SDDMM_ALGORITHMS else "csr"
    of_values: Any = (value.shape[0], 1, value.dtype, adj, algorithm, False)
    return sddmm_kernel(at_dst, at_src, *scales, *of_values).view(-1)


def _differentiable_sum(
    plan: _Plan,
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    loop: Tensor | None,
    *,
    back: bool = False,
) -> Tensor:
    """The sum, or with ``back`` the transposed sum, computed by differentiable operators."""
    scales = (plan.scale_dst, plan.scale_src)
    if back:
        adj, scales = adj.t(valued=value is not None), scales[::-1]
    out = spmm(adj, x, value, scale_dst=scales[0], scale_src=scales[1], algorithm=plan.algorithm)
    return out if loop is None else with_loops(out, x, *scales, loop)


def _onto_root(
    plan: _Plan, adj: Adjacency, grad_sums: Tensor, grad: Tensor, root_matrix: Tensor
) -> Tensor | None:
    """Adds the sums' gradient to the own features' gradient by scattering; None if this is not possible."""
    dtype = plan.given[0]
    if dtype != torch.float32 or adj.symmetric or not scatters(adj, plan.algorithm, grad.dtype, None):
        return None
    total = torch.empty(adj.num_src, plan.width, dtype=dtype, device=grad.device)
    own = total[: plan.num_rows]
    if grad.dtype == dtype:
        torch.mm(grad, root_matrix, out=own)
    else:
        own.copy_(torch.mm(grad, root_matrix))
    return add_transposed(adj, grad_sums, None, plan.scale_dst, None, total, plan.num_rows)


# ---------------------------------------------------------------- the node within a trace


class _Traced(NamedTuple):
    """Arguments of the operator for traced code.

    Attributes:
        x: features (num_src, in width).
        weight: (out width, in width), or None.
        bias: (out width,), or None.
        root_weight: (out width, in width), or None.
        eps: the parameter ``eps`` of GIN, one number, or None.
        norm_dst: name of the structure's method that returns the factors of the destinations, or "".
        norm_src: name of the method for the sources, or "".
        adds_loops: whether to add a self loop to every node if the structure has none.
        transform_first: as in the form.
        algorithm: algorithm of the sum.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    root_weight: Tensor | None
    eps: Tensor | None
    norm_dst: str
    norm_src: str
    adds_loops: bool
    transform_first: bool
    algorithm: str

    def of_node(self, adj: Adjacency) -> _Call:
        """The eager plan, but without its own streams, which CUDA graphs of a compiled step cannot track."""
        x, weight, bias, root_weight, eps, norm_dst, norm_src, adds_loops, transform_first, algorithm = self
        kinds = tuple([None if each is None else kind_of(each) for each in self[:4]])
        key = ("traced", self[5:], kinds)
        plan: _Plan | None = adj.plans.get(key)
        if plan is None:
            adds, dtype = adds_loops and not adj.has_inserted_loops, accumulation_dtype(x.dtype)
            factors: dict[str, Tensor | None] = {"": None}
            for name in (norm_dst, norm_src):
                if name not in factors:
                    loops = {"loops": 1} if adds and name == "inv_sqrt_degree" else {}
                    factors[name] = getattr(adj, name)(dtype, **loops)
            form, scales = (
                _Form(True, transform_first, "sum", False, adds, False),
                (factors[norm_dst], factors[norm_src]),
            )
            plan = _plan(adj, form, x, None, weight, bias, root_weight, x.dtype, scales)
            plan = adj.plans[key] = replace(plan, algorithm=algorithm, is_sage=False, columns=0)
        return adj, plan, plan.loop if eps is None else _one_more(eps)


def _traced(
    adj: Adjacency,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    root_weight: Tensor | None = None,
    eps: Tensor | None = None,
    *,
    norms: tuple[str, str] = ("", ""),
    adds_loops: bool = False,
    transform_first: bool = True,
) -> Tensor | None:
    """The layer as one operator of `torch.compile`; None if a trace needs separate operators.

    Inductor would compute biases, self loops and GIN's own term in separate passes, and products of float32
    matrices by slower kernels.
    """
    if adj.num_dst != adj.num_src or x.dim() != 2 or x.shape[0] != adj.num_src:
        return None
    if not fits_one_operator(x, weight, bias, root_weight, eps):
        return None
    if weight is not None and x.shape[1] != weight.shape[1]:
        return None
    if root_weight is not None and (weight is None or weight.shape != root_weight.shape):
        return None
    options = (*norms, adds_loops, transform_first, policy.requested("spmm", "auto"))
    call = _Traced(x, weight, bias, root_weight, eps, *options)
    out: Tensor = aggregate_transform_op.dispatched(*call, adj.handle, False)[0]
    return out


def _aggregate_transform(adj: Adjacency, call: _Traced, *, keep: bool) -> tuple[Tensor, Tensor]:
    """The result, and the neighbours' sums; empty if no gradient needs them."""
    x, weight, bias, root_weight, *_ = call
    keep = keep and not call.transform_first
    out, _, sums, *_ = _compute(x, None, weight, bias, root_weight, call.of_node(adj), 0, keep)
    return out, sums if keep and sums is not None else x.new_empty(0, x.shape[1])


def _aggregate_transform_gradients(
    adj: Adjacency,
    grad: Tensor,
    call: _Traced,
    sums: Tensor,
    *,
    x_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    root_weight_wanted: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of features and parameters; None: not wanted."""
    x, weight, bias, root_weight, *_ = call
    pairs = ((weight, weight_wanted), (bias, bias_wanted), (root_weight, root_weight_wanted))
    needed = (x_wanted, False, *[given is not None and wanted for given, wanted in pairs], False)
    saved = (None, None, x, sums, x if needed[4] else None, weight, root_weight, None)
    held = (call.of_node(adj), None, None, False)
    ctx = SimpleNamespace(held=held, saved_tensors=saved, needs_input_grad=needed)
    with torch.no_grad():
        grad_x, _, grad_weight, grad_bias, grad_root = _gradients(ctx, grad)
    return grad_x, grad_weight, grad_bias, grad_root, None


def _aggregate_transform_unfused(adj: Adjacency, call: _Traced) -> Tensor:
    """Computes the operator by other operators, which are differentiable again."""
    x, weight, bias, root_weight, *_ = call
    _, plan, loop = call.of_node(adj)
    out = _differentiable_sum(plan, adj, x, None, loop)
    if weight is not None:
        out = F.linear(out, weight)
    if bias is not None:
        out = out + bias
    return out if root_weight is None else out + F.linear(x, root_weight)


def _aggregate_transform_fake(of: Any) -> tuple[Tensor, Tensor]:
    num_rows, width = of.x.shape
    keeps = of.keep and not of.transform_first
    out = of.x.new_empty(num_rows, width if of.weight is None else of.weight.shape[0])
    return out, of.x.new_empty(num_rows if keeps else 0, width)


aggregate_transform_op = FusedOperator(
    "aggregate_transform",
    _aggregate_transform,
    _aggregate_transform_gradients,
    _aggregate_transform_unfused,
    _aggregate_transform_fake,
    ("out", "sums"),
)
