"""The backward pass of ssd: gradients of the kept values and of the edge values."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C, policy
from fastsparse_core.device import device_index, place_of, queue
from fastsparse_core.formats.row_panels import PanelLayout, RowPanels
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._facts import facts_of, used_csr
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.ops._registration import OPERATORS, Operator, Structure, keep_alive, structure_of
from fastsparse_core.structure.adjacency import Adjacency

_logger = logging.getLogger("fastsparse_core")


def grad_of_values(
    grad: Tensor,
    ids: Tensor,
    value: Tensor | None,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    adjacency: Structure,
    transpose: bool,
) -> Tensor:
    r"""Gradient of the kept values of a product with sparse features (MaxK-GNN, section 3.2).

    .. math::
        d_{jc} = t_j \sum_{i : (i, j) \in E} s_i \, v_{ij} \, \mathbf{g}_i[\mathrm{ids}_{jc}]

    On CUDA, row panels are used: sums over the destinations of a panel are added atomically, in an order that
    differs from call to call. A kernel for rows of the transposed structure, without atomics, is used under
    ``torch.use_deterministic_algorithms``, in float64, if rows are too wide for shared memory, if there are
    too many sources for panels, and if rows have few entries (`policy.ssd_backward_algorithm`).

    Args:
        grad: :math:`\mathbf{g}`, (num_dst, D), gradient of the product.
        ids: (num_src, k) uint8 or uint16, the kept columns.
        value: :math:`v`, (num_values,) in the caller's edge order, in the dtype of ``grad`` or its
            accumulation dtype; None: 1.
        scale_dst: :math:`s`, (num_dst,) in the accumulation dtype; None: 1.
        scale_src: :math:`t`, (num_src,) in the accumulation dtype; None: 1.
        adjacency: the structure or its handle.
        transpose: whether the product used the transpose of the structure.

    Returns:
        (num_src, k) in the dtype of ``grad``, accumulated in float32 or wider.
    """
    adj = structure_of(adjacency, transpose)
    out = grad.new_empty(ids.shape)
    if out.numel() == 0:
        return out
    grad, ids = unit_stride(grad), ids.contiguous()
    value = None if value is None else value.contiguous()
    width, k, index = grad.size(1), ids.size(1), device_index(grad.device)
    windows = None
    if policy.ssd_backward_algorithm(facts_of(adj), adj.gpu, grad.dtype, width, k) == "windows":
        row_bytes = width * grad.dtype.itemsize
        windows = _windows(adj, policy.panel_layout(adj.shape, adj.num_edges, row_bytes, k, adj.gpu))
    if windows is not None:
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        panels = _windows_structure(adj, windows, valued=value is not None)
        _C.ssd_backward_windows(
            structure=panels,
            grad=grad,
            value=value,
            ids=ids,
            scale_dst=scale_dst,
            scale_src=scale_src,
            sum=total,
            out=out,
            device=index,
            queue=queue(index),
        )
        return out
    transposed, partial = structure_of(adjacency, not transpose), None
    if index >= 0 and transposed.row_split.num_slots:
        partial = out.new_empty(transposed.row_split.num_slots, k, dtype=accumulation_dtype(grad.dtype))
    _C.ssd_backward(
        transposed=used_csr(transposed),
        grad=grad,
        value=value,
        ids=ids,
        scale_dst=scale_dst,
        scale_src=scale_src,
        out=out,
        partial=partial,
        device=index,
        queue=queue(index),
    )
    return out


def _windows(adj: Adjacency, layout: PanelLayout) -> RowPanels | None:
    """The row panels of a layout, built once.

    All layouts give correct results. If this layout cannot be built, because a CUDA graph is captured or
    there is not enough memory, row panels of another layout are returned. None: there are no row panels, and
    the kernel for CSR has to run.
    """
    built: dict[PanelLayout, RowPanels | None] = adj.derived("row_panels", dict)
    if layout in built:
        return built[layout]
    other = next((windows for windows in built.values() if windows is not None), None)
    if other is not None and adj.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return other
    try:
        built[layout] = RowPanels.from_csr(adj.row_once(), adj.col, adj.shape, layout)
    except torch.OutOfMemoryError:
        built[layout] = other  # later calls do not try again
        kept = "csr" if other is None else "an earlier conversion"
        _logger.warning(
            "%r: not enough memory to convert it for the backward pass of ssd, which uses %s instead",
            adj,
            kept,
        )
    return built[layout]


def _value_id(adj: Adjacency, height: int) -> Tensor:
    """Position in the caller's edge order of every entry of the row panels."""

    def build() -> Tensor:
        order = RowPanels.entry_order(adj.row_once(), adj.col, adj.shape, height)
        return order if adj.edge_id is None else adj.edge_id.index_select(0, order)

    return adj.derived(("tall_windows_value_id", height), build)


def _windows_structure(adj: Adjacency, windows: RowPanels, *, valued: bool) -> Any:
    """The row panels in the form that the kernel takes."""
    layout = windows.layout

    def build() -> Any:
        value_id = _value_id(adj, layout.height) if valued else None
        return _C.RowPanelsStructure(
            entry=windows.entry,
            value_id=value_id,
            value_id_is_64bit=value_id is not None and value_id.dtype == torch.int64,
            other_source=windows.other_source,
            num_other=windows.other_source.numel(),
            slices=windows.slices,
            num_slices=windows.slices.size(0),
            height=layout.height,
            strip=layout.strip,
            num_rows=adj.num_dst,
            num_cols=adj.num_src,
        )

    return adj.derived(("tall_windows_structure", *layout, valued), build)


def grad_of_edge_values(
    grad: Tensor,
    values: Tensor,
    ids: Tensor,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    num_values: int,
    adjacency: Structure,
    transpose: bool,
) -> Tensor:
    r"""Gradient of the edge values of a product with sparse features.

    .. math::
        d_e = s_i \, t_j \sum_c \mathbf{g}_i[\mathrm{ids}_{jc}] \, \mathrm{values}_{jc}
        \quad \text{for every edge } e = (i, j)

    Args:
        grad: :math:`\mathbf{g}`, (num_dst, D), gradient of the product.
        values: (num_src, k) in the dtype of ``grad``, the kept values.
        ids: (num_src, k) uint8 or uint16, their columns.
        scale_dst: :math:`s`, (num_dst,) in the accumulation dtype; None: 1.
        scale_src: :math:`t`, (num_src,) in the accumulation dtype; None: 1.
        num_values: number of edge values.
        adjacency: the structure or its handle.
        transpose: whether the product used the transpose of the structure.

    Returns:
        (num_values,) in the accumulation dtype, float32 or float64, in the caller's edge order; 0 for edges
        that self loops replaced.
    """
    adj = structure_of(adjacency, transpose)
    every_value_is_written = num_values == adj.num_edges
    out = (torch.empty if every_value_is_written else torch.zeros)(
        num_values, dtype=accumulation_dtype(grad.dtype), device=grad.device
    )
    if num_values == 0 or adj.num_edges == 0:
        return out
    grad, values, ids = unit_stride(grad), values.contiguous(), ids.contiguous()
    device, stream = place_of(grad.device)
    _C.ssd_value_grad(
        structure=used_csr(adj),
        grad=grad,
        kept=values,
        ids=ids,
        scale_dst=scale_dst,
        scale_src=scale_src,
        out=out,
        device=device,
        queue=stream,
    )
    return out


class _GradOfValues(torch.autograd.Function):
    """The gradient of the kept values, which is linear in the product's gradient and in the edge values."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        grad, ids, value, scale_dst, scale_src, adjacency, transpose = arguments
        ctx.shape, ctx.place = grad.shape, (adjacency, transpose)
        ctx.keep_alive = keep_alive(adjacency)
        ctx.save_for_backward(grad if value is not None else None, ids, value, scale_dst, scale_src)
        return ssd_backward_op.below(*arguments)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad, ids, value, *scales = ctx.saved_tensors
        num_dst, width = ctx.shape
        of_grad = of_value = None
        if ctx.needs_input_grad[0]:
            of_grad = OPERATORS["ssd"](
                upstream, ids, width, value, *scales, None, num_dst, *ctx.place, "auto"
            )
        if ctx.needs_input_grad[2]:
            of_value = ssd_value_grad_op(grad, upstream, ids, *scales, value.size(0), *ctx.place)
            of_value = of_value.to(value.dtype)
        return of_grad, None, of_value, None, None, None, None


class _GradOfEdgeValues(torch.autograd.Function):
    """The gradient of the edge values, which is linear in the product's gradient and in the kept values."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, _, adjacency, transpose = arguments
        ctx.place = (adjacency, transpose)
        ctx.keep_alive = keep_alive(adjacency)
        ctx.save_for_backward(*tensors)
        return ssd_value_grad_op.below(*arguments)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad, values, ids, *scales = ctx.saved_tensors
        num_dst, width = grad.shape
        of_grad = of_values = None
        if ctx.needs_input_grad[0]:
            of_grad = OPERATORS["ssd"](
                values, ids, width, upstream, *scales, None, num_dst, *ctx.place, "auto"
            )
        if ctx.needs_input_grad[1]:
            of_values = ssd_backward_op(grad, ids, upstream, *scales, *ctx.place)
        return of_grad, of_values, None, None, None, None, None, None


def _edge_values_fake(of: Any) -> Tensor:
    return of.grad.new_empty(of.num_values, dtype=accumulation_dtype(of.grad.dtype))


ssd_backward_op = Operator(
    grad_of_values, lambda of: of.grad.new_empty(of.ids.shape), _GradOfValues, "ssd_backward"
)
ssd_value_grad_op = Operator(grad_of_edge_values, _edge_values_fake, _GradOfEdgeValues, "ssd_value_grad")
