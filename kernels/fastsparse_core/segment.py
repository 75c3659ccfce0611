"""Reductions of rows by an index or by row pointers: scatter, segment_reduce and related functions.

Forward and backward passes use no atomics, so results have the same bits in every run.
"""

from __future__ import annotations

from typing import Literal, cast, overload

import torch
from torch import Tensor

from fastsparse_core.ops._checks import check_heads
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._operands import written_out
from fastsparse_core.ops._segment import clear_segments, gather_op, reduce_op, softmax_op
from fastsparse_core.ops._segment_launch import REDUCTION_CODE

__all__ = ["clear_segments", "gather_csr", "scatter", "scatter_softmax", "segment_reduce", "segment_softmax"]

Reduce = Literal["sum", "mean", "max", "min", "mul", "var", "std"]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: Reduction of integers -> its name in torch.scatter_reduce.
_OF_INTEGERS = {"sum": "sum", "mean": "sum", "max": "amax", "min": "amin", "mul": "prod"}


@overload
def segment_reduce(
    src: Tensor, rowptr: Tensor, reduce: Reduce = ..., *, return_arg: Literal[False] = ...
) -> Tensor: ...
@overload
def segment_reduce(
    src: Tensor, rowptr: Tensor, reduce: Reduce = ..., *, return_arg: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def segment_reduce(
    src: Tensor, rowptr: Tensor, reduce: Reduce = "sum", *, return_arg: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Reduces consecutive rows.

    .. math::
        out_s = \bigoplus_{e = rowptr_s}^{rowptr_{s + 1} - 1} src_e

    Args:
        src: (E, ...), float64, float32, float16, bfloat16 or integer.
        rowptr: int32 or int64 (S + 1,), ascending from 0 to E. It is checked in the first call with this
            tensor, and again after in-place edits.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"mul"``, ``"var"`` or ``"std"``. Variance and
            standard deviation divide by the number of rows (no Bessel correction), and need floating-point
            numbers.
        return_arg: if True, also returns the row of each maximum or minimum. Only for ``"max"`` and
            ``"min"``.

    Returns:
        (S, ...) in the dtype of ``src``; 16-bit floating-point numbers are reduced in float32, and means of
        integers are rounded down. The result of an empty segment is 0, or 1 for products. With ``return_arg``
        also int64 (S, ...): the first row that has the maximum or minimum, or E for empty segments. The
        gradient of a maximum or minimum goes to this row. The result is differentiable any number of times.

    Raises:
        TypeError: a dtype is not supported, or not by the reduction.
        ValueError: shapes, devices or ``rowptr`` do not fit together, the reduction is unknown, or
            ``return_arg`` is True for another reduction than ``"max"`` and ``"min"``.

    Example:
        >>> import torch
        >>> from fastsparse_core import segment_reduce
        >>> segment_reduce(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]), "mean")
        tensor([1.5000, 4.0000])
    """
    _check_reduce(reduce, return_arg)
    _check_rows("src", src)
    _check_index("rowptr", rowptr, src)
    if rowptr.numel() == 0:
        raise ValueError("rowptr: expected num_segments + 1 entries, got none")
    if src.dtype in _INTEGERS:
        index = gather_csr(torch.arange(rowptr.numel() - 1, device=rowptr.device), rowptr, src.size(0))
        return _of_integers(src, index, rowptr.numel() - 1, reduce, return_arg)
    return _reduce(src, None, rowptr, rowptr.numel() - 1, reduce, return_arg)


@overload
def scatter(
    src: Tensor,
    index: Tensor,
    dim_size: int | None = ...,
    reduce: Reduce = ...,
    *,
    return_arg: Literal[False] = ...,
) -> Tensor: ...
@overload
def scatter(
    src: Tensor,
    index: Tensor,
    dim_size: int | None = ...,
    reduce: Reduce = ...,
    *,
    return_arg: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def scatter(
    src: Tensor,
    index: Tensor,
    dim_size: int | None = None,
    reduce: Reduce = "sum",
    *,
    return_arg: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Reduces the rows that have the same index.

    .. math::
        out_s = \bigoplus_{e : index_e = s} src_e

    For floating-point numbers, the index is sorted once, and the order is cached until the index tensor is
    changed or freed. Rows are read in this order, without a sorted copy of ``src``. An ascending index needs
    no sort. For integers, PyTorch's ``scatter_reduce`` runs.

    Args:
        src: (E, ...), float64, float32, float16, bfloat16 or integer.
        index: int32 or int64 (E,), in any order.
        dim_size: number of results S; None: the largest index + 1, for which the host waits for the device.
        reduce: as in :func:`segment_reduce`.
        return_arg: as in :func:`segment_reduce`.

    Returns:
        The same as :func:`segment_reduce`; an index without rows is an empty segment.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes or devices do not fit, an index is negative or not below ``dim_size``, the
            reduction is unknown, or ``return_arg`` is True for another reduction than ``"max"`` and
            ``"min"``.

    Example:
        >>> import torch
        >>> from fastsparse_core import scatter
        >>> scatter(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), dim_size=3)
        tensor([2., 5., 0.])
    """
    _check_reduce(reduce, return_arg)
    _check_rows("src", src)
    size = _check_scatter(src, index, dim_size)
    if src.dtype in _INTEGERS:
        return _of_integers(src, index.long(), size, reduce, return_arg)
    return _reduce(src, index, None, size, reduce, return_arg)


def segment_softmax(src: Tensor, rowptr: Tensor) -> Tensor:
    r"""Softmax over consecutive rows, for each feature separately.

    .. math::
        out_e = \frac{\exp(src_e)}{\sum_{k \in s(e)} \exp(src_k)}

    Args:
        src: (E, ...), float64, float32, float16 or bfloat16.
        rowptr: as in :func:`segment_reduce`.

    Returns:
        A tensor in the shape and dtype of ``src``, computed in float32 or float64; 0 in segments whose values
        are all :math:`-\infty`. Differentiable any number of times.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, devices or ``rowptr`` do not fit, or there are more than 65535 features on CUDA.

    Example:
        >>> import torch
        >>> from fastsparse_core import segment_softmax
        >>> segment_softmax(torch.tensor([1.0, 1.0, 4.0]), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 1.0000])
    """
    _check_floating(src)
    _check_index("rowptr", rowptr, src)
    return _softmax(src, None, rowptr, rowptr.numel() - 1)


def scatter_softmax(src: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
    r"""Softmax over the rows that have the same index, for each feature separately.

    .. math::
        out_e = \frac{\exp(src_e)}{\sum_{k : index_k = index_e} \exp(src_k)}

    Args:
        src: (E, ...), float64, float32, float16 or bfloat16.
        index: as in :func:`scatter`.
        dim_size: as in :func:`scatter`.

    Returns:
        The same as :func:`segment_softmax`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: shapes, devices or indices do not fit, or there are more than 65535 features on CUDA.

    Example:
        >>> import torch
        >>> from fastsparse_core import scatter_softmax
        >>> scatter_softmax(torch.tensor([1.0, 5.0, 1.0]), torch.tensor([1, 0, 1]))
        tensor([0.5000, 1.0000, 0.5000])
    """
    _check_floating(src)
    return _softmax(src, index, None, _check_scatter(src, index, dim_size))


def gather_csr(src: Tensor, rowptr: Tensor, num_rows: int | None = None) -> Tensor:
    r"""Repeats row s of ``src`` for every row of segment s: the reverse of :func:`segment_reduce`.

    Args:
        src: (S, ...), any dtype.
        rowptr: int32 or int64 (S + 1,), as in :func:`segment_reduce`.
        num_rows: E, the last entry of ``rowptr``; None: the host reads it from the device.

    Returns:
        (E, ...) with :math:`out_e = src_s` for :math:`rowptr_s \le e < rowptr_{s + 1}`. The gradient of
        ``src`` is a sum over each segment.

    Raises:
        TypeError: ``rowptr`` is not an int32 or int64 tensor.
        ValueError: shapes, devices, ``rowptr`` or ``num_rows`` do not fit.

    Example:
        >>> import torch
        >>> from fastsparse_core import gather_csr
        >>> gather_csr(torch.tensor([1.5, 4.0]), torch.tensor([0, 2, 3]))
        tensor([1.5000, 1.5000, 4.0000])
    """
    _check_rows("src", src)
    _check_index("rowptr", rowptr, src, length=src.size(0) + 1)
    rows = int(rowptr[-1]) if num_rows is None else num_rows
    out = gather_op(_as_matrix(src), None, rowptr, rows)
    return cast("Tensor", out.reshape(rows, *src.shape[1:]))


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """Computes ``x.index_select(0, index)`` with a gradient without atomics; does not check the indices."""
    num_rows = index.numel()
    if x.dim() == 2:
        return cast("Tensor", gather_op(x, index, None, num_rows))
    rows = gather_op(x.reshape(x.size(0), x.shape[1:].numel()), index, None, num_rows)
    return cast("Tensor", rows.reshape(num_rows, *x.shape[1:]))


def _reduce(
    src: Tensor, index: Tensor | None, rowptr: Tensor | None, size: int, reduce: str, return_arg: bool
) -> Tensor | tuple[Tensor, Tensor]:
    _check_floating(src)
    out, arg = reduce_op(_as_matrix(src), index, rowptr, size, reduce)
    shape = (size, *src.shape[1:])
    return (out.reshape(shape), arg.reshape(shape)) if return_arg else out.reshape(shape)


def _softmax(src: Tensor, index: Tensor | None, rowptr: Tensor | None, size: int) -> Tensor:
    matrix = _as_matrix(src)
    check_heads(matrix.size(1), src.device)
    return cast("Tensor", softmax_op(matrix, index, rowptr, size).reshape(src.shape))


def _as_matrix(src: Tensor) -> Tensor:
    src = written_out(src)
    if src.dim() == 2:
        return src
    width = src.shape[1:].numel()  # not -1, which fails for tensors without elements
    return src.reshape(src.size(0), width)


def _of_integers(
    src: Tensor, index: Tensor, size: int, reduce: str, return_arg: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Reduces integers with PyTorch's operators; their results are exact in any order."""
    if reduce not in _OF_INTEGERS:
        raise TypeError(f"src: expected a floating tensor for reduce={reduce!r}, got {src.dtype}")
    shape = (size, *src.shape[1:])
    wide = index.view(-1, *[1] * (src.dim() - 1)).expand(src.shape)
    out = src.new_ones(shape) if reduce == "mul" else src.new_zeros(shape)
    out = out.scatter_reduce(0, wide, src, _OF_INTEGERS[reduce], include_self=reduce == "mul")
    if reduce == "mean":
        count = torch.bincount(index, minlength=size).clamp_(min=1).view(-1, *[1] * (src.dim() - 1))
        out = out.div(count, rounding_mode="floor").to(src.dtype)
    if not return_arg:
        return out
    row = torch.arange(src.size(0), device=src.device).view(-1, *[1] * (src.dim() - 1))
    chosen = torch.where(src == out.gather(0, wide), row, src.size(0))
    arg = torch.full(shape, src.size(0), dtype=torch.int64, device=src.device)
    return out, arg.scatter_reduce(0, wide, chosen, "amin")


def _check_reduce(reduce: str, return_arg: bool) -> None:
    if reduce not in REDUCTION_CODE:
        raise ValueError(f"reduce: expected one of {', '.join(map(repr, REDUCTION_CODE))}, got {reduce!r}")
    if return_arg and reduce not in ("max", "min"):
        raise ValueError(
            f"return_arg: expected False for reduce={reduce!r}; only 'max' and 'min' choose rows"
        )


def _check_rows(name: str, src: Tensor) -> None:
    if not isinstance(src, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(src).__name__}")
    if src.dim() < 1:
        raise ValueError(f"{name}: expected at least one dimension, (E, ...), got a scalar")


def _check_floating(src: Tensor) -> None:
    _check_rows("src", src)
    if src.dtype not in DTYPE_CODE:
        raise TypeError(f"src: expected float64, float32, float16 or bfloat16, got {src.dtype}")


def _check_index(name: str, index: Tensor, src: Tensor, length: int | None = None) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {index.dtype}; convert it with .long()")
    if index.dim() != 1 or (length is not None and index.numel() != length):
        expected = "one dimension" if length is None else f"shape ({length},)"
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(index.shape)}")
    if index.device != src.device:
        raise ValueError(f"{name}: expected device {src.device} like src, got {index.device}")


def _check_scatter(src: Tensor, index: Tensor, dim_size: int | None) -> int:
    _check_index("index", index, src, length=src.size(0))
    if dim_size is None:
        return int(index.max()) + 1 if index.numel() else 0
    if dim_size < 0:
        raise ValueError(f"dim_size: expected 0 or more, got {dim_size}")
    return dim_size
