"""Reduced elementwise expressions of both ends' and the edges' features: one kernel each way on CUDA."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.ops import _edge_cuda
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import is_first_derivative
from fastsparse_core.ops._edge_derivatives import gradients_of, leaves_in, with_leaves
from fastsparse_core.ops._edge_kernels import KEEPS, Expression, Leaf, kernel_of
from fastsparse_core.ops._edge_rows import lift
from fastsparse_core.ops._segment import reduce_op, softmax_op
from fastsparse_core.ops._segment_launch import sum_rows
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.incidence import edge_segments
from fastsparse_core.structure.segments import Segments

#: Edges of a tile; Triton programs per multiprocessor, and the same if each program writes its own sums.
_TILE, _PROGRAMS, _PROGRAMS_WITH_SUMS = 16, 16, 6

#: Warps per block of the kernels in CUDA C++.
_WARPS = 4
#: Reductions that kernels are generated for.
HOW = ("sum", "mean", "max", "min", "softmax")

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
    "relu_gradient": lambda grad, x: torch.where(x <= 0, 0.0, grad),
    "leaky_relu_gradient": lambda grad, x, slope: torch.where(x > 0, grad, grad * slope),
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
        tensors: the leaves: (num_dst, F), (num_src, F), (num_values, F) in the caller's edge order, or with
            one number in place of F; (F,) for ``"whole"``; (num_values, K) and (F, K) for ``"mapped"`` and
            ``"weight"``.
        how: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"softmax"``: the mean by softmax weights.
            ``"none"``: nothing is reduced.

    Returns:
        (num_dst, F); 0 in rows without edges. Sums are kept in float32 or wider, in the structure's order.
        For ``"none"`` (num_values, F) in the caller's edge order.
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
    given = [x.contiguous() for x in tensors]  # here, for second derivatives go through the copies
    out: Tensor = _EdgeExpression.apply(adj, expression, leaves, how, width, *given)
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
    if how == "none":
        return messages
    end = _End(adj, True)
    if how == "softmax":
        weights = softmax_op(messages, end.index, None, adj.num_dst, find=end.find)
        messages, how = weights * messages, "sum"
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
    """Keeps the leaves and what the reduction's backward pass reads."""

    @staticmethod
    def forward(
        ctx: Any, adj: Adjacency, expression: Any, leaves: Any, how: str, width: int, *tensors: Tensor
    ) -> Tensor:
        dtypes = [x.dtype for x, leaf in zip(tensors, leaves, strict=True) if leaf.place != "weight"]
        dtype = functools.reduce(torch.promote_types, dtypes)
        acc = accumulation_dtype(dtype)
        call = _Call(adj, expression, leaves, how, width, acc)
        num_rows = adj.num_values if how == "none" else adj.num_dst
        has_all = how != "none" or adj.num_values == adj.num_edges
        make = tensors[0].new_empty if has_all else tensors[0].new_zeros
        outs = [make((num_rows, width), dtype=dtype)]
        if how in KEEPS:
            outs.append(outs[0].new_empty(outs[0].shape, dtype=acc if how == "softmax" else torch.int32))
        # Softmax's backward pass recomputes messages: the last bits of another compiler's exp would change
        # the weights of messages in the thousands.
        same = [n for n, needs in enumerate(ctx.needs_input_grad[5:]) if needs] if how == "softmax" else []
        ctx.call = call = call._replace(same=tuple(same))
        parts = call.launch("forward", adj, tensors, outs)
        if parts is not None and how != "none":
            _combine(how, adj, outs, parts)
        kept = {"out": outs[0], "aux": outs[-1]}
        ctx.save_for_backward(*tensors, *(kept[name] for name in KEEPS.get(how, ())))
        return outs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        count = len(call.leaves)
        tensors, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needs = ctx.needs_input_grad[5:]
        found: list[Tensor | None] = [None] * count
        if not is_first_derivative(grad):
            again = _gradients_by_expressions(call, tensors, grad, needs)
            if again is not None:
                return (None,) * 5 + tuple(again)
            with torch.enable_grad():
                out = unfused(call.adj, call.expression, call.leaves, call.how, tensors)
            wanted = [n for n in range(count) if needs[n]]
            grads = torch.autograd.grad(
                out, [tensors[n] for n in wanted], grad, create_graph=True, allow_unused=True
            )
            for n, each in zip(wanted, grads, strict=True):
                found[n] = each
            return (None,) * 5 + tuple(found)
        # Triton's products of tiles take longer than rows per edge that PyTorch multiplies.
        mapped = [n for n in range(count) if needs[n] and call.leaves[n].place == "mapped"]
        if mapped and call._has_cuda_source((), (*tensors, grad)):
            both = [n in mapped or n - 1 in mapped for n in range(count)]
            again = _gradients_by_expressions(
                call, tensors, grad, [need and here for need, here in zip(needs, both, strict=True)]
            )
            if again is not None:
                found, needs = again, [need and not here for need, here in zip(needs, both, strict=True)]
        for part in ("rows", "columns"):
            own = "dst" if part == "rows" else "src"
            wanted = [
                n
                for n, leaf in enumerate(call.leaves)
                if needs[n] and (leaf.place == "src") == (own == "src")
            ]
            if wanted:
                made = call.gradients(part, own, wanted, tensors, grad.contiguous(), kept)
                for n, each in zip(wanted, made, strict=True):
                    found[n] = each
        return (None,) * 5 + tuple(found)


def _gradients_by_expressions(
    call: _Call, tensors: Sequence[Tensor], grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Gradients that have gradients, by kernels: each is an expression again. None: it has no such form."""
    count, leaves = len(tensors), call.leaves
    wanted = [n for n in range(count) if needs[n]]
    if call.how not in ("sum", "mean", "none"):
        return None
    numbers = {n: n - (leaves[n].place == "weight") for n in wanted}
    formulas = gradients_of(call.expression, set(numbers.values()), ("leaf", count))
    if formulas is None:
        return None
    if call.how == "mean":
        grad = grad / call.adj.in_degree().clamp(min=1).to(grad.dtype).unsqueeze(1)
    given = [*tensors, grad]
    places = [*(leaf.place for leaf in leaves), "edge" if call.how == "none" else "dst"]

    @functools.cache
    def reduced(n: int, at: str) -> Tensor:
        """The gradient of a leaf's value, summed over the edges of an end, or for every edge."""
        formula = formulas[n]
        used: list[int] = []
        for each in sorted(leaves_in(formula)):
            used += [each, each + 1] if places[each] == "mapped" else [each]
        swapped = {"dst": "src", "src": "dst"} if at == "src" else {}
        return edge_expression(
            call.adj.t() if at == "src" else call.adj,
            with_leaves(formula, {each: nth for nth, each in enumerate(used)}),
            [swapped.get(places[each], places[each]) for each in used],
            [given[each] for each in used],
            "none" if at == "none" else "sum",
        )

    found: list[Tensor | None] = [None] * count
    for n in wanted:
        leaf, number = leaves[n], numbers[n]
        if number not in formulas:
            found[n] = torch.zeros_like(tensors[n])
            continue
        if leaf.place == "mapped":
            weight = tensors[n + 1]
            out = reduced(number, "none").to(weight.dtype) @ weight
        elif leaf.place == "weight":
            rows = tensors[n - 1]
            out = reduced(number, "none").t().to(rows.dtype) @ rows
        elif leaf.place == "whole":
            out = reduced(number, "dst").sum(0)
        else:
            out = reduced(number, "none" if leaf.place == "edge" else leaf.place)
        if leaf.is_scalar:
            out = out.sum(-1, keepdim=True)
        found[n] = out.to(tensors[n].dtype)
    return found


class _Call(NamedTuple):
    """What a call computes, whatever its tensors hold."""

    adj: Adjacency
    expression: Expression
    leaves: tuple[Leaf, ...]
    how: str
    width: int
    acc: torch.dtype
    #: Leaves whose gradients come from kernels of the same language as the result.
    same: tuple[int, ...] = ()

    def gradients(
        self,
        part: str,
        own: str,
        wanted: Sequence[int],
        tensors: Sequence[Tensor],
        grad: Tensor,
        kept: Sequence[Tensor],
    ) -> list[Tensor]:
        """Gradients of the leaves that one kernel computes."""
        rows = self.adj if part == "rows" else self.adj.t()
        places = {n: self.leaves[n].place for n in wanted}
        sums = [n for n in wanted if places[n] in ("weight", "whole")]
        is_cuda_source = self._has_cuda_source(wanted, (*tensors, grad))
        programs = _num_warps(rows, bool(sums)) if is_cuda_source else self._programs(rows, bool(sums))
        made: dict[int, Tensor] = {}
        for n in wanted:
            if n in sums:
                made[n] = grad.new_zeros((programs, *tensors[n].shape), dtype=self.acc)
            else:
                has_all = places[n] == own or rows.num_values == rows.num_edges
                made[n] = (torch.empty_like if has_all else torch.zeros_like)(tensors[n])
        mine = [n for n in wanted if places[n] == own]
        rest = [made[n] for n in wanted if places[n] != own]
        outs = [made[n] for n in mine]
        parts = self.launch(part, rows, tensors, outs, (*rest, grad, *kept), tuple(wanted), programs)
        if parts is not None:
            for out, each in zip(outs, parts, strict=True):
                out.index_copy_(0, _cut_rows(rows), _sum_slots(rows, each).to(out.dtype))
        for n in sums:
            made[n] = made[n].sum(0).to(tensors[n].dtype)
        return [made[n] for n in wanted]

    def launch(
        self,
        part: str,
        rows: Adjacency,
        tensors: Sequence[Tensor],
        outs: Sequence[Tensor],
        extra: Sequence[Tensor] = (),
        wanted: tuple[int, ...] = (),
        programs: int = 0,
    ) -> list[Tensor] | None:
        """Runs a kernel.

        Returns:
            What the slices of split rows add to each of `outs`; None where no row is split.
        """
        split, order = rows.first_row_split, rows.edge_id
        num_slices = split.slices.size(0)
        if not num_slices:
            return None
        parts = [
            x.new_empty((split.num_slots, x.size(1)), dtype=self.acc if x.is_floating_point() else x.dtype)
            for x in outs
        ]
        if self._has_cuda_source(wanted, (*tensors, *(outs[:1] if part == "forward" else ()))):
            self._launch_cuda(part, rows, tensors, outs, parts, extra, wanted, programs)
            return parts if split.num_slots else None
        import triton
        import triton.language as tl

        kernel = kernel_of(part, self.expression, self.leaves, self.how, wanted)
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            kernel[(programs or self._programs(rows, False),)](
                split.slices,
                _row_of_slot(rows),
                rows.col,
                rows.col if order is None else order,
                self.adj.in_degree(),
                *tensors,
                *outs,
                *parts,
                *extra,
                num_slices,
                self.width,
                max(16, triton.next_power_of_2(self.width)),
                _TILE,
                tl.float64 if self.acc == torch.float64 else tl.float32,
                order is not None,
                split.num_slots > 0,
                "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
                num_warps=4 if self.width <= 128 else 8,
                enable_fp_fusion=self.how != "softmax",  # all kernels subtract from the same rounded message
            )
        return parts if split.num_slots else None

    def _has_cuda_source(self, wanted: Sequence[int], tensors: Sequence[Tensor]) -> bool:
        all_wanted = sorted({*wanted, *self.same})
        return _are_on_gpu(tensors) and _edge_cuda.supports(
            self.leaves, all_wanted, [x.dtype for x in tensors]
        )

    def _launch_cuda(
        self,
        part: str,
        rows: Adjacency,
        tensors: Sequence[Tensor],
        outs: Sequence[Tensor],
        parts: Sequence[Tensor],
        extra: Sequence[Tensor],
        wanted: tuple[int, ...],
        warps: int,
    ) -> None:
        split, order, degree = rows.first_row_split, rows.edge_id, self.adj.in_degree()
        number = {torch.int32: "int", torch.int64: "i64", torch.float32: "float"}
        out = outs[0] if part == "forward" else extra[-1 - len(KEEPS.get(self.how, ()))]
        source = _edge_cuda.source_of(
            part,
            self.expression,
            self.leaves,
            self.how,
            wanted,
            self.width,
            tuple(_edge_cuda.TYPES[x.dtype] for x in tensors),
            _edge_cuda.TYPES[out.dtype],
            "" if order is None else number[order.dtype],
            number[degree.dtype],
            all(x.data_ptr() % 16 == 0 for x in (*tensors, out)),
        )
        kernel = _edge_cuda.kernel_of(source, tensors[0].get_device())
        tiles = -(-self.width // (32 * _edge_cuda.features_per_lane(self.leaves, wanted, self.width)))
        with torch.cuda.device_of(tensors[0]):
            kernel(
                grid=((warps or _num_warps(rows, False)) // _WARPS, tiles, 1),
                block=(32 * _WARPS, 1, 1),
                args=[
                    *(
                        split.slices,
                        _row_of_slot(rows),
                        rows.col,
                        rows.col if order is None else order,
                        degree,
                    ),
                    *(*tensors, *outs, *parts, *extra, split.slices.size(0)),
                ],
            )

    def _programs(self, rows: Adjacency, has_sums: bool) -> int:
        most = _PROGRAMS_WITH_SUMS if has_sums else _PROGRAMS
        return max(min(rows.first_row_split.slices.size(0), most * rows.gpu.num_sms), 1)


def _are_on_gpu(tensors: Sequence[Tensor]) -> bool:
    return tensors[0].is_cuda


def _num_warps(rows: Adjacency, has_sums: bool) -> int:
    """Warps of a kernel in CUDA C++: whole blocks, and few where each writes sums of its own."""
    most = rows.gpu.num_sms * (4 if has_sums else 16)
    return _WARPS * max(min(-(-rows.first_row_split.slices.size(0) // _WARPS), most), 1)


def _slots(rows: Adjacency) -> Segments:
    """Which slots belong to which of the rows that are split."""

    def build() -> Segments:
        split = rows.first_row_split
        return Segments(split.split_ptr, None, split.num_slots)

    return rows.derived("fastsparse_core.ops.edge_expression.slots", build)


def _row_of_slot(rows: Adjacency) -> Tensor:
    def build() -> Tensor:
        split = rows.first_row_split
        return split.split_row.repeat_interleave(split.split_ptr.diff(), output_size=split.num_slots)

    return rows.derived("fastsparse_core.ops.edge_expression.row_of_slot", build)


def _cut_rows(rows: Adjacency) -> Tensor:
    """The rows that are split, int64."""
    return rows.derived(
        "fastsparse_core.ops.edge_expression.cut_rows", lambda: rows.first_row_split.split_row.long()
    )


def _cut_row_of_slot(rows: Adjacency) -> Tensor:
    """For every slot, which of the rows that are split it belongs to."""

    def build() -> Tensor:
        split = rows.first_row_split
        count = torch.arange(split.split_row.numel(), device=split.split_row.device)
        return count.repeat_interleave(split.split_ptr.diff(), output_size=split.num_slots)

    return rows.derived("fastsparse_core.ops.edge_expression.cut_row_of_slot", build)


def _sum_slots(rows: Adjacency, part: Tensor) -> Tensor:
    return sum_rows(part, _slots(rows), "sum")


def _combine(how: str, adj: Adjacency, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Puts together what slices of the same row give."""
    slots, row, part = _slots(adj), _cut_rows(adj), parts[0]
    count, nth = row.numel(), _cut_row_of_slot(adj) if how in KEEPS else row
    if how in ("max", "min"):
        total, chosen = reduce_op(part, nth, None, count, how, find=lambda *_: slots)
        outs[1].index_copy_(0, row, parts[1].gather(0, chosen.long()))
    elif how == "softmax":
        most = reduce_op(parts[1], nth, None, count, "max", find=lambda *_: slots)[0]
        share = (parts[1] - most[nth]).exp_()
        sums = sum_rows(share, slots, "sum")
        total = sum_rows(share * part, slots, "sum") / sums
        outs[1].index_copy_(0, row, most + sums.log())
    else:
        total = sum_rows(part, slots, "sum")
    outs[0].index_copy_(0, row, total.to(outs[0].dtype))
