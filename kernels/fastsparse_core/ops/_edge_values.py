"""Values of edges: their heads, room for results, and dense vectors of them."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.structure.adjacency import Adjacency


def num_heads(value: Tensor | None) -> int:
    """Columns of edge values, 1 where they have one dimension or are not given."""
    return value.size(-1) if value is not None and value.dim() > 1 else 1


def is_dense(value: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an operator's values are dense vectors, (num_vectors, 8, heads), not one per edge and head."""
    return value is not None and value.dim() == 3


def dense_from_edges(adj: Adjacency, value: Tensor) -> Tensor:
    """Values (num_values, heads) as dense vectors (num_vectors, 8, heads), 0 where there is no entry."""
    length, heads = adj.bsb.num_vectors, value.size(1)
    out = value.new_zeros(length * HEIGHT, heads)
    out.index_copy_(0, adj.dense_place.long(), value.index_select(0, adj.bsb_value_id))
    return out.view(length, HEIGHT, heads)


def edges_from_dense(adj: Adjacency, value: Tensor) -> Tensor:
    """The inverse: values (num_values, heads) in the caller's edge order."""
    every_value_is_written = adj.num_values == adj.num_edges
    out = (value.new_empty if every_value_is_written else value.new_zeros)(adj.num_values, value.size(2))
    return out.index_copy_(0, adj.bsb_value_id.long(), value.flatten(0, 1).index_select(0, adj.dense_place))


def empty_values(adj: Adjacency, like: Tensor) -> Tensor:
    """Room for a result per edge value, for kernels that write those of stored entries.

    Values of edges that inserted loops replaced, which no entry stands for, are 0.
    """
    every_value_is_written = adj.num_values == adj.num_edges
    return (torch.empty_like if every_value_is_written else torch.zeros_like)(like)


def edge_workspace(adj: Adjacency, *shape: int, dtype: torch.dtype) -> Tensor:
    """Room for numbers of every value; zeros where not every value has an entry that was written."""
    every = adj.num_values == adj.num_edges and not adj.is_padded
    return (torch.empty if every else torch.zeros)(shape, dtype=dtype, device=adj.device)
