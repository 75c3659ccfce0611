r"""Attention with edge features as PyTorch sees it: schemas, launches on both devices, gradients.

Dot products: with :math:`W_h` the rows of the edges' linear map that belong to head h,
:math:`\langle q_i, W_h a_{ij} \rangle = \langle W_h^\top q_i, a_{ij} \rangle` and
:math:`\sum_j w_{ij} W_h a_{ij} = W_h \sum_j w_{ij} a_{ij}`. Both products with :math:`W` have a row per node
and not one per edge; CUDA kernels compute them themselves, the CPU's are given them.
:math:`\sum_j w_{ij} a_{ij}`, (num_dst, heads, A), is kept for the gradient of :math:`W`. GATv2's linear map
stands inside the leaky ReLU, so its kernels compute :math:`W a_{ij}` and store nothing of it. The backward
pass keeps two numbers for every edge and head (GATv2: and a bit per feature).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops import _additive_attention_csr as additive
from fastsparse_core.ops import _edge_attention_unfused as step_by_step
from fastsparse_core.ops import _registration as registration
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    accumulation_dtype,
    address,
    cast,
    is_plain_eager,
    multiprocessors,
    scratch,
    unit_stride,
)
from fastsparse_core.ops._facts import scatters, used_csr
from fastsparse_core.ops._gatv2_attention_csr import att_rows_of as att_rows
from fastsparse_core.ops._kept_results import alias_of, remember, unfused_gradients, was_written
from fastsparse_core.structure.adjacency import Adjacency, from_handle

#: Most features of an edge that the kernels of GATv2 take: more are projected to rows once.
MOST_GATV2_FEATURES = 32
#: Most features of an edge that the lanes of a head have room for, 16 each.
MOST_FEATURES = 512
#: Groups of rows whose sums over entries are kept apart, on the CPU.
_CPU_PARTS = 64
#: Groups of lanes that add up GATv2's gradient of the edges' linear map: enough to fill a large GPU.
_WEIGHT_GROUPS = 4096
#: Parts of the rows for each multiprocessor, and the least rows of one, whose outer products are added apart.
_PARTS = 8
_PART_ROWS = 256


def obstacle(adj: Adjacency, v: Tensor, edge_attr: Tensor, heads: int) -> str:
    """Why the kernels cannot serve dot products with these edge features, "" if they can.

    Args:
        adj: structure.
        v: (num_src, heads * D).
        edge_attr: (num_values, A).
        heads: number of heads.
    """
    if v.device.type != "cuda":
        return ""
    if edge_attr.size(1) > MOST_FEATURES:
        return f"{edge_attr.size(1)} features of an edge, more than {MOST_FEATURES}"
    if adj.num_values >= 2**32:
        return f"{adj.num_values} values, 2^32 or more"
    return additive.obstacle(v, heads)


def gatv2_obstacle(
    adj: Adjacency, x_src: Tensor, edge_attr: Tensor, negative_slope: float, heads: int
) -> str:
    """The same for GATv2, whose slope has to be from 0 to 1 as without edge features."""
    if edge_attr.size(1) > MOST_GATV2_FEATURES:
        return f"{edge_attr.size(1)} features of an edge, more than {MOST_GATV2_FEATURES}"
    if x_src.device.type != "cuda":
        return ""
    if not 0 <= negative_slope <= 1:
        return f"negative_slope={negative_slope}, not from 0 to 1, on CUDA"
    return obstacle(adj, x_src, edge_attr, heads)


# ---------------------------------------------------------------- products with the edges' linear map


def _per_head(x: Tensor, heads: int) -> Tensor:
    """(n, heads * D) as (n, heads, D), a view."""
    return x.unflatten(1, (heads, x.size(1) // max(heads, 1)))


def _to_edge_width(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    """``W_h^T x_i`` of every head: (n, heads * D) to (n, heads, A). CUDA kernels compute it themselves."""
    out = x.new_empty(x.size(0), heads, weight.size(1))
    if not out.numel():
        return out
    per_head = weight.view(heads, -1, weight.size(1))
    torch.bmm(_per_head(x, heads).transpose(0, 1), per_head, out=out.transpose(0, 1))
    return out


def _add_from_edge_width(out: Tensor, e: Tensor, weight: Tensor, heads: int) -> None:
    """``out_i += W_h e_i`` of every head: e (n, heads, A), out (n, heads * D) contiguous. Likewise."""
    if not e.numel():
        return
    per_head = weight.view(heads, -1, weight.size(1)).transpose(1, 2)
    _per_head(out, heads).transpose(0, 1).baddbmm_(e.transpose(0, 1), per_head)


def _weight_gradient(x: Tensor, x_edge: Tensor, y: Tensor, y_edge: Tensor, heads: int) -> Tensor:
    """``sum_i x_i,h e_i,h^T + y_i,h f_i,h^T``: x, y (n, heads * D), e, f (n, heads, A), (heads * D, A)."""
    num_rows, width, edge_width = *x.shape, x_edge.size(2)
    if not edge_width:
        return x.new_empty(width, 0)
    if x.is_cuda and num_rows:
        index = device_index(x.device)
        num_parts = min(_PARTS * multiprocessors(x.device), -(-num_rows // _PART_ROWS))
        partial = x.new_empty(num_parts, width, edge_width, dtype=torch.float32)
        features = (x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
        sizes = (num_rows, heads, width // heads, edge_width)
        place = (partial.data_ptr(), num_parts, DTYPE_CODE[x.dtype], index, queue(index))
        _C.head_outer(*features, x_edge.data_ptr(), y_edge.data_ptr(), *sizes, *place)
        return partial.sum(0).to(x.dtype)

    def product(x: Tensor, e: Tensor) -> Tensor:
        return torch.matmul(_per_head(x, heads).permute(1, 2, 0), e.transpose(0, 1)).flatten(0, 1)

    return product(x, x_edge) + product(y, y_edge)


# ---------------------------------------------------------------- padding


def _step(x: Tensor) -> int:
    """Features that one load takes: widths of heads are multiples of it on CUDA."""
    return 16 // x.itemsize if x.is_cuda else 1


def _padded(x: Tensor, heads: int, step: int) -> Tensor:
    """(n, heads * D) with zeros behind every head up to a multiple of `step`, rows that loads can take."""
    width = x.size(1) // max(heads, 1)
    if width % step:
        return F.pad(x.unflatten(1, (heads, width)), (0, -width % step)).flatten(1)
    x = unit_stride(x)
    aligned = step == 1 or (x.stride(0) % step == 0 and x.data_ptr() % 16 == 0)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _padded_edges(edge_attr: Tensor) -> Tensor:
    """(num_values, A) contiguous; on CUDA A is a multiple of 4."""
    step = 4 if edge_attr.is_cuda else 1
    if edge_attr.size(1) % step:
        return F.pad(edge_attr, (0, -edge_attr.size(1) % step))
    edge_attr = edge_attr.contiguous()
    return edge_attr.clone() if step > 1 and edge_attr.data_ptr() % 16 else edge_attr


def _padded_weight(weight: Tensor, heads: int, width: int, edge_width: int) -> Tensor:
    """(heads * D, A) contiguous, for padded heads and edges."""
    missing = edge_width - weight.size(1)
    per_head = weight.unflatten(0, (heads, -1))
    behind = width // heads - per_head.size(1)
    if missing or behind:
        per_head = F.pad(per_head, (0, missing, 0, behind))
    return per_head.flatten(0, 1).contiguous()


def _unpadded(x: Tensor, heads: int, width: int) -> Tensor:
    """(n, heads * D) of padded heads, `width` features for all heads; not a view, which none may write to."""
    if x.size(1) == width:
        return x
    narrow = x.unflatten(1, (heads, -1))[:, :, : width // heads].flatten(1)
    return narrow.clone() if narrow._is_view() else narrow


def _edge_room(adj: Adjacency, *shape: int, dtype: torch.dtype) -> Tensor:
    """Room for numbers of every value; zeros where not every value has an entry that was written."""
    every = adj.num_values == adj.num_edges and not adj.is_padded
    return (torch.empty if every else torch.zeros)(shape, dtype=dtype, device=adj.device)


def _sign_bytes(head_width: int) -> int:
    lanes = 1
    while lanes * 8 < head_width:
        lanes *= 2
    return lanes


# ---------------------------------------------------------------- launches


def _input(
    heads: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_edge: Tensor | None,
    edge: Tensor,
    att: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> _C.EdgeAttentionInput:
    return _C.EdgeAttentionInput(
        att is not None,
        DTYPE_CODE[k.dtype],
        heads,
        k.size(1) // max(heads, 1),
        edge.size(1),
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        address(q_edge),
        edge.data_ptr(),
        address(att),
        address(weight),
        address(bias),
        DTYPE_CODE[k.dtype if bias is None else bias.dtype],
        scale,
        dropout_p,
        0 if seed is None else int(seed),
    )


def _run_forward(
    adj: Adjacency, arguments: _C.EdgeAttentionInput, out: Tensor, out_edge: Tensor | None, lse: Tensor
) -> None:
    index, slots, heads = device_index(out.device), 0, lse.size(1)
    if out.is_cuda:
        slots = adj.row_split.num_slots
    edges = 0 if out_edge is None else out_edge.size(2)
    _room, (partial, partial_edge, partial_state) = scratch(
        out.device, slots * out.size(1), slots * heads * edges, slots * heads * 2
    )
    _C.edge_attention(
        used_csr(adj),
        arguments,
        out.data_ptr(),
        address(out_edge),
        lse.data_ptr(),
        partial,
        partial_edge,
        partial_state,
        index,
        queue(index),
    )


def _run_backward(
    adj: Adjacency,
    arguments: _C.EdgeAttentionInput,
    heads: int,
    out: Tensor,
    grad: Tensor,
    grad_edge: Tensor | None,
    lse: Tensor,
    work: Tensor,
    positive: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    features: Tensor | None,
    grad_att: Tensor | None,
    grad_weight: Tensor | None,
    parts: tuple[int, int],
    sums: Tensor | None = None,
) -> None:
    grad_q, grad_k, grad_v, grad_q_edge = grads
    # With sums of the sources' gradients the transpose is not read.
    transposed, index = adj if sums is not None else adj.t(), device_index(out.device)
    slots = slots_t = 0
    if out.is_cuda:
        slots = adj.row_split.num_slots
        slots_t = 0 if sums is not None else transposed.row_split.num_slots
    width = out.size(1)
    edges = 0 if grad_q_edge is None else heads * grad_q_edge.size(2)
    _room, (partial_q, partial_q_edge, partial_k, partial_v) = scratch(
        out.device, slots * width, slots * edges, slots_t * width, 0 if grad_v is None else slots_t * width
    )
    _C.edge_attention_backward(
        used_csr(adj),
        used_csr(transposed),
        arguments,
        out.data_ptr(),
        out.stride(0),
        grad.data_ptr(),
        grad.stride(0),
        address(grad_edge),
        lse.data_ptr(),
        work.data_ptr(),
        address(positive),
        0 if positive is None else positive.size(2),
        adj.num_values,
        grad_q.data_ptr(),
        grad_k.data_ptr(),
        address(grad_v),
        address(grad_q_edge),
        address(features),
        address(grad_att),
        address(grad_weight),
        parts[0],
        parts[1],
        partial_q,
        partial_q_edge,
        partial_k,
        partial_v,
        0 if sums is None else sums[0].data_ptr(),
        0 if sums is None else sums[1].data_ptr(),
        index,
        queue(index),
    )


def _features_room(adj: Adjacency, like: Tensor, heads: int, lanes: int, edge_width: int) -> Tensor:
    """Room for gradients of the edges' features: a part for every group of heads, (parts, num_values, A)."""
    parts, dtype = 1, accumulation_dtype(like.dtype)
    if like.is_cuda:
        per_group = 1
        while per_group < heads and per_group * lanes < 32:
            per_group *= 2
        parts = -(-heads // per_group)
        if parts == 1:
            dtype = like.dtype  # nothing is to be added up
    return _edge_room(adj, parts, adj.num_values, edge_width, dtype=dtype)


def _finish_features(features: Tensor, like: Tensor) -> Tensor:
    total = features[0] if features.size(0) == 1 else features.sum(0)
    return cast(total[:, : like.size(1)], like.dtype)


# ---------------------------------------------------------------- dot product


def _edge_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    bias: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
    adjacency: int,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor]:
    adj, width, step = from_handle(adjacency), v.size(1), _step(v)
    q, k, v = _padded(q, heads, step), _padded(k, heads, step), _padded(v, heads, step)
    edge = _padded_edges(edge_attr)
    weight = _padded_weight(edge_weight, heads, v.size(1), edge.size(1))
    bias = None if bias is None else bias.contiguous()
    out = v.new_empty(adj.num_dst, v.size(1))
    out_edge = v.new_empty(adj.num_dst, heads, edge.size(1))
    lse = v.new_empty(adj.num_dst, heads, dtype=accumulation_dtype(v.dtype))
    if out.is_cuda:
        of_rows, of_kernel = None, weight.t().contiguous()
    else:
        of_rows, of_kernel = _to_edge_width(q, weight, heads), None
    arguments = _input(heads, q, k, v, of_rows, edge, None, of_kernel, bias, scale, dropout_p, seed)
    _run_forward(adj, arguments, out, out_edge, lse)
    if not out.is_cuda:
        _add_from_edge_width(out, out_edge, weight, heads)
    return _unpadded(out, heads, width), lse, out_edge


def _edge_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edge_attr: Tensor,
    edge_weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    out_edge: Tensor,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    heads: int,
    adjacency: int,
    algorithm: str,
    edge_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    adj, width, step = from_handle(adjacency), v.size(1), _step(v)
    q, k, v = _padded(q, heads, step), _padded(k, heads, step), _padded(v, heads, step)
    grad, out = _padded(grad, heads, step), _padded(out, heads, step)
    edge = _padded_edges(edge_attr)
    weight = _padded_weight(edge_weight, heads, v.size(1), edge.size(1))
    bias = None if bias is None else bias.contiguous()
    q_edge = grad_edge = of_kernel = None
    if out.is_cuda:
        of_kernel = weight.t().contiguous()
    else:
        q_edge, grad_edge = _to_edge_width(q, weight, heads), _to_edge_width(grad, weight, heads)
    sums = None
    if v.numel() and scatters(adj, algorithm, v.dtype, None):  # the address of no numbers is that of no sums
        sums = torch.zeros(2, *v.shape, dtype=lse.dtype, device=v.device)
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(0), v.new_empty(0)
    else:
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    grad_q_edge = torch.empty_like(out_edge)
    work = _edge_room(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    features = None
    if edge_wanted:
        lanes = max(_sign_bytes(v.size(1) // heads), _sign_bytes(-(-edge.size(1) // 2)))
        features = _features_room(adj, v, heads, lanes, edge.size(1))
    arguments = _input(heads, q, k, v, q_edge, edge, None, of_kernel, bias, scale, dropout_p, seed)
    grads = (grad_q, grad_k, grad_v, grad_q_edge)
    parts = (min(_CPU_PARTS, max(adj.num_dst, 1)), 0)
    _run_backward(
        adj, arguments, heads, out, grad, grad_edge, lse, work, None, grads, features, None, None, parts, sums
    )
    if sums is not None:
        grad_k, grad_v = sums.to(v.dtype).unbind()
    if not out.is_cuda:
        _add_from_edge_width(grad_q, grad_q_edge, weight, heads)
    grad_weight = _weight_gradient(q, grad_q_edge, grad, out_edge, heads)
    grad_weight = grad_weight.unflatten(0, (heads, -1))[:, : width // max(heads, 1), : edge_attr.size(1)]
    return (
        _unpadded(grad_q, heads, width),
        _unpadded(grad_k, heads, width),
        _unpadded(grad_v, heads, width),
        edge_attr.new_empty(0) if features is None else _finish_features(features, edge_attr),
        grad_weight.flatten(0, 1),
        cast(work[:, :, 1], bias.dtype) if bias is not None and bias_wanted else v.new_empty(0),
    )


def _kept_result(ctx: Any, out: Tensor) -> Tensor:
    """The result as the backward pass keeps it, on either device: it may be written to before that."""
    ctx.written = None
    return alias_of(ctx, out) if is_plain_eager(out) else out


class _EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        edge_attr: Tensor,
        edge_weight: Tensor,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        heads: int,
        adjacency: int,
        algorithm: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (q, k, v, edge_attr, edge_weight, bias)
        out, lse, out_edge = registration.run(
            "edge_attention", v, *tensors, scale, dropout_p, seed, heads, adjacency, algorithm
        )
        remember(ctx, adjacency, lse, *tensors, _kept_result(ctx, out), lse, out_edge, seed)
        ctx.mark_non_differentiable(lse, out_edge)
        ctx.options = (scale, dropout_p)
        ctx.heads, ctx.algorithm = heads, algorithm
        return out, lse, out_edge

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 12
        *tensors, seed = ctx.saved_tensors
        scale, dropout_p = ctx.options
        if torch.is_grad_enabled():

            def compute(
                q: Tensor, k: Tensor, v: Tensor, attr: Tensor, weight: Tensor, bias: Tensor | None
            ) -> Tensor:
                operands = (q, k, v, attr, weight, bias)
                return step_by_step.attention(ctx.keep_alive, *operands, scale, dropout_p, seed, ctx.heads)

            return *unfused_gradients(compute, grad, tensors[:6], ctx.needs_input_grad), *(None,) * 6
        if was_written(ctx):
            again = (scale, dropout_p, seed, ctx.heads, ctx.adjacency, ctx.algorithm)
            tensors[6] = registration.run("edge_attention", grad, *tensors[:6], *again)[0]
        edge_wanted, bias_wanted = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        behind = (ctx.heads, ctx.adjacency, ctx.algorithm, edge_wanted, bias_wanted)
        arguments = (*tensors, *ctx.options, seed, *behind)
        *grads, edge, weight, bias = registration.differentiate("edge_attention_backward", grad, *arguments)
        return *grads, edge if edge_wanted else None, weight, bias if bias_wanted else None, *(None,) * 6


# ---------------------------------------------------------------- GATv2


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
    arguments = _input(
        heads, x_dst, x_src, x_src, None, edge, att, weight, None, negative_slope, dropout_p, seed
    )
    _run_forward(adj, arguments, out, None, lse)
    return _unpadded(out, heads, width), lse


def _gatv2_operands(
    x_dst: Tensor, x_src: Tensor, att: Tensor, edge_attr: Tensor, edge_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the kernels read; the linear map transposed, (A, heads * D), in the accumulation dtype."""
    heads, step = att.size(0), _step(x_src)
    x_dst, x_src = _padded(x_dst, heads, step), _padded(x_src, heads, step)
    edge = _padded_edges(edge_attr)
    weight = _padded_weight(edge_weight, heads, x_src.size(1), edge.size(1))
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
    adj, heads, step, given = from_handle(adjacency), att.size(0), _step(x_src), x_src.size(1)
    head_width = att.size(1)
    grad, out = _padded(grad, heads, step), _padded(out, heads, step)
    x_dst, x_src, att, edge, weight = _gatv2_operands(x_dst, x_src, att, edge_attr, edge_weight)
    width, sign_bytes = x_src.size(1), _sign_bytes(x_src.size(1) // max(heads, 1))
    work = _edge_room(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    positive = torch.empty(adj.num_values, heads, sign_bytes, dtype=torch.uint8, device=x_src.device)
    if x_src.is_cuda:
        if not torch.cuda.is_current_stream_capturing():
            adj.sort_slices()  # the gradient of att is summed in their order, which must not change later
        parts = (att_rows(adj.row_split.slices.size(0)), _WEIGHT_GROUPS)
    else:
        parts = (min(_CPU_PARTS, max(adj.num_dst, 1)),) * 2
    grad_dst, grad_src = x_dst.new_empty(x_dst.shape), x_src.new_empty(x_src.shape)
    grad_att = torch.empty(parts[0], width, dtype=lse.dtype, device=x_src.device)
    grad_weight = features = None
    if weight_wanted:
        shape = (parts[1], edge.size(1), width)
        grad_weight = torch.empty(shape, dtype=lse.dtype, device=x_src.device)
    if edge_wanted:
        features = _features_room(adj, x_src, heads, sign_bytes, edge.size(1))
    arguments = _input(
        heads, x_dst, x_src, x_src, None, edge, att, weight, None, negative_slope, dropout_p, seed
    )
    grads = (grad_dst, grad_src, None, None)
    _run_backward(
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
        _unpadded(grad_dst, heads, given),
        _unpadded(grad_src, heads, given),
        grad_att.sum(0).view(heads, -1)[:, :head_width],
        edge_attr.new_empty(0) if features is None else _finish_features(features, edge_attr),
        of_weight,
    )


class _Gatv2EdgeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        tensors = (x_dst, x_src, att, edge_attr, edge_weight)
        out, lse = registration.run(
            "gatv2_edge_attention", x_src, *tensors, negative_slope, dropout_p, seed, adjacency
        )
        remember(ctx, adjacency, lse, *tensors, _kept_result(ctx, out), lse, seed)
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


# ---------------------------------------------------------------- registration


def _fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    v, num_dst, edge_width = of.v, of.q.size(0), of.edge_attr.size(1)
    if v.is_cuda:
        edge_width = -(-edge_width // 4) * 4
    lse = v.new_empty(num_dst, of.heads, dtype=accumulation_dtype(v.dtype))
    return v.new_empty(num_dst, v.size(1)), lse, v.new_empty(num_dst, of.heads, edge_width)


def _backward_fake(of: Any) -> tuple[Tensor, ...]:
    return (
        of.q.new_empty(of.q.shape),
        of.k.new_empty(of.k.shape),
        of.v.new_empty(of.v.shape),
        of.edge_attr.new_empty(of.edge_attr.shape if of.edge_wanted else 0),
        of.edge_weight.new_empty(of.edge_weight.shape),
        of.v.new_empty(0) if of.bias is None or not of.bias_wanted else of.bias.new_empty(of.bias.shape),
    )


def _gatv2_fake(of: Any) -> tuple[Tensor, Tensor]:
    num_dst, x = of.x_dst.size(0), of.x_src
    lse = x.new_empty(num_dst, of.att.size(0), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(num_dst, x.size(1)), lse


def _gatv2_backward_fake(of: Any) -> tuple[Tensor, ...]:
    return (
        of.x_dst.new_empty(of.x_dst.shape),
        of.x_src.new_empty(of.x_src.shape),
        of.att.new_empty(of.att.shape),
        of.edge_attr.new_empty(of.edge_attr.shape if of.edge_wanted else 0),
        of.edge_weight.new_empty(of.edge_weight.shape if of.weight_wanted else 0),
    )


registration.register(_edge_attention, _fake, _EdgeAttention)
registration.register(_edge_attention_backward, _backward_fake)
registration.register(_gatv2_edge_attention, _gatv2_fake, _Gatv2EdgeAttention)
registration.register(_gatv2_edge_attention_backward, _gatv2_backward_fake)
