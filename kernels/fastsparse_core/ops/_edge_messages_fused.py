r"""PyTorch operators for messages that depend on edge features: schemas, gradients, unfused formulas.

Let :math:`z` be the argument of the relu or the gate, and :math:`s = \sigma(z)`. The forward pass stores one
bit per number for relu (whether :math:`z > 0`), or :math:`\sum_j s (1 - s) v_{ij}` of every row for gates.
The gradient of :math:`k_i` is the product of this sum and the incoming gradient. The backward pass needs one
more pass over the transpose, and one for the gradients of the maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import reference
from fastsparse_core.ops import _edge_messages_launch as launch
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._edge_messages_launch import Operands
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._registration import (
    FusedOperator,
    Operator,
    Structure,
    keep_alive,
    on_handle,
    structure_of,
)
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.structure.adjacency import Adjacency

# ---------------------------------------------------------------- step by step


def unfused_gine(
    adj: Adjacency, x: Tensor, edge: Tensor, weight: Tensor | None, bias: Tensor | None, eps: Tensor | None
) -> Tensor:
    """`gine_aggregate` by unfused operators, which store a row per edge."""
    maps: dict[str, Any] = {"edge_weight": weight, "edge_bias": bias, "dtype": accumulation_dtype(x.dtype)}
    return reference.gine_aggregate(adj, x, edge, **maps, eps=eps).to(x.dtype)


def unfused_gated(
    adj: Adjacency,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
) -> Tensor:
    """`gated_aggregate` by unfused operators, which store rows per edge."""
    maps: dict[str, Any] = {"edge_attr": edge, "gate_weight": gate_weight, "value_weight": value_weight}
    return reference.gated_aggregate(adj, k, q, v, **maps, dtype=accumulation_dtype(q.dtype)).to(q.dtype)


def unfused_gated_edges(
    adj: Adjacency, k: Tensor, q: Tensor, v: Tensor, edge: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`gated_edges` by unfused operators, which also store the gates."""
    total, gates, state = reference.gated_edges(adj, k, q, v, edge, dtype=accumulation_dtype(q.dtype))
    return total.to(q.dtype), gates.to(q.dtype), state.to(q.dtype)


# ---------------------------------------------------------------- relu


def _gine_aggregate(
    adj: Adjacency,
    x: Tensor,
    edge: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: Tensor | None,
    num_dst: int,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    operands = Operands.of(launch.RELU, None, x, None, edge, weight, None, bias)
    root = (None, None) if eps is None else (operands.q, eps)
    out, _, _, kept = launch.forward(adj, operands, x.size(1), keep, *root)
    return out, x.new_empty(0, dtype=torch.uint8) if kept is None else kept


def _gine_gradients(
    adj: Adjacency,
    grad: Tensor,
    edge: Tensor | None,  # raw features; None without a map, because gradients do not need rows per edge
    weight: Tensor | None,
    kept: Tensor,
    num_src: int,  # this and the other sizes are for the fake kernel, which has no structure
    num_values: int,
    edge_width: int,
    bias_dtype: torch.dtype,
    has_root: bool,
    *,
    edge_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    found = launch.backward(
        adj,
        Operands.of(launch.RELU, None, grad, None, edge, weight),
        grad,
        edge_width,
        kept=kept,
        has_scale=has_root,
        edge_wanted=edge_wanted,
        weight_wanted=weight_wanted or bias_wanted,
        bias_wanted=bias_wanted,
    )
    assert found.q is not None
    of_weight = _as_map(found.weight, weight) if weight_wanted else None
    return found.q, found.edge, of_weight, None if found.bias is None else found.bias.to(bias_dtype)


def gine_gradients_again(
    adj: Adjacency,
    grad: Tensor,
    kept: Tensor,
    edge: Tensor | None,
    weight: Tensor | None,
    is_raw: bool,
    has_root: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Computes differentiable gradients of `gine_aggregate`; stores a row per edge.

    They depend on the stored signs, not on the features, which may be overwritten after the forward pass.

    Args:
        adj: structure.
        grad: gradient of the sums, in the dtype of the features.
        kept: signs that the forward pass stored.
        edge: raw features, or None if the gradient of the map is not wanted.
        weight: the map, or None if the gradient of the raw features is not wanted.
        is_raw: whether there is a map.
        has_root: whether the nodes' own features were added.

    Returns:
        Gradients of x, of the edges' rows or raw features, of the map and of its bias, in the accumulation
        dtype.
    """
    dtype, ids = accumulation_dtype(grad.dtype), None if adj.edge_id is None else adj.edge_id.long()
    positive = _positive(adj, kept, grad.size(-1), grad.dtype)
    of_rows = grad.to(dtype).index_select(0, adj.row().long())
    of_entries = torch.where(positive if ids is None else positive[ids], of_rows, 0)
    of_x = of_entries.new_zeros(adj.num_src, grad.size(-1)).index_add(0, adj.col.long(), of_entries)
    if has_root:
        of_x = of_x + grad.to(dtype) * launch.scale_of(kept, grad.dtype).to(dtype)
    of_edge = of_entries
    if ids is not None:
        of_edge = of_entries.new_zeros(adj.num_values, grad.size(-1)).index_copy(0, ids, of_entries)
    of_bias = of_edge.sum(0)
    if not is_raw:
        return of_x, of_edge, None, of_bias
    of_weight = None if edge is None else of_edge.t() @ edge.to(dtype)
    return of_x, None if weight is None else of_edge @ weight.to(dtype), of_weight, of_bias


def _positive(adj: Adjacency, kept: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns where relu's argument was positive, bool (num_values, width): there, ones have gradient 1."""
    ones = kept.new_ones(adj.num_dst, width, dtype=dtype)
    operands = Operands.of(launch.RELU, None, ones, None, None)
    found = launch.backward(adj, operands, ones, 0, kept=kept, edge_wanted=True).edge
    assert found is not None
    return found > 0


class _GineAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, edge, weight, bias, eps, num_dst, adjacency, _ = arguments
        out, kept = gine_op.below(x, edge, weight, bias, eps, num_dst, adjacency, True)
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kept, edge if weight is not None else None, weight)
        ctx.sizes, ctx.has_root = (x.size(0), *edge.shape), eps is not None
        ctx.bias_dtype = x.dtype if bias is None else bias.dtype
        ctx.adjacency, ctx.keep_alive = adjacency, keep_alive(adjacency)
        return out, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        (kept, edge, weight), needs = ctx.saved_tensors, ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            raw = (edge if needs[2] else None, weight if needs[1] else None, weight is not None)
            again = gine_gradients_again(ctx.keep_alive, grad, kept, *raw, ctx.has_root)
            dtypes = (grad.dtype, grad.dtype, None if weight is None else weight.dtype, ctx.bias_dtype)
            found: Any = [None if x is None else x.to(of) for x, of in zip(again, dtypes, strict=True)]
        else:
            arguments = (edge, weight, kept, *ctx.sizes, ctx.bias_dtype, ctx.has_root)
            found = _gine_gradients_op(grad, *arguments, ctx.adjacency, *needs[1:])
        return *(each if need else None for each, need in zip(found, needs, strict=True)), *(None,) * 4


def _as_map(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if grad is None or like is None else cast(grad.contiguous(), like.dtype)


# ---------------------------------------------------------------- gates


def _gated_aggregate(
    adj: Adjacency,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    operands = Operands.of(launch.GATE, k, q, v, edge, gate_weight, value_weight)
    return launch.forward(adj, operands, q.size(1), keep)[:2]


def _gated_gradients(
    adj: Adjacency,
    grad: Tensor,
    k: Tensor,
    q: Tensor,
    v: Tensor,
    edge: Tensor | None,
    gate_weight: Tensor | None,
    value_weight: Tensor | None,
    slope: Tensor,
    *,
    edge_wanted: bool,
    gate_weight_wanted: bool,
    value_weight_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    found = launch.backward(
        adj,
        Operands.of(launch.GATE, k, q, v, edge, gate_weight, value_weight),
        grad,
        0 if edge is None else edge.size(1),
        edge_wanted=edge_wanted,
        weight_wanted=gate_weight_wanted or value_weight_wanted,
    )
    of_gate = _as_map(found.weight, gate_weight) if gate_weight_wanted else None
    of_value = _as_map(found.of_value, value_weight) if value_weight_wanted else None
    assert found.q is not None
    return grad * slope, found.q, found.v, found.edge, of_gate, of_value


# ---------------------------------------------------------------- gates whose edges have a state


def _gated_edges(
    k: Tensor, q: Tensor, v: Tensor, edge: Tensor, adjacency: Structure
) -> tuple[Tensor, Tensor, Tensor]:
    operands = Operands.of(launch.GATE_AND_STATE, k, q, v, edge)
    total, gates, state, _ = launch.forward(structure_of(adjacency), operands, q.size(1), True)
    assert gates is not None
    assert state is not None
    return total, gates, state


def _gated_edges_backward(
    grad: Tensor,
    grad_gates: Tensor,
    grad_state: Tensor | None,
    v: Tensor,
    state: Tensor,
    adjacency: Structure,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    adj = structure_of(adjacency)
    operands = Operands.of(launch.GATE_AND_STATE, None, v, v, None)
    found = launch.backward(
        adj, operands, grad, 0, grad_side=grad_gates, state=state, grad_state=grad_state, edge_wanted=True
    )
    assert found.q is not None
    assert found.edge is not None
    assert found.v is not None
    # The gradient of k is the sum of the edges' gradients.
    of_k = launch_spmm(adj.incidence(), found.edge, None, None, None, None, "auto")
    return of_k, found.q, found.v, found.edge


class _GatedEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, q: Tensor, v: Tensor, edge: Tensor, adjacency: Structure
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, gates, state = gated_edges_op.below(k, q, v, edge, adjacency)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(k, q, v, edge, state)
        ctx.adjacency, ctx.keep_alive = adjacency, keep_alive(adjacency)
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
        found = _gated_edges_gradients_op(grad, grad_gates, grad_state, v, state, ctx.adjacency)
        needed = zip(found, ctx.needs_input_grad, strict=False)
        return *[each if needs else None for each, needs in needed], None


# ---------------------------------------------------------------- registration


def _gine_fake(of: Any) -> tuple[Tensor, Tensor]:
    size = launch.kept_bytes(of.edge.size(0), launch.padded_width(of.x)) if of.keep else 0
    return of.x.new_empty(of.num_dst, of.x.size(1)), of.x.new_empty(size, dtype=torch.uint8)


def _gine_gradients_fake(of: Any) -> tuple[Tensor, ...]:
    grad, width = of.grad, of.grad.size(1)
    wanted = (
        (of.edge_wanted, (of.num_values, of.edge_width), grad.dtype),
        (of.weight_wanted, (width, of.edge_width), grad.dtype if of.weight is None else of.weight.dtype),
        (of.bias_wanted, (width,), of.bias_dtype),
    )
    others = (grad.new_empty(shape if each else (0,), dtype=dtype) for each, shape, dtype in wanted)
    return grad.new_empty(of.num_src, width), *others


def _gated_fake(of: Any) -> tuple[Tensor, Tensor]:
    return of.k.new_empty(of.k.shape), of.k.new_empty(of.k.shape if of.keep else (0,))


def _gated_edges_fake(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    return of.k.new_empty(of.k.shape), of.k.new_empty(of.k.shape), of.edge.new_empty(of.edge.shape)


def _gated_edges_backward_fake(of: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, v, state = of.grad, of.v, of.state
    return (*(like.new_empty(like.shape) for like in (grad, v, v, state)),)


gine_op = Operator(on_handle(_gine_aggregate), _gine_fake, _GineAggregate, "gine_aggregate")
_gine_gradients_op = Operator(
    on_handle(_gine_gradients), _gine_gradients_fake, name="gine_aggregate_backward"
)
gated_op = FusedOperator(
    "gated_aggregate", _gated_aggregate, _gated_gradients, unfused_gated, _gated_fake, ("out", "slope")
)
gated_edges_op = Operator(_gated_edges, _gated_edges_fake, _GatedEdges)
_gated_edges_gradients_op = Operator(_gated_edges_backward, _gated_edges_backward_fake)
