"""Locks that a forked process can acquire, even if another thread held them in the parent process."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType


class ForkSafeLock:
    """A reentrant lock; a context manager.

    A fork copies a held lock, but not the thread that would release it, so a child process could wait
    forever. Therefore the child gets new locks. If another thread was building a structure during the fork,
    the child builds the structure again.
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
        """Replaces the lock, unless the forking thread itself holds it and will release it."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock = threading.RLock()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
