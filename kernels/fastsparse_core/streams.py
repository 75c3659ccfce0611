"""Work on a separate stream: streams that wait for each other, and branches of CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def on_stream(stream: torch.cuda.Stream, job: Callable[[], _T]) -> _T:
    """Runs a job on a stream, between what the current stream did before and what it does next.

    PyTorch asks that what precedes a capture runs on the stream of the capture: autograd remembers streams.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = job()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def fork(job: Callable[[], _T], like: Tensor) -> Callable[[], _T]:
    """Starts a job on a separate stream. The returned function waits for it and returns its result.

    In a CUDA graph that is being recorded, the two are branches, which small kernels share the GPU by.
    Otherwise the job is done at once: the host launches one kernel after the other.

    Args:
        job: reads nothing that the caller may free before it has the result.
        like: a tensor of the device that it works on.
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
    """One for every stream that graphs are recorded on: cuBLAS sets memory aside for every stream it meets.

    Graphs of different streams may be replayed at once, and do better apart. PyTorch has 32 streams in all.
    """
    while (branch := torch.cuda.Stream(device)).cuda_stream == stream:
        pass
    return branch
