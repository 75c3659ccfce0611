"""Scores of nodes for additive attention: what each head's learned vector sees in the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._common import accumulation_dtype


def head_scores(feat: Tensor, *vectors: Tensor) -> list[Tensor]:
    r"""Dot products of each head's features with learned vectors (GAT, Veličković et al., section 2.1).

    .. math::
        s_{ih} = \langle \mathbf{a}_h, \mathbf{x}_{ih} \rangle

    One matrix product with the vectors as the blocks of a block-diagonal matrix: it reads the features once
    for all vectors and keeps nothing as large as them. Autocast does not lower its precision.

    Args:
        feat: features (N, ..., H, D).
        vectors: (1, H, D) each.

    Returns:
        One tensor (N, ..., H) for each vector, float32, or float64 for float64 features.
    """
    heads, width = feat.shape[-2:]
    dtype = accumulation_dtype(feat.dtype)
    with torch.autocast(feat.device.type, enabled=False):
        blocks = torch.diag_embed(torch.cat(vectors).to(dtype).permute(2, 0, 1))  # (D, vectors, H, H)
        matrix = blocks.permute(2, 0, 1, 3).reshape(heads * width, len(vectors) * heads)
        rows = feat.flatten(-2)
        scores = rows @ matrix if rows.dtype == dtype else _WideProduct.apply(rows, matrix)
        return list(scores.split(heads, dim=-1))


class _WideProduct(torch.autograd.Function):
    """Product of 16-bit features (N, ..., F) and a float32 matrix (F, K), in float32.

    Plain operators would keep the features' float32 copy for the backward pass; this makes it twice.
    """

    @staticmethod
    def forward(ctx: Any, feat: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(feat, matrix)
        return feat.to(matrix.dtype) @ matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        feat, matrix = ctx.saved_tensors
        grad_feat = grad_matrix = None
        if ctx.needs_input_grad[0]:
            grad_feat = (grad @ matrix.t()).to(feat.dtype)
        if ctx.needs_input_grad[1]:
            rows = feat.reshape(-1, matrix.size(0)).to(matrix.dtype)
            grad_matrix = rows.t() @ grad.reshape(-1, matrix.size(1))
        return grad_feat, grad_matrix
