"""How often a structure is used before another form of it is built: blocks, sorted slices, its transpose."""

from __future__ import annotations

import torch

from fastsparse_core.formats.inspection import FEW_EDGES
from fastsparse_core.policy.facts import Facts

#: Products with a structure before `auto` converts it: a conversion costs about as much as 5 to 10 products.
REUSE = 16
#: Number of products before the slices of a structure, which begin in row order, are sorted. The second
#: number is for structures of few edges, such as batches: each layer computes two products, and then the
#: batch is gone.
UNSORTED_USES, UNSORTED_USES_OF_FEW = 8, 16
#: Gradients of a new structure that are added by atomics before its transpose is built: a structure that is
#: seen once gives one to each layer that uses it.
SCATTERS = 2
#: Edges per source up to which they are: longer sums lose digits one by one, and atomics meet.
MOST_PER_SUM = 32
#: Edges up to which a gradient is scattered: batches have no more, and a full graph is used on.
_MOST_SCATTERED = 4_000_000
#: Edges per source up to which the edges of every source are counted before sums are scattered: of a sampled
#: batch most sources have one, whose sum is stored instead of cleared and added to.
_MOST_COUNTED = 2
#: Bytes of float32 sums from which counting saves more than its launches take.
_LEAST_COUNTED_BYTES = 16 << 20


def sorts_slices(uses: int, num_edges: int) -> bool:
    """Whether slices that are in row order are sorted by length now.

    Args:
        uses: of the structure so far.
        num_edges: its edges.
    """
    return uses >= (UNSORTED_USES_OF_FEW if num_edges <= FEW_EDGES else UNSORTED_USES)


def is_reused(facts: Facts) -> bool:
    """Whether this use, which counts, is one too many for the form that a structure has.

    Not for deterministic algorithms, whose bits must not change, and not in a CUDA graph.
    """
    return facts.uses >= REUSE and not facts.deterministic and not facts.capturing


def scatters(facts: Facts, algorithm: str, dtype: torch.dtype, per_entry: bool) -> bool:
    """Whether a gradient comes straight from the rows of a structure, by atomics.

    Only of structures that came sorted and were used little, as samplers give them; the others are worth
    their transpose. Not in float64, which is for checks that ask for the same bits.

    Args:
        facts: of the structure of the forward pass.
        algorithm: as the caller of the forward pass asked.
        dtype: of the gradient.
        per_entry: whether there is at most one value for each edge.
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
    """Whether edges are counted by source before their sums are scattered.

    Args:
        facts: of the structure of the forward pass.
        width: features.
    """
    return (
        facts.is_cuda
        and facts.num_edges <= _MOST_COUNTED * facts.num_src
        and 4 * facts.num_src * width >= _LEAST_COUNTED_BYTES
    )
