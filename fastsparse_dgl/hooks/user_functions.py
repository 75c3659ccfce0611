"""Plans of ``update_all`` and ``apply_edges`` with message and reduce functions that the user wrote.

Such functions are traced once and planned together (`fastsparse_core.message_plans`): linear maps run once
per node, attention and gates use the core's kernels, and nodes are not grouped by degree. DGL's own code runs
for functions that cannot be traced, and for few edges.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.weak import WeakIdKeyDictionary

from fastsparse_core import Adjacency
from fastsparse_core.message_plans.ends import EdgeEnd, gather, reduce
from fastsparse_core.message_plans.mailbox import MailboxPlanner, edge_batch, node_batch, results_of
from fastsparse_core.message_plans.plan import NoPlan, Plan, by_plan
from fastsparse_core.message_plans.trace import Function, Untraceable, holds, trace_function
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_dgl.caching import adjacency_of_index
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.device_graph import DeviceIndex
from fastsparse_dgl.hooks import messages

#: Largest number of traces kept per function.
_MOST_TRACES = 8
#: DGL's binary message functions that are planned if the user's own reduce function follows.
_OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_PLACES = {"u": "src", "v": "dst", "e": "edge"}


# ---------------------------------------------------------------- traces


@dataclass(eq=False)
class _Trace:
    """The result of tracing a function.

    Attributes:
        guards: attributes of its module that it reads, with their values.
        graph: the trace.
        written: edge features that it sets, with their nodes in the trace.
        reason: why the function cannot be traced; "" if it was traced.
        plans: plans, by reduction and kind of features.
    """

    guards: dict[str, Any] = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)
    written: dict[str, Node] = field(default_factory=dict)
    reason: str = ""
    plans: dict[Any, list[Plan | str]] = field(default_factory=dict)


#: Code of a function -> kind of its module and captured values -> its traces.
_traces: Any = WeakIdKeyDictionary()
#: DGL's message functions, by name and features.
_built_in: dict[tuple[str, ...], _Trace] = {}


def _trace_of(function: Function, argument: Callable[[Any], Any], place: str) -> _Trace:
    captured = tuple(
        (name, Tensor, None) if isinstance(value, Tensor) else (name, type(value), value)
        for name, value in function.captured.items()
    )
    body = function.body
    kind = place, id(body.__globals__), type(function.layer), captured
    known = _traces.setdefault(body.__code__, {}).setdefault(kind, [])
    for each in known:
        if holds(each.guards, function.layer):
            return each
    if len(known) == _MOST_TRACES or len(_traces[body.__code__]) > _MOST_TRACES:
        return _Trace(reason="reads values that change")
    found = _Trace()
    known.append(found)
    try:
        found.graph, batch = trace_function(function, found.guards, argument, place)
        results_of(found.graph)
        found.written = {name: each.node for name, each in batch.data.written.items()}
    except Untraceable as reason:
        found.reason = str(reason)
    except Exception as error:  # symbolic tracing does not support all operations, and may raise any error
        found.reason = f"cannot be traced ({(str(error).splitlines() or [type(error).__name__])[0][:60]})"
    return found


def _trace_of_built_in(function: Any) -> _Trace:
    """Makes the trace of one of DGL's own message functions."""
    name, is_copy = function.name, function.name.startswith("copy_")
    fields = (function.in_field,) if is_copy else (function.lhs_field, function.rhs_field)
    key = (name, function.out_field, *fields)
    if key in _built_in:
        return _built_in[key]
    found = _built_in[key] = _Trace()
    targets = [name[-1]] if is_copy else [name[0], name[-1]]
    operands = [
        found.graph.placeholder(f"{_PLACES[target]}.{each}")
        for target, each in zip(targets, fields, strict=True)
    ]
    if is_copy:
        found.graph.output({function.out_field: operands[0]})
    elif name[2:-2] in _OPERATORS:
        message = found.graph.call_function(_OPERATORS[name[2:-2]], tuple(operands))
        found.graph.output({function.out_field: message})
    else:
        found.reason = f"FastSparse has no kernels for {name}"
    return found


# ---------------------------------------------------------------- calls


class _End(EdgeEnd):
    """One end of a DGL graph's edges."""

    __slots__ = ("_target",)

    def __init__(self, adj: Adjacency, target: str) -> None:
        self._adj, self._target, self._is_dst, self._version = adj, target, target == "v", None
        self.num_nodes = adj.num_dst if self._is_dst else adj.num_src
        self.num_edges = adj.num_values

    @property
    def index(self) -> Tensor:
        return messages.ends(self._adj, self._target)


class _Edges:
    """The edges of a call, and the features that functions read."""

    def __init__(self, g: Any, adj: Adjacency, captured: dict[str, dict[str, Any]]) -> None:
        source, destination = g._graph.metagraph.find_edge(0)
        self.dst: EdgeEnd = _End(adj, "v")
        self.src: EdgeEnd = _End(adj, "u")
        self.special: dict[str, Any] = {"adj": adj}
        self._of_nodes = {"src": (g._node_frames[source], self.src)}
        self._of_nodes |= dict.fromkeys(("dst", "node"), (g._node_frames[destination], self.dst))
        self._of_edges, self._captured = g._edge_frames[0], captured
        self._placed: dict[str, tuple[Any, str]] = {}

    def __getitem__(self, name: str) -> Any:
        return self.special[name]

    def placed(self, name: str) -> tuple[Any, str]:
        """Returns a feature and the kind of its rows: "dst", "src", "edge" or "".

        Raises:
            KeyError: there is no feature of that name.
        """
        if name not in self._placed:
            self._placed[name] = self._place(*name.split(".", 1))
        return self._placed[name]

    def _place(self, place: str, name: str) -> tuple[Any, str]:
        if place in self._captured:
            return self._captured[place][name], ""
        if place == "edge":
            return self._of_edges[name], "edge"
        frame, end = self._of_nodes[place]
        value = frame[name]
        if place == "node" or (value.dim() > 1 and value.is_floating_point()):
            return value, place
        return gather(value, end), "edge"  # plans do not support node features of integers or without a width


def results_by_plan(
    g: Any, mfunc: Any, rfunc: Any, is_passing: bool
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Computes the results of ``update_all`` or ``apply_edges`` by a plan; also returns the plan's gains.

    Args:
        g: graph with one edge type.
        mfunc: message function.
        rfunc: reduce function; None for ``apply_edges``.
        is_passing: whether the call is one of ``update_all``.

    Raises:
        Untraceable: DGL's code has to run; the message tells why.
    """
    core = dgl.core
    has_own_reduction = is_passing and not core.is_builtin(rfunc)
    device = g.device
    if has_own_reduction:
        _, destination = g._graph.metagraph.find_edge(0)
        frame = g._node_frames[destination]
        if frame._initializers or frame._default_initializer not in (None, dgl.init.zero_initializer):
            raise Untraceable("an initializer is set for nodes without messages")
    mixed = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    if mixed is not None and device.type == "cuda" and core.is_builtin(mfunc):
        raise Untraceable("autocast is on")  # DGL casts the operands of its own message functions
    layer, captured = None, dict[str, dict[str, Any]]()
    if core.is_builtin(mfunc):
        trace = _trace_of_built_in(mfunc)
    else:
        function = Function.of(mfunc)
        layer, captured["message"] = function.layer, function.captured
        trace = _trace_of(function, edge_batch, "message")
    traces = [trace]
    if has_own_reduction:
        function = Function.of(rfunc)
        if None not in (layer, function.layer) and layer is not function.layer:
            raise Untraceable("the functions belong to two modules")
        layer, captured["reduce"] = layer or function.layer, function.captured
        traces.append(_trace_of(function, node_batch, "reduce"))
    for each in traces:
        if each.reason:
            raise Untraceable(each.reason)
    found = _Edges(g, _adjacency(g._graph, device), captured)
    kind = _kind_of(found, traces)
    num_operands = len(trace.graph.find_nodes(op="placeholder"))
    if core.is_builtin(mfunc) and len({len(shape) for _, _, shape in kind[:num_operands]}) > 1:
        raise Untraceable("features differ in their number of dimensions")
    key: tuple[Any, ...] = (kind, device.type, mixed)
    if has_own_reduction:
        key += (traces[1],)
    elif is_passing:
        key += (rfunc.name, rfunc.msg_field)
    make = lambda: _find_plan(layer, found, traces, rfunc if is_passing else None, mixed)  # noqa: E731
    result, plan = by_plan(trace.plans, key, layer, found, make)
    if isinstance(plan, str):
        raise Untraceable(f"FastSparse has no kernels for {plan or 'its operations'}")
    results, written = result
    for name, value in written.items():
        g._edge_frames[0][name] = value
    if is_passing and not has_own_reduction:
        results = {rfunc.out_field: messages.with_initial_values(found["adj"], results, rfunc.name)}
    return results, plan.gains


class _Planner(MailboxPlanner):
    @staticmethod
    def reduce(layer: Any, found: Any, x: Tensor, how: Any) -> Tensor:
        """Reduces messages; of equal maxima or minima, the one with the lowest edge id gets the gradient."""
        if how in ("max", "min"):
            return messages.extremum_edges(found.special["adj"], x, how)
        return reduce(x, found.dst, how)


def _find_plan(
    layer: nn.Module | None,
    found: _Edges,
    traces: list[_Trace],
    rfunc: Any,
    mixed: torch.dtype | None,
) -> Plan | str:
    planner, trace = _Planner(layer, found, mixed), traces[0]
    try:
        if len(traces) == 2:
            return planner.plan_mailbox(trace.graph, trace.written, traces[1].graph)
        if rfunc is None:
            return planner.plan_edges(trace.graph, trace.written)
        return planner.plan_reduction(trace.graph, trace.written, rfunc.msg_field, rfunc.name)
    except NoPlan as reason:
        return str(reason)
    except Exception:  # operators may raise any error on meta tensors
        return ""


def _adjacency(index: Any, device: torch.device) -> Adjacency:
    return adjacency_of_index(index.host if type(index) is DeviceIndex else index, device)


def _kind_of(found: _Edges, traces: list[_Trace]) -> tuple[Any, ...]:
    """Returns a key of the features' properties on which a plan depends.

    Raises:
        Untraceable: no plan supports the features.
    """
    kind: list[Any] = []
    device = found.special["adj"].device
    for trace in traces:
        for node in trace.graph.nodes:
            if node.op != "placeholder" or str(node.target).startswith("mail."):
                continue
            try:
                value, place = found.placed(str(node.target))
            except KeyError:
                raise Untraceable(f"there is no feature {node.target}") from None
            if type(value) is nn.Parameter:
                value = value.detach()
            if type(value) is not Tensor or not is_plain_eager(value) or value.device != device:
                raise Untraceable(f"{node.target} is not a plain tensor on the graph's device")
            if value.is_floating_point() and value.dtype not in DTYPE_CODE:
                raise Untraceable(f"{node.target} has dtype {value.dtype}")
            kind.append((value.dtype, place, value.shape[1:] if place else value.shape))
    return tuple(kind)
