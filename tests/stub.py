"""Writes the stub of the compiled extension, `kernels/fastsparse_core/_C.pyi`: ``python tests/stub.py``.

The extension's docstrings are its signatures. `tests/core/test_library.py` says when the stub is out of date.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from fastsparse_core import _C

STUB = Path(__file__).resolve().parents[1] / "kernels" / "fastsparse_core" / "_C.pyi"

HEADER = """\
# Made by tests/stub.py from the lists of arguments in kernels/include/fastsparse and kernels/binding.cpp.
# Device -1 is the CPU and `queue` its number of threads, else `queue` is a CUDA stream. Memory that a call
# reads after it has returned, as structures and launches on a GPU do, is kept alive by the caller.

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Memory: TypeAlias = Tensor | int | None  # a tensor's first element, or its address; None: there is none
_Rows: TypeAlias = Tensor | None  # memory with what is known of its shape
_Dtype: TypeAlias = torch.dtype | int

"""


#: What may yet be called by position.
_BY_POSITION = re.compile("attention|head_outer|stack_maps", re.IGNORECASE)
#: CPython collects the arguments of a call in a dictionary, which takes 0.6 us, where those by position and
#: twice those by name are more.
_MOST_OF_A_CALL = 30


def declaration(doc: str, *, of: str = "", name: str = "", owner: str = "") -> str:
    """A function from its signature; ``of``: what comes before the arguments."""
    given, result = doc.rsplit(" -> ", 1)
    found, _, inside = given.removesuffix(")").partition("(")
    arguments = []
    if inside:
        depth, start = 0, 0
        for at, character in enumerate(inside + ","):
            depth += (character == "[") - (character == "]")
            if character == "," and depth == 0:
                arguments.append(inside[start:at].strip())
                start = at + 1
        if not _BY_POSITION.search(owner or found):
            num_first = max(2 * len(arguments) - _MOST_OF_A_CALL, 0)
            if num_first < len(arguments):
                arguments.insert(num_first, "*")
    if of:
        arguments.insert(0, of)
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return (
        f"def {name or found}(\n{lines}) -> {result}: ...\n" if lines else f"def {found}() -> {result}: ...\n"
    )


def declared_class(name: str, kind: type) -> str:
    """A class with its constructor, methods and attributes."""
    parts = [declaration(str(kind.__doc__), of="self", name="__init__", owner=name)]
    for member, value in vars(kind).items():
        if inspect.ismethoddescriptor(value):
            parts.append(declaration(str(value.__doc__), of="self", owner=name))
        elif inspect.ismemberdescriptor(value):
            parts.append(f"@property\ndef {member}(self) -> {value.__doc__}: ...\n")
    body = "".join(parts)
    return f"\nclass {name}:\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "\n"


def stub() -> str:
    """The text of the stub."""
    parts = [HEADER]
    for name, value in vars(_C).items():
        if isinstance(value, type):
            parts.append(declared_class(name, value))
        elif isinstance(value, int):
            parts.append(f"{name}: int\n")
        elif callable(value):
            parts.append(declaration(str(value.__doc__)))
    return re.sub("\n{3,}", "\n\n", "".join(parts))


if __name__ == "__main__":
    STUB.write_text(stub())
