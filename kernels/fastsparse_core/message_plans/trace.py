"""Traces a layer's method, or a function, to a graph, if it has no effects besides its result.

The names that the body reads are checked first; then the body runs on symbols. Attributes of the layer that
the body reads become guards of the trace. Bodies with branches on data, in-place writes or side effects are
rejected.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import operator
import sys
import types
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy

from fastsparse_core.replacement import original_of

#: Modules that a body may use, because a trace records the calls of their functions.
_MODULES = (torch, F, math)
_BUILTINS = (hasattr,)
#: Instructions that a traced body must not have, because their effects go beyond computing a result.
_FORBIDDEN = (
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "IMPORT_NAME",
    "LOAD_DEREF",
    "LOAD_CLOSURE",
    "STORE_DEREF",
    "DELETE_DEREF",
    "MAKE_FUNCTION",
    "STORE_SUBSCR",
    "YIELD_VALUE",
    # Context managers (torch.no_grad) and error handlers, under their names in Python 3.10 to 3.14.
    "BEFORE_WITH",
    "LOAD_SPECIAL",
    "PUSH_EXC_INFO",
    "SETUP_FINALLY",
    "SETUP_WITH",
)
#: Prefixes of functions and attributes that read or write global state, which a trace would treat as a
#: constant.
_STATE = (
    *("is_", "get_default", "get_device", "get_rng", "seed", "initial_seed", "manual_seed", "data"),
    *("set_", "no_grad", "enable_grad", "inference_mode", "autocast", "amp", "autograd"),
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
ABSENT = object()
#: Name of the traced method in a probe's class.
_BODY = "_fastsparse_call"


class _Present:
    """Guard of an attribute that is a module or parameter. It checks only that the attribute is not None."""


PRESENT = _Present()


class _Globals(NamedTuple):
    """Guard of the global constants (numbers, strings, None, dtypes) that a body reads."""

    namespace: dict[str, Any]
    values: dict[str, Any]

    def hold(self) -> bool:
        """Returns whether the constants have not changed."""
        return all(_is_same(self.namespace.get(name, ABSENT), value) for name, value in self.values.items())


def _is_same(value: Any, expected: Any) -> bool:
    return value is expected or (type(value) is type(expected) and bool(value == expected))


class Untraceable(Exception):
    """A body cannot be traced. The message is the reason."""


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def to_bool(self, obj: Proxy) -> bool:
        """Turns assertions into steps of the graph; any other branch on a symbol is an error."""
        frame = sys._getframe(2)
        steps = dis.get_instructions(frame.f_code)
        following = [step for step in steps if step.offset >= frame.f_lasti][:3]
        if any("ASSERT" in f"{step.opname}{step.argrepr}".upper() for step in following):
            self.create_proxy("call_function", torch._assert, (obj, ""), {})
            return True
        raise Untraceable("branches on the values of tensors")


def trace(
    layer: Any,
    original: type,
    body: Any,
    guards: dict[str, Any],
    concrete: dict[str, None],
    functions: tuple[Any, ...] = (),
    refused: Container[str] = (),
) -> tuple[Graph, dict[str, Node]]:
    """Traces a body; returns its graph, and the nodes of attributes that it assigns.

    Args:
        layer: the layer whose attributes the body reads.
        original: the layer's class.
        body: the function.
        guards: a dictionary to which the attributes that the body reads are added, with their values.
        concrete: arguments that are None.
        functions: functions other than PyTorch's that the body may call; each call is one step of the graph,
            also if `enable()` has replaced the function.
        refused: attributes of the layer that the body must not read.

    Raises:
        Untraceable: the body may have effects besides its result.
        Exception: an operation that symbols do not support.
    """
    wanted, names = set(map(id, functions)), getattr(body, "__globals__", {})
    named = tuple(value for value in names.values() if id(original_of(value)) in wanted)
    _check_code(body, guards, named)
    # The tracer looks a method up by its name, under which `original` may have another method.
    probe, state = _probe(layer, original, body, guards, named, refused, {_BODY: body})
    tracer = _Tracer(autowrap_functions=named)
    tracer.traced_func_name = _BODY
    graph = tracer.trace(probe, concrete_args=concrete or None)
    for node in graph.nodes:
        node.target = original_of(node.target)
    _check_graph(graph, layer)
    return graph, _assigned(probe, state)


class Function(NamedTuple):
    """A user's function, and the objects that it reads besides its argument.

    Attributes:
        body: the function, or the function of a method.
        layer: the module of a method, or a module in the function's closure; None: there is none.
        is_method: whether the function is a method.
        captured: all other objects in the function's closure, by name.
    """

    body: Any
    layer: nn.Module | None
    is_method: bool
    captured: dict[str, Any]

    @classmethod
    def of(cls, function: Any) -> Function:
        """Analyses a function.

        Raises:
            Untraceable: the object is not a function, or it reads objects whose changes cannot be detected.
        """
        layer: Any = None
        if isinstance(function, types.MethodType):
            layer, function = function.__self__, function.__func__
            if not isinstance(layer, nn.Module):
                raise Untraceable("is a method of an object that is not a module")
        if not isinstance(function, types.FunctionType):
            raise Untraceable(
                f"an object of type {type(function).__name__} was passed, not a Python function"
            )
        is_method, captured = layer is not None, dict[str, Any]()
        code = function.__code__
        if code.co_argcount != 1 + is_method or code.co_kwonlyargcount or code.co_flags & 0x0C:
            raise Untraceable("does not take exactly one argument")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                raise Untraceable(f"reads {name}, which is not set yet") from None
            if isinstance(value, nn.Module):
                if layer is not None and value is not layer:
                    raise Untraceable("reads several modules")
                layer = value
            elif isinstance(value, (Tensor, *_PLAIN)) or _is_torch_function(value):
                captured[name] = value
            else:
                raise Untraceable(f"reads {name} ({type(value).__name__})")
        return cls(function, layer, is_method, captured)


def trace_function(
    function: Function, guards: dict[str, Any], argument: Callable[[torch.fx.Tracer], Any], place: str
) -> tuple[Graph, Any]:
    """Traces a function; returns its graph, and the symbol of its argument.

    Tensors in its closure are arguments of the graph, with the names ``PLACE.NAME``.

    Args:
        function: the function.
        guards: a dictionary to which the attributes that the function reads are added, with their values.
        argument: makes the symbol of the function's argument.
        place: first part of the names of tensors in the function's closure.

    Raises:
        Untraceable: the body may have effects besides its result.
        Exception: an operation that symbols do not support.
    """
    body, layer = function.body, nn.Module() if function.layer is None else function.layer
    _check_code(body, guards, (), ("LOAD_DEREF", "STORE_SUBSCR"))
    tracer, given = _Tracer(), list[Any]()

    def call(probe: Any) -> Any:
        cells = []
        for name in body.__code__.co_freevars:
            value = function.captured.get(name, probe)
            if isinstance(value, Tensor):
                value = tracer.create_proxy("placeholder", f"{place}.{name}", (), {})
            cells.append(types.CellType(value))
        copy = types.FunctionType(body.__code__, body.__globals__, body.__name__, None, tuple(cells))
        given.append(argument(tracer))
        return copy(probe, *given) if function.is_method else copy(*given)

    tracer.traced_func_name = _BODY
    probe, state = _probe(layer, type(layer), body, guards, (), (), {_BODY: call})
    graph = tracer.trace(probe)
    if any(node.op == "call_module" and not node.target for node in graph.nodes):
        name = type(layer).__name__
        raise Untraceable(f"calls a {name} that is not an attribute of a module, as in self.lin(...)")
    _check_graph(graph, layer)
    for name in _assigned(probe, state):
        raise Untraceable(f"writes self.{name}")
    return graph, given[0]


def _probe(
    layer: Any,
    original: type,
    body: Any,
    guards: dict[str, Any],
    functions: tuple[Any, ...],
    refused: Container[str],
    methods: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """The object that represents a layer in a trace, and the object's attributes."""

    def reading(probe: Any, name: str) -> Any:
        if sys._getframe(1).f_globals is not body.__globals__:  # the tracer, or nn.Module
            return object.__getattribute__(probe, name)
        if name in refused:
            raise Untraceable(f"reads self.{name}")
        try:
            value = object.__getattribute__(probe, name)
        except AttributeError:  # a module or parameter, by nn.Module.__getattr__
            value = getattr(layer, name, ABSENT)
            guards[name] = value if value is None or value is ABSENT else PRESENT
            raise
        if isinstance(value, Proxy):  # assigned by the body before
            return value
        if isinstance(value, types.MethodType):
            if value.__func__.__globals__ is not body.__globals__:
                raise Untraceable("calls code of another module")
            _check_code(value.__func__, guards, functions)
            guards[name] = value.__func__
        elif not isinstance(value, _PLAIN) and not _is_torch_function(value):
            raise Untraceable(f"reads self.{name} ({type(value).__name__})")
        else:
            guards[name] = value
        return value

    namespace = {"__getattribute__": reading, "__module__": __name__, **methods}
    probe_class = type(original.__name__, (original,), namespace)
    probe: Any = object.__new__(probe_class)
    state = {
        name: dict(value) if name in ("_parameters", "_buffers", "_modules") else value
        for name, value in vars(layer).items()
    }
    object.__getattribute__(probe, "__dict__").update(state)
    return probe, state


def _assigned(probe: Any, state: dict[str, Any]) -> dict[str, Node]:
    """Nodes of the attributes that a body has set."""
    after = object.__getattribute__(probe, "__dict__")
    assigned: dict[str, Node] = {}
    for name, value in after.items():
        before = state.get(name, ABSENT)
        if isinstance(value, Proxy):
            assigned[name] = value.node
        elif name.startswith("_tensor_constant"):
            raise Untraceable("creates a tensor")
        elif value is not before:
            raise Untraceable(f"writes self.{name}")
    return assigned


def holds(guards: Mapping[str, Any], layer: Any) -> bool:
    """Returns whether the attributes that a trace has read still have the same values in a layer."""
    for name, expected in guards.items():
        if isinstance(expected, _Globals):
            if not expected.hold():
                return False
            continue
        value = getattr(layer, name, ABSENT)
        value = value.__func__ if isinstance(value, types.MethodType) else value
        if expected is PRESENT:
            if value is None or value is ABSENT:
                return False
        elif not _is_same(value, expected):
            return False
    return True


#: Functions whose results are new tensors without other references, so that writing to them is allowed.
_FRESH = ("linear", "add", "sub", "mul", "truediv", "div", "cat", "matmul", "neg")


def _writes_in_place(node: Node, layer: Any) -> bool:
    """Returns whether a call writes into a tensor that is also used elsewhere."""
    if node.kwargs.get("out") is not None:
        return True
    if node.op == "call_module":
        each = operator.attrgetter(str(node.target))(layer).modules()
        parts = [module for module in each if not module._modules]
        if all("weight" in part._parameters for part in parts[:1]):
            return False
        is_in_place = any(getattr(part, "inplace", False) for part in parts)
    else:
        try:
            bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)  # type: ignore[arg-type]
            is_in_place = bool(bound.arguments.get("inplace"))
        except (TypeError, ValueError):  # raised for PyTorch's built-in functions, which have no `inplace`
            return False
    operand = node.args[0] if node.args else None
    if not is_in_place or not isinstance(operand, Node):
        return is_in_place
    name = getattr(operand.target, "__name__", operand.target)
    is_fresh = operand.op in ("call_function", "call_method") and name in _FRESH
    if operand.op == "call_module":
        is_fresh = "weight" in operator.attrgetter(str(operand.target))(layer)._parameters
    return len(operand.users) > 1 or not is_fresh


def _check_graph(graph: Graph, layer: Any) -> None:
    """Rejects operations, such as in-place writes, that a trace would not repeat in every call."""
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "get_attr" and name.startswith("_tensor_constant"):
            raise Untraceable("creates a tensor")
        if node.target is getattr and str(node.args[1]).startswith(_STATE):
            raise Untraceable(f"reads .{node.args[1]}")
        is_check = node.op == "call_function" and name == "_assert_is_none"
        is_call = node.op in ("call_function", "call_method") and not is_check
        writes = is_call and name.endswith("_") and not name.endswith("__")
        if writes or (node.op.startswith("call_") and not is_check and _writes_in_place(node, layer)):
            raise Untraceable(f"writes in place ({name})")


def _is_torch_function(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return callable(value) and (module == "torch" or module.startswith(("torch.nn.functional", "torch._C")))


def _check_code(
    function: Any, guards: dict[str, Any], functions: tuple[Any, ...], allowed: tuple[str, ...] = ()
) -> None:
    """Rejects bodies that read objects or have effects that a trace does not record."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        raise Untraceable("calls code of another module")
    its_globals = function.__globals__
    for step in dis.get_instructions(code):
        if step.opname in _FORBIDDEN and step.opname not in allowed:
            raise Untraceable(f"has side effects or branches ({step.opname.lower()})")
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = its_globals.get(step.argval, getattr(builtins, step.argval, ABSENT))
            is_error = isinstance(value, type) and issubclass(value, Exception)
            if is_error or any(value is allowed for allowed in (*_MODULES, *_BUILTINS, *functions)):
                continue
            if not isinstance(value, _PLAIN):
                raise Untraceable(f"uses {step.argval}")
            guard = guards.setdefault(f"globals of {function.__module__}", _Globals(its_globals, {}))
            guard.values[step.argval] = value
        is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if is_attribute and str(step.argval).startswith(_STATE) and not (allowed and step.argval == "data"):
            raise Untraceable(f"reads .{step.argval}")
