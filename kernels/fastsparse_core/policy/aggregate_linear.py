"""How GraphSAGE's aggregation and linear maps are computed together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastsparse_core.policy import gpu

if TYPE_CHECKING:
    from fastsparse_core.structure.adjacency import Adjacency

#: Rows from which both linear maps in one kernel are faster than cuBLAS in float32: on an H200 23 us against
#: 43 for 16,000 rows of 128, 19 against 16 for 1,024.
_LEAST_ROWS = 4096
#: Widths up to which the terms of both weights fit into shared memory.
_MOST_WIDTH = 128
#: Edges per row up to which that kernel gathers them as well, which saves writing sums and reading them: 218
#: us against 255 for 5 edges a row, 361 against 295 for 14.
_MOST_GATHERED = 8


def transforms_on_tensor_cores(
    device: torch.device, dtype: torch.dtype, num_rows: int, width: int, out_width: int
) -> bool:
    """Whether one kernel computes both linear maps, and their gradients, from bfloat16 terms of float32.

    Args:
        device: of the features.
        dtype: of everything.
        num_rows: destinations.
        width: features of a node.
        out_width: features of a result.
    """
    return (
        device.type == "cuda"
        and dtype == torch.float32
        and num_rows >= _LEAST_ROWS
        and 0 < width <= _MOST_WIDTH
        and 0 < out_width <= _MOST_WIDTH
        and width % 4 == out_width % 4 == 0
        and gpu.has_wgmma(device)
    )


def gathers_and_transforms(adj: Adjacency, algorithm: str) -> bool:
    """Whether that kernel sums the neighbours too: of short rows, of which no slice would have to be cut.

    Args:
        adj: the structure.
        algorithm: of the sum, as the caller asked.
    """
    return algorithm == "auto" and adj.num_edges <= _MOST_GATHERED * adj.num_dst and adj.has_short_rows


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
