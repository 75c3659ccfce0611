"""Structures behind the handles that operators take."""

from __future__ import annotations

from fastsparse_core.structure.adjacency import Adjacency, from_handle


def keep_alive(adjacency: int) -> Adjacency | None:
    """The structure behind a handle, for an autograd context that outlives the caller's reference.

    None for the symbolic handle of a trace, which stands for no object.
    """
    return from_handle(adjacency) if isinstance(adjacency, int) else None


def structure(adjacency: int, transpose: bool) -> Adjacency:
    """The structure behind a handle, or its transpose."""
    adj = from_handle(adjacency)
    return adj.t() if transpose else adj
