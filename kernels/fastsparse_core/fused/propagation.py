"""Several products with one matrix (SG, TAG, APPNP), and sums of edges, as one node of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import is_any_autocast_enabled, without_autocast
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops.sddmm import sddmm, sddmm_kernel
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency


class _Steps(NamedTuple):
    """What the products share.

    Attributes:
        adj: square structure.
        scale_dst: constant factor of every row, in the accumulation dtype, or None.
        scale_src: of every column, likewise.
        algorithm: of the products.
        alpha: share of the terms; None: they are added.
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
    r"""Multiplies features by a matrix again and again.

    .. math::
        \mathbf{H}_0 = \mathbf{X}, \qquad \mathbf{H}_k = \mathbf{A} \mathbf{H}_{k-1} + \mathbf{T}_k
        \quad \text{or} \quad (1 - \alpha) \mathbf{A} \mathbf{H}_{k-1} + \alpha \mathbf{T}_k

    Args:
        adj: structure (N, N).
        x: (N, F).
        count: number of products.
        value: of the edges, (num_values,), without gradient; None: 1.
        scale_dst: constant factors of the rows, (N,) in the accumulation dtype; None: 1.
        scale_src: of the columns, likewise.
        terms: :math:`\mathbf{T}_1, \dots`, (N, F) each; none: 0.
        alpha: share of the terms; None: they are added.

    Returns:
        :math:`\mathbf{H}_1, \dots`; differentiable in features and terms, twice too. None where ``spmm`` has
        to be called for every product: autocast, traces, values with a gradient or of another dtype.
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
    """With G_k of H_k: dT_k = G_k, and A^T G_k reaches H_(k-1). All of it is linear: no features are kept."""

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
        (num_dst, A); differentiable, twice too.
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
    """The product with ones, in which only the edges' values have a gradient."""

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
