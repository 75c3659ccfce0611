"""GIN's neighbours and the node itself as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_wrapped, kind_of
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency

_Plan = tuple[Tensor | None, str]  # factors of the rows' sums, and the algorithm
#: What is added to eps: PyTorch would make a tensor of a Python number in every call, which takes longer.
_ONE = {dtype: torch.ones((), dtype=dtype, device="cpu") for dtype in DTYPE_CODE}


def aggregate_and_self(adj: Adjacency, x: Tensor, eps: Tensor, reduce: str) -> Tensor | None:
    r"""Aggregates the neighbours' features and adds the node's own.

    .. math::
        \mathbf{y}_i = \bigoplus_{j \in \mathcal{N}(i)} \mathbf{x}_j + (1 + \epsilon) \, \mathbf{x}_i

    with :math:`\bigoplus` a sum or mean. Equal to ``spmm`` and a sum up to rounding; the node's own part is
    added in place, to the result and to the gradient.

    Args:
        adj: structure.
        x: features (N, width), which `is_plain_eager`.
        eps: one number, which gets no gradient.
        reduce: of the neighbours.

    Returns:
        (N, width), differentiable, twice too. None where the operators have to run one after the other:
        another reduction, an ``eps`` that learns, autocast, dtypes or sizes that do not fit.
    """
    if is_any_autocast_enabled() or eps.requires_grad:
        return None
    key = (kind_of(x), kind_of(eps), reduce, policy.requested("spmm", "auto"))
    plan: _Plan | None = adj.plans.get(key)
    if plan is None:
        if not _serves(adj, x, eps, reduce):
            return None
        scale = None
        if reduce == "mean":
            scale = adj.inv_degree(torch.float64 if x.dtype == torch.float64 else torch.float32)
        plan = adj.plans[key] = (scale, key[-1])
    factor = eps + _ONE[eps.dtype]
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _add(adj, x, factor, plan)
    out: Tensor = (_AggregateAndSelf.apply if is_wrapped(x) else _apply)(x, factor, adj, plan)
    return out


def _serves(adj: Adjacency, x: Tensor, eps: Tensor, reduce: str) -> bool:
    return (
        type(adj) is Adjacency
        and reduce in ("sum", "mean")
        and type(eps) in PLAIN
        and eps.numel() == 1
        and eps.dim() <= 1
        and eps.dtype == x.dtype
        and eps.device == x.device == adj.col.device
        and x.dim() == 2
        and x.layout is torch.strided
        and x.dtype in DTYPE_CODE
        and x.shape[0] == adj.num_src == adj.num_dst
    )


def _add(adj: Adjacency, x: Tensor, factor: Tensor, plan: _Plan) -> Tensor:
    scale, algorithm = plan
    return launch_spmm(adj, x, None, scale, None, None, algorithm).addcmul_(x, factor)


class _AggregateAndSelf(torch.autograd.Function):
    """dX = A^T dY + (1 + eps) dY."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, adj: Adjacency, plan: _Plan) -> Tensor:
        ctx.adj, ctx.plan = adj, plan
        ctx.save_for_backward(factor)
        return _add(adj, x, factor, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,), adj, (scale, algorithm) = ctx.saved_tensors, ctx.adj, ctx.plan
        if is_first_derivative(grad):
            total = grad_of_features(adj, grad, None, scale, None, algorithm)
            return total.addcmul_(grad, factor), None, None, None
        # Operators that have gradients again.
        total = spmm(adj.t(valued=False), grad, scale_src=scale, algorithm=algorithm)
        return torch.addcmul(total, grad, factor), None, None, None


_apply = direct(_AggregateAndSelf)
