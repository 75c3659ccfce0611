"""The fused attention operators as PyTorch sees them: kernels of either device, gradients.

Nothing of the size of the edges is kept: the forward pass saves the log-sum-exp of every row and, where the
backward kernels read it, its result, and the backward pass recomputes the scores (FlashAttention-2, section
3). Second derivatives come from the unfused operators. ``lse`` and ``seed`` get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops import _additive_attention_csr, _attention_bsb, _gatv2_attention_csr
from fastsparse_core.ops import _attention_cpu as on_cpu
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._kept_results import kept_result, remember, unfused_gradients, was_written
from fastsparse_core.ops._registration import differentiate, on_handle, register, run
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


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


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
    if v.is_cuda:
        return _attention_bsb.launch_forward(adj, q, k, v, bias, scale, dropout_p, _number(seed), heads)
    call = on_cpu.Call(on_cpu.DOT_PRODUCT, heads, q, k, v, None, bias, scale, dropout_p, seed)
    return on_cpu.forward(adj, call)


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
    if v.is_cuda:
        assert out is not None
        of_kernel = (scale, dropout_p, _number(seed), heads)
        return _attention_bsb.launch_backward(
            adj, q, k, v, bias, out, lse, grad, *of_kernel, want_bias=bias_wanted
        )
    call = on_cpu.Call(on_cpu.DOT_PRODUCT, heads, q, k, v, None, bias, scale, dropout_p, seed)
    grad_q, grad_k, grad_v, _, grad_bias = on_cpu.backward(adj, call, grad, lse, bias_wanted)
    return grad_q, grad_k, grad_v, grad_bias


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, scale, dropout_p, seed, heads, adjacency = arguments
        out, lse = run("attention", tensors[2], *arguments)
        remember(ctx, adjacency, lse, *tensors, kept_result(ctx, out), lse, seed)
        ctx.options = (scale, dropout_p)
        ctx.heads = heads
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        q, k, v, bias, out, lse, seed = ctx.saved_tensors
        scale, dropout_p = ctx.options
        if torch.is_grad_enabled():

            def compute(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
                q, k, v = (unfused.with_heads(x, ctx.heads) for x in (q, k, v))
                score = unfused.dot_product_scores(ctx.keep_alive, q, k, scale, bias)
                return unfused.aggregate(ctx.keep_alive, score, v, dropout_p, seed).flatten(1)

            return *unfused_gradients(compute, grad, (q, k, v, bias), ctx.needs_input_grad), *(None,) * 5
        if was_written(ctx):
            place = (ctx.heads, ctx.adjacency)
            out = run("attention", v, q, k, v, bias, scale, dropout_p, seed, *place)[0]
        bias_wanted = ctx.needs_input_grad[3]
        arguments = (q, k, v, bias, out, lse, *ctx.options, seed, ctx.heads, ctx.adjacency, bias_wanted)
        grad_q, grad_k, grad_v, grad_bias = differentiate("attention_backward", grad, *arguments)
        return grad_q, grad_k, grad_v, grad_bias if bias_wanted else None, *(None,) * 5


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
    heads, options = score_dst.shape[1], (negative_slope, dropout_p)
    if v.is_cuda:
        return _additive_attention_csr.additive_forward(
            adj, score_dst, score_src, v, bias, *options, _number(seed), heads
        )
    call = on_cpu.Call(on_cpu.ADDITIVE, heads, score_dst, score_src, v, None, bias, *options, seed)
    return on_cpu.forward(adj, call)


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
    heads, options = score_dst.shape[1], (negative_slope, dropout_p)
    if v.is_cuda:
        operands = (score_dst, score_src, v, bias, lse, grad)
        return _additive_attention_csr.additive_backward(
            adj, *operands, *options, _number(seed), heads, want_bias=bias_wanted
        )
    call = on_cpu.Call(on_cpu.ADDITIVE, heads, score_dst, score_src, v, None, bias, *options, seed)
    grad_dst, grad_src, grad_v, _, grad_bias = on_cpu.backward(adj, call, grad, lse, bias_wanted)
    return grad_dst, grad_src, grad_v, grad_bias


class _AdditiveAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, negative_slope, dropout_p, seed, adjacency = arguments
        out, lse = run("additive_attention", tensors[2], *arguments)
        remember(ctx, adjacency, lse, *tensors, lse, seed)
        ctx.options = (negative_slope, dropout_p)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        score_dst, score_src, v, bias, lse, seed = ctx.saved_tensors
        if torch.is_grad_enabled():
            negative_slope, dropout_p = ctx.options

            def compute(score_dst: Tensor, score_src: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
                score = unfused.additive_scores(ctx.keep_alive, score_dst, score_src, negative_slope, bias)
                v = unfused.with_heads(v, score.size(1))
                return unfused.aggregate(ctx.keep_alive, score, v, dropout_p, seed).flatten(1)

            inputs = (score_dst, score_src, v, bias)
            return *unfused_gradients(compute, grad, inputs, ctx.needs_input_grad), *(None,) * 4
        bias_wanted = ctx.needs_input_grad[3]
        arguments = (score_dst, score_src, v, bias, lse, *ctx.options, seed, ctx.adjacency, bias_wanted)
        grad_dst, grad_src, grad_v, grad_bias = differentiate("additive_attention_backward", grad, *arguments)
        return grad_dst, grad_src, grad_v, grad_bias if bias_wanted else None, *(None,) * 4


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
    heads, options = att.shape[0], (negative_slope, dropout_p)
    if x_src.is_cuda:
        return _gatv2_attention_csr.gatv2_forward(adj, x_dst, x_src, att, *options, _number(seed), heads)
    call = on_cpu.Call(on_cpu.GATV2, heads, x_dst, x_src, x_src, att, None, *options, seed)
    return on_cpu.forward(adj, call)


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
    heads, options = att.shape[0], (negative_slope, dropout_p)
    if x_src.is_cuda:
        assert out is not None
        operands = (x_dst, x_src, att, out, lse, grad)
        return _gatv2_attention_csr.gatv2_backward(adj, *operands, *options, _number(seed), heads)
    call = on_cpu.Call(on_cpu.GATV2, heads, x_dst, x_src, x_src, att, None, *options, seed)
    grad_dst, grad_src, _, grad_att, _ = on_cpu.backward(adj, call, grad, lse, False)
    assert grad_att is not None
    return grad_dst, grad_src, grad_att


class _Gatv2Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, negative_slope, dropout_p, seed, adjacency = arguments
        out, lse = run("gatv2_attention", tensors[1], *arguments)
        remember(ctx, adjacency, lse, *tensors, kept_result(ctx, out), lse, seed)
        ctx.options = (negative_slope, dropout_p)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x_dst, x_src, att, out, lse, seed = ctx.saved_tensors
        negative_slope, dropout_p = ctx.options
        if torch.is_grad_enabled():

            def compute(x_dst: Tensor, x_src: Tensor, att: Tensor) -> Tensor:
                x_dst, x_src = (unfused.with_heads(x, att.size(0)) for x in (x_dst, x_src))
                score = unfused.gatv2_scores(ctx.keep_alive, x_dst, x_src, att, negative_slope)
                return unfused.aggregate(ctx.keep_alive, score, x_src, dropout_p, seed).flatten(1)

            return *unfused_gradients(compute, grad, (x_dst, x_src, att), ctx.needs_input_grad), *(None,) * 4
        if was_written(ctx):
            arguments = (x_dst, x_src, att, negative_slope, dropout_p, seed, ctx.adjacency)
            out = run("gatv2_attention", x_src, *arguments)[0]
        grads = differentiate(
            "gatv2_attention_backward", grad, x_dst, x_src, att, out, lse, *ctx.options, seed, ctx.adjacency
        )
        return *grads, None, None, None, None


# ---------------------------------------------------------------- registration


def _fake(v: Tensor, num_dst: int, heads: int) -> tuple[Tensor, Tensor]:
    return v.new_empty(num_dst, v.size(1)), v.new_empty(num_dst, heads, dtype=accumulation_dtype(v.dtype))


def _attention_fake(of: Any) -> tuple[Tensor, Tensor]:
    out, lse = _fake(of.v, of.q.size(0), of.heads)
    return out, lse.double() if of.v.device.type == "cuda" else lse


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple([each.new_empty(each.shape) for each in tensors])


def _like_bias(of: Any) -> Tensor:
    return of.grad.new_empty(0) if of.bias is None or not of.bias_wanted else of.bias.new_empty(of.bias.shape)


register(on_handle(dot_product), _attention_fake, _Attention, "attention")
register(
    on_handle(dot_product_gradients),
    lambda of: (*_like(of.q, of.k, of.v), _like_bias(of)),
    name="attention_backward",
)
register(
    on_handle(additive),
    lambda of: _fake(of.v, *of.score_dst.shape),
    _AdditiveAttention,
    "additive_attention",
)
register(
    on_handle(additive_gradients),
    lambda of: (*_like(of.score_dst, of.score_src, of.v), _like_bias(of)),
    name="additive_attention_backward",
)
register(
    on_handle(gatv2),
    lambda of: _fake(of.x_src, of.x_dst.size(0), of.att.size(0)),
    _Gatv2Attention,
    "gatv2_attention",
)
register(
    on_handle(gatv2_gradients),
    lambda of: _like(of.x_dst, of.x_src, of.att),
    name="gatv2_attention_backward",
)
