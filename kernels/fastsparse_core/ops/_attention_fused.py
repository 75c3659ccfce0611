"""The fused attention operators as PyTorch sees them: kernels of either device, gradients.

Nothing of the size of the edges is kept: the forward pass saves the log-sum-exp of every row and, where the
backward kernels read it, its result, and the backward pass recomputes the scores (FlashAttention-2, section
3). Second derivatives come from the unfused operators. ``lse`` and ``seed`` get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops import _attention_bsb, _attention_cpu, _gat_attention_csr
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._attention_call import ADDITIVE, DOT_PRODUCT, GATV2, Call
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._fused_registration import register_fused
from fastsparse_core.structure.adjacency import Adjacency


def plain_attention(adj: Adjacency, q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int) -> Tensor:
    """Dot-product attention in plain eager mode, without bias and dropout, of operands that were checked."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        result: Tensor = _Attention.apply(q, k, v, None, scale, 0.0, None, heads, adj.handle)[0]
        return result
    return dot_product(adj, q, k, v, None, scale, 0.0, None, heads)[0]


def plain_additive(adj: Adjacency, dst: Tensor, src: Tensor, v: Tensor, slope: float) -> Tensor:
    """The same of additive attention."""
    if torch.is_grad_enabled() and (dst.requires_grad or src.requires_grad or v.requires_grad):
        result: Tensor = _AdditiveAttention.apply(dst, src, v, None, slope, 0.0, None, adj.handle)[0]
        return result
    return additive(adj, dst, src, v, None, slope, 0.0, None)[0]


def plain_gatv2(adj: Adjacency, dst: Tensor, src: Tensor, att: Tensor, slope: float) -> Tensor:
    """The same of GATv2's."""
    if torch.is_grad_enabled() and (dst.requires_grad or src.requires_grad or att.requires_grad):
        result: Tensor = _Gatv2Attention.apply(dst, src, att, slope, 0.0, None, adj.handle)[0]
        return result
    return gatv2(adj, dst, src, att, slope, 0.0, None)[0]


# ---------------------------------------------------------------- dot product


def dot_product(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of the kernels of either device, nothing being checked or recorded."""
    launches = _attention_bsb if v.is_cuda else _attention_cpu
    return launches.forward(adj, Call(DOT_PRODUCT, heads, q, k, v, None, bias, scale, dropout_p, seed))


def dot_product_gradients(
    adj: Adjacency,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
    *,
    bias_wanted: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if wanted, the bias; the CPU's kernels do not read ``out``."""
    call = Call(DOT_PRODUCT, heads, q, k, v, None, bias, scale, dropout_p, seed)
    launches = _attention_bsb if v.is_cuda else _attention_cpu
    grad_q, grad_k, grad_v, _, grad_bias, *_ = launches.backward(adj, call, grad, out, lse, bias_wanted)
    return grad_q, grad_k, grad_v, grad_bias


# ---------------------------------------------------------------- additive


def additive(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    v: Tensor,
    bias: Tensor | None,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`dot_product` of additive attention."""
    operands = (score_dst.shape[1], score_dst, score_src, v, None, bias)
    launches = _gat_attention_csr if v.is_cuda else _attention_cpu
    return launches.forward(adj, Call(ADDITIVE, *operands, negative_slope, dropout_p, seed))


def additive_gradients(
    adj: Adjacency,
    grad: Tensor,
    score_dst: Tensor,
    score_src: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
    *,
    bias_wanted: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the scores, v and, if wanted, the bias."""
    operands = (score_dst.shape[1], score_dst, score_src, v, None, bias)
    call = Call(ADDITIVE, *operands, negative_slope, dropout_p, seed)
    launches = _gat_attention_csr if v.is_cuda else _attention_cpu
    grad_dst, grad_src, grad_v, _, grad_bias, *_ = launches.backward(adj, call, grad, None, lse, bias_wanted)
    return grad_dst, grad_src, grad_v, grad_bias


# ---------------------------------------------------------------- GATv2


def gatv2(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`dot_product` of GATv2's attention."""
    operands = (att.shape[0], x_dst, x_src, x_src, att, None)
    launches = _gat_attention_csr if x_src.is_cuda else _attention_cpu
    return launches.forward(adj, Call(GATV2, *operands, negative_slope, dropout_p, seed))


def gatv2_gradients(
    adj: Adjacency,
    grad: Tensor,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    out: Tensor | None,
    lse: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the features of both ends and of att; the CPU's kernels do not read ``out``."""
    operands = (att.shape[0], x_dst, x_src, x_src, att, None)
    call = Call(GATV2, *operands, negative_slope, dropout_p, seed)
    launches = _gat_attention_csr if x_src.is_cuda else _attention_cpu
    grad_dst, grad_src, _, grad_att, *_ = launches.backward(adj, call, grad, out, lse, False)
    return grad_dst, grad_src, grad_att


# ---------------------------------------------------------------- registration


def _fake(v: Tensor, num_dst: int, heads: int) -> tuple[Tensor, Tensor]:
    return v.new_empty(num_dst, v.size(1)), v.new_empty(num_dst, heads, dtype=accumulation_dtype(v.dtype))


def _dot_product_fake(of: Any) -> tuple[Tensor, Tensor]:
    out, lse = _fake(of.v, of.q.size(0), of.heads)
    return out, lse.double() if of.v.device.type == "cuda" else lse


_Attention = register_fused(
    "attention",
    dot_product,
    dot_product_gradients,
    unfused.dot_product,
    _dot_product_fake,
    ("out", "lse"),
    cpu_reads_out=False,
)
_AdditiveAttention = register_fused(
    "additive_attention",
    additive,
    additive_gradients,
    unfused.additive,
    lambda of: _fake(of.v, *of.score_dst.shape),
    ("out", "lse"),
)
_Gatv2Attention = register_fused(
    "gatv2_attention",
    gatv2,
    gatv2_gradients,
    unfused.gatv2,
    lambda of: _fake(of.x_src, of.x_dst.size(0), of.att.size(0)),
    ("out", "lse"),
    cpu_reads_out=False,
)
