"""The kinds of attention that `attention_layer` computes in one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.fused.head_scores import gradients_of_scores, head_scores, scores_of_rows
from fastsparse_core.ops import _attention_launch as launch
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._attention import unsupported_reason
from fastsparse_core.ops._attention_launch import Call
from fastsparse_core.ops._dtypes import accumulation_dtype, cast
from fastsparse_core.structure.adjacency import Adjacency

Tensors = Sequence[Tensor]
Flags = Sequence[bool]
#: The result of all heads, and the tensors that the backward pass needs.
Result = tuple[Tensor, tuple[Any, ...]]
Gradients = tuple[Tensor, Sequence[Tensor | None]]
#: Features of the edges (num_values, A); the weight (heads * D, A) that maps them to the heads' features, or
#: None; and the weight (heads, A) that maps them to the scores, only for additive attention.
LayerEdges = tuple[Tensor, Tensor | None, Tensor | None]


class LayerCall(NamedTuple):
    """Arguments of a layer's call, without the tensors that have gradients."""

    score: type[Score]
    adj: Adjacency
    heads: int
    scale: float
    dropout_p: float
    seed: Tensor | None
    #: Dtype of the features in the products.
    dtype: torch.dtype
    #: Number of columns of each linear map's result.
    widths: tuple[int, ...]
    mean: bool
    num_vectors: int
    #: True if the backward pass reads the result. Then callers must not overwrite the result.
    keeps_result: bool
    #: Object of `_C` that computes everything after the linear maps, with one call per pass; None: operators
    #: run one by one.
    plan: Any


class Score:
    """A kind of attention. The input is one matrix, the results of the layer's linear maps side by side."""

    #: True if the backward pass on CUDA reads the result.
    reads_result: ClassVar[bool]
    #: AttentionScore in kernels/include/fastsparse/views.h.
    code: ClassVar[int]
    #: Smallest number of linear maps for which the CPU's plan is used.
    least_maps: ClassVar[int]

    @staticmethod
    def adds(widths: tuple[int, ...]) -> bool:
        """Returns whether one of the linear maps is added to the result."""
        return False

    @staticmethod
    def has_cuda_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float
    ) -> bool:
        """Returns whether CUDA kernels support the call and its backward pass."""
        raise NotImplementedError

    @staticmethod
    def forward(call: LayerCall, joint: Tensor, vectors: Tensors) -> Result:
        """Result of all heads, and tensors for the backward pass."""
        raise NotImplementedError

    @staticmethod
    def backward(
        call: LayerCall, grad: Tensor, joint: Tensor, vectors: Tensors, kept: Sequence[Any], needed: Flags
    ) -> Gradients:
        """Gradients of the linear maps' results, side by side, and of the vectors that need one."""
        raise NotImplementedError

    @staticmethod
    def formula(call: LayerCall, joint: Tensor, vectors: Tensors, edges: LayerEdges | None) -> Tensor:
        """Computes the result with operators that are differentiable twice."""
        raise NotImplementedError


class _Additive(Score):
    """GAT: a linear map gives the values; two vectors per head give the scores of both ends."""

    reads_result, code, least_maps = False, 1, 1

    @staticmethod
    def has_cuda_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float
    ) -> bool:
        return not unsupported_reason(adj, launch.ADDITIVE, dtype, widths[0], heads)

    @staticmethod
    def forward(call: LayerCall, joint: Tensor, vectors: Tensors) -> Result:
        (src, dst), matrix = scores_of_rows(joint, vectors)
        out, lse, _ = launch.forward(call.adj, _operands(call, dst, src, joint))
        return out, (src, dst, lse, matrix)

    @staticmethod
    def backward(
        call: LayerCall, grad: Tensor, joint: Tensor, vectors: Tensors, kept: Sequence[Any], needed: Flags
    ) -> Gradients:
        src, dst, lse, matrix = kept
        operands = _operands(call, dst, src, joint)
        grad_dst, grad_src, grad_v, *_ = launch.backward(call.adj, operands, grad, None, lse)
        assert grad_v is not None
        _, grad_vectors = gradients_of_scores(
            (grad_src, grad_dst), joint, matrix, vectors, True, needed, grad_v
        )
        return grad_v, grad_vectors

    @staticmethod
    def formula(call: LayerCall, joint: Tensor, vectors: Tensors, edges: LayerEdges | None) -> Tensor:
        (src, dst), bias = head_scores(joint, *vectors), None
        features, weight, of_scores = edges or (None, None, None)
        if features is not None and of_scores is not None:
            bias = F.linear(features, of_scores)
        if weight is None:
            return unfused.attention(call.adj, *_operands(call, dst, src, joint, bias=bias))
        # Computed as dot-product attention, because it adds edge features to the values. Its queries are
        # zeros, so its scores are the bias.
        score = unfused.additive_scores(call.adj, dst, src, call.scale, bias)
        operands = _operands(call, torch.zeros_like(joint), joint, joint, edges=edges, bias=score)
        return unfused.attention(call.adj, *operands._replace(scale=1.0, kind=launch.DOT_PRODUCT))


class _Gatv2(Score):
    """GATv2: linear maps of sources and destinations, or one for both, and a vector per head."""

    reads_result, code, least_maps = True, 2, 2

    @staticmethod
    def has_cuda_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float
    ) -> bool:
        return not unsupported_reason(adj, launch.GATV2, dtype, widths[0], heads, scale)

    @staticmethod
    def forward(call: LayerCall, joint: Tensor, vectors: Tensors) -> Result:
        src, dst = _ends(call, joint)
        operands = _operands(call, dst, src, att=_vectors_of_heads(call, vectors))
        out, lse, _ = launch.forward(call.adj, operands)
        return out, (lse, out if call.keeps_result else None)

    @staticmethod
    def backward(
        call: LayerCall, grad: Tensor, joint: Tensor, vectors: Tensors, kept: Sequence[Any], needed: Flags
    ) -> Gradients:
        lse, out = kept
        src, dst = _ends(call, joint)
        operands = _operands(call, dst, src, att=_vectors_of_heads(call, vectors))
        grad_dst, grad_src, _, grad_att, *_ = launch.backward(call.adj, operands, grad, out, lse)
        assert grad_att is not None
        (vector,) = vectors
        grad_vector = cast(grad_att.view(vector.shape), vector.dtype) if needed[0] else None
        if src is dst:
            return grad_src.add_(grad_dst), (grad_vector,)
        return torch.cat((grad_src, grad_dst), dim=1), (grad_vector,)

    @staticmethod
    def formula(call: LayerCall, joint: Tensor, vectors: Tensors, edges: LayerEdges | None) -> Tensor:
        src, dst = _ends(call, joint)
        att = _vectors_of_heads(call, vectors)
        return unfused.attention(call.adj, *_operands(call, dst, src, att=att, edges=edges))


class _DotProduct(Score):
    """Transformers: linear maps give keys, values, queries and, optionally, a term added to the result."""

    reads_result, code, least_maps = True, 0, 3

    @staticmethod
    def adds(widths: tuple[int, ...]) -> bool:
        return len(widths) == 4

    @staticmethod
    def has_cuda_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float
    ) -> bool:
        # If heads are not a multiple of 16 bytes, the operator has to pad them.
        is_whole = widths[0] // heads * dtype.itemsize % 16 == 0
        return is_whole and not unsupported_reason(adj, launch.DOT_PRODUCT, dtype, widths[0], heads)

    @staticmethod
    def forward(call: LayerCall, joint: Tensor, vectors: Tensors) -> Result:
        key, value, query, *skips = joint.split(call.widths, dim=1)
        out, lse, _ = launch.forward(call.adj, _operands(call, query, key, value))
        if not call.keeps_result:
            return out.add_(skips[0]) if skips else out, (lse, None)
        return out + skips[0] if skips else out, (lse, out)

    @staticmethod
    def backward(
        call: LayerCall, grad: Tensor, joint: Tensor, vectors: Tensors, kept: Sequence[Any], needed: Flags
    ) -> Gradients:
        lse, out = kept
        key, value, query, *skips = joint.split(call.widths, dim=1)
        operands = _operands(call, query, key, value)
        grad_query, grad_key, grad_value, *_ = launch.backward(call.adj, operands, grad, out, lse)
        assert grad_value is not None
        grads = (grad_key, grad_value, grad_query, grad) if skips else (grad_key, grad_value, grad_query)
        return torch.cat(grads, dim=1), ()

    @staticmethod
    def formula(call: LayerCall, joint: Tensor, vectors: Tensors, edges: LayerEdges | None) -> Tensor:
        key, value, query, *skips = joint.split(call.widths, dim=1)
        out = unfused.attention(call.adj, *_operands(call, query, key, value, edges=edges))
        return out + skips[0] if skips else out


ADDITIVE, GATV2, DOT_PRODUCT = _Additive, _Gatv2, _DotProduct


def _operands(
    call: LayerCall,
    dst: Tensor,
    src: Tensor,
    v: Tensor | None = None,
    *,
    att: Tensor | None = None,
    edges: LayerEdges | None = None,
    bias: Tensor | None = None,
) -> Call:
    """The call in the form that the attention operator takes."""
    edge, edge_weight, _ = edges or (None, None, None)
    options = (call.scale, call.dropout_p, call.seed, call.score.code, call.heads)
    return Call(dst, src, v, att, edge, edge_weight, bias, *options)


def _vectors_of_heads(call: LayerCall, vectors: Tensors) -> Tensor:
    """The first learned vectors as (heads, D), in the accumulation dtype."""
    return cast(vectors[0].view(call.heads, -1), accumulation_dtype(call.dtype))


def _ends(call: LayerCall, joint: Tensor) -> tuple[Tensor, ...]:
    """Features of sources and of destinations; the same tensor twice if there is only one linear map."""
    return joint.split(call.widths, dim=1) if len(call.widths) == 2 else (joint, joint)
