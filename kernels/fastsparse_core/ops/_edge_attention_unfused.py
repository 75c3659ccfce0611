"""Attention with edge features, one step after the other: differentiable any number of times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.structure.adjacency import Adjacency


def attention(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
) -> Tensor:
    """The operator with a projected row for every edge in memory; features (n, heads * D)."""
    q, k, v = (unfused.with_heads(x, heads) for x in (q, k, v))
    edges = _projected(adj, edge_attr, edge_weight, heads)
    dtype, row = accumulation_dtype(q.dtype), adj.row().long()
    of_edges = unfused._to_caller_order(adj, (q.to(dtype)[row] * edges.to(dtype)).sum(-1))
    score = unfused.dot_product_scores(adj, q, k, scale, bias) + scale * of_edges
    weight = unfused.dropped_weights(adj, score, dropout_p, seed)
    position = slice(None) if adj.edge_id is None else adj.edge_id.long()
    message = weight[position].to(dtype)[:, :, None] * edges.to(dtype)
    summed = message.new_zeros(adj.num_dst, *message.shape[1:]).index_add(0, row, message)
    return (unfused.weighted_sum(adj, weight, v).to(dtype) + summed).to(v.dtype).flatten(1)


def gatv2(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """GATv2 with a projected row for every edge in memory; features (n, heads * D)."""
    heads = att.size(0)
    score = gatv2_scores(adj, x_dst, x_src, att, edge_attr, edge_weight, negative_slope)
    return unfused.aggregate(adj, score, unfused.with_heads(x_src, heads), dropout_p, seed)


def dot_product_scores(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    bias: Tensor | None,
    scale: float,
    heads: int,
) -> Tensor:
    """Scores (num_values, heads) of every edge, without a row of heads * D for it."""
    q, k = (unfused.with_heads(x, heads) for x in (q, k))
    dtype, row = accumulation_dtype(q.dtype), adj.row().long()
    q_edge = torch.einsum("nhd,hda->anh", q.to(dtype), edge_weight.to(dtype).unflatten(0, (heads, -1)))
    features = edge_attr.to(dtype) if adj.edge_id is None else edge_attr.to(dtype)[adj.edge_id.long()]
    total = features.new_zeros(adj.num_edges, heads)
    for a in range(edge_attr.size(1)):
        total = total + q_edge[a][row] * features[:, a : a + 1]
    return unfused.dot_product_scores(adj, q, k, scale, bias) + scale * unfused._to_caller_order(adj, total)


def gatv2_scores(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    negative_slope: float,
) -> Tensor:
    """GATv2's scores (num_values, heads) of every edge."""
    heads, dtype = att.size(0), accumulation_dtype(x_dst.dtype)
    x_dst, x_src = (unfused.with_heads(x.to(dtype), heads) for x in (x_dst, x_src))
    edges = _projected(adj, edge_attr, edge_weight, heads).to(dtype)
    hidden = x_dst[adj.row().long()] + x_src[adj.col.long()] + edges
    score = (F.leaky_relu(hidden, negative_slope) * att.to(dtype)).sum(-1)
    return unfused._to_caller_order(adj, score)


def _projected(adj: Adjacency, edge_attr: Tensor, edge_weight: Tensor, heads: int) -> Tensor:
    """``W a_ij`` of every stored entry, (num_edges, heads, D)."""
    features = edge_attr if adj.edge_id is None else edge_attr[adj.edge_id.long()]
    return unfused.with_heads(F.linear(features, edge_weight), heads)
