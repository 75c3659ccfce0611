"""Gathers rows of a table in host memory with host threads, and sends them to a GPU piece by piece.

A GPU that reads random rows of a large table over PCIe waits for address translations. In a virtual machine
with an H200 and rows of 256 bytes, the GPU read 51 GB/s from a table of 512 MB, but only 7 GB/s from a table
of 27 GB. From the larger table, 15 host threads gathered and sent 24 GB/s, or 32 GB/s in ascending order of
rows. Plain copies over PCIe reach 54 GB/s.
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

#: Number of bytes that are sent at a time. Of the sizes from 256 KiB to 4 MiB, 1 MiB was the fastest, by up
#: to a quarter.
_PIECE = 2**20
_MOST_THREADS = 32
#: Largest number of rows, and of bytes, that are gathered in a trial.
_TRIAL_ROWS, _TRIAL_BYTES = 2**18, 2**26
#: Placeholder for rows that are not needed; it sorts after all row numbers.
_LAST = 2**63 - 1

_local = threading.local()


def threads_of_host() -> int:
    """Number of threads that gather rows in this process, 1 to 32.

    All processes that a launcher such as torchrun started on the machine divide the cores equally. Each
    leaves one core to its main thread.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(cores // max(processes, 1) - 1, 1), _MOST_THREADS)


class Gather:
    """Rows that are being gathered and sent to a GPU.

    Args:
        sending: future that is done when all pieces are enqueued.
        sent: event that is recorded after the last piece.
        device: device that gets the rows.
    """

    def __init__(self, sending: Future[None], sent: torch.cuda.Event, device: torch.device) -> None:
        self._sending, self._sent, self._device = sending, sent, device

    def wait(self) -> None:
        """Makes the current stream wait for the rows, and the host until the last piece is enqueued."""
        self._sending.result()
        torch.cuda.current_stream(self._device).wait_event(self._sent)


@contextlib.contextmanager
def deferred() -> Iterator[list[Gather]]:
    """Context in which `HostRows` returns to this thread before the rows have arrived.

    The context yields a list of the gathers that were started. Call ``wait`` on each before using its rows.
    """
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
        # A single worker, because each gather already uses all threads.
        self._worker = ThreadPoolExecutor(1, "fastsparse-rows")
        #: Page-locked buffers with the events after which they may be overwritten. One is filled while the
        #: other is sent.
        self._staging: list[tuple[Tensor, torch.cuda.Event]] = []

    def take(self, table: Tensor, index: Tensor, *, defers: bool = True) -> Tensor:
        """Gathers rows of a contiguous table on the CPU; the result is on the device.

        Args:
            table: (N, ...).
            index: int64 (M,), on the device.
            defers: if True, returns inside of `deferred` before the rows have arrived.

        Returns:
            The rows, (M, ...).
        """
        out = torch.empty(index.numel(), *table.shape[1:], dtype=table.dtype, device=self._device)
        if out.numel():
            self.complete(table, index, out, None, defers=defers)
        return out

    def complete(
        self, table: Tensor, index: Tensor, out: Tensor, lacks: Tensor | None, *, defers: bool = True
    ) -> None:
        """Like `take`, but writes into a result that may have some of the rows already.

        Args:
            table: (N, ...).
            index: int64 (M,), on the device.
            out: (M, ...), on the device.
            lacks: True for each missing row, bool (M,); None: all rows are missing.
            defers: if True, returns inside of `deferred` before the rows have arrived.
        """
        # The missing rows come first, in ascending order, because the host gathers them faster in this order.
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
        """Gathers and sends the rows, in the worker thread."""
        known.synchronize()
        self._stream.wait_event(known)  # earlier work of the caller may still use the memory of `out`
        count = int(numbers[-1])
        # In inference mode, both ordinary and inference tensors may be written to.
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
        """Page-locked memory of at least ``size`` bytes that no copy to the GPU reads any more."""
        if len(self._staging) == 2:
            memory, empty = self._staging.pop(0)
            empty.synchronize()
            if memory.nbytes >= size:
                return memory
        return torch.empty(size + size // 8, dtype=torch.uint8, pin_memory=True)

    def rate(self, table: Tensor) -> float:
        """Measures the rate at which random rows of a table are gathered and sent, in bytes per second."""
        return measured_rate(lambda index: self.take(table, index, defers=False), table, self._device)


def measured_rate(take: Callable[[Tensor], Tensor], table: Tensor, device: torch.device) -> float:
    """Measures the rate at which a function gathers random rows of a table, in bytes per second.

    The result is the rate of the fastest of 5 trials, because the first ones allocate memory.

    Args:
        take: function that gathers rows.
        table: (N, ...), not empty.
        device: device of the index and of the rows.
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
