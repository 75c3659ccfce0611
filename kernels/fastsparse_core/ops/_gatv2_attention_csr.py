"""GATv2 attention on CUDA: what the kernels are given, and when they cannot serve."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops import _additive_attention_csr as additive
from fastsparse_core.ops._attention_call import Call
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import contiguous_floats, scratch, unit_stride
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.structure.adjacency import Adjacency

#: Groups of lanes of the backward row pass: each keeps its own sum for the gradient of ``att``. About 8
#: slices for each, but enough groups to fill the GPU, and no more than balance the load.
_LEAST_GROUPS, _MOST_GROUPS = 8192, 32768
#: Most groups of a thread block: the number of groups is a multiple of it.
_GROUPS_PER_BLOCK = 32


def obstacle(dtype: torch.dtype, width: int, negative_slope: float, heads: int) -> str:
    """Why the kernels cannot serve features of a dtype and a width, that of all heads, "" if they can.

    They take the leaky ReLU as the greater of z and ``negative_slope`` z.
    """
    if not 0 <= negative_slope <= 1:
        return f"negative_slope={negative_slope}, not from 0 to 1, on CUDA"
    return additive.obstacle(dtype, width, heads)


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor]:
    r"""Softmax over :math:`\langle a, \operatorname{leaky\_relu}(x_i + z_j) \rangle`, times z.

    Args:
        adj: structure (num_dst, num_src) on a CUDA device.
        call: there is no :func:`obstacle`.

    Returns:
        Output (num_dst, heads * D) in the dtype of ``src``, and the log-sum-exp of the rows' scores, float32
        (num_dst, heads), -inf for rows without edges.
    """
    heads, x_src = call.heads, call.src
    out = x_src.new_empty(adj.num_dst, x_src.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float32, device=x_src.device)
    if adj.num_dst == 0:
        return out, lse
    call = _laid_out(call)
    slots = adj.row_split.num_slots
    _room, (partial, partial_state) = scratch(x_src.device, slots * x_src.size(1), slots * heads * 2)
    index = device_index(x_src.device)
    _C.gatv2_attention(
        used_csr(adj),
        _input(call),
        out.data_ptr(),
        lse.data_ptr(),
        partial,
        partial_state,
        index,
        queue(index),
    )
    return out, lse


def backward(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, bias_wanted: bool
) -> tuple[Tensor, Tensor, None, Tensor, None]:
    """Gradients of both ends' features, nothing, ``att`` (float32) and nothing."""
    assert out is not None
    call = _laid_out(call)
    _, heads, x_dst, x_src, _, att, *_ = call
    assert att is not None
    out, grad, lse = unit_stride(out), unit_stride(grad), lse.contiguous()
    width = x_src.size(1)
    grad_dst, grad_src = x_dst.new_empty(x_dst.shape), x_src.new_empty(x_src.shape)
    transposed = adj.t()
    if not torch.cuda.is_current_stream_capturing():
        adj.sort_slices()  # the gradient of att is summed in their order, which must not change later
    att_rows = att_rows_of(adj.row_split.slices.size(0))
    grad_att = att.new_empty(att_rows, width)
    slots, slots_t = adj.row_split.num_slots, transposed.row_split.num_slots
    _room, (row_state, partial_dst, partial_src) = scratch(
        x_src.device, adj.num_dst * heads * 2, slots * width, slots_t * width
    )
    index = device_index(x_src.device)
    _C.gatv2_attention_backward(
        used_csr(adj),
        used_csr(transposed),
        _input(call),
        out.data_ptr(),
        out.stride(0),
        grad.data_ptr(),
        grad.stride(0),
        lse.data_ptr(),
        grad_dst.data_ptr(),
        grad_src.data_ptr(),
        grad_att.data_ptr(),
        att_rows,
        row_state,
        partial_dst,
        partial_src,
        index,
        queue(index),
    )
    return grad_dst, grad_src, None, sum_of_rows(grad_att, att.dtype, True).reshape(att.shape), None


def att_rows_of(num_slices: int) -> int:
    groups = min(max(num_slices // 8, _LEAST_GROUPS), _MOST_GROUPS, max(num_slices, 1))
    return -(-groups // _GROUPS_PER_BLOCK) * _GROUPS_PER_BLOCK


def _laid_out(call: Call) -> Call:
    assert call.att is not None
    src = unit_stride(call.src)
    return call._replace(dst=unit_stride(call.dst), src=src, v=src, att=contiguous_floats(call.att))


def _input(call: Call) -> _C.Gatv2AttentionInput:
    _, heads, x_dst, x_src, _, att, _, negative_slope, dropout_p, _ = call
    assert att is not None
    return _C.Gatv2AttentionInput(
        DTYPE_CODE[x_src.dtype],
        heads,
        x_src.size(1) // heads,
        x_dst.data_ptr(),
        x_dst.stride(0),
        x_src.data_ptr(),
        x_src.stride(0),
        att.data_ptr(),
        negative_slope,
        dropout_p,
        call.drawn,
    )
