"""torch_scatter's scatter, segment and gather functions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fastsparse_core import gather_csr as gather_rows
from fastsparse_core import scatter as scatter_rows
from fastsparse_core import segment_reduce
from fastsparse_pyg.compat.torch_scatter.layout import as_rows, num_segments

_NAMES = {"add": "sum"}
_EXTREMA = ("max", "min")


def _scatter(
    src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None, reduce: str
) -> tuple[Tensor, Tensor | None]:
    """Returns the reduced tensor and, for min and max, the chosen positions: src.size(dim) if empty."""
    dim = dim + src.dim() if dim < 0 else dim
    size = out.size(dim) if out is not None else num_segments(index, dim_size)
    rows = as_rows(src, index, dim)
    if reduce in _EXTREMA:
        result, chosen = scatter_rows(
            rows.src,
            rows.segment,
            size * rows.factor,
            reduce,  # type: ignore[call-overload]
            return_arg=True,
        )
        arg = rows.restore(rows.positions(chosen, src.size(dim)), size)
        result = rows.restore(result, size)
        if out is not None:
            found = arg < src.size(dim)
            better = found & (result > out if reduce == "max" else result < out)
            result = torch.where(better, result, out)
            arg = torch.where(better, arg, src.size(dim))
        return _into(out, result), arg
    of_sums = "sum" if reduce == "mean" and out is not None else reduce
    result = rows.restore(scatter_rows(rows.src, rows.segment, size * rows.factor, of_sums), size)  # type: ignore[call-overload]
    if out is not None:
        if reduce == "mul":  # not `copy_`: `mul_` saves the old values of `out`, which its gradient needs
            return out.mul_(result), None
        result = out + result
        if reduce == "mean":
            ones = torch.ones(src.shape, dtype=torch.int64, device=src.device)
            count = _scatter(ones, index, dim, None, size, "sum")[0].clamp_(min=1)
            rounding = None if src.is_floating_point() else "floor"
            result = torch.div(result, count, rounding_mode=rounding).to(src.dtype)
    return _into(out, result), None


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def scatter_sum(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Sums the elements that have the same index along a dimension; adds the sums to ``out`` if given."""
    return _scatter(src, index, dim, out, dim_size, "sum")[0]


scatter_add = scatter_sum


def scatter_mul(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Products of the elements that have the same index along a dimension; 1 for empty segments."""
    return _scatter(src, index, dim, out, dim_size, "mul")[0]


def scatter_mean(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Means of the elements that have the same index along a dimension; integer means are rounded down."""
    return _scatter(src, index, dim, out, dim_size, "mean")[0]


def scatter_min(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Minima and their positions along the dimension; for empty segments, the position ``src.size(dim)``."""
    result, arg = _scatter(src, index, dim, out, dim_size, "min")
    assert arg is not None
    return result, arg


def scatter_max(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Maxima and their positions along the dimension; for empty segments, the position ``src.size(dim)``."""
    result, arg = _scatter(src, index, dim, out, dim_size, "max")
    assert arg is not None
    return result, arg


def scatter(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Reduces elements with the same index along a dimension; ``reduce``: sum, add, mul, mean, min or max."""
    reduce = _checked(reduce, ("sum", "add", "mul", "mean", "min", "max"))
    return _scatter(src, index, dim, out, dim_size, reduce)[0]


# ---------------------------------------------------------------- sorted indices


def _segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None, dim_size: int | None, reduce: str
) -> tuple[Tensor, Tensor | None]:
    return _scatter(src, index, index.dim() - 1, out, dim_size, reduce)


def segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Reduces along the last dimension of a sorted ``index``; ``reduce``: sum, add, mean, min or max."""
    return _segment_coo(src, index, out, dim_size, _checked(reduce, ("sum", "add", "mean", "min", "max")))[0]


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Gathers elements of ``src`` by ``index``, along the last dimension of ``index``."""
    dim = index.dim() - 1
    if index.dim() == 1:
        return _into(out, src.index_select(0, index))
    shape = (*src.shape[:dim], index.size(dim), *src.shape[dim + 1 :])
    wide = index.reshape(*index.shape, *[1] * (src.dim() - index.dim())).expand(shape)
    return _into(out, src.gather(dim, wide))


def _segment_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None, reduce: str
) -> tuple[Tensor, Tensor | None]:
    indptr = _with_end(indptr)
    dim, size = indptr.dim() - 1, indptr.size(-1) - 1
    shared = _shared(indptr)
    if shared is not None:
        rows = src.movedim(dim, 0)
        try:
            result = segment_reduce(rows, shared, reduce, return_arg=reduce in _EXTREMA)  # type: ignore[call-overload]
        except ValueError:
            # Some rows may be before the first segment or after the last one: reduce without these rows. If
            # the error had another cause, the second call raises it again.
            first, last = int(shared[0]), int(shared[-1])
            rows = rows[first:last]
            result = segment_reduce(rows, shared - first, reduce, return_arg=reduce in _EXTREMA)  # type: ignore[call-overload]
            if reduce in _EXTREMA:
                value, arg = result
                result = value, torch.where(arg == last - first, src.size(dim), arg + first)
        if reduce in _EXTREMA:
            value, arg = result
            return _into(out, value.movedim(0, dim)), arg.movedim(0, dim)
        return _into(out, result.movedim(0, dim)), None
    result, arg = _scatter(src, _index_of(indptr, src, dim), dim, None, size + 1, reduce)
    arg = None if arg is None else arg.narrow(dim, 0, size)
    return _into(out, result.narrow(dim, 0, size)), arg


def _with_end(indptr: Tensor) -> Tensor:
    """Replaces empty pointers by a single 0, so that there are no segments."""
    return indptr if indptr.size(-1) else indptr.new_zeros(*indptr.shape[:-1], 1)


def _shared(indptr: Tensor) -> Tensor | None:
    """Returns the one-dimensional pointers if all rows of ``indptr`` share them; None if rows may differ."""
    if indptr.dim() == 1:
        return indptr
    sizes = zip(indptr.shape[:-1], indptr.stride()[:-1], strict=True)
    if all(size == 1 or stride == 0 for size, stride in sizes):
        return indptr.reshape(-1, indptr.size(-1))[0] if indptr.numel() else None
    return None


def _index_of(indptr: Tensor, src: Tensor, dim: int) -> Tensor:
    """Returns the segment of every element along a dimension; the number of segments if it is in none."""
    shape = src.shape[:dim]
    pointers = indptr.expand(*shape, indptr.size(-1)).contiguous()
    position = torch.arange(src.size(dim), device=src.device).expand(*shape, src.size(dim)).contiguous()
    index = torch.searchsorted(pointers, position, right=True) - 1
    return torch.where(index < 0, indptr.size(-1) - 1, index)


def segment_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Reduces the elements from ``indptr[s]`` to ``indptr[s + 1] - 1`` for every segment s.

    The segments are along the last dimension of ``indptr``. ``reduce`` is sum, add, mean, min or max.
    """
    return _segment_csr(src, indptr, out, _checked(reduce, ("sum", "add", "mean", "min", "max")))[0]


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Repeats element s of ``src`` from ``indptr[s]`` to ``indptr[s + 1] - 1``, for every segment s."""
    indptr = _with_end(indptr)
    dim = indptr.dim() - 1
    shared = _shared(indptr)
    if shared is not None:
        return _into(out, gather_rows(src.movedim(dim, 0), shared).movedim(0, dim))
    length = int(indptr.select(-1, -1).max())
    shape = (*src.shape[:dim], length, *src.shape[dim + 1 :])
    index = _index_of(indptr, src.new_empty(shape), dim)
    wide = index.reshape(*index.shape, *[1] * (src.dim() - index.dim())).expand(shape)
    return _into(out, src.gather(dim, wide.clamp(max=src.size(dim) - 1)))


def _checked(reduce: str, names: tuple[str, ...]) -> str:
    if reduce not in names:
        raise ValueError(f"reduce: expected one of {', '.join(map(repr, names))}, got {reduce!r}")
    return _NAMES.get(reduce, reduce)


# ---------------------------------------------------------------- a name for each reduction


def _named(
    call: Callable[..., tuple[Tensor, Tensor | None]], kind: str, reduce: str
) -> Callable[..., object]:
    extremum = reduce in _EXTREMA
    if kind == "coo":

        def by_index(
            src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
        ) -> object:
            result = call(src, index, out, dim_size, reduce)
            return result if extremum else result[0]

        return by_index

    def by_pointers(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> object:
        result = call(src, indptr, out, reduce)
        return result if extremum else result[0]

    return by_pointers


_coo, _csr = functools.partial(_named, _segment_coo, "coo"), functools.partial(_named, _segment_csr, "csr")
segment_sum_coo = segment_add_coo = _coo("sum")
segment_mean_coo, segment_min_coo, segment_max_coo = _coo("mean"), _coo("min"), _coo("max")
segment_sum_csr = segment_add_csr = _csr("sum")
segment_mean_csr, segment_min_csr, segment_max_csr = _csr("mean"), _csr("min"), _csr("max")
