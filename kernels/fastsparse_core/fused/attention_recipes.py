"""GAT, GATv2 and the graph transformer after their linear maps: results and attention weights.

A call that returns the weights, multiplies them by a factor, or drops all of them (p = 1) stores the weight
of every edge. All other calls run one operator. `gat` and `gatv2` return the weights after dropout, which
they use in the sum; `transformer` returns the weights before dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops import (
    additive_attention,
    additive_attention_weights,
    attention,
    attention_weights,
    edge_softmax,
    gatv2_attention,
    gatv2_attention_weights,
    sddmm,
    spmm,
)
from fastsparse_core.ops._attention_launch import default_scale
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.incidence import edge_ends


def gat(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    value: Tensor,
    slope: float,
    edge_scores: Tensor | None = None,
    *,
    p: float = 0.0,
    drop: Callable[[Tensor], Tensor] | None = None,
    factor: Tensor | None = None,
    wants_weights: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""GAT's attention, from values and scores.

    .. math::
        \mathbf{y}_i = \sum_j \alpha_{ij} \mathbf{v}_j, \qquad \alpha_{ij} = \mathrm{softmax}_j(
        \mathrm{LeakyReLU}(s_i + t_j + e_{ij}))

    Args:
        adj: structure.
        score_dst: s, (num_dst, H).
        score_src: t, (num_src, H).
        value: v, (num_src, H * D).
        slope: slope of the leaky ReLU.
        edge_scores: e, (num_values, H); None: 0.
        p: probability with which a weight is dropped.
        drop: function that drops weights, if all weights are stored; None: dropout with `p`.
        factor: (num_values, 1) or (1, 1), multiplies the weights after dropout.
        wants_weights: whether to return the weights.
        dtype: dtype of the weights; None: that of the operator.

    Returns:
        (num_dst, H * D), and the weights (num_values, H) after dropout and factor; None if not stored.
    """
    alpha = None
    if wants_weights or factor is not None or p >= 1:
        alpha = additive_attention_weights(adj, score_dst, score_src, slope, edge_scores)
        alpha = _dropped(alpha, p, drop, dtype)
        if factor is not None:
            alpha = alpha * factor
        if p or factor is not None:
            return spmm(adj, value, alpha), alpha
    return additive_attention(adj, score_dst, score_src, value, slope, edge_scores, p), alpha


def gatv2(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    slope: float,
    *,
    edges: tuple[Tensor, Tensor] | None = None,
    edge_rows: Tensor | None = None,
    p: float = 0.0,
    drop: Callable[[Tensor], Tensor] | None = None,
    wants_weights: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""GATv2's attention, from projected features.

    .. math::
        \mathbf{y}_i = \sum_j \alpha_{ij} \mathbf{x}_j, \qquad \alpha_{ij} = \mathrm{softmax}_j(
        \mathbf{a}^{\top} \mathrm{LeakyReLU}(\mathbf{x}_i + \mathbf{x}_j + \mathbf{e}_{ij}))

    Args:
        adj: structure.
        x_dst: features of the destinations, (num_dst, H * D).
        x_src: features of the sources, (num_src, H * D).
        att: a, (H, D).
        slope: slope of the leaky ReLU.
        edges: features (num_values, A) and the weight (H * D, A) whose product is e.
        edge_rows: e itself, (num_values, H * D), if the caller has it.
        p: probability with which a weight is dropped.
        drop: function that drops weights, if all weights are stored; None: dropout with `p`.
        wants_weights: whether to return the weights.
        dtype: dtype of the weights; None: that of the operator.

    Returns:
        (num_dst, H * D), and the weights (num_values, H) after dropout; None if not stored.
    """
    of_edges: Any = {} if edges is None else {"edge_attr": edges[0], "edge_weight": edges[1]}
    alpha = None
    if edge_rows is not None:
        src, dst = edge_ends(adj)
        total = x_dst.index_select(0, dst) + x_src.index_select(0, src) + edge_rows
        score = (F.leaky_relu(total, slope).view(-1, *att.shape) * att).sum(dim=-1)
        alpha = _dropped(edge_softmax(adj, score), p, drop, dtype)
    elif wants_weights or p >= 1:
        alpha = _dropped(gatv2_attention_weights(adj, x_dst, x_src, att, slope, **of_edges), p, drop, dtype)
    if alpha is not None and (p or edge_rows is not None):
        return spmm(adj, x_src, alpha), alpha
    return gatv2_attention(adj, x_dst, x_src, att, slope, p, **of_edges), alpha


def transformer(
    adj: Adjacency,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    *,
    edges: tuple[Tensor, Tensor] | None = None,
    edge_rows: Tensor | None = None,
    p: float = 0.0,
    ends: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Scaled dot-product attention; edge features are added to keys and values.

    .. math::
        \mathbf{y}_i = \sum_j \alpha_{ij} (\mathbf{v}_j + \mathbf{e}_{ij}), \qquad \alpha_{ij} =
        \mathrm{softmax}_j(\mathbf{q}_i^{\top} (\mathbf{k}_j + \mathbf{e}_{ij}) / \sqrt{D})

    Args:
        adj: structure.
        query: (num_dst, H * D).
        key: (num_src, H * D).
        value: (num_src, H * D).
        heads: H.
        edges: features (num_values, A) and the weight (H * D, A) whose product is e.
        edge_rows: e itself, (num_values, H * D), if the caller has it.
        p: probability with which a weight is dropped.
        ends: queries and keys for the returned weights; None: no weights are returned.

    Returns:
        (num_dst, H * D), and the weights (num_values, H) before dropout; None without ``ends``.
    """
    of_edges: Any = {} if edges is None else {"edge_attr": edges[0], "edge_weight": edges[1]}

    def weights(query: Tensor, key: Tensor) -> Tensor:
        bias = None
        if edge_rows is not None:
            of_heads = (-1, heads, query.size(1) // heads)
            bias = sddmm(adj.incidence(), query.view(of_heads), edge_rows.view(of_heads))
            bias = bias * default_scale(of_heads[2])
        return attention_weights(adj, query, key, bias=bias, heads=heads, **of_edges)

    alpha = None if ends is None else weights(*ends)
    if edge_rows is None and not (alpha is not None and p):
        return attention(adj, query, key, value, None, None, p, heads=heads, **of_edges), alpha
    used = F.dropout(alpha if alpha is not None and p else weights(query, key), p)
    out = spmm(adj, value, used)
    if edge_rows is None and edges is not None:
        edge_rows = F.linear(*edges)
    return out if edge_rows is None else out + spmm(adj.incidence(), edge_rows, used), alpha


def _dropped(
    alpha: Tensor, p: float, drop: Callable[[Tensor], Tensor] | None, dtype: torch.dtype | None
) -> Tensor:
    alpha = alpha if dtype is None else alpha.to(dtype)
    return F.dropout(alpha, p) if drop is None else drop(alpha)
