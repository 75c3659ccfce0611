"""Operators for messages: they gather node features to edges, and reduce edge features to nodes.

The operators run on kernels, and are differentiable any number of times. Tensors with a row per edge are in
the order of DGL's edge ids. Edges are summed by the core's segment operators, which sort the edges once per
graph and use no atomics.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fastsparse_core import Adjacency, sddmm, spmm
from fastsparse_core.ops._operands import untouched
from fastsparse_core.ops._spmm_extremum import extremum_of_sums as core_extremum_of_sums
from fastsparse_core.ops.spmm import Reduce
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.segment import scatter

#: Messages are computed for a part of the edges at a time. The messages of a part have about this many bytes.
_PART_BYTES = {"cpu": 1 << 20, "cuda": 1 << 26}
#: Number of features per edge below which, on the CPU, `scatter` is faster than `spmm` for extrema of edges.
_WIDE_EXTREMUM = 16


def without_autocast(tensor: Tensor) -> Any:
    """Switches autocast off on the tensor's device, because operators cast their operands themselves."""
    kind = "cuda" if tensor.is_cuda else "cpu"
    return (
        torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
    )


def ends(adj: Adjacency, target: str) -> Tensor:
    """Returns the node at one end of every edge, (num_edges,) in edge order.

    Args:
        adj: structure.
        target: ``"u"``, sources, or ``"v"``, destinations.
    """
    entries = adj.col if target == "u" else adj.row()
    if adj.edge_id is None:
        return entries

    def scatter() -> Tensor:
        assert adj.edge_id is not None
        return torch.empty_like(entries).index_copy_(0, adj.edge_id.long(), entries)

    return adj.derived(("fastsparse_dgl.ends", target), scatter)


def in_edge_order(adj: Adjacency) -> Adjacency:
    """Returns the structure with the entries of a row sorted by edge id, which decides ties of extrema."""
    if adj.edge_id is None:
        return adj

    def build() -> tuple[Adjacency | None]:
        assert adj.edge_id is not None
        row, edge = adj.row(), adj.edge_id
        if bool(((edge[1:] > edge[:-1]) | (row[1:] != row[:-1])).all()):
            return (None,)
        order = torch.sort(ends(adj, "v"), stable=True).indices.to(edge.dtype)
        sorted_rows = Adjacency(
            adj.rowptr, ends(adj, "u")[order.long()], adj.shape, edge_id=order, group_rows="none"
        )
        sorted_rows._of_rows = adj._of_rows
        return (sorted_rows,)

    return adj.derived("fastsparse_dgl.in_edge_order", build)[0] or adj


def at(adj: Adjacency, target: str) -> Adjacency:
    """Returns the structure whose rows are the nodes at one end of the edges."""
    return adj if target == "v" else adj.t()


def to_edges(adj: Adjacency, x: Tensor, target: str) -> Tensor:
    """Gathers the features of the node at one end of every edge, (num_edges, ...)."""
    return _ToEdges.apply(x, adj, target)


def sum_edges(adj: Adjacency, e: Tensor, target: str) -> Tensor:
    """Sums the features of all edges that have the same node at one end, (num_nodes, ...)."""
    with without_autocast(e):
        return scatter(e, ends(adj, target), at(adj, target).num_dst)


class _ToEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adj: Adjacency, target: str) -> Tensor:
        ctx.adj, ctx.target = adj, target
        return x.index_select(0, ends(adj, target))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return sum_edges(ctx.adj, grad, ctx.target), None, None


def extremum_edges(adj: Adjacency, e: Tensor, reduce: Literal["max", "min"]) -> Tensor:
    """Maxima or minima of the features of the edges that share a destination; 0 for nodes without edges.

    If values are equal, the first edge in the caller's order is chosen. If a value is NaN, the result is NaN.
    """
    rows = e.reshape(e.size(0), math.prod(e.shape[1:]))
    if e.is_cuda or rows.size(1) < _WIDE_EXTREMUM:
        return scatter(e, ends(adj, "v"), adj.num_dst, reduce)
    # On the CPU, treat edges as sources of a product, which stores 32-bit positions for the backward pass.
    out = spmm(in_edge_order(adj).incidence(), rows, reduce=reduce)
    return out.reshape(adj.num_dst, *e.shape[1:])


def with_initial_values(adj: Adjacency, out: Tensor, reduce: str) -> Tensor:
    """Fills rows without edges with DGL's initial values of extrema: -inf for ``"max"``, inf for ``"min"``.

    `update_all` and `multi_update_all` replace these values by 0 after the user's functions have seen them.
    """
    is_extremum = reduce in ("max", "min") and out.is_floating_point()
    if not is_extremum or adj.num_edges == 0 or not adj.has_empty_rows():
        return out
    empty = adj.derived("fastsparse_dgl.empty_rows", lambda: adj.in_degree() == 0)
    return out.masked_fill(
        empty.reshape(-1, *[1] * (out.dim() - 1)), math.inf if reduce == "min" else -math.inf
    )


def aligned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Reshapes two tensors to the same number of dimensions (at least 2); also returns the broadcast shape.

    Raises:
        ValueError: their feature shapes cannot be broadcast.
    """
    dims = max(x.dim(), y.dim(), 2)
    x = x.reshape(x.size(0), *[1] * (dims - x.dim()), *x.shape[1:])
    y = y.reshape(y.size(0), *[1] * (dims - y.dim()), *y.shape[1:])
    try:
        return x, y, torch.broadcast_shapes(x.shape[1:], y.shape[1:])
    except RuntimeError:
        raise ValueError(
            f"Feature shapes {tuple(x.shape[1:])} and {tuple(y.shape[1:])} are not valid for broadcasting."
        ) from None


def reduced(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns the gradient of a tensor that was broadcast from feature shape ``shape``, by summation."""
    repeated = [
        dim for dim, (got, want) in enumerate(zip(grad.shape[1:], shape, strict=True), 1) if got != want
    ]
    return grad.sum(repeated, keepdim=True) if repeated else grad


class Heads:
    """Converts broadcast features and edge values to the kernels' form, with one edge value per head.

    Dimensions along which edge values differ come first and become heads; the others become the width.

    Args:
        shape: feature shape of the messages.
        value: (num_edges, ...), with as many dimensions as the messages.
    """

    def __init__(self, shape: torch.Size, value: Tensor) -> None:
        dims = range(len(shape))
        differ = [dim for dim in dims if value.size(dim + 1) != 1]
        others = [dim for dim in dims if value.size(dim + 1) == 1]
        self.shape = shape
        self.order = differ + others
        long = [dim for dim in self.order if shape[dim] > 1]
        self.in_place = long == sorted(long)
        self.heads = math.prod(shape[dim] for dim in differ)
        self.width = math.prod(shape[dim] for dim in others)

    def flat(self, x: Tensor) -> Tensor:
        """Node features as (num_nodes, heads * width)."""
        x = x.expand(x.size(0), *self.shape)
        if not self.in_place:
            x = x.permute(0, *(dim + 1 for dim in self.order))
        return x.reshape(x.size(0), self.heads * self.width)

    def unflat(self, out: Tensor) -> Tensor:
        """Converts a result (num_nodes, heads * width) back to the feature shape."""
        if self.in_place:
            return out.reshape(out.size(0), *self.shape)
        out = out.reshape(out.size(0), *(self.shape[dim] for dim in self.order))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return out.permute(0, *(dim + 1 for dim in back)).contiguous()


def weighted(adj: Adjacency, x: Tensor, value: Tensor, reduce: Reduce) -> Tensor:
    """Reduces products of source features and edge features with the same number of dimensions.

    Args:
        adj: structure.
        x: source features, (num_src, ...).
        value: edge features, (num_edges, ...).
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
    """
    shape = torch.broadcast_shapes(x.shape[1:], value.shape[1:])
    plan = Heads(shape, value)
    features, values = plan.flat(x), value.reshape(value.size(0), -1) if value.numel() else None
    if features.numel() == 0 or values is None or plan.heads <= MOST_HEADS:
        return plan.unflat(spmm(adj, features, values if features.size(1) else None, reduce))
    parts = zip(features.split(MOST_HEADS * plan.width, 1), values.split(MOST_HEADS, 1), strict=True)
    return plan.unflat(torch.cat([spmm(adj, *part, reduce) for part in parts], 1))


def extremum_of_sums(adj: Adjacency, x: Tensor, e: Tensor, minimum: bool) -> Tensor:
    """Computes maxima or minima of ``x[source] + e``; ``x`` and ``e`` have as many dimensions."""
    plan = Heads(torch.broadcast_shapes(x.shape[1:], e.shape[1:]), e)
    return plan.unflat(core_extremum_of_sums(adj, plan.flat(x), e.reshape(e.size(0), plan.heads), minimum))


def combine(adj: Adjacency, op: str, x: Tensor, y: Tensor, x_at: str, y_at: str) -> Tensor:
    """Computes ``x op y`` for every edge; ``x`` and ``y`` have the same number of dimensions.

    Args:
        adj: structure.
        op: operator.
        x: features of the sources, destinations or edges, depending on ``x_at``.
        y: features of the sources, destinations or edges, depending on ``y_at``.
        x_at: ``"u"``, ``"v"`` or ``"e"``.
        y_at: ``"u"``, ``"v"`` or ``"e"``.
    """
    if x_at == y_at:
        both = x + y if op == "add" else x * y
        return both if x_at == "e" else to_edges(adj, both, x_at)
    if op == "mul" and "e" not in (x_at, y_at) and x.shape[1:] == y.shape[1:] and not x.is_cuda:
        # Compute dot products of width 1, because their gradients are sums that store no message per edge.
        rows, columns = (x, y) if x_at == "v" else (y, x)
        if 0 < rows[:1].numel() <= MOST_HEADS and adj.num_edges == adj.num_values:
            products = sddmm(adj, rows.reshape(len(rows), -1, 1), columns.reshape(len(columns), -1, 1))
            return products.reshape(-1, *x.shape[1:])
    return _Combine.apply(x, y, adj, op, x_at, y_at)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, adj: Adjacency, op: str, x_at: str, y_at: str) -> Tensor:
        multiplies = op == "mul"
        ctx.save_for_backward(
            x if multiplies and ctx.needs_input_grad[1] else None,
            y if multiplies and ctx.needs_input_grad[0] else None,
        )
        ctx.adj, ctx.op, ctx.x_at, ctx.y_at = adj, op, x_at, y_at
        ctx.shapes = x.shape[1:], y.shape[1:]
        out = untouched(x, adj.num_values, *torch.broadcast_shapes(*ctx.shapes))
        if out.numel() == 0:
            return out
        row_bytes = out[0].numel() * out.element_size()
        step = max(1, _PART_BYTES["cuda" if x.is_cuda else "cpu"] // row_bytes)
        operands = [
            (x, None if x_at == "e" else ends(adj, x_at)),
            (y, None if y_at == "e" else ends(adj, y_at)),
        ]
        apply = torch.mul if multiplies else torch.add
        for start in range(0, out.size(0), step):
            part = slice(start, start + step)
            left, right = (
                operand[part] if index is None else operand.index_select(0, index[part])
                for operand, index in operands
            )
            apply(left, right, out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        adj, op, x_at, y_at = ctx.adj, ctx.op, ctx.x_at, ctx.y_at
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_of_operand(adj, op, grad, x_at, y, y_at, ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            grad_y = _grad_of_operand(adj, op, grad, y_at, x, x_at, ctx.shapes[1])
        return grad_x, grad_y, None, None, None, None


def _grad_of_operand(
    adj: Adjacency, op: str, grad: Tensor, target: str, other: Tensor, other_at: str, shape: torch.Size
) -> Tensor:
    if op == "add":
        grad = reduced(grad, shape)
        return grad if target == "e" else sum_edges(adj, grad, target)
    if target == "e":
        return reduced(combine(adj, "mul", grad, other, "e", other_at), shape)
    if other_at == "e":
        return sum_edges(adj, reduced(grad * other, shape), target)
    with without_autocast(grad):
        return reduced(weighted(at(adj, target), other, grad, "sum"), shape)


def dot(adj: Adjacency, x: Tensor, y: Tensor, x_at: str, y_at: str) -> Tensor:
    """Sums ``x * y`` over the last dimension for every edge, (num_edges, ..., 1)."""
    if x_at == y_at:
        both = (x * y).sum(-1, keepdim=True)
        return both if x_at == "e" else to_edges(adj, both, x_at)
    lead = torch.broadcast_shapes(x.shape[1:-1], y.shape[1:-1])
    x, y = (
        part.expand(part.size(0), *lead, part.size(-1)).reshape(part.size(0), math.prod(lead), part.size(-1))
        for part in (x, y)
    )
    operands = {x_at: x, y_at: y}
    if "e" in operands:
        rows = operands.pop("e")
        ((target, columns),) = operands.items()
        structure = at(adj, target).incidence().t()
    else:
        rows, columns, structure = operands["v"], operands["u"], adj
    if x.size(1) == 0 or x.size(2) == 0:
        return x.new_zeros(adj.num_values, *lead, 1) + (x.sum() + y.sum())  # zeros that have a gradient
    if rows.size(1) <= MOST_HEADS:  # even a split into one part would copy in the backward pass
        return sddmm(structure, rows, columns).reshape(adj.num_values, *lead, 1)
    parts = zip(rows.split(MOST_HEADS, 1), columns.split(MOST_HEADS, 1), strict=True)
    return torch.cat([sddmm(structure, *part) for part in parts], 1).reshape(adj.num_values, *lead, 1)
