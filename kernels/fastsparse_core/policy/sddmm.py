"""Rule: which kernel computes sddmm."""

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
        facts: facts about the structure.
        gpu: profile of the GPU.
        algorithm: the caller's choice.
        dtype: dtype of the features.
        head_bytes: bytes of one node's features in one head.
        heads: number of dot products per edge.
        aligned: whether rows of both features, and heads in them, start at multiples of 16 bytes.
        dense: whether the result is stored as dense vectors, which only ``"flashsparse"`` writes.
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
    # csr gathers a source's features once per edge, flashsparse once per vector of 8 rows, which matters if
    # features are wide. In float32, flashsparse multiplies three times. Several heads were not measured:
    # every head reads the structure again and writes with a stride.
    if dtype == torch.float32 or head_bytes <= gpu.short_product_bytes or heads > 1:
        return Choice("csr")
    if facts.num_edges < max(gpu.few_edges, gpu.few_per_row * facts.num_dst):
        return Choice("csr")
    if not facts.converted:
        return Choice("csr", is_final=False, counts=True, converts=facts.can_convert and is_reused(facts))
    if not facts.has_sddmm_structure and facts.capturing:
        # The work list of sddmm may be missing if spmm converted the structure. A capture cannot build it.
        return Choice("csr", is_final=False)
    return Choice("flashsparse")


def sddmm_by_entry(facts: Facts, dtype: torch.dtype, aligned: bool) -> bool:
    """Returns whether the CUDA kernel of ``"csr"`` processes entry by entry, not row by row as in float64.

    The kernel for entries loads 16 bytes per lane. It needs the row of every entry, 4 bytes per entry that
    are stored with the structure.
    """
    return facts.is_cuda and aligned and dtype != torch.float64
