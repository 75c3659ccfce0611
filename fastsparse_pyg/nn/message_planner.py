"""Finds message plans for PyG's layers, and runs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch_geometric.nn.dense import Linear as PygLinear

from fastsparse_core.message_plans.plan import INDICES, OWN, PER_EDGE, NoPlan, Plan, Planner, by_plan
from fastsparse_core.ops._autocast import autocast_dtype, is_any_autocast_enabled
from fastsparse_core.ops._eager import PLAIN, is_plain_eager
from fastsparse_pyg.caching import lookup
from fastsparse_pyg.graph import edges_made_anew
from fastsparse_pyg.nn.base import is_plain_call, known
from fastsparse_pyg.nn.layer_arguments import Arguments, KnownCall, Signature
from fastsparse_pyg.nn.message_pattern import SCATTER, SOFTMAX, Pattern
from fastsparse_pyg.nn.segments import is_softmax_of_messages, reduction_of


class _Planned:
    """Layer -> the plan that computed its messages in the last call, or the reason why there is none.

    PyTorch's `WeakIdKeyDictionary` would take six Python calls to set an item.
    """

    def __init__(self) -> None:
        # By id of the layer. Python reuses ids of freed objects; the weak reference detects this.
        self._plans: dict[int, tuple[weakref.ref[nn.Module], Plan | str]] = {}

    def get(self, layer: nn.Module, default: Plan | str = "") -> Plan | str:
        """Returns the plan of a layer, or ``default``."""
        entry = self._plans.get(id(layer))
        return entry[1] if entry is not None and entry[0]() is layer else default

    def set(self, layer: nn.Module, plan: Plan | str) -> None:
        """Stores the plan of a layer until the layer is freed."""
        entry = self._plans.get(id(layer))
        if entry is None or entry[0]() is not layer or entry[1] is not plan:
            number = id(layer)

            def forget(dead: weakref.ref[nn.Module]) -> None:
                kept = self._plans.get(number)
                if kept is not None and kept[0] is dead:
                    self._plans.pop(number, None)

            self._plans[number] = weakref.ref(layer, forget), plan


planned = _Planned()


#: Returned in place of a plan if, for few edges, the plan takes more time on the host than PyG's code.
FEW = "few edges"
#: Reasons in `planned` why messages that look like weighted copies of features are computed per edge.
PER_FEATURE = "weights per feature"
OTHER_FORM = "the dtype or shape of the features"


def reduce_by_plan(
    layer: Any, pattern: Pattern, found: Arguments, how: str, are_few: bool = False
) -> tuple[Any, Plan | None]:
    """Reduces the messages of a pattern by its plan.

    Args:
        layer: the layer.
        pattern: pattern of its `message` or `edge_update`.
        found: arguments of its methods.
        how: the reduction; "" if the layer's own code reduces; `PER_EDGE` to return the messages unreduced;
            `OWN` if the pattern contains the reduction.
        are_few: whether there are so few edges that launch overhead decides the time.

    Returns:
        The result and its plan. Without a plan, the result is None or `FEW`, and the plan is None.
    """
    is_copy = pattern.kind == "product" and pattern.compute is None
    is_left = bool(pattern.assigned) and pattern.kind != "any"
    if pattern.graph is None or not how or is_copy or is_left:
        return None, None
    if how == "softmax" and not is_softmax_of_messages(layer._modules["aggr_module"]):
        return None, None
    kind = _kind_of(found, pattern)
    if kind is None:
        return None, None
    mixed = autocast_dtype(found.dst.index) if is_any_autocast_enabled() else None

    def make() -> Plan | str:
        plan = _find_plan(layer, pattern, found, how, mixed, are_few)
        is_same = pattern.kind == "product" and isinstance(plan, Plan) and plan.gains == ("spmm",)
        if are_few and isinstance(plan, Plan) and not is_same and not plan.is_short:
            return FEW
        return "" if is_same else plan

    out, plan = by_plan(pattern.plans, (how, kind, mixed, are_few), layer, found, make)
    if plan is FEW:
        return FEW, None
    if how != PER_EDGE:
        planned.set(layer, plan)
    return out, plan if isinstance(plan, Plan) and out is not None else None


class PlannedCall(NamedTuple):
    """Fast path for calls whose plan is known: checks what the plan depends on, and then runs it.

    A repeated call skips the search for arguments, pattern and plan, because the host's time decides the time
    of a small model.

    Attributes:
        pattern: pattern of `message`.
        message: the `message` method of the layer's class.
        plan: the plan.
        how: the reduction.
        node_dim: dimension of the nodes along the features.
        mixed: autocast dtype; None if autocast is off.
        are_few: whether there are so few edges that launch overhead decides the time.
        tensors: the caller's tensors that `message` reads: (name, kind of rows, dtype, shape without the
            dimension of the rows). The kinds are "node", "edge" and "" (none).
        others: the caller's other arguments that `message` reads, with their values.
        names: for every argument of the plan, the name of the caller's argument.
    """

    pattern: Pattern
    message: Callable[..., Any]
    plan: Plan
    how: str
    node_dim: int
    mixed: torch.dtype | None
    are_few: bool
    tensors: tuple[tuple[str, str, torch.dtype, torch.Size], ...]
    others: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        layer: Any,
        pattern: Pattern,
        plan: Plan,
        how: str,
        names: Signature,
        found: Arguments,
        are_few: bool,
    ) -> PlannedCall | None:
        """Returns the fast path for calls like the one that a plan has just computed; None if there is none.

        Args:
            layer: the layer.
            pattern: pattern of its `message`.
            plan: the plan.
            how: the reduction; "" if the layer's own code reduces.
            names: names of the methods' arguments.
            found: arguments of the call.
            are_few: whether there are so few edges that launch overhead decides the time.
        """
        graph = pattern.graph
        if not how or graph is None or not is_plain_call(layer):
            return None
        read = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        if any(name not in read for name, _, _ in names.lifted) or found.dst.num_nodes != found.src.num_nodes:
            return None
        base = {name: base for name, base, _ in names.lifted}
        tensors: dict[str, tuple[str, torch.dtype, torch.Size]] = {}
        others: dict[str, Any] = {}
        for name in read:
            if name in found.special or name in INDICES:
                continue
            value, place = found.placed(name)
            given = base.get(name, name)
            if not found.is_given(given):
                return None
            if isinstance(value, Tensor):
                kind = "node" if name in base else place
                of_tensor = (kind, value.dtype, value.shape[1:] if kind else value.shape)
                if tensors.setdefault(given, of_tensor) != of_tensor:
                    return None  # gathered for one argument, and passed on unchanged as another
            else:
                others[given] = value
        if not any(kind == "node" for kind, _, _ in tensors.values()):
            return None
        mixed = autocast_dtype(found.dst.index) if is_any_autocast_enabled() else None
        return cls(
            pattern,
            type(layer).message,
            plan,
            how,
            found.node_dim,
            mixed,
            are_few,
            tuple((name, *each) for name, each in tensors.items()),
            tuple(others.items()),
            tuple(base.get(name, name) for name in plan.names),
        )

    def reduce(self, layer: Any, edge_index: Tensor, given: dict[str, Any], are_few: bool) -> Any:
        """Computes `propagate`; None if the usual path has to run.

        Args:
            layer: the layer.
            edge_index: argument of `propagate`.
            given: other arguments of `propagate`.
            are_few: whether there are so few edges that launch overhead decides the time.
        """
        state = layer.__dict__
        if (
            type(edge_index) is not Tensor
            or edge_index.layout is not torch.strided
            or edge_index.dtype not in (torch.int64, torch.int32)
            or edge_index.dim() != 2
            or edge_index.shape[0] != 2
            or are_few is not self.are_few
            or state["node_dim"] != self.node_dim
        ):
            return None
        num_nodes, num_edges, values = -1, edge_index.shape[1], dict[str, Any]()
        for name, kind, dtype, row in self.tensors:
            x = given[name]
            if type(x) is tuple and len(x) == 2 and x[0] is x[1]:
                x = x[0]
            if type(x) not in PLAIN or x.dtype is not dtype:
                return None
            shape = x.shape
            if kind:
                if not shape or shape[1:] != row:
                    return None
                if kind == "edge":
                    if shape[0] != num_edges:
                        return None
                elif num_nodes < 0:
                    num_nodes = shape[0]
                elif num_nodes != shape[0]:
                    return None
            elif shape != row or shape[:1] == (num_edges,):
                return None
            values[name] = x
        for name, expected in self.others:
            value = given[name]
            if value is not expected and (type(value) is not type(expected) or value != expected):
                return None
            values[name] = value
        mixed = autocast_dtype(edge_index) if is_any_autocast_enabled() else None
        aggregation = state["_modules"]["aggr_module"]
        if (
            mixed is not self.mixed
            or num_nodes > num_edges
            or not is_plain_call(layer)
            or type(layer).message is not self.message
            or reduction_of(aggregation) != self.how
            or (self.how == "softmax" and not is_softmax_of_messages(aggregation))
            or not self.pattern.holds_for(layer)
            or not is_plain_eager(edge_index)
        ):
            return None
        options = (num_nodes, num_nodes, state["flow"], False)
        adj = known(edge_index, options)
        if adj is None:
            try:
                adj = lookup(edge_index, (edge_index,), options, lambda: edges_made_anew(edge_index, options))
            except IndexError:  # the usual path decides whether PyG's code can handle such edges
                return None
        lifted = layer._names().lifted
        found: Any = KnownCall(adj, lambda: layer._collect_lazily(edge_index, None, given, lifted, False))
        out = self.plan.reduce(layer, found, [values[name] for name in self.names])
        if out is not None:
            planned.set(layer, self.plan)
        return out


def _kind_of(found: Arguments, pattern: Pattern) -> tuple[Any, ...] | None:
    """Returns a key of the arguments' properties on which a plan depends; None if no plan supports them."""
    dst, src = found.dst, found.src
    if not dst.is_current() or dst.num_edges < max(dst.num_nodes, src.num_nodes):
        return None
    kind: list[Any] = []
    assert pattern.graph is not None
    for node in pattern.graph.nodes:
        name = node.target
        if node.op != "placeholder":
            break
        if name in found.special or name in INDICES:
            continue
        value, place = found.placed(name)
        if type(value) is Tensor or type(value) is nn.Parameter:
            if name in found.nodes and (
                value.dim() < 2 or found.node_dim % value.dim() or not value.is_floating_point()
            ):
                return None
            kind.append((value.dtype, place != "", value.shape[1:] if place else value.shape))
        elif value is None or isinstance(value, (bool, int, float, str)):
            kind.append(value)
        else:
            return None
    return tuple(kind)


def _find_plan(
    layer: nn.Module, pattern: Pattern, found: Arguments, how: str, mixed: torch.dtype | None, are_few: bool
) -> Plan | str:
    """Returns the plan of a traced message; or the reason why no plan is faster than the message itself."""
    graph, assigned = pattern.graph, pattern.assigned
    assert graph is not None
    try:
        planner = _Planner(layer, found, mixed)
        if are_few:  # generated kernels compile for a second, and launch more slowly than PyG's operators
            planner.generates = False
        plan = planner.plan(graph, how, assigned)
        if mixed is None:
            return plan
        if how == OWN:
            raise NoPlan
        values = planner.without_edges(graph)
        own = {name: values[node].dtype for name, node in (assigned or {}).items()}
        return plan._replace(dtypes=(values[list(graph.nodes)[-1].args[0]].dtype, own))
    except NoPlan as reason:
        return str(reason)
    except Exception:  # the operators run on tensors without content, and may raise any error
        return ""


class _Planner(Planner):
    linears: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, PygLinear)

    @staticmethod
    def reduce(layer: Any, found: Any, messages: Tensor, how: str) -> Any:
        """Lets the layer reduce the messages, because it may have its own aggregation."""
        return layer._reduced(messages, found, how)

    def _value(self, node: Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if node.target is SOFTMAX:
            return self._softmax(*args, **kwargs)
        if node.target is SCATTER:
            return self.scattered(*args, **kwargs)
        return super()._value(node, args, kwargs)

    def _softmax(
        self, src: Any, index: Any = None, ptr: Any = None, num_nodes: Any = None, dim: Any = 0
    ) -> Any:
        index, ptr, num_nodes = (getattr(item, "special", "") or item for item in (index, ptr, num_nodes))
        fits = index == "index" and ptr in (None, "ptr") and num_nodes in (None, "size_i", "dim_size")
        if not fits or dim != 0:
            raise NoPlan
        return self.softmax(src)
