"""The relations' linear maps and additive attention over them (RGAT) in one node of autograd's graph.

All nodes are multiplied by the matrices of all relations. This is faster on small graphs, on which the host
determines the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.fused.weight_gradient import weight_gradient
from fastsparse_core.ops import _attention_launch as launch
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._attention import unsupported_reason
from fastsparse_core.ops._attention_checks import draw_seed, drawn_by_replays
from fastsparse_core.ops._attention_launch import ADDITIVE, Call, Wanted
from fastsparse_core.ops._autocast import is_any_autocast_enabled, without_autocast
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE, DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._edge_rows import End, lift
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._segment_launch import gather_rows, sum_rows
from fastsparse_core.structure.adjacency import Adjacency

__all__ = ["relational_attention"]


class _Call(NamedTuple):
    adj: Adjacency
    pairs: End
    negative_slope: float
    dropout_p: float
    seed: Tensor | None


def relational_attention(
    adj: Adjacency,
    pairs: End,
    x: Tensor,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    negative_slope: float,
    dropout_p: float,
) -> Tensor | None:
    r"""Additive attention of every node over its edges of all relations.

    .. math::
        \mathbf{y}_i = \sum_{r,\, j} \operatorname{softmax}_{r,\, j}(\operatorname{leaky\_relu}(
        \mathbf{x}_i \mathbf{W}_r \mathbf{Q} + \mathbf{x}_j \mathbf{W}_r \mathbf{K})) \,
        \mathbf{x}_j \mathbf{W}_r \quad \text{for every head}

    Args:
        adj: structure (N, N * R); its columns are all pairs of a source and a relation, with the pairs of a
            source next to each other.
        pairs: for every edge, the number of its (destination, relation) pair: destination * R + relation.
        x: features (N, F).
        weight: matrices of the relations (R, F, heads * D).
        query: :math:`\mathbf{Q}`, (heads * D, heads).
        key: :math:`\mathbf{K}`, like ``query``.
        negative_slope: slope of the leaky ReLU for negative numbers.
        dropout_p: probability with which a weight is dropped.

    Returns:
        (N, heads * D), differentiable twice. None if no kernel supports the call, such as under autocast,
        with mixed dtypes, within a trace or a transform, or with dropout in a recorded step.
    """
    given = (x, weight, query, key)
    if (
        is_any_autocast_enabled()
        or x.dtype not in DTYPE_CODE
        or not is_plain_eager(x)
        or policy.eager_requests().get("attention") == "unfused"
        or (x.is_cuda and unsupported_reason(adj, ADDITIVE, x.dtype, *query.shape))
        or (dropout_p and drawn_by_replays(dropout_p))
    ):
        return None
    wrapped = False
    for each in given:
        if type(each) not in PLAIN or each.dtype != x.dtype or each.device != x.device or each.is_neg():
            return None
        wrapped |= is_wrapped(each)
    call = _Call(adj, pairs, negative_slope, *(draw_seed(dropout_p) if dropout_p else (0.0, None)))
    if torch.is_grad_enabled():
        apply = _RelationalAttention.apply if wrapped else _apply
        out: Tensor = apply(*given, call)
        return out
    return launch.forward(adj, _attention_call(call, _operands(call, *given)[1]))[0]


def _operands(
    call: _Call, x: Tensor, weight: Tensor, query: Tensor, key: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The joined map, and scores of destinations and sources, values, and scores of edges.

    The map has the columns of a relation's values, scores of sources and scores of destinations next to each
    other, relation by relation: (F, R * (heads * D + 2 * heads)).
    """
    width, heads = weight.shape[2], query.shape[1]
    by_feature = weight.transpose(0, 1)
    joined = torch.cat((by_feature, by_feature @ key, by_feature @ query), 2).flatten(1)
    columns, parts = width + 2 * heads, (width, heads, heads)
    # The score of a destination depends on the relation, so it is added per edge.
    if torch.is_grad_enabled():
        # The original layer multiplies rows per edge, so rows of pairs without edges must not change
        # gradients.
        of_nodes = linear_before_sum(x, joined.t(), None, weight.shape[0], columns)
        rows, of_src, of_dst = of_nodes.view(-1, columns).split(parts, 1)
        (of_edge,) = lift((of_dst,), (call.pairs,))
    else:
        rows, of_src, of_dst = torch.mm(x, joined).view(-1, columns).split(parts, 1)
        index = call.pairs.index
        of_edge = gather_rows(of_dst, index) if x.is_cuda else of_dst.index_select(0, index)
    precise = ACCUMULATION_DTYPE[x.dtype]
    none = x.new_zeros(x.shape[0], heads, dtype=precise)
    return joined, (none, of_src.to(precise), rows, of_edge)


def _attention_call(call: _Call, operands: Sequence[Tensor]) -> Call:
    dst, src, v, of_edge = operands
    return Call(dst, src, v, None, None, None, of_edge, *call[2:], ADDITIVE, src.shape[1])


class _RelationalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, call = arguments
        joined, operands = _operands(call, *given)
        out, lse, _ = launch.forward(call.adj, _attention_call(call, operands))
        ctx.save_for_backward(*given, joined, *operands, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients if is_first_derivative(grad) else _differentiable
        if is_any_autocast_enabled():
            return (*without_autocast(gradients, ctx, grad), None)
        return (*gradients(ctx, grad), None)


_apply = direct(_RelationalAttention)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, query, key, joined, *operands, lse = ctx.saved_tensors
    adj, pairs, *_ = ctx.call
    call = _attention_call(ctx.call, operands)
    found = launch.backward(adj, call, grad, None, lse, wanted=Wanted(bias=True))
    of_src, of_rows, of_edge = found.src, found.v, found.bias
    assert of_rows is not None
    assert of_edge is not None
    of_dst, dtype = sum_rows(of_edge, pairs.find(), "sum"), x.dtype
    of_pairs = torch.cat((of_rows, of_src.to(dtype), of_dst.to(dtype)), 1)
    (num_relations, width, rows), heads, columns = weight.shape, query.shape[1], of_pairs.shape[1]
    of_pairs = of_pairs.view(x.shape[0], -1)
    grad_x = torch.mm(of_pairs, joined.t()) if ctx.needs_input_grad[0] else None
    if True not in ctx.needs_input_grad[1:4]:
        return grad_x, None, None, None
    of_map = weight_gradient(of_pairs, x, dtype, True, num_relations, columns, out_by_in=False)
    grad_weight, grad_key, grad_query = of_map.view(-1, columns).split((rows, heads, heads), 1)
    of_rows = torch.addmm(grad_weight, grad_key, key.t()).addmm_(grad_query, query.t())
    by_column = weight.transpose(0, 1).reshape(-1, rows).t()
    grad_weight = of_rows.view(width, num_relations, rows).transpose(0, 1)
    return grad_x, grad_weight, torch.mm(by_column, grad_query), torch.mm(by_column, grad_key)


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Computes the same gradients by differentiable operators."""
    adj = ctx.call.adj

    def compute(*given: Tensor) -> Tensor:
        return unfused.attention(adj, *_attention_call(ctx.call, _operands(ctx.call, *given)[1]))

    return tuple(unfused_gradients(compute, grad, ctx.saved_tensors[:4], ctx.needs_input_grad))
