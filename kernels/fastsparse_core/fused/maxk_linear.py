"""Aggregation of MaxK's sparse rows and the linear map after it.

The gradient of the map's weight needs the map's input, the aggregated rows, which are dense. They are either
stored, or, to save memory, the backward pass aggregates the sparse rows again and reads k entries per edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastsparse_core import policy
from fastsparse_core.formats.cbsr import CBSR
from fastsparse_core.ops._autocast import CAST, autocast_dtype, product_in, without_autocast
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, is_first_derivative, is_plain_eager
from fastsparse_core.ops._ssd_backward import ssd_backward_op, ssd_value_grad_op
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.maxk import gather_op, to_dense_op
from fastsparse_core.ops.ssd import SumOrMean, operands, ssd, ssd_op
from fastsparse_core.structure.adjacency import Adjacency


def aggregate_cbsr(
    adj: Adjacency,
    cbsr: CBSR,
    transform: Callable[[Tensor, CBSR], Tensor],
    weight: Tensor,
    value: Tensor | None = None,
    reduce: SumOrMean = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor:
    """Computes ``transform(ssd(adj, cbsr, ...), cbsr)``; autograd stores only ``cbsr`` and ``value``.

    It is used for maps that :func:`maxk_linear` does not support. :func:`maxk_linear` takes less host time.

    Args:
        adj: structure (num_dst, num_src).
        cbsr: sparse features (num_src, D).
        transform: function of the aggregated features (num_dst, D) and the sparse features. The function runs
            again in the backward pass, so it must not use random numbers or run hooks. It may use only its
            arguments, ``weight`` and constants, because edits of other tensors would not be detected.
        weight: the weight that ``transform`` uses. If the features have a gradient, callers must not edit the
            weight before the backward pass, as with a linear layer.
        value: edge values as in :func:`fastsparse_core.ssd`.
        reduce: ``"sum"`` or ``"mean"``.
        scale_dst: constant factors of the rows, (num_dst,); None: 1.
        scale_src: constant factors of the columns, (num_src,); None: 1.
    """

    def run(values: Tensor, ids: Tensor, value: Tensor | None, *_: Tensor) -> Tensor:
        kept = CBSR(values, ids, cbsr.width)
        out = ssd(adj, kept, value, reduce, scale_dst=scale_dst, scale_src=scale_src)
        return transform(out, kept)

    inputs = (cbsr.values, cbsr.ids, value)
    # torch.compile decides on its own which tensors it stores for the backward pass.
    if not torch.is_grad_enabled() or not is_plain_eager(cbsr.values):
        return run(*inputs)
    # Autograd saves a checkpoint's arguments and detects writes to them.
    needs_weight = cbsr.values.requires_grad or (value is not None and value.requires_grad)
    noticed = (weight,) if needs_weight else ()
    result: Tensor = checkpoint(run, *inputs, *noticed, use_reentrant=False, preserve_rng_state=False)
    return result


def densifies(values: Tensor, k: int, width: int) -> bool:
    """True if a layer on dense activations is faster, by the rule for ``algorithm="auto"`` of :func:`ssd`.

    If `ssd` would convert the sparse rows to dense ones first, sparse rows should not be created. The dense
    layer aggregates once per pass, and can apply its linear map before or after the aggregation.

    Args:
        values: dense features, or the kept entries of sparse features.
        k: kept entries per row.
        width: number of columns.
    """
    dtype = autocast_dtype(values) or values.dtype
    algorithm = policy.requested("ssd", "auto")
    return policy.ssd_algorithm(algorithm, values.device, dtype, k, width) == "densify"


def can_maxk_linear(
    adj: Adjacency,
    cbsr: CBSR,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor | None = None,
    *,
    out_by_in: bool,
) -> bool:
    """Returns whether :func:`maxk_linear` supports a call: plain matrices, outside of traces.

    Args:
        adj: structure.
        cbsr: sparse features of the sources.
        weight: weight of the aggregated neighbours.
        bias: bias of the result, or None.
        root_weight: weight of the destinations, which are the first sources; or None.
        out_by_in: whether weights are (out width, in width).
    """
    values, device = cbsr.values, cbsr.values.device
    if not (
        is_plain_eager(values)
        and not adj.is_partitioned
        and type(weight) in PLAIN
        and weight.dim() == 2
        and weight.shape[1 if out_by_in else 0] == cbsr.width
        and device == adj.device
    ):
        return False
    if root_weight is not None and not (root_weight.shape == weight.shape and adj.num_dst <= adj.num_src):
        return False
    if bias is not None and bias.shape != (weight.shape[0 if out_by_in else 1],):
        return False
    parameters = [parameter for parameter in (weight, bias, root_weight) if parameter is not None]
    if any(
        type(parameter) not in PLAIN
        or parameter.layout is not torch.strided
        or parameter.dtype != weight.dtype
        or parameter.device != device
        for parameter in parameters
    ):
        return False
    if autocast_dtype(values) is None:
        return values.dtype == weight.dtype and values.dtype in DTYPE_CODE
    return values.dtype in CAST and weight.dtype in CAST


class _Aggregation(NamedTuple):
    """Arguments of an aggregation with a linear map, without the tensors that have gradients."""

    adj: Adjacency
    width: int
    scale_dst: Tensor | None
    scale_src: Tensor | None
    out_by_in: bool
    recompute: bool
    algorithm: str
    dtype: torch.dtype

    def sums(self, values: Tensor, ids: Tensor, value: Tensor | None, once: bool = True) -> Tensor:
        """The aggregated rows (num_dst, width); unless ``once``, computed by the differentiable operator."""
        adj = self.adj
        factors = (value, self.scale_dst, self.scale_src, None)
        place = (adj.num_dst, adj, False, self.algorithm)
        out: Tensor = (ssd_op.kernel if once else ssd_op)(values, ids, self.width, *factors, *place)
        return out

    def roots(self, values: Tensor, ids: Tensor, once: bool = True) -> Tensor:
        """The destinations' rows (num_dst, width); unless ``once``, by the differentiable operator."""
        num_dst = self.adj.num_dst
        dense = to_dense_op.kernel if once else to_dense_op
        out: Tensor = dense(values[:num_dst], ids[:num_dst], self.width)
        return out

    def by_in(self, weight: Tensor) -> Tensor:
        """A weight as (in width, out width), in the dtype of the products."""
        weight = weight.to(self.dtype)
        return weight.t() if self.out_by_in else weight


def maxk_linear(
    adj: Adjacency,
    cbsr: CBSR,
    weight: Tensor,
    bias: Tensor | None = None,
    root_weight: Tensor | None = None,
    value: Tensor | None = None,
    reduce: SumOrMean = "sum",
    *,
    out_by_in: bool,
    recompute: bool = False,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor:
    r"""Linear maps of the aggregated sparse rows of the neighbours and, optionally, of the node's own row.

    .. math::
        \mathbf{y}_i = \mathbf{W} \, s_i \bigoplus_{j \in \mathcal{N}(i)} v_{ij} \, t_j \, \mathbf{x}_j
        + \mathbf{W}_r \mathbf{x}_i + \mathbf{b}

    with :math:`\mathbf{X}` = ``cbsr.to_dense()``. The result equals that of :func:`fastsparse_core.ssd` and
    linear maps up to rounding, also under autocast. Autograd gets one node, which stores ``cbsr``, ``value``
    and, if ``weight`` needs a gradient, the aggregated rows. The backward pass casts the weights and makes
    the nodes' own rows dense again.

    Args:
        adj: structure (num_dst, num_src).
        cbsr: sparse features (num_src, in width); `can_maxk_linear` must be true.
        weight: :math:`\mathbf{W}`, (out width, in width) or (in width, out width).
        bias: :math:`\mathbf{b}`, (out width,) or None.
        root_weight: :math:`\mathbf{W}_r`, in the shape of ``weight``; None: no term of the node's own row.
        value: edge values, see :func:`fastsparse_core.ssd`.
        reduce: ``"sum"`` or ``"mean"``.
        out_by_in: whether weights are (out width, in width).
        recompute: whether the backward pass aggregates again, instead of storing the aggregated rows.
        scale_dst: constant :math:`s`, (num_dst,); None: 1.
        scale_src: constant :math:`t`, (num_src,); None: 1.

    Returns:
        (num_dst, out width), under autocast in the autocast dtype; differentiable twice.
    """
    algorithm = policy.requested("ssd", "auto")
    values, value, scale_dst, scale_src = operands(adj, cbsr, value, reduce, scale_dst, scale_src)
    how = _Aggregation(adj, cbsr.width, scale_dst, scale_src, out_by_in, recompute, algorithm, values.dtype)
    inputs = (values, value, weight, bias, root_weight, cbsr.ids)
    return _MaxKLinear.apply(*inputs, how) if torch.is_grad_enabled() else _aggregate(how, *inputs)[0]


def _aggregate(
    how: _Aggregation,
    values: Tensor,
    value: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    root_weight: Tensor | None,
    ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes the result (num_dst, out width) and the aggregated rows (num_dst, in width)."""
    sums, by_in = how.sums(values, ids, value), how.by_in(weight)
    out = torch.mm(sums, by_in) if bias is None else torch.addmm(bias.to(how.dtype), sums, by_in)
    if root_weight is not None:
        out.addmm_(how.roots(values, ids), how.by_in(root_weight))
    return out, sums


class _MaxKLinear(torch.autograd.Function):
    """dV = A^T (dY W^T) in the kept columns, dW = (A X)^T dY, db = sum of dY; W_r likewise, without A."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        value: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        root_weight: Tensor | None,
        ids: Tensor,
        how: _Aggregation,
    ) -> Tensor:
        ctx.how = how
        ctx.dtypes = tuple(None if given is None else given.dtype for given in (value, weight, bias))
        out, sums = _aggregate(how, values, value, weight, bias, root_weight, ids)
        # Tensors that no gradient needs are not saved, so callers may overwrite them, as with separate
        # operators.
        needs_values, needs_value, needs_weight, _, needs_root = ctx.needs_input_grad[:5]
        ctx.save_for_backward(
            values if needs_value or needs_weight or needs_root else None,
            value if needs_values or needs_weight else None,
            weight if needs_values or needs_value else None,
            root_weight if needs_values else None,
            ids,
            sums if needs_weight and not how.recompute else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*without_autocast(_gradients, ctx, grad), None, None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    how, (values, value, weight, root_weight, ids, sums) = ctx.how, ctx.saved_tensors
    needs_values, needs_value, needs_weight, needs_bias, needs_root = ctx.needs_input_grad[:5]
    value_dtype, weight_dtype, bias_dtype = ctx.dtypes
    adj = how.adj
    once = is_first_derivative(grad)  # otherwise, operators with gradients of their own are used
    scales, place = (how.scale_dst, how.scale_src), (adj, False)
    grad_values = grad_value = grad_weight = grad_root = None
    if needs_values or needs_value:
        grad_sums = torch.mm(grad, how.by_in(weight).t())
    if needs_values:
        grad_values = ssd_backward_op(grad_sums, ids, value, *scales, *place)
        if root_weight is not None:
            grad_roots = torch.mm(grad, how.by_in(root_weight).t())
            grad_values = _add_roots(grad_values, grad_roots, ids[: adj.num_dst], once)
    if needs_value:
        grad_value = ssd_value_grad_op(grad_sums, values, ids, *scales, adj.num_values, *place).to(
            value_dtype
        )
    if needs_weight:
        if sums is None or not once:  # the stored rows are not differentiable
            sums = how.sums(values, ids, value, once)
        grad_weight = _weight_gradient(how, sums, grad, weight_dtype, once)
    if needs_root:
        grad_root = _weight_gradient(how, how.roots(values, ids, once), grad, weight_dtype, once)
    grad_bias = sum_of_rows(grad, bias_dtype, once) if needs_bias else None
    return grad_values, grad_value, grad_weight, grad_bias, grad_root


def _add_roots(grad_values: Tensor, grad_roots: Tensor, ids: Tensor, once: bool) -> Tensor:
    """Adds the kept columns of the destinations' gradients to the gradients of the first sources."""
    if once:
        grad_values[: ids.size(0)] += gather_op(grad_roots, ids)
        return grad_values
    kept = gather_op(grad_roots, ids)
    return grad_values + F.pad(kept, (0, 0, 0, grad_values.size(0) - ids.size(0)))


def _weight_gradient(how: _Aggregation, rows: Tensor, grad: Tensor, dtype: torch.dtype, once: bool) -> Tensor:
    left, right = (grad.t(), rows) if how.out_by_in else (rows.t(), grad)
    return product_in(left, right, dtype, once)
