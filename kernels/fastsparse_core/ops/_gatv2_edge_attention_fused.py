"""GATv2 with edge features as PyTorch sees it: schema, gradients.

The edges' linear map stands inside the leaky ReLU, so the kernels compute :math:`W a_{ij}` and store nothing
of it. The backward pass keeps two numbers for every edge and head, and a bit per feature.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops import _edge_attention_fused as dot_product
from fastsparse_core.ops import _edge_attention_unfused as step_by_step
from fastsparse_core.ops import _registration as registration
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_attention_launch import (
    CPU_PARTS,
    edge_room,
    features_room,
    finish_features,
    kernel_input,
    load_step,
    padded,
    padded_edges,
    padded_weight,
    run_backward,
    run_forward,
    sign_bytes,
    unpadded,
)
from fastsparse_core.ops._gatv2_attention_csr import att_rows_of as att_rows
from fastsparse_core.ops._kept_results import alias_of, remember, unfused_gradients, was_written
from fastsparse_core.structure.adjacency import Adjacency, from_handle

#: Most features of an edge that the kernels of GATv2 take: more are projected to rows once.
MOST_GATV2_FEATURES = 32
#: Groups of lanes that add up GATv2's gradient of the edges' linear map: enough to fill a large GPU.
_WEIGHT_GROUPS = 4096


def obstacle(adj: Adjacency, x_src: Tensor, edge_attr: Tensor, negative_slope: float, heads: int) -> str:
    """Why the kernels cannot serve GATv2 with these edge features, of a slope from 0 to 1."""
    if edge_attr.size(1) > MOST_GATV2_FEATURES:
        return f"{edge_attr.size(1)} features of an edge, more than {MOST_GATV2_FEATURES}"
    if x_src.device.type != "cuda":
        return ""
    if not 0 <= negative_slope <= 1:
        return f"negative_slope={negative_slope}, not from 0 to 1, on CUDA"
    return dot_product.obstacle(adj, x_src, edge_attr, heads)


def _gatv2_edge_attention(
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
    adjacency: int,
) -> tuple[Tensor, Tensor]:
    adj, heads, width = from_handle(adjacency), att.size(0), x_src.size(1)
    x_dst, x_src, att, edge, weight = _gatv2_operands(x_dst, x_src, att, edge_attr, edge_weight)
    out = x_src.new_empty(adj.num_dst, x_src.size(1))
    lse = x_src.new_empty(adj.num_dst, heads, dtype=accumulation_dtype(x_src.dtype))
    arguments = kernel_input(
        heads, x_dst, x_src, x_src, None, edge, att, weight, None, negative_slope, dropout_p, seed
    )
    run_forward(adj, arguments, out, None, lse)
    return unpadded(out, heads, width), lse


def _gatv2_operands(
    x_dst: Tensor, x_src: Tensor, att: Tensor, edge_attr: Tensor, edge_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the kernels read; the linear map transposed, (A, heads * D), in the accumulation dtype."""
    heads, step = att.size(0), load_step(x_src)
    x_dst, x_src = padded(x_dst, heads, step), padded(x_src, heads, step)
    edge = padded_edges(edge_attr)
    weight = padded_weight(edge_weight, heads, x_src.size(1), edge.size(1))
    dtype = accumulation_dtype(x_src.dtype)
    att = F.pad(att.to(dtype), (0, x_src.size(1) // max(heads, 1) - att.size(1))).contiguous()
    return x_dst, x_src, att, edge, weight.to(dtype).t().contiguous()


def _gatv2_edge_attention_backward(
    grad: Tensor,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    out: Tensor,
    lse: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
    adjacency: int,
    edge_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    adj, heads, step, given = from_handle(adjacency), att.size(0), load_step(x_src), x_src.size(1)
    head_width = att.size(1)
    grad, out = padded(grad, heads, step), padded(out, heads, step)
    x_dst, x_src, att, edge, weight = _gatv2_operands(x_dst, x_src, att, edge_attr, edge_weight)
    width, signs = x_src.size(1), sign_bytes(x_src.size(1) // max(heads, 1))
    work = edge_room(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    positive = torch.empty(adj.num_values, heads, signs, dtype=torch.uint8, device=x_src.device)
    if x_src.is_cuda:
        if not torch.cuda.is_current_stream_capturing():
            adj.sort_slices()  # the gradient of att is summed in their order, which must not change later
        parts = (att_rows(adj.row_split.slices.size(0)), _WEIGHT_GROUPS)
    else:
        parts = (min(CPU_PARTS, max(adj.num_dst, 1)),) * 2
    grad_dst, grad_src = x_dst.new_empty(x_dst.shape), x_src.new_empty(x_src.shape)
    grad_att = torch.empty(parts[0], width, dtype=lse.dtype, device=x_src.device)
    grad_weight = features = None
    if weight_wanted:
        shape = (parts[1], edge.size(1), width)
        grad_weight = torch.empty(shape, dtype=lse.dtype, device=x_src.device)
    if edge_wanted:
        features = features_room(adj, x_src, heads, signs, edge.size(1))
    arguments = kernel_input(
        heads, x_dst, x_src, x_src, None, edge, att, weight, None, negative_slope, dropout_p, seed
    )
    grads = (grad_dst, grad_src, None, None)
    run_backward(
        adj,
        arguments,
        heads,
        out,
        grad,
        None,
        lse,
        work,
        positive,
        grads,
        features,
        grad_att,
        grad_weight,
        parts,
    )
    of_weight = edge_weight.new_empty(0)
    if grad_weight is not None:
        total = grad_weight.sum(0).t().unflatten(0, (heads, -1))
        of_weight = cast(total[:, :head_width, : edge_attr.size(1)].flatten(0, 1), edge_weight.dtype)
    return (
        unpadded(grad_dst, heads, given),
        unpadded(grad_src, heads, given),
        grad_att.sum(0).view(heads, -1)[:, :head_width],
        edge_attr.new_empty(0) if features is None else finish_features(features, edge_attr),
        of_weight,
    )


class _Gatv2EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, negative_slope, dropout_p, seed, adjacency = arguments
        out, lse = registration.run("gatv2_edge_attention", tensors[1], *arguments)
        remember(ctx, adjacency, lse, *tensors, alias_of(ctx, out), lse, seed)
        ctx.options = (negative_slope, dropout_p)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        *tensors, seed = ctx.saved_tensors
        slope, dropout_p = ctx.options
        if torch.is_grad_enabled():

            def compute(x_dst: Tensor, x_src: Tensor, att: Tensor, attr: Tensor, weight: Tensor) -> Tensor:
                operands = (x_dst, x_src, att, attr, weight)
                return step_by_step.gatv2(ctx.keep_alive, *operands, slope, dropout_p, seed)

            return *unfused_gradients(compute, grad, tensors[:5], ctx.needs_input_grad), *(None,) * 4
        if was_written(ctx):
            place = (slope, dropout_p, seed, ctx.adjacency)
            tensors[5] = registration.run("gatv2_edge_attention", grad, *tensors[:5], *place)[0]
        wanted = ctx.needs_input_grad[3:5]
        *grads, edge, weight = registration.differentiate(
            "gatv2_edge_attention_backward", grad, *tensors, *ctx.options, seed, ctx.adjacency, *wanted
        )
        return *grads, edge if wanted[0] else None, weight if wanted[1] else None, *(None,) * 4


def _fake(of: Any) -> tuple[Tensor, Tensor]:
    num_dst, x = of.x_dst.size(0), of.x_src
    lse = x.new_empty(num_dst, of.att.size(0), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(num_dst, x.size(1)), lse


def _backward_fake(of: Any) -> tuple[Tensor, ...]:
    return (
        of.x_dst.new_empty(of.x_dst.shape),
        of.x_src.new_empty(of.x_src.shape),
        of.att.new_empty(of.att.shape),
        of.edge_attr.new_empty(of.edge_attr.shape if of.edge_wanted else 0),
        of.edge_weight.new_empty(of.edge_weight.shape if of.weight_wanted else 0),
    )


registration.register(_gatv2_edge_attention, _fake, _Gatv2EdgeAttention)
registration.register(_gatv2_edge_attention_backward, _backward_fake)
