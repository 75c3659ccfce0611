"""Tracing a method of a layer: what it computes, as a graph, where nothing else can hide in its body.

Tracing runs the method on symbols, so it is taken only for bodies that do nothing but compute: the names that
a body reads are checked first, attributes of the layer that it reads become guards of the result, and
whatever a trace cannot hold (branches on data, writes in place, side effects) is refused.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
import types
from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node, Proxy

#: What a body may name: modules whose functions a trace records.
_MODULES = (torch, F, math)
#: Instructions of a body that does more than compute.
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
    # Contexts (torch.no_grad) and handlers of errors, in the words of Python 3.10 to 3.14.
    "BEFORE_WITH",
    "LOAD_SPECIAL",
    "PUSH_EXC_INFO",
    "SETUP_FINALLY",
    "SETUP_WITH",
)
#: Beginnings of names that read a state of the process, which a trace would take for a constant, or write it.
_STATE = (
    *("is_", "get_default", "get_device", "get_rng", "seed", "initial_seed", "manual_seed", "data"),
    *("set_", "no_grad", "enable_grad", "inference_mode", "autocast", "amp", "autograd"),
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
ABSENT = object()


class _Present:
    """Guard of an attribute that is a module or parameter: only whether it is None decides a branch."""


PRESENT = _Present()


class Untraceable(Exception):
    """Says what of a body a trace cannot hold."""


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace(
    layer: Any,
    original: type,
    body: Any,
    guards: dict[str, Any],
    concrete: dict[str, None],
    functions: tuple[Any, ...] = (),
    refused: Container[str] = (),
) -> tuple[Graph, dict[str, Node]]:
    """The body's graph, and the nodes of attributes that it assigns.

    Args:
        layer: whose attributes it reads.
        original: the layer's class.
        body: the function.
        guards: gets the attributes that the body reads, and their values.
        concrete: arguments that are None.
        functions: besides PyTorch's, those that the body may call, recorded as one step.
        refused: attributes of the layer that the body must not read.

    Raises:
        Untraceable: the body may do something else than compute.
        Exception: whatever a symbol cannot do.
    """
    _check_code(body, body.__globals__, functions)

    def reading(probe: Any, name: str) -> Any:
        if sys._getframe(1).f_globals is not body.__globals__:  # the tracer, or nn.Module
            return object.__getattribute__(probe, name)
        if name in refused:
            raise Untraceable(f"reads self.{name}")
        try:
            value = object.__getattribute__(probe, name)
        except AttributeError:  # a module or parameter, by nn.Module.__getattr__
            guards[name] = None if getattr(layer, name, ABSENT) is None else PRESENT
            raise
        if isinstance(value, Proxy):  # assigned by the body before
            return value
        if isinstance(value, types.MethodType):
            _check_code(value.__func__, body.__globals__, functions)
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
    tracer = _Tracer(autowrap_functions=functions)
    tracer.traced_func_name = body.__name__
    graph = tracer.trace(probe, concrete_args=concrete or None)
    after = object.__getattribute__(probe, "__dict__")
    assigned: dict[str, Node] = {}
    for name, value in after.items():
        before = state.get(name, ABSENT)
        if isinstance(value, Proxy):
            assigned[name] = value.node
        elif name.startswith("_tensor_constant"):
            raise Untraceable("makes a tensor of its own")
        elif value is not before:
            raise Untraceable(f"writes self.{name}")
    _check_graph(graph)
    return graph, assigned


def holds(guards: Mapping[str, Any], layer: Any) -> bool:
    """Whether a layer's attributes are those that a trace has read."""
    for name, expected in guards.items():
        value = getattr(layer, name, ABSENT)
        if expected is PRESENT:
            if value is None or value is ABSENT:
                return False
        elif value is not expected and (type(value) is not type(expected) or value != expected):
            return False
    return True


def _check_graph(graph: Graph) -> None:
    """Rejects what happens once in a trace, and in every call of the body."""
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "get_attr" and name.startswith("_tensor_constant"):
            raise Untraceable("makes a tensor of its own")
        is_check = node.op == "call_function" and name == "_assert_is_none"
        is_call = node.op in ("call_function", "call_method") and not is_check
        if is_call and name.endswith("_") and not name.endswith("__"):
            raise Untraceable(f"writes in place ({name})")


def _is_torch_function(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return callable(value) and (module == "torch" or module.startswith(("torch.nn.functional", "torch._C")))


def _check_code(function: Any, its_globals: dict[str, Any], functions: tuple[Any, ...]) -> None:
    """Rejects bodies that read or do what a trace would not see."""
    code = getattr(function, "__code__", None)
    if code is None or function.__globals__ is not its_globals or hasattr(function, "__wrapped__"):
        raise Untraceable("calls code of another module")
    for step in dis.get_instructions(code):
        if step.opname in _FORBIDDEN:
            raise Untraceable(f"does more than compute ({step.opname.lower()})")
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = its_globals.get(step.argval, getattr(builtins, step.argval, ABSENT))
            is_error = isinstance(value, type) and issubclass(value, Exception)
            if not is_error and not any(value is allowed for allowed in (*_MODULES, *functions)):
                raise Untraceable(f"uses {step.argval}")
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and str(step.argval).startswith(_STATE):
            raise Untraceable(f"reads .{step.argval}")
