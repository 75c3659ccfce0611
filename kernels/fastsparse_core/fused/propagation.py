"""Repeated products (SG, TAG, APPNP), sums of edge features, and GCN's weights, in one autograd node each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import is_any_autocast_enabled, without_autocast
from fastsparse_core.ops._dtypes import DTYPE_CODE, accumulation_dtype
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops.sddmm import sddmm, sddmm_kernel
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


class _Steps(NamedTuple):
    """Arguments that all products share.

    Attributes:
        adj: square structure.
        scale_dst: constant factor of every row, in the accumulation dtype, or None.
        scale_src: constant factor of every column, in the accumulation dtype, or None.
        algorithm: algorithm of the products.
        alpha: weight of the terms; None: terms and products are added without weights.
    """

    adj: Adjacency
    scale_dst: Tensor | None
    scale_src: Tensor | None
    algorithm: str
    alpha: float | None


def propagate(
    adj: Adjacency,
    x: Tensor,
    count: int,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    terms: Sequence[Tensor] = (),
    alpha: float | None = None,
) -> Sequence[Tensor] | None:
    r"""Multiplies features by a matrix several times.

    .. math::
        \mathbf{H}_0 = \mathbf{X}, \qquad \mathbf{H}_k = \mathbf{A} \mathbf{H}_{k-1} + \mathbf{T}_k
        \quad \text{or} \quad (1 - \alpha) \mathbf{A} \mathbf{H}_{k-1} + \alpha \mathbf{T}_k

    Args:
        adj: structure (N, N).
        x: (N, F).
        count: number of products.
        value: edge values (num_values,), without gradient; None: 1.
        scale_dst: constant factors of the rows, (N,) in the accumulation dtype; None: 1.
        scale_src: constant factors of the columns, (N,) in the accumulation dtype; None: 1.
        terms: :math:`\mathbf{T}_1, \dots`, (N, F) each; empty: 0.
        alpha: :math:`\alpha`, weight of the terms; None: they are added without weights.

    Returns:
        :math:`\mathbf{H}_1, \dots`; differentiable twice in features and terms. None if ``spmm`` has to be
        called for every product: under autocast, in traces, or if values need a gradient or have another
        dtype.
    """
    if not (
        is_plain_eager(x)
        and not is_any_autocast_enabled()
        and type(adj) is Adjacency
        and x.dim() == 2
        and x.layout is torch.strided
        and x.shape[0] == adj.num_src == adj.num_dst
        and x.dtype in DTYPE_CODE
        and x.device == adj.col.device
    ):
        return None
    if value is not None and not (
        type(value) in PLAIN
        and not value.requires_grad
        and not value.is_neg()
        and value.shape == (adj.num_values,)
        and value.dtype == x.dtype
        and value.device == x.device
    ):
        return None
    for term in terms:
        if type(term) not in PLAIN or term.shape != x.shape or term.dtype != x.dtype or term.is_neg():
            return None
    of = _Steps(adj, scale_dst, scale_src, policy.eager_requests().get("spmm", "auto"), alpha)
    if not torch.is_grad_enabled():
        return _compute(of, count, x, value, terms)
    apply = _Propagation.apply if is_wrapped(x) else _apply
    found: Sequence[Tensor] = apply(of, count, x, value, *terms)
    return found


def _compute(
    of: _Steps, count: int, x: Tensor, value: Tensor | None, terms: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    adj, scale_dst, scale_src, algorithm, alpha = of
    found = []
    for step in range(count):
        x = launch_spmm(adj, x, value, scale_dst, scale_src, None, algorithm)
        if terms:
            x = x.add_(terms[step]) if alpha is None else x.lerp_(terms[step], alpha)
        found.append(x)
    return tuple(found)


class _Propagation(torch.autograd.Function):
    """With G_k, the gradient of H_k: dT_k = G_k, and H_(k-1) gets A^T G_k. No features are saved."""

    @staticmethod
    def forward(
        ctx: Any, of: _Steps, count: int, x: Tensor, value: Tensor | None, *terms: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.count = of, count
        ctx.save_for_backward(value)
        return _compute(of, count, x, value, terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if is_any_autocast_enabled():
            return (*without_autocast(_gradients, ctx, *grads),)
        return _gradients(ctx, *grads)


_apply = direct(_Propagation)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    of, (value,), needs = ctx.of, ctx.saved_tensors, ctx.needs_input_grad
    adj, scale_dst, scale_src, algorithm, alpha = of
    total: Tensor | None = None
    of_terms: list[Tensor | None] = [None] * (len(needs) - 4)
    once = True
    for step in range(ctx.count - 1, -1, -1):
        grad = grads[step]
        if total is None:
            total = grad
            if total is None:
                continue
            once = is_first_derivative(total)
        elif grad is not None:
            total = total + grad
        if of_terms:
            of_terms[step] = total if alpha is None else total * alpha
            total = total if alpha is None else total * (1 - alpha)
        if step == 0 and not needs[2]:
            break
        if once:
            total = grad_of_features(adj, total, value, scale_dst, scale_src, algorithm)
        else:
            columns = adj.t(valued=value is not None)
            total = spmm(columns, total, value, scale_dst=scale_src, scale_src=scale_dst, algorithm=algorithm)
    return None, None, total if needs[2] else None, None, *of_terms


def sum_of_edges(adj: Adjacency, features: Tensor) -> Tensor:
    r"""Sums the features of each destination's edges.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \mathbf{a}_{ij}

    Args:
        adj: structure (num_dst, num_src).
        features: :math:`\mathbf{a}`, (num_values, A) in the caller's edge order, of a floating dtype.

    Returns:
        (num_dst, A); differentiable twice.
    """
    ones = features.new_ones(adj.num_src, features.shape[1])
    if (
        is_plain_eager(features)
        and not is_any_autocast_enabled()
        and type(adj) is Adjacency
        and features.shape[0] == adj.num_values
        and features.dtype in DTYPE_CODE
        and features.device == adj.col.device
        and not is_wrapped(features)
    ):
        found: Tensor = _apply_sum(features, ones, adj)
        return found
    return spmm(adj, ones, features)


class _SumOfEdges(torch.autograd.Function):
    """A product with ones, with the edges' features as its values; only these have a gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, ones: Tensor, adj: Adjacency) -> Tensor:
        ctx.ones, ctx.adj = ones, adj
        return launch_spmm(adj, ones, features, None, None, None, "auto")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ones, adj = ctx.ones, ctx.adj
        width = ones.shape[1]
        if not torch.is_grad_enabled():
            call: Any = (adj.num_values, width, grad.dtype, adj, "csr", False)
            return sddmm_kernel(grad, ones, None, None, *call), None, None
        return sddmm(adj, grad.unflatten(1, (width, 1)), ones.unflatten(1, (width, 1))), None, None


_apply_sum = direct(_SumOfEdges)


def symmetric_weights(adj: Adjacency, value: Tensor) -> Tensor:
    r"""GCN's normalized edge weights, differentiable in the edge values.

    .. math::
        \mathbf{w}_{ij} = d_i^{-1/2} \, \mathbf{v}_{ij} \, d_j^{-1/2}, \qquad d_i = \sum_j \mathbf{v}_{ij}

    Args:
        adj: square structure.
        value: :math:`\mathbf{v}`, (num_values,), of a floating dtype. If a degree is 0, its inverse root
            counts as 0.

    Returns:
        (num_values,); differentiable twice. Degrees are summed in float32 or wider.
    """
    if (
        torch.is_grad_enabled()
        and type(value) in PLAIN
        and is_plain_eager(value.detach())
        and not is_any_autocast_enabled()
        and type(adj) is Adjacency
        and value.shape == (adj.num_values,)
        and value.dtype in (torch.float32, torch.float64)
        and value.device == adj.col.device
        and not is_wrapped(value)
    ):
        found: Tensor = _apply_weights(value, adj)
        return found
    # Degrees are sums of many terms, so they are not computed in 16 bits, even under autocast.
    with torch.autocast(value.device.type, enabled=False):
        return _weights_by_operators(adj, value)


def _weights_by_operators(adj: Adjacency, value: Tensor) -> Tensor:
    ones = torch.ones(adj.num_src, 1, dtype=accumulation_dtype(value.dtype), device=value.device)
    scale = spmm(adj, ones, value).pow(-0.5)
    scale = scale.masked_fill(scale == torch.inf, 0)
    return value * sddmm(adj, scale, scale).to(value.dtype)


class _SymmetricWeights(torch.autograd.Function):
    """With P_ij = s_i s_j, G the result's gradient: dV = G P + dd 1^T, dd = -s^3 / 2 (A_GV + A_GV^T) s."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, adj: Adjacency) -> Tensor:
        ones = value.new_ones(adj.num_src, 1)
        degree = launch_spmm(adj, ones, value, None, None, None, "auto")
        root = degree.pow(-0.5)
        scale = root.masked_fill(root == torch.inf, 0)
        product = sddmm_kernel(scale, scale, None, None, adj.num_values, 1, value.dtype, adj, "csr", False)
        product = product.squeeze(1)
        ctx.adj = adj
        ctx.save_for_backward(value, degree, root, scale, product, ones)
        return value * product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        adj, (value, degree, root, scale, product, ones) = ctx.adj, ctx.saved_tensors
        if not is_first_derivative(grad):

            def compute(value: Tensor) -> Tensor:
                return _weights_by_operators(adj, value)

            return *unfused_gradients(compute, grad, (value,), ctx.needs_input_grad), None
        of_product = grad * value
        of_scale = launch_spmm(adj, scale, of_product, None, None, None, "auto")
        of_scale += launch_spmm(adj.t(), scale, of_product, None, None, None, "auto")
        # As in autograd's formula, a degree of 0 gets no gradient.
        of_degree = of_scale.masked_fill_(root == torch.inf, 0) * (-0.5 * degree.pow(-1.5))
        call: Any = (adj.num_values, 1, value.dtype, adj, "csr", False)
        of_value = sddmm_kernel(of_degree, ones, None, None, *call)
        return of_value.squeeze(1).addcmul_(grad, product), None


_apply_weights = direct(_SymmetricWeights)
