"""Softmax over the entries of every row."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core.adjacency import Adjacency
from fastsparse_core.ops._common import DTYPE_CODE, accumulation_dtype


def edge_softmax(adj: Adjacency, score: Tensor) -> Tensor:
    r"""Softmax of the scores of the edges that share a destination.

    .. math::
        p_{ij} = \frac{\exp(s_{ij})}{\sum_{k \in \mathcal{N}(i)} \exp(s_{ik})}

    Args:
        adj: structure (num_dst, num_src).
        score: :math:`s`, (num_values,) or (num_values, H) in the caller's edge order, float64, float32,
            float16 or bfloat16.

    Returns:
        :math:`p` in the shape and dtype of ``score``, computed in float32 or wider; 0 for edges that self
        loops replaced, and in rows whose scores are all :math:`-\infty`. Differentiable any number of times.

    Raises:
        TypeError: the dtype is not supported.
        ValueError: the shape or the device does not fit.
    """
    if not isinstance(score, Tensor) or score.dtype not in DTYPE_CODE:
        kind = score.dtype if isinstance(score, Tensor) else type(score).__name__
        raise TypeError(f"score: expected a floating tensor, got {kind}")
    if score.dim() not in (1, 2) or score.size(0) != adj.num_values:
        raise ValueError(
            f"score: expected shape ({adj.num_values},) or ({adj.num_values}, heads), "
            f"got {tuple(score.shape)}"
        )
    if score.device != adj.device:
        raise ValueError(
            f"score: expected device {adj.device} like the Adjacency, got {score.device}; move one with .to()"
        )
    row = adj.row().long()
    position = None if adj.edge_id is None else adj.edge_id.long()
    entry = (score if position is None else score[position]).to(accumulation_dtype(score.dtype))
    shape = (adj.num_dst, *score.shape[1:])
    index = row.reshape(-1, *[1] * (score.dim() - 1)).expand_as(entry)
    maximum = entry.new_full(shape, -torch.inf).scatter_reduce(0, index, entry.detach(), "amax")
    exponential = (entry - maximum.masked_fill(maximum == -torch.inf, 0)[row]).exp()
    total = entry.new_zeros(shape).index_add(0, row, exponential)
    weight = (exponential / total.masked_fill(total == 0, 1)[row]).to(score.dtype)
    return weight if position is None else torch.zeros_like(score).index_copy(0, position, weight)
