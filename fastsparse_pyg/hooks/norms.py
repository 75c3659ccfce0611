"""PyG's normalisations by graph: rows that are read by `batch` have their gradients summed by segments.

PyTorch adds them up one by one: on the CPU, GraphNorm's backward pass takes 30 times as long as its forward
pass (400,000 rows of 64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fastsparse_core.ops._segment import find_segments, is_kept
from fastsparse_core.segment import rows_of
from fastsparse_pyg.hooks.functions import RowIndex, why_not

#: Those whose ``forward(x, batch, batch_size)`` reads rows that have gradients.
NORMS = ("GraphNorm", "InstanceNorm", "LayerNorm", "MeanSubtractionNorm", "PairNorm")


def call(self: Any, x: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`__call__` of a normalisation: a `batch` whose segments are kept comes to it as a `Batch`."""
    if type(batch) is Tensor and not why_not(x, batch, 0) and not batch.is_inference() and is_kept(batch):
        batch = batch.as_subclass(Batch)
    return Module.__call__(self, x, batch, *args, **kwargs)


class Batch(RowIndex):
    """The graph of every row: where PyTorch reads rows by it, their gradients are sums over segments."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes over `index_select` and indexing; everything else sees a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READS and not kwargs:
                x, index = args[0], args[-1]
                if isinstance(index, Batch) and (len(args) == 2 or args[1] == 0):
                    return _rows(func, x, index.as_subclass(Tensor), args[:-1])
            return func(*args, **(kwargs or {}))


def _rows(func: Callable[..., Any], x: Tensor, index: Tensor, before: tuple[Any, ...]) -> Any:
    if x.requires_grad and torch.is_grad_enabled() and not why_not(x, index, 0, rows=None):
        try:
            find_segments(index, None, x.size(0), index.numel())  # which checks the index
            return rows_of(x, index)
        except (TypeError, ValueError):
            pass
    return func(*before, index)


_READS = (Tensor.index_select, torch.index_select, Tensor.__getitem__)
