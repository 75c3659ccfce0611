"""Gathers node features per edge and reduces edges per node, without atomics, forward and backward.

Messages are in the caller's edge order (`fastsparse_core.message_plans.ends`). With :class:`NodeIndex`, code
that calls PyTorch's gather and scatter functions uses these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.utils
from torch import Tensor
from torch_geometric.nn import aggr

from fastsparse_core.message_plans.ends import (
    EdgeEnd,
    fits_softmax,
    gather,
    reduce,
    reduce_by_softmax,
    softmax_of_edges,
)
from fastsparse_core.ops._eager import CHANGES_OF_CALL


def softmax(
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """Computes PyG's ``softmax``, with one operator if the index is a :class:`NodeIndex`."""
    if (
        isinstance(index, NodeIndex)
        and index.dim() == 1
        and num_nodes in (None, index.end.num_nodes)
        and fits_softmax(src, index.end, dim)
    ):
        return softmax_of_edges(src, index.end, dim)
    out: Tensor = torch_geometric.utils.softmax(src, index, ptr, num_nodes, dim)
    return out


# ---------------------------------------------------------------- PyG's aggregations

_LEAST_VARIANCE = 1e-5  # lower limit of the variance in PyG's StdAggregation

#: PyG's aggregation -> name of the reduction. "softmax" and "std" are computed from other reductions.
_AGGREGATIONS = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
    aggr.MulAggregation: "mul",
    aggr.VarAggregation: "var",
    aggr.StdAggregation: "std",
    aggr.SoftmaxAggregation: "softmax",
}


def reduction_of(module: Any) -> str:
    """Returns the name of a PyG aggregation's reduction; "" if :func:`aggregate` does not support it."""
    how = _AGGREGATIONS.get(type(module), "")
    if not how or any(map(module.__dict__.get, CHANGES_OF_CALL)):
        return ""
    # With `semi_grad`, PyG computes the gradient of only one term of the variance.
    if (how == "var" and module.semi_grad) or (how == "std" and module.var_aggr.semi_grad):
        return ""
    return how


def is_softmax_of_messages(module: Any) -> bool:
    """True if a softmax aggregation uses the unscaled messages as scores, with their full gradient."""
    is_unscaled = isinstance(module.t, (int, float)) and module.t == 1
    return is_unscaled and not module.semi_grad and module.channels == 1


def aggregate(messages: Tensor, end: EdgeEnd, how: str, module: Any, dim: int) -> Tensor | None:
    """Computes a PyG aggregation; returns None if PyG's own code has to run.

    Args:
        messages: floating, with the edges along ``dim``.
        end: the end of the edges at which the messages are reduced.
        how: result of :func:`reduction_of` for the aggregation.
        module: the aggregation.
        dim: dimension of the edges.
    """
    if how == "std":
        variance = reduce(messages, end, "var", dim)
        deviation = variance.clamp(min=_LEAST_VARIANCE).sqrt()
        return deviation.masked_fill(deviation <= math.sqrt(_LEAST_VARIANCE), 0.0)
    if how != "softmax":
        return reduce(messages, end, how, dim)
    if module.channels != 1 or not fits_softmax(messages, end, dim):
        return None
    if is_softmax_of_messages(module) and messages.dim() == 2 and dim in (0, -2):
        return reduce_by_softmax(messages, end)
    scores = messages if isinstance(module.t, (int, float)) and module.t == 1 else messages * module.t
    if not module.learn and module.semi_grad:
        scores = scores.detach()
    return reduce(messages * softmax_of_edges(scores, end, dim), end, "sum", dim)


# ---------------------------------------------------------------- PyTorch's functions


class NodeIndex(Tensor):
    """The node ids of one end of the edges, (E,), for code that uses them in PyTorch's scatter and gather.

    Such calls are replaced by :func:`gather` and :func:`reduce`. In all other calls, this object acts as a
    plain tensor.
    """

    end: EdgeEnd
    #: Dimension of the edges, if this is a broadcast view of the index; 0 for the index itself.
    along: int

    @classmethod
    def of(cls, end: EdgeEnd) -> NodeIndex:
        """Returns the index of an end as int64, like the indices that PyG passes to messages (`for_pyg`)."""
        index = end.index.long().as_subclass(cls)
        index.end, index.along = end, 0
        return index

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces calls of the functions in :data:`_TAKEN_OVER`."""
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
        """Returns a plain tensor, because a copy has no `EdgeEnd`."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone()


def _marked(index: Tensor, end: EdgeEnd, along: int) -> NodeIndex:
    marked = index.as_subclass(NodeIndex)
    marked.end, marked.along = end, along
    return marked


def _viewed(func: Any, index: Any, *size: Any) -> Any:
    out = func(index, *size)
    if not isinstance(index, NodeIndex) or not out.dim() or out.numel() != index.end.num_edges:
        return out
    along = max(range(out.dim()), key=out.size)
    return _marked(out, index.end, along) if out.size(along) == out.numel() else out


def _expanded(func: Any, index: Any, *size: Any) -> Any:
    out = func(index, *size)
    if not isinstance(index, NodeIndex) or out.size(index.along - index.dim()) != index.end.num_edges:
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
        result = out.clone() * _reduce(src, index.end, "mul", index.along)
    elif reduce in ("amax", "amin") and not include_self:
        result = _reduce(src, index.end, reduce[1:], index.along)
        rows = index.end.rows
        if rows.has_empty_rows():
            empty = rows.in_degree() == 0
            result = torch.where(empty.view(-1, *[1] * (out.dim() - index.along - 1)), out, result)
    else:
        return NotImplemented
    return out.copy_(result) if func is Tensor.scatter_reduce_ else result


_reduce = reduce


def _index_add(func: Any, out: Tensor, dim: int, index: Any, src: Any, *, alpha: Any = 1) -> Any:
    fits = isinstance(index, NodeIndex) and isinstance(src, Tensor) and index.dim() == 1
    if not fits or not src.is_floating_point() or out.dtype != src.dtype or out.dim() != src.dim():
        return NotImplemented
    end = index.end
    if out.size(dim) != end.num_nodes or src.size(dim) != end.num_edges or not end.is_current():
        return NotImplemented
    return (out.add_ if func is Tensor.index_add_ else out.add)(_reduce(src, end, "sum", dim), alpha=alpha)


def _index_select(func: Any, x: Any, dim: int, index: Any) -> Any:
    if not isinstance(index, NodeIndex) or index.dim() != 1 or x.size(dim) != index.end.num_nodes:
        return NotImplemented
    return gather(x, index.end, dim) if index.end.is_current() else NotImplemented


def _getitem(func: Any, x: Any, index: Any) -> Any:
    return _index_select(func, x, 0, index) if isinstance(x, Tensor) else NotImplemented


#: PyTorch function -> its replacement, which returns NotImplemented if PyTorch's function has to run.
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
    Tensor.index_add_: _index_add,
    Tensor.index_add: _index_add,
    torch.index_add: _index_add,
    Tensor.index_select: _index_select,
    torch.index_select: _index_select,
    Tensor.__getitem__: _getitem,
}
