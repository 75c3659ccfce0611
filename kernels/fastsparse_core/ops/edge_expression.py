"""Reduced elementwise expressions of both ends' and the edges' features: one kernel each way on CUDA."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._edge_kernels import Expression, Leaf, kernels_of
from fastsparse_core.ops._edge_rows import lift
from fastsparse_core.ops._eager import is_first_derivative
from fastsparse_core.ops._segment import reduce_op
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.incidence import edge_segments

#: Edges of a tile, and programs per multiprocessor of passes that keep sums of their own.
_TILE, _PROGRAMS = 16, 6

_TORCH: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "silu": F.silu,
    "elu": F.elu,
    "softplus": F.softplus,
    "square": torch.square,
}


@functools.cache
def can_generate() -> bool:
    """Whether Triton is there, which comes with PyTorch for CUDA."""
    return importlib.util.find_spec("triton") is not None


def edge_expression(
    adj: Adjacency, expression: Expression, places: Sequence[str], tensors: Sequence[Tensor], how: str = "sum"
) -> Tensor:
    """An expression of every edge, reduced over the edges of each destination.

    Args:
        adj: structure (num_dst, num_src).
        expression: ``("leaf", n)``, a number, or ``(operator, *expressions)``.
        places: of the tensors, see `Leaf`.
        tensors: the leaves: (num_dst, F), (num_src, F), (num_values, F) in the caller's edge order, or with one number in place of F;
            (F,) for ``"whole"``; (num_values, K) and (F, K) for ``"mapped"`` and ``"weight"``.
        how: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.

    Returns:
        (num_dst, F); 0 in rows without edges. Sums are kept in float32 or wider, in the order of the structure.
    """
    width = max(
        x.size(0) if place == "weight" else x.shape[-1]
        for x, place in zip(tensors, places, strict=True)
        if place != "mapped"
    )
    leaves = tuple(
        Leaf(
            place,
            place not in ("mapped", "weight") and x.shape[-1] == 1 and width > 1,
            x.shape[-1] if place in ("mapped", "weight") else 0,
        )
        for x, place in zip(tensors, places, strict=True)
    )
    out: Tensor = _EdgeExpression.apply(adj, expression, leaves, how, width, *tensors)
    return out


def unfused(
    adj: Adjacency, expression: Expression, leaves: Sequence[Leaf], how: str, tensors: Sequence[Tensor]
) -> Tensor:
    """The same, with a row for every edge."""
    rows: list[Any] = []
    for n, (leaf, x) in enumerate(zip(leaves, tensors, strict=True)):
        if leaf.place in ("dst", "src"):
            end = _End(adj, leaf.place == "dst")
            rows.append(lift((x,), (end,))[0])
        elif leaf.place == "mapped":
            rows.append(F.linear(x, tensors[n + 1]))
        else:
            rows.append(x)

    @functools.cache
    def value(each: Expression) -> Any:
        if isinstance(each, (int, float)):
            return each
        name, *args = each
        return rows[args[0]] if name == "leaf" else _TORCH[name](*[value(arg) for arg in args])

    messages = value(expression)
    end = _End(adj, True)
    return reduce_op(messages, end.index, None, adj.num_dst, how, find=end.find)[0]


class _End:
    """One end of the edges, for the operators that read and reduce rows of edges."""

    def __init__(self, adj: Adjacency, at_dst: bool) -> None:
        self._rows = adj if at_dst else adj.t()

    @property
    def index(self) -> Tensor:
        """Node of every edge in the caller's order."""

        def build() -> Tensor:
            row, order = self._rows.row(), self._rows.edge_id
            return row if order is None else torch.empty_like(row).index_copy_(0, order.long(), row)

        return self._rows.derived("fastsparse_core.ops.edge_expression.index", build)

    def find(self, *_: Any) -> Any:
        return edge_segments(self._rows)


class _EdgeExpression(torch.autograd.Function):
    """Keeps the leaves and, for maximum and minimum, which edge each number came from."""

    @staticmethod
    def forward(
        ctx: Any, adj: Adjacency, expression: Any, leaves: Any, how: str, width: int, *tensors: Tensor
    ) -> Tensor:
        tensors = tuple(x.contiguous() for x in tensors)
        like = tensors[0]
        acc = accumulation_dtype(like.dtype)
        out = like.new_empty(adj.num_dst, width)
        chosen = out.new_empty(out.shape, dtype=torch.int64) if how in ("max", "min") else None
        kernel = kernels_of(expression, leaves, how).forward
        extra = (out,) if chosen is None else (out, chosen)
        if adj.num_dst:
            _launch(kernel, adj.num_dst, adj, tensors, extra, adj.num_dst, width, acc)
        ctx.call, ctx.acc = (adj, expression, leaves, how, width), acc
        ctx.save_for_backward(chosen, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        adj, expression, leaves, how, width = ctx.call
        chosen, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[5:]
        if not is_first_derivative(grad):
            wanted = [x for x, need in zip(tensors, needs, strict=True) if need]
            with torch.enable_grad():
                out = unfused(adj, expression, leaves, how, tensors)
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
            return (None,) * 5 + tuple(next(found) if need else None for need in needs)
        grad = grad.contiguous()
        found_of: list[Tensor | None] = [None] * len(leaves)
        kernels = kernels_of(expression, leaves, how)
        for place, kernel, rows in (
            ("dst", kernels.backward_rows, adj),
            ("src", kernels.backward_columns, None),
        ):
            places = ("dst", "edge", "mapped", "weight", "whole") if place == "dst" else ("src",)
            mine = [n for n, leaf in enumerate(leaves) if leaf.place in places]
            if not any(needs[n] for n in mine):
                continue
            rows = adj.t() if rows is None else rows
            has_sums = any(leaves[n].place in ("weight", "whole") for n in mine)
            programs = min(rows.num_dst, _num_programs(grad)) if has_sums else rows.num_dst
            outs = [
                tensors[n].new_empty((programs, *tensors[n].shape), dtype=ctx.acc)
                if leaves[n].place in ("weight", "whole")
                else (torch.zeros_like if leaves[n].place in ("edge", "mapped") else torch.empty_like)(
                    tensors[n]
                )
                for n in mine
            ]
            extra = (*outs, grad, adj.in_degree()) + (() if chosen is None else (chosen,))
            if programs:
                _launch(kernel, programs, rows, tensors, extra, rows.num_dst, width, ctx.acc)
            for n, out in zip(mine, outs, strict=True):
                if leaves[n].place in ("weight", "whole"):
                    out = out.sum(0).to(tensors[n].dtype)
                found_of[n] = out if needs[n] else None
        return (None,) * 5 + tuple(found_of)


def _num_programs(like: Tensor) -> int:
    if not like.is_cuda:
        return 4
    return _PROGRAMS * torch.cuda.get_device_properties(like.device).multi_processor_count


def _launch(
    kernel: Any,
    programs: int,
    rows: Adjacency,
    tensors: Sequence[Tensor],
    extra: Sequence[Tensor],
    n: int,
    width: int,
    acc: torch.dtype,
) -> None:
    import triton
    import triton.language as tl

    order = rows.edge_id
    kernel[(programs,)](
        rows.rowptr,
        rows.col,
        rows.col if order is None else order,
        *tensors,
        *extra,
        n,
        width,
        max(16, triton.next_power_of_2(width)),
        _TILE,
        tl.float64 if acc == torch.float64 else tl.float32,
        order is not None,
    )
