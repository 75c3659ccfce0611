"""Gathers node features per edge and reduces edges per node, at both ends of the edges, without atomics.

Rows of edges stay in the caller's order, because a layer may store them, mask them, or use their positions.
The segment operators read them in the order of the cached structure.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._edge_rows import lift, softmax_sum, sum_edges
from fastsparse_core.ops._operands import written_out
from fastsparse_core.ops._segment import reduce_op, softmax_op
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.segment import scatter
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.incidence import edge_segments
from fastsparse_core.structure.segments import Segments


class EdgeEnd:
    """One end of all edges.

    Args:
        adj: the edges' structure.
        edges: nodes at both ends, (2, num_edges).
        row: the row of ``edges`` that has the nodes of this end, 0 or 1.
        is_dst: whether the nodes of this end are the destinations.

    Attributes:
        num_nodes: number of nodes at this end.
        num_edges: number of edges.
    """

    __slots__ = (
        "_adj",
        "_edges",
        "_index",
        "_is_dst",
        "_row",
        "_version",
        "num_edges",
        "num_nodes",
    )

    def __init__(self, adj: Adjacency, edges: Tensor, row: int, is_dst: bool) -> None:
        self._adj, self._edges, self._row, self._is_dst = adj, edges, row, is_dst
        # Traced code cannot read whether a tensor counts its versions.
        is_counted = not (torch.compiler.is_compiling() or edges.is_inference())
        self._version = edges._version if is_counted else None
        self._index: Tensor | None = None
        self.num_nodes = adj.num_dst if is_dst else adj.num_src
        self.num_edges = edges.size(1)

    def is_current(self) -> bool:
        """True if the edges have not been written to since this object was made."""
        return self._version is None or self._edges._version == self._version

    @property
    def rows(self) -> Adjacency:
        """The structure whose rows are the nodes of this end."""
        return self._adj if self._is_dst else self._adj.t()

    @property
    def index(self) -> Tensor:
        """Node of every edge, (num_edges,) in the caller's order."""
        if self._index is None:
            self._index = self._edges[self._row]
        return self._index

    def find(self, *_: Any) -> Segments:
        """The segments of the index, for the segment operators."""
        return edge_segments(self.rows)


def gather(x: Tensor, end: EdgeEnd, dim: int = 0) -> Tensor:
    """Gathers each edge's row of ``x``. The gradient is a sum without atomics, so it is deterministic."""
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    if not x.is_floating_point() or (dim % x.dim() and not needs_grad):
        return x.index_select(dim, end.index)
    if dim % x.dim():
        return gather(x.movedim(dim, 0), end).movedim(0, dim).contiguous()  # so that .view() works
    return lift((x,), (end,))[0]


def reduce(messages: Tensor, end: EdgeEnd, how: str, dim: int = 0) -> Tensor:
    """Reduces every node's edges like :func:`fastsparse_core.scatter`."""
    if messages.dim() > 1 and dim % messages.dim():
        return reduce(messages.movedim(dim, 0), end, how).movedim(0, dim).contiguous()
    if not end.is_current():
        return scatter(messages, end.index, end.num_nodes, how)  # type: ignore[call-overload]
    rows = written_out(messages)
    if how in ("sum", "mean"):
        return sum_edges(rows, end, end.num_nodes, mean=how == "mean")
    if messages.dim() != 2:
        rows = rows.reshape(rows.size(0), rows.shape[1:].numel())
    out: Tensor = reduce_op(rows, end.index, None, end.num_nodes, how, find=end.find)[0]
    return out if messages.dim() == 2 else out.reshape(end.num_nodes, *messages.shape[1:])


def fits_softmax(src: Any, end: EdgeEnd, dim: int = 0) -> bool:
    """Returns whether :func:`softmax_of_edges` supports a tensor."""
    return (
        type(src) is Tensor
        and src.is_floating_point()
        and -src.dim() <= dim < src.dim()
        and src.size(dim) == end.num_edges
        and src.numel() <= src.size(dim) * MOST_HEADS
        and end.is_current()
    )


def softmax_of_edges(src: Tensor, end: EdgeEnd, dim: int = 0) -> Tensor:
    """Softmax over the edges of every node, along ``dim``."""
    if dim % src.dim():
        return softmax_of_edges(src.movedim(dim, 0), end, 0).movedim(0, dim)
    rows = written_out(src)
    rows = rows if rows.dim() == 2 else rows.reshape(rows.size(0), rows.shape[1:].numel())
    return softmax_op(rows, end.index, None, end.num_nodes, find=end.find).reshape(src.shape)


def reduce_by_softmax(messages: Tensor, end: EdgeEnd) -> Tensor:
    """Sum of every node's messages (num_edges, F), weighted by the softmax of the same messages."""
    return softmax_sum(written_out(messages), end, end.num_nodes)
