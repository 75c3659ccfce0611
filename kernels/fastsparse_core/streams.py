"""Runs work on separate CUDA streams, and in branches of CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def on_stream(stream: torch.cuda.Stream, job: Callable[[], _T]) -> _T:
    """Runs a job on another stream, after the earlier and before the later work of the current stream.

    For example, runs before a capture must use the stream of the capture, because autograd remembers the
    streams of a run.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = job()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def fork(job: Callable[[], _T], like: Tensor) -> Callable[[], _T]:
    """Starts a job on a separate stream. The returned function waits for the job and returns its result.

    In a CUDA graph that is being recorded, the job becomes a parallel branch, so that small kernels share the
    GPU. Otherwise the job runs immediately on the current stream.

    Args:
        job: function without arguments. It must not read memory that the caller may free before the caller
            waits.
        like: a tensor on the device of the job.
    """
    if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        result = job()
        return lambda: result
    main = torch.cuda.current_stream(like.device)
    side = _branch(main.device_index, main.cuda_stream)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            result = job()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # raised if the job has ended the capture
            main.wait_stream(side)
        raise

    def join() -> _T:
        main.wait_stream(side)
        return result

    return join


@functools.cache
def _branch(device: int, stream: int) -> torch.cuda.Stream:
    """The stream for branches of graphs that are recorded on ``stream``; the same in every call.

    More streams would take more memory, because cuBLAS allocates a workspace per stream. Graphs that are
    recorded on different streams may be replayed at the same time, so they do not share a stream.
    """
    while (branch := torch.cuda.Stream(device)).cuda_stream == stream:
        pass
    return branch
