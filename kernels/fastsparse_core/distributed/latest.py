"""A cache for one result, which was computed from the last tensor that was passed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Latest(Generic[T]):
    """Caches the result for the last tensor, as long as that tensor exists and is not edited.

    Computing a result is a collective operation. So if one rank replaces or edits its tensor, all ranks must
    do so.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._stamp: Hashable = None
        #: None: nothing is cached.
        self.result: T | None = None

    def get(self, of: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached result; makes a new one if ``of``, its version or ``key`` has changed."""
        if of.is_inference():  # such tensors have no version counter, so edits cannot be detected
            return make()
        stamp = (of._version, key)
        if self.result is None or self._of is None or self._of() is not of or self._stamp != stamp:
            self.result = None  # frees its memory before the next result is allocated
            with torch.inference_mode(False):
                self.result = make()
            self._of, self._stamp = weakref.ref(of), stamp
        return self.result
