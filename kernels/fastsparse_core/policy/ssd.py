"""Rules: which kernels compute ssd and its gradient, and how they divide the work."""

from __future__ import annotations

import torch

from fastsparse_core.formats import row_panels
from fastsparse_core.formats.row_split import RowSplit
from fastsparse_core.gpu import GpuProfile
from fastsparse_core.policy.facts import Facts


def ssd_algorithm(algorithm: str, device: torch.device, dtype: torch.dtype, k: int, width: int) -> str:
    """Resolves ``"auto"`` to the name of a kernel.

    Args:
        algorithm: the caller's choice.
        device: device of the values.
        dtype: dtype of the values.
        k: kept entries per row.
        width: features per row.
    """
    if algorithm != "auto":
        return algorithm
    # The cost of a dense product grows with the bytes of a row, and the cost of ssd with the additions to
    # shared memory, one per kept entry. Measured on reddit (256 wide, H200): in float16 with k = 32, a
    # training step takes 8.7 ms with two dense products, and 5.4 ms with ssd and its gradient. With k = 64,
    # ssd alone takes 4.7 ms and a dense product 4.4 ms in float16, and 5.4 and 10.8 ms in float32.
    most = width // (8 if dtype.itemsize == 2 else 4)
    return "decoupled" if k <= most or device.type == "cpu" else "densify"


def ssd_backward_algorithm(facts: Facts, gpu: GpuProfile, dtype: torch.dtype, width: int, k: int) -> str:
    """``"windows"`` (atomic sums over row panels) or ``"csr"`` (row by row of the transpose).

    ``"windows"`` reads all features of a row, ``"csr"`` only those that a neighbour kept. With two or three
    entries per row, ``"csr"`` is faster for small k: with k = 16 it takes 0.84 of the time on yeast and 0.80
    on peptides-batch. With k = 32 it takes longer.
    """
    if not facts.is_cuda or dtype == torch.float64 or facts.deterministic:
        return "csr"
    if facts.num_edges < gpu.few_per_row * facts.num_dst and gpu.few_kept * k <= width:
        return "csr"
    # Bytes of a window: the features of its rows, and one float32 scale per row.
    window_bytes = row_panels.HEIGHT * (width * dtype.itemsize + 4)
    fits = window_bytes <= gpu.shared_memory and facts.num_src <= row_panels.MOST_SOURCES
    return "windows" if fits else "csr"


def long_edge_groups(groups: RowSplit, num_edges: int, k: int, gpu: GpuProfile) -> tuple[int, bool]:
    """Number of edge groups that get a warp each in ssd, and whether the others have few entries.

    The other groups share warps. They need a separate launch, so sharing is worthwhile only if there are many
    such groups (on pubmed, sharing took a third longer). Measured on an H200 with k = 8: the kernel for rows
    with two or three entries reduced the time from 0.91 to 0.57 ms on yeast and from 0.085 to 0.054 ms on
    peptides. The kernel for groups that mostly have at most 31 entries reduced the time on dd from 0.168 to
    0.129 ms, and in float16 from 0.162 to 0.096 ms. It is not worthwhile if k is large.
    """
    num_groups = groups.slices.size(0)
    if num_edges < gpu.few_edges:
        return num_groups, False
    if num_edges < 4 * num_groups:
        return groups.num_long, True
    most_are_middle = 2 * groups.num_longest < num_groups and k <= 32
    return (groups.num_longest if most_are_middle else num_groups), False


def packs_ssd_rows(facts: Facts, gpu: GpuProfile, dtype: torch.dtype, k: int, width: int) -> bool:
    """Returns whether ssd packs kept entries, four into 16 bytes, before it gathers them.

    Packing moves 9 k bytes per source in float32 and takes one more launch. It is worthwhile if sources are
    gathered often and do not stay in the L2 cache. Times on an H200 with k = 32 and edge groups of 128,
    without and with packing: igb-small 0.92 and 0.81 ms, yelp 0.80 and 0.72 ms, ogbn-products 5.25 and 4.60
    ms. It is slower on ppi, whose rows are in the L2 cache (0.079 and 0.086 ms), and on reddit (3.93 and 4.05
    ms).
    """
    often = facts.num_edges >= gpu.gathered_often * facts.num_src and facts.num_src >= gpu.many_sources
    return often and dtype != torch.float64 and 16 <= k <= 32 and k % 4 == 0 and width <= 256
