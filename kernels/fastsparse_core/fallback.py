"""Reasons why a framework's implementation runs in place of the kernels, and messages about them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fastsparse_core.log import info_once, warn_once


class Reason(NamedTuple):
    """The reason why a framework's implementation runs a call.

    Attributes:
        message: why the kernels do not run.
        cure: advice for the user. If it is "", there is no warning, because the user chose the framework's
            implementation, or because this implementation is faster for the call.
        faster: name of the framework if its implementation is faster for this call, else "".
    """

    message: str
    cure: str
    faster: str = ""

    @property
    def cause(self) -> str:
        """The message; if the framework is faster for this call, also this fact."""
        return f"{self.message}: {self.faster} is faster there" if self.faster else self.message

    def __str__(self) -> str:
        return f"{self.cause}. {self.cure}" if self.cure else self.cause


#: Function that receives reasons, which are then not shown to the user (`listening`).
_listener: ContextVar[Callable[[Reason], None] | None] = ContextVar("fastsparse_listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[Reason], None]) -> Iterator[None]:
    """Context in which the reasons of fallbacks are passed to a function and not logged."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(logger: logging.Logger, framework: str, layer: str, reason: Reason) -> None:
    """Reports once that a framework's implementation ran: with a warning if ``reason`` has a cure, or a log.

    Args:
        logger: logger of the plugin.
        framework: name of the framework.
        layer: name of the layer's class.
        reason: why the kernels did not run.
    """
    listener = None if torch.compiler.is_compiling() else _listener.get()
    message = f"{layer} falls back to {framework}'s implementation"
    if listener is not None:
        listener(reason)
    elif reason.cure:
        warn_once(f"{message}, which is slower: {reason.message}. {reason.cure}")
    else:
        info_once(logger, f"{message}: {reason.cause}")


def run(
    tell: Callable[[str, Reason], None],
    layer: str,
    reason: Reason,
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the framework's implementation, then reports the reason to the user.

    If the call raises an error, the reason is not reported, unless the call ran out of memory: then the
    reason helps, because the kernels may need less memory.

    Args:
        tell: :func:`tell` of a plugin.
        layer: name of the layer's class.
        reason: why the kernels do not run.
        call: the framework's implementation.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    try:
        out = call(*args, **kwargs)
    except (MemoryError, RuntimeError) as error:
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if is_out_of_memory or "allocate memory" in str(error):  # the CPU allocator raises a RuntimeError
            tell(layer, reason)
        raise
    tell(layer, reason)
    return out
