"""Which kernel computes sddmm."""

from __future__ import annotations

import torch

from fastsparse_core.formats.bsb import MOST_COLUMNS
from fastsparse_core.gpu import GpuProfile
from fastsparse_core.log import warn_once
from fastsparse_core.policy.conversion import is_reused
from fastsparse_core.policy.facts import MOST_HEADS, Choice, Facts

_WHY_SDDMM_CSR = (
    "sddmm runs as algorithm='csr': 'flashsparse' needs a GPU, float32, float16 or bfloat16, rows and heads "
    "of a multiple of 16 bytes, and at most 65535 heads and 2^24 sources. Pass algorithm='auto' to let "
    "FastSparse choose"
)


def sddmm_algorithm(
    facts: Facts,
    gpu: GpuProfile,
    algorithm: str,
    dtype: torch.dtype,
    head_bytes: int,
    heads: int,
    aligned: bool,
    dense: bool = False,
) -> Choice:
    """Resolves ``"auto"``, and a request that this call does not support, to ``"csr"`` or ``"flashsparse"``.

    Args:
        facts: of the structure.
        gpu: where.
        algorithm: as the caller asked.
        dtype: of the features.
        head_bytes: of one node's features in one head.
        heads: dot products per edge.
        aligned: rows of both features, and heads in them, start at multiples of 16 bytes.
        dense: the result is dense vectors, which only ``"flashsparse"`` writes.
    """
    if algorithm == "csr":
        return Choice(algorithm)
    fits = facts.is_cuda and dtype != torch.float64 and aligned and head_bytes > 0
    if not fits or heads > MOST_HEADS or facts.num_src > MOST_COLUMNS:
        if algorithm == "flashsparse":
            warn_once(_WHY_SDDMM_CSR)
        return Choice("csr")
    if algorithm == "flashsparse" or dense:
        return Choice("flashsparse")
    # csr gathers a source for every edge, and the tensor cores for every vector of 8 rows, which matters if
    # there is much to gather. In float32 they multiply three times. Several heads were not measured: each
    # reads the structure again, and writes every heads-th number.
    if dtype == torch.float32 or head_bytes <= gpu.short_product_bytes or heads > 1:
        return Choice("csr")
    if facts.num_edges < max(gpu.few_edges, gpu.few_per_row * facts.num_dst):
        return Choice("csr")
    if not facts.converted:
        return Choice("csr", is_final=False, counts=True, converts=facts.can_convert and is_reused(facts))
    if not facts.has_sddmm_structure and facts.capturing:
        # What spmm converted may lack sddmm's work list, which a capture cannot build.
        return Choice("csr", is_final=False)
    return Choice("flashsparse")


def sddmm_by_entry(facts: Facts, dtype: torch.dtype, aligned: bool) -> bool:
    """Whether sddmm with ``"csr"`` works entry by entry on CUDA, else row by row, as float64 always does.

    It loads 16 bytes a lane, and needs the row of every entry: 4 bytes an entry that stay with the structure.
    """
    return facts.is_cuda and aligned and dtype != torch.float64
