"""Linear maps, attention and bias of a layer in one node of autograd's graph, to save host time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsparse_core import _C, policy
from fastsparse_core.fused.attention_kinds import ADDITIVE, DOT_PRODUCT, GATV2, LayerCall, LayerEdges, Score
from fastsparse_core.fused.attention_on_cuda import (
    attend,
    differentiate,
    kept_for,
    numbers_of_state,
    plan_of,
    stacked,
    state_for_both,
)
from fastsparse_core.fused.head_scores import product_in_parts
from fastsparse_core.ops._attention_checks import draw_seed, drawn_by_replays
from fastsparse_core.ops._attention_launch import contiguous_and_aligned
from fastsparse_core.ops._autocast import (
    CAST,
    autocast_dtype,
    check_versions,
    is_any_autocast_enabled,
    product_in,
    versions_of,
    without_autocast,
)
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE, DTYPE_CODE, cast
from fastsparse_core.ops._eager import (
    PLAIN,
    direct,
    is_first_derivative,
    is_plain_eager,
    is_plain_linear,
    is_wrapped,
)
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._registration import FusedOperator, fits_one_operator
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.structure.adjacency import Adjacency

__all__ = ["ADDITIVE", "DOT_PRODUCT", "GATV2", "attention_layer"]


def attention_layer(
    score: type[Score],
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
    edges: tuple[Any, ...] | None = None,
) -> Tensor | None:
    r"""Attention between the results of linear maps of the same features.

    .. math::
        \mathbf{Y} = \mathrm{Attention}(\mathbf{X} \mathbf{W}_1^{\top} + \mathbf{b}_1, \dots) + \mathbf{b}

    The result equals that of separate operators up to rounding.

    Args:
        score: :data:`ADDITIVE`, :data:`GATV2` or :data:`DOT_PRODUCT`.
        adj: square structure.
        x: features (N, F) of sources and destinations.
        maps: linear layers, in the order of `score`; none: additive attention without a linear map.
        vectors: learned vectors of the heads, in the order of `score`.
        bias: bias of the result; None: 0.
        heads: number of heads.
        scale: factor of dot products, or slope of the leaky ReLU.
        dropout_p: probability with which a weight is dropped.
        mean: whether the result is the mean of the heads.
        kind: the framework's class of linear layers.
        edges: edge features (num_values, A) in the caller's edge order, and a linear layer without bias that
            maps them to (num_values, heads * D). Additive attention adds the mapped features to the values;
            if the layer is None, it adds nothing. Additive attention also takes a third item, a weight
            (heads, A), whose product with the features is added to the scores. Edge features are supported on
            the CPU only.

    Returns:
        (N, heads * D), or (N, D) for the mean, in autocast's dtype if it is on; differentiable twice. None if
        operators have to run one by one: a linear map has hooks, the call is traced by another tracer than
        `torch.compile`, devices or dtypes differ, or there is no kernel.
    """
    is_traced = not is_plain_eager(x)
    if not (
        (type(adj) is Adjacency or is_traced)
        and x.dim() == 2
        and x.layout is torch.strided
        and x.shape[0] == adj.num_src == adj.num_dst
    ):
        return None
    weights, biases, sizes = [], [], []
    for module in maps:
        if not is_plain_linear(module, kind):
            return None
        weight, map_bias = module._parameters.get("weight"), module._parameters.get("bias")
        if type(weight) not in PLAIN:
            return None  # for example, a lazy module's parameter that has no content yet
        weights.append(weight)
        sizes.append(weight.shape[0])
        if map_bias is not None:
            biases.append(map_bias)
    if biases and len(biases) < len(weights):
        return None
    if is_traced:
        if edges is not None or not maps:
            return None
        return _traced(score, adj, x, weights, biases, vectors, bias, (heads, scale, dropout_p, mean))
    if not maps:
        sizes = [x.shape[1]]
    of_edges: Any = ()
    if edges is not None:
        of_edges = _edges(score, adj, edges, heads, sizes[0], kind)
        if of_edges is None:
            return None
    tensors = [*vectors, *weights, *biases]
    device, dtype, weight_dtype = x.device, x.dtype, tensors[len(vectors) if weights else 0].dtype
    for vector in vectors:
        if vector.numel() != sizes[0]:
            return None
    for tensor in (*tensors, *of_edges, bias):
        if tensor is not None and (
            type(tensor) not in PLAIN
            or tensor.device != device
            or tensor.dtype != weight_dtype
            or tensor.is_neg()
        ):
            return None
    if device != adj.col.device:
        return None
    records = torch.is_grad_enabled()
    if records and not maps:
        records = x.requires_grad or any(vector.requires_grad for vector in vectors)
    learns = True
    for weight in weights:
        learns &= weight.requires_grad
    if records and not learns:
        given = [each for each in (x, bias, *tensors, *of_edges) if each is not None]
        if True in [each.requires_grad for each in given]:
            return None  # the node would save features that the caller may overwrite before the backward pass
        records = False
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        product_dtype = autocast_dtype(x) or dtype
        if dtype not in CAST or weight_dtype not in CAST or (x.requires_grad and dtype != product_dtype):
            return None  # second derivatives would need the original features
        dtype = product_dtype
    elif dtype != weight_dtype or dtype not in DTYPE_CODE:
        return None
    widths, width = tuple(sizes), sizes[0]
    if not heads:
        raise ValueError("heads (num_heads in DGL's layers): expected at least 1, got 0")
    if (
        widths.count(width) < len(widths)
        or width % heads
        or (bias is not None and bias.shape != (width // heads if mean else width,))
    ):
        return None
    algorithm = policy.eager_requests().get("attention", "auto")
    if algorithm == "unfused" or (x.is_cuda and not score.has_cuda_kernel(adj, dtype, widths, heads, scale)):
        return None
    if score is DOT_PRODUCT and algorithm == "csr" and not x.is_cuda:
        return None  # the operator that runs instead warns that the CPU has no such kernel
    keeps_result = records and x.is_cuda and score.reads_result
    if keeps_result and bias is None and not mean and not score.adds(widths):
        return None  # the node would save the result, so the caller could not edit it in place
    seed = None
    if dropout_p:
        if drawn_by_replays(dropout_p):
            return None
        dropout_p, seed = draw_seed(dropout_p)
    plan = _plan(adj, x, score, dtype, widths, heads, scale, algorithm, records)
    if of_edges:
        if plan is None:
            return None
        if of_edges[1] is not None:
            features, weight, of_scores = of_edges
            features = features.to(dtype)
            features = features if features.stride(1) == 1 else features.contiguous()
            of_edges = features, weight.to(dtype).contiguous(), of_scores
    how = (dropout_p, seed, dtype, widths, mean, len(vectors), keeps_result, plan)
    call = LayerCall(score, adj, heads, scale, *how)
    if records:
        apply = _AttentionLayer.apply if is_wrapped(x) else _apply
        result: Tensor = apply(call, x, bias, *(of_edges or (None, None, None)), *tensors)
        return result
    return _attend(call, x, bias, of_edges or None, tuple(tensors))[0]


def _edges(
    score: type[Score],
    adj: Adjacency,
    edges: tuple[Any, ...],
    heads: int,
    width: int,
    kind: type[nn.Module],
) -> LayerEdges | None:
    """The edges' tensors in the form that the node takes; None if separate operators have to run."""
    features, module, *rest = edges
    of_scores: Tensor | None = rest[0] if rest else None
    weight = None
    if module is not None:
        weight = module._parameters.get("weight") if is_plain_linear(module, kind) else None
        if (
            weight is None
            or module._parameters.get("bias") is not None
            or weight.shape != (width, features.shape[1])
        ):
            return None
    if (
        adj.col.is_cuda
        or (score is ADDITIVE) != (of_scores is not None)
        or features.dim() != 2
        or features.shape[0] != adj.num_values
        or (of_scores is not None and of_scores.shape != (heads, features.shape[1]))
    ):
        return None
    return features, weight, of_scores


def _plan(
    adj: Adjacency,
    x: Tensor,
    score: type[Score],
    dtype: torch.dtype,
    widths: tuple[int, ...],
    heads: int,
    scale: float,
    algorithm: str,
    records: bool,
) -> Any:
    """The plan that computes everything after the linear maps in one call; None: separate operators run."""
    if x.is_cuda:
        if not x.shape[0]:
            return None
        return plan_of(adj, score, dtype, widths, heads, scale, algorithm, records=records)
    if len(widths) < score.least_maps or not widths[0]:
        return None
    key = (score, dtype, widths, heads, scale)
    plan = adj.plans.get(key)
    if plan is None:
        layout = (dtype, heads, widths[0] // heads, len(widths))
        plan = adj.plans[key] = _C.AttentionLayer(used_csr(adj), score.code, *layout, scale)
    return plan


def _attend(
    call: LayerCall, x: Tensor, bias: Tensor | None, edges: LayerEdges | None, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, tuple[Any, ...]]:
    """Returns the result, the cast features and weight, their product, and tensors for the backward pass."""
    vectors, features = tensors[: call.num_vectors], x if x.dtype == call.dtype else x.to(call.dtype)
    if len(tensors) == call.num_vectors:  # no linear map: a product would be contiguous and aligned
        features = contiguous_and_aligned(features)
    joint, matrix = _project(call, features, tensors)
    out, kept = _attend_to(call, joint, vectors, bias, edges)
    return out, features, matrix, joint, kept


def _attend_to(
    call: LayerCall,
    joint: Tensor,
    vectors: tuple[Tensor, ...],
    bias: Tensor | None,
    edges: LayerEdges | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:
    """Computes the result, and the tensors for the backward pass, from the linear maps' results."""
    if type(call.plan) is _C.AttentionLayer:
        out, kept = _attend_at_once(call, joint, vectors, None if call.mean else bias, edges)
    elif call.plan is not None:
        out, kept = attend(call, joint, vectors, None if call.mean else bias)
    else:
        out, kept = call.score.forward(call, joint, vectors)
    if call.mean:
        out = out.unflatten(1, (call.heads, -1)).mean(dim=1)
    if bias is not None and (call.plan is None or call.mean):
        bias = cast(bias, out.dtype)
        out = out + bias if call.keeps_result and not call.mean else out.add_(bias)
    return out, kept


def _attend_at_once(
    call: LayerCall,
    joint: Tensor,
    vectors: Sequence[Tensor],
    bias: Tensor | None,
    edges: LayerEdges | None,
) -> tuple[Tensor, tuple[Any, ...]]:
    num_nodes, dtype = joint.shape[0], call.dtype
    precise = ACCUMULATION_DTYPE[dtype]
    out = joint.new_empty(num_nodes, call.widths[0])
    # Log-sum-exp; for additive attention, also the scores of destinations and sources.
    state = joint.new_empty(3 if call.score is ADDITIVE else 1, num_nodes, call.heads, dtype=precise)
    operands = []
    for vector in vectors:
        operands.append(vector.to(precise).contiguous())
    bias = None if bias is None else bias.to(dtype).contiguous()
    edge_attr, edge_weight, of_scores = edges or (None, None, None)
    scores = None
    if of_scores is not None and edge_attr is not None:
        scores = F.linear(edge_attr, of_scores).to(precise).contiguous()
    if edge_weight is None:
        edge_attr = None  # without a linear map, edge features affect the scores only, not the values
    assert call.plan is not None
    call.plan.forward(
        joint,
        operands[0] if operands else None,
        operands[1] if len(operands) > 1 else None,
        edge_attr,
        edge_weight,
        scores,
        bias,
        out,
        state,
        call.dropout_p,
        0 if call.seed is None else int(call.seed),
        torch.get_num_threads(),
    )
    return out, (state, scores)


def _project(call: LayerCall, features: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """The linear maps' results side by side, and the joined weight; None: there is no linear map."""
    maps, count = tensors[call.num_vectors :], len(call.widths)
    if not maps:
        return features, None
    if count > 1 and features.is_cuda and not torch.is_grad_enabled():
        joined = stacked(call, maps)
        if joined is not None:
            return F.linear(features, *joined), joined[0]
    matrix, bias = maps[0], maps[count] if len(maps) > count else None
    if count > 1:
        matrix = torch.cat(maps[:count])
        bias = None if bias is None else torch.cat(maps[count:])
    if matrix.dtype != call.dtype:
        matrix = matrix.to(call.dtype)
        bias = None if bias is None else bias.to(call.dtype)
    return F.linear(features, matrix, bias), matrix


class _AttentionLayer(torch.autograd.Function):
    """dW = dJ^T X and dX = dJ W, with dJ the kernels' gradient of the linear maps' results."""

    @staticmethod
    def forward(
        ctx: Any,
        call: LayerCall,
        x: Tensor,
        bias: Tensor | None,
        edge_attr: Tensor | None,
        edge_weight: Tensor | None,
        of_scores: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        edges = None if edge_attr is None else (edge_attr, edge_weight, of_scores)
        out, features, matrix, joint, kept = _attend(call, x, bias, edges, tensors)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        vectors, maps = tensors[: call.num_vectors], tensors[call.num_vectors :]
        # Only second derivatives need the maps. Autograd does not save them, so that the caller may edit them
        # before the backward pass.
        ctx.maps = maps, versions_of(maps)
        factor = matrix if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(features, factor, joint, edge_attr, edge_weight, of_scores, *vectors, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_any_autocast_enabled():
            return (None, *without_autocast(_gradients, ctx, grad))
        return (None, *_gradients(ctx, grad))


_apply = direct(_AttentionLayer)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if not is_first_derivative(grad):
        return _second_gradients(ctx, grad)
    *others, grad_weight, sums = _first_gradients(ctx, grad)
    widths, (maps, _) = ctx.call.widths, ctx.maps
    if not maps:
        return (*others,)
    # The tensors that are split have no other reference, so their parts need not be views.
    several = len(widths) > 1
    grads = grad_weight.unsafe_split_with_sizes(widths) if several else (grad_weight,)
    if len(maps) == len(widths):
        return *others, *grads
    return *others, *grads, *(sums.unsafe_split_with_sizes(widths) if several else (sums,))


def _first_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Gradients of all inputs; the gradients of several maps' weights, and of their biases, are joined."""
    call, (features, matrix, joint, edge_attr, edge_weight, of_scores, *rest) = ctx.call, ctx.saved_tensors
    _, needs_x, needs_bias, *needs_edges = ctx.needs_input_grad[:6]
    needed = ctx.needs_input_grad[6:]
    edges = None if edge_attr is None else (edge_attr, edge_weight, of_scores)
    num_vectors = call.num_vectors
    vectors, kept = rest[:num_vectors], rest[num_vectors:]
    maps, _ = ctx.maps
    has_biases, weight_dtype = len(maps) > len(call.widths), (maps or vectors)[0].dtype
    of_edges: Sequence[Tensor | None] = (None, None, None)
    grad_bias: Tensor | None = None
    sums: Tensor | None = None
    if needs_bias and (call.mean or call.plan is None):
        grad_bias = sum_of_rows(grad, ctx.bias_dtype)
    if call.mean:
        grad = (grad / call.heads).unsqueeze(1).expand(-1, call.heads, -1).flatten(1)
    if call.plan is None:
        grad, grad_vectors = call.score.backward(call, grad, joint, vectors, kept, needed[:num_vectors])
        if has_biases:
            sums = sum_of_rows(grad, weight_dtype)
    else:
        bias_dtype = ctx.bias_dtype if needs_bias and not call.mean else None
        operands = (call, grad, joint, vectors, kept, bias_dtype, weight_dtype if has_biases else None)
        if type(call.plan) is _C.AttentionLayer:
            found, of_edges = _differentiate_at_once(*operands, edges, needs_edges)
        else:
            found = differentiate(*operands)
        grad, grad_vectors, sum_of_grad, sums = found
        grad_bias = grad_bias if sum_of_grad is None else sum_of_grad
    if not maps:
        return grad if needs_x else None, grad_bias, *of_edges, *grad_vectors, None, None
    grad_x = torch.mm(grad, matrix) if needs_x else None
    left = grad.t()
    is_same = grad.dtype == weight_dtype
    grad_weight = torch.mm(left, features) if is_same else product_in(left, features, weight_dtype)
    return grad_x, grad_bias, *of_edges, *grad_vectors, grad_weight, sums


def _differentiate_at_once(
    call: LayerCall,
    grad: Tensor,
    joint: Tensor,
    vectors: Sequence[Tensor],
    kept: Sequence[Tensor],
    bias_dtype: torch.dtype | None,
    map_bias_dtype: torch.dtype | None,
    edges: LayerEdges | None,
    edges_wanted: Sequence[bool],
) -> tuple[tuple[Tensor, list[Tensor], Tensor | None, Tensor | None], Sequence[Tensor | None]]:
    """Gradients of the linear maps' results, of the vectors, and of the biases if they have a dtype.

    Also returns the gradients of the edges' features and of both their weights.
    """
    state, scores = kept
    precise = state.dtype
    operands, grads = [], []  # filled in a loop, because a comprehension is one more call in Python 3.11
    for vector in vectors:
        operands.append(vector.to(precise).contiguous())
        grads.append(torch.empty_like(operands[-1]))
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    grad_joint = torch.empty_like(joint)
    grad_bias = None if bias_dtype is None else state.new_empty(grad.shape[1])
    sums = None if map_bias_dtype is None else state.new_empty(joint.shape[1])
    transposed, two = call.adj.t(), len(vectors) > 1
    structure = transposed.plans.get("csr")
    edge_attr, edge_weight, of_scores = edges or (None, None, None)
    work = grad_edge = grad_weight = grad_of_scores = None
    if edge_attr is not None:
        adj, num_values = call.adj, call.adj.num_values
        # Zeros if the kernel does not write every value, because some values have no entry.
        is_whole = num_values == adj.col.numel() and not adj.is_padded
        make = edge_attr.new_empty if is_whole else edge_attr.new_zeros
        work = make((num_values, call.heads, 2), dtype=precise)
        if edge_weight is not None:
            grad_edge = make(edge_attr.shape) if edges_wanted[0] else None
            grad_weight = edge_weight.new_empty(edge_weight.shape) if edges_wanted[1] else None
    assert call.plan is not None
    call.plan.backward(
        used_csr(transposed) if structure is None else structure,
        joint,
        operands[0] if operands else None,
        operands[1] if two else None,
        None if edge_weight is None else edge_attr,
        edge_weight,
        scores,
        state,
        grad,
        grad_joint,
        grads[0] if grads else None,
        grads[1] if two else None,
        work,
        grad_edge,
        grad_weight,
        grad_bias,
        sums,
        call.dropout_p,
        0 if call.seed is None else int(call.seed),
        torch.get_num_threads(),
    )
    if bias_dtype is not None and bias_dtype != precise and grad_bias is not None:
        grad_bias = grad_bias.to(bias_dtype)
    if map_bias_dtype is not None and map_bias_dtype != precise and sums is not None:
        sums = sums.to(map_bias_dtype)
    if vectors and vectors[0].dtype != precise:
        grads = [grad.to(vector.dtype) for grad, vector in zip(grads, vectors, strict=True)]
    if of_scores is not None and edge_attr is not None and work is not None:
        grad_scores = work[:, :, 1].to(of_scores.dtype)
        if edges_wanted[0]:
            more = torch.mm(grad_scores, of_scores)
            grad_edge = more if grad_edge is None else grad_edge.add_(more)
        if edges_wanted[2]:
            grad_of_scores = product_in_parts(grad_scores, edge_attr)
    return (grad_joint, grads, grad_bias, sums), (grad_edge, grad_weight, grad_of_scores)


def _second_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Computes the gradients by operators that are differentiable again."""
    call, (maps, versions) = ctx.call, ctx.maps
    check_versions(maps, versions)
    features, _, _, edge_attr, edge_weight, of_scores, *rest = ctx.saved_tensors
    edges = (edge_attr, edge_weight, of_scores)
    _, needs_x, needs_bias, *needed = ctx.needs_input_grad
    grad_bias = sum_of_rows(grad, ctx.bias_dtype) if needs_bias else None

    def compute(
        features: Tensor,
        edge_attr: Tensor | None,
        edge_weight: Tensor | None,
        of_scores: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        joint, _ = _project(call, features, tensors)
        edges = None if edge_attr is None else (edge_attr, edge_weight, of_scores)
        out = call.score.formula(call, joint, tensors[: call.num_vectors], edges)
        return out.unflatten(1, (call.heads, -1)).mean(dim=1) if call.mean else out

    inputs = (features, *edges, *rest[: call.num_vectors], *maps)
    with torch.enable_grad():
        grad_x, *grads = unfused_gradients(compute, grad, inputs, (needs_x, *needed))
    return grad_x, grad_bias, *grads


# ---------------------------------------------------------------- the node within a trace


class _Traced(NamedTuple):
    """Arguments of the operator. Weights and biases of several linear maps are stacked."""

    x: Tensor
    weight: Tensor
    map_bias: Tensor | None
    first: Tensor | None
    second: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    kind: int
    num_maps: int
    heads: int
    scale: float
    dropout_p: float
    mean: bool
    algorithm: str

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        return tuple([each for each in (self.first, self.second) if each is not None])

    def of_layer(self, adj: Adjacency, *, records: bool) -> LayerCall:
        """The call in the form that the eager node takes."""
        x, score, vectors = self.x, _SCORES[self.kind], self.vectors
        widths = (self.weight.shape[0] // self.num_maps,) * self.num_maps
        plan = _plan(adj, x, score, x.dtype, widths, self.heads, self.scale, self.algorithm, records)
        keeps_result = records and x.is_cuda and score.reads_result
        how = (self.dropout_p, self.seed, x.dtype, widths, self.mean, len(vectors), keeps_result, plan)
        return LayerCall(score, adj, self.heads, self.scale, *how)


def _traced(
    score: type[Score],
    adj: Adjacency,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    vectors: Sequence[Tensor],
    bias: Tensor | None,
    options: tuple[int, float, float, bool],
) -> Tensor | None:
    """The layer as one operator of `torch.compile`; None if a trace needs separate operators.

    Args:
        score: kind of attention, as in `attention_layer`.
        adj: square structure.
        x: features (N, F).
        weights: weights of the linear maps.
        biases: biases of the linear maps, or none.
        vectors: learned vectors of the heads.
        bias: bias of the result, or None.
        options: heads, scale, dropout_p and mean.
    """
    heads, scale, dropout_p, mean = options
    widths = tuple([weight.shape[0] for weight in weights])
    width, count, algorithm = widths[0], len(widths), policy.requested("attention", "auto")
    if (
        not fits_one_operator(x, *weights, *biases, *vectors, bias)
        or algorithm == "unfused"
        or not x.shape[0]
    ):
        return None
    if widths.count(width) < count or not width or width % heads:
        return None
    if [each for each in weights if each.shape[1] != x.shape[1]]:
        return None
    if [each for each in vectors if each.numel() != width]:
        return None
    if bias is not None and bias.shape != (width // heads if mean else width,):
        return None
    if x.is_cuda:
        if not score.has_cuda_kernel(adj, x.dtype, widths, heads, scale):
            return None
    elif count < score.least_maps or (score is DOT_PRODUCT and algorithm == "csr"):
        return None
    seed = None
    if dropout_p:
        if drawn_by_replays(dropout_p):
            return None
        dropout_p, seed = draw_seed(dropout_p)
        if score is DOT_PRODUCT and x.is_cuda:
            # Kernels for blocks would draw another mask, and the backward pass may choose another kernel.
            algorithm = "csr"
    first, second, *_ = (*vectors, None, None)
    weight = weights[0] if count == 1 else torch.cat(tuple(weights))
    map_bias = torch.cat(tuple(biases)) if len(biases) > 1 else biases[0] if biases else None
    how = (score.code, count, heads, scale, dropout_p, mean, algorithm)
    call = _Traced(x, weight, map_bias, first, second, bias, seed, *how)
    out: Tensor = attention_layer_op.dispatched(*call, adj.handle, False)[0]
    return out


def _attention(adj: Adjacency, call: _Traced, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the result and, for the backward pass, the results of maps and heads, and the nodes' state."""
    x, of_layer = call.x, call.of_layer(adj, records=keep)
    joint = F.linear(x, call.weight, call.map_bias)
    out, (state, result) = _attend_to(of_layer, joint, call.vectors, call.bias)
    if not keep:
        return out, x.new_empty(0), state.new_empty(0), x.new_empty(0)
    if x.is_cuda:
        state = state_for_both(of_layer, state, x.shape[0])
    if result is None:
        result = x.new_empty(0)
    return out, joint, state, out.clone() if result is out else result  # results must not share memory


def _attention_gradients(
    adj: Adjacency,
    grad: Tensor,
    call: _Traced,
    joint: Tensor,
    state: Tensor,
    result: Tensor,
    *,
    x_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    x, weight, map_bias, _, _, bias, *_ = call
    vectors, of_layer = call.vectors, call.of_layer(adj, records=True)
    maps = (*(weight,) * call.num_maps, *(() if map_bias is None else (map_bias,)))
    kept = (state, result if result.numel() else None)
    kept = kept_for(of_layer, *kept, x.shape[0]) if x.is_cuda else kept
    ctx = SimpleNamespace(
        call=of_layer,
        bias_dtype=None if bias is None else bias.dtype,
        maps=(maps, None),
        saved_tensors=(x, weight, joint, None, None, None, *vectors, *kept),
        needs_input_grad=(False, x_wanted, bias_wanted and bias is not None, *(False,) * 3)
        + (True,) * (len(vectors) + len(maps)),
    )
    with torch.no_grad():
        grad_x, grad_bias, _, _, _, *of_vectors, grad_weight, sums = _first_gradients(ctx, grad)
    of_first, of_second, *_ = (*of_vectors, None, None)
    return grad_x, grad_weight, sums, of_first, of_second, grad_bias


def _attention_unfused(adj: Adjacency, call: _Traced) -> Tensor:
    """Computes the operator by other operators, which are differentiable again."""
    of_layer, bias = call.of_layer(adj, records=True), call.bias
    joint = F.linear(call.x, call.weight, call.map_bias)
    out = of_layer.score.formula(of_layer, joint, call.vectors, None)
    out = out.unflatten(1, (call.heads, -1)).mean(dim=1) if call.mean else out
    return out if bias is None else out + bias


def _attention_fake(of: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, num_nodes, joint_width = of.x, of.x.shape[0], of.weight.shape[0]
    width, score = joint_width // of.num_maps, _SCORES[of.kind]
    out = x.new_empty(num_nodes, width // of.heads if of.mean else width)
    precise, result = ACCUMULATION_DTYPE[x.dtype], x.new_empty(0)
    if not of.keep:
        return out, x.new_empty(0), x.new_empty(0, dtype=precise), result
    joint = x.new_empty(num_nodes, joint_width)
    if x.device.type != "cuda":
        state = x.new_empty(3 if score is ADDITIVE else 1, num_nodes, of.heads, dtype=precise)
        return out, joint, state, result
    numbers = numbers_of_state(score, num_nodes, of.heads)
    if score.reads_result and (of.mean or (of.bias is None and not score.adds((width,) * of.num_maps))):
        result = x.new_empty(num_nodes, width)
    elif score.reads_result:
        numbers += (num_nodes * width * x.itemsize + 3) // 4
    return out, joint, x.new_empty(numbers, dtype=torch.float32), result


_SCORES: dict[int, type[Score]] = {score.code: score for score in (ADDITIVE, GATV2, DOT_PRODUCT)}
attention_layer_op = FusedOperator(
    "attention_layer",
    _attention,
    _attention_gradients,
    _attention_unfused,
    _attention_fake,
    ("out", "joint", "state", "result"),
)
