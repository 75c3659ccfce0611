"""Which kernel computes spmm."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.log import info_once
from fastsparse_core.policy import gpu
from fastsparse_core.policy.conversion import convert_if_reused, count_use
from fastsparse_core.policy.tiles import features_per_lane

if TYPE_CHECKING:
    from fastsparse_core.structure.adjacency import Adjacency

_logger = logging.getLogger("fastsparse_core")

_WHY_CSR = (
    "spmm with algorithm='flashsparse' runs as 'csr' where tensor cores cannot serve it: on the CPU, "
    "in float64, for rows that are not multiples of 16 bytes, for heads that are not multiples of a tile, "
    "for more than 2^24 sources"
)
_WHY_NOT_DIRECT = (
    "spmm with algorithm='tca' or 'hr' runs as 'csr' where tensor cores cannot serve it straight from CSR: "
    "on the CPU, in float64 and float32, for rows that are not multiples of 16 bytes, for several values per "
    "edge"
)

#: Edges up to which building csr's work list costs more than tca, which needs none, takes longer: the list
#: about 70 us on an H200.
_SMALL_EDGES = 600_000
#: Rows, times tiles of 64 features, that cost tca up to 4 us more than csr however few entries they have:
#: 0.2 ns each on batches of peptides, with two entries per row.
_SMALL_ROW_TILES = 16_384
#: Rows, times tiles of 64 features, up to which tca beats flashsparse where windows are few.
_FEW_ROW_TILES = 2048
#: Bytes of every source's row that a block of spmm keeps in shared memory where x has few rows, and what else
#: it keeps there: see spmm_resident.cu.
_RESIDENT_TILE_BYTES = 256
_RESIDENT_OTHER_BYTES = 16 * (512 + 8) + 16 * 128 * 8 + 512 * 4
#: Entries per row from which tca is faster without the tile where rows are as few as sources.
_LONG_ROW = 128
#: Entries per row below which the end of a row counts as much as what it sums: csr with its tile then takes
#: longer for a second tile of features than flashsparse (10 entries, 256 features: 9.4 and 8.1 us where they
#: are random, 9.4 and 9.5 where the greatest were kept).
_SHORT_ROW = 16
#: Edges times features from which flashsparse beats csr where windows are few: in float32 with csr's tile in
#: shared memory and without, and in 16 bits.
_MUCH_GATHERED_RESIDENT = 60_000_000
_MUCH_GATHERED = 40_000_000
_MUCH_GATHERED_16_BIT = 35_000_000
#: Vectors per edge up to which that holds in float32.
_MUCH_SHARED = 0.6
#: Vectors per edge up to which flashsparse beats csr in float32 on large graphs.
_SHARED = 0.85
#: Features up to which csr's gather in float32 moves half of what it could, and rows from which flashsparse
#: then is faster even where windows are few: 1.1 to 1.6 times on pruned matrices of 2048 x 512.
_NARROW = 16
_NARROW_ROWS = 1024
#: Shortest slice of a window, in entries at most.
_LEAST_SLICE = 32 * 16


def spmm_algorithm(
    adj: Adjacency,
    algorithm: str,
    dtype: torch.dtype,
    width: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
    *,
    weighted: bool = True,
) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to the name of a kernel.

    Args:
        adj: the structure; counts its uses.
        algorithm: as the caller asked.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features and result allow 16-byte accesses to whole rows.
        dense: values are dense vectors, which only ``"flashsparse"`` reads as they are.
        weighted: edges or sources have factors, which ``"tca"`` rounds to the dtype of the features.
    """
    if algorithm == "csr":
        return algorithm
    if algorithm in ("tca", "hr"):
        if adj.device.type == "cuda" and dtype.itemsize == 2 and aligned and width > 0 and heads == 1:
            return algorithm
        info_once(_logger, _WHY_NOT_DIRECT)
        return "csr"
    if not _flashsparse_fits(adj, dtype, width, heads, aligned):
        if algorithm == "flashsparse":
            info_once(_logger, _WHY_CSR)
        return "csr"
    if algorithm == "flashsparse" or dense:
        return "flashsparse"
    # Tensor cores straight from CSR look up nothing for an edge without a factor.
    takes_tca = dtype != torch.float32 and heads == 1 and not weighted
    resident = spmm_resident(adj, "csr", dtype, width, heads, aligned)
    if resident or _has_few_windows(adj, dtype, width, weighted):
        if dtype == torch.float32 and not weighted and _gathers_much_once(adj, width, resident):
            return "flashsparse"
        if not takes_tca:
            return "csr"
        picked = _of_few_windows(adj, dtype, width, aligned, resident)
        if picked is not None:
            return picked
    if not convert_if_reused(adj):
        return "tca" if takes_tca and not resident and _spares_work_list(adj, width) else "csr"
    if dtype != torch.float32 or (width <= 64 and adj.num_edges < gpu.FEW_EDGES):
        return "flashsparse"
    # In float32 the CSR kernel gathers as fast: tensor cores win by the rows that 8 destinations share, and
    # with rows of up to 64 bytes.
    if adj.num_edges < 4 * adj.num_dst and adj.num_edges < 1_000_000:
        return "csr"
    if width <= _NARROW and adj.num_edges >= 4 * adj.num_dst:
        return "flashsparse"
    return "flashsparse" if adj.bsb.num_vectors <= _SHARED * adj.num_edges else "csr"


def _of_few_windows(
    adj: Adjacency, dtype: torch.dtype, width: int, aligned: bool, resident: bool
) -> str | None:
    """What takes 16-bit features without factors where windows or sources are few; None: as elsewhere."""
    short_rows = width > 128 and adj.num_edges < _SHORT_ROW * adj.num_dst
    if adj.num_edges * width >= _MUCH_GATHERED_16_BIT or (resident and short_rows):
        return None
    few_rows = _row_tiles(adj, width) <= _FEW_ROW_TILES
    if resident:
        # Of long rows tca gathers from the L2, and is faster so.
        tile_in_tca = spmm_resident(adj, "tca", dtype, width, 1, aligned)
        return "tca" if few_rows and not tile_in_tca else "csr"
    if not few_rows:
        return None
    if width <= 64:
        return "tca"
    return "tca" if _spares_work_list(adj, width) and not count_use(adj) else "csr"


def spmm_resident(
    adj: Adjacency, algorithm: str, dtype: torch.dtype, width: int, heads: int, aligned: bool
) -> bool:
    """Whether csr or tca gathers from a tile of all sources in shared memory (spmm_resident.cu).

    That takes a GPU whose blocks have room for the tile, sources that rows gather several times, and features
    that fill half a tile in float32, in 16 bits more: tca gathers rows of 128 bytes from the L2 as fast (9.0
    us against 13.6 on 512 x 512, half of it kept; 12.4 against 13.0 on 2048 x 512, a fifth). On pruned
    matrices with four times as many rows as sources both gain 1.1 to 1.9 times; with as many rows csr gains
    up to 1.3 times, tca 1.05 to 1.15 but for rows of 256 entries
    (docs/dev/choosing.md).

    Args:
        adj: the structure.
        algorithm: ``"csr"`` or ``"tca"``; the others have no such form.
        dtype: of the features.
        width: features per node.
        heads: values per edge, 1 without.
        aligned: features allow 16-byte accesses to whole rows.
    """
    long_rows = adj.num_edges > _LONG_ROW * adj.num_dst
    rows_per_source = {"csr": 1, "tca": 2 if long_rows else 1}.get(algorithm, 0)
    if not 0 < rows_per_source * adj.num_src <= adj.num_dst:
        return False
    if adj.device.type != "cuda" or dtype == torch.float64 or heads > 1 or not aligned:
        return False
    if adj.is_padded:  # its blocks share out the entries by their number
        return False
    tile_bytes = (adj.num_src + 1) * _RESIDENT_TILE_BYTES
    fits = tile_bytes + _RESIDENT_OTHER_BYTES <= gpu.shared_memory(adj.device)
    counted_in_32_bits = adj.num_edges + 16 * adj.num_dst < 2**31
    half_tile = _RESIDENT_TILE_BYTES // 2
    row_bytes = width * dtype.itemsize
    fills = row_bytes > half_tile or (row_bytes == half_tile and dtype == torch.float32)
    return fits and counted_in_32_bits and fills


def _flashsparse_fits(adj: Adjacency, dtype: torch.dtype, width: int, heads: int, aligned: bool) -> bool:
    if adj.device.type != "cuda" or dtype == torch.float64 or not aligned or width < 8:
        return False
    if adj.num_src > MOST_COLUMNS:
        return False
    if heads > 1:
        tile = 8 * features_per_lane(width, dtype.itemsize)
        return (width // heads) % tile == 0
    return True


def _has_few_windows(adj: Adjacency, dtype: torch.dtype, width: int, weighted: bool) -> bool:
    """Whether flashsparse would leave most of an H200 idle, while few warps go through long windows."""
    if dtype == torch.float32 and width <= _NARROW and not weighted and adj.num_dst >= _NARROW_ROWS:
        return False
    tiles = math.ceil(width / (8 * features_per_lane(width, dtype.itemsize)))
    most_slices = adj.num_dst / 8 + adj.num_edges / _LEAST_SLICE
    return most_slices * tiles < gpu.RESIDENT_WARPS and adj.num_edges >= 8 * adj.num_dst


def _gathers_much_once(adj: Adjacency, width: int, resident: bool) -> bool:
    """Whether few windows do not matter in float32, so many gathers does a converted structure save.

    At 256 features an H200 takes 34.5 us with csr, which gathers from shared memory, and 23.0 us with
    flashsparse on a pruned matrix of 2048 x 512, half of it kept; on one of 512 x 2048, a fifth of it kept,
    whose sources do not fit, 30.6 and 25.7 us.
    """
    much = _MUCH_GATHERED_RESIDENT if resident else _MUCH_GATHERED
    return (
        adj.has_bsb and adj.num_edges * width >= much and adj.bsb.num_vectors <= _MUCH_SHARED * adj.num_edges
    )


def _spares_work_list(adj: Adjacency, width: int) -> bool:
    """Whether tca takes a structure that csr would first have to build a work list for.

    As long as nobody needed it, that costs more than it saves on a small structure. When that is depends on
    the calls before, which must not change the bits of deterministic algorithms.
    """
    if adj.has_row_split or torch.are_deterministic_algorithms_enabled():
        return False
    few_ends = _row_tiles(adj, width) <= _SMALL_ROW_TILES or 4 * adj.num_dst <= adj.num_edges
    return few_ends and adj.num_edges <= _SMALL_EDGES


def _row_tiles(adj: Adjacency, width: int) -> int:
    """Rows times tiles of 64 features: what tca spreads over its warps."""
    return adj.num_dst * math.ceil(width / 64)
