"""Which kernel computes spmm."""

from __future__ import annotations

import torch

from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.gpu import GpuProfile
from fastsparse_core.log import warn_once
from fastsparse_core.policy.conversion import is_reused
from fastsparse_core.policy.facts import Choice, Facts
from fastsparse_core.policy.tiles import features_per_lane

_WHY_CSR = (
    "spmm runs as algorithm='csr': 'flashsparse' needs a GPU, float32, float16 or bfloat16, rows of a "
    "multiple of 16 bytes, heads of a multiple of a tile, and at most 2^24 sources. Pass algorithm='auto' to "
    "let FastSparse choose"
)
_WHY_NOT_DIRECT = (
    "spmm runs as algorithm='csr': 'tca' and 'hr' need a GPU, float16 or bfloat16, rows of a multiple of 16 "
    "bytes, and one value per edge. Pass algorithm='auto' to let FastSparse choose"
)

#: Bytes of every source's row that a block of spmm keeps in shared memory where x has few rows, and what else
#: it keeps there: see spmm_resident.cu.
_RESIDENT_TILE_BYTES = 256
_RESIDENT_OTHER_BYTES = 16 * (512 + 8) + 16 * 128 * 8 + 512 * 4
#: Windows of 8 rows per multiprocessor below which flashsparse leaves most of a GPU idle: a pruned matrix of
#: 2048 x 512 in float16 takes it 79 us, and csr 34 (docs/dev/choosing.md).
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
        facts: of the structure.
        gpu: where.
        algorithm: as the caller asked.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features and result allow 16-byte accesses to whole rows.
        dense: values are dense vectors, which only ``"flashsparse"`` reads as they are.
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
    # In float32 the CSR kernel gathers as fast: tensor cores win by rows of up to 64 bytes, and by the rows
    # that 8 destinations share.
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
    """Whether csr or tca gathers from a tile of all sources in shared memory (spmm_resident.cu).

    That takes a GPU whose blocks have space for the tile, sources that rows gather several times, and
    features that fill half a tile in float32, in 16 bits more: tca gathers rows of 128 bytes from the L2 as
    fast (9.0 us against 13.6 on 512 x 512, half of it kept; 12.4 against 13.0 on 2048 x 512, a fifth). On
    pruned matrices with four times as many rows as sources both gain 1.1 to 1.9 times; with as many rows csr
    gains up to 1.3 times, tca 1.05 to 1.15 except for rows of 256 entries (docs/dev/choosing.md).

    Args:
        facts: of the structure.
        gpu: where.
        algorithm: ``"csr"`` or ``"tca"``; the others have no such form.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features allow 16-byte accesses to whole rows.
    """
    if algorithm not in ("csr", "tca") or not 0 < facts.num_src <= facts.num_dst:
        return False
    if not facts.is_cuda or dtype == torch.float64 or heads > 1 or not aligned:
        return False
    if facts.is_padded:  # its blocks share out the entries by their number
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
    """Whether flashsparse would leave most of a GPU idle, while few warps go through long windows."""
    return facts.num_dst < 8 * _FEW_WINDOWS * gpu.num_sms and facts.num_edges >= 8 * facts.num_dst
