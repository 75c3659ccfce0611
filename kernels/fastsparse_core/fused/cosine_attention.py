"""Normalisation and attention of AGNN in one node of autograd's graph, to save host time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops import _attention_launch as launch
from fastsparse_core.ops import _attention_unfused as unfused
from fastsparse_core.ops._attention_launch import DOT_PRODUCT, Call
from fastsparse_core.ops._autocast import without_autocast
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, is_first_derivative, is_plain_eager
from fastsparse_core.ops._kept_results import kept_result, unfused_gradients, was_written
from fastsparse_core.structure.adjacency import Adjacency

#: Smallest norm to divide by, as in `torch.nn.functional.normalize`.
_EPSILON = 1e-12


def cosine_attention(adj: Adjacency, x: Tensor, beta: Tensor) -> Tensor | None:
    r"""Attention by the cosine between features.

    .. math::
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \mathrm{softmax}_j(\beta \cos(\mathbf{x}_i, \mathbf{x}_j))
        \, \mathbf{x}_j

    The result equals that of separate operators up to rounding.

    Args:
        adj: square structure.
        x: features (N, F).
        beta: :math:`\beta`, (1,).

    Returns:
        (N, F), differentiable twice. None if separate operators have to run: the call is traced or under
        autocast, devices or dtypes differ, or there is no kernel.
    """
    if not (
        is_plain_eager(x)
        and type(adj) is Adjacency
        and x.dim() == 2
        and x.layout is torch.strided
        and x.shape[0] == adj.num_src == adj.num_dst
        and x.shape[1]
        and type(beta) in PLAIN
        and beta.shape == (1,)
        and x.dtype == beta.dtype
        and x.dtype in DTYPE_CODE
        and x.device == beta.device == adj.col.device
        and not torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    ):
        return None
    width, algorithm = x.shape[1], policy.eager_requests().get("attention", "auto")
    # On CUDA, this plan exists if the attention operator has run before and has built the blocks.
    noted = ("attention", x.dtype, width, width, 1, algorithm) in adj.plans
    if not (noted if x.is_cuda else algorithm in ("auto", "fused3s")):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or beta.requires_grad):
        result: Tensor = _CosineAttention.apply(adj, x, beta)
        return result
    return _attend(adj, x, beta)[0]


def beta_by_row(adj: Adjacency, beta: Tensor) -> Tensor:
    """Beta for every destination (num_dst, 1), as a factor of the queries; 0 for nodes without edges.

    Nodes without edges have no scores, so their features must not affect beta's gradient. If they are NaN or
    infinite, PyTorch would add 0 times NaN or infinity.
    """
    # `in_degree` would make a trace depend on whether the structure has cached its degrees.
    degree = adj.rowptr.diff() if torch.compiler.is_compiling() else adj.in_degree()
    return torch.where((degree == 0)[:, None], beta.new_zeros(()), beta)


def _attend(adj: Adjacency, x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, its log-sum-exp, the norms and the normalised features."""
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(_EPSILON)
    key = x / norm
    out, lse, _ = launch.forward(adj, _call(key * beta, key, x))
    return out, lse, norm, key


def _call(query: Tensor, key: Tensor, x: Tensor) -> Call:
    return Call(query, key, x, None, None, None, None, 1.0, 0.0, None, DOT_PRODUCT, 1)


class _CosineAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adj: Adjacency, x: Tensor, beta: Tensor) -> Tensor:
        out, lse, norm, key = _attend(adj, x, beta)
        ctx.adj = adj
        ctx.save_for_backward(x, beta, key, norm, lse, kept_result(ctx, out))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *without_autocast(_gradients, ctx, grad))


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    adj, (x, beta, key, norm, lse, out) = ctx.adj, ctx.saved_tensors
    _, needs_x, needs_beta = ctx.needs_input_grad
    if not is_first_derivative(grad):

        def compute(x: Tensor, beta: Tensor) -> Tensor:
            key = F.normalize(x, dim=1, eps=_EPSILON)
            query = key * beta_by_row(adj, beta)
            return unfused.attention(adj, *_call(query, key, x))

        with torch.enable_grad():
            return tuple(unfused_gradients(compute, grad, (x, beta), (needs_x, needs_beta)))
    call = _call(key * beta, key, x)
    if was_written(ctx):
        out, *_ = launch.forward(adj, call)
    grad_query, grad_key, grad_x, *_ = launch.backward(adj, call, grad, out, lse)
    assert grad_x is not None
    grad_beta = None
    if needs_beta:  # see `beta_by_row`
        grad_beta = (grad_query * key).sum(1).masked_fill_(adj.is_empty_row(), 0).sum().view(1)
    if not needs_x:
        return None, grad_beta
    grad_key.addcmul_(grad_query, beta)
    # Normalisation removes the component of the gradient along the features, unless the norm was clamped.
    along = (grad_key * key).sum(dim=1, keepdim=True).masked_fill_(norm <= _EPSILON, 0)
    grad_key.addcmul_(key, along, value=-1)
    return grad_x.addcdiv_(grad_key, norm), grad_beta
