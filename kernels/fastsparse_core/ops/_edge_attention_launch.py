"""Attention with edge features on CUDA: what the kernels are given, launches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_values import edge_workspace
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import scratch, unit_stride
from fastsparse_core.structure.adjacency import Adjacency

# ---------------------------------------------------------------- padding


def load_step(x: Tensor) -> int:
    """Features that one load takes: widths of heads are multiples of it."""
    return 16 // x.itemsize


def padded(x: Tensor, heads: int, step: int) -> Tensor:
    """(n, heads * D) with zeros behind every head up to a multiple of `step`, rows that loads can take."""
    width = x.size(1) // max(heads, 1)
    if width % step:
        return F.pad(x.unflatten(1, (heads, width)), (0, -width % step)).flatten(1)
    x = unit_stride(x)
    aligned = x.stride(0) % step == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def padded_edges(edge_attr: Tensor) -> Tensor:
    """(num_values, A) contiguous, A a multiple of 4."""
    if edge_attr.size(1) % 4:
        return F.pad(edge_attr, (0, -edge_attr.size(1) % 4))
    edge_attr = edge_attr.contiguous()
    return edge_attr.clone() if edge_attr.data_ptr() % 16 else edge_attr


def padded_weight(weight: Tensor, heads: int, width: int, edge_width: int) -> Tensor:
    """(heads * D, A) contiguous, for padded heads and edges."""
    missing = edge_width - weight.size(1)
    per_head = weight.unflatten(0, (heads, -1))
    behind = width // heads - per_head.size(1)
    if missing or behind:
        per_head = F.pad(per_head, (0, missing, 0, behind))
    return per_head.flatten(0, 1).contiguous()


def unpadded(x: Tensor, heads: int, width: int) -> Tensor:
    """(n, heads * D) of padded heads, `width` features for all heads; not a view, which none may write to."""
    if x.size(1) == width:
        return x
    narrow = x.unflatten(1, (heads, -1))[:, :, : width // heads].flatten(1)
    return narrow.clone() if narrow._is_view() else narrow


def head_lanes(head_width: int, edge_width: int = 0) -> int:
    """Lanes of a head, as the kernels have them: 8 features each, and of an edge's own 16; a power of two.

    GATv2's, whose edges' features are each lane's, also hold a byte of signs each: a bit for every feature.

    Args:
        head_width: features of a head.
        edge_width: of an edge, with dot products.
    """
    lanes = 1
    while lanes * 8 < head_width or lanes * 16 < edge_width:
        lanes *= 2
    return lanes


# ---------------------------------------------------------------- launches


def kernel_input(
    heads: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edge: Tensor,
    att: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> _C.EdgeAttentionInput:
    return _C.EdgeAttentionInput(
        att is not None,
        heads,
        q,
        k,
        v,
        edge,
        att,
        weight,
        bias,
        k.dtype if bias is None else bias.dtype,
        scale,
        dropout_p,
        0 if seed is None else int(seed),
    )


def run_forward(
    adj: Adjacency, arguments: _C.EdgeAttentionInput, out: Tensor, out_edge: Tensor | None, lse: Tensor
) -> None:
    index, slots, heads = device_index(out.device), adj.row_split.num_slots, lse.size(1)
    edges = 0 if out_edge is None else out_edge.size(2)
    _workspace, (partial, partial_edge, partial_state) = scratch(
        out.device, slots * out.size(1), slots * heads * edges, slots * heads * 2
    )
    _C.edge_attention(
        used_csr(adj),
        arguments,
        out,
        out_edge,
        lse,
        partial,
        partial_edge,
        partial_state,
        index,
        queue(index),
    )


def run_backward(
    adj: Adjacency,
    arguments: _C.EdgeAttentionInput,
    heads: int,
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    work: Tensor,
    positive: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    features: Tensor | None,
    grad_att: Tensor | None,
    grad_weight: Tensor | None,
    parts: tuple[int, int],
    sums: Tensor | None = None,
) -> None:
    grad_q, grad_k, grad_v, grad_q_edge = grads
    # With sums of the sources' gradients the transpose is not read.
    transposed, index = adj if sums is not None else adj.t(), device_index(out.device)
    slots = adj.row_split.num_slots
    slots_t = 0 if sums is not None else transposed.row_split.num_slots
    width = out.size(1)
    edges = 0 if grad_q_edge is None else heads * grad_q_edge.size(2)
    _workspace, (partial_q, partial_q_edge, partial_k, partial_v) = scratch(
        out.device, slots * width, slots * edges, slots_t * width, 0 if grad_v is None else slots_t * width
    )
    _C.edge_attention_backward(
        used_csr(adj),
        used_csr(transposed),
        arguments,
        out,
        grad,
        lse,
        work,
        positive,
        0 if positive is None else positive.size(2),
        adj.num_values,
        grad_q,
        grad_k,
        grad_v,
        grad_q_edge,
        features,
        grad_att,
        grad_weight,
        parts[0],
        parts[1],
        partial_q,
        partial_q_edge,
        partial_k,
        partial_v,
        None if sums is None else sums[0],
        None if sums is None else sums[1],
        index,
        queue(index),
    )


def features_workspace(adj: Adjacency, like: Tensor, heads: int, lanes: int, edge_width: int) -> Tensor:
    """Room for gradients of the edges' features: a part for every group of heads, (parts, num_values, A)."""
    per_group = 1
    while per_group < heads and per_group * lanes < 32:
        per_group *= 2
    parts = -(-heads // per_group)
    # Of one part nothing is to be added up.
    dtype = like.dtype if parts == 1 else accumulation_dtype(like.dtype)
    return edge_workspace(adj, parts, adj.num_values, edge_width, dtype=dtype)


def finish_features(features: Tensor, like: Tensor) -> Tensor:
    total = features[0] if features.size(0) == 1 else features.sum(0)
    return cast(total[:, : like.size(1)], like.dtype)
