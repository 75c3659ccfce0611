"""Sparse rows times a sparse structure: aggregation of the entries that MaxK kept."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats import lengths
from fastsparse_core.formats.cbsr import CBSR, ids_dtype
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import (
    check_bias,
    check_features,
    check_scale,
    check_structure,
    check_value,
    widened_value,
)
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._facts import facts_of
from fastsparse_core.ops._registration import Operator, Structure, keep_alive, structure_of
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.ops._ssd_backward import ssd_backward_op, ssd_value_grad_op
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.ops.maxk import write_out
from fastsparse_core.structure.adjacency import Adjacency

SumOrMean = Literal["sum", "mean"]


def ssd(
    adj: Adjacency,
    cbsr: CBSR,
    value: Tensor | None = None,
    reduce: SumOrMean = "sum",
    *,
    scale_dst: Tensor | None = None,
    scale_src: Tensor | None = None,
    bias: Tensor | None = None,
    algorithm: str = "auto",
) -> Tensor:
    r"""Aggregates the kept entries of each row's neighbours into dense rows.

    .. math::
        \mathbf{y}_i = s_i \bigoplus_{j \in \mathcal{N}(i)} v_{ij} \, t_j \, \mathbf{x}_j + \mathbf{b}

    with :math:`\mathbf{X}` = ``cbsr.to_dense()`` and :math:`\bigoplus` a sum or mean. The result is that of
    :func:`spmm` on the dense rows, but only k entries per edge are read ("Decoupled SSD", sections III and
    IV). Results have the same bits in every run. On CUDA, the gradient of float32 and 16-bit values may use
    atomics; ``torch.use_deterministic_algorithms(True)`` turns them off.

    Args:
        adj: structure (num_dst, num_src).
        cbsr: kept entries of the sources, num_src rows; float64, float32, float16 or bfloat16. Under autocast
            its values are cast like the features of a matrix product.
        value: :math:`v`, (num_values,) in the caller's edge order, in the dtype of the values or in its
            accumulation dtype. None: 1.
        reduce: ``"sum"`` or ``"mean"``.
        scale_dst: constant :math:`s`, floating (num_dst,).
        scale_src: constant :math:`t`, floating (num_src,).
        bias: :math:`\mathbf{b}`, floating (width,).
        algorithm: ``"decoupled"`` (edge groups summed in shared memory; on CUDA in fixed point, see the
            note); ``"densify"`` (:func:`spmm` of the dense rows); or ``"auto"``: decoupled on the CPU, and on
            CUDA if at most a quarter of the features are kept (an eighth in 16 bits), otherwise densify.

    Returns:
        (num_dst, width) in the dtype of the values; differentiable twice in the values of ``cbsr``, in
        ``value`` and in ``bias``.

    Raises:
        TypeError: a dtype is not supported, or ``cbsr`` is not a CBSR.
        ValueError: a size, device or option does not fit.

    Note:
        On CUDA, ``"decoupled"`` sums 128 entries of a row at a time in fixed point, with 24 bits for the
        largest of them. The accuracy is that of float32 relative to the largest entry among the neighbours,
        not relative to each feature. If features have very different scales, use ``algorithm="densify"``.
        Infinities, NaN and float64 are summed in floating point.

    Examples:
        >>> import torch
        >>> from fastsparse_core import Adjacency, maxk, ssd
        >>> adj = Adjacency.from_coo(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 0]), (3, 3))
        >>> ssd(adj, maxk(torch.eye(3), 1)).tolist()
        [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    algorithm = policy.requested("ssd", algorithm)
    values, value, scale_dst, scale_src = operands(adj, cbsr, value, reduce, scale_dst, scale_src)
    if bias is not None:
        (bias,) = autocast(bias)
        assert bias is not None
        bias = check_bias(bias, values, cbsr.width, "cbsr").to(values.dtype)
    arguments = (values, cbsr.ids, cbsr.width, value, scale_dst, scale_src, bias)
    out: Tensor = ssd_op(*arguments, adj.num_dst, adj, False, algorithm)
    return out


def operands(
    adj: Adjacency,
    cbsr: CBSR,
    value: Tensor | None,
    reduce: str,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Checks the arguments of :func:`ssd` and returns them for its kernels: values, edge values, both scales.

    Raises:
        TypeError: a dtype is not supported, or ``cbsr`` is not a CBSR.
        ValueError: a size, device or option does not fit.
    """
    check_structure(adj)
    _check_cbsr(cbsr, adj)
    (values,) = autocast(cbsr.values)
    assert values is not None
    if value is not None:
        check_value(value, values, "cbsr")
        if value.shape != (adj.num_values,):
            raise ValueError(f"value: expected shape ({adj.num_values},), got {tuple(value.shape)}")
        value = widened_value(value, values)
    scale_dst = check_scale("scale_dst", scale_dst, adj.num_dst, values)
    scale_src = check_scale("scale_src", scale_src, adj.num_src, values)
    if reduce == "mean":
        mean = adj.inv_degree(accumulation_dtype(values.dtype))
        scale_dst = mean if scale_dst is None else scale_dst * mean
    elif reduce != "sum":
        raise ValueError(f"reduce: expected 'sum' or 'mean', got {reduce!r}")
    return values, value, scale_dst, scale_src


def _check_cbsr(cbsr: CBSR, adj: Adjacency) -> None:
    if not isinstance(cbsr, CBSR):
        raise TypeError(f"cbsr: expected a CBSR, as maxk() returns it, got {type(cbsr).__name__}")
    check_features("cbsr", cbsr.values, adj.num_src, "num_src", adj)
    expected = ids_dtype(cbsr.width)
    if cbsr.ids.dtype != expected:
        raise TypeError(f"cbsr: expected {expected} ids for width {cbsr.width}, got {cbsr.ids.dtype}")
    if cbsr.values.dim() != 2 or cbsr.ids.shape != cbsr.values.shape:
        raise ValueError(
            f"cbsr: expected values and ids of the same shape ({adj.num_src}, k), "
            f"got {tuple(cbsr.values.shape)} and {tuple(cbsr.ids.shape)}"
        )
    if not 1 <= cbsr.k <= cbsr.width:
        raise ValueError(f"cbsr: expected k from 1 to the width {cbsr.width}, got {cbsr.k}")
    if cbsr.ids.device != cbsr.device:
        raise ValueError(f"cbsr: expected ids on {cbsr.device} like the values, got {cbsr.ids.device}")


def launch_ssd(
    values: Tensor,
    ids: Tensor,
    width: int,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
    num_dst: int,
    adjacency: Structure,
    transpose: bool,
    algorithm: str,
) -> Tensor:
    """Runs the kernels of ``ssd``; takes the operator's arguments, which the caller has checked."""
    adj = structure_of(adjacency, transpose)
    values, ids = values.contiguous(), ids.contiguous()
    out = values.new_empty(num_dst, width)
    if out.numel() == 0:
        return out
    if value is not None:
        value = value.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    chosen = policy.ssd_algorithm(algorithm, values.device, values.dtype, values.size(1), width)
    if chosen == "densify":
        if transpose:
            adj = structure_of(adjacency).t(valued=value is not None)
        return launch_spmm(adj, write_out(values, ids, width), value, scale_dst, scale_src, bias, "auto")
    index = device_index(values.device)
    longest = lengths.edge_group_length(adj.num_edges, adj.num_dst, adj.gpu)
    groups = adj.edge_groups(longest) if index >= 0 else None
    partial = None
    if groups is not None and groups.num_slots:
        partial = values.new_empty(groups.num_slots, width, dtype=accumulation_dtype(values.dtype))
    packed = None
    if index >= 0 and policy.packs_ssd_rows(facts_of(adj), adj.gpu, values.dtype, values.size(1), width):
        packed = ids.new_empty(ids.shape, dtype=torch.int32)
    num_long, few_entries = 0, False
    if groups is not None:
        num_long, few_entries = policy.long_edge_groups(groups, adj.num_edges, values.size(1), adj.gpu)
    _C.ssd(
        structure=adj.edge_group_structure(longest),
        width=width,
        values=values,
        ids=ids,
        value=value,
        scale_dst=scale_dst,
        scale_src=scale_src,
        bias=bias,
        out=out,
        partial=partial,
        packed=packed,
        longest_group=0 if groups is None else groups.longest,
        num_long=num_long,
        few_entries=few_entries,
        device=index,
        queue=queue(index),
    )
    return out


class _Ssd(torch.autograd.Function):
    """Computes the gradients of the kept values, of the edge values and of the bias."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        values, ids, _, value, scale_dst, scale_src, _, _, adjacency, transpose, _ = arguments
        ctx.adjacency, ctx.transpose = adjacency, transpose
        ctx.keep_alive = keep_alive(adjacency)
        ctx.save_for_backward(values if value is not None else None, ids, value, scale_dst, scale_src)
        return ssd_op.below(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, ids, value, scale_dst, scale_src = ctx.saved_tensors
        grad_values = grad_value = grad_bias = None
        place = (ctx.adjacency, ctx.transpose)
        if ctx.needs_input_grad[0]:
            grad_values = ssd_backward_op(grad, ids, value, scale_dst, scale_src, *place)
        if ctx.needs_input_grad[3]:
            grad_value = ssd_value_grad_op(grad, values, ids, scale_dst, scale_src, value.size(0), *place)
            grad_value = grad_value.to(value.dtype)
        if ctx.needs_input_grad[6]:
            grad_bias = sum_of_rows(grad, grad.dtype)
        return grad_values, None, None, grad_value, None, None, grad_bias, None, None, None, None


ssd_op = Operator(launch_ssd, lambda of: of.values.new_empty(of.num_dst, of.width), _Ssd, "ssd")
