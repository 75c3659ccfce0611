r"""Dot-product attention with edge features as PyTorch sees it: schema, gradients.

With :math:`W_h` the rows of the edges' linear map that belong to head h,
:math:`\langle q_i, W_h a_{ij} \rangle = \langle W_h^\top q_i, a_{ij} \rangle` and
:math:`\sum_j w_{ij} W_h a_{ij} = W_h \sum_j w_{ij} a_{ij}`. Both products with :math:`W` have a row per node
and not one per edge. On CUDA :math:`\sum_j w_{ij} a_{ij}`, (num_dst, heads, A), is kept for the gradient of
:math:`W`. The backward pass keeps two numbers for every edge and head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.gpu import multiprocessors
from fastsparse_core.ops import _attention_cpu
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops import _gat_attention_csr as gat
from fastsparse_core.ops._attention_call import DOT_PRODUCT, Call
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_attention_launch import (
    features_workspace,
    finish_features,
    head_lanes,
    kernel_input,
    load_step,
    padded,
    padded_edges,
    padded_weight,
    run_backward,
    run_forward,
    unpadded,
)
from fastsparse_core.ops._edge_values import edge_workspace
from fastsparse_core.ops._facts import scatters
from fastsparse_core.ops._fused_registration import register_fused
from fastsparse_core.structure.adjacency import Adjacency

#: Most features of an edge that the lanes of a head have room for, 16 each.
MOST_FEATURES = 512
#: Parts of the rows for each multiprocessor, whose outer products are added apart: the blocks that it holds.
#: On an H200 542,080 rows of 16 heads in 16 bits take 0.25 ms, 0.31 with twice as many. And one's least rows.
_PARTS = 2
_PART_ROWS = 128


def unsupported_reason(adj: Adjacency, v: Tensor, edge_attr: Tensor, heads: int) -> str:
    """Why the kernels cannot serve dot products with these edge features, "" if they can.

    Args:
        adj: structure.
        v: (num_src, heads * D).
        edge_attr: (num_values, A).
        heads: number of heads.
    """
    if v.device.type != "cuda":
        return ""
    if edge_attr.size(1) > MOST_FEATURES:
        return f"{edge_attr.size(1)} features of an edge, more than {MOST_FEATURES}"
    if adj.num_values >= 2**32:
        return f"{adj.num_values} values, 2^32 or more"
    return gat.unsupported_reason(v.dtype, v.size(1), heads)


# ---------------------------------------------------------------- products with the edges' linear map


def _per_head(x: Tensor, heads: int) -> Tensor:
    """(n, heads * D) as (n, heads, D), a view."""
    return x.unflatten(1, (heads, x.size(1) // max(heads, 1)))


def _for_kernels(weight: Tensor, heads: int) -> Tensor:
    """(heads * D, A) as CUDA kernels read it: (A, chunks, heads, lanes, 16 bytes).

    A lane has eight features of a head, zeros behind its last, in chunks of 16 bytes. All lanes' first chunks
    lie together, then their second: what a warp reads at once is contiguous.
    """
    width = weight.size(0) // max(heads, 1)
    lanes = head_lanes(width, weight.size(1))
    per_head = weight.t().unflatten(1, (heads, width))
    if width < 8 * lanes:
        per_head = F.pad(per_head, (0, 8 * lanes - width))
    # Chunks of a lane are a whole head apart.
    chunked = per_head.unflatten(2, (-1, lanes, 16 // weight.element_size()))
    return chunked.permute(0, 2, 1, 3, 4).contiguous()


def _weight_gradient(x: Tensor, x_edge: Tensor, y: Tensor, y_edge: Tensor, heads: int) -> Tensor:
    """``sum_i x_i,h e_i,h^T + y_i,h f_i,h^T``: x, y (n, heads * D), e, f (n, heads, A), (heads * D, A)."""
    num_rows, width, edge_width = *x.shape, x_edge.size(2)
    if not edge_width:
        return x.new_empty(width, 0)
    if not num_rows:
        return x.new_zeros(width, edge_width)
    num_parts = min(_PARTS * multiprocessors(x.device), -(-num_rows // _PART_ROWS))
    partial = x.new_empty(num_parts, width, edge_width, dtype=torch.float32)
    _C.head_outer(x, y, x_edge, y_edge, heads, edge_width, partial, num_parts, *place_of(x.device))
    return partial.sum(0).to(x.dtype)


# ---------------------------------------------------------------- dot product


def _edge_attention(
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
    *,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if not v.is_cuda:
        call = Call(DOT_PRODUCT, heads, q, k, v, None, bias, scale, dropout_p, seed, edge_attr, edge_weight)
        return *_attention_cpu.forward(adj, call), v.new_empty(0)
    width, step = v.size(1), load_step(v)
    q, k, v = padded(q, heads, step), padded(k, heads, step), padded(v, heads, step)
    edge = padded_edges(edge_attr)
    weight = padded_weight(edge_weight, heads, v.size(1), edge.size(1))
    bias = None if bias is None else bias.contiguous()
    out = v.new_empty(adj.num_dst, v.size(1))
    out_edge = v.new_empty(adj.num_dst, heads, edge.size(1))
    lse = v.new_empty(adj.num_dst, heads, dtype=accumulation_dtype(v.dtype))
    of_kernel = _for_kernels(weight, heads)
    arguments = kernel_input(heads, q, k, v, edge, None, of_kernel, bias, scale, dropout_p, seed)
    run_forward(adj, arguments, out, out_edge, lse)
    return unpadded(out, heads, width), lse, out_edge


def _edge_attention_backward(
    adj: Adjacency,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    out_edge: Tensor,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
    *,
    algorithm: str,
    edge_attr_wanted: bool,
    edge_weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if out is None or not out.is_cuda:
        call = Call(DOT_PRODUCT, heads, q, k, v, None, bias, scale, dropout_p, seed, edge_attr, edge_weight)
        of = _attention_cpu.backward(
            adj, call, grad, None, lse, bias_wanted, edge_attr_wanted, edge_weight_wanted
        )
        return of.dst, of.src, of.v, of.edge, of.weight, of.bias
    width, step = v.size(1), load_step(v)
    q, k, v = padded(q, heads, step), padded(k, heads, step), padded(v, heads, step)
    grad, out = padded(grad, heads, step), padded(out, heads, step)
    edge = padded_edges(edge_attr)
    weight = padded_weight(edge_weight, heads, v.size(1), edge.size(1))
    bias = None if bias is None else bias.contiguous()
    of_kernel = _for_kernels(weight, heads)
    sums = None
    if v.numel() and scatters(adj, algorithm, v.dtype, None):  # the address of no numbers is that of no sums
        sums = torch.zeros(2, *v.shape, dtype=lse.dtype, device=v.device)
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(0), v.new_empty(0)
    else:
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    grad_q_edge = torch.empty_like(out_edge)
    work = edge_workspace(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    features = None
    if edge_attr_wanted:
        lanes = head_lanes(v.size(1) // heads, edge.size(1))
        features = features_workspace(adj, v, heads, lanes, edge.size(1))
    arguments = kernel_input(heads, q, k, v, edge, None, of_kernel, bias, scale, dropout_p, seed)
    grads = (grad_q, grad_k, grad_v, grad_q_edge)
    run_backward(adj, arguments, heads, out, grad, lse, work, None, grads, features, None, None, (0, 0), sums)
    if sums is not None:
        grad_k, grad_v = sums.to(v.dtype).unbind()
    grad_weight = _weight_gradient(q, grad_q_edge, grad, out_edge, heads)
    grad_weight = grad_weight.unflatten(0, (heads, -1))[:, : width // max(heads, 1), : edge_attr.size(1)]
    return (
        unpadded(grad_q, heads, width),
        unpadded(grad_k, heads, width),
        unpadded(grad_v, heads, width),
        None if features is None else finish_features(features, edge_attr),
        grad_weight.flatten(0, 1),
        cast(work[:, :, 1], bias.dtype) if bias is not None and bias_wanted else None,
    )


# ---------------------------------------------------------------- registration


def _fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    v, num_dst, edge_width = of.v, of.q.size(0), of.edge_attr.size(1)
    lse = v.new_empty(num_dst, of.heads, dtype=accumulation_dtype(v.dtype))
    out_edge = v.new_empty(num_dst, of.heads, -(-edge_width // 4) * 4) if v.is_cuda else v.new_empty(0)
    return v.new_empty(num_dst, v.size(1)), lse, out_edge


register_fused(
    "edge_attention",
    _edge_attention,
    _edge_attention_backward,
    unfused.dot_product_with_edges,
    _fake,
    ("out", "lse", "out_edge"),
    cpu_reads_out=False,
)
