"""GATv2 with edge features as PyTorch sees it: schema, gradients.

The edges' linear map stands inside the leaky ReLU, so the kernels compute :math:`W a_{ij}` and store nothing
of it. The backward pass keeps two numbers for every edge and head, on CUDA and a bit per feature.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops import _attention_cpu
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops import _edge_attention_fused as dot_product
from fastsparse_core.ops._attention_call import GATV2, Call
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_attention_launch import (
    features_workspace,
    finish_features,
    head_lanes,
    kernel_input,
    load_step,
    padded,
    padded_edges,
    padded_weight,
    run_backward,
    run_forward,
    unpadded,
)
from fastsparse_core.ops._edge_values import edge_workspace
from fastsparse_core.ops._fused_registration import register_fused
from fastsparse_core.ops._gat_attention_csr import att_rows_of as att_rows
from fastsparse_core.structure.adjacency import Adjacency

#: Most features of an edge that GATv2's kernels on CUDA take: more are projected to rows once.
MOST_GATV2_FEATURES = 32
#: Groups of lanes that add up GATv2's gradient of the edges' linear map: enough to fill a large GPU.
_WEIGHT_GROUPS = 4096


def unsupported_reason(
    adj: Adjacency, x_src: Tensor, edge_attr: Tensor, negative_slope: float, heads: int
) -> str:
    """Why the kernels cannot serve GATv2 with these edge features, of a slope from 0 to 1."""
    if x_src.device.type != "cuda":
        return ""
    if edge_attr.size(1) > MOST_GATV2_FEATURES:
        return f"{edge_attr.size(1)} features of an edge, more than {MOST_GATV2_FEATURES}"
    if not 0 <= negative_slope <= 1:
        return f"negative_slope={negative_slope}, not from 0 to 1, on CUDA"
    return dot_product.unsupported_reason(adj, x_src, edge_attr, heads)


def _gatv2_edge_attention(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    heads, width = att.size(0), x_src.size(1)
    if not x_src.is_cuda:
        operands = (heads, x_dst, x_src, x_src, att, None, negative_slope, dropout_p, seed)
        return _attention_cpu.forward(adj, Call(GATV2, *operands, edge_attr, edge_weight))
    x_dst, x_src, att, edge, weight = _gatv2_operands(x_dst, x_src, att, edge_attr, edge_weight)
    out = x_src.new_empty(adj.num_dst, x_src.size(1))
    lse = x_src.new_empty(adj.num_dst, heads, dtype=accumulation_dtype(x_src.dtype))
    arguments = kernel_input(
        heads, x_dst, x_src, x_src, edge, att, weight, None, negative_slope, dropout_p, seed
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
    adj: Adjacency,
    grad: Tensor,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    out: Tensor | None,
    lse: Tensor,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
    *,
    edge_attr_wanted: bool,
    edge_weight_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    if out is None or not out.is_cuda:
        operands = (att.size(0), x_dst, x_src, x_src, att, None, negative_slope, dropout_p, seed)
        call = Call(GATV2, *operands, edge_attr, edge_weight)
        of = _attention_cpu.backward(adj, call, grad, None, lse, False, edge_attr_wanted, edge_weight_wanted)
        return of.dst, of.src, of.att, of.edge, of.weight
    heads, step, given = att.size(0), load_step(x_src), x_src.size(1)
    head_width = att.size(1)
    grad, out = padded(grad, heads, step), padded(out, heads, step)
    x_dst, x_src, att, edge, weight = _gatv2_operands(x_dst, x_src, att, edge_attr, edge_weight)
    width, signs = x_src.size(1), head_lanes(x_src.size(1) // max(heads, 1))
    work = edge_workspace(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    positive = torch.empty(adj.num_values, heads, signs, dtype=torch.uint8, device=x_src.device)
    if not torch.cuda.is_current_stream_capturing():
        adj.sort_slices()  # the gradient of att is summed in their order, which must not change later
    parts = (att_rows(adj.row_split.slices.size(0)), _WEIGHT_GROUPS)
    grad_dst, grad_src = x_dst.new_empty(x_dst.shape), x_src.new_empty(x_src.shape)
    grad_att = torch.empty(parts[0], width, dtype=lse.dtype, device=x_src.device)
    grad_weight = features = None
    if edge_weight_wanted:
        shape = (parts[1], edge.size(1), width)
        grad_weight = torch.empty(shape, dtype=lse.dtype, device=x_src.device)
    if edge_attr_wanted:
        features = features_workspace(adj, x_src, heads, signs, edge.size(1))
    arguments = kernel_input(
        heads, x_dst, x_src, x_src, edge, att, weight, None, negative_slope, dropout_p, seed
    )
    grads = (grad_dst, grad_src, None, None)
    run_backward(
        adj,
        arguments,
        heads,
        out,
        grad,
        lse,
        work,
        positive,
        grads,
        features,
        grad_att,
        grad_weight,
        parts,
    )
    of_weight = None
    if grad_weight is not None:
        total = grad_weight.sum(0).t().unflatten(0, (heads, -1))
        of_weight = cast(total[:, :head_width, : edge_attr.size(1)].flatten(0, 1), edge_weight.dtype)
    return (
        unpadded(grad_dst, heads, given),
        unpadded(grad_src, heads, given),
        grad_att.sum(0).view(heads, -1)[:, :head_width],
        None if features is None else finish_features(features, edge_attr),
        of_weight,
    )


def _fake(of: Any) -> tuple[Tensor, Tensor]:
    num_dst, x = of.x_dst.size(0), of.x_src
    lse = x.new_empty(num_dst, of.att.size(0), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(num_dst, x.size(1)), lse


register_fused(
    "gatv2_edge_attention",
    _gatv2_edge_attention,
    _gatv2_edge_attention_backward,
    unfused.gatv2_with_edges,
    _fake,
    ("out", "lse"),
    cpu_reads_out=False,
)
