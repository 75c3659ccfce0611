"""Scores of nodes for additive attention: what each head's learned vector sees in the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._common import accumulation_dtype


def head_scores(feat: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    r"""Dot products of each head's features with learned vectors (GAT, Veličković et al., section 2.1).

    .. math::
        s_{ih} = \langle \mathbf{a}_h, \mathbf{x}_{ih} \rangle

    One product with the vectors as the blocks of block-diagonal matrices; it keeps nothing as large as the
    features. Autocast does not lower its precision.

    Args:
        feat: features (N, ..., H * D), the heads side by side.
        vectors: (1, H, D) each.

    Returns:
        One contiguous tensor (N, ..., H) for each vector, float32, or float64 for float64 features.
    """
    return _HeadScores.apply(feat, *vectors)


class _HeadScores(torch.autograd.Function):
    """Plain operators would keep the features' float32 copy for the backward pass; this makes it twice."""

    @staticmethod
    def forward(ctx: Any, feat: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        matrix = _block_diagonal(vectors, accumulation_dtype(feat.dtype))
        ctx.save_for_backward(feat, matrix, *vectors)
        count, heads = len(vectors), vectors[0].size(1)
        rows = _rows(feat, matrix)
        # Autocast leaves products with `out` alone.
        scores = matrix.new_empty(count, rows.size(0), heads)
        blocks = matrix.view(count, heads, rows.size(1)).transpose(1, 2)
        torch.bmm(rows.expand(count, -1, -1), blocks, out=scores)
        return scores.view(count, *feat.shape[:-1], heads).unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        feat, matrix, *vectors = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives pass through the vectors, not what was made of them
            matrix = _block_diagonal(vectors, matrix.dtype)
        heads, width = vectors[0].shape[1:]
        grad = torch.cat([item.reshape(-1, heads) for item in grads], dim=1)
        grad_feat = None
        grad_vectors: list[Tensor | None] = [None] * len(vectors)
        if ctx.needs_input_grad[0]:
            grad_feat = (grad @ matrix).to(feat.dtype).view(feat.shape)
        if any(ctx.needs_input_grad[1:]):
            products = (grad.t() @ _rows(feat, matrix)).view(len(vectors), heads, heads, width)
            blocks = products.diagonal(dim1=1, dim2=2).transpose(1, 2).contiguous().split(1)
            grad_vectors = [
                block.to(vector.dtype) if wanted else None
                for block, vector, wanted in zip(blocks, vectors, ctx.needs_input_grad[1:], strict=True)
            ]
        return grad_feat, *grad_vectors


def _rows(feat: Tensor, matrix: Tensor) -> Tensor:
    """Features as rows, in the dtype of the matrix."""
    return feat.reshape(-1, matrix.size(1)).to(matrix.dtype)


def _block_diagonal(vectors: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> Tensor:
    """(number of vectors * H, H * D): the block-diagonal matrices of the vectors' heads below each other."""
    heads = torch.cat(vectors).to(dtype)  # (number of vectors, H, D)
    return torch.diag_embed(heads.transpose(1, 2), dim1=1, dim2=2).view(heads.size(0) * heads.size(1), -1)
