"""Converts torch_scatter's arguments (any dimension, broadcast indices) to rows with one index per row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A source tensor with the reduced dimension first, and the segment of every row.

    Attributes:
        src: the rows, (E, ...).
        segment: segment of every row, int64 (E,).
        factor: number of segments per value of the caller's index. It is 1 if all elements of a row have the
            same index. Otherwise every element becomes a row of its own, and ``factor`` is the number of
            elements that a row had before.
        inner: shape of the source without the reduced dimension.
        dim: the reduced dimension.
    """

    src: Tensor
    segment: Tensor
    factor: int
    inner: torch.Size
    dim: int

    def restore(self, out: Tensor, size: int) -> Tensor:
        """Converts the results of ``size`` segments back: the reduced dimension moves to its old position."""
        return out.reshape(size, *self.inner).movedim(0, self.dim)

    def positions(self, arg: Tensor, num: int) -> Tensor:
        """Converts numbers of rows to positions along the reduced dimension, whose size is ``num``."""
        return arg if self.factor == 1 else torch.div(arg, self.factor, rounding_mode="floor").clamp_(max=num)


def as_rows(src: Tensor, index: Tensor, dim: int) -> Rows:
    """Converts a source and its index to rows, with the reduced dimension first.

    Args:
        src: tensor of any shape.
        index: int64, of shape (src.size(dim),) or of a shape that torch_scatter broadcasts to the shape of
            ``src``.
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
    """Broadcasts an index ``src`` to the shape of ``other``; an index of one dimension belongs to ``dim``."""
    if src.dim() == 1:
        src = src.view(*[1] * (dim + other.dim() if dim < 0 else dim), -1)
    return src.reshape(*src.shape, *[1] * (other.dim() - src.dim())).expand(other.shape)


def num_segments(index: Tensor, dim_size: int | None) -> int:
    """The number of segments: ``dim_size`` if given, otherwise the largest index plus one."""
    if dim_size is not None:
        return dim_size
    return int(index.max()) + 1 if index.numel() else 0


def at_segments(values: Tensor, index: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """Gathers one value per element of a tensor of this shape: the value of its segment along ``dim``."""
    dim = dim + len(shape) if dim < 0 else dim
    if index.dim() == 1:
        return values.index_select(dim, index)
    return values.gather(dim, broadcast(index, values.new_empty(()).expand(shape), dim))
