"""Rules: how many features of a row, and how many blocks, spmm's kernels gather at once."""

from __future__ import annotations

from fastsparse_core.gpu import GpuProfile
from fastsparse_core.policy.facts import Facts


def csr_tile(facts: Facts, item_size: int, gpu: GpuProfile, *, weighted: bool) -> int:
    """Number of features that the CSR kernel gathers per pass over the structure.

    Gathering is fastest with 128 bytes of a row, by eight lanes of 16 bytes. If reading the structure
    dominates a pass, because rows have few entries or entries have weights, float32 uses 256 bytes.
    """
    few_entries = facts.num_edges < 6 * facts.num_dst and facts.num_edges > gpu.few_edges
    return (256 if item_size == 4 and (weighted or few_entries) else 128) // item_size


def features_per_lane(width: int, item_size: int) -> int:
    """Number of features that a lane of flashsparse gathers: up to 16 bytes, and no more than a row needs."""
    most = 16 // item_size
    while most > 2 and (width % most or width <= 4 * most):
        most //= 2
    return most


def blocks_per_step(num_blocks: int, num_windows: int) -> int:
    """Number of blocks that a warp gathers at once: 2 if windows have several blocks, otherwise 1.

    With 1, more warps run at the same time.
    """
    return 2 if num_blocks >= 2.5 * num_windows else 1
