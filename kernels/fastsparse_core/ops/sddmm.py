"""Sampled dense-dense product: a dot product per edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import place_of
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import (
    check_features,
    check_heads,
    check_scale,
    check_structure,
    is_partitioned,
)
from fastsparse_core.ops._facts import facts_of, follow, used_csr
from fastsparse_core.ops._operands import dense_from_edges, unit_stride
from fastsparse_core.ops._registration import OPERATORS, Operator, Structure, keep_alive, structure_of
from fastsparse_core.structure.adjacency import Adjacency


def sddmm(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    algorithm: str = "auto",
    layout: str = "edges",
) -> Tensor:
    r"""Computes the dot product of the features at the two ends of every edge.

    .. math::
        e_{ij} = s_i \, t_j \, \langle \mathbf{x}_i, \mathbf{x}_j \rangle \quad \text{for every edge } (i, j)

    Args:
        adj: structure (num_dst, num_src).
        x_dst: features of the destinations, (num_dst, F) or (num_dst, H, D), float64, float32, float16 or
            bfloat16.
        x_src: features of the sources, (num_src, F) or (num_src, H, D), in the dtype of ``x_dst``.
        scale_dst: constant :math:`s`, floating (num_dst,).
        scale_src: constant :math:`t`, floating (num_src,).
        algorithm: which kernel runs. If it does not support the call, ``"csr"`` runs, with a warning:

            - ``"csr"``: on CUDA cores, or on the CPU.
            - ``"flashsparse"``: 8x1 vectors on tensor cores (FlashSparse 3.5), for float32, float16 and
              bfloat16 on CUDA, if rows and heads are multiples of 16 bytes. Float32 uses two TF32 terms, or
              one if ``torch.set_float32_matmul_precision`` allows TF32.
            - ``"auto"``: flashsparse for one head of more than 64 bytes of 16-bit features per node, if the
              structure is not small and was prepared, or was used so often that the conversion pays off.
              Otherwise csr.
        layout: ``"edges"``, or ``"me_bcrs"``: all values of the non-zero vectors in the order of ``adj.bsb``,
            without padding, and zeros at positions without an entry (FlashSparse, figure 9).
            ``spmm(value_layout="me_bcrs")`` takes this layout. With it, ``"auto"`` uses flashsparse if that
            supports the call. Csr computes values per edge, which are then copied into this layout.

    Returns:
        (num_values,) or, with heads, (num_values, H), in the caller's edge order and the dtype of the
        features; 0 for edges that self loops replaced. With ``layout="me_bcrs"``: (num_vectors, 8) or
        (num_vectors, 8, H). The products are accumulated in float32 or wider. The result is differentiable
        any number of times.

    Raises:
        TypeError: dtypes are not supported or differ.
        ValueError: a size, device or option does not fit, or there are more than 65535 heads on CUDA.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency, sddmm
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 0]), (3, 3))
        >>> x = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 5.0]])
        >>> sddmm(adj, x, x)
        tensor([2., 3., 3.])
    """
    algorithm = policy.requested("sddmm", algorithm)
    policy.check_algorithm(layout, ("edges", "me_bcrs"), "layout")
    check_structure(adj)
    check_features("x_dst", x_dst, adj.num_dst, "num_dst", adj)
    check_features("x_src", x_src, adj.num_src, "num_src", adj)
    if is_partitioned(adj):
        if scale_src is not None:
            scale_src = adj.scales(scale_src, x_src)[1]
        (x_src,) = adj.sources(x_src)
        adj = adj.rows
    if x_dst.dim() not in (2, 3) or x_dst.shape[1:] != x_src.shape[1:]:
        raise ValueError(
            "x_dst and x_src: expected (n, F) or (n, heads, D) with equal F, heads and D, "
            f"got {tuple(x_dst.shape)} and {tuple(x_src.shape)}"
        )
    x_dst, x_src = autocast(x_dst, x_src)  # type: ignore[assignment]
    if x_dst.dtype != x_src.dtype:
        raise TypeError(f"x_dst and x_src: expected one dtype, got {x_dst.dtype} and {x_src.dtype}")
    scale_dst = check_scale("scale_dst", scale_dst, adj.num_dst, x_dst)
    scale_src = check_scale("scale_src", scale_src, adj.num_src, x_src)
    heads = x_dst.size(1) if x_dst.dim() == 3 else 1
    check_heads(heads, x_dst.device)
    features = (x_dst.flatten(1), x_src.flatten(1), scale_dst, scale_src)
    dense = layout == "me_bcrs"
    length = adj.bsb.num_vectors if dense else adj.num_values
    out = sddmm_op(*features, length, heads, x_dst.dtype, adj, algorithm, dense)
    return out if x_dst.dim() == 3 else out.squeeze(-1)


def sddmm_kernel(
    x_dst: Tensor,
    x_src: Tensor,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    length: int,
    heads: int,
    dtype: torch.dtype,
    adjacency: Structure,
    algorithm: str,
    dense: bool,
) -> Tensor:
    """The operator without autograd. Returns (length, heads), or with `dense` (length, 8, heads)."""
    # `structure_of` is called only if it is needed, to save a Python call in every backward pass.
    adj = adjacency if isinstance(adjacency, Adjacency) else structure_of(adjacency)
    if x_dst.stride(1) != 1:
        x_dst = unit_stride(x_dst)
    if x_src.stride(1) != 1:
        x_src = unit_stride(x_src)
    size = (length, HEIGHT, heads) if dense else (length, heads)
    num_edges = adj.col.numel()
    if length == 0 or heads == 0 or num_edges == 0:
        return x_dst.new_zeros(size, dtype=dtype)
    aligned = x_dst.is_cuda and _is_aligned(x_dst, x_src, heads)  # CPU kernels do not need it
    # Most calls repeat an earlier one, whose plan is cached.
    key = ("sddmm", x_dst.dtype, x_dst.shape[1], heads, algorithm, aligned, dense)
    kernel, by_entry = adj.plans.get(key) or _plan(adj, algorithm, x_dst, heads, aligned, dense, key)
    if dense and kernel == "csr":
        of_edges = (adj.num_values, heads, dtype, adjacency, kernel, False)
        return dense_from_edges(adj, sddmm_kernel(x_dst, x_src, scale_dst, scale_src, *of_edges))
    every_value_is_written = dense or length == num_edges
    out = (x_dst.new_empty if every_value_is_written else x_dst.new_zeros)(size, dtype=dtype)
    device, stream = place_of(x_dst.device) if x_dst.is_cuda else (-1, torch.get_num_threads())
    if kernel == "flashsparse":
        structure, slot_window, slot_entry, edge_id = adj.sddmm_structure()
        _C.sddmm_bsb(
            structure,
            adj.rowptr,
            slot_window,
            slot_entry,
            quad_vector=adj.quad_vector() if dense else None,
            edge_id=edge_id,
            edge_id_is_64bit=edge_id is not None and edge_id.dtype == torch.int64,
            heads=heads,
            x_dst=x_dst,
            x_src=x_src,
            scale_dst=scale_dst,
            scale_src=scale_src,
            out=out,
            out_dtype=dtype,
            tf32=policy.allows_tf32(),
            device=device,
            queue=stream,
        )
    else:
        _C.sddmm_csr(
            structure=adj.plans.get("csr") or used_csr(adj),
            heads=heads,
            x_dst=x_dst,
            x_src=x_src,
            scale_dst=scale_dst,
            scale_src=scale_src,
            out=out,
            out_dtype=dtype,
            row=adj.row() if by_entry else None,
            device=device,
            queue=stream,
        )
    return out


def _plan(
    adj: Adjacency, algorithm: str, x_dst: Tensor, heads: int, aligned: bool, dense: bool, key: Any
) -> tuple[str, bool]:
    """Chooses the kernel, and whether it processes entry by entry; caches the choice if it is final."""
    head_bytes = x_dst.size(1) // heads * x_dst.element_size()
    call = (algorithm, x_dst.dtype, head_bytes, heads, aligned, dense)
    choice, _ = follow(adj, lambda facts: policy.sddmm_algorithm(facts, adj.gpu, *call))
    plan = choice.algorithm, policy.sddmm_by_entry(facts_of(adj), x_dst.dtype, aligned)
    if choice.is_final:
        adj.plans[key] = plan
    return plan


def _is_aligned(x_dst: Tensor, x_src: Tensor, heads: int) -> bool:
    """True if every head of every node starts at a multiple of 16 bytes, and a row's stride fits 32 bits."""
    size = x_dst.element_size()
    dst_stride, src_stride = x_dst.stride(0) * size, x_src.stride(0) * size
    if max(dst_stride, src_stride) >= 1 << 32:
        return False
    width = x_dst.size(1) // heads * size
    return (width | x_dst.data_ptr() | dst_stride | x_src.data_ptr() | src_stride) % 16 == 0


class _Sddmm(torch.autograd.Function):
    """dX_dst = A_g X_src and dX_src = A_g^T X_dst, with the incoming gradient g as the edge values."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, _, _, _, adjacency, algorithm, _ = arguments
        ctx.save_for_backward(*tensors)
        ctx.adjacency, ctx.algorithm = adjacency, algorithm
        ctx.keep_alive = keep_alive(adjacency)
        return sddmm_op.below(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_dst, x_src, scale_dst, scale_src = ctx.saved_tensors
        spmm = OPERATORS["spmm"]
        grad_dst = grad_src = None
        if ctx.needs_input_grad[0]:
            place = (x_dst.size(0), ctx.adjacency, False, ctx.algorithm, False)
            grad_dst = spmm(x_src, grad, scale_dst, scale_src, None, *place)
        if ctx.needs_input_grad[1]:
            place = (x_src.size(0), ctx.adjacency, True, ctx.algorithm, False)
            grad_src = spmm(x_dst, grad, scale_src, scale_dst, None, *place)
        return grad_dst, grad_src, None, None, None, None, None, None, None, None


def _fake(of: Any) -> Tensor:
    size = (of.length, HEIGHT, of.heads) if of.dense else (of.length, of.heads)
    return of.x_dst.new_empty(size, dtype=of.dtype)


sddmm_op = Operator(sddmm_kernel, _fake, _Sddmm, "sddmm")
