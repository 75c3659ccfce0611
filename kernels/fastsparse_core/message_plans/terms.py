"""Functions that message plans call: they combine terms of nodes and edges, and reduce them.

A term is a tensor with a row per destination (``dst``), per source (``src``) or per edge (``edge``). A term
that is None counts as 0.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.fused.attention_layer import ADDITIVE, attention_layer
from fastsparse_core.message_plans.ends import EdgeEnd, fits_softmax, gather, reduce, softmax_of_edges
from fastsparse_core.ops._autocast import autocast_dtype, is_any_autocast_enabled
from fastsparse_core.ops._eager import PLAIN, is_plain_eager
from fastsparse_core.ops._edge_rows import lift
from fastsparse_core.ops.attention import additive_attention, attention, gatv2_attention
from fastsparse_core.ops.edge_expression import edge_expressions
from fastsparse_core.ops.edge_messages import gated_aggregate, gine_aggregate
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency


class Edges(Protocol):
    """The edges and arguments of a call.

    Attributes:
        dst: the edges' destinations.
        src: the edges' sources.
        special: arguments that message passing itself provides; ``"adj"`` is the structure.
    """

    dst: EdgeEnd
    src: EdgeEnd
    special: dict[str, Any]

    def placed(self, name: str) -> tuple[Any, str]:
        """An argument before gathering, and the owners of its rows: "dst", "src", "edge" or "" (none)."""

    def __getitem__(self, name: str, /) -> Any:
        """An argument gathered per edge, or one of ``special``."""


def per_edge(found: Edges, dst: Tensor | None, src: Tensor | None, edge: Tensor | None) -> Tensor:
    """The sum of the terms for every edge."""
    terms = [edge] if edge is not None else []
    if dst is not None and src is not None and dst.requires_grad == src.requires_grad:
        terms += lift((dst, src), (found.dst, found.src))
    else:
        terms += [gather(x, end) for x, end in ((dst, found.dst), (src, found.src)) if x is not None]
    return functools.reduce(operator.add, terms)


def reduce_terms(
    found: Edges, dst: Tensor | None, src: Tensor | None, edge: Tensor | None, how: str
) -> Tensor:
    """Reduces the sum of terms, term by term; callers must not use it for extrema with a term of edges."""
    totals: list[Tensor] = []
    if src is not None:
        totals.append(weighted(found, None, src, 1, how))
    if edge is not None:
        totals.append(reduce(edge, found.dst, how))
    if dst is not None:
        times = _times(found.dst, dst, how)
        totals.append(torch.where(times > 0, dst * times, 0.0))
    return functools.reduce(operator.add, totals)


def weighted(found: Edges, weight: Tensor | None, x: Tensor, heads: int, how: str) -> Tensor:
    """Reduces the sources' rows with a weight per edge and head."""
    x, weight = _alike(x, None if weight is None else weight.reshape(-1, heads))
    with without_autocast(x):
        out = spmm(_adjacency(found), x.flatten(1), weight, how)  # type: ignore[arg-type]  # one of PRODUCTS
    return out if x.dim() == 2 else out.reshape(-1, *x.shape[1:])


def linear_of_reduced(found: Edges, x: Tensor, weight: Tensor, bias: Tensor | None, how: str) -> Tensor:
    """Applies a linear map after a reduction. The result is as if the map were applied to every edge."""
    out = F.linear(x, weight)
    return out if bias is None else plus_bias_of_reduced(found, out, bias, how)


def plus_bias_of_reduced(found: Edges, x: Tensor, bias: Tensor, how: str) -> Tensor:
    """Adds a bias after a reduction. The result is as if the bias were added to every edge."""
    return x + bias * _times(found.dst, x, how)


def scores(x: Tensor, vector: Tensor) -> Tensor:
    """Dot products (N, ...) of rows (N, ..., D) with one vector per head, or one for all heads."""
    out: Tensor = _Scores.apply(x, vector)
    return out


class _Scores(torch.autograd.Function):
    """Rows with a gradient of 0 add nothing to the vector's gradient, even if they contain NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor) -> Tensor:
        ctx.save_for_backward(x, vector)
        return (x * vector).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, vector = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        products = torch.where(grad == 0, 0.0, grad * x) if ctx.needs_input_grad[1] else None
        return (
            grad * vector if ctx.needs_input_grad[0] else None,
            None if products is None else products.sum_to_size(vector.shape),
        )


def softmax(found: Edges, x: Tensor) -> Tensor:
    """Softmax over the edges of a destination."""
    if fits_softmax(x, found.dst):
        return softmax_of_edges(x, found.dst)
    parts = x.reshape(x.size(0), -1).split(MOST_HEADS, 1)
    return torch.cat([softmax_of_edges(part, found.dst) for part in parts], 1).reshape(x.shape)


def by_additive_attention(
    found: Edges,
    dst: Tensor | None,
    src: Tensor | None,
    edge: Tensor | None,
    v: Tensor,
    slope: float,
    p: float,
    heads: int,
) -> Tensor:
    """GAT's attention; the terms ``dst``, ``src`` and ``edge`` add up to the scores."""
    score_dst = _zeros(found.dst, v, heads) if dst is None else dst.reshape(-1, heads)
    score_src = _zeros(found.src, v, heads) if src is None else src.reshape(-1, heads)
    bias = None if edge is None else edge.reshape(-1, heads)
    rows = v.reshape(v.size(0), heads, v.shape[1:].numel() // heads)
    out = additive_attention(_adjacency(found), score_dst, score_src, rows, slope, bias, p)
    return out.reshape(-1, *v.shape[1:])


def by_attention_layer(
    found: Edges,
    x_dst: Tensor,
    att_dst: Tensor,
    x_src: Tensor,
    att_src: Tensor,
    v: Tensor,
    slope: float,
    p: float,
    heads: int,
) -> Tensor:
    """GAT's attention with :func:`scores` of both ends, as one autograd node if possible."""
    adj = _adjacency(found)
    if x_dst is x_src is v and type(adj) is Adjacency and adj.num_dst == adj.num_src:
        rows = _without_isolated(adj, v.flatten(1))
        shape = (1, heads, rows.size(1) // heads)
        vectors = [  # one vector per head, or one for all heads
            (att if att.numel() == rows.size(1) else att.flatten().expand(shape)).reshape(shape)
            for att in (att_src, att_dst)
        ]
        out = attention_layer(ADDITIVE, adj, rows, (), vectors, None, heads=heads, scale=slope, dropout_p=p)
        if out is not None:
            return out if v.dim() == 2 else out.reshape(-1, *v.shape[1:])
    of_ends = (scores(x_dst, att_dst), scores(x_src, att_src))
    return by_additive_attention(found, *of_ends, None, v, slope, p, heads)


def _without_isolated(adj: Adjacency, x: Tensor) -> Tensor:
    """Sets the rows of nodes without edges to 0, so that a NaN there cannot reach the vectors' gradients."""
    if not adj.has_empty_rows():
        return x
    find = lambda: adj.is_empty_row() & (adj.out_degree() == 0)  # noqa: E731
    is_isolated = adj.derived("fastsparse_core.isolated", find)
    has_some = adj.derived("fastsparse_core.has_isolated", lambda: (bool(is_isolated.any()),))[0]
    return _WithoutRows.apply(x, is_isolated) if has_some else x


class _WithoutRows(torch.autograd.Function):
    """Sets rows to 0. Their gradients are 0 anyway, so the backward pass changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_left_out: Tensor) -> Tensor:
        return torch.where(is_left_out.unsqueeze(1), 0.0, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def by_attention(
    found: Edges,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edge: Tensor | None,
    weight: Tensor | None,
    scale: float,
    bias: Tensor | None,
    p: float,
    heads: int,
) -> Tensor:
    """Dot-product attention; mapped edge features are added to keys and values."""
    bias = None if bias is None else bias.reshape(-1, heads)
    adj, q, k, rows = _adjacency(found), q.flatten(1), k.flatten(1), v.flatten(1)
    context: Any = _AS_IT_IS
    if is_any_autocast_enabled() and autocast_dtype(q) is q.dtype is k.dtype is v.dtype:
        # Autocast would cast nothing else, and without it, `attention` takes less time on the host.
        edge, weight = _cast(q.dtype, edge, weight)
        context = without_autocast(q)
    with context:
        out = attention(adj, q, k, rows, scale, bias, p, heads=heads, edge_attr=edge, edge_weight=weight)
    return out if v.dim() == 2 else out.reshape(-1, *v.shape[1:])


def by_gatv2_attention(
    found: Edges,
    dst: Tensor,
    src: Tensor,
    edge: Tensor | None,
    weight: Tensor | None,
    att: Tensor,
    slope: float,
    p: float,
    heads: int,
) -> Tensor:
    """GATv2's attention; the values are the sources' rows."""
    of_edges: dict[str, Any] = {"edge_attr": edge, "edge_weight": weight}
    rows = (dst.flatten(1), src.flatten(1))
    out = gatv2_attention(_adjacency(found), *rows, att.reshape(heads, -1), slope, p, **of_edges)
    return out if src.dim() == 2 else out.reshape(-1, *src.shape[1:])


def by_gated_aggregate(
    found: Edges,
    k: Tensor | None,
    q: Tensor | None,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
) -> Tensor:
    """Gated sum; one of the two maps of the edge features may be missing."""
    k = _zeros(found.dst, v, v.size(1)) if k is None else k
    q = _zeros(found.src, v, v.size(1)) if q is None else q
    if is_any_autocast_enabled():
        k, q, v = _alike(k, q, v)
        edge, gate_weight, value_weight = _cast(v.dtype, edge, gate_weight, value_weight)
    if edge is not None:
        gate_weight = _zero_map(value_weight) if gate_weight is None else gate_weight  # type: ignore[arg-type]
        value_weight = _zero_map(gate_weight) if value_weight is None else value_weight
    maps = {"gate_weight": gate_weight, "value_weight": value_weight}
    return gated_aggregate(found.special["adj"], k, q, v, edge_attr=edge, **maps)


#: Zeros by shape, dtype and device. Kernels only read them.
_zero_maps: dict[Any, Tensor] = {}
_MOST_ZERO_MAPS = 64


def _zero_map(like: Tensor) -> Tensor:
    """Zeros like a weight, stored from call to call, because filling them would be one launch more."""
    key = (like.shape, like.dtype, like.device)
    zeros = _zero_maps.get(key)
    if zeros is not None and is_plain_eager(zeros):
        return zeros
    is_capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    is_plain = type(like) in PLAIN and is_plain_eager(like.detach())
    # Stored zeros are never freed, because captured CUDA graphs may read them.
    if is_capturing or not is_plain or len(_zero_maps) >= _MOST_ZERO_MAPS:
        return torch.zeros_like(like)
    with torch.inference_mode(False):
        zeros = _zero_maps[key] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    if like.is_cuda:
        torch.cuda.current_stream(like.device).synchronize()  # other streams may read them next
    return zeros


def by_gine_aggregate(
    found: Edges, x: Tensor, edge: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """GINE's sum of rectified messages."""
    if weight is None:
        x, edge = _alike(x, edge)
    else:
        edge, weight, bias = _cast(x.dtype, edge, weight, bias)
    return gine_aggregate(_adjacency(found), x, edge, edge_weight=weight, edge_bias=bias)


def by_expression(found: Edges, expression: Any, places: Any, how: str, *tensors: Tensor) -> Tensor:
    """Computes and reduces an elementwise expression with a generated kernel."""
    return by_expressions(found, ((how, expression),), places, *tensors)


def by_expressions(found: Edges, roots: Any, places: Any, *tensors: Tensor) -> Tensor:
    """Computes several expressions, and concatenates the results along the second dimension."""
    dtype = autocast_dtype(tensors[0]) if is_any_autocast_enabled() else None
    if dtype is not None:  # autocast casts linear maps
        tensors = tuple(
            x.to(dtype) if place in ("mapped", "weight") else x
            for x, place in zip(tensors, places, strict=True)
        )
    outs = edge_expressions(_adjacency(found), roots, places, tensors)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def without_autocast(x: Tensor) -> Any:
    """Context without autocast, so that a kernel's result has the dtype of its terms, like PyTorch's sums."""
    device = "cuda" if x.is_cuda else x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _AS_IT_IS


_AS_IT_IS = contextlib.nullcontext()


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(x if x is None or x.dtype is dtype else x.to(dtype) for x in tensors)


def _alike(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts tensors to one dtype by PyTorch's promotion rules; under autocast their dtypes may differ."""
    dtypes = [x.dtype for x in tensors if x is not None]
    return (
        tensors if len(set(dtypes)) == 1 else _cast(functools.reduce(torch.promote_types, dtypes), *tensors)
    )


def present(found: Edges, x: Tensor) -> Tensor:
    """Selects the rows of destinations that have edges."""
    rows = _with_edges(found)
    return x if rows is None else x.index_select(0, rows)


def restored(found: Edges, x: Tensor) -> Tensor:
    """The inverse of :func:`present`: rows of all destinations, with zeros for those without edges."""
    rows = _with_edges(found)
    return x if rows is None else x.new_zeros(found.dst.num_nodes, *x.shape[1:]).index_copy(0, rows, x)


def degree(found: Edges, like: Tensor) -> Tensor:
    """Number of edges of every destination that has edges, in a shape that broadcasts with ``like``."""
    counts = present(found, found.dst.rows.in_degree())
    return counts.view(-1, *[1] * (like.dim() - 1)).to(like.dtype)


def _with_edges(found: Edges) -> Tensor | None:
    adj = found.dst.rows
    if not adj.has_empty_rows():
        return None
    find = lambda: (adj.in_degree() > 0).nonzero().flatten()  # noqa: E731
    return adj.derived("fastsparse_core.rows_with_edges", find)


def _adjacency(found: Edges) -> Adjacency:
    adj: Adjacency = found.special["adj"]
    return adj


def _times(end: EdgeEnd, like: Tensor, how: str) -> Tensor:
    """Number of times that a reduction counts a constant: the degree for a sum, else 1 (0 without edges)."""
    degree = end.rows.in_degree().view(-1, *[1] * (like.dim() - 1))
    return (degree if how == "sum" else degree > 0).to(like.dtype)


def _zeros(end: EdgeEnd, like: Tensor, width: int) -> Tensor:
    return like.new_zeros(end.num_nodes, width)
