"""Which kernel serves dot-product attention, and CUDA's from CSR: those of edge features, without any."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import policy
from fastsparse_core.ops import _attention_bsb, _gat_attention_csr
from fastsparse_core.ops import _registration as registration
from fastsparse_core.ops._facts import facts_of, follow
from fastsparse_core.structure.adjacency import Adjacency


def csr_unsupported_reason(adj: Adjacency, q: Tensor, v: Tensor, heads: int) -> str:
    """Why the CSR kernels on CUDA cannot serve this call or its backward pass, "" if they can.

    Args:
        adj: structure (num_dst, num_src).
        q: (num_dst, heads * D).
        v: (num_src, heads * Dv).
        heads: number of heads.
    """
    if q.size(1) != v.size(1):
        return f"values of {v.size(1)} features, queries of {q.size(1)}"
    return csr_unsupported_reason_of(adj, v.dtype, v.size(1), heads)


def csr_unsupported_reason_of(adj: Adjacency, dtype: torch.dtype, width: int, heads: int) -> str:
    """:func:`csr_unsupported_reason` of features of a dtype and a width, that of all heads."""
    if adj.num_values >= 2**32:
        return f"{adj.num_values} values, 2^32 or more"
    return _gat_attention_csr.unsupported_reason(dtype, width, heads)


def kernel(
    adj: Adjacency, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: int, algorithm: str
) -> str:
    """The kernel of a call: ``"csr"``, ``"fused3s"`` or ``"unfused"``; its blocks are built where it has any.

    Args:
        adj: structure (num_dst, num_src), whose use may count.
        q: (num_dst, heads * D).
        k: (num_src, heads * D).
        v: (num_src, heads * Dv).
        bias: (num_values, 1 or heads).
        heads: number of heads.
        algorithm: as the caller asked.
    """
    if algorithm == "unfused":
        return algorithm
    if v.device.type != "cuda":  # where one kernel, from CSR, has either name
        return "fused3s"
    no_csr = csr_unsupported_reason(adj, q, v, heads)
    no_blocks = _attention_bsb.unsupported_reason(adj, v.dtype, (q.size(1), k.size(1), v.size(1)), heads)
    if torch.compiler.is_compiling():
        # A trace does not count: it would be made anew for every number. The operator builds the blocks.
        facts = policy.Facts(True, *adj.shape, adj.num_edges, converted=True)
        return policy.dot_product_algorithm(facts, algorithm, no_blocks, no_csr).algorithm
    operands = (q, k, v) if bias is None else (q, k, v, bias)
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return _choice(adj, algorithm, no_blocks, no_csr, backward=wants_grad).algorithm


def choice_on_cuda(
    adj: Adjacency, dtype: torch.dtype, width: int, heads: int, algorithm: str, *, backward: bool
) -> policy.Choice:
    """The rule's answer for queries, keys and values of one width on CUDA; see :func:`kernel`.

    Args:
        adj: structure, whose use may count.
        dtype: of the features.
        width: that of all heads.
        heads: number of heads.
        algorithm: as the caller asked, not ``"unfused"``.
        backward: whether gradients are wanted.
    """
    no_blocks = _attention_bsb.unsupported_reason(adj, dtype, (width,), heads)
    no_csr = csr_unsupported_reason_of(adj, dtype, width, heads)
    return _choice(adj, algorithm, no_blocks, no_csr, backward=backward)


def _choice(adj: Adjacency, algorithm: str, no_blocks: str, no_csr: str, *, backward: bool) -> policy.Choice:
    rule = policy.dot_product_algorithm
    choice, _ = follow(adj, lambda facts: rule(facts, algorithm, no_blocks, no_csr))
    if choice.algorithm == "fused3s" and not _attention_bsb.has_blocks(adj, backward=backward):
        no_memory = "not enough memory for the binary sparse blocks"
        return rule(facts_of(adj), algorithm, no_memory, no_csr)
    return choice


def csr(
    adj: Adjacency,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of_call: tuple[Tensor | None, float, float, Tensor | None, int],
    algorithm: str,
) -> Tensor:
    """Attention by the CSR kernels on CUDA, as edges with features of width 0; the call is supported.

    Args:
        adj: structure (num_dst, num_src).
        q: (num_dst, heads * D).
        k: (num_src, heads * D).
        v: (num_src, heads * D).
        of_call: bias, scale, probability of dropout, its seed, number of heads.
        algorithm: as the caller asked.
    """
    edges = v.new_empty(adj.num_values, 0), v.new_empty(v.size(1), 0)
    return registration.call("edge_attention", v, q, k, v, *edges, *of_call, adj.handle, algorithm)
