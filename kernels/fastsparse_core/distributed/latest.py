"""What was fetched for a tensor, kept until another one comes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Latest(Generic[T]):
    """A result for the last tensor that was asked about, as long as it lives and is not edited.

    Where one rank's tensor changes, as an object or in place, all must: what is made is a collective.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._stamp: Hashable = None
        #: None: nothing is kept.
        self.result: T | None = None

    def get(self, of: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the kept result; makes a new one if ``of``, its version or ``key`` has changed."""
        if of.is_inference():  # it has no version counter, so an edit could not be detected
            return make()
        stamp = (of._version, key)
        if self.result is None or self._of is None or self._of() is not of or self._stamp != stamp:
            self.result = None  # its memory is free before the next one's is taken
            with torch.inference_mode(False):
                self.result = make()
            self._of, self._stamp = weakref.ref(of), stamp
        return self.result
