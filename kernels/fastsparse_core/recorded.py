"""The step that is being recorded: code below it must read no sizes from the device, and keep no results.

Structures and attention ask here; the package `capture` says when.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

_local = threading.local()


class StepRun:
    """One execution of a step that is recorded, or will be: structures live no longer than it.

    Args:
        has_padding: whether the last node of every structure is padding, which takes what has no place.
        of_edges: makes the structures of edge lists; it gets this object, then what
            ``Adjacency.from_coo`` was asked for.
    """

    def __init__(self, *, has_padding: bool, of_edges: Callable[..., Any]) -> None:
        self.has_padding = has_padding
        self.of_edges = of_edges
        self._structures: dict[Hashable, tuple[object, Any]] = {}

    def structure(self, key: object, options: Hashable, build: Callable[[], Any]) -> Any:
        """The structure of a graph object, made once in this execution."""
        found = self._structures.get((id(key), options))
        if found is None:
            found = self._structures[id(key), options] = (key, build())  # the key lives on: its id is its own
        return found[1]


def current() -> StepRun | None:
    """The execution that this thread is in, if any."""
    return None if torch.compiler.is_compiling() else getattr(_local, "run", None)


@contextlib.contextmanager
def running(run: StepRun) -> Iterator[None]:
    """Makes an execution the current one of this thread."""
    before = current()
    _local.run = run
    try:
        yield
    finally:
        _local.run = before


def drops() -> bool:
    """Whether dropout drops: not where two forms of a step are compared."""
    return torch.compiler.is_compiling() or getattr(_local, "drops", True)


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Attention drops no weights in this thread."""
    before = drops()
    _local.drops = False
    try:
        yield
    finally:
        _local.drops = before
