"""Error messages about steps that cannot be recorded."""

from __future__ import annotations

import traceback
from types import TracebackType

import torch

from fastsparse_core.log import is_of_user, line_of

#: Name of a function that cannot be recorded -> advice for the user. Plugins add functions of the frameworks.
cures: dict[str, str] = {}


class Refused(Exception):
    """The step cannot be recorded; the message is the reason."""


def reason_of(error: BaseException) -> str:
    """The reason that the user is told if an error ended a trial or a recording."""
    if isinstance(error, torch.OutOfMemoryError):
        return "there is not enough memory to record it"
    if "CUDA Graph is empty" in str(error):
        return "it runs nothing on the GPU"
    lines = _lines_of(error.__traceback__)
    for name, line in lines:
        if name in cures:
            return f"{line} calls {name}(), which cannot be recorded. {cures[name]}"
    if isinstance(error, Refused):
        return str(error)
    text = str(error).split("\n")[0]
    if _is_ours(error.__traceback__):
        return f"{lines[-1][1]} cannot be recorded: {text}" if lines else text
    at = f"{lines[-1][1]} cannot be recorded" if lines else "it cannot be recorded"
    return (
        f"{at} ({type(error).__name__}: {text}). Usual causes: numbers or sizes that are read from the GPU, "
        "and tensors that are copied from the CPU or made of Python numbers"
    )


def _is_ours(trace: TracebackType | None) -> bool:
    """Returns whether FastSparse itself raised an error. Its message then says what to do."""
    module = ""
    for frame, _ in traceback.walk_tb(trace):
        module = frame.f_globals.get("__name__", "")
    return module.startswith("fastsparse_")


def _lines_of(trace: TracebackType | None) -> list[tuple[str, str]]:
    """For every function of a traceback, its name and the user's last line before it."""
    found, line = [], ""
    for frame, number in traceback.walk_tb(trace):
        if is_of_user(frame):
            line = line_of(frame.f_code, number)
        if line:
            found.append((frame.f_code.co_name, line))
    return found
