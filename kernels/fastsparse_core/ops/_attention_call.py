"""What a fused attention operator is called with, for the launches on either device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# AttentionScore in kernels/include/fastsparse/views.h.
DOT_PRODUCT, ADDITIVE, GATV2 = 0, 1, 2


class Call(NamedTuple):
    """What both passes read.

    Attributes:
        kind: of the scores.
        heads: number of heads.
        dst: queries, GAT's scores of the destinations (num_dst, heads), or GATv2's features.
        src: keys, GAT's scores of the sources (num_src, heads), or GATv2's features.
        v: values; GATv2: ``src``.
        att: (heads, D), GATv2 alone.
        bias: (num_values, heads) in the caller's edge order, in the accumulation dtype or that of ``v``.
        scale: of dot products, or the slope of the leaky ReLU.
        dropout_p: from 0 to below 1.
        seed: of the dropout mask; None: no dropout.
        edge: features of the edges (num_values, A) in the caller's edge order, in the dtype of ``v``; the CPU
            alone.
        weight: (heads * D, A) of the edges' linear map, with ``edge``.
    """

    kind: int
    heads: int
    dst: Tensor
    src: Tensor
    v: Tensor
    att: Tensor | None
    bias: Tensor | None
    scale: float
    dropout_p: float
    seed: Tensor | None
    edge: Tensor | None = None
    weight: Tensor | None = None

    @property
    def drawn(self) -> int:
        """The seed as kernels take it."""
        return 0 if self.seed is None else int(self.seed)
