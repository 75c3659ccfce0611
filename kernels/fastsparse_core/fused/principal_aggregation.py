"""What PNA layers share in both plugins: linear maps of towers at the nodes, and scaled aggregations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastsparse_core.fused.bias import linear
from fastsparse_core.fused.linear_before_sum import linear_before_sum


def node_parts(
    x: Tensor,
    of_dst: Sequence[Tensor],
    of_src: Sequence[Tensor],
    of_own: Sequence[Tensor],
    message_bias: Tensor | None,
    own_bias: Tensor | None,
    shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The parts of the linear maps of all towers that read features of nodes, in one product.

    A message :math:`\mathbf{P} \mathbf{x}_i + \mathbf{Q} \mathbf{x}_j + \mathbf{R} \mathbf{e}_{ij} +
    \mathbf{b}` of an edge is a sum of rows of its ends, of which there are as many as nodes.

    Args:
        x: (N, F).
        of_dst: :math:`\mathbf{P}` of every tower, (width, F), or (width, F / towers) unless ``shared``.
        of_src: :math:`\mathbf{Q}` likewise.
        of_own: what the update multiplies the node's own features by, likewise.
        message_bias: :math:`\mathbf{b}`, (towers * width,).
        own_bias: of the update, (towers * out width,).
        shared: whether every tower reads all features, and not its own part of them.

    Returns:
        Rows of the destinations, of the sources and of the update, (N, towers * width of the tower's part).
    """
    # A product for every tower that has features of its own: zeros beside the blocks of one block-diagonal
    # matrix would carry NaN from tower to tower.
    count = 1 if shared else len(of_dst)
    groups = of_dst, of_src, of_own
    sizes = [sum(map(len, weights)) // count for weights in groups]
    biases: Sequence[Tensor | None] = [None] * count
    if message_bias is not None or own_bias is not None:
        of_groups = [
            x.new_zeros(count, size, dtype=of_dst[0].dtype) if part is None else part.view(count, size)
            for part, size in zip((message_bias, None, own_bias), sizes, strict=True)
        ]
        biases = torch.cat(of_groups, 1).unbind()
    found = []
    for nth, (features, bias) in enumerate(zip(x.chunk(count, 1), biases, strict=True)):
        weight = torch.cat(
            [each for weights in groups for each in (weights if shared else weights[nth : nth + 1])]
        )
        found.append(linear_before_sum(features, weight, bias, 2, sizes[0]).split(sizes, dim=1))
    dst, src, own = found[0] if count == 1 else (torch.cat(each, 1) for each in zip(*found, strict=True))
    return dst, src, own


def add_scaled(
    own: Tensor, aggregated: Tensor, weights: Sequence[Tensor], factors: Sequence[Tensor | None]
) -> Tensor:
    r"""Adds the product of scaled aggregations with the update's linear maps.

    .. math::
        \mathbf{y}_i + \mathbf{U} \, [s_{i1} \mathbf{o}_i \Vert \dots \Vert s_{iK} \mathbf{o}_i] =
        \mathbf{y}_i + \sum_k s_{ik} \mathbf{U}_k \mathbf{o}_i

    so that scaled aggregations are never written out: a product of K times the output's width, scaled.

    Args:
        own: :math:`\mathbf{y}`, (N, towers * out width).
        aggregated: :math:`\mathbf{o}`, (N, towers * width), tower by tower.
        weights: :math:`\mathbf{U}` of every tower, (out width, K * width).
        factors: :math:`s_k`, (N,) each; None: 1.
    """
    towers, num_scales, out_width = len(weights), len(factors), weights[0].size(0)
    per_scale = [
        weight.unflatten(1, (num_scales, -1)).transpose(0, 1).flatten(0, 1) for weight in weights
    ]  # (K * out width, width)
    if towers == 1:
        parts = linear(aggregated, per_scale[0], None).unflatten(1, (num_scales, out_width)).unbind(1)
    else:
        by_tower = aggregated.unflatten(1, (towers, -1)).transpose(0, 1)
        products = torch.bmm(by_tower, torch.stack(per_scale).transpose(1, 2))  # (towers, N, K * out width)
        parts = products.transpose(0, 1).unflatten(2, (num_scales, out_width)).unbind(2)
        own = own.unflatten(1, (towers, out_width))
    for factor, part in zip(factors, parts, strict=True):
        if factor is None:
            own = own + part
        else:
            own = torch.addcmul(own, part, factor.to(part.dtype).view(-1, *(1,) * (part.dim() - 1)))
    return own if towers == 1 else own.flatten(1)
