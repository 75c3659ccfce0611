"""Layers that become drop-ins when they are first called."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from fastsparse_core.call_report import is_recording, record
from fastsparse_core.fallback import Reason, listening
from fastsparse_pyg import layer_swap
from fastsparse_pyg.nn.any_layer import AnyLayer
from fastsparse_pyg.nn.base import FastConv

_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._is_tracing


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`MessagePassing.__call__`."""
    if _is_compiling() or _is_tracing():
        return Module.__call__(self, *args, **kwargs)
    reason = ""
    if not isinstance(self, (FastConv, AnyLayer)):
        reason = layer_swap.swap_at_first_call(self)
    if is_recording():
        return _recorded(self, reason, args, kwargs)
    return Module.__call__(self, *args, **kwargs)


def _recorded(layer: Any, reason: str, args: Any, kwargs: Any) -> Any:
    """The call, with an entry in the report for what computed it."""
    reasons = [Reason(reason, "")] if reason else []
    if isinstance(layer, AnyLayer):
        type(layer).forget_reasons()
    with listening(reasons.append):
        out = Module.__call__(layer, *args, **kwargs)
    name = layer_swap.original_class(layer).__name__
    if reasons:
        record(name, "PyG", reasons[0].cause, reasons[0].cure)
    else:
        record(name, layer_swap.kernel_of(layer))
    return out


def reduce_ex(original: Callable[..., Any], self: Any, protocol: Any) -> Any:
    """`MessagePassing.__reduce_ex__`: pickles and copies need no FastSparse, as they name the original."""
    if layer_swap.is_automatic(self):
        twin = layer_swap.as_original(self)
        reduced: Any = twin.__reduce_ex__(protocol)
        how, what, *rest = reduced
        if how is copyreg.__newobj__ and what == (type(twin),):  # type: ignore[attr-defined]
            # Which pickle refuses for an object of another class.
            return copyreg._reconstructor, (type(twin), object, None), *rest  # type: ignore[attr-defined]
        return how, what, *rest
    return original(self, protocol)


def restore_all() -> None:
    """Gives every layer that became a drop-in by a call its class back."""
    layer_swap.restore_automatic()
