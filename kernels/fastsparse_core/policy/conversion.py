"""How often a structure is used before another form of it is built: blocks, sorted slices, its transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fastsparse_core.structure.adjacency import Adjacency

#: Products with a structure before `auto` converts it: a conversion costs about as much as 5 to 10 products.
REUSE = 16
#: Products with a structure whose slices lie in row order, as they do at first, before they are sorted.
UNSORTED_USES = 8
#: Gradients of a new structure that are added by atomics before its transpose is built: a structure that is
#: seen once gives one to each layer that uses it.
SCATTERS = 2
#: Edges per source up to which they are: longer sums lose digits one by one, and atomics meet.
MOST_PER_SUM = 32
#: Edges up to which a gradient is scattered: batches have no more, and a full graph is used on.
_MOST_SCATTERED = 4_000_000
#: Edges per source up to which those of every source are counted before sums are scattered: of a sampled
#: batch most sources have one, whose sum is stored instead of cleared and added to.
_MOST_COUNTED = 2
#: Bytes of float32 sums from which counting saves more than its launches take.
_LEAST_COUNTED_BYTES = 16 << 20


def convert_if_reused(adj: Adjacency) -> bool:
    """Whether `auto` finds the structure in binary sparse blocks; counts a use, and converts after enough."""
    return adj.has_bsb or (count_use(adj) and adj.try_bsb())


def count_use(adj: Adjacency) -> bool:
    """Counts a use, and says whether there were enough for another form of the structure to be built now.

    Not for deterministic algorithms, whose bits must not change, and not in a CUDA graph.
    """
    adj.uses += 1
    enough = adj.uses > REUSE and not torch.are_deterministic_algorithms_enabled()
    return enough and not torch.cuda.is_current_stream_capturing()


def scatters(adj: Adjacency, algorithm: str, dtype: torch.dtype, value: torch.Tensor | None) -> bool:
    """Whether a gradient comes straight from the rows of a structure, by atomics; counts it if so.

    Only of structures that came sorted and were used little, as samplers give them; the others are worth
    their transpose. Not in float64, which is for checks that ask for the same bits.

    Args:
        adj: the structure of the forward pass.
        algorithm: as the caller of the forward pass asked.
        dtype: of the gradient.
        value: values of edges.
    """
    if (
        adj.scatters_left is None
        or algorithm != "auto"
        or dtype == torch.float64
        or (value is not None and (value.dim() > 2 or value.numel() != adj.num_values))
        or adj.num_edges > MOST_PER_SUM * adj.num_src
        or adj.num_edges > _MOST_SCATTERED
        or adj.has_transpose
        # On the CPU every run gives the same bits, but a transpose, which later gradients take, gives others.
        or torch.are_deterministic_algorithms_enabled()
    ):
        return False
    if adj.scatters_left <= 0:
        # A transpose cannot be built while a CUDA graph is captured.
        return adj.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    adj.scatters_left -= 1
    return True


def counts_sources(adj: Adjacency, width: int) -> bool:
    """Whether edges are counted by source before their sums are scattered.

    Args:
        adj: the structure of the forward pass.
        width: features.
    """
    return (
        adj.device.type == "cuda"
        and adj.num_edges <= _MOST_COUNTED * adj.num_src
        and 4 * adj.num_src * width >= _LEAST_COUNTED_BYTES
    )
