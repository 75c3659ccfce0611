"""Rules: after how many uses a structure is converted to blocks, sorted, or transposed."""

from __future__ import annotations

import torch

from fastsparse_core.formats.inspection import FEW_EDGES
from fastsparse_core.policy.facts import Facts

#: Number of products with a structure before `auto` converts it. A conversion takes about as long as 5 to 10
#: products.
REUSE = 16
#: Number of products before the slices of a structure, which begin in row order, are sorted. The second
#: number is for structures of few edges, such as batches: each layer computes two products, and then the
#: batch is gone.
UNSORTED_USES, UNSORTED_USES_OF_FEW = 8, 16
#: Number of gradients of a new structure that are scattered (summed with atomics) before its transpose is
#: built. If a structure is used in a single step, there is only one gradient per layer.
SCATTERS = 2
#: Largest mean number of edges per source for scattered gradients: longer sums lose precision, and their
#: atomics contend.
MOST_PER_SUM = 32
#: Largest number of edges for scattered gradients. Batches have fewer edges. A structure with more edges is a
#: full graph, which is used often, so its transpose is worth building.
_MOST_SCATTERED = 4_000_000
#: Largest mean number of edges per source for which the edges of every source are counted before gradients
#: are scattered. In a sampled batch, most sources have one edge. Their gradients are stored directly, which
#: is cheaper than clearing memory and adding to it.
_MOST_COUNTED = 2
#: Smallest size of float32 sums, in bytes, for which counting saves more time than its launches take.
_LEAST_COUNTED_BYTES = 16 << 20


def sorts_slices(uses: int, num_edges: int) -> bool:
    """Returns whether slices in row order have been used so often that sorting them by length is worthwhile.

    Args:
        uses: number of uses of the structure so far.
        num_edges: number of edges of the structure.
    """
    return uses >= (UNSORTED_USES_OF_FEW if num_edges <= FEW_EDGES else UNSORTED_USES)


def is_reused(facts: Facts) -> bool:
    """Returns whether a structure has been used so often that converting it is worthwhile.

    False with deterministic algorithms, whose results must not change, and during the capture of a CUDA
    graph.
    """
    return facts.uses >= REUSE and not facts.deterministic and not facts.capturing


def scatters(facts: Facts, algorithm: str, dtype: torch.dtype, per_entry: bool) -> bool:
    """Returns whether a gradient is summed with atomics over the rows of a structure, without its transpose.

    True only for structures of sorted edges with few uses, such as sampled batches. For other structures, the
    transpose is worth building. False for float64, which is used in checks that expect the same bits in every
    run.

    Args:
        facts: facts about the structure of the forward pass.
        algorithm: the caller's choice in the forward pass.
        dtype: dtype of the gradient.
        per_entry: whether there is at most one value per edge.
    """
    if (
        facts.scattered is None
        or algorithm != "auto"
        or dtype == torch.float64
        or not per_entry
        or facts.num_edges > MOST_PER_SUM * facts.num_src
        or facts.num_edges > _MOST_SCATTERED
        or facts.has_transpose
        # On the CPU every run gives the same bits, but later gradients use a transpose, which gives other
        # bits.
        or facts.deterministic
    ):
        return False
    # A transpose cannot be built while a CUDA graph is captured, or for a structure that is overwritten.
    return facts.scattered < SCATTERS or facts.is_padded or (facts.is_cuda and facts.capturing)


def counts_sources(facts: Facts, width: int) -> bool:
    """Returns whether the edges of every source are counted before gradients are scattered.

    Args:
        facts: facts about the structure of the forward pass.
        width: features per source.
    """
    return (
        facts.is_cuda
        and facts.num_edges <= _MOST_COUNTED * facts.num_src
        and 4 * facts.num_src * width >= _LEAST_COUNTED_BYTES
    )
