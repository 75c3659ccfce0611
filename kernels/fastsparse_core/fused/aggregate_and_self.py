"""GIN's neighbours and the node itself as one node of autograd's graph, which costs the host less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops._autocast import CAST, autocast_dtype, is_any_autocast_enabled
from fastsparse_core.ops._dtypes import DTYPE_CODE, cast
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_wrapped, kind_of
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm, with_loops
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency

#: What is added to eps: PyTorch would make a tensor of a Python number in every call, which takes longer.
_ONE = {dtype: torch.ones((), dtype=dtype, device="cpu") for dtype in DTYPE_CODE}


def aggregate_and_self(adj: Adjacency, x: Tensor, eps: Tensor) -> Tensor | None:
    r"""Adds the neighbours' features and the node's own.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j + (1 + \epsilon) \, \mathbf{x}_i

    Equal to ``spmm`` and a sum up to rounding; the node's own part is one entry more of its row. Under
    autocast the result has its dtype, as a linear layer would cast it: for callers who have one next.

    Args:
        adj: structure.
        x: features (N, width), which `is_plain_eager`.
        eps: one number, which gets no gradient.

    Returns:
        (N, width), differentiable, twice too. None where the operators have to run one after the other: an
        ``eps`` that learns, dtypes or sizes that do not fit.
    """
    if eps.requires_grad:
        return None
    dtype = (autocast_dtype(x) if is_any_autocast_enabled() else None) or x.dtype
    algorithm = policy.requested("spmm", "auto")
    key = ("aggregate and self", kind_of(x), kind_of(eps), dtype)
    if adj.plans.get(key) is None:
        if not _serves(adj, x, eps, dtype):
            return None
        adj.plans[key] = True
    loop = eps + _ONE[eps.dtype]
    if eps.dtype.itemsize == 2:
        loop = loop.float()
    if not (x.requires_grad and torch.is_grad_enabled()):
        return launch_spmm(adj, cast(x, dtype), None, None, None, None, algorithm, loop=loop)
    out: Tensor = (_AggregateAndSelf.apply if is_wrapped(x) else _apply)(x, loop, adj, algorithm, dtype)
    return out


def _serves(adj: Adjacency, x: Tensor, eps: Tensor, dtype: torch.dtype) -> bool:
    return (
        type(adj) is Adjacency
        and type(eps) in PLAIN
        and eps.numel() == 1
        and eps.dim() <= 1
        and (
            eps.dtype == x.dtype == dtype
            or (dtype in CAST and {x.dtype, eps.dtype} <= {dtype, torch.float32})
        )
        and eps.device == x.device == adj.col.device
        and x.dim() == 2
        and x.layout is torch.strided
        and x.dtype in DTYPE_CODE
        and x.shape[0] == adj.num_src == adj.num_dst
    )


class _AggregateAndSelf(torch.autograd.Function):
    """dX = A^T dY + (1 + eps) dY."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loop: Tensor, adj: Adjacency, algorithm: str, dtype: torch.dtype
    ) -> Tensor:
        ctx.held = adj, algorithm, x.dtype
        ctx.save_for_backward(loop)
        return launch_spmm(adj, cast(x, dtype), None, None, None, None, algorithm, loop=loop)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (loop,), (adj, algorithm, dtype) = ctx.saved_tensors, ctx.held
        if is_first_derivative(grad):
            total = grad_of_features(adj, grad, None, None, None, algorithm, loop)
        else:  # operators that have gradients again
            total = with_loops(spmm(adj.t(valued=False), grad, algorithm=algorithm), grad, None, None, loop)
        return cast(total, dtype), None, None, None, None


_apply = direct(_AggregateAndSelf)
