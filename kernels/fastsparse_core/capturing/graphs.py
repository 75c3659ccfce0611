"""Records CUDA graphs: the stream, the shared memory pool, and the cleanup after a failed recording."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastsparse_core.streams import on_stream

_T = TypeVar("_T")


def record(
    job: Callable[[], _T], stream: torch.cuda.Stream, **options: Any
) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Records a job as a CUDA graph; returns the graph and the job's result.

    Args:
        job: function without arguments, called once on ``stream``.
        stream: the stream on which the job ran before. If the job were recorded on another stream, autograd
            would wait for the earlier stream.
        options: options of ``torch.cuda.graph``.

    Raises:
        Exception: the error of the job, or PyTorch's warning if the job launches nothing on the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    options.setdefault("pool", torch.cuda.graph_pool_handle())
    failure: Exception | None = None
    try:
        # The stream is restored here because `torch.cuda.graph` does not restore it if recording fails.
        with warnings.catch_warnings(), torch.cuda.stream(torch.cuda.current_stream()):
            # If PyTorch warns, the step ran on the CPU, and replays would do nothing. So this is an error.
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            with torch.cuda.graph(graph, stream=stream, **options):
                try:
                    return graph, job()
                except Exception as error:
                    failure = error  # ending the capture fails too, and would hide this error
                    raise
    except Exception as error:
        _clean_up(stream, options["pool"])
        raise failure or error from None


def _clean_up(stream: torch.cuda.Stream, pool: Any) -> None:
    """Resets PyTorch's state after a recording that failed, for example because of ``loss.item()``.

    Without this, the allocator still allocates from the pool of the failed graph, and a second recording to
    this pool fails. Before PyTorch 2.12, the random number generator also still expects a recording and
    raises an error when it is used, until a recording succeeds. So an empty recording follows.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    with contextlib.suppress(Exception):  # fails if PyTorch has already ended the recording to the pool
        if end is not None:
            end(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
    with contextlib.suppress(Exception), torch.cuda.stream(torch.cuda.current_stream()):
        device = torch.device("cuda", stream.device_index)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.zeros(1, device=device)


class CudaGraphs:
    """Records the CUDA graphs of a function on one stream and in one memory pool.

    Graphs overwrite each other's results in the pool, so the caller copies the results right after each
    replay.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Returns whether CUDA graphs can be recorded on a device."""
        return device.type == "cuda"

    @staticmethod
    def is_recording() -> bool:
        """Returns whether a graph is being recorded on the current stream."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def beside(self, job: Callable[[], _T]) -> _T:
        """Runs a job on the stream of the recordings; see `on_stream` for the reason."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return on_stream(self._stream, job)

    def record(self, job: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
        """Records a job that `beside` ran before; returns a function that replays it, and the job's result.

        Raises:
            Exception: as :func:`record`.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        device = torch.device("cuda", self._stream.device_index)
        # Threads of loaders may allocate memory at the same time.
        options = {"capture_error_mode": "thread_local"}
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # PyTorch frees a pool together with its last graph, and later refuses the pool's handle. So this
            # graph is kept alive.
            self._keeper, _ = record(
                lambda: torch.zeros(1, device=device), self._stream, pool=self._pool, **options
            )
        try:
            graph, result = record(job, self._stream, pool=self._pool, **options)
        except Exception:
            self.forget_memory()
            raise
        return graph.replay, result

    def forget_memory(self) -> None:
        """Makes later graphs use a new memory pool, which they do not share with earlier graphs."""
        self._pool = self._keeper = None
