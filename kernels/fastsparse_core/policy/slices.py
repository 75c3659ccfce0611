"""Lengths of the pieces that rows and windows are cut into: as long as a GPU still gets enough of them."""

from __future__ import annotations

from fastsparse_core.policy import gpu


def slice_length(num_edges: int) -> int:
    """Longest slice of a CSR row, in entries: a power of two from 32 to 1024.

    Small graphs need short slices to fill the GPU; beyond a few million edges 512 entries cost next to
    nothing in partial results (two rows written and read per 512 gathered), beyond 50 million 1024 cost less.
    Up to 128 the length is rounded up (github on an H200, F = 128: 0.050 ms with 32, 0.0475 with 64).
    """
    target = num_edges // gpu.RESIDENT_GROUPS
    if target <= 128:
        return power_of_two(2 * target - 1, 32, 128)
    return power_of_two(target, 32, 512 if num_edges < 50_000_000 else 1024)


def slice_blocks(num_blocks: int) -> int:
    """Longest slice of a window, in blocks of 16 vectors: a power of two from 32 to 256."""
    least = 32 if num_blocks < 90_000 else 64
    return power_of_two(num_blocks // (2 * gpu.RESIDENT_WARPS), least, 256)


def sddmm_slice_blocks(num_blocks: int) -> int:
    """The same for sddmm, whose slices leave no partial results: 8 to 64, short on small structures."""
    if num_blocks < 50_000:
        return 8
    return 16 if num_blocks < 200_000 else 64


def run_blocks(num_blocks: int) -> int:
    """Blocks of a run of short windows: up to 16, as far as the GPU stays full."""
    return power_of_two(num_blocks // gpu.RESIDENT_WARPS, 1, 16)


def sddmm_run_blocks(num_blocks: int) -> int:
    """The same for sddmm, where joining saves less: up to 8, as far as every warp has some to take."""
    return power_of_two(num_blocks // (4 * gpu.RESIDENT_WARPS), 1, 8)


def power_of_two(target: int, least: int, most: int) -> int:
    """Greatest power of two up to ``target``, within bounds that are powers of two."""
    return min(max(1 << max(target, 1).bit_length() - 1, least), most)
