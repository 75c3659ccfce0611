"""Which kernel computes sddmm."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.log import info_once
from fastsparse_core.policy import gpu
from fastsparse_core.policy.conversion import convert_if_reused

if TYPE_CHECKING:
    from fastsparse_core.structure.adjacency import Adjacency

_logger = logging.getLogger("fastsparse_core")

_WHY_SDDMM_CSR = (
    "sddmm with algorithm='flashsparse' runs as 'csr' where tensor cores cannot serve it: on the CPU, in "
    "float64, for rows or heads that are not multiples of 16 bytes, for more than 65535 heads or 2^24 sources"
)

#: Bytes of a node's features in one head up to which a dot product of an edge is short.
_SHORT_PRODUCT_BYTES = 64


def sddmm_algorithm(
    adj: Adjacency,
    algorithm: str,
    dtype: torch.dtype,
    head_bytes: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to ``"csr"`` or ``"flashsparse"``.

    Args:
        adj: the structure; counts its uses.
        algorithm: as the caller asked.
        dtype: of the features.
        head_bytes: of one node's features in one head.
        heads: dot products per edge.
        aligned: rows of both features, and heads in them, start at multiples of 16 bytes.
        dense: the result is dense vectors, which only ``"flashsparse"`` writes.
    """
    if algorithm == "csr":
        return algorithm
    fits = adj.device.type == "cuda" and dtype != torch.float64 and aligned and head_bytes > 0
    if not fits or heads > gpu.MOST_HEADS or adj.num_src > MOST_COLUMNS:
        if algorithm == "flashsparse":
            info_once(_logger, _WHY_SDDMM_CSR)
        return "csr"
    if algorithm == "flashsparse" or dense:
        return "flashsparse"
    # csr gathers a source for every edge, the tensor cores for every vector of 8 rows: it shows where there
    # is much to gather. In float32 they multiply three times. Several heads were not measured: each reads the
    # structure again, and writes every heads-th number.
    if dtype == torch.float32 or head_bytes <= _SHORT_PRODUCT_BYTES or heads > 1:
        return "csr"
    if adj.num_edges < max(gpu.FEW_EDGES, gpu.FEW_PER_ROW * adj.num_dst) or not convert_if_reused(adj):
        return "csr"
    if not adj.has_sddmm_structure and torch.cuda.is_current_stream_capturing():
        return "csr"  # what spmm converted may lack sddmm's work list, which a capture cannot build
    return "flashsparse"


def sddmm_by_entry(adj: Adjacency, aligned: bool) -> bool:
    """Whether sddmm with ``"csr"`` works entry by entry on CUDA, else row by row.

    It loads 16 bytes a lane, and needs the row of every entry: 4 bytes an entry that stay with the structure.
    """
    return adj.device.type == "cuda" and aligned
