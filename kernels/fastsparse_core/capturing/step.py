"""Training steps as CUDA graphs, for models so small that the host is slower than the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from fastsparse_core import policy
from fastsparse_core.capturing.graphs import record
from fastsparse_core.log import info_once
from fastsparse_core.streams import on_stream

_logger = logging.getLogger("fastsparse_core")
_T = TypeVar("_T")

#: Calls after which every structure that a step uses is converted, those of one product a step too.
_WARM_UP = policy.REUSE + 4


class CapturedStep(Generic[_T]):
    """A training step that becomes one CUDA graph, which costs the host a single launch.

    The first calls run the step as it is, while structures are converted; then one call is recorded, and it
    and all later ones replay the record. What the step reads must stay where it is: the graph, the model and
    the tensors that the step was recorded with. New features or labels are written into those tensors
    (``x.copy_(...)``); what the host decides, such as a learning rate that is not a tensor or a mask of
    dropout on attention weights, does not change any more, so the latter is refused. PyTorch's own rules for
    CUDA graphs hold: no result may be read by the host within the step (no ``loss.item()``), and the
    optimizer must be capturable (``torch.optim.Adam(..., capturable=True)``).

    Where there is no GPU the step runs as it is. Where there is one, a step that gives it nothing to do is
    refused; of a step that works on both, replays repeat the GPU's part alone.

    Args:
        step: takes no arguments; its result, tensors in general, is overwritten by the next replay.
        warm_up: calls before the one that is recorded.
        stream: where the step runs until it is recorded; by default one of its own.

    Raises:
        TypeError: ``step`` cannot be called.
        ValueError: ``warm_up`` is not positive.
        RuntimeError: the step cannot be recorded, when it is called for the first time after ``warm_up``
            calls.

    Examples:
        >>> counter = torch.zeros(())
        >>> step = CapturedStep(lambda: counter.add_(1))
        >>> for _ in range(30):
        ...     result = step()
        >>> result.item()
        30.0
    """

    def __init__(
        self, step: Callable[[], _T], *, warm_up: int = _WARM_UP, stream: torch.cuda.Stream | None = None
    ) -> None:
        if not callable(step):
            raise TypeError(f"step: expected a function without arguments, got {type(step).__name__}")
        if warm_up < 1:
            raise ValueError(f"warm_up: expected at least 1, got {warm_up}")
        self._step = step
        self._warm_up = warm_up
        self._side = stream
        self.reset()

    def reset(self) -> None:
        """Forgets the record: after ``warm_up`` more calls the step is recorded as it is then."""
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: _T | None = None

    def __call__(self) -> _T:
        """Trains one step; returns the step's result."""
        if self._graph is None:
            if not torch.cuda.is_available():
                info_once(_logger, "CapturedStep: there is no GPU, so the step runs as it is")
                return self._step()
            if self._calls < self._warm_up:
                self._calls += 1
                if self._side is None:
                    self._side = torch.cuda.Stream()
                return on_stream(self._side, self._step)
            assert self._side is not None  # since there is a warm-up
            self._graph, self._result = self._record(self._side)
        self._graph.replay()
        return self._result  # type: ignore[return-value]

    def _record(self, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, _T]:
        try:
            return record(self._step, stream)
        except (RuntimeError, UserWarning) as failure:
            raise RuntimeError(
                f"step: cannot be recorded as a CUDA graph: {failure}; it must work on the GPU alone and "
                "read no results on the host (loss.item(), bool(mask.any())), and its optimizer must be "
                "capturable, as torch.optim.Adam(..., capturable=True)"
            ) from failure
