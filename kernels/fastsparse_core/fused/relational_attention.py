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
from fastsparse_core.ops._edge_rows import End, lift, sum_edges
from fastsparse_core.ops._kept_results import unfused_gradients
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
        or policy.requested("attention", "auto") == "unfused"
        or (x.is_cuda and unsupported_reason(adj, ADDITIVE, x.dtype, *query.shape))
        or drawn_by_replays(dropout_p)
    ):
        return None
    wrapped = False
    for each in given:
        if type(each) not in PLAIN or each.dtype != x.dtype or each.device != x.device or each.is_neg():
            return None
        wrapped |= is_wrapped(each)
    call = _Call(adj, pairs, negative_slope, *draw_seed(dropout_p))
    if torch.is_grad_enabled():
        apply = _RelationalAttention.apply if wrapped else _apply
        out: Tensor = apply(*given, call)
        return out
    maps = _maps(weight, query, key)
    return launch.forward(adj, _attention_call(call, _operands(x, maps, pairs)))[0]


def _maps(weight: Tensor, query: Tensor, key: Tensor) -> Sequence[Tensor]:
    """The matrices of values, and of scores of sources and destinations: (F * R, columns) each."""
    by_feature = weight.transpose(0, 1).reshape(-1, weight.shape[2])
    return by_feature, torch.mm(by_feature, key), torch.mm(by_feature, query)


def _operands(x: Tensor, maps: Sequence[Tensor], pairs: End) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of destinations and sources, values, and scores of edges."""
    width, precise = x.shape[1], ACCUMULATION_DTYPE[x.dtype]
    # The original layer multiplies rows per edge, so rows of pairs without edges must not change gradients.
    rows, of_src, of_dst = (
        linear_before_sum(x, each.view(width, -1).t(), None, each.shape[0] // width, each.shape[1]).view(
            -1, each.shape[1]
        )
        for each in maps
    )
    # The score of a destination depends on the relation, so it is added per edge.
    (of_edge,) = lift((of_dst,), (pairs,))
    none = x.new_zeros(x.shape[0], of_edge.shape[1], dtype=precise)
    return none, of_src.to(precise), rows, of_edge


def _attention_call(call: _Call, operands: Sequence[Tensor]) -> Call:
    dst, src, v, of_edge = operands
    return Call(dst, src, v, None, None, None, of_edge, *call[2:], ADDITIVE, src.shape[1])


class _RelationalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, call = arguments
        maps = _maps(*given[1:])
        operands = _operands(given[0], maps, call.pairs)
        out, lse, _ = launch.forward(call.adj, _attention_call(call, operands))
        ctx.save_for_backward(*given, *maps, *operands, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients if is_first_derivative(grad) else _differentiable
        return (*without_autocast(gradients, ctx, grad), None)


_apply = direct(_RelationalAttention)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, query, key, *maps = ctx.saved_tensors[:7]
    adj, pairs, *_ = ctx.call
    *operands, lse = ctx.saved_tensors[7:]
    call = _attention_call(ctx.call, operands)
    found_here = launch.backward(adj, call, grad, None, lse, wanted=Wanted(bias=True))
    of_src, of_rows, of_edge = found_here.src, found_here.v, found_here.bias
    assert of_rows is not None
    assert of_edge is not None
    of_dst = sum_edges(of_edge, pairs, adj.num_src)
    num_nodes, width = x.shape
    found = [each.to(x.dtype).view(num_nodes, -1) for each in (of_rows, of_src, of_dst)]
    grad_x = None
    if ctx.needs_input_grad[0]:
        of_weight, of_key, of_query = (each.view(width, -1).t() for each in maps)
        grad_x = torch.mm(found[0], of_weight).addmm_(found[1], of_key).addmm_(found[2], of_query)
    if not any(ctx.needs_input_grad[1:4]):
        return grad_x, None, None, None
    num_relations = weight.shape[0]
    grads = [
        weight_gradient(each, x, x.dtype, True, num_relations, of_map.shape[1], out_by_in=False).view_as(
            of_map
        )
        for each, of_map in zip(found, maps, strict=True)
    ]
    by_column = maps[0].t()
    grad_query, grad_key = torch.mm(by_column, grads[2]), torch.mm(by_column, grads[1])
    grad = grads[0].addmm_(grads[1], key.t()).addmm_(grads[2], query.t())
    return grad_x, grad.view(width, *weight.shape[::2]).transpose(0, 1), grad_query, grad_key


def _differentiable(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients, by differentiable operators."""
    adj, pairs, *_ = ctx.call

    def compute(x: Tensor, *matrices: Tensor) -> Tensor:
        return unfused.attention(adj, *_attention_call(ctx.call, _operands(x, _maps(*matrices), pairs)))

    return tuple(unfused_gradients(compute, grad, ctx.saved_tensors[:4], ctx.needs_input_grad))
