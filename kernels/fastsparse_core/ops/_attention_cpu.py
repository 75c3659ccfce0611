"""Launches of attention on the CPU, from CSR: all kinds of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import queue
from fastsparse_core.ops._attention_call import GATV2, Call
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._edge_values import empty_values
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.structure.adjacency import Adjacency


def _laid_out(call: Call) -> Call:
    """The same as kernels read it: rows of unit stride, the rest contiguous."""
    kind, heads, dst, src, v, att, bias, scale, dropout_p, seed = call
    if not dst.stride(1) == src.stride(1) == v.stride(1) == 1:
        dst, src, v = unit_stride(dst), unit_stride(src), unit_stride(v)
    att = None if att is None else att.contiguous()
    bias = None if bias is None else bias.contiguous()
    return Call(kind, heads, dst, src, v, att, bias, scale, dropout_p, seed)


def _arguments(call: Call, adj: Adjacency, out: Tensor | None, lse: Tensor) -> _C.AttentionCsrArgs:
    kind, heads, dst, src, v, att, bias, scale, dropout_p, seed = call
    structure = adj.plans.get("csr")
    return _C.AttentionCsrArgs(
        used_csr(adj) if structure is None else structure,
        kind,
        heads,
        dst,
        src,
        v,
        att,
        bias,
        0 if bias is None else bias.dtype,
        scale,
        dropout_p,
        0 if seed is None else int(seed),
        out,
        lse,
    )


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor]:
    """Result, and log-sum-exp of every row and head."""
    call = _laid_out(call)
    v = call.v
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = v.new_empty(adj.num_dst, call.heads, dtype=accumulation_dtype(v.dtype))
    _C.attention_csr(_arguments(call, adj, out, lse), torch.get_num_threads())
    return out, lse


def backward(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, bias_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of dst, src, v (GATv2: in that of src), att and bias; the result is not read."""
    call, grad, lse = _laid_out(call), unit_stride(grad), lse.contiguous()
    kind, _, dst, src, v, att, bias, *_ = call
    grad_dst, grad_src = dst.new_empty(dst.shape), src.new_empty(src.shape)
    grad_v = v.new_empty(v.shape if kind != GATV2 else 0)
    grad_att = None if att is None else att.new_empty(att.shape)
    grad_bias = empty_values(adj, bias) if bias is not None and bias_wanted else None
    _C.attention_csr_backward(
        _arguments(call, adj, None, lse),
        used_csr(adj.t()),
        grad,
        grad_dst,
        grad_src,
        None if kind == GATV2 else grad_v,
        grad_att,
        grad_bias,
        queue(-1),
    )
    return grad_dst, grad_src, grad_v, grad_att, grad_bias
