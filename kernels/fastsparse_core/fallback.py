"""Why a framework's implementation runs in place of the kernels, and how the user is informed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fastsparse_core.log import info_once, warn_once


class Reason(NamedTuple):
    """Why a framework's implementation has to run a call.

    Attributes:
        message: why the kernels do not run.
        cure: what the user can do about it; "" if nothing is lost, because the user asked for that
            implementation, or because it is faster there. Then there is no warning.
        faster: name of the framework if its implementation is faster there, else "".
    """

    message: str
    cure: str
    faster: str = ""

    @property
    def cause(self) -> str:
        """The message, and that the framework is faster if so."""
        return f"{self.message}: {self.faster} is faster there" if self.faster else self.message

    def __str__(self) -> str:
        if self.cure or self.faster:
            return f"{self.cause}. {self.cure}" if self.cure else self.cause
        return f"{self.message} (as asked for)"


#: Receives reasons that would otherwise be shown to the user (`listening`).
_listener: ContextVar[Callable[[Reason], None] | None] = ContextVar("fastsparse_listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[Reason], None]) -> Iterator[None]:
    """Passes the reasons of fallbacks in this context to a function; nothing is logged."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(logger: logging.Logger, framework: str, layer: str, reason: Reason) -> None:
    """Says once that a framework's implementation ran: a warning, or a log record where nothing is lost.

    Args:
        logger: of the plugin.
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
    """Calls the framework's implementation, then tells the user.

    If the call raises, its error is enough. A call that runs out of memory is reported nevertheless: the
    kernels may need less.

    Args:
        tell: :func:`tell` of a plugin.
        layer: name of the layer's class.
        reason: why the kernels do not run.
        call: the framework's implementation.
        args: its arguments.
        kwargs: its arguments by name.
    """
    try:
        out = call(*args, **kwargs)
    except (MemoryError, RuntimeError) as error:
        is_out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if is_out_of_memory or "allocate memory" in str(error):  # on the CPU it is a RuntimeError
            tell(layer, reason)
        raise
    tell(layer, reason)
    return out
