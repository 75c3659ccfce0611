r"""Messages that meet their edges' features as PyTorch sees them: schemas, gradients, unfused formulas.

With :math:`z` what the relu or the gate sees, :math:`s = \sigma(z)`: the forward pass keeps a bit for every
:math:`z > 0` (relu), or :math:`\sum_j s (1 - s) v_{ij}` of every row (gates), whose product with the gradient
of the sum is that of :math:`k_i`. One pass over the transpose is left, and one for the gradients of the maps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops import _edge_messages_launch as launch
from fastsparse_core.ops import _registration as registration
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_messages_launch import Operands
from fastsparse_core.ops._handles import keep_alive
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.structure.adjacency import Adjacency, from_handle
from fastsparse_core.structure.incidence import incidence

# ---------------------------------------------------------------- step by step


def _entries(adj: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and caller's position of every entry, int64."""
    position = torch.arange(adj.num_edges, device=adj.device) if adj.edge_id is None else adj.edge_id.long()
    return adj.row().long(), adj.col.long(), position


def _sum(adj: Adjacency, row: Tensor, message: Tensor, dtype: torch.dtype) -> Tensor:
    return message.new_zeros(adj.num_dst, message.size(1)).index_add(0, row, message).to(dtype)


def unfused_gine(
    adj: Adjacency, x: Tensor, edge: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """`gine_aggregate` with a row for every edge in memory."""
    dtype, (row, col, position) = accumulation_dtype(x.dtype), _entries(adj)
    edge = edge.to(dtype)
    if weight is not None:
        edge = F.linear(edge, weight.to(dtype), None if bias is None else bias.to(dtype))
    return _sum(adj, row, (x.to(dtype)[col] + edge[position]).relu(), x.dtype)


def unfused_gated(
    adj: Adjacency,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
) -> Tensor:
    """`gated_aggregate` with rows for every edge in memory."""
    dtype, (row, col, position) = accumulation_dtype(q.dtype), _entries(adj)
    z, value = k.to(dtype)[row] + q.to(dtype)[col], v.to(dtype)[col]
    if edge is not None and gate_weight is not None and value_weight is not None:
        features = edge.to(dtype)[position]
        z = z + F.linear(features, gate_weight.to(dtype))
        value = value + F.linear(features, value_weight.to(dtype))
    return _sum(adj, row, z.sigmoid() * value, q.dtype)


def unfused_gated_edges(
    adj: Adjacency, k: Tensor, q: Tensor, v: Tensor, edge: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`gated_edges`, gates in memory, too."""
    dtype, (row, col, position) = accumulation_dtype(q.dtype), _entries(adj)
    z = k.to(dtype)[row] + q.to(dtype)[col] + edge.to(dtype)[position]
    gate = z.sigmoid()
    state = z.new_zeros(adj.num_values, z.size(1)).index_copy(0, position, z).to(q.dtype)
    total = _sum(adj, row, gate * v.to(dtype)[col], q.dtype)
    return total, _sum(adj, row, gate, q.dtype), state


def _remember(ctx: Any, adjacency: int, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.adjacency = adjacency
    ctx.keep_alive = keep_alive(adjacency)


# ---------------------------------------------------------------- relu


def _gine_aggregate(
    x: Tensor,
    edge: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adjacency: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    operands = Operands.of(launch.RELU, None, x, None, edge, weight, None, bias)
    out, _, _, positive = launch.forward(from_handle(adjacency), operands, x.size(1), keep)
    return out, x.new_empty(0, dtype=torch.uint8) if positive is None else positive


def _gine_aggregate_backward(
    grad: Tensor,
    positive: Tensor,
    edge: Tensor,
    weight: Tensor | None,
    num_src: int,
    adjacency: int,
    edge_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    raw = edge if weight is not None else None  # rows of edges are not read again
    operands = Operands.of(launch.RELU, None, grad, None, raw, weight)
    found = launch.backward(
        from_handle(adjacency),
        operands,
        grad,
        edge.size(1),
        positive=positive,
        edge_wanted=edge_wanted,
        weight_wanted=weight_wanted,
    )
    nothing = grad.new_empty(0)
    of_edge = nothing if found.edge is None else cast(found.edge, edge.dtype)
    return found.q, of_edge, nothing if found.weight is None else found.weight.contiguous()


class _GineAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, num_dst, adjacency, _ = arguments
        out, positive = registration.run("gine_aggregate", tensors[0], *tensors, num_dst, adjacency, True)
        ctx.mark_non_differentiable(positive)
        _remember(ctx, adjacency, *tensors, positive)
        return out, positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, edge, weight, bias, positive = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():

            def compute(x: Tensor, edge: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
                return unfused_gine(ctx.keep_alive, x, edge, weight, bias)

            return *unfused_gradients(compute, grad, (x, edge, weight, bias), needs), *(None,) * 3
        arguments = (positive, edge, weight, x.size(0), ctx.adjacency, needs[1], needs[2])
        grad_x, grad_edge, grad_weight = registration.differentiate(
            "gine_aggregate_backward", grad, *arguments
        )
        return (
            grad_x if needs[0] else None,
            grad_edge if needs[1] else None,
            cast(grad_weight, weight.dtype) if needs[2] else None,
            sum_of_rows(grad_x, bias.dtype) if needs[3] else None,  # every term of dx is one of dbias
            *(None,) * 3,
        )


# ---------------------------------------------------------------- gates


def _gated_aggregate(
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
    adjacency: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    operands = Operands.of(launch.GATE, k, q, v, edge, gate_weight, value_weight)
    out, slope, _, _ = launch.forward(from_handle(adjacency), operands, q.size(1), keep)
    return out, q.new_empty(0) if slope is None else slope


def _gated_aggregate_backward(
    grad: Tensor,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
    slope: Tensor,
    adjacency: int,
    edge_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = Operands.of(launch.GATE, k, q, v, edge, gate_weight, value_weight)
    found = launch.backward(
        from_handle(adjacency),
        operands,
        grad,
        0 if edge is None else edge.size(1),
        edge_wanted=edge_wanted,
        weight_wanted=weight_wanted,
    )
    nothing = grad.new_empty(0)
    assert found.v is not None
    return (
        grad * slope,
        found.q,
        found.v,
        nothing if found.edge is None else found.edge,
        nothing if found.weight is None else found.weight.contiguous(),
        nothing if found.of_value is None else found.of_value.contiguous(),
    )


class _GatedAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, adjacency, _ = arguments
        out, slope = registration.run("gated_aggregate", tensors[1], *tensors, adjacency, True)
        ctx.mark_non_differentiable(slope)
        _remember(ctx, adjacency, *tensors, slope)
        return out, slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        *tensors, slope = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():

            def compute(*tensors: Tensor | None) -> Tensor:
                return unfused_gated(ctx.keep_alive, *tensors)  # type: ignore[arg-type]

            return *unfused_gradients(compute, grad, tensors, needs), None, None
        arguments = (*tensors, slope, ctx.adjacency, needs[3], needs[4] or needs[5])
        *found, of_gate, of_value = registration.differentiate("gated_aggregate_backward", grad, *arguments)
        found += [
            cast(gradient, map.dtype) if map is not None else gradient
            for gradient, map in zip((of_gate, of_value), tensors[4:], strict=True)
        ]
        return *(each if need else None for each, need in zip(found, needs, strict=False)), None, None


# ---------------------------------------------------------------- gates whose edges have a state


def _gated_edges(
    k: Tensor, q: Tensor, v: Tensor, edge: Tensor, adjacency: int
) -> tuple[Tensor, Tensor, Tensor]:
    operands = Operands.of(launch.GATE_AND_STATE, k, q, v, edge)
    total, gates, state, _ = launch.forward(from_handle(adjacency), operands, q.size(1), True)
    assert gates is not None
    assert state is not None
    return total, gates, state


def _gated_edges_backward(
    grad: Tensor,
    grad_gates: Tensor,
    grad_state: Tensor | None,
    v: Tensor,
    state: Tensor,
    adjacency: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    adj = from_handle(adjacency)
    operands = Operands.of(launch.GATE_AND_STATE, None, v, v, None)
    found = launch.backward(
        adj,
        operands,
        grad,
        0,
        grad_side=grad_gates,
        state=state,
        grad_state=grad_state,
        edge_wanted=True,
    )
    assert found.edge is not None
    assert found.v is not None
    # The rows of the edges' gradients are the terms of k's.
    return _row_sums(adj, found.edge), found.q, found.v, found.edge


def _row_sums(adj: Adjacency, edge: Tensor) -> Tensor:
    """Sum of the rows (num_values, width) of the entries of every row."""
    return launch_spmm(incidence(adj), edge, None, None, None, None, "auto")


class _GatedEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, q: Tensor, v: Tensor, edge: Tensor, adjacency: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, gates, state = registration.run("gated_edges", q, k, q, v, edge, adjacency)
        _remember(ctx, adjacency, k, q, v, edge, state)
        return total, gates, state

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_gates: Tensor | None, grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        k, q, v, edge, state = ctx.saved_tensors
        grad = k.new_zeros(k.shape) if grad is None else grad
        grad_gates = k.new_zeros(k.shape) if grad_gates is None else grad_gates
        if torch.is_grad_enabled():
            of_state = torch.zeros_like(state) if grad_state is None else grad_state

            def compute(k: Tensor, q: Tensor, v: Tensor, edge: Tensor) -> Tensor:
                results = unfused_gated_edges(ctx.keep_alive, k, q, v, edge)
                upstream = (grad, grad_gates, of_state)
                terms = [(out * of_out).sum() for out, of_out in zip(results, upstream, strict=True)]
                return terms[0] + terms[1] + terms[2]

            inputs, one = (k, q, v, edge), torch.ones_like(grad.new_empty(()))
            return *unfused_gradients(compute, one, inputs, ctx.needs_input_grad), None
        found = registration.differentiate(
            "gated_edges_backward", grad, grad_gates, grad_state, v, state, ctx.adjacency
        )
        needed = zip(found, ctx.needs_input_grad, strict=False)
        return *(each if needs else None for each, needs in needed), None


# ---------------------------------------------------------------- registration


def _gine_fake(of: Any) -> tuple[Tensor, Tensor]:
    shape: tuple[int, ...] = (0,)
    if of.keep:
        shape = (of.edge.size(0), launch.sign_bytes(launch.padded_width(of.x))[1])
    return of.x.new_empty(of.num_dst, of.x.size(1)), of.x.new_empty(shape, dtype=torch.uint8)


def _gine_backward_fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = of.weight.shape if of.weight is not None and of.weight_wanted else (0,)
    return (
        of.grad.new_empty(of.num_src, of.grad.size(1)),
        of.edge.new_empty(of.edge.shape if of.edge_wanted else (0,)),
        of.grad.new_empty(shape, dtype=accumulation_dtype(of.grad.dtype)),
    )


def _gated_fake(of: Any) -> tuple[Tensor, Tensor]:
    return of.k.new_empty(of.k.shape), of.k.new_empty(of.k.shape if of.keep else (0,))


def _gated_backward_fake(of: Any) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(of.grad.dtype)
    maps = [
        of.grad.new_empty(map.shape if map is not None and of.weight_wanted else (0,), dtype=dtype)
        for map in (of.gate_weight, of.value_weight)
    ]
    of_edge = of.grad.new_empty(of.edge.shape if of.edge is not None and of.edge_wanted else (0,))
    return *(x.new_empty(x.shape) for x in (of.k, of.q, of.v)), of_edge, *maps


def _gated_edges_fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    return of.k.new_empty(of.k.shape), of.k.new_empty(of.k.shape), of.edge.new_empty(of.edge.shape)


def _gated_edges_backward_fake(of: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, v, state = of.grad, of.v, of.state
    return (*(like.new_empty(like.shape) for like in (grad, v, v, state)),)


registration.register(_gine_aggregate, _gine_fake, _GineAggregate)
registration.register(_gine_aggregate_backward, _gine_backward_fake)
registration.register(_gated_aggregate, _gated_fake, _GatedAggregate)
registration.register(_gated_aggregate_backward, _gated_backward_fake)
registration.register(_gated_edges, _gated_edges_fake, _GatedEdges)
registration.register(_gated_edges_backward, _gated_edges_backward_fake)
