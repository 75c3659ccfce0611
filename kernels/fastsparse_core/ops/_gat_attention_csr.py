"""Attention of GAT and GATv2 on CUDA: what the kernels are given, and when they cannot serve."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.ops._attention_call import GATV2, Call
from fastsparse_core.ops._edge_values import empty_values
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import contiguous_floats, scratch, unit_stride
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency

#: Widest head that the lanes of a warp hold, 8 features each.
MAX_HEAD_WIDTH = 256
#: Most features of all heads: the grid that adds partial results takes 32 at a time.
MAX_WIDTH = 32 * 65_535
#: Groups of lanes of the backward row pass: each keeps its own sum for the gradient of ``att``. About 8
#: slices for each, but enough groups to fill the GPU, and no more than balance the load.
_LEAST_GROUPS, _MOST_GROUPS = 8192, 32768
#: Most groups of a thread block: the number of groups is a multiple of it.
_GROUPS_PER_BLOCK = 32


def unsupported_reason(dtype: torch.dtype, width: int, heads: int) -> str:
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


def gatv2_unsupported_reason(dtype: torch.dtype, width: int, negative_slope: float, heads: int) -> str:
    """The same of GATv2's.

    They take the leaky ReLU as the greater of z and ``negative_slope`` z.
    """
    if not 0 <= negative_slope <= 1:
        return f"negative_slope={negative_slope}, not from 0 to 1, on CUDA"
    return unsupported_reason(dtype, width, heads)


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor]:
    r"""Softmax over the scores, times v.

    Of GAT :math:`\operatorname{leaky\_relu}(a_i + c_j + b_{ij})`, of GATv2
    :math:`\langle a, \operatorname{leaky\_relu}(x_i + z_j) \rangle`.

    Args:
        adj: structure (num_dst, num_src) on a CUDA device.
        call: the call is supported.

    Returns:
        Output (num_dst, heads * D) in the dtype of ``v``, and the log-sum-exp of the rows' scores, float32
        (num_dst, heads), -inf for rows without edges.
    """
    heads, v = call.heads, call.v
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float32, device=v.device)
    if adj.num_dst == 0:
        return out, lse
    slots = adj.row_split.num_slots
    _workspace, (partial, state) = scratch(v.device, slots * v.size(1), slots * heads * 2)
    results = (out, lse, partial, state, *place_of(v.device))
    call = _laid_out(call)
    if call.kind == GATV2:
        _C.gatv2_attention(used_csr(adj), _gatv2_input(call), *results)
    else:
        _C.additive_attention(used_csr(adj), _input(call), *results)
    return out, lse


def backward(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of both ends, the values (GATv2: None), ``att`` (float32) and, if wanted, the bias.

    GAT's do not read ``out``.
    """
    call, grad, lse = _laid_out(call), unit_stride(grad), lse.contiguous()
    if call.kind == GATV2:
        assert out is not None
        return _gatv2_backward(adj, call, grad, unit_stride(out), lse)
    return _backward(adj, call, grad, lse, bias_wanted)


def _backward(
    adj: Adjacency, call: Call, grad: Tensor, lse: Tensor, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    _, heads, score_dst, score_src, v, _, bias, *_ = call
    grad_dst, grad_src = torch.empty_like(score_dst), torch.empty_like(score_src)
    grad_v = v.new_empty(v.shape)
    grad_bias = empty_values(adj, bias) if bias is not None and bias_wanted else None
    transposed = adj.t()
    slots, slots_t = adj.row_split.num_slots, transposed.row_split.num_slots
    _workspace, (row_state, partial_row, partial_v, partial_score) = scratch(
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


def _gatv2_backward(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, None, Tensor, None]:
    _, heads, x_dst, x_src, _, att, *_ = call
    assert att is not None
    width = x_src.size(1)
    grad_dst, grad_src = x_dst.new_empty(x_dst.shape), x_src.new_empty(x_src.shape)
    transposed = adj.t()
    if not torch.cuda.is_current_stream_capturing():
        adj.sort_slices()  # the gradient of att is summed in their order, which must not change later
    att_rows = att_rows_of(adj.row_split.slices.size(0))
    grad_att = att.new_empty(att_rows, width)
    slots, slots_t = adj.row_split.num_slots, transposed.row_split.num_slots
    _workspace, (row_state, partial_dst, partial_src) = scratch(
        x_src.device, adj.num_dst * heads * 2, slots * width, slots_t * width
    )
    _C.gatv2_attention_backward(
        used_csr(adj),
        used_csr(transposed),
        _gatv2_input(call),
        out,
        grad,
        lse,
        grad_dst,
        grad_src,
        grad_att,
        att_rows,
        row_state,
        partial_dst,
        partial_src,
        *place_of(x_src.device),
    )
    return grad_dst, grad_src, None, sum_of_rows(grad_att, att.dtype, True).reshape(att.shape), None


def att_rows_of(num_slices: int) -> int:
    groups = min(max(num_slices // 8, _LEAST_GROUPS), _MOST_GROUPS, max(num_slices, 1))
    return -(-groups // _GROUPS_PER_BLOCK) * _GROUPS_PER_BLOCK


def _laid_out(call: Call) -> Call:
    if call.kind == GATV2:
        assert call.att is not None
        src = unit_stride(call.src)
        return call._replace(dst=unit_stride(call.dst), src=src, v=src, att=contiguous_floats(call.att))
    bias = None if call.bias is None else call.bias.contiguous()
    dst, src = contiguous_floats(call.dst), contiguous_floats(call.src)
    return call._replace(dst=dst, src=src, v=unit_stride(call.v), bias=bias)


def _input(call: Call) -> _C.AdditiveAttentionInput:
    _, heads, score_dst, score_src, v, _, bias, negative_slope, dropout_p, *_ = call
    return _C.AdditiveAttentionInput(
        heads,
        score_dst,
        score_src,
        v,
        bias,
        0 if bias is None else bias.dtype,
        negative_slope,
        dropout_p,
        call.drawn,
    )


def _gatv2_input(call: Call) -> _C.Gatv2AttentionInput:
    _, heads, x_dst, x_src, _, att, _, negative_slope, dropout_p, *_ = call
    assert att is not None
    return _C.Gatv2AttentionInput(heads, x_dst, x_src, att, negative_slope, dropout_p, call.drawn)
