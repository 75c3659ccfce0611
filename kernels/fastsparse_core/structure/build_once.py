"""Results that are built once and cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastsparse_core import recorded
from fastsparse_core.locks import ForkSafeLock

_T = TypeVar("_T")


class BuiltOnce:
    """Named results, each built once; thread-safe."""

    _lock: ForkSafeLock | None = None  # made at first use, because most structures of batches never need it

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}

    @property
    def lock(self) -> ForkSafeLock:
        """Lock that is held while a result is built.

        An Adjacency has several of these locks. To avoid deadlocks, take the lock of `_built` first.
        """
        # `setdefault` is atomic: if several threads call it at once, all get the same lock.
        lock: ForkSafeLock = self._lock or self.__dict__.setdefault("_lock", ForkSafeLock())
        return lock

    def get(self, key: Any, build: Callable[[], _T]) -> _T:
        """The result with the name ``key``. The first call makes it with ``build``.

        Args:
            key: name of the result.
            build: function that computes the result and must not return None.

        Raises:
            RuntimeError: the result would have to be built while a CUDA graph is captured.
        """
        result = self.results.get(key)
        if result is None:
            if torch.compiler.is_compiling():
                return build()  # traced code cannot use locks, and this result belongs to the traced graph
            with self.lock:
                result = self.results.get(key)
                if result is None:
                    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                        # A capture records kernels without running them, so a cached result would be read
                        # before it is computed.
                        raise RuntimeError(
                            f"{key!r} of the converted graph must be built before a CUDA graph is captured; "
                            "run the model once, forward and backward, before the capture, or if edges have "
                            "no values and no bias, call Adjacency.prepare()"
                        )
                    if not torch.is_inference_mode_enabled():
                        result = self.results[key] = build()
                        return result
                    # A model may be evaluated before it is trained, so cached tensors must also support
                    # autograd.
                    with torch.inference_mode(False):
                        result = self.results[key] = build()
        return result


class BuiltInRun(BuiltOnce):
    """Results of a structure that exists only in one run of a captured step.

    They may be built during the capture, because every replay of the CUDA graph computes them again.
    """

    def get(self, key: Any, build: Callable[[], _T]) -> _T:
        """Like `BuiltOnce.get`, but also allowed while a CUDA graph is captured."""
        result: _T | None = self.results.get(key)
        if result is None:
            with torch.inference_mode(False):
                result = self.results[key] = build()
        return result


def built_results() -> BuiltOnce:
    """Makes the store of results for a new structure."""
    return BuiltOnce() if recorded.current() is None else BuiltInRun()
