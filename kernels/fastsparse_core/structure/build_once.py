"""Results that are built once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastsparse_core import recorded
from fastsparse_core.locks import ForkSafeLock

_T = TypeVar("_T")


class BuiltOnce:
    """Named results, each built once; safe to use from several threads."""

    _lock: ForkSafeLock | None = None  # made when it is needed: most structures of a batch have none

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}

    @property
    def lock(self) -> ForkSafeLock:
        """What is held while a result is built; of a structure's locks that of its `_built` comes first."""
        # If several threads come at once, all use the result of the first.
        lock: ForkSafeLock = self._lock or self.__dict__.setdefault("_lock", ForkSafeLock())
        return lock

    def get(self, key: Any, build: Callable[[], _T]) -> _T:
        """The result of that name; ``build`` makes it the first time, and must not return None.

        Raises:
            RuntimeError: it would have to be built while a CUDA graph is captured.
        """
        result = self.results.get(key)
        if result is None:
            if torch.compiler.is_compiling():
                return build()  # a trace cannot use locks, and its result belongs to the graph
            with self.lock:
                result = self.results.get(key)
                if result is None:
                    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                        # What a captured graph records is not computed yet: kept, it would be read too early.
                        raise RuntimeError(
                            f"{key}: must be built before a CUDA graph is captured; run the model once, "
                            "forward and backward, before the capture, or call Adjacency.prepare() where "
                            "edges have no values and no bias"
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
    """Results of a structure that lives in one execution of a step: recorded with it, in its order."""

    def get(self, key: Any, build: Callable[[], _T]) -> _T:
        """As of `BuiltOnce`; while a CUDA graph is captured too."""
        result: _T | None = self.results.get(key)
        if result is None:
            with torch.inference_mode(False):
                result = self.results[key] = build()
        return result


def built_results() -> BuiltOnce:
    """Where a structure that is made now keeps what is built of it."""
    return BuiltOnce() if recorded.current() is None else BuiltInRun()
