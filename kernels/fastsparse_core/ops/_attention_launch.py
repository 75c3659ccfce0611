r"""Launches the kernels of attention, forward and backward, on the CPU and on CUDA.

The CPU has one kernel for all calls. CUDA has three families of kernels: dot products from binary sparse
blocks; GAT and GATv2 from CSR; and kernels that can also read a bias or features of the edges, for dot
products from CSR and for GATv2 with edge features.

For dot products with edge features, let :math:`W_h` be the rows of the edges' linear layer that belong to
head h. Then :math:`\langle q_i, W_h a_{ij} \rangle = \langle W_h^\top q_i, a_{ij} \rangle` and
:math:`\sum_j w_{ij} W_h a_{ij} = W_h \sum_j w_{ij} a_{ij}`. So both products with :math:`W` have a row per
node instead of a row per edge. CUDA stores :math:`\sum_j w_{ij} a_{ij}`, (num_dst, heads, A), for the
gradient of :math:`W`. In GATv2, :math:`W a_{ij}` is part of the argument of the leaky ReLU, so the kernels
compute this product for every edge, without storing it. Both backward passes store two numbers per edge and
head; on CUDA, the backward pass of GATv2 also stores a bit per feature.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import place_of
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.gpu import multiprocessors
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE, accumulation_dtype, cast
from fastsparse_core.ops._facts import scatters, used_csr
from fastsparse_core.ops._operands import (
    contiguous_floats,
    edge_workspace,
    empty_values,
    scratch,
    unit_stride,
)
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.structure.adjacency import Adjacency

# AttentionScore in kernels/include/fastsparse/views.h.
DOT_PRODUCT, ADDITIVE, GATV2 = 0, 1, 2
#: Number of bytes per load. Rows and heads start at multiples of this number.
LOAD_BYTES = 16
#: Number of lane groups in the row pass of GATv2's backward kernel. Each group has its own sum for the
#: gradient of ``att``. A group gets about 8 slices. The limits ensure that there are enough groups to fill
#: the GPU, and not more than needed to balance the load.
_LEAST_GROUPS, _MOST_GROUPS = 8192, 32768
#: Largest number of lane groups per thread block; the number of groups is a multiple of this.
_GROUPS_PER_BLOCK = 32
#: Number of lane groups that sum GATv2's gradient of the edges' linear layer: enough to fill a large GPU.
_WEIGHT_GROUPS = 4096
#: Number of parts into which rows are divided, per multiprocessor, for sums of outer products: the number of
#: thread blocks that fit a multiprocessor. On an H200, 542,080 rows of 16 heads in 16 bits take 0.25 ms, and
#: 0.31 ms with twice as many parts.
_PARTS = 2
_PART_ROWS = 128


def default_scale(width: int) -> float:
    """The default factor of dot products, ``1 / sqrt(width)``; all callers use it, so they round equally."""
    return 1 / math.sqrt(width) if width else 1.0


class Call(NamedTuple):
    """Operands and options of both passes, in the order of the operator's schema.

    Attributes:
        dst: queries (num_dst, heads * D); GAT: scores of the destinations (num_dst, heads); GATv2: features
            of the destinations.
        src: keys; GAT: scores of the sources; GATv2: features of the sources.
        v: values (num_src, heads * Dv); None: GATv2, whose values are ``src``.
        att: (heads, D), only for GATv2.
        edge: features of the edges (num_values, A) in the caller's edge order, in the dtype of ``v``.
        edge_weight: weight of the edges' linear layer, (heads * D, A), with ``edge``.
        bias: (num_values, heads) in the caller's edge order, in the accumulation dtype or the dtype of ``v``.
        scale: factor of dot products, or slope of the leaky ReLU.
        dropout_p: dropout probability, from 0 to below 1.
        seed: seed of the dropout mask; None: no dropout.
        kind: kind of the scores.
        heads: number of heads.
        algorithm: for dot products without edge features, ``"fused3s"`` selects blocks on CUDA. All others
            are ``"csr"`` or ``"auto"``, which may scatter the sources' gradients.
    """

    dst: Tensor
    src: Tensor
    v: Tensor | None
    att: Tensor | None
    edge: Tensor | None
    edge_weight: Tensor | None
    bias: Tensor | None
    scale: float
    dropout_p: float
    seed: Tensor | None
    kind: int
    heads: int
    algorithm: str = "fused3s"

    @property
    def values(self) -> Tensor:
        """The rows that are summed with the attention weights."""
        return self.src if self.v is None else self.v

    @property
    def drawn(self) -> int:
        """The seed as an int, for the kernels."""
        return 0 if self.seed is None else int(self.seed)

    @property
    def on_blocks(self) -> bool:
        """True if the CUDA kernel reads binary sparse blocks; then the log-sum-exp is float64."""
        return self.kind == DOT_PRODUCT and self.edge is None and self.algorithm == "fused3s"


#: The result; the log-sum-exp of every row and head; and for dot products from CSR on CUDA, the sums of edge
#: features.
Results = tuple[Tensor, Tensor, Tensor | None]


class Gradients(NamedTuple):
    """Gradients of a call's tensors; for GATv2, the gradient of the values is part of the one of ``src``."""

    dst: Tensor
    src: Tensor
    v: Tensor | None = None
    att: Tensor | None = None
    edge: Tensor | None = None
    edge_weight: Tensor | None = None
    bias: Tensor | None = None


class Wanted(NamedTuple):
    """Flags that tell whether to compute the gradients that take additional time."""

    edge: bool = False
    edge_weight: bool = False
    bias: bool = False


def forward(adj: Adjacency, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes the values weighted by the softmax of the scores over every row, for every head."""
    if not call.src.is_cuda:
        return _forward_on_cpu(adj, call)
    if call.on_blocks:
        return _forward_on_blocks(adj, call)
    if call.kind == DOT_PRODUCT or call.edge is not None:
        return _forward_with_edges(adj, call)
    return _forward_on_rows(adj, call)


def backward(
    adj: Adjacency,
    call: Call,
    grad: Tensor,
    out: Tensor | None,
    lse: Tensor,
    out_edge: Tensor | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008
) -> Gradients:
    """Computes gradients from the results of :func:`forward`; the CPU and GAT do not read ``out``."""
    if not call.src.is_cuda:
        return _backward_on_cpu(adj, call, grad, lse, wanted)
    if call.on_blocks:
        return _backward_on_blocks(adj, call, grad, out, lse, wanted)
    if call.kind == DOT_PRODUCT or call.edge is not None:
        return _backward_with_edges(adj, call, grad, out, lse, out_edge, wanted)
    return _backward_on_rows(adj, call, grad, out, lse, wanted)


# ---------------------------------------------------------------- CPU


def _laid_out_on_cpu(call: Call) -> Call:
    """The call in the layout of the kernels: rows have unit stride, other tensors are contiguous."""
    dst, src, v, att, edge, edge_weight, bias, *_ = call
    are_rows = dst.stride(1) == src.stride(1) == (src if v is None else v).stride(1) == 1
    if edge is not None and edge_weight is not None:
        edge, edge_weight = (unit_stride(edge), unit_stride(edge_weight)) if edge.size(1) else (None, None)
    elif are_rows and bias is None and (att is None or att.is_contiguous()):
        return call  # the usual case
    if not are_rows:
        dst, src, v = unit_stride(dst), unit_stride(src), None if v is None else unit_stride(v)
    att = None if att is None else att.contiguous()
    bias = None if bias is None else bias.contiguous()
    return Call(dst, src, v, att, edge, edge_weight, bias, *call[7:])


def _cpu_arguments(call: Call, adj: Adjacency, out: Tensor | None, lse: Tensor) -> _C.AttentionCsrArgs:
    dst, src, v, att, edge, edge_weight, bias, scale, dropout_p, seed, kind, heads, _ = call
    structure, features = adj.plans.get("csr") or used_csr(adj), (dst, src, src if v is None else v, att)
    of_edges = (bias, 0 if bias is None else bias.dtype, edge, edge_weight)
    drawn = 0 if seed is None else int(seed)
    return _C.AttentionCsrArgs(
        structure, kind, heads, *features, *of_edges, scale, dropout_p, drawn, out, lse
    )


def _forward_on_cpu(adj: Adjacency, call: Call) -> Results:
    call = _laid_out_on_cpu(call)
    v = call.src if call.v is None else call.v
    out = v.new_empty(adj.num_dst, v.shape[1])
    lse = v.new_empty(adj.num_dst, call.heads, dtype=ACCUMULATION_DTYPE[v.dtype])
    _C.attention_csr(_cpu_arguments(call, adj, out, lse), torch.get_num_threads())
    return out, lse, None


def _backward_on_cpu(adj: Adjacency, call: Call, grad: Tensor, lse: Tensor, wanted: Wanted) -> Gradients:
    given, grad, lse = call, grad if grad.stride(1) == 1 else grad.contiguous(), lse.contiguous()
    call = _laid_out_on_cpu(call)
    dst, src, v, att, edge, edge_weight, bias, *_ = call
    grad_dst, grad_src = dst.new_empty(dst.shape), src.new_empty(src.shape)
    v = src if v is None else v
    grad_v = None if call.kind == GATV2 else v.new_empty(v.shape)
    grad_att = None if att is None else att.new_empty(att.shape)
    work = None
    if edge is not None or bias is not None:
        is_whole = adj.num_values == adj.col.numel() and not adj.is_padded
        make = lse.new_empty if is_whole else lse.new_zeros  # zeros if some values have no entry
        work = make((adj.num_values, call.heads, 2))
    grad_edge = empty_values(adj, edge) if edge is not None and wanted.edge else None
    grad_weight = None
    if edge_weight is not None and wanted.edge_weight:
        grad_weight = edge_weight.new_empty(edge_weight.shape)
    transposed = adj.t()
    structure = transposed.plans.get("csr") or used_csr(transposed)
    gradients = (grad_dst, grad_src, grad_v, grad_att, work, grad_edge, grad_weight)
    arguments = _cpu_arguments(call, adj, None, lse)
    _C.attention_csr_backward(arguments, structure, grad, *gradients, torch.get_num_threads())
    grad_bias = None
    if bias is not None and wanted.bias and work is not None:
        grad_bias = torch.empty_like(bias).copy_(work[:, :, 1])
    if edge is None and given.edge is not None and given.edge_weight is not None:  # features of width 0
        grad_edge, grad_weight = torch.empty_like(given.edge), torch.empty_like(given.edge_weight)
    return Gradients(grad_dst, grad_src, grad_v, grad_att, grad_edge, grad_weight, grad_bias)


# ---------------------------------------------------------------- CUDA: padding


def aligned(x: Tensor) -> Tensor:
    """The matrix, or a copy whose rows start at multiples of 16 bytes; rows must be multiples of 16 bytes."""
    x = unit_stride(x)
    if x.data_ptr() % LOAD_BYTES or x.stride(0) * x.element_size() % LOAD_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def contiguous_and_aligned(x: Tensor) -> Tensor:
    """The matrix, or a contiguous copy that starts at a multiple of 16 bytes."""
    is_ready = x.is_contiguous() and not x.data_ptr() % LOAD_BYTES
    return x if is_ready else x.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, heads: int) -> Tensor:
    """(n, heads * D) with aligned rows, every head padded with zeros to a multiple of 16 bytes."""
    width, step = x.size(1) // max(heads, 1), LOAD_BYTES // x.itemsize
    if width % step:
        return F.pad(x.unflatten(1, (heads, width)), (0, -width % step)).flatten(1)
    row_stride, column_stride = x.stride()
    if column_stride == 1 and row_stride % step == 0 and x.data_ptr() % LOAD_BYTES == 0:
        return x  # the usual case, without two more calls
    return aligned(x)


def _unpadded(x: Tensor, heads: int, width: int) -> Tensor:
    """Removes the padding of heads; ``width``: features of all heads. Never a view: callers may edit it."""
    if x.size(1) == width:
        return x
    narrow = x.unflatten(1, (heads, -1))[:, :, : width // heads].flatten(1)
    return narrow.clone() if narrow._is_view() else narrow


def _padded_edges(edge: Tensor) -> Tensor:
    """(num_values, A), contiguous, with A padded to a multiple of 4."""
    if edge.size(1) % 4:
        return F.pad(edge, (0, -edge.size(1) % 4))
    edge = edge.contiguous()
    return edge.clone() if edge.data_ptr() % LOAD_BYTES else edge


def _padded_weight(weight: Tensor, heads: int, width: int, edge_width: int) -> Tensor:
    """(heads * D, A), contiguous, padded like the heads and the edge features."""
    if weight.shape == (width, edge_width):
        return weight.contiguous()
    missing = edge_width - weight.size(1)
    per_head = weight.unflatten(0, (heads, -1))
    behind = width // heads - per_head.size(1)
    if missing or behind:
        per_head = F.pad(per_head, (0, missing, 0, behind))
    return per_head.flatten(0, 1).contiguous()


# ---------------------------------------------------------------- CUDA: dot products from blocks


def _laid_out_on_blocks(call: Call) -> Call:
    bias = None if call.bias is None else call.bias.contiguous()
    return call._replace(dst=aligned(call.dst), src=aligned(call.src), v=aligned(call.values), bias=bias)


def _blocks_input(call: Call) -> _C.AttentionBsbInput:
    bias = (call.bias, 0 if call.bias is None else call.bias.dtype)
    rest = (*bias, call.scale, call.dropout_p, call.drawn, policy.allows_tf32())
    return _C.AttentionBsbInput(call.heads, call.dst, call.src, call.values, *rest)


def _forward_on_blocks(adj: Adjacency, call: Call) -> Results:
    """Forward pass on binary sparse blocks, for float32, float16 or bfloat16 features.

    The log-sum-exp has base 2, as the kernels compute with powers of two, and is float64. In float32, it
    would have an error of 5e-4 for scores of 1e4, and so would all weights of the row.
    """
    heads, v = call.heads, call.values
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float64, device=v.device)
    if adj.num_dst == 0:
        return out, lse, None
    call = _laid_out_on_blocks(call)
    rows = adj.bsb_split.num_slots * HEIGHT
    partial = torch.empty(rows, v.size(1), dtype=torch.float32, device=v.device)
    partial_state = partial.new_empty(rows, heads, 2)
    structure, results = adj.bsb_structure(valued=call.bias is not None), (out, lse, partial, partial_state)
    _C.attention_bsb(structure, _blocks_input(call), *results, *place_of(v.device))
    return out, lse, None


def _backward_on_blocks(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, wanted: Wanted
) -> Gradients:
    """Backward pass on binary sparse blocks. It stores nothing per edge except the gradient of the bias."""
    assert out is not None
    call, grad = _laid_out_on_blocks(call), aligned(grad)
    q, k, v, bias, heads = call.dst, call.src, call.values, call.bias, call.heads
    out, lse = out.contiguous(), lse.contiguous()
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    grad_bias = empty_values(adj, bias) if bias is not None and wanted.bias else None
    transposed = adj.t()
    rows, rows_t = adj.bsb_split.num_slots * HEIGHT, transposed.bsb_split.num_slots * HEIGHT
    # Log-sum-exp and <grad, out>. For float32 features, also the low part of the float64 log-sum-exp, and
    # padding.
    numbers = 4 if v.dtype == torch.float32 else 2
    row_state = torch.empty(adj.num_dst, heads, numbers, dtype=torch.float32, device=v.device)
    partial_q = row_state.new_empty(rows, q.size(1))
    partial_k, partial_v = row_state.new_empty(rows_t, k.size(1)), row_state.new_empty(rows_t, v.size(1))
    structures = (
        adj.bsb_structure(valued=bias is not None),
        transposed.bsb_structure(valued=bias is not None),
    )
    written = (grad_q, grad_k, grad_v, grad_bias, row_state, partial_q, partial_k, partial_v)
    arguments = (_blocks_input(call), out, lse, grad, *written, *place_of(v.device))
    _C.attention_bsb_backward(structures[0], structures[1], *arguments)
    return Gradients(grad_q, grad_k, grad_v, bias=grad_bias)


# ---------------------------------------------------------------- CUDA: GAT and GATv2 from CSR


def _laid_out_on_rows(call: Call) -> Call:
    if call.kind == GATV2:
        assert call.att is not None
        return call._replace(
            dst=unit_stride(call.dst), src=unit_stride(call.src), att=contiguous_floats(call.att)
        )
    bias = None if call.bias is None else call.bias.contiguous()
    dst, src = contiguous_floats(call.dst), contiguous_floats(call.src)
    return call._replace(dst=dst, src=src, v=unit_stride(call.values), bias=bias)


def _additive_input(call: Call) -> _C.AdditiveAttentionInput:
    bias = (call.bias, 0 if call.bias is None else call.bias.dtype)
    rest = (*bias, call.scale, call.dropout_p, call.drawn)
    return _C.AdditiveAttentionInput(call.heads, call.dst, call.src, call.values, *rest)


def _gatv2_input(call: Call) -> _C.Gatv2AttentionInput:
    assert call.att is not None
    return _C.Gatv2AttentionInput(
        call.heads, call.dst, call.src, call.att, call.scale, call.dropout_p, call.drawn
    )


def _forward_on_rows(adj: Adjacency, call: Call) -> Results:
    heads, v = call.heads, call.values
    out = v.new_empty(adj.num_dst, v.size(1))
    lse = torch.empty(adj.num_dst, heads, dtype=torch.float32, device=v.device)
    if adj.num_dst == 0:
        return out, lse, None
    slots = adj.row_split.num_slots
    _workspace, (partial, state) = scratch(v.device, slots * v.size(1), slots * heads * 2)
    results = (out, lse, partial, state, *place_of(v.device))
    call = _laid_out_on_rows(call)
    if call.kind == GATV2:
        _C.gatv2_attention(used_csr(adj), _gatv2_input(call), *results)
    else:
        _C.additive_attention(used_csr(adj), _additive_input(call), *results)
    return out, lse, None


def _backward_on_rows(
    adj: Adjacency, call: Call, grad: Tensor, out: Tensor | None, lse: Tensor, wanted: Wanted
) -> Gradients:
    call, grad, lse = _laid_out_on_rows(call), unit_stride(grad), lse.contiguous()
    if call.kind == GATV2:
        assert out is not None
        return _gatv2_backward(adj, call, grad, unit_stride(out), lse)
    score_dst, score_src, v, bias, heads = call.dst, call.src, call.values, call.bias, call.heads
    grad_dst, grad_src = torch.empty_like(score_dst), torch.empty_like(score_src)
    grad_v = v.new_empty(v.shape)
    grad_bias = empty_values(adj, bias) if bias is not None and wanted.bias else None
    transposed = adj.t()
    slots, slots_t = adj.row_split.num_slots, transposed.row_split.num_slots
    _workspace, (row_state, partial_row, partial_v, partial_score) = scratch(
        v.device, adj.num_dst * heads * 4, slots * heads * 4, slots_t * v.size(1), slots_t * heads
    )
    written = (grad_dst, grad_src, grad_v, grad_bias, row_state, partial_row, partial_v, partial_score)
    arguments = (_additive_input(call), grad, lse, *written, *place_of(v.device))
    _C.additive_attention_backward(used_csr(adj), used_csr(transposed), *arguments)
    return Gradients(grad_dst, grad_src, grad_v, bias=grad_bias)


def _gatv2_backward(adj: Adjacency, call: Call, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    x_dst, x_src, att, heads = call.dst, call.src, call.att, call.heads
    assert att is not None
    width = x_src.size(1)
    grad_dst, grad_src = x_dst.new_empty(x_dst.shape), x_src.new_empty(x_src.shape)
    transposed = adj.t()
    att_rows = _att_rows(adj)
    grad_att = att.new_empty(att_rows, width)
    slots, slots_t = adj.row_split.num_slots, transposed.row_split.num_slots
    _workspace, (row_state, partial_dst, partial_src) = scratch(
        x_src.device, adj.num_dst * heads * 2, slots * width, slots_t * width
    )
    written = (grad_dst, grad_src, grad_att, att_rows, row_state, partial_dst, partial_src)
    arguments = (_gatv2_input(call), out, grad, lse, *written, *place_of(x_src.device))
    _C.gatv2_attention_backward(used_csr(adj), used_csr(transposed), *arguments)
    return Gradients(grad_dst, grad_src, att=sum_of_rows(grad_att, att.dtype, True).reshape(att.shape))


def _att_rows(adj: Adjacency) -> int:
    """Number of rows of the partial gradient of ``att``. Sorts slices, whose order must not change later."""
    if not torch.cuda.is_current_stream_capturing():
        adj.sort_slices()
    return att_rows_of(adj.row_split.slices.size(0))


def att_rows_of(num_slices: int) -> int:
    groups = min(max(num_slices // 8, _LEAST_GROUPS), _MOST_GROUPS, max(num_slices, 1))
    return -(-groups // _GROUPS_PER_BLOCK) * _GROUPS_PER_BLOCK


# ---------------------------------------------------------------- CUDA: numbers of the edges from CSR


def _head_lanes(head_width: int, edge_width: int = 0) -> int:
    """Number of lanes per head in the kernels, a power of two.

    Each lane has 8 features of the head and, with dot products, 16 features of an edge. In GATv2, every lane
    reads all features of an edge, and stores a byte of signs, one bit per feature of the head.

    Args:
        head_width: features of a head.
        edge_width: features of an edge; only for dot products.
    """
    lanes = 1
    while lanes * 8 < head_width or lanes * 16 < edge_width:
        lanes *= 2
    return lanes


def _weight_of_dot_products(weight: Tensor, heads: int) -> Tensor:
    """(heads * D, A) in the layout of the dot-product kernels: (A, chunks, heads, lanes, 16 bytes).

    A lane has eight features of a head, padded with zeros, in chunks of 16 bytes. The first chunks of all
    lanes come before their second chunks, so that a warp reads contiguous memory.
    """
    width = weight.size(0) // max(heads, 1)
    lanes, chunk = _head_lanes(width, weight.size(1)), LOAD_BYTES // weight.element_size()
    if width < 8 * lanes:
        weight = F.pad(weight.unflatten(0, (heads, width)), (0, 0, 0, 8 * lanes - width))
    # The chunks of a lane are separated by the chunks of all other lanes.
    chunked = weight.reshape(heads, 8 // chunk, lanes, chunk, weight.size(-1))
    return chunked.permute(4, 1, 0, 2, 3).contiguous()


def _laid_out_with_edges(adj: Adjacency, call: Call) -> Call:
    """The call, padded, with the edges' weight in the layout of the kernels (GATv2: (A, heads * D))."""
    dst, src, v, att, edge, edge_weight, bias, *_ = call
    heads = call.heads
    dst, src, v = _padded(dst, heads), _padded(src, heads), None if v is None else _padded(v, heads)
    if edge is None or edge_weight is None:  # the kernels get edge features of width 0
        edge, edge_weight = src.new_empty(adj.num_values, 0), src.new_empty(call.src.size(1), 0)
    edge = _padded_edges(edge)
    edge_weight = _padded_weight(edge_weight, heads, src.size(1), edge.size(1))
    if att is None:
        edge_weight = _weight_of_dot_products(edge_weight, heads)
    else:
        dtype = accumulation_dtype(src.dtype)
        att = F.pad(att.to(dtype), (0, src.size(1) // max(heads, 1) - att.size(1))).contiguous()
        edge_weight = edge_weight.to(dtype).t().contiguous()
    bias = None if bias is None else bias.contiguous()
    return Call(dst, src, v, att, edge, edge_weight, bias, *call[7:])


def _edges_input(call: Call) -> _C.EdgeAttentionInput:
    bias = (call.bias, (call.src if call.bias is None else call.bias).dtype)
    rest = (call.edge, call.att, call.edge_weight, *bias, call.scale, call.dropout_p, call.drawn)
    return _C.EdgeAttentionInput(call.att is not None, call.heads, call.dst, call.src, call.values, *rest)


def _forward_with_edges(adj: Adjacency, given: Call) -> Results:
    call = _laid_out_with_edges(adj, given)
    v, heads = call.values, call.heads
    assert call.edge is not None
    out, out_edge, edge_width = v.new_empty(adj.num_dst, v.size(1)), None, 0
    if call.kind == DOT_PRODUCT:
        edge_width = call.edge.size(1)
        out_edge = v.new_empty(adj.num_dst, heads, edge_width)
    lse = v.new_empty(adj.num_dst, heads, dtype=accumulation_dtype(v.dtype))
    arguments, slots = _edges_input(call), adj.row_split.num_slots
    _workspace, (partial, partial_edge, partial_state) = scratch(
        out.device, slots * out.size(1), slots * heads * edge_width, slots * heads * 2
    )
    partials = (partial, partial_edge, partial_state, *place_of(out.device))
    _C.edge_attention(used_csr(adj), arguments, out, out_edge, lse, *partials)
    return _unpadded(out, heads, given.values.size(1)), lse, out_edge


def _backward_with_edges(
    adj: Adjacency,
    given: Call,
    grad: Tensor,
    out: Tensor | None,
    lse: Tensor,
    out_edge: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    assert out is not None
    call, heads = _laid_out_with_edges(adj, given), given.heads
    dst, src, v, edge, bias, algorithm = call.dst, call.src, call.v, call.edge, call.bias, call.algorithm
    assert edge is not None
    grad, out = _padded(grad, heads), _padded(out, heads)
    width, head_width, edge_width = src.size(1), src.size(1) // max(heads, 1), edge.size(1)
    grad_dst = dst.new_empty(dst.shape)
    grad_v = grad_dst_edge = sums = positive = grad_att = grad_weight = None
    parts = (0, 0)
    work = edge_workspace(adj, adj.num_values, heads, 2, dtype=lse.dtype)
    if v is None:
        lanes = _head_lanes(head_width)
        positive = torch.empty(adj.num_values, heads, lanes, dtype=torch.uint8, device=src.device)
        parts = (_att_rows(adj), _WEIGHT_GROUPS)
        grad_att = torch.empty(parts[0], width, dtype=lse.dtype, device=src.device)
        if wanted.edge_weight:
            shape = (parts[1], edge_width, width)
            grad_weight = torch.empty(shape, dtype=lse.dtype, device=src.device)
    else:
        assert out_edge is not None
        lanes = _head_lanes(head_width, edge_width)
        # An empty tensor has no address, and without an address the kernel computes no sums.
        if v.numel() and scatters(adj, algorithm, v.dtype, None):
            sums = torch.zeros(2, *v.shape, dtype=lse.dtype, device=v.device)
        grad_v = v.new_empty(v.shape if sums is None else 0)
        grad_dst_edge = torch.empty_like(out_edge)
    grad_src = src.new_empty(src.shape if sums is None else 0)
    features = _features_workspace(adj, src, heads, lanes, edge_width) if wanted.edge else None
    # The transpose is not read if the sources' gradients are scattered into `sums`.
    transposed, slots_t = adj, 0
    if sums is None:
        transposed = adj.t()
        slots_t = transposed.row_split.num_slots
    slots = adj.row_split.num_slots
    of_edges = 0 if grad_dst_edge is None else slots * heads * grad_dst_edge.size(2)
    lengths = (slots * width, of_edges, slots_t * width, 0 if grad_v is None else slots_t * width)
    _workspace, (partial_dst, partial_dst_edge, partial_src, partial_v) = scratch(out.device, *lengths)
    of_entries = (work, positive, 0 if positive is None else positive.size(2), adj.num_values)
    gradients = (grad_dst, grad_src, grad_v, grad_dst_edge, features, grad_att, grad_weight)
    partials = (*parts, partial_dst, partial_dst_edge, partial_src, partial_v)
    added = (None, None) if sums is None else (sums[0], sums[1])
    arguments = (out, grad, lse, *of_entries, *gradients, *partials, *added, *place_of(out.device))
    _C.edge_attention_backward(used_csr(adj), used_csr(transposed), _edges_input(call), *arguments)
    if sums is not None and v is not None:
        grad_src, grad_v = sums.to(v.dtype).unbind()
    of_weight = None
    if grad_dst_edge is not None and out_edge is not None and wanted.edge_weight:
        of_weight = _weight_gradient(adj, dst, grad_dst_edge, grad, out_edge, heads)
    elif grad_weight is not None:
        of_weight = grad_weight.sum(0).t()
    of_edge = None
    if given.edge is not None and given.edge_weight is not None:
        if of_weight is not None:
            if of_weight.shape != given.edge_weight.shape:
                rows = given.edge_weight.size(0) // max(heads, 1)
                of_weight = of_weight.unflatten(0, (heads, -1))[:, :rows, : given.edge.size(1)].flatten(0, 1)
            of_weight = cast(of_weight, given.edge_weight.dtype)
        if features is not None:
            of_edge = _sum_of_features(features, given.edge)
    of_att = None
    if grad_att is not None and given.att is not None:
        of_att = grad_att.sum(0).view(heads, -1)[:, : given.att.size(1)]
    given_width = given.src.size(1)
    return Gradients(
        _unpadded(grad_dst, heads, given_width),
        _unpadded(grad_src, heads, given_width),
        None if grad_v is None else _unpadded(grad_v, heads, given_width),
        of_att,
        of_edge,
        of_weight if given.edge is not None else None,
        cast(work[:, :, 1], bias.dtype) if bias is not None and wanted.bias else None,
    )


def _weight_gradient(
    adj: Adjacency, x: Tensor, x_edge: Tensor, y: Tensor, y_edge: Tensor, heads: int
) -> Tensor:
    """``sum_i x_i,h e_i,h^T + y_i,h f_i,h^T``, (heads * D, A), of x, y (n, heads * D) and e, f (n, heads, A).

    Only rows that have entries are summed, because other rows may contain NaN.
    """
    num_rows, width, edge_width = *x.shape, x_edge.size(2)
    if not edge_width:
        return x.new_empty(width, 0)
    if not num_rows:
        return x.new_zeros(width, edge_width)
    num_parts = min(_PARTS * multiprocessors(x.device), -(-num_rows // _PART_ROWS))
    partial = x.new_empty(num_parts, width, edge_width, dtype=torch.float32)
    _C.head_outer(
        used_csr(adj), x, y, x_edge, y_edge, heads, edge_width, partial, num_parts, *place_of(x.device)
    )
    return partial.sum(0).to(x.dtype)


def _features_workspace(adj: Adjacency, like: Tensor, heads: int, lanes: int, edge_width: int) -> Tensor:
    """Memory for the gradients of edge features: one part per group of heads, (parts, num_values, A)."""
    per_group = 1
    while per_group < heads and per_group * lanes < 32:
        per_group *= 2
    parts = -(-heads // per_group)
    # A single part is the result, so it has the dtype of the result.
    dtype = like.dtype if parts == 1 else accumulation_dtype(like.dtype)
    return edge_workspace(adj, parts, adj.num_values, edge_width, dtype=dtype)


def _sum_of_features(features: Tensor, like: Tensor) -> Tensor:
    total = features[0] if features.size(0) == 1 else features.sum(0)
    return cast(total[:, : like.size(1)], like.dtype)
