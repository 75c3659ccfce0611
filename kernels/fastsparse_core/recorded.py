"""The step that is being recorded: code below it must read no sizes from the device, and keep no results.

Structures and attention ask here; the package `capturing` says when.

What is said holds for a thread, and for the backward passes that it starts. Those of a GPU run in threads of
autograd's own, which `threading.local` would leave out: PyTorch hands them what is stashed in its own state.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import torch

_RUN, _DROPS = "fastsparse_core.run", "fastsparse_core.drops"
#: The contexts of this module that are entered, in all threads: if there are none, no lookup is needed.
entered: set[object] = set()
_DEFAULTS: dict[str, Any] = {_RUN: None, _DROPS: True}


class StepRun:
    """One execution of a step that is recorded, or will be: structures live no longer than it.

    Args:
        has_padding: whether the last node of every structure is padding, which takes what has no place.
        of_edges: makes the structures of edge lists; it gets this object, then what
            ``Adjacency.from_coo`` was asked for.
        sorted_rows: addresses of memory, and offsets in it, where destinations begin that are sorted.
        greatest_of: gives the greatest index that a tensor may hold with padding, or None.

    Attributes:
        masks: bool (graphs, nodes) that tell which entries of a dense batch are nodes, each with the entry of
            every node, int64 (nodes,), that of padding being any.
    """

    def __init__(
        self,
        *,
        has_padding: bool,
        of_edges: Callable[..., Any],
        sorted_rows: Collection[tuple[int, int]] = (),
        greatest_of: Callable[[torch.Tensor], int | None] = lambda index: None,
    ) -> None:
        self.has_padding = has_padding
        self.of_edges = of_edges
        self._sorted_rows = sorted_rows
        self._greatest_of = greatest_of
        self._structures: dict[Hashable, tuple[object, Any]] = {}
        self.masks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_sorted(self, row: torch.Tensor) -> bool:
        """Whether destinations are known to ascend."""
        return (row.untyped_storage().data_ptr(), row.storage_offset()) in self._sorted_rows

    def check_capacity(self, index: torch.Tensor, size: int) -> None:
        """Refuses indices of padding into what has no row for it, which would end the process on a GPU.

        Raises:
            RuntimeError: there is one.
        """
        greatest = self._greatest_of(index)
        if greatest is not None and size <= greatest:
            raise RuntimeError(
                f"a tensor of {size} rows is indexed by the batch's nodes or edges and has no row for padding"
                ". Put it into the batch, or use the framework's readouts"
            )

    def structure(self, key: object, options: Hashable, build: Callable[[], Any]) -> Any:
        """The structure of a graph object, made once in this execution."""
        found = self._structures.get((id(key), options))
        if found is None:
            found = self._structures[id(key), options] = (key, build())  # stores the key: its id stays unique
        return found[1]


def current() -> StepRun | None:
    """The execution that this thread is in, if any."""
    run: StepRun | None = _get(_RUN)
    return run


def running(run: StepRun) -> contextlib.AbstractContextManager[None]:
    """Makes an execution the current one of this thread."""
    return _stashed(_RUN, run)


def drops() -> bool:
    """Whether dropout drops: not where two forms of a step are compared."""
    return bool(_get(_DROPS))


def without_dropout() -> contextlib.AbstractContextManager[None]:
    """Attention drops no weights in this thread."""
    return _stashed(_DROPS, False)


def _get(key: str) -> Any:
    if torch.compiler.is_compiling() or not entered:
        return _DEFAULTS[key]
    return _stash(key)


def _stash(key: str) -> Any:
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else _DEFAULTS[key]


def _put(key: str, value: Any) -> None:
    """Stashes an object, which PyTorch releases once when no thread has it stashed any more."""
    if _takes_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _takes_no_reference() -> bool:
    """Whether PyTorch, before 2.12, releases what it never took: objects in use would be freed."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("fastsparse_core.probe", probe)
    if sys.getrefcount(probe) > count:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


@contextlib.contextmanager
def _stashed(key: str, value: Any) -> Iterator[None]:
    before, context = _stash(key), object()
    _put(key, value)
    entered.add(context)
    try:
        yield
    finally:
        entered.discard(context)
        _put(key, before)
