"""Scores of additive attention: dot products of each head's features with a learned vector."""

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

#: Number of rows from which the vectors' gradients are computed as ``grads.t() @ rows``. For fewer rows and
#: four heads of 32, cuBLAS takes 52 us for that product, but 7 us for ``(rows.t() @ grads).t()``. The
#: difference is a third of a captured step of GAT on 64 molecules. For more rows, the second form takes up to
#: twice as long.
_MANY_ROWS = 2_048
#: Number of edges per product on the CPU; the products are added up. One product over 60,000 edges has a
#: relative error of 3e-6; products of this size have 2e-7.
_PART = 256


def head_scores(feat: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    r"""The dot products of each head's features with learned vectors (GAT, Veličković et al., section 2.1).

    .. math::
        s_{ih} = \langle \mathbf{a}_h, \mathbf{x}_{ih} \rangle

    The features are the only tensor of their size that the backward pass needs. Autocast does not change the
    dtype.

    Args:
        feat: features (N, ..., H * D), the heads side by side.
        vectors: (1, H, D) each, one or two.

    Returns:
        One contiguous tensor (N, ..., H) for each vector, float32, or float64 for float64 features.
    """
    # `torch.compile` would differentiate an autograd.Function once only, without an error: saved tensors are
    # constants of its backward pass.
    if torch.is_grad_enabled() and is_plain_eager(feat):
        return _HeadScores.apply(feat, *vectors)
    scores, _ = scores_of_rows(feat.reshape(-1, vectors[0][0].numel()), vectors)
    return tuple(item.view(*feat.shape[:-1], vectors[0].size(1)) for item in scores)


class _HeadScores(torch.autograd.Function):
    """Saves 16-bit features and casts them in both passes. Plain operators would save a float32 copy."""

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
    r"""Dot products of each head's learned vector with linear maps of the edges' features.

    .. math::
        s_{ijh} = \langle \mathbf{a}_h, \mathbf{W}_h \mathbf{e}_{ij} \rangle

    The vector and the linear map are multiplied first, so that no H * D numbers per edge are computed.

    Args:
        features: features of the edges (E, A).
        weight: :math:`\mathbf{W}`, (H * D, A), of a linear map without bias.
        vector: :math:`\mathbf{a}`, (1, H, D).

    Returns:
        (E, H).
    """
    of_heads = map_to_scores(weight, vector)
    if features.is_cuda or not is_plain_eager(features):  # traces: as in `head_scores`
        return F.linear(features, of_heads)
    return _LinearInParts.apply(features, of_heads)


def map_to_scores(weight: Tensor, vector: Tensor) -> Tensor:
    """The linear map (H, A) from the edges' features to the scores of each head (`edge_scores`)."""
    heads, width = vector.shape[1:]
    return (weight.view(heads, width, -1) * vector.view(heads, width, 1)).sum(1)


class _LinearInParts(torch.autograd.Function):
    """A linear map; the gradient of its weight is summed in parts (`product_in_parts`)."""

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
    """``left.t() @ right`` of tall matrices, as the sum of products of `_PART` rows each."""
    if not is_plain_eager(left):  # a trace would treat sizes 0 and 1 as constants
        count = left.shape[0] // _PART + 2
        padding = (0, 0, 0, count * _PART - left.shape[0])
        first, second = (F.pad(each, padding).view(count, _PART, each.shape[1]) for each in (left, right))
        return torch.bmm(first.transpose(1, 2), second).sum(0)
    whole = left.shape[0] // _PART * _PART
    rest = left[whole:].t() @ right[whole:]
    if not whole:
        return rest
    parts = left[:whole].unflatten(0, (-1, _PART)).transpose(1, 2), right[:whole].unflatten(0, (-1, _PART))
    return torch.bmm(*parts).sum(0) + rest


def scores_of_rows(rows: Tensor, vectors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
    """:func:`head_scores` for a matrix of features, without autograd.

    On CUDA, one product with block-diagonal matrices of the vectors computes all scores. The second result is
    these matrices, for the backward pass.
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
        # Autocast ignores products with `out`. This takes less host time than turning autocast off.
        out = torch.bmm(*factors, out=matrix.new_empty(len(vectors), rows.size(0), heads))
    else:  # products with `out` are not differentiable, and exported programs must not write in place
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
    """Gradients of :func:`scores_of_rows`, differentiable again if gradients are enabled.

    Args:
        grads: gradients of the scores of each vector, (N, H), in the dtype of the scores.
        rows: features.
        matrix: second result of the forward pass.
        vectors: as in the forward pass.
        needs_rows: whether the gradient of the features is wanted.
        needed: for each vector, whether its gradient is wanted.
        grad_rows: another gradient of the features, contiguous, to which the result is added in place.
    """
    heads, width = vectors[0].shape[1:]
    dtype = accumulation_dtype(rows.dtype)
    if _has_kernel(rows) and is_plain_eager(grads[0]) and not torch.is_grad_enabled():
        adds = grad_rows is not None
        if grad_rows is None and needs_rows:
            grad_rows = rows.new_empty(rows.shape)
        operands = [_operand(vector, dtype) for vector in vectors]
        of_scores = [_operand(grad, dtype) for grad in grads]  # keeps copies alive until the launch
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
        if matrix is None or torch.is_grad_enabled():  # for second derivatives with respect to the vectors
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
    """Returns whether the CPU kernel supports the call; not in a trace, where tensors have no address."""
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
    """(number of vectors * H, H * D): one block-diagonal matrix per vector, stacked vertically."""
    heads = torch.cat(tuple(vectors)).to(dtype)  # (number of vectors, H, D)
    if heads.size(1) == 1:
        return heads.view(heads.size(0), -1)
    return torch.diag_embed(heads.transpose(1, 2), dim1=1, dim2=2).view(heads.size(0) * heads.size(1), -1)
