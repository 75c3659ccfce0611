"""Unfused attention: scores, softmax and dropout of every edge are stored, then summed with the values.

It is used for calls that the fused operators do not support, and for calls that return the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import reference
from fastsparse_core.ops._attention_launch import ADDITIVE, GATV2
from fastsparse_core.ops._checks import check_heads
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._segment import reduce_op
from fastsparse_core.ops.edge_softmax import edge_softmax
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency

Edges = tuple[Tensor, Tensor] | None  # features (num_values, A) and their linear map (heads * D, A)


def dot_product_scores(
    adj: Adjacency, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, heads: int, edges: Edges = None
) -> Tensor:
    """``scale * <q_i, k_j + W a_ij> + bias`` of every edge, (num_values, heads) in the accumulation dtype.

    No tensor with heads * D numbers per edge is stored.
    """
    q, k = with_heads(q, heads), with_heads(k, heads)
    score = scale * _edge_products(adj, q, k)
    if edges is not None:
        dtype, row = accumulation_dtype(q.dtype), adj.row().long()
        edge_attr, edge_weight = (x.to(dtype) for x in edges)
        q_edge = torch.einsum("nhd,hda->anh", q.to(dtype), edge_weight.unflatten(0, (heads, -1)))
        features = edge_attr if adj.edge_id is None else edge_attr[adj.edge_id.long()]
        total = features.new_zeros(adj.num_edges, heads)
        for a in range(edge_attr.size(1)):
            total = total + q_edge[a][row] * features[:, a : a + 1]
        score = score + scale * _to_caller_order(adj, total)
    return _biased(score, bias)


def additive_scores(
    adj: Adjacency, score_dst: Tensor, score_src: Tensor, negative_slope: float, bias: Tensor | None
) -> Tensor:
    """``leaky_relu(score_dst_i + score_src_j + bias)`` of every edge, (num_values, heads)."""
    # A sum of two ends is a dot product of width 2: <(s_dst, 1), (1, s_src)>.
    dst = torch.stack([score_dst, torch.ones_like(score_dst)], 2)
    src = torch.stack([torch.ones_like(score_src), score_src], 2)
    return F.leaky_relu(_biased(_edge_products(adj, dst, src), bias), negative_slope)


def gatv2_scores(
    adj: Adjacency, x_dst: Tensor, x_src: Tensor, att: Tensor, negative_slope: float, edges: Edges = None
) -> Tensor:
    """``<att, leaky_relu(x_dst_i + x_src_j + W a_ij)>`` of every edge, (num_values, heads)."""
    heads, dtype = att.size(0), accumulation_dtype(x_dst.dtype)
    # Cast before the gather, so that its gradient is summed in full precision too.
    x_dst, x_src = (with_heads(x.to(dtype), heads) for x in (x_dst, x_src))
    hidden = x_dst[adj.row().long()] + x_src[adj.col.long()]
    if edges is not None:
        hidden = hidden + _projected(adj, edges, heads).to(dtype)
    score = (F.leaky_relu(hidden, negative_slope) * att.to(dtype)).sum(-1)
    return _to_caller_order(adj, score)


def attention(
    adj: Adjacency,
    dst: Tensor,
    src: Tensor,
    v: Tensor | None,
    att: Tensor | None,
    edge: Tensor | None,
    edge_weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    kind: int,
    heads: int,
    algorithm: str = "",
) -> Tensor:
    """Computes a call; the arguments are the fields of :class:`Call`.

    With edge features, a projected row per edge is stored.
    """
    edges = None if edge is None or edge_weight is None else (edge, edge_weight)
    if kind == GATV2:
        assert att is not None
        score, v = gatv2_scores(adj, dst, src, att, scale, edges), src
    elif kind == ADDITIVE:
        score = additive_scores(adj, dst, src, scale, bias)
    else:
        score = dot_product_scores(adj, dst, src, scale, bias, heads)
        if edges is not None and v is not None:
            return _dot_product_with_edges(adj, score, dst, v, edges, scale, dropout_p, seed, heads)
    assert v is not None
    weight = dropped_weights(adj, score, dropout_p, seed)
    return weighted_sum(adj, weight, with_heads(v, score.size(1))).flatten(1)


def _dot_product_with_edges(
    adj: Adjacency,
    score: Tensor,
    q: Tensor,
    v: Tensor,
    edges: tuple[Tensor, Tensor],
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
) -> Tensor:
    """Adds projected edge features to keys and values. ``score``: the scores without edge features."""
    dtype, row = accumulation_dtype(q.dtype), adj.row().long()
    projected = _projected(adj, edges, heads).to(dtype)
    of_edges = _to_caller_order(adj, (with_heads(q, heads).to(dtype)[row] * projected).sum(-1))
    weight = dropped_weights(adj, score + scale * of_edges, dropout_p, seed)
    position = slice(None) if adj.edge_id is None else adj.edge_id.long()
    message = (weight[position].to(dtype)[:, :, None] * projected).flatten(1)
    summed, _ = reduce_op(message, None, adj.rowptr, adj.num_dst, "sum")  # unlike index_add, in a fixed order
    return (weighted_sum(adj, weight, with_heads(v, heads)).flatten(1).to(dtype) + summed).to(v.dtype)


def dropped_weights(adj: Adjacency, score: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor:
    """Softmax of the scores over every row, after dropout: (num_values, heads)."""
    weight = edge_softmax(adj, score)
    if seed is not None:
        keep = reference.dropout_keep(adj, weight.size(1), dropout_p, seed)
        weight = weight * _to_caller_order(adj, keep.to(weight.dtype)) / (1 - dropout_p)
    elif dropout_p:  # in a recorded step, PyTorch's dropout draws a new mask in every replay
        weight = F.dropout(weight, dropout_p)
    return weight


def weighted_sum(adj: Adjacency, weight: Tensor, v: Tensor) -> Tensor:
    """Sum of the rows of ``v`` (num_src, heads, width) by weights (num_values, heads)."""
    return spmm(adj, v.flatten(1), weight).unflatten(1, v.shape[1:])


def with_heads(x: Tensor, heads: int) -> Tensor:
    """Reshapes features (n, heads * D) to (n, heads, D); returns three-dimensional features unchanged."""
    return x.unflatten(1, (heads, x.size(1) // max(heads, 1))) if x.dim() == 2 else x


def _projected(adj: Adjacency, edges: tuple[Tensor, Tensor], heads: int) -> Tensor:
    """``W a_ij`` of every stored entry, (num_edges, heads, D)."""
    features = edges[0] if adj.edge_id is None else edges[0][adj.edge_id.long()]
    return with_heads(F.linear(features, edges[1]), heads)


def _edge_products(adj: Adjacency, x_dst: Tensor, x_src: Tensor) -> Tensor:
    heads = x_dst.size(1)
    check_heads(heads, x_dst.device)
    dtype = accumulation_dtype(x_dst.dtype)
    # "csr" is requested because it computes products and gradients in float32, not in TF32 terms.
    arguments = (None, None, adj.num_values, heads, dtype, adj.handle, "csr", False)
    return torch.ops.fastsparse.sddmm.default(x_dst.flatten(1), x_src.flatten(1), *arguments)


def _biased(score: Tensor, bias: Tensor | None) -> Tensor:
    return score if bias is None else score + bias


def _to_caller_order(adj: Adjacency, entry: Tensor) -> Tensor:
    if adj.edge_id is None:
        return entry
    return entry.new_zeros(adj.num_values, entry.size(1)).index_copy(0, adj.edge_id.long(), entry)
