"""Computes reduced messages with one kernel, if `message()` is a weighted copy of the source's features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core import policy, spmm
from fastsparse_core.message_plans.ends import EdgeEnd
from fastsparse_core.message_plans.plan import PRODUCTS
from fastsparse_core.message_plans.terms import without_autocast
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops.spmm import plain_spmm
from fastsparse_pyg.caching import lookup
from fastsparse_pyg.graph import edges_made_anew
from fastsparse_pyg.nn.base import is_plain_call, known
from fastsparse_pyg.nn.layer_arguments import Arguments, Signature
from fastsparse_pyg.nn.message_pattern import Pattern
from fastsparse_pyg.nn.message_planner import PER_FEATURE, planned
from fastsparse_pyg.nn.segments import aggregate, reduction_of

#: Largest number of elements for which one gather reads the features of both ends. In the backward pass, the
#: gradients of both halves are copied into one tensor. At 3 TB/s, copying 32 MB takes about 20 us, as long as
#: the three launches that a single gather saves.
_MOST_JOINED = 1 << 23
#: Returned in place of a result if the messages have weights of another shape than one per edge or head.
NO_COPIES = "no copies"


def kernel_of(pattern: Pattern, how: str) -> str:
    """Returns the name of the kernel that reduces the messages of a pattern; "" if they have to be stored."""
    return "spmm" if pattern.kind == "product" and how in PRODUCTS else ""


class Copies(NamedTuple):
    """Fast path for messages that copy the sources' features, with or without weights from the caller.

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
        """Returns the fast path for calls of this form; None if one sparse product is not enough."""
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
            The result; None if the usual path has to run; `NO_COPIES` if the weights have another shape than
            one per edge.
        """
        x, state = given[self.feature], layer.__dict__
        if type(x) is tuple and len(x) == 2 and x[0] is x[1]:
            x = x[0]
        if (
            not (type(x) is type(edge_index) is Tensor)
            or x.dim() != 2
            or not (x.layout is edge_index.layout is torch.strided)
            or not x.is_floating_point()
            or state["node_dim"] not in (-2, 0)
            or not is_plain_call(layer)
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


class GatheredMessages(NamedTuple):
    """For few edges, runs the layer's own `message` with less host time around it than PyG's `propagate`.

    Features that are read at both ends are gathered by one operator, so their gradient is a single sum. Sums
    use PyTorch's scatter, as in PyG. Other reductions on a GPU use FastSparse's segments, because PyTorch
    needs up to 15 operators for a reduction and its gradient.

    Attributes:
        message: the `message` method of the layer's class.
        pattern: pattern of `message`.
        ends: arguments of the caller that are gathered: (name, name of the rows of the sources, name of the
            rows of the destinations). A name is "" if nothing is gathered at that end.
        given: names of the caller's arguments that `message` gets unchanged.
        special: names of `message`'s arguments that `MessagePassing` itself provides, such as ``index``.
        how: the reduction; "" if PyG's aggregation has to run.
    """

    message: Callable[..., Any]
    pattern: Pattern
    ends: tuple[tuple[str, str, str], ...]
    given: tuple[str, ...]
    special: tuple[str, ...]
    how: str

    @classmethod
    def of(
        cls, layer: Any, pattern: Pattern, how: str, names: Signature, given: Any
    ) -> GatheredMessages | None:
        """Returns the steps for calls with these arguments; None if PyG's code has to run."""
        at = {(base, at_dst): name for name, base, at_dst in names.lifted if name in names.message}
        special = tuple(name for name in names.message if name in layer.special_args)
        passed = tuple(name for name in names.message if name not in (*at.values(), *special))
        bases = dict.fromkeys(base for base, _ in at)
        if (
            len(at) < len(names.lifted)
            or not bases
            or layer._modules.get("aggr_module") is None
            or not {*bases, *passed} <= set(given)
            or not set(special) <= {"index", "ptr", "size_i", "size_j", "dim_size"}
            or type(layer).update is not MessagePassing.update
            or type(layer).aggregate is not MessagePassing.aggregate
        ):
            return None
        ends = tuple((base, at.get((base, False), ""), at.get((base, True), "")) for base in bases)
        return cls(type(layer).message, pattern, ends, passed, special, how)

    def reduce(self, layer: Any, edge_index: Tensor, given: dict[str, Any], has_structure: bool) -> Any:
        """The result of `propagate`; None if PyG's code has to run.

        Args:
            layer: the layer.
            edge_index: edges, int64 (2, E).
            given: other arguments of `propagate`.
            has_structure: whether the structure of the edges may be used, and built.
        """
        state = layer.__dict__
        dim, i = state["node_dim"], 1 if state["flow"] == "source_to_target" else 0
        if (
            edge_index.dtype is not torch.int64
            or edge_index.dim() != 2
            or edge_index.shape[0] != 2
            or not is_plain_call(layer)
            or type(layer).message is not self.message
        ):
            return None
        num_nodes, ends, arguments = -1, edge_index.unbind(0), dict[str, Any]()
        try:
            for name, at_src, at_dst in self.ends:
                x = given[name]
                if type(x) is tuple and len(x) == 2 and x[0] is x[1]:
                    x = x[0]
                if not isinstance(x, Tensor) or x.dim() < 2 or (dim and (dim != -2 or x.dim() != 2)):
                    return None
                if num_nodes not in (-1, x.shape[0]):
                    return None
                num_nodes = x.shape[0]
                if (
                    (at_src and at_dst)
                    and edge_index.is_contiguous()
                    and edge_index.numel() * x.shape[1:].numel() <= _MOST_JOINED
                    # An untraced `message` may write into its arguments, which must then not share memory.
                    and self.pattern.graph is not None
                    and self.pattern.holds_for(layer)
                ):
                    rows = x.index_select(0, edge_index.view(-1)).chunk(2)
                    arguments[at_src], arguments[at_dst] = rows[1 - i], rows[i]
                    continue
                if at_src:
                    arguments[at_src] = x.index_select(0, ends[1 - i])
                if at_dst:
                    arguments[at_dst] = x.index_select(0, ends[i])
        except (IndexError, RuntimeError):  # PyG's code raises its own error
            return None
        for name in self.given:
            arguments[name] = given[name]
        index = ends[i]
        for name in self.special:
            arguments[name] = index if name == "index" else None if name == "ptr" else num_nodes
        messages, how = layer.message(**arguments), self.how
        if (
            how
            and isinstance(messages, Tensor)
            and messages.is_floating_point()
            and messages.dim() > 1
            and (dim == 0 or messages.dim() == 2)
            and messages.shape[0] == index.shape[0]
        ):
            if how == "sum":
                shape = (num_nodes, *messages.shape[1:])
                places = index.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
                try:
                    return messages.new_zeros(shape).scatter_add_(0, places, messages)
                except RuntimeError:  # PyG's code raises its own error
                    return layer.aggregate(messages, index, None, num_nodes)
            options = (num_nodes, num_nodes, state["flow"], False)
            adj = known(edge_index, options)
            if adj is None and has_structure:
                adj = lookup(edge_index, (edge_index,), options, lambda: edges_made_anew(edge_index, options))
            aggregation = state["_modules"]["aggr_module"]
            if adj is not None and is_plain_eager(messages) and reduction_of(aggregation) == how:
                out = aggregate(messages, EdgeEnd(adj, edge_index, i, True), how, aggregation, 0)
                if out is not None:
                    return out
        return layer.aggregate(messages, index, None, num_nodes)


_is_tracing = torch._C._is_tracing


def reduce_by_kernel(layer: Any, pattern: Pattern, found: Arguments, how: str) -> Tensor | None:
    """Returns the reduced messages of a pattern that has a kernel; None if the layer has to compute them.

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
    if isinstance(weight, (int, float)):  # all edges have the same weight, so multiply once per node
        x = x * weight
    elif weight is not None:
        value = _as_value(weight, rest, dim, num_dims, found.dst.num_edges)
        if value is None:  # not one per edge or head
            type(layer)._left[type(layer._modules.get("aggr_module"))] = True
            planned.set(layer, PER_FEATURE)
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
    """Runs the traced computation of a method, and sets the same attributes of the layer as the method."""
    if pattern.compute is None:
        return None
    found.lift(pattern.names)
    result, assigned = pattern.compute(layer, *[found[name] for name in pattern.names])
    for name, item in assigned.items():
        setattr(layer, name, item)
    return result


def _fit(shape: tuple[int, ...], x: Tensor) -> torch.Size | None:
    """Returns the trailing shape of ``x.view(-1, *shape)``; None if the number of rows would change."""
    size = torch.Size(shape)
    return size if x.shape[1:].numel() == size.numel() else None


def _as_value(weight: Any, rest: Any, dim: int, num_dims: int, num_edges: int) -> Tensor | None:
    """Returns weights in the shape (num_edges, heads); None if their shape does not allow this.

    Args:
        weight: weights that broadcast against messages of ``num_dims`` dimensions, with the edges along
            dimension ``dim``.
        rest: sizes of the messages after dimension ``dim``.
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
