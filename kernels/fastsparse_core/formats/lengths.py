"""Lengths of the pieces into which rows and windows are cut: long ones, but enough of them for a GPU."""

from __future__ import annotations

from fastsparse_core.gpu import GpuProfile

#: Largest number of entries of an edge group, for most structures: ssd sums this many in fixed point at a
#: time.
SHORT_EDGE_GROUP = 128


def slice_length(num_edges: int, gpu: GpuProfile) -> int:
    """Longest slice of a CSR row, in entries: a power of two from 32 to 1024.

    Small graphs need short slices to fill the GPU. From a few million edges on, slices of 512 entries are
    used: their partial results cost little (two rows are written and read per 512 gathered rows). From 50
    million edges on, 1024 entries cost less. Lengths up to 128 are rounded up (github on an H200, F = 128:
    0.050 ms with 32, 0.0475 with 64).
    """
    target = num_edges // gpu.resident_groups
    if target <= 128:
        return power_of_two(2 * target - 1, 32, 128)
    return power_of_two(target, 32, 512 if num_edges < 50_000_000 else 1024)


def slice_blocks(num_blocks: int, gpu: GpuProfile) -> int:
    """Longest slice of a window, in blocks of 16 vectors: a power of two from 32 to 256."""
    least = 32 if num_blocks < 90_000 else 64
    return power_of_two(num_blocks // (2 * gpu.resident_warps), least, 256)


def sddmm_slice_blocks(num_blocks: int) -> int:
    """Longest slice of a window for sddmm, in blocks: 8 to 64. Slices of sddmm have no partial results."""
    if num_blocks < 50_000:
        return 8
    return 16 if num_blocks < 200_000 else 64


def run_blocks(num_blocks: int, gpu: GpuProfile) -> int:
    """Number of blocks in a run of short windows: up to 16, if the runs then still fill the GPU."""
    return power_of_two(num_blocks // gpu.resident_warps, 1, 16)


def sddmm_run_blocks(num_blocks: int, gpu: GpuProfile) -> int:
    """Number of blocks in a run for sddmm, where runs save less: up to 8, if every warp still gets a run."""
    return power_of_two(num_blocks // (4 * gpu.resident_warps), 1, 8)


def edge_group_length(num_edges: int, num_dst: int, gpu: GpuProfile) -> int:
    """Longest edge group of ssd, in entries: `SHORT_EDGE_GROUP`, or 8 times that.

    Shorter groups would fill the GPU better on small structures, but their partial results cost more (github
    on an H200, k = 8: 0.032 ms with 128, 0.048 with 32). If most rows have several groups of 128, longer
    groups are faster for the same reason (reddit, k = 32: 3.93 ms with 128, 3.18 with 512, 2.93 with 1024).
    If few rows have several groups, long groups are slower (igb-small, k = 64: 1.34 ms with 128, 1.50 with
    1024).
    """
    long = num_edges >= gpu.long_group_edges and num_edges >= gpu.long_group_rows * num_dst
    return 8 * SHORT_EDGE_GROUP if long else SHORT_EDGE_GROUP


def power_of_two(target: int, least: int, most: int) -> int:
    """Largest power of two up to ``target``, clamped to ``least`` and ``most``, which are powers of two."""
    return min(max(1 << max(target, 1).bit_length() - 1, least), most)
