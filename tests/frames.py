"""Frames of Python that a warm step of a layer runs, and the files that they are of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

_PACKAGES = ("fastsparse_core", "fastsparse_pyg", "fastsparse_dgl")
#: What the first calls do once: structures, plans, compiled code, messages.
_WARM_UP = 4


def counted(call: Callable[[], Any], *, only_ours: bool = True) -> tuple[Any, list[str]]:
    """The result of a call, and the file of every frame within it, other threads' included."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and (not only_ours or any(package in file for package in _PACKAGES)):
            files.append(file)

    threading.setprofile(note)  # of the threads of autograd, which begin later
    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return result, files


def frames_of_step(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """How many frames a warm forward and backward pass takes, and how many files they are of."""
    for _ in range(_WARM_UP):
        forward().sum().backward()
    total, files = counted(forward)
    total = total.sum()
    _, more = counted(total.backward)
    files += more
    return len(files), len(set(files))
