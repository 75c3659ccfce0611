"""A cache for one result: the result for the tensor of the last call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Latest(Generic[T]):
    """Caches the result for the tensor of the last call, until the tensor is edited.

    The function that computes the result is collective. So if one rank passes another tensor or edits its
    tensor, all ranks must do the same.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._stamp: Hashable = None
        #: None: nothing is cached.
        self.result: T | None = None

    def get(self, of: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached result, or ``make()`` if ``of``, its version or ``key`` has changed.

        Args:
            of: tensor that the result depends on.
            key: everything else that the result depends on.
            make: function that computes the result.
        """
        if of.is_inference():  # inference tensors have no version counter, so edits cannot be detected
            return make()
        stamp = (of._version, key)
        if self.result is None or self._of is None or self._of() is not of or self._stamp != stamp:
            self.result = None  # frees the old result's memory before the new result is allocated
            with torch.inference_mode(False):
                self.result = make()
            self._of, self._stamp = weakref.ref(of), stamp
        return self.result
