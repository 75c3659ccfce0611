"""Maximum and minimum over the neighbours of every row: `spmm` with reduce="max" and "min"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import current_stream
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import num_heads, unit_stride
from fastsparse_core.ops._registration import Operator, Structure, keep_alive, structure_of
from fastsparse_core.structure.adjacency import Adjacency


def extremum(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    minimum: bool,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Maximum or minimum with the scales and bias of :func:`fastsparse_core.spmm`; differentiable.

    Args:
        adj: structure (num_dst, num_src).
        x: (num_src, width).
        value: (num_values,) or (num_values, heads).
        minimum: whether to compute the minimum instead of the maximum.
        scale_dst: (num_dst,).
        scale_src: (num_src,).
        bias: (width,), in any floating dtype.

    Returns:
        (num_dst, width) in the dtype of ``x``.
    """
    dtype = x.dtype
    if scale_dst is not None or scale_src is not None or bias is not None:
        # 16-bit results are rounded once, at the end, instead of after every factor.
        x = x.to(ACCUMULATION_DTYPE[dtype])
        value = None if value is None else value.to(x.dtype)
    if scale_src is not None:
        x = x * scale_src[:, None]
    out, _ = _spmm_extremum_op(x, value, adj.num_dst, adj, False, minimum, False)
    if scale_dst is not None:
        out = out * scale_dst[:, None]
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def extremum_of_sums(adj: Adjacency, x: Tensor, value: Tensor, minimum: bool) -> Tensor:
    """Maximum or minimum of the sums of source features and edge values; differentiable.

    Args:
        adj: structure (num_dst, num_src).
        x: (num_src, heads * width).
        value: (num_values, heads), in the dtype of ``x`` or its accumulation dtype.
        minimum: whether to compute the minimum instead of the maximum.

    Returns:
        (num_dst, heads * width) in the dtype of ``x``.
    """
    out: Tensor = _spmm_extremum_op(x, value, adj.num_dst, adj, False, minimum, True)[0]
    return out


def spmm_extremum(
    x: Tensor,
    value: Tensor | None,
    num_dst: int,
    adjacency: Structure,
    transpose: bool,
    minimum: bool,
    adds: bool,
) -> tuple[Tensor, Tensor]:
    """The operator's kernel: results, and the chosen edges' positions in the caller's order (-1: no edge).

    Values are factors of the features. With ``adds``, they are added to the features.
    """
    adj = structure_of(adjacency, transpose)
    x = unit_stride(x)
    width = x.size(1)
    out = x.new_empty(num_dst, width)
    arg = torch.empty(num_dst, width, dtype=torch.int32, device=x.device)
    if out.numel() == 0:
        return out, arg
    if value is not None:
        value = value.contiguous()
    index = x.get_device()
    partial = partial_arg = None
    if index >= 0 and adj.row_split.num_slots:
        partial = x.new_empty(adj.row_split.num_slots, width, dtype=ACCUMULATION_DTYPE[x.dtype])
        partial_arg = torch.empty(partial.shape, dtype=torch.int32, device=x.device)
    _C.spmm_extremum(
        structure=adj.plans.get("csr") or used_csr(adj),
        x=x,
        value=value,
        heads=num_heads(value),
        minimum=minimum,
        adds=adds,
        out=out,
        arg=arg,
        partial=partial,
        partial_arg=partial_arg,
        device=index,
        queue=torch.get_num_threads() if index < 0 else current_stream(index),
    )
    return out, arg


class _SpmmExtremum(torch.autograd.Function):
    """Passes the gradient of each result to the entry that was chosen as its maximum or minimum."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        x, value, _, adjacency, transpose, _, adds = arguments
        out, arg = _spmm_extremum_op.below(*arguments)
        ctx.mark_non_differentiable(arg)
        ctx.save_for_backward(arg, None if value is None or adds else x, value)
        ctx.num_src, ctx.adjacency, ctx.transpose, ctx.adds = x.size(0), adjacency, transpose, adds
        ctx.keep_alive = keep_alive(adjacency)
        return out, arg

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        arg, x, value = ctx.saved_tensors
        grad_x, grad_value = _spmm_extremum_backward_op(
            grad, arg, x, value, ctx.num_src, ctx.adjacency, ctx.transpose
        )
        return grad_x, grad_value if value is not None else None, None, None, None, None, None


def _source_of_edge(adj: Adjacency) -> Tensor:
    """int32 (num_values,): the source of every edge in the caller's order."""
    if adj.edge_id is None:
        return adj.col

    def build() -> Tensor:
        assert adj.edge_id is not None
        return adj.col.new_zeros(adj.num_values).index_copy_(0, adj.edge_id.long(), adj.col)

    return adj.derived("fastsparse_core.source_of_edge", build)


def _spmm_extremum_backward(
    grad: Tensor,
    arg: Tensor,
    x: Tensor | None,
    value: Tensor | None,
    num_src: int,
    adjacency: Structure,
    transpose: bool,
) -> tuple[Tensor, Tensor]:
    """The kernel of the gradients. ``x``: the features that were multiplied by ``value``, or None."""
    adj = structure_of(adjacency, transpose)
    heads, width = num_heads(value), arg.size(1)
    grad_x, grad_value = _empty_gradients(grad, num_src, value)
    if adj.num_edges == 0 or width == 0:
        return grad_x.zero_(), grad_value.zero_()
    if adj.is_padded:  # padded structures have no transpose
        return _gradient_formula(grad, arg, x, value, num_src, adjacency, transpose)
    # Sums of 16-bit gradients are accumulated in float32, as in the forward pass.
    dtype = ACCUMULATION_DTYPE[grad.dtype]
    grad, arg = unit_stride(grad), arg.contiguous()
    x = None if x is None else unit_stride(x)
    value = None if value is None else value.contiguous()
    index, transposed, partial, of_value = grad.get_device(), adj, None, None
    if index >= 0:
        transposed = adj.t()
        if transposed.row_split.num_slots:
            partial = grad.new_empty(transposed.row_split.num_slots, width, dtype=dtype)
    elif grad_x.dtype != dtype:
        grad_x = torch.empty(grad_x.shape, dtype=dtype)
    if value is not None:
        of_value = torch.zeros(adj.num_values, heads, dtype=dtype, device=grad.device)
    source = _source_of_edge(adj) if index < 0 or value is not None else None
    _C.spmm_extremum_backward(
        transposed=transposed.plans.get("csr") or used_csr(transposed),
        grad=grad,
        x=x,
        value=None if x is None else value,
        heads=heads,
        arg=arg,
        source=source,
        grad_x=grad_x,
        grad_value=of_value,
        partial=partial,
        device=index,
        queue=torch.get_num_threads() if index < 0 else current_stream(index),
    )
    if value is not None and of_value is not None:
        grad_value = of_value.to(value.dtype).reshape(value.shape)
    return grad_x.to(grad.dtype), grad_value


def _gradient_formula(
    grad: Tensor,
    arg: Tensor,
    x: Tensor | None,
    value: Tensor | None,
    num_src: int,
    adjacency: Structure,
    transpose: bool,
) -> tuple[Tensor, Tensor]:
    """`_spmm_extremum_backward` by PyTorch's operators, which are differentiable."""
    adj = structure_of(adjacency, transpose)
    heads, width, dtype = num_heads(value), arg.size(1), ACCUMULATION_DTYPE[grad.dtype]
    grad_x, grad_value = _empty_gradients(grad, num_src, value)
    if adj.num_edges == 0 or width == 0:
        return grad_x.zero_(), grad_value.zero_()
    none = arg == -1
    edge = torch.where(none, 0, arg.long() & 0xFFFFFFFF)
    source = _source_of_edge(adj)[edge].long()
    chosen = grad.to(dtype).masked_fill(none, 0)
    if value is not None:
        head = torch.arange(width, device=arg.device) // (width // heads)
        flat = edge * heads + head
        # The mask is for empty rows: they read edge 0, whose features may be infinite, and 0 times infinity
        # is NaN.
        term = chosen if x is None else (chosen * x.to(dtype).gather(0, source)).masked_fill(none, 0)
        of_value = torch.zeros(value.numel(), dtype=dtype, device=arg.device)
        grad_value = _scatter_add(of_value, flat, term).to(value.dtype).reshape(value.shape)
        if x is not None:
            chosen = (chosen * value.to(dtype).reshape(-1)[flat]).masked_fill(none, 0)
    place = source * width + torch.arange(width, device=arg.device)
    of_x = torch.zeros(num_src * width, dtype=dtype, device=arg.device)
    return _scatter_add(of_x, place, chosen).to(grad.dtype).reshape(num_src, width), grad_value


def _scatter_add(out: Tensor, index: Tensor, source: Tensor) -> Tensor:
    index, source = index.reshape(-1), source.reshape(-1)
    if torch.are_deterministic_algorithms_enabled():
        return out.index_put((index,), source, accumulate=True)  # sorts; scatter_add uses atomics
    return out.scatter_add(0, index, source)


def _empty_gradients(grad: Tensor, num_src: int, value: Tensor | None) -> tuple[Tensor, Tensor]:
    of_x = grad.new_empty(num_src, grad.size(1))
    if value is None:
        return of_x, grad.new_empty(0, 1, dtype=ACCUMULATION_DTYPE[grad.dtype])
    return of_x, value.new_empty(value.shape)


def _spmm_extremum_fake(of: Any) -> tuple[Tensor, Tensor]:
    out = of.x.new_empty(of.num_dst, of.x.size(1))
    return out, out.new_empty(out.shape, dtype=torch.int32)


_spmm_extremum_op = Operator(spmm_extremum, _spmm_extremum_fake, _SpmmExtremum)
_spmm_extremum_backward_op = Operator(
    _spmm_extremum_backward, lambda of: _empty_gradients(of.grad, of.num_src, of.value), _gradient_formula
)
