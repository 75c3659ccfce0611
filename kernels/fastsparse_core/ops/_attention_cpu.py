"""Launches of attention on the CPU, from CSR: all kinds of scores, edges with and without features."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import queue
from fastsparse_core.ops._attention_call import GATV2, Call
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_values import edge_workspace, empty_values
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.structure.adjacency import Adjacency


def _laid_out(call: Call) -> Call:
    """The same as kernels read it: rows of unit stride, the rest contiguous."""
    kind, heads, dst, src, v, att, bias, scale, dropout_p, seed, edge, weight = call
    if not dst.stride(1) == src.stride(1) == v.stride(1) == 1:
        dst, src, v = unit_stride(dst), unit_stride(src), unit_stride(v)
    att = None if att is None else att.contiguous()
    bias = None if bias is None else bias.contiguous()
    if edge is not None and weight is not None:
        edge, weight = (unit_stride(edge), unit_stride(weight)) if edge.size(1) else (None, None)
    return Call(kind, heads, dst, src, v, att, bias, scale, dropout_p, seed, edge, weight)


def _arguments(call: Call, adj: Adjacency, out: Tensor | None, lse: Tensor) -> _C.AttentionCsrArgs:
    kind, heads, dst, src, v, att, bias, scale, dropout_p, _, edge, weight = call
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
        edge,
        weight,
        scale,
        dropout_p,
        call.drawn,
        out,
        lse,
    )


class Gradients(NamedTuple):
    """Gradients of what a call was given; GATv2: that of v is in that of src."""

    dst: Tensor
    src: Tensor
    v: Tensor
    att: Tensor | None
    bias: Tensor | None
    edge: Tensor | None
    weight: Tensor | None


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor]:
    """Result, and log-sum-exp of every row and head."""
    call = _laid_out(call)
    v = call.v
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = v.new_empty(adj.num_dst, call.heads, dtype=accumulation_dtype(v.dtype))
    _C.attention_csr(_arguments(call, adj, out, lse), torch.get_num_threads())
    return out, lse


def backward(
    adj: Adjacency,
    call: Call,
    grad: Tensor,
    out: Tensor | None,
    lse: Tensor,
    bias_wanted: bool,
    edge_wanted: bool = False,
    weight_wanted: bool = False,
) -> Gradients:
    """All gradients, those that are not wanted None; the result is not read."""
    given, grad, lse = call, unit_stride(grad), lse.contiguous()
    call = _laid_out(call)
    kind, heads, dst, src, v, att, bias, *_, edge, weight = call
    grad_dst, grad_src = dst.new_empty(dst.shape), src.new_empty(src.shape)
    grad_v = v.new_empty(v.shape if kind != GATV2 else 0)
    grad_att = None if att is None else att.new_empty(att.shape)
    work = None
    if edge is not None or bias is not None:
        work = edge_workspace(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    grad_edge = empty_values(adj, edge) if edge is not None and edge_wanted else None
    grad_weight = weight.new_empty(weight.shape) if weight is not None and weight_wanted else None
    _C.attention_csr_backward(
        _arguments(call, adj, None, lse),
        used_csr(adj.t()),
        grad,
        grad_dst,
        grad_src,
        None if kind == GATV2 else grad_v,
        grad_att,
        work,
        grad_edge,
        grad_weight,
        queue(-1),
    )
    grad_bias = None
    if bias is not None and bias_wanted and work is not None:
        grad_bias = cast(work[:, :, 1].contiguous(), bias.dtype)
    if edge is None and given.edge is not None and given.weight is not None:  # features of width 0
        grad_edge, grad_weight = torch.empty_like(given.edge), torch.empty_like(given.weight)
    return Gradients(grad_dst, grad_src, grad_v, grad_att, grad_bias, grad_edge, grad_weight)
