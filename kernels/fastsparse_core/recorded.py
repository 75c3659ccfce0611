"""Tells whether a step is being recorded. Its code must not read sizes from the device or cache results.

The package `capturing` sets this state; structures and attention read it. The state belongs to a thread and
to the backward passes that the thread starts. Backward passes on a GPU run in autograd's threads, which do
not see `threading.local`. PyTorch copies its own thread-local state to them, so the state is stored there.
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
    """One run of a step that is being recorded or will be. Structures are cached only within the run.

    Args:
        has_padding: whether the last node of every structure is padding, so that dropped edges can go there.
        of_edges: makes the structure of an edge list; called with this object, then with the arguments of
            ``Adjacency.from_coo``.
        sorted_rows: (address of the storage, offset) of index tensors with sorted destinations.
        greatest_of: returns the greatest index that a padded index tensor may contain, or None.

    Attributes:
        masks: pairs for dense batches: which entries are nodes, bool (graphs, capacity per graph); and the
            entry of every node, int64 (nodes,), arbitrary for padding.
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
        """Checks that ``size`` rows include one for the padding; without it, a kernel would end the process.

        Raises:
            RuntimeError: indices of the padding may be ``size`` or greater.
        """
        greatest = self._greatest_of(index)
        if greatest is not None and size <= greatest:
            raise RuntimeError(
                f"capture pads batches, so nodes or edges have numbers of up to {greatest}, which index a "
                f"tensor of {size} rows. Put the tensor into the batch, or use PyG's or DGL's pooling"
            )

    def structure(self, key: object, options: Hashable, build: Callable[[], Any]) -> Any:
        """The structure of a graph object, built once per run."""
        found = self._structures.get((id(key), options))
        if found is None:
            found = self._structures[id(key), options] = (key, build())  # stores the key: its id stays unique
        return found[1]


def current() -> StepRun | None:
    """The run that this thread executes; None outside of a recorded step."""
    run: StepRun | None = _get(_RUN)
    return run


def running(run: StepRun) -> contextlib.AbstractContextManager[None]:
    """Context in which ``run`` is the current run of this thread."""
    return _stashed(_RUN, run)


def drops() -> bool:
    """Whether attention dropout is active. It is off while two runs of a step are compared."""
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
    """Stores an object in PyTorch's thread-local state, which releases it once, after its last use."""
    if _takes_no_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _takes_no_reference() -> bool:
    """Whether PyTorch takes no reference to such an object but releases one, as versions before 2.12 do."""
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
