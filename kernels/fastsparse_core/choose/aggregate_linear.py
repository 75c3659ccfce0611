"""Whether autocast's cast comes before the sum of neighbours or after it."""

from __future__ import annotations


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
