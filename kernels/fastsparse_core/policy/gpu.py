"""Sizes of a GPU, and bounds that the rules of several operators share.

Rules read them through the module: what a test sets here then holds for all of them.
"""

from __future__ import annotations

import functools

import torch

from fastsparse_core import _C

#: Groups of lanes that an H200 keeps resident in the CSR kernels, about: 132 multiprocessors x 96 groups.
RESIDENT_GROUPS = 132 * 96
#: Warps that it keeps resident in the tensor-core kernels, about: 132 multiprocessors x 32 warps.
RESIDENT_WARPS = 132 * 32
#: Heads that a grid has room for.
MOST_HEADS = 65_535
#: Edges below which a product takes about as long as its launch, so that what it reads hardly counts.
FEW_EDGES = 200_000
#: Entries per row below which sddmm and ssd's backward work from CSR.
FEW_PER_ROW = 3


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have, as far as PyTorch says."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether a GPU, and this build for it, have products of warpgroups, as only architecture 9.0 has."""
    built = str(_C.build_info()["cuda_archs"]).replace("+PTX", "").split(";")
    return "90" in built and torch.cuda.get_device_capability(device) == (9, 0)
