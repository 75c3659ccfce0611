"""GINE and gated layers, each in one node of autograd's graph, to save host time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.fused.weight_gradient import weight_gradient
from fastsparse_core.ops import _edge_messages_launch as launch
from fastsparse_core.ops._autocast import (
    CAST,
    Uncast,
    check_versions,
    is_any_autocast_enabled,
    product_in,
    versions_of,
    without_autocast,
)
from fastsparse_core.ops._dtypes import DTYPE_CODE, cast
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_wrapped
from fastsparse_core.ops._edge_messages_fused import gine_gradients_again, unfused_gated
from fastsparse_core.ops._edge_messages_launch import Operands
from fastsparse_core.ops._kept_results import unfused_gradients, with_cure
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.structure.adjacency import Adjacency


def can_pass_messages(
    adj: Adjacency,
    x: Tensor,
    edge: Tensor | None,
    *others: Tensor | None,
    under: torch.dtype | None = None,
) -> bool:
    """Returns whether :func:`gine_layer` and :func:`gated_layer` support a call.

    Both need a square structure, and plain tensors on one device and of one dtype. Under autocast, tensors
    may have the autocast dtype or float32.

    Args:
        adj: structure.
        x: features of the nodes; `is_plain_eager` must be true for them.
        edge: features of the edges.
        others: weights and biases.
        under: autocast dtype, if autocast is on.
    """
    dtype, device = x.dtype, x.device
    dtypes = (dtype,) if under is None else (under, torch.float32)
    if not (
        dtype in DTYPE_CODE
        and x.dim() == 2
        and x.layout is torch.strided
        and not adj.is_partitioned
        and x.shape[0] == adj.num_src == adj.num_dst
        and device == adj.col.device
        and adj.num_values < 2**32
        and dtype in dtypes
        and (
            under in CAST
            or not is_any_autocast_enabled()
            or not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        )
    ):
        return False
    if edge is not None and not (
        edge.dim() == 2 and edge.shape[0] == adj.num_values and edge.layout is torch.strided
    ):
        return False
    for tensor in (edge, *others):
        if tensor is not None and not (
            type(tensor) in PLAIN
            and tensor.dtype in dtypes
            and tensor.device == device
            and not tensor.is_neg()
        ):
            return False
    return True


# ---------------------------------------------------------------- GINE


def gine_layer(
    adj: Adjacency,
    x: Tensor,
    edge: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: Tensor | None,
    after: Tensor | None = None,
    after_bias: Tensor | None = None,
    under: torch.dtype | None = None,
) -> Tensor:
    r"""The input of GINE's network or, with ``after``, the result of the network's first linear map.

    .. math::
        \mathbf{y}_i = (1 + \epsilon) \, \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)}
        \operatorname{relu}(\mathbf{x}_j + \mathbf{W} \mathbf{a}_{ij} + \mathbf{b}), \qquad
        \mathbf{z}_i = \mathbf{U} \mathbf{y}_i + \mathbf{c}

    Args:
        adj: structure (N, N); `can_pass_messages` must be true for all tensors.
        x: (N, F).
        edge: :math:`\mathbf{a}`, (num_values, A), A up to 32; without ``weight``, rows (num_values, F) that
            are added.
        weight: :math:`\mathbf{W}`, (F, A), or None.
        bias: :math:`\mathbf{b}`, (F,), with ``weight``, or None.
        eps: :math:`\epsilon`, one number without gradient; None: only the sum, without :math:`\mathbf{x}_i`.
        after: :math:`\mathbf{U}`, (out width, F), or None: then the result is :math:`\mathbf{y}`.
        after_bias: :math:`\mathbf{c}`, (out width,), with ``after``, or None.
        under: autocast dtype, used for the last product, or None. Messages have the dtype of ``x``.

    Returns:
        (N, F) or (N, out width); differentiable twice in all tensors except ``eps``.
    """
    if torch.is_grad_enabled():
        apply = _Gine.apply if is_wrapped(x) or is_wrapped(edge) else _apply_gine
        found = apply(x, edge, weight, bias, after, after_bias, eps, adj, under)
        out: Tensor = found[0] if type(found) is tuple else found
        return out
    operands = Operands.of(launch.RELU, None, x, None, cast(edge, x.dtype), weight, None, bias)
    root = (None, None) if eps is None else (operands.q, cast(eps, x.dtype))
    out = launch.forward(adj, operands, x.shape[1], False, *root)[0]
    return out if after is None else _linear(out, after, after_bias, under or x.dtype)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
) -> Tensor:
    """A linear map whose operands are cast to a dtype, independently of autocast."""
    return linear(cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))


class _Gine(torch.autograd.Function):
    """GINE layer. It stores relu's signs, not the features, so callers may edit the features later.

    The input of the last map is a second result, which callers do not see. Through it, the gradient of that
    map is differentiable again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        after: Tensor | None,
        after_bias: Tensor | None,
        eps: Tensor | None,
        adj: Adjacency,
        under: torch.dtype | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        given, needs, dtype = edge, ctx.needs_input_grad, x.dtype
        if under is not None:
            edge, eps = cast(edge, dtype), None if eps is None else cast(eps, dtype)
        operands = Operands.of(launch.RELU, None, x, None, edge, weight, None, bias)
        root = None if eps is None else operands.q
        out, _, _, kept = launch.forward(adj, operands, x.shape[1], True in needs, root, eps)
        ctx.set_materialize_grads(False)
        dtypes = (
            dtype,
            given.dtype,
            dtype if weight is None else weight.dtype,
            dtype if bias is None else bias.dtype,
        )
        summed = matrix = uncast = None
        if after is not None:
            summed, matrix = out, after
            if under is None:
                out = F.linear(out, after, after_bias)
            else:
                summed, matrix = cast(out, under), cast(after, under)
                out, uncast = _linear(summed, matrix, after_bias, under), Uncast.of(after, matrix)
        ctx.held = (
            adj,
            dtypes,
            edge.shape[1],
            eps is not None,
            uncast,
            None if after_bias is None else after_bias.dtype,
        )
        # First derivatives read the copies of the operands; second derivatives read the originals.
        if weight is None:
            ctx.save_for_backward(kept, None, None, None, None, matrix, summed)
        else:
            originals = (given if needs[2] else None, weight if needs[1] else None)
            copy = None if operands.edge is originals[0] else operands.edge
            ctx.save_for_backward(kept, *originals, copy, operands.maps, matrix, summed)
        return (out, summed) if summed is not None and needs[4] and True in needs[:4] else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_summed: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if grad is None and of_summed is None:
            return (None,) * 9
        if is_any_autocast_enabled():
            return (*without_autocast(_gine_gradients, ctx, grad, of_summed), None, None, None)
        return (*_gine_gradients(ctx, grad, of_summed), None, None, None)


_apply_gine = direct(_Gine)


def _gine_gradients(ctx: Any, grad: Tensor | None, of_summed: Tensor | None) -> tuple[Tensor | None, ...]:
    kept, edge, weight, edge_read, maps, matrix, summed = ctx.saved_tensors
    adj, dtypes, edge_width, has_root, uncast, after_bias_dtype = ctx.held
    needs, dtype = ctx.needs_input_grad, dtypes[0]
    some = of_summed if grad is None else grad
    assert some is not None
    first = is_first_derivative(some)
    grad_after = grad_after_bias = None
    if matrix is not None:
        if grad is not None and needs[4]:
            after_dtype = matrix.dtype if uncast is None else uncast.weight.dtype
            grad_after = product_in(grad.t(), summed, after_dtype, once=first)
        if grad is not None and needs[5]:
            grad_after_bias = sum_of_rows(grad, after_bias_dtype, first)
        if True not in needs[:4]:
            return None, None, None, None, grad_after, grad_after_bias
        if grad is not None:
            if uncast is not None and not first:
                matrix = uncast.cast_again(matrix.dtype)
            total = torch.mm(grad, matrix)
            of_summed = total if of_summed is None else of_summed + total
        assert of_summed is not None
        grad = of_summed if of_summed.dtype is dtype else of_summed.to(dtype)
    assert grad is not None
    if not first:
        found = gine_gradients_again(adj, grad, kept, edge, weight, maps is not None, has_root)
        again = [
            each.to(of) if need and each is not None else None
            for each, need, of in zip(found, needs, dtypes, strict=False)
        ]
        return (*again, grad_after, grad_after_bias)
    edge_read = edge if edge_read is None else edge_read
    of_source: Tensor | None
    if not grad.is_cuda and (maps is None or not needs[1] or maps.dtype is dtype):
        grad, scale = grad if grad.stride(1) == 1 else launch.rows(grad), kept if has_root else None
        operands = (adj, grad, edge_read, maps, kept, edge_width, scale, needs, dtypes[2])
        of_source, of_edge, of_weight, of_bias = launch.relu_backward_on_cpu(*operands)
    else:
        of_source, _, of_edge, of_weight, _, of_bias = launch.backward(
            adj,
            Operands(launch.RELU, None, launch.rows(grad), None, edge_read, maps),
            grad,
            edge_width,
            kept=kept,
            has_scale=has_root,
            source_wanted=needs[0],
            edge_wanted=needs[1],
            weight_wanted=needs[2] or needs[3],
            bias_wanted=needs[3],
            map_dtype=dtypes[2],
        )
    return (
        of_source if needs[0] else None,
        of_edge if of_edge is None or of_edge.dtype is dtypes[1] else of_edge.to(dtypes[1]),
        of_weight,
        of_bias if of_bias is None or of_bias.dtype is dtypes[3] else of_bias.to(dtypes[3]),
        grad_after,
        grad_after_bias,
    )


# ---------------------------------------------------------------- gates


def gated_layer(
    adj: Adjacency,
    x: Tensor,
    edge: Tensor | None,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor],
    root: Tensor | None,
    bias: Tensor | None,
    under: torch.dtype | None = None,
) -> Tensor:
    r"""A residual gated graph convolution.

    .. math::
        \mathbf{y}_i = \mathbf{W} \mathbf{x}_i + \mathbf{b} + \sum_{j \in \mathcal{N}(i)} \sigma(\mathbf{K}
        [\mathbf{x}_i \Vert \mathbf{a}_{ij}] + \mathbf{Q} [\mathbf{x}_j \Vert \mathbf{a}_{ij}]) \odot
        \mathbf{V} [\mathbf{x}_j \Vert \mathbf{a}_{ij}]

    Args:
        adj: structure (N, N); `can_pass_messages` must be true for all tensors.
        x: (N, in width).
        edge: :math:`\mathbf{a}`, (num_values, A), A up to 32, or None.
        weights: :math:`\mathbf{Q}, \mathbf{V}, \mathbf{K}`, (F, in width + A) each.
        biases: biases of the three maps, (F,) each.
        root: :math:`\mathbf{W}`, (F, in width), or None.
        bias: :math:`\mathbf{b}`, (F,), or None.
        under: autocast dtype, used for everything except the addition of the bias, or None.

    Returns:
        (N, F); differentiable twice in all tensors.
    """
    if under is not None:  # outside of `_Gated`, because it saves x, which the caller may overwrite
        x, edge = cast(x, under), None if edge is None else cast(edge, under)
    apply = _Gated.apply if is_wrapped(x) else _apply_gated
    out: Tensor = apply(x, edge, root, bias, adj, *weights, *biases)
    return out


class _Gated(torch.autograd.Function):
    """With the rows' gradients G = [dQ | dV | dK | dY]: dX = G W, dW = G^T X, db = sum of G."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        edge: Tensor | None,
        root: Tensor | None,
        bias: Tensor | None,
        adj: Adjacency,
        *maps: Tensor,
    ) -> Tensor:
        weights, biases, dtype = maps[:3], maps[3:], x.dtype
        width, in_width = weights[0].shape[0], x.shape[1]
        of_query = of_value = of_key = None
        if edge is None:
            of_nodes = torch.cat(weights if root is None else (*weights, root))
        else:
            whole = torch.cat(weights)
            of_nodes, of_edges = whole[:, :in_width], whole[:, in_width:]
            of_query, of_value, of_key = of_edges.split(width)
            if root is not None:
                of_nodes = torch.cat((of_nodes, root))
        # If the bias has another dtype, the result gets the promoted dtype, so the bias is added later.
        joined = root is not None and bias is not None and bias.dtype == dtype
        if root is not None:
            biases = (*biases, bias if bias is not None and joined else biases[0].new_zeros(width))
        of_nodes, of_biases = of_nodes.to(dtype), torch.cat(biases).to(dtype)
        query, value, key, *own = F.linear(x, of_nodes, of_biases).split(width, 1)
        # Both ends of an edge add a linear map of its features, so the gate's map is the sum of both.
        operands = Operands.of(launch.GATE, key, query, value, edge, of_query, of_value, added=of_key)
        of_root = own[0] if own else None
        if of_root is not None and (of_root.is_cuda or of_root.stride(1) != 1):
            of_root = launch.rows(of_root)
        out, slope, _, _ = launch.forward(adj, operands, width, True in ctx.needs_input_grad, of_root)
        ctx.set_materialize_grads(False)
        ctx.adj, ctx.joined = adj, joined
        # First derivatives read only the dtypes of these tensors, so autograd does not save them.
        ctx.parameters = (root, bias, *maps)
        ctx.versions = versions_of(ctx.parameters)
        # The operands are the rows of the linear maps' results, or padded copies of them.
        ctx.save_for_backward(x, edge, of_nodes, slope, *operands[1:6])
        if bias is None or joined:
            return out
        return out.add_(bias) if out.dtype == bias.dtype else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 11
        if is_any_autocast_enabled():
            return (*without_autocast(_gated_gradients, ctx, grad),)
        return _gated_gradients(ctx, grad)


_apply_gated = direct(_Gated)


def _gated_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    try:
        x, edge, of_nodes, slope, k, q, v, edge_read, maps_read = ctx.saved_tensors
    except RuntimeError as error:
        raise with_cure(error, "residual gated graph convolution") from None
    adj, needs, (root, bias, *maps) = ctx.adj, ctx.needs_input_grad, ctx.parameters
    dtype = maps[0].dtype
    if not is_first_derivative(grad):
        check_versions(ctx.parameters, ctx.versions)
        inputs, needed = (x, edge, *ctx.parameters), (*needs[:4], *needs[5:])
        with torch.enable_grad():
            found = unfused_gradients(lambda *given: _unfused_layer(adj, *given), grad, inputs, needed)
        return *found[:4], None, *found[4:]
    width, of_out = grad.shape[1], grad
    grad = grad.to(x.dtype)
    maps_need = any(needs[5:8])
    gradients = launch.backward(
        adj,
        Operands(launch.GATE, k, q, v, edge_read, maps_read),
        grad,
        0 if edge is None else edge.shape[1],
        edge_wanted=needs[1],
        weight_wanted=maps_need and edge is not None,
        map_dtype=dtype,
    )
    assert gradients.q is not None
    assert gradients.v is not None
    parts = [gradients.q, gradients.v, grad * slope]
    if root is not None:
        parts.append(grad)
    of_rows = torch.cat(parts, 1)
    grad_x = torch.mm(of_rows, of_nodes) if needs[0] else None
    grad_maps: tuple[Tensor | None, ...] = (None,) * 3
    grad_root = grad_bias = None
    if maps_need or needs[2]:
        if edge is None:  # the original layer also applies its linear maps before the sum
            product = product_in(of_rows.t(), x, dtype)
        else:
            product = weight_gradient(of_rows, x, dtype, True, 3, width)
        grad_root = product[3 * width :] if needs[2] else None
        if edge is not None and maps_need:
            gate, value = gradients.weight, gradients.of_value
            assert gate is not None
            assert value is not None
            of_edges = torch.cat((gate, value, gate))
            product = torch.cat((product[: 3 * width], of_edges), 1)
        grad_maps = product[: 3 * width].split(width)
    grad_biases: tuple[Tensor | None, ...] = (None,) * 3
    if any(needs[8:]):
        sums = sum_of_rows(of_rows, dtype, True).split(width)
        grad_biases, grad_bias = sums[:3], sums[3] if ctx.joined else None
    if needs[3] and grad_bias is None:
        grad_bias = sum_of_rows(of_out, bias.dtype, True)
    return grad_x, gradients.edge, grad_root, grad_bias, None, *grad_maps, *grad_biases


def _unfused_layer(
    adj: Adjacency,
    x: Tensor,
    edge: Tensor | None,
    root: Tensor | None,
    bias: Tensor | None,
    *maps: Tensor,
) -> Tensor:
    """`gated_layer` by differentiable operators."""
    in_width, dtype = x.shape[1], x.dtype
    of_nodes = F.linear if edge is None else linear_before_sum
    query, value, key = (
        _linear(x, map[:, :in_width], of_map, dtype, of_nodes)
        for map, of_map in zip(maps[:3], maps[3:], strict=True)
    )
    of_query, of_value, of_key = (None if edge is None else map[:, in_width:] for map in maps[:3])
    of_gate = None if of_query is None or of_key is None else of_query + of_key
    out = unfused_gated(adj, key, query, value, edge, of_gate, of_value)
    if root is not None:
        out = out + _linear(x, root, None, dtype)
    return out if bias is None else out + bias
