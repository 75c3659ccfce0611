"""What `message()` computes, found by tracing it once: a copy of the source's features, weighted or not.

Tracing runs the method on symbols, so it is taken only for bodies in which nothing else can hide: the names
that a body reads are checked first, attributes of the layer that it reads become guards of the result, and
whatever a trace cannot hold (branches on data, writes in place, side effects) leaves the message as it is.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
import torch_geometric.utils
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy
from torch_geometric.nn.conv import MessagePassing

from fastsparse_pyg.nn.segments import softmax

#: What a body may name: modules whose functions a trace records, and functions that it records as one step.
_MODULES = (torch, F, math)
_FUNCTIONS = (torch_geometric.utils.softmax, torch_geometric.utils.scatter)
#: Instructions of a body that does more than compute.
_FORBIDDEN = (
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "IMPORT_NAME",
    "LOAD_DEREF",
    "LOAD_CLOSURE",
    "MAKE_FUNCTION",
    "STORE_SUBSCR",
    "YIELD_VALUE",
)
#: Beginnings of names that read a state of the process, which a trace would take for a constant.
_STATE = ("is_", "get_default", "get_device", "get_rng", "seed", "initial_seed", "manual_seed", "data")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MUL = (operator.mul, torch.mul, "mul")
_DIV = (operator.truediv, torch.div, torch.true_divide, "div")
_ABSENT = object()


class _Present:
    """Guard of an attribute that is a module or parameter: only whether it is None decides a branch."""


_PRESENT = _Present()


class Untraceable(Exception):
    """Says what of a body a trace cannot hold."""


@dataclass(frozen=True)
class Pattern:
    """What a body is found to compute.

    Attributes:
        feature: argument whose rows are copied, "x_j"; "": the message is anything.
        shape: trailing shape in which the body views it; None: as it is.
        out_shape: trailing shape in which the body views the product; None: as it is.
        weight: computes (weights per edge, attributes that the body sets), as a method of the layer; None: no
            weights and nothing set.
        names: arguments of ``weight``.
        is_weighted: whether there are weights.
        guards: attributes of the layer that the body reads, and their values.
        reason: why the message is anything.
    """

    feature: str = ""
    shape: tuple[int, ...] | None = None
    out_shape: tuple[int, ...] | None = None
    weight: Callable[..., tuple[Tensor | None, dict[str, Any]]] | None = None
    names: tuple[str, ...] = ()
    is_weighted: bool = False
    guards: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    def holds_for(self, layer: nn.Module) -> bool:
        """Whether the layer's attributes are those of the trace."""
        for name, expected in self.guards.items():
            value = getattr(layer, name, _ABSENT)
            if expected is _PRESENT:
                if value is None or value is _ABSENT:
                    return False
            elif value is not expected and (type(value) is not type(expected) or value != expected):
                return False
        return True

    def __str__(self) -> str:
        if not self.feature:
            return f"any: {self.reason}" if self.reason else "any"
        return f"w * {self.feature}" if self.is_weighted else self.feature


def find_pattern(layer: MessagePassing, original: type[MessagePassing], absent: Iterable[str]) -> Pattern:
    """Traces the body of ``original.message`` for calls in which the arguments ``absent`` are None."""
    guards: dict[str, Any] = {}
    try:
        graph, assigned = _trace(layer, original, guards, dict.fromkeys(absent))
        return _match(graph, assigned, guards)
    except Untraceable as reason:
        return Pattern(guards=guards, reason=str(reason))
    except Exception as error:  # whatever a symbol cannot do
        said = str(error).splitlines()
        return Pattern(guards=guards, reason=f"cannot be traced ({(said or [type(error).__name__])[0][:60]})")


# ---------------------------------------------------------------- tracing


class _Tracer(torch.fx.Tracer):
    traced_func_name = "message"

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(
    layer: MessagePassing,
    original: type[MessagePassing],
    guards: dict[str, Any],
    concrete: dict[str, None],
) -> tuple[Graph, dict[str, Node]]:
    """The body's graph, and the nodes of attributes that it assigns."""
    message = original.message
    _check_code(message, message.__globals__)

    def reading(probe: Any, name: str) -> Any:
        if sys._getframe(1).f_globals is not message.__globals__:  # the tracer, or nn.Module
            return object.__getattribute__(probe, name)
        if name in vars(MessagePassing):
            raise Untraceable(f"reads self.{name}")
        try:
            value = object.__getattribute__(probe, name)
        except AttributeError:  # a module or parameter, by nn.Module.__getattr__
            guards[name] = None if getattr(layer, name, _ABSENT) is None else _PRESENT
            raise
        if isinstance(value, Proxy):  # assigned by the body before
            return value
        if isinstance(value, types.MethodType):
            _check_code(value.__func__, message.__globals__)
        elif not isinstance(value, _PLAIN) and not _is_torch_function(value):
            raise Untraceable(f"reads self.{name}")
        else:
            guards[name] = value
        return value

    probe_class = type(original.__name__, (original,), {"__getattribute__": reading, "__module__": __name__})
    probe: Any = object.__new__(probe_class)
    state = {
        name: dict(value) if name in ("_parameters", "_buffers", "_modules") else value
        for name, value in vars(layer).items()
    }
    object.__getattribute__(probe, "__dict__").update(state)
    tracer = _Tracer(autowrap_functions=_FUNCTIONS)
    graph = tracer.trace(probe, concrete_args=concrete or None)
    after = object.__getattribute__(probe, "__dict__")
    assigned: dict[str, Node] = {}
    for name, value in after.items():
        before = state.get(name, _ABSENT)
        if isinstance(value, Proxy):
            assigned[name] = value.node
        elif name.startswith("_tensor_constant"):
            raise Untraceable("makes a tensor of its own")
        elif value is not before:
            raise Untraceable(f"writes self.{name}")
    return graph, assigned


def _is_torch_function(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return callable(value) and (module == "torch" or module.startswith(("torch.nn.functional", "torch._C")))


def _check_code(function: Any, its_globals: dict[str, Any]) -> None:
    """Rejects bodies that read or do what a trace would not see."""
    code = getattr(function, "__code__", None)
    if code is None or function.__globals__ is not its_globals or hasattr(function, "__wrapped__"):
        raise Untraceable("calls code of another module")
    for step in dis.get_instructions(code):
        if step.opname in _FORBIDDEN:
            raise Untraceable(f"does more than compute ({step.opname.lower()})")
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = its_globals.get(step.argval, getattr(builtins, step.argval, _ABSENT))
            is_error = isinstance(value, type) and issubclass(value, Exception)
            if not is_error and not any(value is allowed for allowed in (*_MODULES, *_FUNCTIONS)):
                raise Untraceable(f"uses {step.argval}")
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and str(step.argval).startswith(_STATE):
            raise Untraceable(f"reads .{step.argval}")


# ---------------------------------------------------------------- matching


def _match(graph: Graph, assigned: dict[str, Node], guards: dict[str, Any]) -> Pattern:
    nodes = list(graph.nodes)
    for node in nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "get_attr" and name.startswith("_tensor_constant"):
            raise Untraceable("makes a tensor of its own")
        if node.op == "call_function" and name == "_assert_is_none":
            continue
        if (
            node.op.startswith("call_")
            and node.op != "call_module"
            and name.endswith("_")
            and not name.endswith("__")
        ):
            raise Untraceable(f"writes in place ({name})")
    out = nodes[-1].args[0]
    if not isinstance(out, Node):
        raise Untraceable("gives something else than a tensor")
    viewed = _view(out)
    out, out_shape = viewed or (out, None)
    factors: list[tuple[Node, bool]] = []
    if not _factors(out, False, factors):
        raise Untraceable("is no product")
    features = [(node, found) for node, inverse in factors if not inverse and (found := _feature(node))]
    if not features:
        raise Untraceable("is no weighted copy of a source's features")
    taken, (argument, shape) = features[0]
    factors = [pair for pair in factors if pair[0] is not taken] if len(features) == 1 else []
    if len(features) > 1:
        raise Untraceable("multiplies features of sources")
    if not factors and not assigned:
        return Pattern(argument, shape, out_shape, guards=guards)
    weight, names = _compile(graph, factors, assigned)
    return Pattern(argument, shape, out_shape, weight, names, bool(factors), guards)


def _factors(node: Any, inverse: bool, found: list[tuple[Node, bool]]) -> bool:
    """The factors of a product, and whether each divides."""
    if not isinstance(node, Node):
        return False
    if len(node.args) == 2 and not node.kwargs and node.op in ("call_function", "call_method"):
        if node.target in _MUL:
            return all(_factors(each, inverse, found) for each in node.args)
        if node.target in _DIV:
            first, second = node.args
            return _factors(first, inverse, found) and _factors(second, not inverse, found)
    found.append((node, inverse))
    return True


def _feature(node: Node) -> tuple[str, tuple[int, ...] | None] | None:
    """(argument, trailing shape) where a node is an argument of the sources, or a view of one."""
    if node.op == "placeholder":
        name = str(node.target)
        return (name, None) if name.endswith("_j") and name not in ("edge_index_j", "size_j") else None
    viewed = _view(node)
    found = _feature(viewed[0]) if viewed and viewed[0].op == "placeholder" else None
    return (found[0], viewed[1]) if viewed and found else None


def _view(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """(what, trailing shape) of a view that leaves the edges first, ``view(-1, ...)``."""
    if node.op != "call_method" or node.target not in ("view", "reshape"):
        return None
    source, *sizes = node.args
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = list(sizes[0])
    if not isinstance(source, Node) or len(sizes) < 2 or sizes[0] != -1:
        return None
    if not all(isinstance(size, int) and size >= 0 for size in sizes[1:]):
        return None
    return source, tuple(sizes[1:])  # type: ignore[arg-type]


def _compile(
    graph: Graph, factors: list[tuple[Node, bool]], assigned: dict[str, Node]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The part of a graph that gives the weights and the assigned attributes, as a method of the layer."""
    needed: set[Node] = set()
    pending = [node for node, _ in factors] + list(assigned.values())
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    part, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, lambda each: copies[each])
            copies[node].type = None
            if node.target is torch_geometric.utils.softmax:
                copies[node].target = softmax
    weight: Node | None = None
    for node, inverse in factors:
        each = copies[node]
        if weight is None:
            weight = part.call_function(torch.reciprocal, (each,)) if inverse else each
        else:
            weight = part.call_function(operator.truediv if inverse else operator.mul, (weight, each))
    part.output((weight, {name: copies[node] for name, node in assigned.items()}))
    code = part.python_code("self")
    namespace = dict(code.globals)
    exec(code.src, namespace)
    names = tuple(str(node.target) for node in part.nodes if node.op == "placeholder")
    return namespace["forward"], names
