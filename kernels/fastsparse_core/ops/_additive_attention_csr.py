"""Additive (GAT) attention on CUDA: what the kernels are given, and when they cannot serve."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.ops._attention_call import Call
from fastsparse_core.ops._edge_values import empty_values
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import contiguous_floats, scratch, unit_stride
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency

#: Widest head that the lanes of a warp hold, 8 features each.
MAX_HEAD_WIDTH = 256
#: Most features of all heads: the grid that adds partial results takes 32 at a time.
MAX_WIDTH = 32 * 65_535


def obstacle(dtype: torch.dtype, width: int, heads: int) -> str:
    """Why the kernels cannot serve values of a dtype and a width, that of all heads, "" if they can."""
    if dtype == torch.float64:
        return "float64 on CUDA"
    if heads == 0 or not 0 < width // heads <= MAX_HEAD_WIDTH:
        return f"heads of width {width // max(heads, 1)}, not 1 to {MAX_HEAD_WIDTH}"
    if heads > MOST_HEADS:
        return f"{heads} heads, more than {MOST_HEADS}"
    if width > MAX_WIDTH:
        return f"{width} features of all heads, more than {MAX_WIDTH}"
    return ""


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor]:
    r"""Softmax over :math:`\operatorname{leaky\_relu}(a_i + c_j + b_{ij})`, times v.

    Args:
        adj: structure (num_dst, num_src) on a CUDA device.
        call: there is no :func:`obstacle`.

    Returns:
        Output (num_dst, heads * D) in the dtype of ``v``, and the log-sum-exp of the rows' scores, float32
        (num_dst, heads), -inf for rows without edges.
    """
    heads, v = call.heads, call.v
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float32, device=v.device)
    if adj.num_dst == 0:
        return out, lse
    call = _laid_out(call)
    slots = adj.row_split.num_slots
    _room, (partial, partial_state) = scratch(v.device, slots * v.size(1), slots * heads * 2)
    _C.additive_attention(used_csr(adj), _input(call), out, lse, partial, partial_state, *place_of(v.device))
    return out, lse


def backward(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    """Gradients of the scores (float32), values, nothing, and, if wanted, the bias; ``out`` is not read."""
    call, grad, lse = _laid_out(call), unit_stride(grad), lse.contiguous()
    _, heads, score_dst, score_src, v, _, bias, *_ = call
    grad_dst, grad_src = torch.empty_like(score_dst), torch.empty_like(score_src)
    grad_v = v.new_empty(v.shape)
    grad_bias = empty_values(adj, bias) if bias is not None and bias_wanted else None
    transposed = adj.t()
    slots, slots_t = adj.row_split.num_slots, transposed.row_split.num_slots
    _room, (row_state, partial_row, partial_v, partial_score) = scratch(
        v.device, adj.num_dst * heads * 4, slots * heads * 4, slots_t * v.size(1), slots_t * heads
    )
    _C.additive_attention_backward(
        used_csr(adj),
        used_csr(transposed),
        _input(call),
        grad,
        lse,
        grad_dst,
        grad_src,
        grad_v,
        grad_bias,
        row_state,
        partial_row,
        partial_v,
        partial_score,
        *place_of(v.device),
    )
    return grad_dst, grad_src, grad_v, None, grad_bias


def _laid_out(call: Call) -> Call:
    bias = None if call.bias is None else call.bias.contiguous()
    dst, src = contiguous_floats(call.dst), contiguous_floats(call.src)
    return call._replace(dst=dst, src=src, v=unit_stride(call.v), bias=bias)


def _input(call: Call) -> _C.AdditiveAttentionInput:
    _, heads, score_dst, score_src, v, _, bias, negative_slope, dropout_p, _ = call
    return _C.AdditiveAttentionInput(
        v.dtype,
        heads,
        v.size(1) // heads,
        score_dst,
        score_src,
        v,
        bias,
        0 if bias is None else bias.dtype,
        negative_slope,
        dropout_p,
        call.drawn,
    )
