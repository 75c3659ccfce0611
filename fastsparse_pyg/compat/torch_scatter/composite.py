"""torch_scatter.composite: softmax, log-softmax, log-sum-exp and standard deviation by index."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import scatter_softmax as softmax_rows
from fastsparse_pyg.compat.torch_scatter.layout import as_rows, at_segments, num_segments
from fastsparse_pyg.compat.torch_scatter.reductions import _scatter, scatter_max, scatter_sum

__all__ = ["scatter_log_softmax", "scatter_logsumexp", "scatter_softmax", "scatter_std"]


def scatter_std(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    unbiased: bool = True,
) -> Tensor:
    """Standard deviations of the elements that have the same index along a dimension.

    As in torch_scatter, 1e-6 is added to the divisor, which is the number of elements n, or n - 1 if
    ``unbiased``, but at least 1. If ``out`` is given, the sums of squared differences are added to it in
    place before the division, and the result is a new tensor.
    """
    size = out.size(dim) if out is not None else num_segments(index, dim_size)
    ones = torch.ones_like(src)
    count = scatter_sum(ones, index, dim, None, size)
    squares = _scatter(src, index, dim, None, size, "var")[0] * count
    if out is not None:
        squares = out.add_(squares)
    if unbiased:
        count = count - 1
    return (squares / (count.clamp(min=1) + 1e-6)).sqrt()


def scatter_logsumexp(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    eps: float = 1e-12,
) -> Tensor:
    """Logarithms of the sums of exponentials (plus ``eps``); 0 for empty segments.

    If ``out`` is given, the exponentials of its elements are added to the sums, and the result is written to
    it. Elements of ``out`` at empty segments do not change.
    """
    _check_floating(src)
    size = out.size(dim) if out is not None else num_segments(index, dim_size)
    greatest = scatter_max(src.detach(), index, dim, None, size)[0]
    shifted = src - at_segments(greatest, index, dim, src.shape)
    shifted = shifted.masked_fill(shifted.isnan(), float("-inf"))
    result = (scatter_sum(shifted.exp(), index, dim, None, size) + eps).log() + greatest
    has_elements = scatter_sum(torch.ones_like(src), index, dim, None, size) > 0
    if out is not None:
        return out.copy_(torch.where(has_elements, torch.logaddexp(out, result), out))
    return torch.where(has_elements, result, 0).nan_to_num(neginf=0.0)


def scatter_softmax(src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None) -> Tensor:
    """Softmax over the elements that have the same index along a dimension."""
    _check_floating(src)
    rows = as_rows(src, index, dim)
    size = num_segments(index, dim_size) * rows.factor
    return rows.restore(softmax_rows(rows.src, rows.segment, size), src.size(dim))


def scatter_log_softmax(
    src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12, dim_size: int | None = None
) -> Tensor:
    """Logarithm of the softmax over the elements that have the same index along a dimension."""
    _check_floating(src)
    size = num_segments(index, dim_size)
    greatest = scatter_max(src.detach(), index, dim, None, size)[0]
    shifted = src - at_segments(greatest, index, dim, src.shape)
    sums = scatter_sum(shifted.exp(), index, dim, None, size)
    return shifted - at_segments((sums + eps).log(), index, dim, src.shape)


def _check_floating(src: Tensor) -> None:
    if not src.is_floating_point():
        raise ValueError(f"src: expected a floating tensor, got {src.dtype}; convert it with .float()")
