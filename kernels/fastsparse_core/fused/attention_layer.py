"""Linear maps, attention and bias of a layer as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsparse_core import policy
from fastsparse_core.fused.head_scores import gradients_of_scores, head_scores, scores_of_rows
from fastsparse_core.fused.joint_linear import is_plain_linear
from fastsparse_core.ops import _additive_attention_csr, _gatv2_attention_csr
from fastsparse_core.ops import _attention_fused as kernels
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._common import (
    CAST,
    DTYPE_CODE,
    PLAIN,
    accumulation_dtype,
    autocast_dtype,
    cast,
    is_first_derivative,
    is_plain_eager,
    product_in,
    sum_of_rows,
    version_of,
    without_autocast,
)
from fastsparse_core.ops.attention import drawn_by_replays, draw_seed
from fastsparse_core.structure.adjacency import Adjacency


class _Call(NamedTuple):
    """What a call is, besides its tensors with gradients."""

    score: type[_Score]
    adj: Adjacency
    heads: int
    scale: float
    dropout_p: float
    seed: Tensor | None
    #: Of the features, as they are multiplied.
    dtype: torch.dtype
    #: Columns that each linear map gives.
    widths: tuple[int, ...]
    mean: bool
    num_vectors: int
    keeps_result: bool


def attention_layer(
    score: type[_Score],
    adj: Adjacency,
    x: Tensor,
    maps: Sequence[Any],
    vectors: Sequence[Tensor],
    bias: Tensor | None,
    *,
    heads: int,
    scale: float,
    dropout_p: float = 0.0,
    mean: bool = False,
    kind: type[nn.Module] = nn.Linear,
) -> Tensor | None:
    r"""Attention between the rows of linear maps of the same features.

    .. math::
        \mathbf{Y} = \mathrm{Attention}(\mathbf{X} \mathbf{W}_1^{\top} + \mathbf{b}_1, \dots) + \mathbf{b}

    Equal to the operators one after the other up to rounding.

    Args:
        score: :class:`Additive`, :class:`Gatv2` or :class:`DotProduct`.
        adj: square structure.
        x: features (N, F) of sources and destinations.
        maps: linear layers, as `score` says.
        vectors: learned vectors of the heads, as `score` says.
        bias: of the result; None: 0.
        heads: number of heads.
        scale: of dot products, or the slope of the leaky ReLU.
        dropout_p: probability with which a weight is dropped.
        mean: whether the result is the mean of the heads.
        kind: the class of linear layers that the framework has.

    Returns:
        (N, heads * D), or (N, D) for the mean, in the autocast dtype where that is on; differentiable, twice
        too. None where the operators have to run one after the other: hooks on a linear map, traces,
        tensors of other devices or dtypes, no kernel.
    """
    if not (
        is_plain_eager(x)
        and type(adj) is Adjacency
        and x.dim() == 2
        and x.layout is torch.strided
        and x.shape[0] == adj.num_src == adj.num_dst
    ):
        return None
    weights, biases = [], []
    for module in maps:
        if not is_plain_linear(module, kind):
            return None
        parameters = module._parameters
        weights.append(parameters.get("weight"))
        if parameters["bias"] is not None:
            biases.append(parameters["bias"])
    if biases and len(biases) < len(weights):
        return None
    tensors = [*vectors, *weights, *biases]
    device, dtype, weight_dtype = x.device, x.dtype, weights[0].dtype
    for tensor in tensors if bias is None else (*tensors, bias):
        if (
            type(tensor) not in PLAIN
            or tensor.device != device
            or tensor.dtype != weight_dtype
            or tensor.is_neg()
        ):
            return None
    if device != adj.col.device:
        return None
    records = torch.is_grad_enabled()
    if records and not all([weight.requires_grad for weight in weights]):
        if any(tensor is not None and tensor.requires_grad for tensor in (x, bias, *tensors)):
            return None  # features that no weight's gradient needs may be written before the backward pass
        records = False
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        product_dtype = autocast_dtype(x) or dtype
        if dtype not in CAST or weight_dtype not in CAST or (x.requires_grad and dtype != product_dtype):
            return None  # such features would have to be kept as they came, for second derivatives
        dtype = product_dtype
    elif dtype != weight_dtype or dtype not in DTYPE_CODE:
        return None
    widths = tuple([weight.shape[0] for weight in weights])
    if not score.has_kernel(adj, dtype, widths, heads, scale, policy.requested("attention", "auto")):
        return None
    keeps_result = records and x.is_cuda and score.reads_result
    if keeps_result and bias is None and not mean and not score.adds(widths):
        return None  # the result would be kept as it is, and nobody could write to it
    seed = None
    if dropout_p:
        if drawn_by_replays(dropout_p):
            return None
        dropout_p, seed = draw_seed(dropout_p)
    call = _Call(score, adj, heads, scale, dropout_p, seed, dtype, widths, mean, len(vectors), keeps_result)
    if records:
        result: Tensor = _AttentionLayer.apply(call, x, bias, *tensors)
        return result
    return _attend(call, x, bias, tensors)[0]


# ---------------------------------------------------------------- kinds of scores


class _Score:
    """A kind of attention on the results of a layer's linear maps, which lie side by side in one matrix."""

    #: Whether the backward pass on CUDA reads the result.
    reads_result: ClassVar[bool]

    @staticmethod
    def adds(widths: tuple[int, ...]) -> bool:
        """Whether one of the linear maps is added to the result."""
        return False

    @staticmethod
    def has_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float, algorithm: str
    ) -> bool:
        """Whether the kernels serve such a call and its backward pass, without anything to be built."""
        raise NotImplementedError

    @staticmethod
    def forward(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        """Result of all heads, and tensors for the backward pass."""
        raise NotImplementedError

    @staticmethod
    def backward(
        call: _Call,
        grad: Tensor,
        joint: Tensor,
        vectors: Sequence[Tensor],
        kept: Sequence[Any],
        needed: Sequence[bool],
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Gradients of the linear maps' results, side by side, and of the vectors that need one."""
        raise NotImplementedError

    @staticmethod
    def formula(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The result by operators that are differentiable twice."""
        raise NotImplementedError


class Additive(_Score):
    """GAT: one linear map gives the values, two vectors of every head the scores of sources and destinations."""

    reads_result = False

    @staticmethod
    def has_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float, algorithm: str
    ) -> bool:
        if algorithm == "unfused":
            return False
        return not (adj.col.is_cuda and _additive_attention_csr.obstacle_of(dtype, widths[0], heads))

    @staticmethod
    def forward(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        (src, dst), matrix = scores_of_rows(joint, vectors)
        out, lse = kernels.additive(call.adj, dst, src, joint, None, call.scale, call.dropout_p, call.seed)
        return out, (src, dst, lse, matrix)

    @staticmethod
    def backward(
        call: _Call,
        grad: Tensor,
        joint: Tensor,
        vectors: Sequence[Tensor],
        kept: Sequence[Any],
        needed: Sequence[bool],
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        src, dst, lse, matrix = kept
        grad_dst, grad_src, grad_v, _ = kernels.additive_gradients(
            call.adj, grad, dst, src, joint, None, lse, call.scale, call.dropout_p, call.seed
        )
        _, grad_vectors = gradients_of_scores(
            (grad_src, grad_dst), joint, matrix, vectors, True, needed, grad_v
        )
        return grad_v, grad_vectors

    @staticmethod
    def formula(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        src, dst = head_scores(joint, *vectors)
        score = unfused.additive_scores(call.adj, dst, src, call.scale, None)
        values = unfused.with_heads(joint, call.heads)
        return unfused.aggregate(call.adj, score, values, call.dropout_p, call.seed).flatten(1)


class Gatv2(_Score):
    """GATv2: linear maps of sources and destinations, or one for both, and a vector of every head."""

    reads_result = True

    @staticmethod
    def has_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float, algorithm: str
    ) -> bool:
        if algorithm == "unfused":
            return False
        return not (adj.col.is_cuda and _gatv2_attention_csr.obstacle_of(dtype, widths[0], scale, heads))

    @staticmethod
    def forward(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        att = _vectors_of_heads(call, vectors)
        src, dst = _ends(call, joint)
        out, lse = kernels.gatv2(call.adj, dst, src, att, call.scale, call.dropout_p, call.seed)
        return out, (lse, out if call.keeps_result else None)

    @staticmethod
    def backward(
        call: _Call,
        grad: Tensor,
        joint: Tensor,
        vectors: Sequence[Tensor],
        kept: Sequence[Any],
        needed: Sequence[bool],
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        lse, out = kept
        att = _vectors_of_heads(call, vectors)
        src, dst = _ends(call, joint)
        grad_dst, grad_src, grad_att = kernels.gatv2_gradients(
            call.adj, grad, dst, src, att, out, lse, call.scale, call.dropout_p, call.seed
        )
        (vector,) = vectors
        grad_vector = cast(grad_att.view(vector.shape), vector.dtype) if needed[0] else None
        if src is dst:
            return grad_src.add_(grad_dst), (grad_vector,)
        return torch.cat((grad_src, grad_dst), dim=1), (grad_vector,)

    @staticmethod
    def formula(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        src, dst = (unfused.with_heads(end, call.heads) for end in _ends(call, joint))
        score = unfused.gatv2_scores(call.adj, dst, src, _vectors_of_heads(call, vectors), call.scale)
        return unfused.aggregate(call.adj, score, src, call.dropout_p, call.seed).flatten(1)


class DotProduct(_Score):
    """Transformers: linear maps give keys, values, queries and perhaps what is added to the result."""

    reads_result = True

    @staticmethod
    def adds(widths: tuple[int, ...]) -> bool:
        return len(widths) == 4

    @staticmethod
    def has_kernel(
        adj: Adjacency, dtype: torch.dtype, widths: tuple[int, ...], heads: int, scale: float, algorithm: str
    ) -> bool:
        if adj.col.is_cuda:
            # The operator notes which structures have blocks.
            return ("attention", dtype, widths[2], widths[1], heads, algorithm) in adj.plans
        return algorithm in ("auto", "fused3s")

    @staticmethod
    def forward(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
        key, value, query, *skips = joint.split(call.widths, dim=1)
        options = (call.scale, call.dropout_p, call.seed, call.heads)
        out, lse = kernels.dot_product(call.adj, query, key, value, None, *options)
        if not call.keeps_result:
            return out.add_(skips[0]) if skips else out, (lse, None)
        return out + skips[0] if skips else out, (lse, out)

    @staticmethod
    def backward(
        call: _Call,
        grad: Tensor,
        joint: Tensor,
        vectors: Sequence[Tensor],
        kept: Sequence[Any],
        needed: Sequence[bool],
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        lse, out = kept
        key, value, query, *skips = joint.split(call.widths, dim=1)
        options = (call.scale, call.dropout_p, call.seed, call.heads)
        grad_query, grad_key, grad_value, _ = kernels.dot_product_gradients(
            call.adj, grad, query, key, value, None, out, lse, *options
        )
        grads = (grad_key, grad_value, grad_query, grad) if skips else (grad_key, grad_value, grad_query)
        return torch.cat(grads, dim=1), ()

    @staticmethod
    def formula(call: _Call, joint: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        key, value, query, *skips = joint.split(call.widths, dim=1)
        key, value, query = (unfused.with_heads(end, call.heads) for end in (key, value, query))
        score = unfused.dot_product_scores(call.adj, query, key, call.scale, None)
        out = unfused.aggregate(call.adj, score, value, call.dropout_p, call.seed).flatten(1)
        return out + skips[0] if skips else out


def _vectors_of_heads(call: _Call, vectors: Sequence[Tensor]) -> Tensor:
    """(heads, D) in the accumulation dtype."""
    return cast(vectors[0].view(call.heads, -1), accumulation_dtype(call.dtype))


def _ends(call: _Call, joint: Tensor) -> tuple[Tensor, ...]:
    """Features of sources and destinations."""
    return joint.split(call.widths, dim=1) if len(call.widths) == 2 else (joint, joint)


# ---------------------------------------------------------------- the node of autograd's graph


def _attend(
    call: _Call, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """The result; features and weight as they were multiplied, and their product; more to keep."""
    vectors, features = tensors[: call.num_vectors], cast(x, call.dtype)
    joint, matrix = _project(call, features, tensors)
    out, kept = call.score.forward(call, joint, vectors)
    if call.mean:
        out = out.view(out.shape[0], call.heads, -1).mean(dim=1)
    if bias is not None:
        bias = cast(bias, out.dtype)
        out = out + bias if call.keeps_result and not call.mean else out.add_(bias)
    return out, features, matrix, joint, kept


def _project(call: _Call, features: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The linear maps' results side by side, and the weight of the one product that gives them."""
    first, count = call.num_vectors, len(call.widths)
    matrix, bias = tensors[first], None
    if len(tensors) > first + count:
        bias = tensors[first + count]
    if count > 1:
        matrix = torch.cat(tensors[first : first + count])
        bias = None if bias is None else torch.cat(tensors[first + count :])
    matrix = cast(matrix, call.dtype)
    return F.linear(features, matrix, None if bias is None else cast(bias, call.dtype)), matrix


class _AttentionLayer(torch.autograd.Function):
    """The kernels' gradients, then those of the linear maps: dW = dJ^T X, dX = dJ W."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        out, features, matrix, joint, kept = _attend(call, x, bias, tensors)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        vectors, maps = tensors[: call.num_vectors], tensors[call.num_vectors :]
        # Second derivatives alone need them, so they may be written before the backward pass.
        ctx.maps = maps, [version_of(tensor) for tensor in maps]
        ctx.save_for_backward(features, matrix if ctx.needs_input_grad[1] else None, joint, *vectors, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *without_autocast(_gradients, ctx, grad))


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    call, (features, matrix, joint, *rest) = ctx.call, ctx.saved_tensors
    _, needs_x, needs_bias, *needed = ctx.needs_input_grad
    maps, versions = ctx.maps
    num_vectors, num_maps = call.num_vectors, len(call.widths)
    vectors, kept = rest[:num_vectors], rest[num_vectors:]
    grad_bias = sum_of_rows(grad, ctx.bias_dtype) if needs_bias else None
    if not is_first_derivative(grad):
        return _second_gradients(ctx, grad, features, vectors, grad_bias)
    if call.mean:
        grad = (grad / call.heads).unsqueeze(1).expand(-1, call.heads, -1).flatten(1)
    grad, grad_vectors = call.score.backward(call, grad, joint, vectors, kept, needed[:num_vectors])
    grad_x = torch.mm(grad, matrix) if needs_x else None
    weight_dtype = maps[0].dtype
    grad_weight = product_in(grad.t(), features, weight_dtype)
    grads = grad_weight.split(call.widths) if num_maps > 1 else (grad_weight,)
    if len(maps) > num_maps:
        sums = sum_of_rows(grad, weight_dtype)
        grads = (*grads, *(sums.split(call.widths) if num_maps > 1 else (sums,)))
    return grad_x, grad_bias, *grad_vectors, *grads


def _second_gradients(
    ctx: Any, grad: Tensor, features: Tensor, vectors: Sequence[Tensor], grad_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves."""
    call, (maps, versions) = ctx.call, ctx.maps
    if [version_of(tensor) for tensor in maps] != versions:
        raise RuntimeError(
            "weight: modified by an inplace operation between the forward pass and a backward pass with "
            "create_graph=True, which needs it as it was"
        )

    def compute(features: Tensor, *tensors: Tensor) -> Tensor:
        joint, _ = _project(call, features, tensors)
        out = call.score.formula(call, joint, tensors[: call.num_vectors])
        return out.view(out.size(0), call.heads, -1).mean(dim=1) if call.mean else out

    _, needs_x, _, *needed = ctx.needs_input_grad
    with torch.enable_grad():
        grad_x, *grads = kernels._unfused_gradients(
            compute, grad, (features, *vectors, *maps), (needs_x, *needed)
        )
    return grad_x, grad_bias, *grads
