"""Tables that the processes of a machine share: rows divided over their GPUs, or one table on the host."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Number of bytes that are copied to a GPU at a time.
_BYTES_AT_ONCE = 2**26
#: Folder on Linux whose files are stored in memory.
_MEMORY_FILES = Path("/dev/shm")


def check_processes(table: Tensor) -> None:
    """Raises an error if the processes cannot share a table. Collective.

    Args:
        table: the table to share.

    Raises:
        ValueError: torch.distributed is not initialized, the processes are on several machines, or their
            tables differ in shape or dtype.
    """
    if not dist.is_initialized():
        raise ValueError(
            "shared=True: expected an initialized torch.distributed process group, got none; start the "
            "script with torchrun and call torch.distributed.init_process_group() first, or use shared=False"
        )
    machine = socket.gethostname(), _boot_id()
    tables = _all_gathered((machine, tuple(table.shape), table.dtype))
    machines = {each[0] for each in tables}
    if len(machines) > 1:
        raise ValueError(
            f"shared=True: expected processes of one machine, got {len(machines)}; across machines use "
            "cugraph-pyg with WholeGraph"
        )
    for rank, (_, shape, dtype) in enumerate(tables):
        if (shape, dtype) != tables[0][1:]:
            raise ValueError(
                f"table: expected the same table in every process, got {tables[0][1]} of {tables[0][2]} in "
                f"process 0 and {shape} of {dtype} in process {rank}"
            )


def divided_rows(table: Tensor, device: torch.device) -> tuple[Tensor, list[Any]]:
    """Divides a table over the GPUs of P processes. Collective.

    Row i of the table becomes row i // P of process i % P.

    Args:
        table: (N, ...) on the CPU.
        device: this process's GPU.

    Returns:
        The rows of this process, and the memory of every process, by rank. Keep the list of memory alive as
        long as kernels read from it.

    Raises:
        ValueError: the GPU cannot read the memory of another process's GPU.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    num_own = len(range(rank, table.size(0), size))
    part = torch.empty(num_own, *table.shape[1:], dtype=table.dtype, device=device)
    few = max(_BYTES_AT_ONCE // max(table[:1].nbytes, 1), 1)
    for begin in range(0, num_own, few):
        some = part[begin : begin + few]
        some.copy_(table[rank + begin * size :: size][: some.size(0)])
    torch.cuda.synchronize(device)
    own = part.untyped_storage()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    places = _all_gathered((uuid, own._share_cuda_() if part.numel() else None))
    here = [str(torch.cuda.get_device_properties(nth).uuid) for nth in range(torch.cuda.device_count())]
    storages: list[Any] = []
    for other, (its_uuid, shared) in enumerate(places):
        if its_uuid != uuid and (
            its_uuid not in here or not torch.cuda.can_device_access_peer(device, here.index(its_uuid))
        ):
            raise ValueError(
                f"shared=True: {device} cannot read the memory of process {other}'s GPU; every process must "
                "see all GPUs (CUDA_VISIBLE_DEVICES), and the GPUs must support peer access"
            )
        if other == rank or shared is None:
            storages.append(own)
        else:  # opened for this process's GPU, so that this GPU can read the other GPU's memory
            storages.append(torch.UntypedStorage._new_shared_cuda(device.index, *shared[1:]))
    dist.barrier()  # no process may end before all processes have opened its memory
    return part, storages


def mapped_table(table: Tensor) -> Tensor:
    """Copies a table to one file that all processes map into memory. Collective.

    Args:
        table: (N, ...) on the CPU.

    Returns:
        The mapped copy; ``table`` if it is empty.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    path = ""
    if rank == 0 and table.nbytes:
        has_space = _MEMORY_FILES.is_dir() and shutil.disk_usage(_MEMORY_FILES).free > 1.1 * table.nbytes
        file, path = tempfile.mkstemp(prefix="fastsparse-", dir=_MEMORY_FILES if has_space else None)
        os.truncate(file, table.nbytes)
        os.close(file)
    path = _all_gathered(path)[0]
    if not path:
        return table
    copy = torch.from_file(path, shared=True, size=table.numel(), dtype=table.dtype).view(table.shape)
    copy[rank::size] = table[rank::size]
    dist.barrier()
    if rank == 0:
        os.unlink(path)  # the memory is freed when the last process unmaps it
    return copy


def _all_gathered(thing: Any) -> list[Any]:
    """The objects of all processes, by rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def _boot_id() -> str:
    """Id of the machine's boot, which distinguishes machines with the same host name."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text() if path.is_file() else ""
