"""Rules for GraphSAGE's aggregation and linear maps, which are computed together."""

from __future__ import annotations

import torch

from fastsparse_core.gpu import GpuProfile
from fastsparse_core.policy.facts import Facts

#: Largest input and output width of the kernel for both linear maps. That is two tiles of 128 in each
#: direction; every further tile reads features and sums once more. Forward and backward on an H200: 150,000
#: rows from width 100 to 256 take 0.55 ms, with cuBLAS 1.08 ms; 16,000 rows from 256 to 256 take 0.39 ms,
#: with cuBLAS 0.47 ms.
_MOST_WIDTH = 256


def transforms_on_tensor_cores(
    dtype: torch.dtype, num_rows: int, width: int, out_width: int, gpu: GpuProfile
) -> bool:
    """Returns whether one kernel computes both linear maps, and another their gradients, instead of cuBLAS.

    The kernels split float32 numbers into bfloat16 terms and need warpgroup products (`gpu.has_wgmma`). On an
    H200, 16,000 rows of width 128 take 23 us (cuBLAS: 43 us) and 1,024 rows take 19 us (cuBLAS: 16 us).

    Args:
        dtype: dtype of features and weights.
        num_rows: number of destinations.
        width: features per node.
        out_width: features per result.
        gpu: profile of the GPU.
    """
    return (
        dtype == torch.float32
        and num_rows >= gpu.least_rows
        and 0 < width <= _MOST_WIDTH
        and 0 < out_width <= _MOST_WIDTH
        and width % 4 == out_width % 4 == 0
    )


def gathers_and_transforms(facts: Facts, algorithm: str, gpu: GpuProfile) -> bool:
    """Returns whether the kernel for both linear maps also sums the neighbours.

    The rule assumes that no row is longer than a slice. Summing in the same kernel saves writing the sums and
    reading them again. This takes 218 us instead of 255 us with 5 edges per row, but 361 us instead of 295 us
    with 14 edges per row.

    Args:
        facts: facts about the structure.
        algorithm: the caller's choice for the sum.
        gpu: profile of the GPU.
    """
    return algorithm == "auto" and facts.num_edges <= gpu.most_gathered * facts.num_dst


def casts_first(num_dst: int, num_src: int, num_edges: int) -> bool:
    """Returns whether float32 features are cast to 16 bits before they are summed, not their sums.

    The order that moves fewer bytes is used. A sampled batch has about as many sources as edges, so casting
    all sources would take as long as the sum itself. In a full graph, there are as many sums as sources, so
    casting first costs nothing extra and halves the bytes that are gathered.

    Args:
        num_dst: number of destinations. Their own features are cast in both orders.
        num_src: number of sources.
        num_edges: entries of the structure.
    """
    # Bytes that each order moves per column of the features.
    cast = 4 + 2  # read float32, write 16 bits
    first = cast * num_src + 2 * num_edges + 2 * num_dst  # cast features, gather, write sums
    after = 4 * num_edges + 4 * num_dst + cast * num_dst  # gather, write sums, cast sums
    return first <= after


def columns_of_products(
    dtype: torch.dtype, num_rows: int, width: int, out_width: int, gpu: GpuProfile, *, on_gpu: bool
) -> int:
    """Number of columns to which matrices are padded with zeros before they are multiplied.

    cuBLAS uses 16-byte loads only if the size of a row is a multiple of 16 bytes. Padding takes two more
    launches per matrix. On an H200, an epoch of sampled batches of ogbn-products (154,000 rows of width 100
    to 256 in bfloat16) takes 0.280 s with padding and 0.300 s without.

    Args:
        dtype: dtype of the products.
        num_rows: number of destinations.
        width: features per node.
        out_width: features per result.
        gpu: profile of the GPU.
        on_gpu: whether cuBLAS computes the products.
    """
    if on_gpu and dtype.itemsize == 2 and width % 8 and num_rows * width * out_width >= gpu.many_products:
        return width + -width % 8
    return width
