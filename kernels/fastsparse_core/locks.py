"""Locks that a forked process finds open, whatever threads of its parent were doing."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkSafeLock:
    """A reentrant lock; a context manager.

    A fork copies a lock as it is, but not the thread that would release it: a child of a process whose other
    thread builds a structure would wait for ever. The child gets new locks instead. What was being built is
    not there in the child, so it builds it itself.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replaces what another thread may hold; the forking thread keeps and releases what it holds."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
