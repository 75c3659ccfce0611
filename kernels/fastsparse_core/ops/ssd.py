"""Sparse rows times a sparse structure: aggregation of the entries that MaxK kept."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fastsparse_core import policy
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
from fastsparse_core.ops._handles import keep_alive
from fastsparse_core.ops._registration import register, results, run
from fastsparse_core.ops._ssd_backward import derivatives
from fastsparse_core.ops._ssd_launch import launch_ssd
from fastsparse_core.ops._sum_of_rows import sum_of_rows
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

    with :math:`\mathbf{X}` = ``cbsr.to_dense()`` and :math:`\bigoplus` a sum or mean: what :func:`spmm` of
    the dense rows gives, from k entries per edge instead of all features ("Decoupled SSD", sections III and
    IV). Results are the same bits every time.

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
        algorithm: ``"decoupled"`` (edge groups summed in shared memory; on CUDA in fixed point, see below);
            ``"densify"`` (:func:`spmm` of the dense rows); or ``"auto"``: decoupled where few of the features
            are kept, else densify.

    Returns:
        (num_dst, width) in the dtype of the values; differentiable in them, in ``value`` and in ``bias``,
        twice too.

    Raises:
        TypeError: a dtype is not supported, or ``cbsr`` is no CBSR.
        ValueError: a size, device or option does not fit.

    Note:
        On CUDA ``"decoupled"`` sums 128 entries of a row at a time in fixed point, with 24 bits for the
        greatest of them. Results have float32's accuracy relative to the greatest entry among the neighbours,
        not relative to the size of each feature. Features of very different scales keep that with
        ``algorithm="densify"``. Infinities, NaN and float64 are summed as floats.

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
    place = (adj.num_dst, adj.handle, False, algorithm)
    return results("ssd", values, *arguments, *place)


def operands(
    adj: Adjacency,
    cbsr: CBSR,
    value: Tensor | None,
    reduce: str,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The arguments of :func:`ssd`, checked, as its kernels take them: values, edge values and both scales.

    Raises:
        TypeError: a dtype is not supported, or ``cbsr`` is no CBSR.
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
            f"cbsr: expected values and ids of one shape ({adj.num_src}, k), "
            f"got {tuple(cbsr.values.shape)} and {tuple(cbsr.ids.shape)}"
        )
    if not 1 <= cbsr.k <= cbsr.width:
        raise ValueError(f"cbsr: expected k from 1 to the width {cbsr.width}, got {cbsr.k}")
    if cbsr.ids.device != cbsr.device:
        raise ValueError(f"cbsr: expected ids on {cbsr.device} like the values, got {cbsr.ids.device}")


class _Ssd(torch.autograd.Function):
    """The gradients of the values, of the edge values and of the bias."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        values, ids, _, value, scale_dst, scale_src, _, _, adjacency, transpose, _ = arguments
        ctx.adjacency, ctx.transpose = adjacency, transpose
        ctx.keep_alive = keep_alive(adjacency)
        ctx.save_for_backward(values if value is not None else None, ids, value, scale_dst, scale_src)
        return run("ssd", values, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, ids, value, scale_dst, scale_src = ctx.saved_tensors
        of_values, of_edge_values = derivatives(grad)
        grad_values = grad_value = grad_bias = None
        place = (ctx.adjacency, ctx.transpose)
        if ctx.needs_input_grad[0]:
            grad_values = of_values(grad, ids, value, scale_dst, scale_src, *place)
        if ctx.needs_input_grad[3]:
            grad_value = of_edge_values(grad, values, ids, scale_dst, scale_src, value.size(0), *place)
            grad_value = grad_value.to(value.dtype)
        if ctx.needs_input_grad[6]:
            grad_bias = sum_of_rows(grad, grad.dtype)
        return grad_values, None, None, grad_value, None, None, grad_bias, None, None, None, None


register(launch_ssd, lambda of: of.values.new_empty(of.num_dst, of.width), _Ssd, "ssd")
