"""Scores of nodes for additive attention: what each head's learned vector sees in the features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import queue
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._operands import written_out

#: Rows from which the vectors' gradients are a product with the scores' gradients first. For fewer and four
#: heads of 32 cuBLAS takes 52 us that way, and 7 with the features first: a third of a captured step of GAT
#: on 64 molecules. With more rows features first take up to twice as long.
_MANY_ROWS = 2_048
#: Number of edges per product on the CPU; the results are added up. A product over 60,000 edges has a
#: relative error of 3e-6; in parts, 2e-7.
_PART = 256


def head_scores(feat: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    r"""Dot products of each head's features with learned vectors (GAT, Veličković et al., section 2.1).

    .. math::
        s_{ih} = \langle \mathbf{a}_h, \mathbf{x}_{ih} \rangle

    It keeps nothing as large as the features. Autocast does not lower its precision.

    Args:
        feat: features (N, ..., H * D), the heads side by side.
        vectors: (1, H, D) each, one or two.

    Returns:
        One contiguous tensor (N, ..., H) for each vector, float32, or float64 for float64 features.
    """
    if torch.is_grad_enabled():
        return _HeadScores.apply(feat, *vectors)
    # A trace without gradients cannot read a node of autograd's graph whose inputs are several vectors.
    scores, _ = scores_of_rows(feat.reshape(-1, vectors[0][0].numel()), vectors)
    return tuple(item.view(*feat.shape[:-1], vectors[0].size(1)) for item in scores)


class _HeadScores(torch.autograd.Function):
    """Plain operators would keep the features' float32 copy for the backward pass; this makes it twice."""

    @staticmethod
    def forward(ctx: Any, feat: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        scores, matrix = scores_of_rows(feat.reshape(-1, vectors[0][0].numel()), vectors)
        ctx.save_for_backward(feat, matrix, *vectors)
        return tuple(item.view(*feat.shape[:-1], vectors[0].size(1)) for item in scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        feat, matrix, *vectors = ctx.saved_tensors
        heads, width = vectors[0].shape[1:]
        rows, grads = feat.reshape(-1, heads * width), tuple(item.reshape(-1, heads) for item in grads)
        needs_rows, *needed = ctx.needs_input_grad
        grad_rows, grad_vectors = gradients_of_scores(grads, rows, matrix, vectors, needs_rows, needed)
        return None if grad_rows is None else grad_rows.view(feat.shape), *grad_vectors


def edge_scores(features: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
    r"""What each head's learned vector sees in the features of edges, mapped.

    .. math::
        s_{ijh} = \langle \mathbf{a}_h, \mathbf{W}_h \mathbf{e}_{ij} \rangle

    Both factors are linear: their product is taken first, so that no edge gets H * D numbers.

    Args:
        features: of the edges (E, A).
        weight: :math:`\mathbf{W}`, (H * D, A), of a linear map without bias.
        vector: :math:`\mathbf{a}`, (1, H, D).

    Returns:
        (E, H).
    """
    of_heads = map_to_scores(weight, vector)
    return F.linear(features, of_heads) if features.is_cuda else _LinearInParts.apply(features, of_heads)


def map_to_scores(weight: Tensor, vector: Tensor) -> Tensor:
    """The linear map (H, A) of edges' features to what each head's vector sees of them (`edge_scores`)."""
    heads, width = vector.shape[1:]
    return (weight.view(heads, width, -1) * vector.view(heads, width, 1)).sum(1)


class _LinearInParts(torch.autograd.Function):
    """A linear map whose gradient is summed in parts."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(features, weight)
        return F.linear(features, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        grad_features = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_features, None
        return grad_features, product_in_parts(grad, features)


def product_in_parts(left: Tensor, right: Tensor) -> Tensor:
    """``left.t() @ right`` of tall matrices, products of `_PART` rows each added up."""
    whole = left.shape[0] // _PART * _PART
    rest = left[whole:].t() @ right[whole:]
    if not whole:
        return rest
    parts = left[:whole].unflatten(0, (-1, _PART)).transpose(1, 2), right[:whole].unflatten(0, (-1, _PART))
    return torch.bmm(*parts).sum(0) + rest


def scores_of_rows(rows: Tensor, vectors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
    """:func:`head_scores` of features of two dimensions, nothing being recorded.

    On CUDA one product with the vectors as the blocks of block-diagonal matrices, which the backward pass
    wants back.
    """
    heads, dtype = vectors[0].shape[1], accumulation_dtype(rows.dtype)
    if _has_kernel(rows):
        scores = [rows.new_empty(rows.shape[0], heads, dtype=dtype) for _ in vectors]
        operands = [_operand(vector, dtype) for vector in vectors]
        _C.head_scores(args=_arguments(rows, operands, scores), threads=queue(-1))
        return scores, None
    matrix = _block_diagonal(vectors, dtype)
    blocks = matrix.view(len(vectors), heads, rows.size(1)).transpose(1, 2)
    factors = cast(rows, dtype).expand(len(vectors), -1, -1), blocks
    if is_plain_eager(rows):
        # Autocast ignores products with `out`, which also costs the host less.
        out = torch.bmm(*factors, out=matrix.new_empty(len(vectors), rows.size(0), heads))
    else:  # exported programs have gradients, and may not write
        with torch.autocast(rows.device.type, enabled=False):
            out = torch.bmm(*factors)
    return out.unbind(), matrix


def gradients_of_scores(
    grads: Sequence[Tensor],
    rows: Tensor,
    matrix: Tensor | None,
    vectors: Sequence[Tensor],
    needs_rows: bool,
    needed: Sequence[bool],
    grad_rows: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of :func:`scores_of_rows`, differentiable again where gradients are recorded.

    Args:
        grads: of the scores of each vector, (N, H) in their dtype.
        rows: features.
        matrix: second result of the forward pass.
        vectors: as in the forward pass.
        needs_rows: whether the gradient of the features is wanted.
        needed: whether that of each vector is.
        grad_rows: another gradient of the features, contiguous, which this one is added to in place.
    """
    heads, width = vectors[0].shape[1:]
    dtype = accumulation_dtype(rows.dtype)
    if _has_kernel(rows) and is_plain_eager(grads[0]) and not torch.is_grad_enabled():
        adds = grad_rows is not None
        if grad_rows is None and needs_rows:
            grad_rows = rows.new_empty(rows.shape)
        operands = [_operand(vector, dtype) for vector in vectors]
        of_scores = [_operand(grad, dtype) for grad in grads]  # alive until the launch
        found = [
            torch.empty_like(operand) if wanted else None
            for operand, wanted in zip(operands, needed, strict=True)
        ]
        second = found[1] if found[1:] else None
        arguments = _arguments(rows, operands, of_scores)
        _C.head_scores_backward(
            forward=arguments,
            grad_v=grad_rows,
            adds=adds,
            grad_first=found[0],
            grad_second=second,
            threads=queue(-1),
        )
        return grad_rows, [
            None if grad is None else cast(grad, vector.dtype)
            for grad, vector in zip(found, vectors, strict=True)
        ]
    grad = torch.cat(tuple(grads), dim=1)
    if needs_rows:
        if matrix is None or torch.is_grad_enabled():  # second derivatives pass through the vectors
            matrix = _block_diagonal(vectors, dtype)
        product = grad @ matrix
        grad_rows = cast(product, rows.dtype) if grad_rows is None else grad_rows.add_(product)
    grad_vectors: list[Tensor | None] = [None] * len(vectors)
    if any(needed):
        of_rows = cast(rows, dtype)
        products = grad.t() @ of_rows if rows.shape[0] >= _MANY_ROWS else (of_rows.t() @ grad).t()
        products = products.view(len(vectors), heads, heads, width)
        blocks = products.diagonal(dim1=1, dim2=2).transpose(1, 2).contiguous().split(1)
        grad_vectors = [
            cast(block, vector.dtype) if wanted else None
            for block, vector, wanted in zip(blocks, vectors, needed, strict=True)
        ]
    return grad_rows, grad_vectors


def _has_kernel(rows: Tensor) -> bool:
    """Whether the CPU's kernel supports the call; tensors of traces have no address."""
    return rows.is_cpu and is_plain_eager(rows) and rows.numel() > 0 and rows.stride(1) == 1


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return written_out(cast(tensor, dtype)).contiguous()


def _arguments(rows: Tensor, vectors: Sequence[Tensor], scores: Sequence[Tensor]) -> _C.HeadScoresArgs:
    second = (vectors[1], scores[1]) if len(vectors) > 1 else (None, None)
    return _C.HeadScoresArgs(
        heads=vectors[0].shape[1],
        v=rows,
        first_vector=vectors[0],
        second_vector=second[0],
        first_scores=scores[0],
        second_scores=second[1],
    )


def _block_diagonal(vectors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(number of vectors * H, H * D): the block-diagonal matrices of the vectors' heads below each other."""
    heads = torch.cat(tuple(vectors)).to(dtype)  # (number of vectors, H, D)
    if heads.size(1) == 1:
        return heads.view(heads.size(0), -1)
    return torch.diag_embed(heads.transpose(1, 2), dim1=1, dim2=2).view(heads.size(0) * heads.size(1), -1)
