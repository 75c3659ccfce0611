"""Tables of features, from which batches read rows. Tables that fit are in GPU memory, others on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.locks import ForkSafeLock
from fastsparse_core.log import info_once
from fastsparse_core.ops._autocast import version_of
from fastsparse_core.ops._operands import with_zeros_behind
from fastsparse_core.sampling.host_rows import HostRows, measured_rate
from fastsparse_core.sampling.shared_memory import check_processes, divided_rows, mapped_table

_logger = logging.getLogger("fastsparse_core")

#: Share of the GPU's free memory that a table may take; a larger table stays on the host.
_SHARE_OF_FREE = 0.5
#: For a table that is not page-locked: if host threads gather at least this number of bytes per second, they
#: gather the rows. Otherwise the GPU reads a page-locked copy, which takes as much host memory as the table.
#: An H200 behind an IOMMU read 8e9 bytes per second from 16 GiB of page-locked memory; the threads gathered
#: 2e10.
_ENOUGH = 8e9
#: Number of bytes that are copied at a time by `FeatureTable.keep`.
_BYTES_AT_ONCE = 2**26

#: table -> device -> (stamp of the table's content, function that returns rows of the table)
_copies: Any = WeakIdKeyDictionary()
#: table -> device -> ids of the rows that `FeatureTable.keep` copied to the device, ascending
_kept: Any = WeakIdKeyDictionary()
_host_rows: dict[torch.device, HostRows] = {}
#: Function (index, aligned) -> rows, with the arguments of `gather_on_cuda`.
_Take = Callable[[Tensor, bool], Tensor]
_lock = ForkSafeLock()


class FeatureTable:
    """A tensor with a row per node or edge, from which batches read rows.

    If ``device`` is a GPU, a table on the CPU is copied to the GPU once, unless it takes more than half of
    the GPU's free memory. For a larger table, either host threads gather rows and send them to the GPU, or
    the GPU reads rows from page-locked memory over PCIe. A trial measures the threads' rate. If the table is
    not page-locked, the GPU reads a page-locked copy. All FeatureTables of one tensor share the copy, which
    is freed with the tensor. After a write to the tensor through PyTorch, a new copy is made. Writes to
    inference tensors are not detected, because PyTorch does not count them.

    With ``shared``, the processes of `torchrun` on one machine store the table only once: each GPU stores its
    share of the rows and reads other rows from the other GPUs. Tables that are created later from the same
    tensor, such as those of a loader, use the shared rows too. :meth:`keep` copies rows that are read often
    to this GPU. On the CPU, all processes map one copy. Every process must create the table with the same
    content. After that, they read it without waiting for each other.

    Args:
        table: (N, ...), any dtype.
        device: device of the returned rows.
        aligned: if True, rows of 16-bit numbers that a GPU gathers are padded with zeros to multiples of 16
            bytes. The result is then a view that is not contiguous, which GraphSAGE's kernels read without a
            copy. Rows that host threads gather are always contiguous.
        shared: if True, the processes of `torch.distributed`, all on one machine, share the memory of the
            table. The table must be on the CPU; it may be a memory-mapped file.

    Raises:
        TypeError: ``table`` is not a tensor, or ``device`` is not a device.
        ValueError: ``table`` is on another GPU than ``device``; or it cannot be shared.

    Example:
        >>> import torch
        >>> from fastsparse_core.sampling import FeatureTable
        >>> features = FeatureTable(torch.eye(3), torch.device("cpu"))
        >>> features[torch.tensor([2, 0])]
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """

    def __init__(
        self, table: Tensor, device: torch.device, *, aligned: bool = False, shared: bool = False
    ) -> None:
        if not isinstance(table, Tensor):
            raise TypeError(f"table: expected a tensor with a row per node, got {type(table).__name__}")
        if not isinstance(device, torch.device):
            raise TypeError(f"device: expected a torch.device, got {device!r}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if table.is_cuda and table.device != device:
            raise ValueError(f"table: expected device cpu or {device}, got {table.device}; move it")
        self._table = table
        self._device = device
        self._aligned = aligned
        if shared:
            if table.is_cuda:
                raise ValueError(
                    f"table: expected a CPU tensor with shared=True, got {table.device}; pass table.cpu()"
                )
            check_processes(table)
            with torch.inference_mode(False):
                rows = _SharedRows(table.detach(), device)
            with _lock:
                _copies.setdefault(table, {})[device] = _stamp(table), rows.take

    def keep(self, rows: Tensor) -> None:
        """Copies some rows to the device, if the table stays on the host or is shared.

        All FeatureTables of the tensor use the copied rows. In addition to these rows, the device stores 4
        bytes per row of the whole table.

        Args:
            rows: int64 (num_rows,), distinct.
        """
        if self._table.device == self._device:
            return
        shared = _shared(_copies.get(self._table, {}).get(self._device))
        if shared is not None:
            shared.keep(rows)
            return
        with _lock:
            _kept.setdefault(self._table, {})[self._device] = rows.to(self._device).sort().values
            _copies.pop(self._table, None)

    def __getitem__(self, index: Tensor) -> Tensor:
        """The rows (M, ...) with the numbers ``index``, int64 (M,), on the device."""
        table = self._table
        if table.device != self._device or (
            self._device.type == "cpu" and self._device in _copies.get(table, ())
        ):
            return _placed(table, self._device)(index, self._aligned)
        if self._device.type == "cpu" or table.requires_grad or not table.is_contiguous():
            return table.index_select(0, index)
        return gather_on_cuda(table, index, self._aligned)


def gather_on_cuda(table: Tensor, index: Tensor, aligned: bool = False, **divided: Any) -> Tensor:
    """Gathers rows of a contiguous table, which is on the GPU of ``index`` or in page-locked host memory.

    For 510,000 rows of 100 float32 numbers on an H200, this function takes a third of the time of
    ``index_select``, which saved a tenth of a captured step on sampled neighbours.

    Args:
        table: (N, ...), any dtype.
        index: int64 (M,), on a GPU.
        aligned: as in `FeatureTable`.
        **divided: the other parts, if ``table`` is one part of a table that is divided over several GPUs;
            see ``GatherRowsArgs``.

    Returns:
        The rows, (M, ...).
    """
    num_rows, width = index.numel(), table.shape[1:].numel()
    missing = -width % 8 if aligned and table.dim() == 2 and table.itemsize == 2 else 0
    shape = (width + missing,) if missing else table.shape[1:]
    out = torch.empty(num_rows, *shape, dtype=table.dtype, device=index.device)
    row_bytes = width * table.itemsize
    device, stream = place_of(index.device)
    _C.gather_rows(
        table=table,
        index=index,
        out=out,
        num_rows=num_rows,
        row_bytes=row_bytes,
        out_row_bytes=row_bytes + missing * table.itemsize,
        **divided,
        device=device,
        queue=stream,
    )
    return with_zeros_behind(out, width) if missing else out


def _placed(table: Tensor, device: torch.device) -> _Take:
    """The cached function that gathers rows of a table on the CPU for a device; makes it if necessary."""
    stamp = _stamp(table)
    with _lock:
        by_device = _copies.setdefault(table, {})
        entry = by_device.get(device)
        if entry is not None and entry[0] == stamp:
            found: _Take = entry[1]
            return found
        if _shared(entry) is not None:
            raise RuntimeError(
                "table: was written to after it was shared; create the table again in every process"
            )
        by_device.pop(device, None)
        made = _place(table.detach(), device, _kept.get(table, {}).get(device))
        by_device[device] = (stamp, made)
        return made


def _stamp(table: Tensor) -> tuple[Any, ...]:
    """Properties of a table that change if the table is written to through PyTorch or gets other memory."""
    return version_of(table), table.data_ptr(), table.shape, table.dtype


def _shared(entry: tuple[Any, _Take] | None) -> _SharedRows | None:
    """The shared rows of an entry of `_copies`; None if the table is not shared."""
    owner = None if entry is None else getattr(entry[1], "__self__", None)
    return owner if isinstance(owner, _SharedRows) else None


def _place(table: Tensor, device: torch.device, kept: Tensor | None) -> _Take:
    free, _ = torch.cuda.mem_get_info(device)
    size = f"a table of {table.nbytes / 2**30:.2f} GiB"
    with torch.inference_mode(False):
        if table.nbytes <= _SHARE_OF_FREE * free:
            info_once(_logger, f"{size} is copied to {device}, and batches are gathered there")
            copy = table.to(device).contiguous()
            torch.cuda.current_stream(device).synchronize()
            return lambda index, aligned: gather_on_cuda(copy, index, aligned)
        table = table.contiguous()
        if table.numel():
            by_host = _host_rows.get(device) or HostRows(device)
            _host_rows[device] = by_host
            if kept is not None and kept.numel():
                info_once(
                    _logger,
                    f"{size} stays in host memory. Host threads gather its rows for {device}, except "
                    f"{kept.numel()} rows that are copied there",
                )
                return _KeptRows(table, kept, by_host).take
            rate = by_host.rate(table)
            if rate >= (_rate_on_cuda(table, device) if table.is_pinned() else _ENOUGH):
                info_once(_logger, f"{size} stays in host memory; host threads gather rows for {device}")
                return lambda index, _: by_host.take(table, index)
        info_once(_logger, f"{size} stays in page-locked memory of the host, which {device} reads over PCIe")
        locked = table if table.is_pinned() else table.pin_memory()
        return lambda index, aligned: gather_on_cuda(locked, index, aligned)


class _KeptRows:
    """Rows of a table in host memory, with copies of some rows on a device."""

    def __init__(self, table: Tensor, kept: Tensor, by_host: HostRows) -> None:
        self._table, self._by_host = table, by_host
        self._rows = table.new_empty(kept.numel(), *table.shape[1:], device=kept.device)
        few = max(_BYTES_AT_ONCE // table[0].nbytes, 1)
        for rows, part in zip(self._rows.split(few), kept.split(few), strict=True):
            rows.copy_(by_host.take(table, part, defers=False))
        self._place = torch.full((table.size(0),), -1, dtype=torch.int32, device=kept.device)
        self._place[kept] = torch.arange(kept.numel(), dtype=torch.int32, device=kept.device)
        torch.cuda.current_stream(kept.device).synchronize()  # other streams will read the rows

    def take(self, index: Tensor, _: bool) -> Tensor:
        place = self._place[index].long()
        lacks = place < 0
        out = gather_on_cuda(self._rows, place.clamp_(min=0))
        self._by_host.complete(self._table, index, out, lacks)
        return out


class _SharedRows:
    """Rows of one copy of a table that the processes of a machine share. Construction is collective.

    Args:
        table: the whole table, on the CPU, equal in all processes.
        device: device of the returned rows.
    """

    def __init__(self, table: Tensor, device: torch.device) -> None:
        self._num_rows, self._device = table.size(0), device
        self._divided: dict[str, Any] = {}
        if device.type == "cpu":
            self._rows = mapped_table(table)
            return
        if self._num_rows >= 2**32:
            raise ValueError(f"table: expected fewer than 2^32 rows with shared=True, got {self._num_rows}")
        self._rows, self._memory = divided_rows(table, device)
        addresses = torch.tensor([each.data_ptr() for each in self._memory], device=device)
        self._divided = {"parts": addresses, "num_parts": len(self._memory)}
        info_once(
            _logger,
            f"a table of {table.nbytes / 2**30:.2f} GiB is divided over {len(self._memory)} GPUs, which read "
            "each other's memory",
        )

    def take(self, index: Tensor, aligned: bool) -> Tensor:
        if self._device.type == "cpu":
            return self._rows.index_select(0, index)
        return gather_on_cuda(self._rows, index, aligned, **self._divided)

    def keep(self, rows: Tensor) -> None:
        """Copies some rows to this process's GPU, in addition to its share."""
        if self._device.type == "cpu":
            return
        with torch.inference_mode(False):
            rows = rows.to(self._device).sort().values
            place = torch.full((self._num_rows,), -1, dtype=torch.int32, device=self._device)
            place[rows] = torch.arange(rows.numel(), dtype=torch.int32, device=self._device)
            kept = self.take(rows, False)
            torch.cuda.current_stream(self._device).synchronize()  # other streams will read the rows
        self._divided = {**self._divided, "kept": kept if rows.numel() else None, "place": place}


def _rate_on_cuda(table: Tensor, device: torch.device) -> float:
    """Measures at how many bytes per second a GPU reads random rows of page-locked memory."""
    return measured_rate(lambda index: gather_on_cuda(table, index), table, device)
