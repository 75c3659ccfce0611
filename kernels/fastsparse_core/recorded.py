"""Tells whether a step is being recorded. Code that a step calls must then not read sizes or cache results.

The package `capturing` sets this state; structures and attention read it. The state belongs to a thread and
to the backward passes that the thread starts. Backward passes on a GPU run in autograd's threads, where
`threading.local` has other values. PyTorch copies its own thread-local state to these threads, so this module
stores its state in PyTorch's.
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
#: The contexts of this module that are active in any thread. If the set is empty, no look-up is needed.
entered: set[object] = set()
_DEFAULTS: dict[str, Any] = {_RUN: None, _DROPS: True}


class StepRun:
    """One run of a step, during or before its recording. Structures are cached only within the run.

    Args:
        has_padding: True if the last node of every structure is padding, so that dropped edges can end there.
        of_edges: function that makes the structure of an edge list, called with this object, then with the
            arguments of ``Adjacency.from_coo``.
        sorted_rows: (address of the storage, offset) of index tensors with sorted destinations.
        greatest_of: function that returns the greatest index that a padded index tensor may contain; None if
            the tensor is not padded.

    Attributes:
        masks: pairs for dense batches: mask of the entries that are nodes, bool (graphs, capacity per graph);
            and the entry of every node, int64 (nodes,), arbitrary for padding.
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
        """Returns True if the destinations ``row`` are known to ascend."""
        return (row.untyped_storage().data_ptr(), row.storage_offset()) in self._sorted_rows

    def check_capacity(self, index: torch.Tensor, size: int) -> None:
        """Checks that a tensor of ``size`` rows has a row for the padding.

        Without this row, a kernel would index outside of the tensor, which ends the process.

        Raises:
            RuntimeError: indices of the padding may be ``size`` or greater.
        """
        greatest = self._greatest_of(index)
        if greatest is not None and size <= greatest:
            raise RuntimeError(
                f"capture pads batches, so ids of nodes or edges reach {greatest}, but they index a tensor "
                f"of {size} rows. Put the tensor into the batch, or use PyG's or DGL's pooling"
            )

    def structure(self, key: object, options: Hashable, build: Callable[[], Any]) -> Any:
        """The structure of a graph object, built once per run."""
        found = self._structures.get((id(key), options))
        if found is None:
            found = self._structures[id(key), options] = (key, build())  # storing the key keeps its id unique
        return found[1]


def current() -> StepRun | None:
    """The run that this thread executes; None outside of a recorded step."""
    run: StepRun | None = _get(_RUN)
    return run


def running(run: StepRun) -> contextlib.AbstractContextManager[None]:
    """Context in which ``run`` is the current run of this thread."""
    return _stashed(_RUN, run)


def drops() -> bool:
    """Returns True if attention dropout is active. It is off while two runs of a step are compared."""
    return bool(_get(_DROPS))


def without_dropout() -> contextlib.AbstractContextManager[None]:
    """Context without attention dropout, for this thread."""
    return _stashed(_DROPS, False)


def _get(key: str) -> Any:
    if torch.compiler.is_compiling() or not entered:
        return _DEFAULTS[key]
    return _stash(key)


def _stash(key: str) -> Any:
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else _DEFAULTS[key]


def _put(key: str, value: Any) -> None:
    """Stores an object in PyTorch's thread-local state, which later releases one reference to it."""
    if _takes_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _takes_no_reference() -> bool:
    """Returns True if PyTorch takes no reference to a stored object but releases one (before 2.12)."""
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
