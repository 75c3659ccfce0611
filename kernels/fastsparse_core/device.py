"""Converts devices and streams to the integers that the extension expects, and checks devices."""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Callable
from pathlib import PurePosixPath

import torch

from fastsparse_core import _C

#: Function that returns the address of the current stream of a CUDA device, given the device's number. It is
#: private to PyTorch, but Triton uses it too. torch.cuda.current_stream builds a Python object in every call.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]

_HAS_CUDA_KERNELS = bool(_C.build_info()["cuda"])
#: Files of NVIDIA GPUs on Linux, one per GPU of the machine or container, and the driver in WSL.
_GPU_FILES = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so*")

#: Folder that contains /proc and /sys.
_ROOT = ""
#: Control groups: where they are mounted, the files with the limit and with the used bytes, and the name of
#: the page cache in `memory.stat`. The used bytes include this cache, which the kernel frees for tensors.
_CGROUP_V2 = ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = (
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def unusable_gpu() -> str:
    """Warning for a user whose GPU works in PyTorch, but this build has no CUDA kernels; otherwise "".

    ``torch.cuda.is_available()`` is not called, because it may initialise CUDA, after which a process cannot
    fork.
    """
    if _HAS_CUDA_KERNELS or torch.version.cuda is None:
        return ""
    if not torch.cuda.is_initialized() and not machine_has_gpu():
        return ""
    return (
        "this build of FastSparse has no CUDA kernels, so operators and layers reject tensors on the GPU. "
        "Get nvcc (`python -m pip install nvidia-cuda-nvcc nvidia-cuda-cccl`) and install FastSparse again "
        "(`python -m pip install --force-reinstall --no-deps --no-cache-dir fastsparse-gnn`); "
        "`python -m fastsparse_core.doctor` has the details"
    )


def machine_has_gpu() -> bool:
    """Returns True if the machine has a visible GPU, even if PyTorch was built without CUDA."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not is_hidden and any(map(glob.glob, _GPU_FILES))


def script_uses_gpu() -> bool:
    """Returns True if this process has initialized CUDA and this build has CUDA kernels."""
    return _HAS_CUDA_KERNELS and torch.cuda.is_initialized()


def usable_device(device: torch.device | str | int) -> torch.device:
    """Converts an argument ``device`` to a torch.device with an index.

    Raises:
        ValueError: PyTorch cannot use the device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device: expected a device that PyTorch can use here, got {device!r}: {reason}"
        ) from error


def device_index(device: torch.device) -> int:
    """Number of a CUDA device, or -1 for the CPU.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device, or it is a CUDA device but this build has
            no CUDA kernels.
    """
    if device.type == "cpu":
        return -1
    if device.type != "cuda":
        raise ValueError(
            f"device: expected a CPU or CUDA tensor, got one on {device}; move it with .to('cuda')"
        )
    if not _HAS_CUDA_KERNELS:
        raise ValueError(
            "device: fastsparse_core was built without CUDA kernels, so tensors must be on the CPU; "
            "`python -m fastsparse_core.doctor` says how to build them"
        )
    return torch.cuda.current_device() if device.index is None else device.index


def queue(index: int) -> int:
    """Address of the current CUDA stream of device ``index``; for the CPU (-1), the number of threads."""
    return torch.get_num_threads() if index < 0 else current_stream(index)


def place_of(device: torch.device) -> tuple[int, int]:
    """The arguments ``device`` and ``queue`` of the extension: results of `device_index` and of `queue`."""
    if device.type == "cpu":
        return -1, torch.get_num_threads()
    index = device_index(device)
    return index, current_stream(index)


def free_host_memory() -> float:
    """Bytes of host memory that new tensors can take, including the page cache; infinity if unknown.

    The result is limited by the machine and by the process's control groups, in which containers and job
    schedulers set limits. A group's limit applies to the groups in it, too.
    """
    free = _number("/proc/meminfo", "MemAvailable:") * 1024
    with contextlib.suppress(OSError), open(f"{_ROOT}/proc/self/cgroup", encoding="utf-8") as groups:
        for line in groups:
            _, controllers, path = line.rstrip().split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            mount, maximum, current, cache = _CGROUP_V1 if controllers else _CGROUP_V2
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                folder = f"{mount}{group}"
                used = _number(f"{folder}/{current}", absent=0)
                cached = _number(f"{folder}/memory.stat", cache, absent=0)
                free = min(free, max(0, _number(f"{folder}/{maximum}") - used + cached))
    return free


def _number(path: str, name: str = "", absent: float = math.inf) -> float:
    """Returns the number after a name in a file, or the file's only number; ``absent`` if there is none."""
    with contextlib.suppress(OSError, ValueError), open(f"{_ROOT}{path}", encoding="ascii") as lines:
        for line in lines:
            first, *rest = line.split()
            if first == name or not name:
                return float(rest[0] if name else first)
    return absent
