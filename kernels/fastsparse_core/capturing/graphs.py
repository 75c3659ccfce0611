"""CUDA graphs: where they are recorded, the memory that they share, and what a failure leaves behind."""

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
    """Records a job as a CUDA graph, and what it returns.

    Args:
        job: called once, on that stream.
        stream: one that the job ran on before: autograd would wait for another one.
        options: of ``torch.cuda.graph``.

    Raises:
        Exception: what the job raised; or a warning, that it gives the GPU nothing to do.
    """
    graph = torch.cuda.CUDAGraph()
    options.setdefault("pool", torch.cuda.graph_pool_handle())
    failure: Exception | None = None
    try:
        # The stream is restored here because `torch.cuda.graph` does not restore it if recording fails.
        with warnings.catch_warnings(), torch.cuda.stream(torch.cuda.current_stream()):
            # An error instead of PyTorch's warning: the step ran on the CPU, so its replays would do nothing.
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
    """Ends what PyTorch does not end where a recording was made invalid, as by ``loss.item()``.

    The allocator would take the pool for one that is recorded to (a second recording there fails, and memory
    is looked up through the graph that is gone). Before PyTorch 2.12 the generator of random numbers would
    believe that a graph is recorded, and refuse all draws: the next recording that succeeds ends that.
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
    """Where a function is recorded: one stream, and memory that all of its graphs share.

    Graphs overwrite each other's results in that memory, so the caller copies what it needs right after each
    replay.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Whether work there can be recorded."""
        return device.type == "cuda"

    @staticmethod
    def is_recording() -> bool:
        """Whether a graph is being recorded on the current stream."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def beside(self, job: Callable[[], _T]) -> _T:
        """Runs a job on the stream of the recordings, because autograd remembers streams; see `on_stream`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return on_stream(self._stream, job)

    def record(self, job: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
        """Records a job that `beside` ran before; returns a function that replays it, and the job's result.

        Raises:
            Exception: see :func:`record`.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        device = torch.device("cuda", self._stream.device_index)
        # Threads of loaders may allocate memory at the same time.
        options = {"capture_error_mode": "thread_local"}
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # PyTorch frees a pool with its last graph and then refuses its handle, so this graph is kept.
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
        """Graphs that are recorded from now on share no memory with earlier ones."""
        self._pool = self._keeper = None
