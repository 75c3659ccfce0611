"""Converts torch_scatter's dimensions and broadcast indices to rows with one index each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A source tensor as rows along the reduced dimension, and the segment of every row.

    Attributes:
        src: (E, ...).
        segment: segment of every row, (E,).
        factor: number of segments per value of the caller's index. It is 1 if all elements of a row have the
            same index. Otherwise every element becomes a row, and it is the number of elements per row.
        inner: shape of the source without the reduced dimension.
        dim: the reduced dimension.
    """

    src: Tensor
    segment: Tensor
    factor: int
    inner: torch.Size
    dim: int

    def restore(self, out: Tensor, size: int) -> Tensor:
        """Results of ``size`` segments in the caller's layout: the reduced dimension at its old position."""
        return out.reshape(size, *self.inner).movedim(0, self.dim)

    def positions(self, arg: Tensor, num: int) -> Tensor:
        """Converts chosen rows to positions along the reduced dimension, whose size is ``num``."""
        return arg if self.factor == 1 else torch.div(arg, self.factor, rounding_mode="floor").clamp_(max=num)


def as_rows(src: Tensor, index: Tensor, dim: int) -> Rows:
    """Converts a source and its index to rows, with the reduced dimension first.

    Args:
        src: any shape.
        index: (src.size(dim),), or a shape that torch_scatter broadcasts to that of ``src``.
        dim: the dimension to reduce.
    """
    dim = dim + src.dim() if dim < 0 else dim
    rows = src.movedim(dim, 0)
    if index.dim() == 1:
        return Rows(rows, _for_all(index, rows), 1, rows.shape[1:], dim)
    index = index.reshape(*index.shape, *[1] * (src.dim() - index.dim()))
    beside = [at for at in range(src.dim()) if at != dim]
    if index.numel() and all(index.size(at) == 1 or index.stride(at) == 0 for at in beside):
        shared = index[tuple(slice(None) if at == dim else 0 for at in range(src.dim()))]
        return Rows(rows, _for_all(shared, rows), 1, rows.shape[1:], dim)
    index = broadcast(index, src, dim).movedim(dim, 0)
    inner = rows.shape[1:]
    element = torch.arange(inner.numel(), device=index.device)
    flat = (index.reshape(index.size(0), inner.numel()) * inner.numel() + element).reshape(-1)
    return Rows(rows.reshape(-1), flat, inner.numel(), inner, dim)


def _for_all(index: Tensor, rows: Tensor) -> Tensor:
    """The segment of every row; an index with one element applies to all rows."""
    return index.expand(rows.size(0)) if index.numel() == 1 else index


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """Broadcasts an index as torch_scatter does; a one-dimensional index belongs to dimension ``dim``."""
    if src.dim() == 1:
        src = src.view(*[1] * (dim + other.dim() if dim < 0 else dim), -1)
    return src.reshape(*src.shape, *[1] * (other.dim() - src.dim())).expand(other.shape)


def num_segments(index: Tensor, dim_size: int | None) -> int:
    """The number of segments: ``dim_size`` if given, otherwise the largest index plus one."""
    if dim_size is not None:
        return dim_size
    return int(index.max()) + 1 if index.numel() else 0


def at_segments(values: Tensor, index: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Gathers, for every element of ``shape``, the value of its segment along ``dim``."""
    dim = dim + len(shape) if dim < 0 else dim
    if index.dim() == 1:
        return values.index_select(dim, index)
    return values.gather(dim, broadcast(index, values.new_empty(()).expand(shape), dim))
