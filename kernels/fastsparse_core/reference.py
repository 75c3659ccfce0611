"""The operators in plain torch and float64: what every kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core.adjacency import Adjacency


def _edges(adj: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and caller's position of every stored entry, int64."""
    position = torch.arange(adj.num_edges, device=adj.device) if adj.edge_id is None else adj.edge_id.long()
    return adj.row().long(), adj.col.long(), position


def _matrix(x: Tensor) -> Tensor:
    return x[:, None] if x.dim() == 1 else x.flatten(1)


def spmm(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None = None,
    reduce: str = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.spmm`: differentiable gather and scatter over the edges."""
    row, col, position = _edges(adj)
    features = _matrix(x.double())
    width = features.size(1)
    message = features[col]
    if value is not None:
        weight = _matrix(value.double())[position]
        heads = weight.size(1)
        message = message.reshape(len(col), heads, width // heads) * weight[:, :, None]
        message = message.reshape(len(col), width)
    if scale_src is not None:
        message = message * scale_src.double()[col, None]
    index = row[:, None].expand_as(message)
    out = features.new_zeros(adj.num_dst, width)
    name = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[reduce]
    out = out.scatter_reduce(0, index, message, name, include_self=False)
    if scale_dst is not None:
        out = out * scale_dst.double()[:, None]
    if bias is not None:
        out = out + bias.double()
    if relu:
        out = out.relu()
    return out.reshape(adj.num_dst, *x.shape[1:])


def sddmm(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.sddmm`, differentiable."""
    row, col, position = _edges(adj)
    product = (x_dst.double()[row] * x_src.double()[col]).sum(-1)
    for scale, index in ((scale_dst, row), (scale_src, col)):
        if scale is not None:
            weight = scale.double()[index]
            product = product * (weight if product.dim() == 1 else weight[:, None])
    out = product.new_zeros(adj.num_values, *product.shape[1:])
    return out.index_copy(0, position, product)
