"""Rule: which kernel computes spmm."""

from __future__ import annotations

import torch

from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.gpu import GpuProfile
from fastsparse_core.log import warn_once
from fastsparse_core.policy.conversion import is_reused
from fastsparse_core.policy.facts import Choice, Facts
from fastsparse_core.policy.tiles import features_per_lane

_WHY_CSR = (
    "spmm runs as algorithm='csr': 'flashsparse' needs a GPU, float32, float16 or bfloat16, 8 features or "
    "more in rows of a multiple of 16 bytes, and at most 2^24 sources. With several heads, each needs a "
    "multiple of 64 features (for some widths, of 16 or 32). Pass algorithm='auto' to let FastSparse choose"
)
_WHY_NOT_DIRECT = (
    "spmm runs as algorithm='csr': 'tca' and 'hr' need a GPU, float16 or bfloat16, rows of a multiple of 16 "
    "bytes, and one value per edge. Pass algorithm='auto' to let FastSparse choose"
)

#: Shared memory of a thread block of the kernel in spmm_resident.cu, in bytes: for one row of the tile of x,
#: and for everything except the tile.
_RESIDENT_TILE_BYTES = 256
_RESIDENT_OTHER_BYTES = 16 * (512 + 8) + 16 * 128 * 8 + 512 * 4
#: With fewer windows of 8 rows per multiprocessor, flashsparse leaves most of a GPU idle: for a pruned matrix
#: of 2048 x 512 in float16 it takes 79 us, csr 34 us (docs/dev/choosing.md).
_FEW_WINDOWS = 4


def spmm_algorithm(
    facts: Facts,
    gpu: GpuProfile,
    algorithm: str,
    dtype: torch.dtype,
    width: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
) -> Choice:
    """Resolves ``"auto"``, and a request that this call does not support, to the name of a kernel.

    Args:
        facts: facts about the structure.
        gpu: profile of the GPU.
        algorithm: the caller's choice.
        dtype: dtype of the features.
        width: features per node.
        heads: number of values per edge; 1 if there are no values.
        aligned: whether features and result allow 16-byte accesses to whole rows.
        dense: whether values are stored as dense vectors, which only ``"flashsparse"`` reads.
    """
    if algorithm == "csr":
        return Choice(algorithm)
    if algorithm in ("tca", "hr"):
        if facts.is_cuda and dtype.itemsize == 2 and aligned and width > 0 and heads == 1:
            return Choice(algorithm)
        warn_once(_WHY_NOT_DIRECT)
        return Choice("csr")
    if not _flashsparse_fits(facts, dtype, width, heads, aligned):
        if algorithm == "flashsparse":
            warn_once(_WHY_CSR)
        return Choice("csr")
    if algorithm == "flashsparse" or dense:
        return Choice("flashsparse")
    if spmm_resident(facts, gpu, "csr", dtype, width, heads, aligned) or _has_few_windows(facts, gpu):
        return Choice("csr")
    if not facts.converted:
        converts = facts.can_convert and is_reused(facts)
        return Choice("csr", is_final=False, counts=True, converts=converts)
    # In float32 the CSR kernel gathers equally fast. flashsparse is faster only for narrow rows, or if the 8
    # rows of a window share enough sources.
    wins = dtype != torch.float32 or width <= gpu.narrow or facts.num_vectors <= gpu.shared * facts.num_edges
    return Choice("flashsparse" if wins else "csr")


def spmm_resident(
    facts: Facts,
    gpu: GpuProfile,
    algorithm: str,
    dtype: torch.dtype,
    width: int,
    heads: int,
    aligned: bool,
) -> bool:
    """Returns whether csr or tca gathers from a tile of all sources in shared memory (spmm_resident.cu).

    The conditions: the tile fits into the shared memory of a block, there are at least as many rows as
    sources, and a row of features takes at least half a tile (128 bytes) in float32, and more than that in 16
    bits. For rows of 128 bytes, tca is faster without the tile, from the L2 cache (9.0 us instead of 13.6 us
    on 512 x 512 with half of the entries kept; 12.4 us instead of 13.0 us on 2048 x 512 with a fifth). On
    pruned matrices with four times as many rows as sources, the tile makes csr and tca 1.1 to 1.9 times as
    fast. With as many rows as sources, csr becomes up to 1.3 times as fast, and tca 1.05 to 1.15 times except
    for rows of 256 entries (docs/dev/choosing.md).

    Args:
        facts: facts about the structure.
        gpu: profile of the GPU.
        algorithm: ``"csr"`` or ``"tca"``; other algorithms never use the tile.
        dtype: dtype of the features.
        width: features per node.
        heads: number of values per edge; 1 if there are no values.
        aligned: whether features allow 16-byte accesses to whole rows.
    """
    if algorithm not in ("csr", "tca") or not 0 < facts.num_src <= facts.num_dst:
        return False
    if not facts.is_cuda or dtype == torch.float64 or heads > 1 or not aligned:
        return False
    if facts.is_padded:  # the kernel divides the entries among blocks by their number, padding included
        return False
    tile_bytes = (facts.num_src + 1) * _RESIDENT_TILE_BYTES
    fits = tile_bytes + _RESIDENT_OTHER_BYTES <= gpu.shared_memory
    counted_in_32_bits = facts.num_edges + 16 * facts.num_dst < 2**31
    half_tile = _RESIDENT_TILE_BYTES // 2
    row_bytes = width * dtype.itemsize
    fills = row_bytes > half_tile or (row_bytes == half_tile and dtype == torch.float32)
    return fits and counted_in_32_bits and fills


def _flashsparse_fits(facts: Facts, dtype: torch.dtype, width: int, heads: int, aligned: bool) -> bool:
    if not facts.is_cuda or dtype == torch.float64 or not aligned or width < 8:
        return False
    if facts.num_src > MOST_COLUMNS:
        return False
    if heads > 1:
        tile = 8 * features_per_lane(width, dtype.itemsize)
        return (width // heads) % tile == 0
    return True


def _has_few_windows(facts: Facts, gpu: GpuProfile) -> bool:
    """Returns whether a few warps would process long windows in flashsparse while most of the GPU is idle."""
    return facts.num_dst < 8 * _FEW_WINDOWS * gpu.num_sms and facts.num_edges >= 8 * facts.num_dst
