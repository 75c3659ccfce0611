"""How torch_scatter's dimensions and broadcast indices become rows and one index of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A source as rows along the dimension that is reduced, each with a segment.

    Attributes:
        src: (E, ...).
        segment: (E,), that of every row.
        factor: segments for each value of the caller's index: the elements next to it, where the index
            differs among them and every element is a row of its own.
        inner: shape of the elements without the dimension.
        dim: the dimension.
    """

    src: Tensor
    segment: Tensor
    factor: int
    inner: torch.Size
    dim: int

    def restore(self, out: Tensor, size: int) -> Tensor:
        """What came of ``size`` segments, with the dimension back in its place."""
        return out.reshape(size, *self.inner).movedim(0, self.dim)

    def positions(self, arg: Tensor, num: int) -> Tensor:
        """Chosen rows as positions along the dimension, whose size is ``num``."""
        return arg if self.factor == 1 else torch.div(arg, self.factor, rounding_mode="floor").clamp_(max=num)


def as_rows(src: Tensor, index: Tensor, dim: int) -> Rows:
    """Brings the dimension to the front.

    Args:
        src: any shape.
        index: (src.size(dim),), or a shape that broadcasts to that of ``src`` as torch_scatter has it.
        dim: which dimension is reduced.
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
    """The segment of every row; a single one is that of all rows."""
    return index.expand(rows.size(0)) if index.numel() == 1 else index


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """An index as torch_scatter broadcasts it to another tensor's shape; one dimension is that of ``dim``."""
    if src.dim() == 1:
        src = src.view(*[1] * (dim + other.dim() if dim < 0 else dim), -1)
    return src.reshape(*src.shape, *[1] * (other.dim() - src.dim())).expand(other.shape)


def num_segments(index: Tensor, dim_size: int | None) -> int:
    """As many as asked for, or as the index needs."""
    if dim_size is not None:
        return dim_size
    return int(index.max()) + 1 if index.numel() else 0


def at_segments(values: Tensor, index: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """For every element of ``shape`` what ``values`` has for its segment along ``dim``."""
    dim = dim + len(shape) if dim < 0 else dim
    if index.dim() == 1:
        return values.index_select(dim, index)
    return values.gather(dim, broadcast(index, values.new_empty(()).expand(shape), dim))
