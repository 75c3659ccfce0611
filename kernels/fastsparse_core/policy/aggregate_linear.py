"""How GraphSAGE's aggregation and linear maps are computed together."""

from __future__ import annotations

import torch

from fastsparse_core.gpu import GpuProfile
from fastsparse_core.policy.facts import Facts

#: Widths up to which it is taken: two tiles each way, whose launches read features and sums again. On an H200
#: 150,000 rows from 100 to 256 take 0.55 ms both ways, cuBLAS 1.08; 16,000 from 256 to 256 0.39 and 0.47.
_MOST_WIDTH = 256


def transforms_on_tensor_cores(
    dtype: torch.dtype, num_rows: int, width: int, out_width: int, gpu: GpuProfile
) -> bool:
    """Whether one kernel computes both linear maps, and their gradients, from bfloat16 terms of float32.

    On GPUs that have products of warpgroups (`gpu.has_wgmma`), that is: 23 us against 43 of cuBLAS for 16,000
    rows of 128 on an H200, 19 against 16 for 1,024.

    Args:
        dtype: of everything.
        num_rows: destinations.
        width: features of a node.
        out_width: features of a result.
        gpu: where.
    """
    return (
        dtype == torch.float32
        and num_rows >= gpu.least_rows
        and 0 < width <= _MOST_WIDTH
        and 0 < out_width <= _MOST_WIDTH
        and width % 4 == out_width % 4 == 0
    )


def gathers_and_transforms(facts: Facts, algorithm: str, gpu: GpuProfile) -> bool:
    """Whether that kernel sums the neighbours too, where no row is longer than a slice.

    That saves writing sums and reading them: 218 us against 255 for 5 edges a row, 361 against 295 for 14.

    Args:
        facts: of the structure.
        algorithm: of the sum, as the caller asked.
        gpu: where.
    """
    return algorithm == "auto" and facts.num_edges <= gpu.most_gathered * facts.num_dst


def casts_first(num_dst: int, num_src: int, num_edges: int) -> bool:
    """Whether float32 features are cast to 16 bits before their neighbours are summed, or the sums after.

    Whichever moves fewer bytes, counted for one feature. A sampled batch has about as many sources as edges,
    and casting them all would take as long as the sum itself; in a graph, where every source is a destination
    too, the sums are as many as the features and the gathers of half the size come for nothing.

    Args:
        num_dst: destinations, whose own features are cast either way.
        num_src: sources.
        num_edges: entries of the structure.
    """
    cast = 4 + 2  # bytes of a number that is read in 32 bits and written in 16
    first = cast * num_src + 2 * num_edges + 2 * num_dst  # casts, gathers, sums written
    after = 4 * num_edges + 4 * num_dst + cast * num_dst  # gathers, sums written, casts of these
    return first <= after


def columns_of_products(
    dtype: torch.dtype, num_rows: int, width: int, out_width: int, gpu: GpuProfile, *, on_gpu: bool
) -> int:
    """Columns of the matrices that are multiplied, with zeros behind those of the features.

    cuBLAS loads 16 bytes at once only where rows of 16-bit numbers are multiples of that. Zeros cost two more
    launches for each matrix: an H200 takes 0.280 s with them and 0.300 without for an epoch of ogbn-products'
    sampled batches (154,000 rows of 100 to 256 in bfloat16).

    Args:
        dtype: of the products.
        num_rows: destinations.
        width: features of a node.
        out_width: features of a result.
        gpu: where.
        on_gpu: whether cuBLAS multiplies.
    """
    if on_gpu and dtype.itemsize == 2 and width % 8 and num_rows * width * out_width >= gpu.many_products:
        return width + -width % 8
    return width
