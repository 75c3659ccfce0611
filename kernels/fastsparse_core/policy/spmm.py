"""Which kernel computes spmm."""

from __future__ import annotations

import math

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
#: Shortest slice of a window, in entries at most.
_LEAST_SLICE = 32 * 16


def spmm_algorithm(
    facts: Facts,
    gpu: GpuProfile,
    algorithm: str,
    dtype: torch.dtype,
    width: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
    *,
    weighted: bool = True,
) -> Choice:
    """Resolves ``"auto"``, and a request that this call cannot serve, to the name of a kernel.

    Args:
        facts: of the structure.
        gpu: where.
        algorithm: as the caller asked.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features and result allow 16-byte accesses to whole rows.
        dense: values are dense vectors, which only ``"flashsparse"`` reads as they are.
        weighted: edges or sources have factors, which ``"tca"`` rounds to the dtype of the features.
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
    # Tensor cores straight from CSR look up nothing for an edge without a factor.
    takes_tca = dtype != torch.float32 and heads == 1 and not weighted
    resident = spmm_resident(facts, gpu, "csr", dtype, width, heads, aligned)
    if resident or _has_few_windows(facts, gpu, dtype, width, weighted):
        if dtype == torch.float32 and not weighted and _gathers_much_once(facts, gpu, width, resident):
            return Choice("flashsparse")
        if not takes_tca:
            # A conversion for other calls may come to pay.
            return Choice("csr", is_final=facts.converted or weighted or dtype != torch.float32)
        picked = _of_few_windows(facts, gpu, dtype, width, aligned, resident)
        if picked is not None:
            return picked
    if not facts.converted:
        direct = takes_tca and not resident and _spares_work_list(facts, gpu, width)
        converts = facts.can_convert and is_reused(facts)
        algorithm = "tca" if direct else "csr"
        lasts = not takes_tca or facts.has_row_split  # only a work list that is still to be built changes it
        return Choice(algorithm, is_final=False, counts=True, converts=converts, lasts=lasts)
    if dtype != torch.float32 or (width <= 64 and facts.num_edges < gpu.few_edges):
        return Choice("flashsparse")
    # In float32 the CSR kernel gathers as fast: tensor cores win by the rows that 8 destinations share, and
    # with rows of up to 64 bytes.
    if facts.num_edges < 4 * facts.num_dst and facts.num_edges < 1_000_000:
        return Choice("csr")
    if width <= gpu.narrow and facts.num_edges >= 4 * facts.num_dst:
        return Choice("flashsparse")
    return Choice("flashsparse" if facts.num_vectors <= gpu.shared * facts.num_edges else "csr")


def _of_few_windows(
    facts: Facts, gpu: GpuProfile, dtype: torch.dtype, width: int, aligned: bool, resident: bool
) -> Choice | None:
    """What takes 16-bit features without factors where windows or sources are few; None: as elsewhere."""
    # Of short rows the end counts as much as the sum: csr with its tile takes longer for a second tile of
    # features than flashsparse (10 entries, 256 features: 9.4 and 8.1 us where they are random).
    short_rows = width > 128 and facts.num_edges < gpu.short_row * facts.num_dst
    if facts.num_edges * width >= gpu.much_gathered_16_bit or (resident and short_rows):
        return None
    few_rows = _row_tiles(facts, width) <= gpu.few_row_tiles
    if resident:
        # Of long rows tca gathers from the L2, and is faster so.
        tile_in_tca = spmm_resident(facts, gpu, "tca", dtype, width, 1, aligned)
        return Choice("tca" if few_rows and not tile_in_tca else "csr")
    if not few_rows:
        return None
    if width <= 64:
        return Choice("tca")
    if not _spares_work_list(facts, gpu, width):
        return Choice("csr", is_final=not facts.deterministic)
    return Choice("csr" if is_reused(facts) else "tca", is_final=False, counts=True)


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

    That takes a GPU whose blocks have room for the tile, sources that rows gather several times, and features
    that fill half a tile in float32, in 16 bits more: tca gathers rows of 128 bytes from the L2 as fast (9.0
    us against 13.6 on 512 x 512, half of it kept; 12.4 against 13.0 on 2048 x 512, a fifth). On pruned
    matrices with four times as many rows as sources both gain 1.1 to 1.9 times; with as many rows csr gains
    up to 1.3 times, tca 1.05 to 1.15 but for rows of 256 entries
    (docs/dev/choosing.md).

    Args:
        facts: of the structure.
        gpu: where.
        algorithm: ``"csr"`` or ``"tca"``; the others have no such form.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features allow 16-byte accesses to whole rows.
    """
    long_rows = facts.num_edges > gpu.long_row * facts.num_dst
    rows_per_source = {"csr": 1, "tca": 2 if long_rows else 1}.get(algorithm, 0)
    if not 0 < rows_per_source * facts.num_src <= facts.num_dst:
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


def _has_few_windows(facts: Facts, gpu: GpuProfile, dtype: torch.dtype, width: int, weighted: bool) -> bool:
    """Whether flashsparse would leave most of a GPU idle, while few warps go through long windows."""
    if dtype == torch.float32 and width <= gpu.narrow and not weighted and facts.num_dst >= gpu.narrow_rows:
        return False
    tiles = math.ceil(width / (8 * features_per_lane(width, dtype.itemsize)))
    most_slices = facts.num_dst / 8 + facts.num_edges / _LEAST_SLICE
    return most_slices * tiles < gpu.resident_warps and facts.num_edges >= 8 * facts.num_dst


def _gathers_much_once(facts: Facts, gpu: GpuProfile, width: int, resident: bool) -> bool:
    """Whether few windows do not matter in float32, so many gathers does a converted structure save.

    At 256 features an H200 takes 34.5 us with csr, which gathers from shared memory, and 23.0 us with
    flashsparse on a pruned matrix of 2048 x 512, half of it kept; on one of 512 x 2048, a fifth of it kept,
    whose sources do not fit, 30.6 and 25.7 us.
    """
    much = gpu.much_gathered_resident if resident else gpu.much_gathered
    return (
        facts.converted
        and facts.num_edges * width >= much
        and facts.num_vectors <= gpu.much_shared * facts.num_edges
    )


def _spares_work_list(facts: Facts, gpu: GpuProfile, width: int) -> bool:
    """Whether tca takes a structure that csr would first have to build a work list for.

    As long as nobody needed it, that costs more than it saves on a small structure. When that is depends on
    the calls before, which must not change the bits of deterministic algorithms.
    """
    if facts.has_row_split or facts.deterministic:
        return False
    few_ends = (
        _row_tiles(facts, width) <= gpu.most_row_tiles_without_list or 4 * facts.num_dst <= facts.num_edges
    )
    return few_ends and facts.num_edges <= gpu.most_without_list


def _row_tiles(facts: Facts, width: int) -> int:
    """Rows times tiles of 64 features: what tca spreads over its warps."""
    return facts.num_dst * math.ceil(width / 64)
