"""Dot-product attention on tensor cores: what the kernels are given, and when they cannot serve."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import place_of
from fastsparse_core.formats.bsb import HEIGHT, MOST_COLUMNS
from fastsparse_core.ops._attention_call import Call
from fastsparse_core.ops._edge_values import empty_values
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency

#: Widest head that a warp works on.
MAX_HEAD_WIDTH = 256
#: Most features of all heads: sums of slices are combined 128 at a time, by a grid of at most 65535 blocks.
MAX_WIDTH = 128 * 65_535
#: Bytes that one lane copies: rows and heads start at their multiples.
_PIECE = 16


def unsupported_reason(adj: Adjacency, dtype: torch.dtype, widths: Iterable[int], heads: int) -> str:
    """Why the kernels cannot serve a call or its backward pass, "" if they can.

    Args:
        adj: structure (num_dst, num_src).
        dtype: of the features.
        widths: of queries, keys and values, those of all heads; or one for all.
        heads: number of heads.
    """
    if dtype == torch.float64:
        return "float64 on CUDA"
    if heads == 0:
        return "no heads"
    if heads > MOST_HEADS:
        return f"{heads} heads, more than {MOST_HEADS}"
    # The backward pass reads the transposed structure.
    if max(adj.shape) > MOST_COLUMNS:
        return f"more than {MOST_COLUMNS} nodes"
    for of_all in widths:
        width = of_all // heads
        if not 0 < width <= MAX_HEAD_WIDTH:
            return f"heads of width {width}, not 1 to {MAX_HEAD_WIDTH}"
        if width * dtype.itemsize % _PIECE:
            return f"heads of {width * dtype.itemsize} bytes, not a multiple of {_PIECE}"
        if of_all > MAX_WIDTH:
            return f"{of_all} features of all heads, more than {MAX_WIDTH}"
    return ""


def has_blocks(adj: Adjacency, *, backward: bool) -> bool:
    """Builds the blocks that a call reads, its backward pass included, where memory allows.

    Args:
        adj: structure of the call.
        backward: whether gradients are wanted, which need those of the transposed structure.
    """
    return adj.try_bsb() and (not backward or adj.t().try_bsb())


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor]:
    r"""Softmax over :math:`s \langle \mathbf{q}_i, \mathbf{k}_j \rangle + b_{ij}`, times v, for every head.

    Args:
        adj: structure (num_dst, num_src) on a CUDA device.
        call: of float32, float16 or bfloat16 features, where there is no :func:`unsupported_reason`.

    Returns:
        Output (num_dst, heads * Dv) in the dtype of ``v``, and for the backward pass the log-sum-exp of the
        rows' scores in powers of two (divided by log 2, so that nothing is lost between the passes), float64
        (num_dst, heads), -inf for rows without edges. Rounded to float32 it would be off by 5e-4 for scores
        of 1e4, and with it all weights of the row.
    """
    heads, v = call.heads, call.v
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float64, device=v.device)
    if adj.num_dst == 0:
        return out, lse
    call = _laid_out(call)
    rows = adj.bsb_split.num_slots * HEIGHT
    partial = torch.empty(rows, v.size(1), dtype=torch.float32, device=v.device)
    partial_state = partial.new_empty(rows, heads, 2)
    _C.attention_bsb(
        adj.bsb_structure(valued=call.bias is not None),
        _input(call),
        out,
        lse,
        partial,
        partial_state,
        *place_of(v.device),
    )
    return out, lse


def backward(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    """Gradients of queries, keys, values, nothing, and, if wanted, the bias, from results of :func:`forward`.

    That of the bias is the only one of the size of the edges.
    """
    assert out is not None
    call, grad = _laid_out(call), aligned(grad)
    _, heads, q, k, v, _, bias, *_ = call
    out, lse = out.contiguous(), lse.contiguous()
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    grad_bias = empty_values(adj, bias) if bias is not None and bias_wanted else None
    transposed = adj.t()
    rows, rows_t = adj.bsb_split.num_slots * HEIGHT, transposed.bsb_split.num_slots * HEIGHT
    # Log-sum-exp and <grad, out>; in float32 also what the first leaves of a float64, and padding.
    numbers = 4 if v.dtype == torch.float32 else 2
    row_state = torch.empty(adj.num_dst, heads, numbers, dtype=torch.float32, device=v.device)
    partial_q = row_state.new_empty(rows, q.size(1))
    partial_k, partial_v = row_state.new_empty(rows_t, k.size(1)), row_state.new_empty(rows_t, v.size(1))
    _C.attention_bsb_backward(
        adj.bsb_structure(valued=bias is not None),
        transposed.bsb_structure(valued=bias is not None),
        _input(call),
        out,
        lse,
        grad,
        grad_q,
        grad_k,
        grad_v,
        grad_bias,
        row_state,
        partial_q,
        partial_k,
        partial_v,
        *place_of(v.device),
    )
    return grad_q, grad_k, grad_v, None, grad_bias


def aligned(x: Tensor) -> Tensor:
    """Rows that start at multiples of 16 bytes; copied where they do not. The widths are such multiples."""
    x = unit_stride(x)
    if x.data_ptr() % _PIECE or x.stride(0) * x.element_size() % _PIECE:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _laid_out(call: Call) -> Call:
    bias = None if call.bias is None else call.bias.contiguous()
    return call._replace(dst=aligned(call.dst), src=aligned(call.src), v=aligned(call.v), bias=bias)


def _input(call: Call) -> _C.AttentionBsbInput:
    _, heads, q, k, v, _, bias, scale, dropout_p, *_ = call
    return _C.AttentionBsbInput(
        heads,
        q,
        k,
        v,
        bias,
        0 if bias is None else bias.dtype,
        scale,
        dropout_p,
        call.drawn,
        policy.allows_tf32(),
    )
