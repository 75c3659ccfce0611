"""Operators on segments of rows, their gradients, and the cache of sorted segments.

An operator takes either `index` (num_rows,), the segment of every row, or `rowptr` (num_segments + 1,); the
other argument is None. The operator looks up the sorted segments by the tensor, so `torch.compile` sees only
tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fastsparse_core import recorded
from fastsparse_core.cache import AdjacencyCache
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._operands import untouched
from fastsparse_core.ops._registration import Operator
from fastsparse_core.ops._segment_launch import (
    EXTREMA,
    MOMENTS,
    extra_dtype,
    gather_rows,
    launch_reduce,
    launch_softmax,
    partial_bytes,
)
from fastsparse_core.structure.segments import Segments

#: Largest size of partial results, in bytes, for a launch while the index is still being sorted. Until then,
#: only an upper bound of their number is known. A hundred million rows of width 16 need less memory.
_MOST_UNSEEN_BYTES = 2**26

_cache = AdjacencyCache("segments")
_Find = Callable[[Tensor | None, Tensor | None, int, int], Segments]


def find_segments(
    index: Tensor | None,
    rowptr: Tensor | None,
    num_segments: int,
    num_rows: int,
    meanwhile: Callable[[Segments], None] | None = None,
) -> Segments:
    """The segments of an index or of row pointers, cached until the tensor's memory is freed or edited.

    Args:
        index: segment of every row, (num_rows,), or None.
        rowptr: row pointers, (num_segments + 1,), or None.
        num_segments: number of segments.
        num_rows: number of rows.
        meanwhile: as for `Segments.from_index`.

    Raises:
        ValueError: the tensor does not fit the sizes.
    """
    key = rowptr if index is None else index
    assert key is not None
    if key.is_inference():  # such tensors have no version counter, so edits cannot be detected
        return _make_segments(index, rowptr, num_segments, num_rows, meanwhile)
    # The key is the storage, because `edge_index[0]` is a new tensor object every time.
    options = (
        index is None,
        num_rows if index is None else num_segments,
        key.data_ptr(),
        key.dtype,
        key.shape,
        key.stride(),
    )
    build: Any = functools.partial(_make_segments, index, rowptr, num_segments, num_rows, meanwhile)
    return cast("Segments", _cache.lookup(key.untyped_storage(), key._version, options, build))


def is_kept(index: Tensor) -> bool:
    """Returns whether segments are cached for an index, or for another tensor in its memory."""
    return _cache.holds(index.untyped_storage())


def _make_segments(
    index: Tensor | None,
    rowptr: Tensor | None,
    num_segments: int,
    num_rows: int,
    meanwhile: Callable[[Segments], None] | None = None,
) -> Segments:
    """:func:`find_segments` without the cache, for tensors that compiled code may have made.

    Inductor reuses the memory, and even the tensor object, of an index that is no longer needed, without
    changing the version counter.
    """
    with torch.inference_mode(False):  # segments made during evaluation must support autograd later
        run = recorded.current()
        if run is not None and index is not None:
            shape = (num_segments, max(num_rows, 1))
            made = run.of_edges(
                run, index, torch.arange(num_rows, device=index.device), shape, "keep", "keep"
            )
            return Segments(made.rowptr, made.edge_id, num_rows, made.row_split)
        if index is not None:
            return Segments.from_index(index, num_segments, meanwhile)
        assert rowptr is not None
        return Segments.from_rowptr(rowptr, num_rows)


def clear_segments() -> None:
    """Frees all cached segments."""
    _cache.clear()


# ---------------------------------------------------------------- reductions


def _segment_reduce(
    src: Tensor,
    index: Tensor | None,
    rowptr: Tensor | None,
    num_segments: int,
    reduce: str,
    find: _Find | None = None,
) -> tuple[Tensor, Tensor]:
    find = find or find_segments
    out, extra = _empty_results(src, num_segments, reduce)
    if not out.numel():
        return out, extra
    if index is None or find is not find_segments:
        launch_reduce(src, find(index, rowptr, num_segments, src.size(0)), reduce, out, extra)
        return out, extra
    is_launched = False

    def meanwhile(unseen: Segments) -> None:
        nonlocal is_launched
        if partial_bytes(unseen, src.size(1), reduce, src.dtype) <= _MOST_UNSEEN_BYTES:
            launch_reduce(src, unseen, reduce, out, extra)
            is_launched = True

    segments = find_segments(index, None, num_segments, src.size(0), meanwhile)
    if not is_launched:
        launch_reduce(src, segments, reduce, out, extra)
    return out, extra


def _empty_results(src: Tensor, num_segments: int, reduce: str) -> tuple[Tensor, Tensor]:
    out = src.new_empty(num_segments, src.size(1))
    dtype = extra_dtype(reduce, src.dtype)
    return out, src.new_empty(0) if dtype is None else torch.empty_like(out, dtype=dtype)


# In calls from PyTorch's dispatcher, the last argument, the function that finds segments, is missing.


class _SegmentReduce(torch.autograd.Function):
    """In sums, every row gets the gradient of its segment; in extrema, only the chosen row gets it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        src, index, rowptr, num_segments, reduce, find = (*arguments, None)[:6]
        out, extra = reduce_op.below(*arguments)
        ctx.reduce, ctx.num_segments, ctx.num_rows, ctx.find = reduce, num_segments, src.size(0), find
        ctx.mark_non_differentiable(extra)
        ctx.set_materialize_grads(False)  # otherwise, autograd would allocate zeros as gradients of `extra`
        needs_src = reduce in ("mul", *MOMENTS)
        ctx.save_for_backward(
            index,
            rowptr,
            src if needs_src else None,
            out if reduce in ("mul", "std") else None,
            extra if extra_dtype(reduce, src.dtype) is not None else None,
        )
        return out, extra

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        index, rowptr, src, out, extra = ctx.saved_tensors

        def gather(rows: Tensor) -> Tensor:
            return cast("Tensor", gather_op(rows, index, rowptr, ctx.num_rows, find=ctx.find))

        def counts() -> Tensor:
            if is_plain_eager(grad):
                return _segment_counts(index, rowptr, ctx.num_segments, ctx.num_rows, ctx.find)
            return _counts_op.dispatched(index, rowptr, ctx.num_segments, ctx.num_rows)

        reduce: str = ctx.reduce
        if reduce == "sum":
            return gather(grad), None, None, None, None, None
        # Entering the context takes 3 to 7 us of host time, so it is entered only if autocast is on.
        is_mixed = is_any_autocast_enabled()
        with torch.autocast(grad.device.type, enabled=False) if is_mixed else contextlib.nullcontext():
            if reduce == "mean":
                grad_src = gather((grad / counts()).to(grad.dtype))
            elif reduce in EXTREMA:
                # The additional row, num_rows, is for segments without rows. A row belongs to one segment, so
                # no other place is written twice.
                places = grad.new_zeros(ctx.num_rows + 1, grad.size(1))
                grad_src = places.scatter_(0, extra, grad)[: ctx.num_rows]
            elif reduce == "mul":
                reduced = functools.partial(reduce_op, find=ctx.find)
                grad_src = _gradient_of_product(grad, src, index, rowptr, ctx.num_segments, gather, reduced)
            else:
                wide = accumulation_dtype(src.dtype)
                if torch.is_grad_enabled():  # the mean depends on src
                    extra = reduce_op(src.to(wide), index, rowptr, ctx.num_segments, "mean", find=ctx.find)[0]
                factor = grad.to(wide) / counts().to(wide)
                if reduce == "var":
                    factor = 2 * factor
                else:  # a deviation of 0 has no derivative; its gradient is defined as 0
                    factor = torch.where(out == 0, 0, factor / torch.where(out == 0, 1, out.to(wide)))
                grad_src = (gather(factor) * (src.to(wide) - gather(extra))).to(src.dtype)
        return grad_src, None, None, None, None, None


def _gradient_of_product(
    grad: Tensor,
    src: Tensor,
    index: Tensor | None,
    rowptr: Tensor | None,
    num_segments: int,
    gather: Any,
    reduced: Any,
) -> Tensor:
    """The gradient times the product of a segment's other rows, also correct if some rows are 0."""
    zero = src == 0
    wide = accumulation_dtype(src.dtype)
    nonzero = torch.where(zero, 1, src.to(wide))
    zeros = reduced(zero.to(torch.float32), index, rowptr, num_segments, "sum")[0]
    others = gather(grad.to(wide) * reduced(nonzero, index, rowptr, num_segments, "mul")[0]) / nonzero
    zeros_beside = gather(zeros) - zero.to(torch.float32)
    return torch.where(zeros_beside > 0, 0, others).to(src.dtype)


# ---------------------------------------------------------------- rows of segments


def _segment_counts(
    index: Tensor | None, rowptr: Tensor | None, num_segments: int, num_rows: int, find: _Find | None = None
) -> Tensor:
    """Number of rows of every segment, or 1 if it is empty, int64 (num_segments, 1)."""
    # A copy, because callers may edit results of operators in place.
    return (find or find_segments)(index, rowptr, num_segments, num_rows).count.clone()[:, None]


def _segment_gather(
    src: Tensor, index: Tensor | None, rowptr: Tensor | None, num_rows: int, find: _Find | None = None
) -> Tensor:
    if index is None:
        assert rowptr is not None
        index = (find or find_segments)(None, rowptr, rowptr.numel() - 1, num_rows).index()
    elif src.size(0) == 0 and num_rows == 0:
        return src.new_empty(0, src.size(1))
    if not src.is_cuda or src.is_complex() or index.device != src.device:
        return torch.index_select(src, 0, index, out=untouched(src, index.numel(), src.size(1)))
    return gather_rows(src, index)


class _SegmentGather(torch.autograd.Function):
    """Gathers the row of each segment; the gradient sums over each segment."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        src, index, rowptr, _, ctx.find = (*arguments, None)[:5]
        ctx.save_for_backward(index, rowptr)
        ctx.num_segments = src.size(0)
        return cast("Tensor", gather_op.below(*arguments))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, rowptr = ctx.saved_tensors
        total = reduce_op(grad, index, rowptr, ctx.num_segments, "sum", find=ctx.find)[0]
        return total, None, None, None, None


# ---------------------------------------------------------------- softmax


def _segment_softmax(
    src: Tensor, index: Tensor | None, rowptr: Tensor | None, num_segments: int, find: _Find | None = None
) -> Tensor:
    return launch_softmax(
        src, None, lambda: (find or find_segments)(index, rowptr, num_segments, src.size(0))
    )


def _segment_softmax_backward(
    weight: Tensor,
    grad: Tensor,
    index: Tensor | None,
    rowptr: Tensor | None,
    num_segments: int,
    find: _Find | None = None,
) -> Tensor:
    return launch_softmax(
        weight, grad, lambda: (find or find_segments)(index, rowptr, num_segments, weight.size(0))
    )


class _SegmentSoftmax(torch.autograd.Function):
    """ds = p (g - sum over the segment of p g)."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _, index, rowptr, ctx.num_segments, ctx.find = (*arguments, None)[:5]
        weight = softmax_op.below(*arguments)
        ctx.save_for_backward(weight, index, rowptr)
        return cast("Tensor", weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, index, rowptr = ctx.saved_tensors
        grad_src = _softmax_backward_op(weight, grad, index, rowptr, ctx.num_segments, find=ctx.find)
        return grad_src, None, None, None, None


class _SegmentSoftmaxBackward(torch.autograd.Function):
    """Derivatives of the gradient ds = p (g - R(p g)), where R gives every row the sum of its segment.

    With the incoming gradient u: ds is linear in g and self-adjoint, so dg = p (u - R(p u)). The derivative
    by p is dp = u (g - R(p g)) - g R(p u).
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.num_segments, ctx.find = (*arguments, None)[:6]
        ctx.save_for_backward(*tensors)
        return cast("Tensor", _softmax_backward_op.below(*arguments))

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        weight, grad, index, rowptr = ctx.saved_tensors

        def segment_sums(rows: Tensor) -> Tensor:
            sums = reduce_op(rows, index, rowptr, ctx.num_segments, "sum", find=ctx.find)[0]
            return cast("Tensor", gather_op(sums, index, rowptr, rows.size(0), find=ctx.find))

        grad_weight = outer * (grad - segment_sums(weight * grad)) - grad * segment_sums(weight * outer)
        grad_grad = _softmax_backward_op(weight, outer, index, rowptr, ctx.num_segments, find=ctx.find)
        return grad_weight, grad_grad, None, None, None, None


# ---------------------------------------------------------------- registration


def _counts_fake(of: Any) -> Tensor:
    key = of.rowptr if of.index is None else of.index
    return cast("Tensor", key.new_empty(of.num_segments, 1, dtype=torch.int64))


def _operator(kernel: Any, fake: Callable[[Any], Any], formula: Any = None) -> Operator:
    """Registers an operator. Compiled code does not use the cache of segments (see `_make_segments`)."""
    return Operator(kernel, fake, formula, find=_make_segments)


reduce_op = _operator(
    _segment_reduce, lambda of: _empty_results(of.src, of.num_segments, of.reduce), _SegmentReduce
)
gather_op = _operator(
    _segment_gather, lambda of: of.src.new_empty(of.num_rows, of.src.size(1)), _SegmentGather
)
softmax_op = _operator(_segment_softmax, lambda of: of.src.new_empty(of.src.shape), _SegmentSoftmax)
_softmax_backward_op = _operator(
    _segment_softmax_backward, lambda of: of.weight.new_empty(of.weight.shape), _SegmentSoftmaxBackward
)
_counts_op = _operator(_segment_counts, _counts_fake)
