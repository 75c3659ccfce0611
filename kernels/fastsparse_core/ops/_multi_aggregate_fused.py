"""Kernels and gradients of `multi_aggregate`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import current_stream
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE, accumulation_dtype
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.ops._registration import FusedOperator
from fastsparse_core.structure.adjacency import Adjacency

#: Number of features per lane and per warp (kernels/include/fastsparse/multi_aggregate.cuh).
_QUAD, _TILE = 4, 128
#: Number of partial sums of the gradient of the edges' linear map, one per thread block on CUDA (enough to
#: fill a large GPU) and one per task on the CPU.
_CUDA_PARTS, _CPU_PARTS = 512, 64
_PLANES = 6  # rows of numbers in a partial result


def _prepared(
    x: Tensor, x_dst: Tensor | None, edge: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Operands in the form of the kernels.

    On CUDA, edge features are padded to a multiple of 4. W is transposed and cast to the accumulation dtype.
    """
    if x.stride(1) != 1:
        x = unit_stride(x)
    if x_dst is not None and x_dst.stride(1) != 1:
        x_dst = unit_stride(x_dst)
    if edge is None:
        return x, x_dst, None, None
    if weight is not None:
        missing = -edge.size(1) % _QUAD if edge.is_cuda else 0
        if missing:
            edge, weight = F.pad(edge, (0, missing)), F.pad(weight, (0, missing))
        weight = weight.to(ACCUMULATION_DTYPE[edge.dtype]).t().contiguous()
        if edge.is_cuda and edge.data_ptr() % 16:
            edge = edge.clone(memory_format=torch.contiguous_format)
    return x, x_dst, edge.contiguous(), weight


class _Slots:
    """Properties of the requested aggregations, from the position of each of `AGGREGATIONS` (or -1).

    Attributes:
        count: number of requested aggregations.
        varies: whether there are variances or deviations; their backward pass reads the means.
        has_extremum: whether there are minima or maxima; their backward pass reads the numbers of ties.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.count = sum(slot >= 0 for slot in slots)
        self.varies, self.has_extremum = max(slots[4:]) >= 0, max(slots[2:4]) >= 0


_read = functools.cache(_Slots)


def _structure(adj: Adjacency, index: int) -> Any:
    """Returns the structure for the kernels; on CUDA, the call does not count as a use for sorting slices."""
    return used_csr(adj) if index < 0 else adj.csr_structure


def aggregate(
    adj: Adjacency,
    x_src: Tensor,
    x_dst: Tensor | None,
    edge: Tensor | None,
    weight: Tensor | None,
    slots: Sequence[int],
    groups: int,
    min_variance: float,
    num_dst: int,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Results and, with ``keep``, the means and numbers of ties that the backward pass reads."""
    x, x_dst, edge, weight = _prepared(x_src, x_dst, edge, weight)
    width, of = x.size(1), _read(tuple(slots))
    dtype = ACCUMULATION_DTYPE[x.dtype]
    out = x.new_empty(num_dst, of.count * width)
    mean = x.new_empty(num_dst if keep and of.varies else 0, width, dtype=dtype)
    ties = x.new_empty(num_dst if keep and of.has_extremum else 0, 2, width, dtype=dtype)
    if out.numel() == 0:
        return out, mean, ties
    index, partial = x.get_device(), None
    if index >= 0 and adj.row_split.num_slots:
        num = adj.row_split.num_slots
        partial = x.new_empty(num * (_PLANES * width + 1), dtype=dtype)
    _C.multi_aggregate(
        structure=adj.plans.get("csr") or _structure(adj, index),
        input=_C.MultiAggregateInput(
            x_src=x,
            group_width=width // groups,
            x_dst=x_dst,
            edge=edge,
            weight=weight,
            slots=slots,
            num_slots=of.count,
            min_variance=min_variance,
        ),
        out=out,
        mean=mean if mean.numel() else None,
        ties=ties if ties.numel() else None,
        partial=partial,
        device=index,
        queue=torch.get_num_threads() if index < 0 else current_stream(index),
    )
    return out, mean, ties


def gradients(
    adj: Adjacency,
    grad: Tensor,
    x_src: Tensor,
    x_dst: Tensor | None,
    edge: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    mean: Tensor,
    ties: Tensor,
    slots: Sequence[int],
    groups: int,
    min_variance: float,
    *,
    x_src_wanted: bool,
    x_dst_wanted: bool,
    edge_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the sources, the destinations, the edges and their linear map; None: not wanted."""
    given_edge, given_weight = edge, weight
    grad, (x, x_dst, edge, weight) = grad.contiguous(), _prepared(x_src, x_dst, edge, weight)
    width, of, num_edges = x.size(1), _read(tuple(slots)), adj.col.numel()
    dtype = ACCUMULATION_DTYPE[x.dtype]
    has_rows = edge is not None and weight is None
    make = x.new_empty if width and num_edges else x.new_zeros
    grad_src = make(x.shape) if x_src_wanted else None
    grad_dst = make((adj.num_dst, width)) if x_dst_wanted else None

    def of_values(like: Tensor, *shape: int, wider: bool = False) -> Tensor:
        every = adj.num_values == num_edges and num_edges > 0
        make = torch.empty if every else torch.zeros
        return make(shape, dtype=dtype if wider else like.dtype, device=like.device)

    grad_edge = grad_weight = marks = None
    parts = 1
    if edge is not None and weight is not None:
        if weight_wanted or not x.is_cuda:
            parts = _CUDA_PARTS if x.is_cuda else _CPU_PARTS
        if edge_wanted:
            tiles = max(-(-width // _TILE), 1) if x.is_cuda else 1
            grad_edge = of_values(edge, tiles, adj.num_values, edge.size(1), wider=True)
        if weight_wanted:
            grad_weight = x.new_zeros(parts, edge.size(1), width, dtype=dtype)
    elif edge is not None and (edge_wanted or (x.is_cuda and x_src_wanted)):
        grad_edge = of_values(edge, adj.num_values, width)  # on CUDA, the pass over columns sums these rows
    if not x.is_cuda:
        parts = _CPU_PARTS
    slope = share = None
    if width and num_edges:
        base = x.new_empty(adj.num_dst, width, dtype=dtype)
        if of.varies:
            slope = torch.empty_like(base)
        if of.has_extremum:
            share = x.new_empty(adj.num_dst, 2, width, dtype=dtype)
            if x.is_cuda and not has_rows:
                quads = -(-width // _QUAD)
                marks = torch.empty(adj.num_values, quads, dtype=torch.uint8, device=x.device)
        index, partial = x.get_device(), None
        if index >= 0 and grad_weight is not None and not torch.cuda.is_current_stream_capturing():
            adj.sort_slices()  # W's gradient is summed in the order of slices, which must not change later
        columns = adj.t()
        if index >= 0:
            num = columns.row_split.num_slots
            partial = x.new_empty(num, width, dtype=dtype) if num and x_src_wanted else None
        _C.multi_aggregate_backward(
            structure=adj.plans.get("csr") or _structure(adj, index),
            transposed=columns.plans.get("csr") or _structure(columns, index),
            input=_C.MultiAggregateInput(
                x_src=x,
                group_width=width // groups,
                x_dst=x_dst,
                edge=edge,
                weight=weight,
                slots=slots,
                num_slots=of.count,
                min_variance=min_variance,
            ),
            out=out,
            mean=mean if mean.numel() else None,
            ties=ties if ties.numel() else None,
            grad=grad,
            base=base,
            slope=slope,
            share=share,
            marks=marks,
            grad_src=grad_src,
            grad_dst=grad_dst,
            grad_edge=grad_edge,
            grad_weight=grad_weight,
            weight_parts=parts,
            num_values=adj.num_values,
            partial=partial,
            device=index,
            queue=torch.get_num_threads() if index < 0 else current_stream(index),
        )
    of_edge = of_weight = None
    if edge_wanted and given_edge is not None and grad_edge is not None:
        if not has_rows:
            grad_edge = grad_edge.sum(0) if grad_edge.size(0) > 1 else grad_edge[0]
            grad_edge = grad_edge[:, : given_edge.size(1)]
        of_edge = grad_edge.to(given_edge.dtype)
    if grad_weight is not None and given_weight is not None:
        of_weight = grad_weight.sum(0)[: given_weight.size(1)].t().contiguous().to(given_weight.dtype)
    return grad_src, grad_dst, of_edge, of_weight


# ---------------------------------------------------------------- step by step


def unfused(
    adj: Adjacency,
    x_src: Tensor,
    x_dst: Tensor | None,
    edge: Tensor | None,
    weight: Tensor | None,
    slots: Sequence[int],
    groups: int,
    min_variance: float,
) -> Tensor:
    """The operator by unfused PyTorch operators, which store every message; differentiable repeatedly."""
    x = x_src
    dtype, row = accumulation_dtype(x.dtype), adj.row().long()
    message = x.to(dtype)[adj.col.long()]
    if edge is not None:
        features = (edge if adj.edge_id is None else edge[adj.edge_id.long()]).to(dtype)
        message = message + (features if weight is None else F.linear(features, weight.to(dtype)))
    if x_dst is not None:
        message = message + x_dst.to(dtype)[row]
    message = message.to(x.dtype).to(dtype)
    zeros = message.new_zeros(adj.num_dst, x.size(1))
    count = (
        zeros.new_zeros(adj.num_dst).index_add(0, row, zeros.new_ones(adj.num_edges))[:, None].clamp(min=1)
    )
    index = row[:, None].expand_as(message)

    def total(of: Tensor) -> Tensor:
        return zeros.index_add(0, row, of)

    def extremum(name: str) -> Tensor:
        found = zeros.scatter_reduce(0, index, message.detach(), name, include_self=False)
        chosen = (message.detach() == found[row]).to(dtype)
        return total(message * chosen / total(chosen)[row])

    def variance() -> Tensor:
        return total((message - (total(message) / count)[row]).square()) / count

    def deviation() -> Tensor:
        found = variance()
        deviates = found > min_variance
        return torch.where(deviates, found.where(deviates, torch.ones_like(found)).sqrt(), 0.0)

    compute = (
        lambda: total(message),
        lambda: total(message) / count,
        lambda: extremum("amin"),
        lambda: extremum("amax"),
        variance,
        deviation,
    )
    order = sorted((slot, number) for number, slot in enumerate(slots) if slot >= 0)
    results = [compute[number]().unflatten(1, (groups, x.size(1) // groups)) for _, number in order]
    return torch.stack(results, dim=2).flatten(1).to(x.dtype)


# ---------------------------------------------------------------- registration


def _fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    width, dtype, slots = of.x_src.size(1), accumulation_dtype(of.x_src.dtype), _read(tuple(of.slots))
    return (
        of.x_src.new_empty(of.num_dst, slots.count * width),
        of.x_src.new_empty(of.num_dst if of.keep and slots.varies else 0, width, dtype=dtype),
        of.x_src.new_empty(of.num_dst if of.keep and slots.has_extremum else 0, 2, width, dtype=dtype),
    )


aggregate_op = FusedOperator("multi_aggregate", aggregate, gradients, unfused, _fake, ("out", "mean", "ties"))
