"""Computes reduced messages with one kernel, if `message()` is a weighted copy of the source's features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core import policy, spmm
from fastsparse_core.message_plans.plan import PRODUCTS
from fastsparse_core.message_plans.terms import without_autocast
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops.spmm import plain_spmm
from fastsparse_pyg.nn.base import has_message_hook, known
from fastsparse_pyg.nn.layer_arguments import Arguments, Signature
from fastsparse_pyg.nn.message_pattern import Pattern

#: Returned in place of a result if the messages' weights are not one per edge or head.
NO_COPIES = "no copies"


def kernel_of(pattern: Pattern, how: str) -> str:
    """The kernel that reduces such messages; "" if the messages have to be stored."""
    return "spmm" if pattern.kind == "product" and how in PRODUCTS else ""


class Copies(NamedTuple):
    """Fast path for messages that copy the sources' features, with or without weights of the caller.

    A repeated call skips the search for arguments, because the host's time decides the time of a small model.

    Attributes:
        pattern: pattern of `message`.
        message: the `message` method of the layer's class.
        how: the reduction.
        feature: name of the caller's argument with the features.
    """

    pattern: Pattern
    message: Callable[..., Any]
    how: str
    feature: str

    @classmethod
    def of(
        cls, layer: Any, pattern: Pattern, how: str, names: Signature, given: dict[str, Any]
    ) -> Copies | None:
        """The fast path for calls of this form; None if one sparse product is not enough."""
        feature = pattern.feature[:-2]
        if (
            kernel_of(pattern, how) != "spmm"
            or pattern.shape is not None
            or pattern.out_shape is not None
            or names.lifted != ((pattern.feature, feature, False),)
            or any(name not in given or name not in names.traced["message"] for name in pattern.names)
            or type(layer).update is not MessagePassing.update
        ):
            return None
        return cls(pattern, type(layer).message, how, feature)

    def reduce(self, layer: Any, edge_index: Any, given: dict[str, Any]) -> Any:
        """Computes `propagate` for edges that are in the cache.

        Args:
            layer: the layer.
            edge_index: argument of `propagate`.
            given: other arguments of `propagate`.

        Returns:
            The result; None if the usual path has to run; `NO_COPIES` if there is not one weight per edge.
        """
        x, state = given[self.feature], layer.__dict__
        if type(x) is tuple and len(x) == 2 and x[0] is x[1]:
            x = x[0]
        aggregation = state["_modules"]["aggr_module"]
        if (
            not (type(x) is type(edge_index) is Tensor)
            or x.dim() != 2
            or not (x.layout is edge_index.layout is torch.strided)
            or not x.is_floating_point()
            or state["node_dim"] not in (-2, 0)
            or state["_explain"]
            or state["_decomposed_layers"] > 1
            or "message" in state
            or "aggregate" in state
            or "update" in state
            or aggregation._forward_hooks
            or aggregation._forward_pre_hooks
            or has_message_hook(state)
            or type(layer).message is not self.message
            or not self.pattern.holds_for(layer)
            or is_any_autocast_enabled()
            or _is_tracing()
            or not is_plain_eager(x)
        ):
            return None
        num_nodes = x.shape[0]
        adj = known(edge_index, (num_nodes, num_nodes, state["flow"], False))
        if adj is None:
            return None
        value: Tensor | None = None
        compute = self.pattern.compute
        if compute is not None:
            weight, assigned = compute(layer, *[given[name] for name in self.pattern.names])
            for name, item in assigned.items():
                setattr(layer, name, item)
            if isinstance(weight, (int, float)):
                x = x * weight
            elif weight is not None:
                value = _as_value(weight, x.shape[1:], 0, 2, edge_index.shape[1])
                if value is None:
                    return NO_COPIES
                if value.dtype is not x.dtype:
                    return None
        algorithm = policy.requested("spmm", "auto")
        out = plain_spmm(adj, x, value, self.how, None, None, algorithm)
        return spmm(adj, x, value, self.how) if out is None else out  # type: ignore[arg-type]  # one of PRODUCTS


_is_tracing = torch._C._is_tracing


def reduce_by_kernel(layer: Any, pattern: Pattern, found: Arguments, how: str) -> Tensor | None:
    """The reduced messages of a pattern that has a kernel; None if the layer has to compute them.

    Args:
        layer: the layer.
        pattern: pattern of its `message`.
        found: arguments of its methods.
        how: the reduction.
    """
    x, at_dst = found.nodes[pattern.feature]
    dim = layer.node_dim
    if at_dst or type(x) is not Tensor or not x.is_floating_point() or not -x.dim() <= dim < x.dim():
        return None
    dim = layer.node_dim % x.dim()
    rest = x.shape[dim + 1 :] if pattern.shape is None else _fit(pattern.shape, x)
    num_dims = dim + 1 + len(rest or ())
    out_rest = rest if pattern.out_shape is None else pattern.out_shape
    if (
        rest is None
        or out_rest is None
        or (dim and (pattern.shape or pattern.out_shape))
        or layer.node_dim % (dim + 1 + len(out_rest)) != dim
        or (pattern.out_shape is not None and rest.numel() != torch.Size(out_rest).numel())
    ):
        return None
    value: Tensor | None = None
    weight = evaluate(layer, pattern, found)
    if isinstance(weight, (int, float)):  # the same for all edges, so multiply once per node
        x = x * weight
    elif weight is not None:
        value = _as_value(weight, rest, dim, num_dims, found.dst.num_edges)
        if value is None:  # not one per edge or head
            type(layer)._left[type(layer._modules.get("aggr_module"))] = True
            x_j = found[pattern.feature]
            x_j = x_j if pattern.shape is None else x_j.view(-1, *pattern.shape)
            messages = weight * x_j
            if pattern.out_shape is not None:
                messages = messages.view(-1, *pattern.out_shape)
            return layer._reduced(messages, found, how)
        if x.dtype != value.dtype:
            dtype = torch.promote_types(x.dtype, value.dtype)
            x, value = x.to(dtype), value.to(dtype)
    rows = x.movedim(dim, 0) if dim else x
    flat = rows if rows.dim() == 2 else rows.reshape(rows.size(0), rows.shape[1:].numel())
    with without_autocast(x):
        out = spmm(found.special["adj"], flat, value, how)  # type: ignore[arg-type]  # one of PRODUCTS
    if dim:
        return out.reshape(out.size(0), *rows.shape[1:]).movedim(0, dim).contiguous()
    return out if len(out_rest) == 1 else out.reshape(out.size(0), *out_rest)


def evaluate(layer: Any, pattern: Pattern, found: Arguments) -> Any:
    """Runs the traced computation of a method, and sets the attributes that the method sets."""
    if pattern.compute is None:
        return None
    found.lift(pattern.names)
    result, assigned = pattern.compute(layer, *[found[name] for name in pattern.names])
    for name, item in assigned.items():
        setattr(layer, name, item)
    return result


def _fit(shape: tuple[int, ...], x: Tensor) -> torch.Size | None:
    """The trailing shape of ``x.view(-1, *shape)``; None if the view would change the number of rows."""
    size = torch.Size(shape)
    return size if x.shape[1:].numel() == size.numel() else None


def _as_value(weight: Any, rest: Any, dim: int, num_dims: int, num_edges: int) -> Tensor | None:
    """Weights as (num_edges, heads); None if they have another form.

    Args:
        weight: broadcast against messages of ``num_dims`` dimensions, the edges along ``dim``.
        rest: sizes of the messages after that dimension.
        dim: dimension of the edges.
        num_dims: number of dimensions of the messages.
        num_edges: number of edges.
    """
    if type(weight) is not Tensor or not weight.is_floating_point() or weight.dim() > num_dims:
        return None
    if num_dims == 2 and weight.shape == (num_edges, 1):  # the most frequent case
        return None if dim else weight
    shape = (1,) * (num_dims - weight.dim()) + tuple(weight.shape)
    if shape[dim] != num_edges or any(size != 1 for size in shape[:dim]):
        return None
    sizes = shape[dim + 1 :]
    heads = 0
    while heads < len(sizes) and sizes[heads] == rest[heads] and not all(size == 1 for size in sizes[heads:]):
        heads += 1
    if any(size != 1 for size in sizes[heads:]):
        return None
    if heads == 0:
        return weight if weight.dim() == 2 and dim == 0 else weight.reshape(num_edges, 1)
    if dim or heads == len(rest):
        return None
    return weight.reshape(num_edges, torch.Size(sizes[:heads]).numel())
