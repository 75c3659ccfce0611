"""Lengths of the pieces into which rows and windows are cut: long, but enough pieces must fill the GPU."""

from __future__ import annotations

from fastsparse_core.gpu import GpuProfile

#: Largest number of entries of an edge group of ssd, for most structures. ssd sums this number of entries in
#: fixed point at a time.
SHORT_EDGE_GROUP = 128


def slice_length(num_edges: int, gpu: GpuProfile) -> int:
    """Longest slice of a CSR row, in entries: a power of two from 32 to 1024.

    Small graphs need short slices to fill the GPU. From a few million edges on, slices have 512 entries:
    their partial results cost little (two rows are written and read per 512 gathered rows). From 50 million
    edges on, slices of 1024 entries are faster. Lengths up to 128 are rounded up to a power of two (spmm on
    the graph github, an H200, 128 features: 0.050 ms with 32, 0.0475 ms with 64).
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
    """Longest slice of a window for sddmm, in blocks of 16 vectors: 8, 16 or 64.

    Shorter than for spmm, because slices of sddmm have no partial results.
    """
    if num_blocks < 50_000:
        return 8
    return 16 if num_blocks < 200_000 else 64


def run_blocks(num_blocks: int, gpu: GpuProfile) -> int:
    """Number of blocks in a run of short windows: up to 16, if the GPU has a run for every resident warp."""
    return power_of_two(num_blocks // gpu.resident_warps, 1, 16)


def sddmm_run_blocks(num_blocks: int, gpu: GpuProfile) -> int:
    """Number of blocks in a run for sddmm: up to 8, if every resident warp gets at least 4 runs.

    Shorter than for spmm, because runs save less.
    """
    return power_of_two(num_blocks // (4 * gpu.resident_warps), 1, 8)


def edge_group_length(num_edges: int, num_dst: int, gpu: GpuProfile) -> int:
    """Longest edge group of ssd, in entries: `SHORT_EDGE_GROUP` (128) or 1024.

    Shorter groups would fill the GPU better on small structures, but their partial results cost more (graph
    github on an H200, k = 8: 0.032 ms with 128 entries, 0.048 ms with 32). If most rows have several groups
    of 128 entries, longer groups are faster for the same reason (reddit, k = 32: 3.93 ms with 128, 3.18 ms
    with 512, 2.93 ms with 1024). If few rows have several groups, long groups are slower (igb-small, k = 64:
    1.34 ms with 128, 1.50 ms with 1024).
    """
    long = num_edges >= gpu.long_group_edges and num_edges >= gpu.long_group_rows * num_dst
    return 8 * SHORT_EDGE_GROUP if long else SHORT_EDGE_GROUP


def power_of_two(target: int, least: int, most: int) -> int:
    """Largest power of two up to ``target``, clamped to ``least`` and ``most``, which are powers of two."""
    return min(max(1 << max(target, 1).bit_length() - 1, least), most)
