"""Reference operators in plain PyTorch, by default in float64, for comparison with kernels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.structure.adjacency import Adjacency

#: Dtype in which the references compute.
_dtype: ContextVar[torch.dtype] = ContextVar("fastsparse_reference_dtype", default=torch.float64)


@contextlib.contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Context in which the references compute in another dtype than float64, for exported programs."""
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def _wide(x: Tensor) -> Tensor:
    return x.to(_dtype.get())


def _edges(adj: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column, and position in the caller's edge order of every stored entry, int64 (num_edges,) each."""
    position = torch.arange(adj.num_edges, device=adj.device) if adj.edge_id is None else adj.edge_id.long()
    return adj.row().long(), adj.col.long(), position


def _matrix(x: Tensor) -> Tensor:
    return x[:, None] if x.dim() == 1 else x.flatten(1)


def _in_callers_order(adj: Adjacency, entry: Tensor) -> Tensor:
    """Reorders values of the stored entries to the caller's edge order, (num_values, ...)."""
    _, _, position = _edges(adj)
    return entry.new_zeros(adj.num_values, *entry.shape[1:]).index_copy(0, position, entry)


def spmm(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None = None,
    reduce: str = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.spmm`: differentiable gather and scatter over the edges."""
    row, col, position = _edges(adj)
    features = _matrix(_wide(x))
    width = features.size(1)
    message = features[col]
    if value is not None:
        weight = _matrix(_wide(value))[position]
        heads = weight.size(1)
        message = message.reshape(col.size(0), heads, width // heads) * weight[:, :, None]
        message = message.reshape(col.size(0), width)
    if scale_src is not None:
        message = message * _wide(scale_src)[col, None]
    index = row[:, None].expand_as(message)
    out = features.new_zeros(adj.num_dst, width)
    name = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[reduce]
    out = out.scatter_reduce(0, index, message, name, include_self=False)
    if scale_dst is not None:
        out = out * _wide(scale_dst)[:, None]
    if bias is not None:
        out = out + _wide(bias)
    if relu:
        out = out.relu()
    return out.reshape(adj.num_dst, *x.shape[1:])


def multi_aggregate(
    adj: Adjacency,
    x_src: Tensor,
    aggregations: Sequence[str],
    *,
    x_dst: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    groups: int = 1,
    min_variance: float = 1e-5,
    message_dtype: torch.dtype | None = None,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.multi_aggregate`, differentiable.

    Messages are rounded to ``message_dtype`` before they are aggregated; None: they are not rounded. The
    gradient of an extremum is divided equally among the entries that equal it, also if the extremum is 0, for
    which the gradient of ``scatter_reduce`` is wrong.
    """
    row, col, position = _edges(adj)
    message = _wide(x_src)[col]
    if edge_attr is not None:
        edges = _wide(edge_attr)[position]
        message = message + (edges if edge_weight is None else F.linear(edges, _wide(edge_weight)))
    if x_dst is not None:
        message = message + _wide(x_dst)[row]
    if message_dtype is not None:
        message = message + (message.to(message_dtype).to(message.dtype) - message).detach()
    count = torch.bincount(row, minlength=adj.num_dst).clamp(min=1)[:, None]
    index = row[:, None].expand_as(message)
    zeros = message.new_zeros(adj.num_dst, message.size(1))

    def extremum(name: str) -> Tensor:
        found = zeros.scatter_reduce(0, index, message.detach(), name, include_self=False)
        chosen = (message.detach() == found[row]).to(message.dtype)
        return zeros.index_add(0, row, message * chosen / zeros.index_add(0, row, chosen)[row])

    total = zeros.index_add(0, row, message)
    mean = total / count
    variance = zeros.index_add(0, row, (message - mean[row]).square()) / count
    deviates = variance > max(min_variance, 0)
    results = {
        "sum": total,
        "mean": mean,
        "min": extremum("amin"),
        "max": extremum("amax"),
        "var": variance,
        "std": torch.where(deviates, variance.where(deviates, torch.ones_like(variance)).sqrt(), 0.0),
    }
    wanted = torch.stack([results[name].unflatten(1, (groups, -1)) for name in aggregations], dim=2)
    return wanted.flatten(1)


def sddmm(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.sddmm`, differentiable."""
    row, col, _ = _edges(adj)
    product = (_wide(x_dst)[row] * _wide(x_src)[col]).sum(-1)
    for scale, index in ((scale_dst, row), (scale_src, col)):
        if scale is not None:
            weight = _wide(scale)[index]
            product = product * (weight if product.dim() == 1 else weight[:, None])
    return _in_callers_order(adj, product)


def ssd_backward(
    adj: Adjacency,
    grad: Tensor,
    ids: Tensor,
    value: Tensor | None = None,
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor:
    """Float64 reference of the gradient of ssd in the kept values, whose columns are ``ids`` (num_src, k)."""
    row, col, position = _edges(adj)
    term = _wide(grad)[row].gather(1, ids.long()[col])
    for weight, index in ((value, position), (scale_dst, row), (scale_src, col)):
        if weight is not None:
            term = term * _wide(weight)[index, None]
    return term.new_zeros(ids.shape).index_add(0, col, term)


def ssd_value_grad(
    adj: Adjacency,
    grad: Tensor,
    values: Tensor,
    ids: Tensor,
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
) -> Tensor:
    """Float64 reference of the gradient of ssd in the edge values, (num_values,)."""
    row, col, position = _edges(adj)
    product = (_wide(grad)[row].gather(1, ids.long()[col]) * _wide(values)[col]).sum(1)
    for scale, index in ((scale_dst, row), (scale_src, col)):
        if scale is not None:
            product = product * _wide(scale)[index]
    return product.new_zeros(adj.num_values).index_copy(0, position, product)


# ---------------------------------------------------------------- attention


def dropout_keep(adj: Adjacency, heads: int, p: float, seed: int | Tensor) -> Tensor:
    """Mask of attention dropout, bool (num_edges, heads) in stored order.

    The mask is that of ``kernels/include/fastsparse/philox.h``, computed with PyTorch. An entry is kept if
    the first word of Philox4x32-10 (Salmon et al., SC 2011) with key ``seed`` and counter (row, column, head,
    0) is at least ``p * 2^32``. A seed may be an int64 tensor without dimensions, which the host does not
    read.
    """
    if p == 0:
        return torch.ones(adj.num_edges, heads, dtype=torch.bool, device=adj.device)
    low = 0xFFFFFFFF
    shape = (adj.num_edges, heads)
    c0 = adj.row().long()[:, None].expand(shape)
    c1 = adj.col.long()[:, None].expand(shape)
    c2 = torch.arange(heads, device=adj.device).expand(shape)
    c3 = torch.zeros_like(c2)
    key0, key1 = seed & low, seed >> 32 & low
    for _ in range(10):
        # 64-bit products may wrap; their bits are still right.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (product1 >> 32 & low) ^ c1 ^ key0
        c1 = product1 & low
        c2 = (product0 >> 32 & low) ^ c3 ^ key1
        c3 = product0 & low
        key0, key1 = key0 + 0x9E3779B9 & low, key1 + 0xBB67AE85 & low
    return c0 >= min(math.ceil(p * 2**32), low)


def edge_softmax(adj: Adjacency, score: Tensor) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.edge_softmax`, differentiable."""
    _, _, position = _edges(adj)
    entry = _softmax(adj, _matrix(_wide(score))[position])
    return _in_callers_order(adj, entry).reshape(score.shape)


def _softmax(adj: Adjacency, score: Tensor) -> Tensor:
    """Softmax over the entries of every row, (num_edges, heads) in stored order."""
    row = adj.row().long()
    index = row[:, None].expand_as(score)
    maximum = score.new_full((adj.num_dst, score.size(1)), -torch.inf)
    maximum = maximum.scatter_reduce(0, index, score.detach(), "amax")
    # Rows whose scores are all -inf give 0, like rows without entries.
    exponential = (score - maximum.masked_fill(maximum == -torch.inf, 0)[row]).exp()
    total = score.new_zeros(maximum.shape).index_add(0, row, exponential)
    return exponential / total.masked_fill(total == 0, 1)[row]


def _attend(
    adj: Adjacency, score: Tensor, v: Tensor, dropout_p: float, seed: int, edges: Tensor | None = None
) -> Tensor:
    """Sums the rows of v (num_src, heads, width), weighted by the softmax of the scores.

    Scores (num_edges, heads) are in stored order. ``edges`` (num_edges, heads, width), also in stored order,
    is added to the rows of v.
    """
    row, col, _ = _edges(adj)
    keep = dropout_keep(adj, score.size(1), dropout_p, seed)
    weight = _softmax(adj, score) * keep / (1 - dropout_p)
    out = v.new_zeros(adj.num_dst, *v.shape[1:], dtype=_dtype.get())
    value = _wide(v)[col] if edges is None else _wide(v)[col] + edges
    return out.index_add(0, row, weight[:, :, None] * value)


def attention(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    *,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.attention` on (n, heads, width), differentiable."""
    row, col, position = _edges(adj)
    scale = q.size(2) ** -0.5 if scale is None else scale
    keys, edges = _wide(k)[col], None
    if edge_attr is not None and edge_weight is not None:
        edges = _projected(edge_attr, edge_weight, q.size(1))[position]
        keys = keys + edges
    score = scale * (_wide(q)[row] * keys).sum(-1)
    if bias is not None:
        score = score + _matrix(_wide(bias))[position]
    return _attend(adj, score, v, dropout_p, seed, edges)


def _projected(edge_attr: Tensor, edge_weight: Tensor, heads: int) -> Tensor:
    """Projected features of every edge, :math:`W a`, (num_values, heads, width)."""
    return (_matrix(_wide(edge_attr)) @ _wide(edge_weight).t()).unflatten(1, (heads, -1))


def attention_weights(adj: Adjacency, q: Tensor, k: Tensor) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.attention_weights` on (n, heads, width), differentiable."""
    return edge_softmax(adj, q.size(2) ** -0.5 * sddmm(adj, q, k))


def additive_attention(
    adj: Adjacency,
    score_dst: Tensor,
    score_src: Tensor,
    v: Tensor,
    negative_slope: float = 0.2,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.additive_attention`, differentiable."""
    row, col, position = _edges(adj)
    score = _wide(score_dst)[row] + _wide(score_src)[col]
    if bias is not None:
        score = score + _matrix(_wide(bias))[position]
    return _attend(adj, F.leaky_relu(score, negative_slope), v, dropout_p, seed)


def additive_attention_weights(
    adj: Adjacency, score_dst: Tensor, score_src: Tensor, negative_slope: float = 0.2
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.additive_attention_weights`, differentiable."""
    row, col, _ = _edges(adj)
    score = F.leaky_relu(_wide(score_dst)[row] + _wide(score_src)[col], negative_slope)
    return _in_callers_order(adj, _softmax(adj, score))


def gatv2_attention(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    seed: int = 0,
    *,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.gatv2_attention`, differentiable."""
    row, col, position = _edges(adj)
    hidden = _wide(x_dst)[row] + _wide(x_src)[col]
    if edge_attr is not None and edge_weight is not None:
        hidden = hidden + _projected(edge_attr, edge_weight, x_dst.size(1))[position]
    hidden = F.leaky_relu(hidden, negative_slope)
    return _attend(adj, (hidden * _wide(att)).sum(-1), x_src, dropout_p, seed)


def gatv2_attention_weights(
    adj: Adjacency, x_dst: Tensor, x_src: Tensor, att: Tensor, negative_slope: float = 0.2
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.gatv2_attention_weights`, differentiable."""
    row, col, _ = _edges(adj)
    hidden = F.leaky_relu(_wide(x_dst)[row] + _wide(x_src)[col], negative_slope)
    return _in_callers_order(adj, _softmax(adj, (hidden * _wide(att)).sum(-1)))


# ---------------------------------------------------------------- messages with edge features


def gine_aggregate(
    adj: Adjacency,
    x: Tensor,
    edge_attr: Tensor,
    *,
    edge_weight: Tensor | None = None,
    edge_bias: Tensor | None = None,
    eps: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Reference of :func:`fastsparse_core.gine_aggregate` in ``dtype``, differentiable."""
    row, col, position = _edges(adj)
    edges = edge_attr.to(dtype)
    if edge_weight is not None:
        edges = F.linear(edges, edge_weight.to(dtype), None if edge_bias is None else edge_bias.to(dtype))
    sums = _row_sums(adj, row, (x.to(dtype)[col] + edges[position]).relu())
    return sums if eps is None else sums + (1 + eps.to(dtype)) * x.to(dtype)


def gated_aggregate(
    adj: Adjacency,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    *,
    edge_attr: Tensor | None = None,
    gate_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Reference of :func:`fastsparse_core.gated_aggregate` in ``dtype``, differentiable."""
    row, col, position = _edges(adj)
    z, value = k.to(dtype)[row] + q.to(dtype)[col], v.to(dtype)[col]
    if edge_attr is not None and gate_weight is not None and value_weight is not None:
        z = z + F.linear(edge_attr.to(dtype), gate_weight.to(dtype))[position]
        value = value + F.linear(edge_attr.to(dtype), value_weight.to(dtype))[position]
    return _row_sums(adj, row, z.sigmoid() * value)


def gated_edges(
    adj: Adjacency, k: Tensor, q: Tensor, v: Tensor, edge: Tensor, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of :func:`fastsparse_core.gated_edges` in ``dtype``, differentiable."""
    row, col, position = _edges(adj)
    z = k.to(dtype)[row] + q.to(dtype)[col] + edge.to(dtype)[position]
    gate = z.sigmoid()
    total = _row_sums(adj, row, gate * v.to(dtype)[col])
    return total, _row_sums(adj, row, gate), _in_callers_order(adj, z)


def _row_sums(adj: Adjacency, row: Tensor, entry: Tensor) -> Tensor:
    return entry.new_zeros(adj.num_dst, entry.size(1)).index_add(0, row, entry)


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Float64 reference of :func:`fastsparse_core.maxk`: values and int64 columns, by a stable sort."""
    # NaN, of either sign, sorts first, and entries that are equal keep their order.
    key = x.detach().double().nan_to_num(torch.nan, torch.inf, -torch.inf)
    order = key.sort(dim=1, descending=True, stable=True).indices
    ids = order[:, :k].sort(dim=1).values
    return _wide(x).gather(1, ids), ids


def cbsr_to_dense(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """Float64 reference of :meth:`fastsparse_core.CBSR.to_dense`."""
    return values.new_zeros(values.size(0), width, dtype=_dtype.get()).scatter(1, ids.long(), _wide(values))


def ssd(
    adj: Adjacency,
    values: Tensor,
    ids: Tensor,
    width: int,
    value: Tensor | None = None,
    reduce: str = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.ssd`, differentiable."""
    dense = cbsr_to_dense(values, ids, width)
    return spmm(adj, dense, value, reduce, scale_dst=scale_dst, scale_src=scale_src, bias=bias)


def scatter(src: Tensor, index: Tensor, dim_size: int, reduce: str = "sum") -> Tensor:
    """Float64 reference of :func:`fastsparse_core.scatter`; of equal extrema the first row is chosen."""
    src, index = _wide(src), index.long()
    wide = index.view(-1, *[1] * (src.dim() - 1)).expand(src.shape)
    zeros = src.new_zeros(dim_size, *src.shape[1:])
    if reduce == "mul":
        return torch.ones_like(zeros).scatter_reduce(0, wide, src, "prod")
    if reduce in ("sum", "mean"):
        return zeros.scatter_reduce(0, wide, src, reduce, include_self=False)
    if reduce in ("max", "min"):
        best = zeros.scatter_reduce(0, wide, src.detach(), f"a{reduce}", include_self=False)
        row = torch.arange(src.size(0), device=src.device).view(-1, *[1] * (src.dim() - 1))
        chosen = torch.where(src.detach() == best.gather(0, wide), row, src.size(0))
        arg = torch.full_like(zeros, src.size(0), dtype=torch.int64).scatter_reduce(0, wide, chosen, "amin")
        return torch.cat([src, zeros[:1]]).gather(0, arg) if dim_size else src[:0]
    deviation = src - scatter(src, index, dim_size, "mean").index_select(0, index)
    variance = scatter(deviation.square(), index, dim_size, "mean")
    if reduce == "var":
        return variance
    # The derivative of the square root at 0 is infinite; it is defined as 0.
    return torch.where(variance == 0, 0, torch.where(variance == 0, 1, variance).sqrt())


def scatter_softmax(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    """Float64 reference of :func:`fastsparse_core.scatter_softmax`."""
    src, index = _wide(src), index.long()
    maximum = scatter(src.detach(), index, dim_size, "max")
    # Segments whose values are all -inf give 0.
    weight = (src - maximum.masked_fill(maximum == -torch.inf, 0).index_select(0, index)).exp()
    total = scatter(weight, index, dim_size)
    return weight / total.masked_fill(total == 0, 1).index_select(0, index)
