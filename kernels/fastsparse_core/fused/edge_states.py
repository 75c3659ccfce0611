"""Attention by new features of the edges (EGAT) in one node of autograd's graph, to save host time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, direct, is_first_derivative, is_plain_eager, is_wrapped
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._kept_results import unfused_gradients
from fastsparse_core.ops._segment_launch import REDUCTION_CODE, softmax_of_rows
from fastsparse_core.ops._spmm_plan import grad_of_features, launch_spmm
from fastsparse_core.ops.edge_softmax import edge_softmax
from fastsparse_core.ops.sddmm import sddmm_kernel
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.incidence import edge_ends

#: Slope of EGAT's leaky ReLU for negative numbers.
_SLOPE = 0.01


def attend_by_edges(
    adj: Adjacency, of_src: Tensor, of_dst: Tensor, of_edge: Tensor, att: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    r"""Computes new features of the edges, and sums of the values weighted by the softmax of edge scores.

    .. math::
        \mathbf{f}_{ij} = \operatorname{leaky\_relu}(\mathbf{p}_j + \mathbf{q}_i + \mathbf{e}_{ij}), \qquad
        \mathbf{y}_i = \sum_{j \in \mathcal{N}(i)} \operatorname{softmax}_j(\langle \mathbf{a},
        \mathbf{f}_{ij} \rangle) \, \mathbf{v}_j \quad \text{for every head}

    Args:
        adj: structure (num_dst, num_src).
        of_src: :math:`\mathbf{p}`, (num_src, heads * D).
        of_dst: :math:`\mathbf{q}`, (num_dst, heads * D).
        of_edge: :math:`\mathbf{e}`, (num_values, heads * D), in the caller's edge order.
        att: :math:`\mathbf{a}`, (1, heads, D).
        v: :math:`\mathbf{v}`, (num_src, heads * Dv).

    Returns:
        :math:`\mathbf{f}` (num_values, heads, D) and :math:`\mathbf{y}` (num_dst, heads * Dv), differentiable
        twice. None on CUDA, under autocast or :func:`algorithms`, with mixed dtypes, without edges, or within
        a trace or a transform.
    """
    tensors = (of_src, of_dst, of_edge, att, v)
    if (
        v.is_cuda
        or is_any_autocast_enabled()
        or v.dtype not in DTYPE_CODE
        or not is_plain_eager(v)
        or not of_src.dim() == of_dst.dim() == v.dim() == 2
        or type(adj) is not Adjacency
        or not adj.num_values == adj.col.numel() > 0
        or policy.eager_requests()
    ):
        return None
    wrapped = False
    for each in tensors:
        if type(each) not in PLAIN or each.dtype != v.dtype or each.device != v.device or each.is_neg():
            return None
        wrapped |= is_wrapped(each)
    found: tuple[Tensor, Tensor] = (_EdgeStates.apply if wrapped else _apply)(adj, *tensors)
    return found


def _states(
    adj: Adjacency, of_src: Tensor, of_dst: Tensor, of_edge: Tensor, att: Tensor
) -> tuple[Tensor, Tensor]:
    """New features of the edges, and their scores (num_values, heads)."""
    src, dst = edge_ends(adj)
    total = of_src.index_select(0, src).add_(of_dst.index_select(0, dst)).add_(of_edge)
    states = F.leaky_relu(total, _SLOPE).unflatten(1, att.shape[1:])
    return states, (states * att).sum(-1)


class _EdgeStates(torch.autograd.Function):
    """Calls the kernels of edge_softmax, spmm and sddmm. Second derivatives call the operators themselves."""

    @staticmethod
    def forward(ctx: Any, adj: Adjacency, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        states, score = _states(adj, *tensors[:4])
        structure = adj.plans.get("csr") or used_csr(adj)
        alpha = softmax_of_rows(adj, structure, score, None, torch.empty_like(score))
        ctx.adj = adj
        ctx.save_for_backward(*tensors, states, alpha)
        return states, launch_spmm(adj, tensors[4], alpha, None, None, None, "auto")

    @staticmethod
    def backward(ctx: Any, of_states: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        adj, (*tensors, states, alpha) = ctx.adj, ctx.saved_tensors
        if not (is_first_derivative(of_states) and is_first_derivative(grad)):

            def compute(*tensors: Tensor) -> Tensor:
                states, score = _states(adj, *tensors[:4])
                out = spmm(adj, tensors[4], edge_softmax(adj, score))
                return torch.cat((states.flatten(), out.flatten()))

            grads = torch.cat((of_states.flatten(), grad.flatten()))
            return None, *unfused_gradients(compute, grads, tensors, ctx.needs_input_grad[1:])
        *_, att, v = tensors
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        grad_v = grad_of_features(adj, grad, alpha, None, None, "auto")
        of_alpha = sddmm_kernel(
            grad, v, None, None, len(alpha), alpha.shape[1], alpha.dtype, adj, "auto", False
        )
        structure = adj.plans.get("csr") or used_csr(adj)
        of_score = softmax_of_rows(adj, structure, alpha, of_alpha, torch.empty_like(alpha))[:, :, None]
        grad_att = (of_score * states).sum(0, keepdim=True)
        of_states = torch.addcmul(of_states, of_score, att)
        of_edge = torch.ops.aten.leaky_relu_backward(of_states, states, _SLOPE, True)
        of_edge = of_edge.flatten(1).contiguous()
        return None, _sums(adj.t(), of_edge), _sums(adj, of_edge), of_edge, grad_att, grad_v


_apply = direct(_EdgeStates)


def _sums(adj: Adjacency, rows: Tensor) -> Tensor:
    """Sums over the edges of every row of the structure, from contiguous rows in the caller's edge order."""
    out = rows.new_empty(adj.num_dst, rows.shape[1])
    _C.segment_reduce(
        structure=adj.plans.get("csr") or used_csr(adj),
        reduction=REDUCTION_CODE["sum"],
        x=rows,
        out=out,
        extra=None,
        partial=None,
        facts=0,
        device=-1,
        queue=torch.get_num_threads(),
    )
    return out
