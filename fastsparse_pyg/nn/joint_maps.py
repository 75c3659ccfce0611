"""Joins the linear maps of one tensor that a layer's own `forward` passes to `propagate`."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense import Linear as PygLinear

from fastsparse_core.ops._eager import PLAIN, is_plain_eager, is_plain_linear
from fastsparse_pyg.nn.base import has_message_hook
from fastsparse_pyg.nn.layer_arguments import Signature

_LINEARS = (nn.Linear, PygLinear)
_CONSTANTS = (bool, int, float, str, type(None))
#: Widths of the maps are multiples of this number, so that kernels read parts of the product without a copy:
#: 16 bytes in 16-bit dtypes.
_ALIGNED = 8
#: Beginnings of the names of instructions that a body may have: reading and setting local variables, and
#: calls. Others could branch, compare, read other objects, or have effects besides the result.
_ALLOWED = (
    *("RESUME", "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR", "LOAD_METHOD"),
    *("PUSH_NULL", "KW_NAMES", "PRECALL", "CALL", "POP_TOP", "RETURN", "CACHE", "NOP", "EXTENDED_ARG"),
)


class JointMaps(NamedTuple):
    """A `forward` that only applies linear maps to one tensor and calls `propagate` with the results.

    The maps take one product each way instead of three, which saves launches on small graphs.

    Attributes:
        parameters: names of the arguments of `forward`.
        x: argument that is mapped.
        edge_index: argument with the edges.
        modules: names of the linear maps.
        of_maps: argument of `propagate` -> position of its map in ``modules``.
        given: argument of `propagate` -> argument of `forward` that is passed on.
        constants: arguments of `propagate` that the body fixes, with their values.
    """

    parameters: tuple[str, ...]
    x: str
    edge_index: str
    modules: tuple[str, ...]
    of_maps: dict[str, int]
    given: dict[str, str]
    constants: dict[str, Any]

    @classmethod
    def of(
        cls, layer: MessagePassing, forward: Callable[..., Any], passed: tuple[str, ...], names: Signature
    ) -> JointMaps | None:
        """Returns the maps of a layer's `forward`; None if the body does anything else.

        Args:
            layer: the layer.
            forward: the function of the layer's class.
            passed: names of the arguments of `forward` in the calls, after the layer.
            names: names of the methods' arguments.
        """
        if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
            return None
        if not all(step.opname.startswith(_ALLOWED) for step in dis.get_instructions(forward.__code__)):
            return None
        recorder, symbols = _Recorder(layer), {name: _Symbol() for name in passed}
        try:
            result = forward(recorder, **symbols)
        except Exception:  # symbols support no operations, so the body may raise any error
            return None
        called, propagated = object.__getattribute__(recorder, "_record")
        if len(propagated) != 1 or result is not propagated[0][0]:
            return None
        _, edges, given = propagated[0]
        name_of = {id(symbol): name for name, symbol in symbols.items()}
        map_of = {id(out): nth for nth, (_, _, out) in enumerate(called)}
        inputs = {id(x) for _, x, _ in called}
        of_maps = {name: map_of[id(each)] for name, each in given.items() if id(each) in map_of}
        rest = {name: each for name, each in given.items() if name not in of_maps}
        constants = {name: each for name, each in rest.items() if isinstance(each, _CONSTANTS)}
        gathered = {base for _, base, _ in names.lifted} - {*names.message, *names.aggregate, *names.update}
        if (
            len(called) < 2
            or len(inputs) > 1
            or not inputs <= set(name_of)
            or sorted(of_maps.values()) != list(range(len(called)))
            or len({name for name, _, _ in called}) < len(called)
            or any(hasattr(type(layer), name) for name, _, _ in called)
            or type(layer).__getattr__ is not nn.Module.__getattr__
            or type(layer).__getattribute__ is not object.__getattribute__
            # A method may write into other arguments, which PyTorch does not allow for parts of one tensor.
            or not set(of_maps) <= gathered
            or id(edges) not in name_of
            or any(id(each) not in name_of for name, each in rest.items() if name not in constants)
        ):
            return None
        return cls(
            passed,
            name_of[inputs.pop()],
            name_of[id(edges)],
            tuple(name for name, _, _ in called),
            of_maps,
            {name: name_of[id(each)] for name, each in rest.items() if name not in constants},
            constants,
        )

    def run(self, layer: Any, arguments: dict[str, Any]) -> Any:
        """Computes `forward`; None if the layer's own body has to run.

        Args:
            layer: the layer.
            arguments: arguments of `forward` by name.
        """
        x, state = arguments[self.x], layer.__dict__
        # Hooks may write into the arguments of `propagate`.
        if not is_plain_eager(x) or has_message_hook(state):
            return None
        children, width, dtype = state["_modules"], x.shape[-1:], x.dtype
        weights, biases, sizes = [], [], []
        for name in self.modules:
            module = children.get(name)
            if type(module) not in _LINEARS or name in state or not is_plain_linear(module, type(module)):
                return None
            parameters = module._parameters
            weight, bias = parameters["weight"], parameters.get("bias", x)  # a parametrised bias is missing
            if type(weight) not in PLAIN or weight.dtype is not dtype or weight.shape[1:] != width:
                return None
            weights.append(weight)
            sizes.append(weight.shape[0])
            if weight.shape[0] % _ALIGNED:
                return None
            if bias is not None:
                if bias is x or type(bias) not in PLAIN or bias.dtype is not dtype:
                    return None
                biases.append(bias)
        if len(biases) not in (0, len(weights)):
            return None
        # As `joint_linear` does, with fewer calls.
        joint = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
        outs = torch.split_with_sizes(joint, sizes, -1)
        given = dict(self.constants)
        for name, nth in self.of_maps.items():
            given[name] = outs[nth]
        for name, each in self.given.items():
            given[name] = arguments[each]
        return layer.propagate(arguments[self.edge_index], **given)


class _Symbol:
    """Stands for a tensor. It supports no operation."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        raise AttributeError(name)


class _Recorder:
    """Stands for a layer whose body calls linear maps and `propagate`, and reads nothing else."""

    def __init__(self, layer: MessagePassing) -> None:
        # Calls of linear maps: (name, input, result); calls of `propagate`: (result, edges, other arguments).
        object.__setattr__(self, "_record", ([], []))
        object.__setattr__(self, "_modules", layer._modules)

    def __getattribute__(self, name: str) -> Any:
        called, propagated = object.__getattribute__(self, "_record")
        module = object.__getattribute__(self, "_modules").get(name)

        def call(x: Any) -> _Symbol:
            called.append((name, x, _Symbol()))
            out: _Symbol = called[-1][-1]
            return out

        def propagate(edge_index: Any, **given: Any) -> _Symbol:
            propagated.append((_Symbol(), edge_index, given))
            out: _Symbol = propagated[-1][0]
            return out

        if name == "propagate":
            return propagate
        if type(module) in _LINEARS:
            return call
        raise AttributeError(name)


def passed_names(forward: Callable[..., Any], num_args: int, named: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the arguments of a call of `forward`: those by position, then those by name."""
    names = list(inspect.signature(forward).parameters)[1 : num_args + 1]
    return (*names, *named)
