"""Messages for the user: log records, warnings about slow paths, and tables of reports."""

from __future__ import annotations

import io
import linecache
import logging
import os
import shutil
import sys
import warnings
from types import CodeType, FrameType
from typing import Any

import torch

from fastsparse_core.locks import ForkSafeLock

_lock = ForkSafeLock()
#: Names of loggers (or "" for warnings) and the messages that each of them has emitted.
seen: set[tuple[str, str]] = set()
#: Top-level packages whose frames are not frames of the user's code.
_NOT_THE_USER = {"fastsparse_core", "fastsparse_dgl", "fastsparse_pyg", "torch", "torch_geometric", "dgl"}


#: Message to the user: why layers may not be found, and what to do.
NOT_FOUND = "Layers in a Python list or dict are not found: keep them in a torch.nn.ModuleList or ModuleDict"
#: Environment variable that `fastsparse run` sets.
_RUN_VARIABLE = "FASTSPARSE_RUN"


class SlowPathWarning(UserWarning):
    """A call falls back to slower code. The message names the cause and the cure.

    Example:
        >>> import fastsparse_core, warnings
        >>> warnings.simplefilter("ignore", fastsparse_core.SlowPathWarning)
    """


def table_text(table: Any) -> str:
    """Renders a `rich.table.Table` as text that is as wide as the terminal."""
    from rich.console import Console

    page = io.StringIO()
    width = shutil.get_terminal_size((110, 24)).columns
    # In a notebook, rich would display the table at once. Notebooks also set FORCE_COLOR.
    Console(file=page, width=width, force_jupyter=False, force_terminal=False).print(table)
    return page.getvalue().rstrip()


def range_text(low: int, high: int) -> str:
    """Part of an error message: ``"got 5"`` or ``"got values from 0 to 5"``."""
    return f"got {low}" if low == high else f"got values from {low} to {high}"


def info_once(logger: logging.Logger, message: str) -> None:
    """Logs `message` at INFO the first time this logger emits it; later calls are silent.

    A message that the logger's level suppresses does not count as emitted. Nothing is logged while
    torch.compile traces, because logging cannot be traced.
    """
    if torch.compiler.is_compiling():
        return
    if logger.isEnabledFor(logging.INFO) and _is_first(logger.name, message):
        logger.info(message)


def warn_once(message: str) -> None:
    """Issues a :class:`SlowPathWarning` the first time it is called with `message`, at the user's line.

    Under ``fastsparse run``, the message is logged instead, because the script's author did not choose
    FastSparse.

    If torch.compile traces the call, the warning is issued during tracing, and the compiled code does not
    repeat the warning.
    """
    if torch.compiler.is_compiling():
        _warn_in_trace(message)
    else:
        _warn(message)


def _warn(message: str) -> None:
    if os.environ.get(_RUN_VARIABLE):
        info_once(logging.getLogger("fastsparse_core"), message)
    elif _is_first("", message):
        warnings.warn(message, SlowPathWarning, stacklevel=_user_level())


def warn_of_user(message: str) -> None:
    """Issues a `UserWarning` about a user's mistake once per message, also under ``fastsparse run``."""
    if _is_first("", message):
        warnings.warn(message, UserWarning, stacklevel=_user_level())


def _warn_in_trace(message: str) -> bool:
    _warn(message)
    return True  # a constant, which the compiler puts in place of the call


# torch.compiler.assume_constant_result sets this attribute too, but imports the compiler, which takes a
# second.
_warn_in_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_first(emitter: str, message: str) -> bool:
    key = (emitter, message)
    if key in seen:
        return False
    with _lock:
        if key in seen:
            return False
        seen.add(key)
    return True


def is_of_user(frame: FrameType) -> bool:
    """Returns True unless a frame runs code of FastSparse, PyTorch, PyG, DGL or Python's standard library."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in _NOT_THE_USER and package not in sys.stdlib_module_names


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code; None if no frame is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame):
        frame = frame.f_back
    return frame


def current_line() -> str:
    """The user's current line, in the form of :func:`line_of`; "" if no frame is the user's."""
    frame = user_frame()
    return "" if frame is None else line_of(frame.f_code, frame.f_lineno)


def line_of(code: CodeType, number: int) -> str:
    """Describes a line of code for messages: text, file and number of the line."""
    text = linecache.getline(code.co_filename, number).strip()
    place = f"{os.path.basename(code.co_filename)}:{number}"
    return f"`{text}` ({place})" if text else place


def _user_level() -> int:
    """The ``stacklevel`` of the innermost frame of the user's code, counted from this function's caller."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if not _is_import_machinery(frame):  # `warnings.warn` does not count these frames
            if is_of_user(frame):
                return level
            level += 1
        frame = frame.f_back
    return 2


def _is_import_machinery(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "importlib" in name and "_bootstrap" in name
