"""Principal neighbourhood aggregation (PNA) for both plugins: messages, aggregations and scalers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.fused.edge_messages import can_pass_messages
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.fused.weight_gradient import weight_gradient
from fastsparse_core.ops import _multi_aggregate_fused as kernels
from fastsparse_core.ops._autocast import (
    check_versions,
    is_any_autocast_enabled,
    versions_of,
    without_autocast,
)
from fastsparse_core.ops._eager import direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.multi_aggregate import MOST_EDGE_FEATURES, multi_aggregate, slots_of
from fastsparse_core.structure.adjacency import Adjacency


class Scaled(NamedTuple):
    """Arguments of a layer's aggregation, without parameters and features.

    Attributes:
        adj: square structure.
        names: names of the aggregations.
        towers: number of towers.
        min_variance: largest variance for which the standard deviation is 0.
        factors: for each scaler, the factor of every node's aggregations, (N,); None: 1.
    """

    adj: Adjacency
    names: Sequence[str]
    towers: int
    min_variance: float
    factors: Sequence[Tensor | None]


def joined_maps(
    of_dst: Sequence[Tensor],
    of_src: Sequence[Tensor],
    of_own: Sequence[Tensor],
    message_biases: Sequence[Any],
    own_biases: Sequence[Any],
    shared: bool,
) -> tuple[Tensor, Tensor | None]:
    r"""Joins the linear maps of node features of all towers, and their biases.

    A message is :math:`\mathbf{P} \mathbf{x}_i + \mathbf{Q} \mathbf{x}_j + \mathbf{R} \mathbf{e}_{ij} +
    \mathbf{b}`. So its first two terms can be computed per node instead of per edge.

    Args:
        of_dst: :math:`\mathbf{P}` of every tower, (width, F), or (width, F / towers) unless ``shared``; empty
            if messages are stored because they are not such a sum.
        of_src: :math:`\mathbf{Q}` of every tower, like ``of_dst``.
        of_own: weight of the update for the node's own features, for every tower.
        message_biases: :math:`\mathbf{b}`, one tensor for all towers or one per tower.
        own_biases: biases of the update, like ``message_biases``.
        shared: whether every tower reads all features; otherwise, each reads its own part of them.

    Returns:
        The maps of destinations, sources and update, stacked: (towers * (2 * width + out width), F), or
        (towers, 2 * width + out width, F / towers) unless ``shared``. The latter is not one block-diagonal
        matrix, because its zeros times NaN would spread NaN from tower to tower. And the biases, in the same
        shape without the last dimension.
    """
    if shared or len(of_own) == 1:
        count = 1
        matrix = torch.cat((*of_dst, *of_src, *of_own))
    else:
        count, groups = len(of_own), [each for each in (of_dst, of_src, of_own) if each]
        matrix = torch.stack([torch.cat(of_tower) for of_tower in zip(*groups, strict=True)])
    if own_biases[0] is None and (not message_biases or message_biases[0] is None):
        return matrix, None
    num_own = len(of_own) * of_own[0].shape[0]
    zeros = matrix.new_zeros((matrix.shape[-2] * count - num_own) // 2)
    of_messages = (zeros,) if not message_biases or message_biases[0] is None else message_biases
    of_update = (matrix.new_zeros(num_own),) if own_biases[0] is None else own_biases
    if count == 1:
        return matrix, torch.cat((*of_messages, zeros, *of_update))
    parts = [torch.cat(tuple(each)).view(count, -1) for each in (of_messages, (zeros,), of_update)]
    return matrix, torch.cat(parts, 1)


def node_parts(x: Tensor, matrix: Tensor, bias: Tensor | None, num_own: int) -> Sequence[Tensor]:
    """Applies the maps of `joined_maps`; returns the rows of destinations, sources and update.

    Args:
        x: (N, F).
        matrix: the maps.
        bias: biases of the maps.
        num_own: number of features of the update in all towers together.
    """
    if matrix.dim() == 2:
        width = (matrix.size(0) - num_own) // 2
        return linear_before_sum(x, matrix, bias, 2, width).split((width, width, num_own), dim=1)
    count = matrix.size(0)
    num_own //= count
    width = (matrix.size(1) - num_own) // 2
    biases = [None] * count if bias is None else bias.unbind()
    found = [
        linear_before_sum(part, own, of_own, 2, width).split((width, width, num_own), dim=1)
        for part, own, of_own in zip(x.chunk(count, 1), matrix.unbind(), biases, strict=True)
    ]
    return [torch.cat(each, 1) for each in zip(*found, strict=True)]


def scaled_aggregation(
    of: Scaled,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    edges: tuple[Tensor, Tensor] | None,
    weights: Sequence[Tensor],
) -> Tensor:
    r"""Computes messages, their aggregations, and the linear map of the update.

    .. math::
        \mathbf{y}_i = \mathbf{V} \mathbf{x}_i + \mathbf{c} + \sum_k s_{ik} \mathbf{U}_k \bigoplus_j
        (\mathbf{P} \mathbf{x}_i + \mathbf{Q} \mathbf{x}_j + \mathbf{R} \mathbf{e}_{ij} + \mathbf{b})

    It is one autograd node if the call is eager, without autocast, and all towers read all features.
    Otherwise, separate operators run.

    Args:
        of: the aggregations.
        x: (N, F).
        matrix: :math:`\mathbf{P}, \mathbf{Q}, \mathbf{V}` of all towers, from `joined_maps`.
        bias: biases of these maps.
        edges: features (num_values, A) and :math:`\mathbf{R}`, (towers * width, A), or None.
        weights: :math:`\mathbf{U}` of every tower, (out width, K * width).

    Returns:
        (N, towers * out width); differentiable twice.
    """
    edge: Any = None
    edge_weight = None
    if edges is not None:
        edge, edge_weight = edges
    learns_factors = False
    for factor in of.factors:  # in Python 3.11, a comprehension is one more call
        learns_factors |= factor is not None and factor.requires_grad
    if not (
        is_plain_eager(x)
        and not is_any_autocast_enabled()
        and can_pass_messages(of.adj, x, edge, matrix, bias, edge_weight, *weights)
        and matrix.shape[1:] == x.shape[1:]
        and (edge_weight is None or edge.shape[1] == edge_weight.shape[1] <= MOST_EDGE_FEATURES)
        and not learns_factors
    ):
        return _by_operators(of, x, matrix, bias, edge, edge_weight, *weights)
    if torch.is_grad_enabled():
        apply = _ScaledAggregation.apply if is_wrapped(x) else _apply
        out: Tensor = apply(of, x, matrix, bias, edge, edge_weight, *weights)
        return out
    return _compute(of, x, matrix, bias, edge, edge_weight, weights, keep=False)[0]


def add_scaled(
    own: Tensor, aggregated: Tensor, weights: Sequence[Tensor], factors: Sequence[Tensor | None]
) -> Tensor:
    r"""Adds the update's linear maps of the scaled aggregations.

    .. math::
        \mathbf{y}_i + \mathbf{U} \, [s_{i1} \mathbf{o}_i \Vert \dots \Vert s_{iK} \mathbf{o}_i] =
        \mathbf{y}_i + \sum_k s_{ik} \mathbf{U}_k \mathbf{o}_i

    The second form is computed: one product, K times as wide as the output, whose parts are scaled and added.
    So scaled aggregations are not stored.

    Args:
        own: :math:`\mathbf{y}`, (N, towers * out width).
        aggregated: :math:`\mathbf{o}`, (N, towers * width), tower by tower.
        weights: :math:`\mathbf{U}` of every tower, (out width, K * width).
        factors: :math:`s_k`, (N,) each; None: 1.
    """
    return _add_products(own, aggregated, _by_scale(weights, len(factors)), factors)


def _by_scale(weights: Sequence[Tensor], num_scales: int) -> Tensor:
    """The update's linear maps, stacked by scaler: (towers, K * out width, width)."""
    maps = weights[0][None] if len(weights) == 1 else torch.stack(tuple(weights))
    towers, out_width, width = maps.shape
    by_scale = maps.view(towers, out_width, num_scales, width // num_scales).transpose(1, 2)
    return by_scale.reshape(towers, num_scales * out_width, width // num_scales)


def _add_products(
    own: Tensor, aggregated: Tensor, by_scale: Tensor, factors: Sequence[Tensor | None]
) -> Tensor:
    (towers, rows, width), num_scales = by_scale.shape, len(factors)
    if towers == 1:
        products = F.linear(aggregated, by_scale[0]).view(-1, 1, num_scales, rows // num_scales)
    else:
        by_tower = aggregated.view(-1, towers, width).transpose(0, 1)
        products = torch.bmm(by_tower, by_scale.transpose(1, 2)).transpose(0, 1)
        products = products.view(-1, towers, num_scales, rows // num_scales)
    total = own.unflatten(1, (towers, -1))
    for factor, part in zip(factors, products.unbind(2), strict=True):
        if factor is None:
            total = total + part
        else:
            total = torch.addcmul(total, part, factor.to(part.dtype).view(-1, 1, 1))
    return total.flatten(1)


def _by_operators(
    of: Scaled,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    edge: Tensor | None,
    edge_weight: Tensor | None,
    *weights: Tensor,
) -> Tensor:
    """`scaled_aggregation` by differentiable operators."""
    dst, src, own = node_parts(x, matrix, bias, of.towers * weights[0].size(0))
    aggregated = multi_aggregate(
        of.adj,
        src,
        of.names,
        x_dst=dst,
        edge_attr=edge,
        edge_weight=edge_weight,
        groups=of.towers,
        min_variance=of.min_variance,
    )
    return add_scaled(own, aggregated, weights, of.factors)


def _compute(
    of: Scaled,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    edge: Tensor | None,
    edge_weight: Tensor | None,
    weights: Sequence[Tensor],
    *,
    keep: bool,
) -> tuple[Tensor, ...]:
    """The result; rows of destinations and sources; the update's maps; results of the aggregation."""
    num_own = of.towers * weights[0].shape[0]
    width = (matrix.shape[0] - num_own) // 2
    dst, src, own = F.linear(x, matrix, bias).split((width, width, num_own), 1)
    found = kernels.aggregate(
        of.adj,
        src,
        dst,
        edge,
        edge_weight,
        slots_of(tuple(of.names)),
        of.towers,
        of.min_variance,
        x.shape[0],
        keep=keep,
    )
    by_scale = _by_scale(weights, len(of.factors))
    return _add_products(own, found[0], by_scale, of.factors), dst, src, by_scale, *found


class _ScaledAggregation(torch.autograd.Function):
    """With G_k = s_k dY: dU_k = G_k^T O, dO = sum of G_k U_k; from dO, kernels and maps get the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        of: Scaled,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        edge: Tensor | None,
        edge_weight: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        out, *kept = _compute(of, x, matrix, bias, edge, edge_weight, weights, keep=True)
        ctx.of = of
        # Only second derivatives need these weights. Autograd does not save them, so that the caller may edit
        # them before the backward pass.
        ctx.weights = weights, versions_of(weights)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[2] else None, matrix, bias, edge, edge_weight, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_any_autocast_enabled():
            return (None, *without_autocast(_gradients, ctx, grad))
        return (None, *_gradients(ctx, grad))


_apply = direct(_ScaledAggregation)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, matrix, bias, edge, edge_weight, dst, src, by_scale, aggregated, mean, ties = ctx.saved_tensors
    of, needs = ctx.of, ctx.needs_input_grad[1:]
    if not is_first_derivative(grad):
        weights, versions = ctx.weights
        check_versions(weights, versions)
        inputs = (x, matrix, bias, edge, edge_weight, *weights)
        with torch.enable_grad():
            return tuple(unfused_gradients(lambda *given: _by_operators(of, *given), grad, inputs, needs))
    needs_x, needs_matrix, needs_bias, needs_edge, needs_edge_weight, *needed = needs
    (towers, rows, width), num_scales = by_scale.shape, len(of.factors)
    own = grad.unflatten(1, (towers, 1, -1))
    parts = []
    for factor in of.factors:
        parts.append(own if factor is None else own * factor.to(own.dtype).view(-1, 1, 1, 1))
    of_products = (parts[0] if num_scales == 1 else torch.cat(parts, 2)).flatten(2)  # (N, towers, rows)
    by_tower = aggregated.view(-1, towers, width)
    grad_by_scale = None
    if towers == 1:
        of_products, by_tower = of_products[:, 0], by_tower[:, 0]
        grad_aggregated = torch.mm(of_products, by_scale[0])
        if True in needed:
            grad_by_scale = torch.mm(of_products.t(), by_tower)
    else:
        of_products, by_tower = of_products.transpose(0, 1), by_tower.transpose(0, 1)
        grad_aggregated = torch.bmm(of_products, by_scale).transpose(0, 1).reshape(-1, towers * width)
        if True in needed:
            grad_by_scale = torch.bmm(of_products.transpose(1, 2), by_tower)
    grad_weights: Sequence[Tensor | None] = (None,) * towers
    if grad_by_scale is not None:
        by_weight = grad_by_scale.view(towers, num_scales, rows // num_scales, width).transpose(1, 2)
        grad_weights = by_weight.reshape(towers, rows // num_scales, num_scales * width).unbind()
    needs_rows = needs_x or needs_matrix or needs_bias
    grad_src, grad_dst, grad_edge, grad_edge_weight = kernels.gradients(
        of.adj,
        grad_aggregated,
        src,
        dst,
        edge,
        edge_weight,
        aggregated,
        mean,
        ties,
        slots_of(tuple(of.names)),
        towers,
        of.min_variance,
        x_src_wanted=needs_rows,
        x_dst_wanted=needs_rows,
        edge_wanted=needs_edge,
        weight_wanted=needs_edge_weight,
    )
    grad_x = grad_matrix = grad_bias = None
    if grad_src is not None and grad_dst is not None:
        of_rows = torch.cat((grad_dst, grad_src, grad), 1)
        grad_x = torch.mm(of_rows, matrix) if needs_x else None
        if needs_matrix:
            grad_matrix = weight_gradient(of_rows, x, x.dtype, True, 2, dst.shape[1])
        grad_bias = sum_of_rows(of_rows, grad.dtype, True) if needs_bias else None
    return grad_x, grad_matrix, grad_bias, grad_edge, grad_edge_weight, *grad_weights
