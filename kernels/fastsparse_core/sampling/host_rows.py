"""Rows of a table in the host's memory, gathered by the host's threads and sent to a GPU piece by piece.

A GPU that reads random rows of a large table over PCIe waits for translations of addresses: in a virtual
machine with an H200 it read 51 GB/s of rows of 256 bytes from 512 MB, 7 GB/s from 27 GB. 15 threads gathered
and sent 24 GB/s of them there, 32 in ascending order, 54 GB/s being what PCIe copies.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index

#: Bytes that are sent at a time: of 256 KiB to 4 MiB this was the fastest, by up to a quarter.
_PIECE = 2**20
_MOST_THREADS = 32
#: Rows, and bytes of rows, that are gathered in the trial.
_TRIAL_ROWS, _TRIAL_BYTES = 2**18, 2**26
#: In place of a row's number; sorts after all others.
_LAST = 2**63 - 1

_local = threading.local()


def threads_of_host() -> int:
    """Those that gather: for all cores but one, shared with the machine's other processes of a launcher."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores // max(processes, 1) - 1, 1), _MOST_THREADS)


class Gather:
    """Rows that are on their way.

    Args:
        sending: done when all pieces are enqueued.
        sent: the event behind them.
        device: where they go.
    """

    def __init__(self, sending: Future[None], sent: torch.cuda.Event, device: torch.device) -> None:
        self._sending, self._sent, self._device = sending, sent, device

    def wait(self) -> None:
        """Makes the current stream wait for them, and the host until the last are under way."""
        self._sending.result()
        torch.cuda.current_stream(self._device).wait_event(self._sent)


@contextlib.contextmanager
def deferred() -> Iterator[list[Gather]]:
    """Rows that this thread gathers in this context are there after the waits of what the list then holds."""
    before, gathers = getattr(_local, "gathers", None), list[Gather]()
    _local.gathers = gathers
    try:
        yield gathers
    finally:
        _local.gathers = before


class HostRows:
    """Gathers rows for one device.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = threads_of_host()
        self._stream = torch.cuda.Stream(device)
        # One gather at a time, which uses all threads.
        self._worker = ThreadPoolExecutor(1, "fastsparse-rows")
        #: Page-locked memory, and the events after which it may be written: one is filled, one is sent.
        self._staging: list[tuple[Tensor, torch.cuda.Event]] = []

    def take(self, table: Tensor, index: Tensor, *, defers: bool = True) -> Tensor:
        """Rows of a contiguous table on the CPU, on the device.

        Args:
            table: (N, ...).
            index: int64, on the device.
            defers: whether `deferred` counts.
        """
        out = torch.empty(index.numel(), *table.shape[1:], dtype=table.dtype, device=self._device)
        if out.numel():
            self.complete(table, index, out, None, defers=defers)
        return out

    def complete(
        self, table: Tensor, index: Tensor, out: Tensor, lacks: Tensor | None, *, defers: bool = True
    ) -> None:
        """As `take`, into a result that may have some of the rows already.

        Args:
            table: (N, ...).
            index: int64 (M,), on the device.
            out: (M, ...), on the device.
            lacks: bool (M,), which rows are to come; None: all.
            defers: whether `deferred` counts.
        """
        # In ascending order, which the host gathers faster, followed by the rows that are on the device.
        order = index if lacks is None else index.masked_fill(lacks.logical_not(), _LAST)
        order, places = order.sort()
        numbers = torch.empty(index.numel() + 1, dtype=torch.int64, pin_memory=True)
        numbers[-1] = index.numel()
        numbers[:-1].copy_(order, non_blocking=True)
        if lacks is not None:
            numbers[-1].copy_(lacks.sum(), non_blocking=True)
        known, sent = torch.cuda.Event(), torch.cuda.Event()
        known.record(torch.cuda.current_stream(self._device))
        out.record_stream(self._stream)
        places.record_stream(self._stream)
        job = self._worker.submit(self._send, table, numbers, out, places, known, sent)
        gather = Gather(job, sent, self._device)
        gathers: list[Gather] | None = getattr(_local, "gathers", None) if defers else None
        if gathers is None:
            gather.wait()
        else:
            gathers.append(gather)

    def _send(
        self,
        table: Tensor,
        numbers: Tensor,
        out: Tensor,
        places: Tensor,
        known: torch.cuda.Event,
        sent: torch.cuda.Event,
    ) -> None:
        """What the worker does."""
        known.synchronize()
        self._stream.wait_event(known)  # until then, other work may use the memory of the result
        count = int(numbers[-1])
        # In inference mode, all tensors may be written to, wherever they were created.
        with torch.cuda.stream(self._stream), torch.inference_mode():
            if count:
                rows = out.new_empty(count, *out.shape[1:])
                self._send_rows(table, numbers, rows)
                out.index_copy_(0, places[:count], rows)
        sent.record(self._stream)

    def _send_rows(self, table: Tensor, numbers: Tensor, out: Tensor) -> None:
        staging = self._workspace(out.nbytes)
        row_bytes = out[0].nbytes
        _C.gather_rows_of_host(
            table=table,
            index=numbers,
            staging=staging,
            out=out,
            num_rows=out.size(0),
            row_bytes=row_bytes,
            threads=self._threads,
            piece=max(_PIECE // row_bytes, 1),
            device=device_index(self._device),
            queue=self._stream.cuda_stream,
        )
        empty = torch.cuda.Event()
        empty.record(self._stream)
        self._staging.append((staging, empty))

    def _workspace(self, size: int) -> Tensor:
        """Page-locked memory that nothing is sent from any more."""
        if len(self._staging) == 2:
            memory, empty = self._staging.pop(0)
            empty.synchronize()
            if memory.nbytes >= size:
                return memory
        return torch.empty(size + size // 8, dtype=torch.uint8, pin_memory=True)

    def rate(self, table: Tensor) -> float:
        """Bytes per second of random rows, measured."""
        return measured_rate(lambda index: self.take(table, index, defers=False), table, self._device)


def measured_rate(take: Callable[[Tensor], Tensor], table: Tensor, device: torch.device) -> float:
    """Bytes per second of random rows of a table, the fastest time: the first ones set memory aside.

    Args:
        take: gives rows by their numbers.
        table: (N, ...), not empty.
        device: where numbers are and rows are wanted.
    """
    count = max(min(_TRIAL_ROWS, _TRIAL_BYTES // max(table[0].nbytes, 1)), 1)
    seconds = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        index = torch.randint(table.size(0), (count,), generator=generator).to(device)
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        take(index)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return count * table[0].nbytes / min(seconds)
