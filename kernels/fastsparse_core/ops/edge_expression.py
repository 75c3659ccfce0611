"""Elementwise expressions of edge features and of the features of both end nodes, reduced per node.

One generated kernel (Triton or CUDA C++) runs the forward pass. In the backward pass, one kernel computes the
gradients of destinations and edges, and another those of sources.
"""

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
from fastsparse_core.ops._eager import is_first_derivative, is_read
from fastsparse_core.ops._edge_derivatives import gradients_of, leaves_in, with_leaves
from fastsparse_core.ops._edge_kernels import KEEPS, Expression, Leaf, Root, kernel_of
from fastsparse_core.ops._edge_rows import lift
from fastsparse_core.ops._segment import reduce_op, softmax_op
from fastsparse_core.ops._segment_launch import sum_rows
from fastsparse_core.policy import allows_tf32
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.incidence import edge_segments
from fastsparse_core.structure.segments import Segments

#: Number of edges per tile; number of Triton programs per multiprocessor; number of programs per
#: multiprocessor if each program writes its own sums.
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
    """Returns whether Triton is installed; it comes with PyTorch for CUDA."""
    return importlib.util.find_spec("triton") is not None


def edge_expression(
    adj: Adjacency, expression: Expression, places: Sequence[str], tensors: Sequence[Tensor], how: str = "sum"
) -> Tensor:
    """:func:`edge_expressions` for one expression; returns its result."""
    return edge_expressions(adj, [(how, expression)], places, tensors)[0]


def edge_expressions(
    adj: Adjacency,
    roots: Sequence[tuple[str, Expression]],
    places: Sequence[str],
    tensors: Sequence[Tensor],
    width: int = 0,
) -> tuple[Tensor, ...]:
    """Computes expressions for every edge and reduces them per destination, with one kernel.

    Args:
        adj: structure (num_dst, num_src).
        roots: pairs of a reduction and an expression. A reduction is ``"sum"``, ``"mean"``, ``"max"``,
            ``"min"``, ``"softmax"`` (the mean with softmax weights), ``"none"`` (no reduction) or
            ``"across"`` (each edge's row is summed to one number). A call with ``"max"``, ``"min"`` or
            ``"softmax"`` must have one root only. An expression is ``("leaf", n)``, a number, or
            ``(operator, *expressions)``.
        places: place of each tensor, see `Leaf`.
        tensors: the leaves: (num_dst, F), (num_src, F) or (num_values, F) in the caller's edge order, or one
            number per row; (F,) for ``"whole"``; (num_values, K) and (F, K) for ``"mapped"`` and
            ``"weight"``.
        width: F; 0: the width of the widest leaf.

    Returns:
        For every root (num_dst, F); 0 in rows without edges. Sums are accumulated in float32 or wider, in the
        structure's order. For ``"none"``, (num_values, F) in the caller's edge order; for ``"across"``,
        (num_values, 1).
    """
    width = width or max(
        x.size(0) if place == "weight" else x.shape[-1]
        for x, place in zip(tensors, places, strict=True)
        if place != "mapped"
    )
    first: dict[int, int] = {}
    leaves = tuple(
        Leaf(
            place,
            place not in ("mapped", "weight") and x.shape[-1] == 1 and width > 1,
            x.shape[-1] if place in ("mapped", "weight") else 0,
            first.setdefault(id(x), n) if place == "mapped" else n,
        )
        for n, (x, place) in enumerate(zip(tensors, places, strict=True))
    )
    # Outside of `_EdgeExpression`, so that autograd differentiates the copies.
    given = [x.contiguous() for x in tensors]
    made = tuple(Root(*root) for root in roots)
    out: tuple[Tensor, ...] = _EdgeExpression.apply(adj, made, leaves, width, *given)
    return out


def unfused(
    adj: Adjacency, roots: Sequence[Root], leaves: Sequence[Leaf], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`edge_expression` by PyTorch's operators, which store a row per edge."""
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

    def reduced(how: str, messages: Tensor) -> Tensor:
        if how == "none":
            return messages
        if how == "across":
            return messages.sum(-1, keepdim=True)
        end = _End(adj, True)
        if how == "softmax":
            weights = softmax_op(messages, end.index, None, adj.num_dst, find=end.find)
            messages, how = weights * messages, "sum"
        return reduce_op(messages, end.index, None, adj.num_dst, how, find=end.find)[0]

    return tuple(reduced(root.how, value(root.value)) for root in roots)


class _End:
    """One end of the edges, for the functions of `_edge_rows`."""

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
    """Saves the leaves, and the other tensors that the backward pass of the reduction reads."""

    @staticmethod
    def forward(
        ctx: Any, adj: Adjacency, roots: tuple[Root, ...], leaves: Any, width: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        dtypes = [x.dtype for x, leaf in zip(tensors, leaves, strict=True) if leaf.place != "weight"]
        dtype = functools.reduce(torch.promote_types, dtypes)
        acc = accumulation_dtype(dtype)
        how = roots[0].how
        call = _Call(adj, roots, leaves, width, acc)
        of_edges = tensors[0].new_empty if adj.num_values == adj.num_edges else tensors[0].new_zeros
        made = [
            tensors[0].new_empty((adj.num_dst, width), dtype=dtype)
            if root.is_of_nodes
            else of_edges((adj.num_values, 1 if root.how == "across" else width), dtype=dtype)
            for root in roots
        ]
        outs = [out for out, root in zip(made, roots, strict=True) if root.is_of_nodes]
        rest = [out for out, root in zip(made, roots, strict=True) if not root.is_of_nodes]
        if how in KEEPS:
            outs.append(outs[0].new_empty(outs[0].shape, dtype=acc if how == "softmax" else torch.int32))
        # The backward pass of softmax recomputes messages. If messages have values in the thousands, rounding
        # differences of another compiler's functions would change the softmax weights.
        same = [n for n, needs in enumerate(ctx.needs_input_grad[4:]) if needs] if how == "softmax" else []
        ctx.call = call = call._replace(same=tuple(same))
        ctx.set_materialize_grads(False)
        parts = call.launch("forward", adj, tensors, outs, rest)
        if parts is not None:
            _combine(how, adj, outs, parts)
        kept = {"out0": outs[0], "aux": outs[-1]} if outs else {}
        ctx.save_for_backward(*tensors, *(kept[name] for name in KEEPS.get(how, ())))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        read = [(root, grad) for root, grad in zip(ctx.call.roots, grads, strict=True) if grad is not None]
        call: _Call = ctx.call._replace(roots=tuple(root for root, _ in read))
        given = [grad for _, grad in read]
        count = len(call.leaves)
        tensors, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needs = [node is not None and is_read(node) for node, _ in ctx.next_functions]
        found: list[Tensor | None] = [None] * count
        made: Sequence[Tensor | None]
        if not read or not any(needs):
            return (None,) * 4 + tuple(found)
        if not all(map(is_first_derivative, given)):
            again = _gradients_by_expressions(call, tensors, given, needs)
            if again is not None:
                return (None,) * 4 + tuple(again)
            wanted = [n for n in range(count) if needs[n]]
            with torch.enable_grad():
                outs = unfused(call.adj, call.roots, call.leaves, tensors)
            made = torch.autograd.grad(
                outs, [tensors[n] for n in wanted], given, create_graph=True, allow_unused=True
            )
            for n, each in zip(wanted, made, strict=True):
                found[n] = each
            return (None,) * 4 + tuple(found)
        # Triton's tile products take longer than storing rows per edge and multiplying them with PyTorch.
        has_mapped = any(
            need and leaf.place == "mapped" for need, leaf in zip(needs, call.leaves, strict=True)
        )
        if has_mapped and call._has_cuda_source((), (*tensors, *given)):
            again = _gradients_by_expressions(call, tensors, given, needs)
            if again is not None:
                return (None,) * 4 + tuple(again)
        for part in ("rows", "columns"):
            own = "dst" if part == "rows" else "src"
            wanted = [
                n
                for n, leaf in enumerate(call.leaves)
                if needs[n] and (leaf.place == "src") == (own == "src")
            ]
            if wanted:
                made = call.gradients(part, own, wanted, tensors, [x.contiguous() for x in given], kept)
                for n, each in zip(wanted, made, strict=True):
                    found[n] = each
        return (None,) * 4 + tuple(found)


def _gradients_by_expressions(
    call: _Call, tensors: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """Differentiable gradients: each is an edge expression again. None: there is no such expression."""
    count, leaves = len(tensors), call.leaves
    wanted = [n for n in range(count) if needs[n]]
    if any(root.how in KEEPS for root in call.roots):
        return None
    numbers = {n: n - (leaves[n].place == "weight") for n in wanted}
    leaves_of_grads = [("leaf", count + k) for k in range(len(grads))]
    formulas = gradients_of(call.roots, set(numbers.values()), leaves_of_grads)
    if formulas is None:
        return None
    given, places = list(tensors), [leaf.place for leaf in leaves]
    for root, grad in zip(call.roots, grads, strict=True):
        if root.how == "mean":
            grad = grad / call.adj.in_degree().clamp(min=1).to(grad.dtype).unsqueeze(1)
        given.append(grad)
        places.append("dst" if root.is_of_nodes else "edge")
    # One call computes all gradients of edges and destinations, and one call all gradients of sources.
    asked: dict[bool, dict[Root, Tensor | None]] = {False: {}, True: {}}
    roots: dict[int, tuple[bool, Root]] = {}
    for n in wanted:
        leaf, formula = leaves[n], formulas.get(numbers[n])
        if formula is None:
            continue
        how = "sum"
        if leaf.place in ("mapped", "weight"):
            how = "none"
        elif leaf.place == "edge":
            how = "across" if leaf.is_scalar else "none"
        roots[n] = (leaf.place == "src", Root(how, formula))
        asked[leaf.place == "src"][roots[n][1]] = None
    for at_src, each in asked.items():
        if each:
            used: list[int] = []
            for number in sorted(set().union(*(leaves_in(root.value) for root in each))):
                used += [number, number + 1] if places[number] == "mapped" else [number]
            new = {number: nth for nth, number in enumerate(used)}
            swapped = {"dst": "src", "src": "dst"} if at_src else {}
            outs = edge_expressions(
                call.adj.t() if at_src else call.adj,
                [(root.how, with_leaves(root.value, new)) for root in each],
                [swapped.get(places[number], places[number]) for number in used],
                [given[number] for number in used],
                call.width,
            )
            each.update(zip(each, outs, strict=True))
    found: list[Tensor | None] = [None] * count
    for n in wanted:
        leaf = leaves[n]
        if n not in roots:
            found[n] = torch.zeros_like(tensors[n])
            continue
        at_src, root = roots[n]
        out = asked[at_src][root]
        assert out is not None
        if leaf.place == "mapped":
            weight = tensors[n + 1]
            out = out.to(weight.dtype) @ weight
        elif leaf.place == "weight":
            out = out.t().to(tensors[n - 1].dtype) @ tensors[n - 1]
        elif leaf.place == "whole":
            out = out.sum(0)
        if leaf.is_scalar and leaf.place != "edge":
            out = out.sum(-1, keepdim=True)
        found[n] = out.to(tensors[n].dtype)
    return found


class _Call(NamedTuple):
    """Properties of a call, without the content of its tensors."""

    adj: Adjacency
    roots: tuple[Root, ...]
    leaves: tuple[Leaf, ...]
    width: int
    acc: torch.dtype
    #: Leaves whose gradients must be computed by kernels in the same language as the forward pass.
    same: tuple[int, ...] = ()

    def gradients(
        self,
        part: str,
        own: str,
        wanted: Sequence[int],
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor],
        kept: Sequence[Tensor],
    ) -> list[Tensor]:
        """Gradients of the leaves that one kernel computes."""
        rows = self.adj if part == "rows" else self.adj.t()
        places = {n: self.leaves[n].place for n in wanted}
        sums = [n for n in wanted if places[n] in ("weight", "whole")]
        is_cuda_source = self._has_cuda_source(wanted, (*tensors, *grads))
        programs = _num_warps(rows, bool(sums)) if is_cuda_source else self._programs(rows, bool(sums))
        made: dict[int, Tensor] = {}
        for n in wanted:
            if n in sums:
                made[n] = grads[0].new_zeros((programs, *tensors[n].shape), dtype=self.acc)
            else:
                has_all = places[n] == own or rows.num_values == rows.num_edges
                made[n] = (torch.empty_like if has_all else torch.zeros_like)(tensors[n])
        mine = [n for n in wanted if places[n] == own]
        rest = [made[n] for n in wanted if places[n] != own]
        outs = [made[n] for n in mine]
        parts = self.launch(part, rows, tensors, outs, (*rest, *grads, *kept), tuple(wanted), programs)
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
            For each of `outs`, the partial results of slices of split rows; None: no row is split.
        """
        split, order = rows.first_row_split, rows.edge_id
        num_slices = split.slices.size(0)
        if not num_slices:
            return None
        parts = [
            x.new_empty((split.num_slots, x.size(1)), dtype=self.acc if x.is_floating_point() else x.dtype)
            for x in outs
        ]
        results = (*outs[:1], *extra[:1])[:1] if part == "forward" else ()
        if self._has_cuda_source(wanted, (*tensors, *results)):
            self._launch_cuda(part, rows, tensors, outs, parts, extra, wanted, programs)
            return parts if parts and split.num_slots else None
        import triton
        import triton.language as tl

        kernel = kernel_of(part, self.roots, self.leaves, wanted)
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
                "tf32" if allows_tf32() else "tf32x3",
                num_warps=4 if self.width <= 128 else 8,
                # All kernels of a softmax must subtract from the same rounded message.
                enable_fp_fusion=self.roots[0].how != "softmax",
            )
        return parts if parts and split.num_slots else None

    def _has_cuda_source(self, wanted: Sequence[int], tensors: Sequence[Tensor]) -> bool:
        all_wanted = sorted({*wanted, *self.same})
        return _are_on_gpu(tensors) and _edge_cuda.supports(
            self.roots, self.leaves, all_wanted, self.width, [x.dtype for x in tensors]
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
        kept = len(KEEPS.get(self.roots[0].how, ()))
        out = (*outs, *extra)[0] if part == "forward" else extra[-1 - kept]
        source = _edge_cuda.source_of(
            part,
            self.roots,
            self.leaves,
            wanted,
            self.width,
            tuple(_edge_cuda.TYPES[x.dtype] for x in tensors),
            _edge_cuda.TYPES[out.dtype],
            "" if order is None else number[order.dtype],
            number[degree.dtype],
            all(x.data_ptr() % 16 == 0 for x in (*tensors, *outs, *extra)),
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
    """Number of warps of a CUDA C++ kernel, a multiple of `_WARPS`; fewer if each warp writes its sums."""
    most = rows.gpu.num_sms * (4 if has_sums else 16)
    return _WARPS * max(min(-(-rows.first_row_split.slices.size(0) // _WARPS), most), 1)


def _slots(rows: Adjacency) -> Segments:
    """The slots of each split row, as segments."""

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
    """For every slot, the number of the split row that it belongs to."""

    def build() -> Tensor:
        split = rows.first_row_split
        count = torch.arange(split.split_row.numel(), device=split.split_row.device)
        return count.repeat_interleave(split.split_ptr.diff(), output_size=split.num_slots)

    return rows.derived("fastsparse_core.ops.edge_expression.cut_row_of_slot", build)


def _sum_slots(rows: Adjacency, part: Tensor) -> Tensor:
    return sum_rows(part, _slots(rows), "sum")


def _combine(how: str, adj: Adjacency, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Combines the partial results of slices of the same row."""
    slots, row, part = _slots(adj), _cut_rows(adj), parts[0]
    count, nth = row.numel(), _cut_row_of_slot(adj) if how in KEEPS else row
    totals: list[Tensor] = []
    if how in ("max", "min"):
        total, chosen = reduce_op(part, nth, None, count, how, find=lambda *_: slots)
        totals = [total, parts[1].gather(0, chosen.long())]
    elif how == "softmax":
        most = reduce_op(parts[1], nth, None, count, "max", find=lambda *_: slots)[0]
        share = (parts[1] - most[nth]).exp_()
        sums = sum_rows(share, slots, "sum")
        totals = [sum_rows(share * part, slots, "sum") / sums, most + sums.log()]
    else:
        totals = [sum_rows(each, slots, "sum") for each in parts]
    for out, total in zip(outs, totals, strict=True):
        out.index_copy_(0, row, total.to(out.dtype))
