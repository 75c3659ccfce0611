"""Reading a node's features per edge, and reducing edges per node: without atomics, forward and backward.

The messages stay in the caller's order, whatever the graph is sorted by: a layer may keep them, mask them, or
know what its n-th edge is. A reduction reads them through a structure nodes x edges whose columns are the
positions of a node's edges. :class:`NodeIndex` brings the reductions into code that calls PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency, spmm


class EdgeEnd:
    """One end of all edges.

    Attributes:
        index: node of every edge, (num_edges,) in the caller's order.
        num_nodes: how many nodes there are.
    """

    __slots__ = ("_adj", "_is_dst", "_version", "index", "num_nodes")

    def __init__(self, adj: Adjacency, index: Tensor, is_dst: bool) -> None:
        self.index = index
        self.num_nodes: int = adj.shape[0 if is_dst else 1]
        self._adj, self._is_dst = adj, is_dst
        self._version = None if index.is_inference() else index._version

    def is_current(self) -> bool:
        """Whether nobody has written into the index since."""
        return self._version is None or self.index._version == self._version

    @property
    def edges(self) -> Adjacency:
        """The structure (num_nodes, num_edges): the positions of every node's edges."""
        adj = self._adj if self._is_dst else self._adj.t()
        return adj.derived("fastsparse_pyg.edges", lambda: _edges_of(adj))


def _edges_of(adj: Adjacency) -> Adjacency:
    position = adj.edge_id
    if position is None:
        position = torch.arange(adj.num_edges, dtype=torch.int32, device=adj.device)
    edges = Adjacency(adj.rowptr, position, (adj.num_dst, adj.num_edges), group_rows="none")
    edges._of_rows = adj._of_rows
    return edges


def gather(x: Tensor, end: EdgeEnd, dim: int = 0) -> Tensor:
    """Each edge's row of ``x``; its gradient is :func:`reduce`, so the same bits every time."""
    if not (x.requires_grad and torch.is_grad_enabled() and x.is_floating_point()):
        return x.index_select(dim, end.index)
    if dim % x.dim():
        return gather(x.movedim(dim, 0), end).movedim(0, dim)
    out: Tensor = _Gather.apply(x, end)
    return out


def reduce(messages: Tensor, end: EdgeEnd, how: str, dim: int = 0) -> Tensor:
    """Sum, mean, max or min of every node's edges, 0 without any; 16-bit sums are kept in float32.

    The gradient of a maximum goes to the first of several equal ones, as in :func:`fastsparse_core.spmm`.
    """
    if messages.dim() > 1 and dim % messages.dim():
        return reduce(messages.movedim(dim, 0), end, how).movedim(0, dim)
    if how in ("max", "min"):
        return _spmm(messages, end, how)
    if not (messages.requires_grad and torch.is_grad_enabled()):
        return _spmm(messages, end, how)
    out: Tensor = _Reduce.apply(messages, end, how)
    return out


def product(messages: Tensor, end: EdgeEnd) -> Tensor:
    """Product of every node's edges, 1 without any, along dimension 0."""
    edges = end.edges
    in_order = messages.index_select(0, edges.col.long())
    return torch.segment_reduce(in_order, "prod", offsets=edges.rowptr, axis=0, initial=1.0, unsafe=True)


def _spmm(messages: Tensor, end: EdgeEnd, how: str) -> Tensor:
    flat = messages if messages.dim() == 2 else messages.reshape(messages.size(0), messages.shape[1:].numel())
    if torch.is_autocast_enabled(flat.device.type):
        with torch.autocast(flat.device.type, enabled=False):  # sums have the dtype of their terms
            out = spmm(end.edges, flat, None, how, algorithm="csr")
    else:
        out = spmm(end.edges, flat, None, how, algorithm="csr")
    return out if messages.dim() == 2 else out.reshape(end.num_nodes, *messages.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: EdgeEnd) -> Tensor:
        ctx.end = end
        return x.index_select(0, end.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce(grad, ctx.end, "sum"), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Tensor, end: EdgeEnd, how: str) -> Tensor:
        ctx.end, ctx.how = end, how
        return _spmm(messages, end, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.how == "mean":
            dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
            inverse = ctx.end.edges.inv_degree(dtype)
            grad = (grad * inverse.view(-1, *[1] * (grad.dim() - 1))).to(grad.dtype)
        return gather(grad, ctx.end), None, None


class NodeIndex(Tensor):
    """The index of one end of the edges, for code that scatters or gathers by it with PyTorch's functions.

    Those calls become :func:`gather` and :func:`reduce`; everything else sees a plain tensor.
    """

    end: EdgeEnd
    #: Dimension along which a broadcast copy holds the index; the index itself: 0.
    along: int

    @classmethod
    def of(cls, end: EdgeEnd) -> NodeIndex:
        """The index of that end."""
        return _marked(end.index, end, 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes over the calls that :data:`_TAKEN_OVER` names."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            handler = _TAKEN_OVER.get(func)
            if handler is not None:
                out = handler(func, *args, **kwargs)
                if out is not NotImplemented:
                    return out
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone()


def _marked(index: Tensor, end: EdgeEnd, along: int) -> NodeIndex:
    marked = index.as_subclass(NodeIndex)
    marked.end, marked.along = end, along
    return marked


def _viewed(func: Any, index: Any, *size: Any) -> Any:
    out = func(index, *size)
    if not isinstance(index, NodeIndex) or not out.dim() or out.numel() != index.end.index.numel():
        return out
    along = max(range(out.dim()), key=out.size)
    return _marked(out, index.end, along) if out.size(along) == out.numel() else out


def _expanded(func: Any, index: Any, *size: Any) -> Any:
    out = func(index, *size)
    if not isinstance(index, NodeIndex) or out.size(index.along - index.dim()) != index.end.index.numel():
        return out
    return _marked(out, index.end, out.dim() + index.along - index.dim())


def _usable(index: Any, dim: Any, src: Any) -> bool:
    return (
        isinstance(index, NodeIndex)
        and isinstance(src, Tensor)
        and src.is_floating_point()
        and index.shape == src.shape
        and dim % src.dim() == index.along
        and index.end.is_current()
    )


def _scatter_add(func: Any, out: Tensor, dim: int, index: Any, src: Any) -> Any:
    if not _usable(index, dim, src) or out.size(dim) != index.end.num_nodes:
        return NotImplemented
    total = reduce(src, index.end, "sum", index.along)
    return out.add_(total) if func is Tensor.scatter_add_ else out + total


def _scatter_reduce(
    func: Any, out: Tensor, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    if not _usable(index, dim, src) or out.size(dim) != index.end.num_nodes:
        return NotImplemented
    if reduce == "sum" and include_self:
        result = out + _reduce(src, index.end, "sum", index.along)
    elif reduce == "prod" and include_self:
        result = out.clone() * product(src.movedim(index.along, 0), index.end).movedim(0, index.along)
    elif reduce in ("amax", "amin") and not include_self:
        result = _reduce(src, index.end, reduce[1:], index.along)
        if index.end.edges.has_empty_rows():
            empty = index.end.edges.in_degree() == 0
            result = torch.where(empty.view(-1, *[1] * (out.dim() - index.along - 1)), out, result)
    else:
        return NotImplemented
    return out.copy_(result) if func is Tensor.scatter_reduce_ else result


_reduce = reduce


def _index_select(func: Any, x: Any, dim: int, index: Any) -> Any:
    if not isinstance(index, NodeIndex) or index.dim() != 1 or x.size(dim) != index.end.num_nodes:
        return NotImplemented
    return gather(x, index.end, dim) if index.end.is_current() else NotImplemented


def _getitem(func: Any, x: Any, index: Any) -> Any:
    return _index_select(func, x, 0, index) if isinstance(x, Tensor) else NotImplemented


#: PyTorch's function -> what takes its place; NotImplemented: the function itself.
_TAKEN_OVER: dict[Any, Callable[..., Any]] = {
    Tensor.view: _viewed,
    Tensor.reshape: _viewed,
    Tensor.unsqueeze: _viewed,
    Tensor.expand: _expanded,
    Tensor.expand_as: _expanded,
    Tensor.scatter_add_: _scatter_add,
    Tensor.scatter_add: _scatter_add,
    Tensor.scatter_reduce_: _scatter_reduce,
    Tensor.scatter_reduce: _scatter_reduce,
    Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    Tensor.__getitem__: _getitem,
}
