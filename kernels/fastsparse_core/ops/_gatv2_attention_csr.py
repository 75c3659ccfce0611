"""GATv2 attention on CUDA: what the kernels are given, and when they cannot serve."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops import _additive_attention_csr as additive
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import contiguous_floats, scratch, unit_stride
from fastsparse_core.structure.adjacency import Adjacency

#: Groups of lanes of the backward row pass: each keeps its own sum for the gradient of ``att``. About 8
#: slices for each, but enough groups to fill the GPU, and no more than balance the load.
_LEAST_GROUPS, _MOST_GROUPS = 8192, 32768
#: Most groups of a thread block: the number of groups is a multiple of it.
_GROUPS_PER_BLOCK = 32


def obstacle(x_src: Tensor, negative_slope: float, heads: int) -> str:
    """Why the kernels cannot serve this call, "" if they can.

    Args:
        x_src: (num_src, heads * D).
        negative_slope: of the leaky ReLU, which the kernels take as the greater of z and slope z.
        heads: number of heads.
    """
    return obstacle_of(x_src.dtype, x_src.size(1), negative_slope, heads)


def obstacle_of(dtype: torch.dtype, width: int, negative_slope: float, heads: int) -> str:
    """:func:`obstacle` of features of a dtype and a width, that of all heads."""
    if not 0 <= negative_slope <= 1:
        return f"negative_slope={negative_slope}, not from 0 to 1, on CUDA"
    return additive.obstacle_of(dtype, width, heads)


def gatv2_forward(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: int,
    heads: int,
) -> tuple[Tensor, Tensor]:
    r"""Softmax over :math:`\langle a, \operatorname{leaky\_relu}(x_i + z_j) \rangle`, times z.

    Args:
        adj: structure (num_dst, num_src) on a CUDA device.
        x_dst: :math:`x`, (num_dst, heads * D).
        x_src: :math:`z`, (num_src, heads * D), there is no :func:`obstacle`.
        att: :math:`a`, (heads, D).
        negative_slope: of the leaky ReLU.
        dropout_p: from 0 to below 1.
        seed: of the dropout mask.
        heads: number of heads.

    Returns:
        Output (num_dst, heads * D) in the dtype of ``x_src``, and the log-sum-exp of the rows' scores,
        float32 (num_dst, heads), -inf for rows without edges.
    """
    out = x_src.new_empty(adj.num_dst, x_src.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float32, device=x_src.device)
    if adj.num_dst == 0:
        return out, lse
    x_dst, x_src, att = unit_stride(x_dst), unit_stride(x_src), contiguous_floats(att)
    slots = adj.row_split.num_slots
    _room, (partial, partial_state) = scratch(x_src.device, slots * x_src.size(1), slots * heads * 2)
    index = device_index(x_src.device)
    _C.gatv2_attention(
        used_csr(adj),
        _input(x_dst, x_src, att, negative_slope, dropout_p, seed, heads),
        out.data_ptr(),
        lse.data_ptr(),
        partial,
        partial_state,
        index,
        queue(index),
    )
    return out, lse


def gatv2_backward(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`gatv2_forward`, which says what its arguments are.

    ``out`` and ``lse`` are its results, ``grad`` the gradient of the first, in the dtype of ``x_src``.

    Returns:
        Gradients of ``x_dst``, ``x_src`` (in their dtype) and ``att`` (float32).
    """
    device = x_src.device
    shape = att.shape
    x_dst, x_src, att = unit_stride(x_dst), unit_stride(x_src), contiguous_floats(att)
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
        device, adj.num_dst * heads * 2, slots * width, slots_t * width
    )
    index = device_index(device)
    _C.gatv2_attention_backward(
        used_csr(adj),
        used_csr(transposed),
        _input(x_dst, x_src, att, negative_slope, dropout_p, seed, heads),
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
    return grad_dst, grad_src, grad_att.sum(0).reshape(shape)


def att_rows_of(num_slices: int) -> int:
    groups = min(max(num_slices // 8, _LEAST_GROUPS), _MOST_GROUPS, max(num_slices, 1))
    return -(-groups // _GROUPS_PER_BLOCK) * _GROUPS_PER_BLOCK


def _input(
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: int,
    heads: int,
) -> _C.Gatv2AttentionInput:
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
        seed,
    )
