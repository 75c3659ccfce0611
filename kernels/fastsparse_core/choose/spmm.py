"""Which kernel computes spmm."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from fastsparse_core.choose import bounds
from fastsparse_core.choose.reuse import is_converted
from fastsparse_core.choose.tiles import features_per_lane
from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.log import info_once

if TYPE_CHECKING:
    from fastsparse_core.adjacency import Adjacency

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

#: Edges up to which building csr's work list costs more than tca, which needs none, takes longer.
_SMALL_EDGES = 600_000
#: Rows, times tiles of 64 features, up to which tca beats flashsparse where windows are few.
_FEW_ROW_TILES = 2048
#: Bytes of every source's row that a block of spmm keeps in shared memory where x has few rows, and what else
#: it keeps there: see spmm_resident.cu.
_RESIDENT_TILE_BYTES = 256
_RESIDENT_OTHER_BYTES = 16 * (512 + 8) + 16 * 128 * 8 + 512 * 4
#: Entries per row from which tca is faster without the tile where rows are as few as sources.
_LONG_ROW = 128
#: Edges times features from which flashsparse beats csr's tile in shared memory, in float32, where windows
#: share half of their gathers.
_MUCH_GATHERED = 60_000_000
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
    takes_tca = dtype != torch.float32 and heads == 1
    if spmm_resident(adj, "csr", dtype, width, heads, aligned) or _has_few_windows(adj, dtype, width):
        if dtype == torch.float32 and not weighted and _gathers_much_once(adj, width):
            return "flashsparse"
        if weighted or not takes_tca:
            return "csr"
        # Tensor cores look up nothing for an edge without a factor, and need warps all the same.
        if adj.num_dst * math.ceil(width / 64) <= _FEW_ROW_TILES:
            return "tca"
    if not is_converted(adj):
        # As long as nobody needed it, a work list costs more than what it saves on a small structure. When
        # that is depends on the calls before, which must not change the bits of deterministic algorithms.
        small = 4 * adj.num_dst <= adj.num_edges <= _SMALL_EDGES
        spared = takes_tca and not weighted and small and not adj.has_row_split
        return "tca" if spared and not torch.are_deterministic_algorithms_enabled() else "csr"
    if dtype != torch.float32 or (width <= 64 and adj.num_edges < bounds.FEW_EDGES):
        return "flashsparse"
    # In float32 the CSR kernel gathers as fast: tensor cores win by the rows that 8 destinations share, and
    # with rows of up to 64 bytes.
    if adj.num_edges < 4 * adj.num_dst and adj.num_edges < 1_000_000:
        return "csr"
    if width <= 16 and adj.num_edges >= 4 * adj.num_dst:
        return "flashsparse"
    return "flashsparse" if adj.bsb.num_vectors <= 0.85 * adj.num_edges else "csr"


def spmm_resident(
    adj: Adjacency, algorithm: str, dtype: torch.dtype, width: int, heads: int, aligned: bool
) -> bool:
    """Whether csr or tca gathers from a tile of all sources in shared memory (spmm_resident.cu).

    That takes a GPU whose blocks have room for the tile, sources that rows gather several times, and features
    that fill half a tile. On pruned matrices with four times as many rows as sources both gain 1.1 to 1.9
    times; with as many rows csr gains up to 1.3 times, tca 1.05 to 1.15 but for rows of 256 entries
    (docs/choosing.md).

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
    fits = tile_bytes + _RESIDENT_OTHER_BYTES <= bounds.shared_memory(adj.device)
    counted_in_32_bits = adj.num_edges + 16 * adj.num_dst < 2**31
    return fits and counted_in_32_bits and 2 * width * dtype.itemsize > _RESIDENT_TILE_BYTES


def _flashsparse_fits(adj: Adjacency, dtype: torch.dtype, width: int, heads: int, aligned: bool) -> bool:
    if adj.device.type != "cuda" or dtype == torch.float64 or not aligned or width < 8:
        return False
    if adj.num_src > MOST_COLUMNS:
        return False
    if heads > 1:
        tile = 8 * features_per_lane(width, dtype.itemsize)
        return (width // heads) % tile == 0
    return True


def _has_few_windows(adj: Adjacency, dtype: torch.dtype, width: int) -> bool:
    """Whether flashsparse would leave most of an H200 idle, while few warps go through long windows."""
    tiles = math.ceil(width / (8 * features_per_lane(width, dtype.itemsize)))
    most_slices = adj.num_dst / 8 + adj.num_edges / _LEAST_SLICE
    return most_slices * tiles < bounds.RESIDENT_WARPS and adj.num_edges >= 8 * adj.num_dst


def _gathers_much_once(adj: Adjacency, width: int) -> bool:
    """Whether a converted structure saves tensor cores so many gathers that few windows do not matter.

    On a pruned matrix of 2048 rows, half of it kept, an H200 takes 39.8 us with csr in float32 at 256
    features, which come from shared memory, and 26.0 with flashsparse.
    """
    return (
        adj.has_bsb and adj.num_edges * width >= _MUCH_GATHERED and 2 * adj.bsb.num_vectors <= adj.num_edges
    )
