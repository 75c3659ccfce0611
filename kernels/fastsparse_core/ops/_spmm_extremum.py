"""Maximum and minimum over the neighbours of every row: what `spmm` does with reduce="max" and "min"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    accumulation_dtype,
    address,
    below_autograd,
    keep_alive,
    library,
    num_heads,
    register_autograd,
    structure,
    unit_stride,
)
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.structure.adjacency import Adjacency

library.define(
    "spmm_extremum(Tensor x, Tensor? value, SymInt num_dst, SymInt adjacency, bool transpose, bool minimum) "
    "-> (Tensor, Tensor)"
)
library.define(
    "spmm_extremum_backward(Tensor grad, Tensor arg, Tensor x, Tensor? value, SymInt adjacency, "
    "bool transpose) -> (Tensor, Tensor)"
)

_spmm_extremum_op = torch.ops.fastsparse.spmm_extremum.default
_spmm_extremum_backward_op = torch.ops.fastsparse.spmm_extremum_backward.default


def extremum(
    adj: Adjacency,
    x: Tensor,
    value: Tensor | None,
    minimum: bool,
    scale_dst: Tensor | None,
    scale_src: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Maximum or minimum, and the scales and bias of :func:`fastsparse_core.spmm`; differentiable.

    Args:
        adj: structure (num_dst, num_src).
        x: (num_src, width).
        value: (num_values,) or (num_values, heads).
        minimum: instead of the maximum.
        scale_dst: (num_dst,).
        scale_src: (num_src,).
        bias: (width,), in any floating dtype.

    Returns:
        (num_dst, width) in the dtype of ``x``.
    """
    dtype = x.dtype
    if scale_dst is not None or scale_src is not None or bias is not None:
        # 16-bit features: rounded once, at the end, and not after every factor.
        x = x.to(accumulation_dtype(dtype))
        value = None if value is None else value.to(x.dtype)
    if scale_src is not None:
        x = x * scale_src[:, None]
    out, _ = _spmm_extremum_op(x, value, adj.num_dst, adj.handle, False, minimum)
    if scale_dst is not None:
        out = out * scale_dst[:, None]
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def spmm_extremum(
    x: Tensor, value: Tensor | None, num_dst: int, adjacency: int, transpose: bool, minimum: bool
) -> tuple[Tensor, Tensor]:
    """The operator's kernel: results and the chosen entries' offsets in their rows, -1 for empty rows."""
    adj = structure(adjacency, transpose)
    x = unit_stride(x)
    width = x.size(1)
    out = x.new_empty(num_dst, width)
    arg = torch.empty(num_dst, width, dtype=torch.int32, device=x.device)
    if out.numel() == 0:
        return out, arg
    if value is not None:
        value = value.contiguous()
    index = device_index(x.device)
    partial = partial_arg = None
    if index >= 0 and adj.row_split.num_slots:
        partial = x.new_empty(adj.row_split.num_slots, width, dtype=accumulation_dtype(x.dtype))
        partial_arg = torch.empty(partial.shape, dtype=torch.int32, device=x.device)
    _C.spmm_extremum(
        used_csr(adj),
        DTYPE_CODE[x.dtype],
        width,
        x.data_ptr(),
        x.stride(0),
        address(value),
        0 if value is None else DTYPE_CODE[value.dtype],
        num_heads(value),
        minimum,
        out.data_ptr(),
        arg.data_ptr(),
        address(partial),
        address(partial_arg),
        index,
        queue(index),
    )
    return out, arg


class _SpmmExtremum(torch.autograd.Function):
    """The gradient goes to the entry that was chosen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor | None,
        num_dst: int,
        adjacency: int,
        transpose: bool,
        minimum: bool,
    ) -> tuple[Tensor, Tensor]:
        with below_autograd():
            out, arg = _spmm_extremum_op(x, value, num_dst, adjacency, transpose, minimum)
        ctx.mark_non_differentiable(arg)
        ctx.save_for_backward(arg, x, value)
        ctx.adjacency, ctx.transpose = adjacency, transpose
        ctx.keep_alive = keep_alive(adjacency)
        return out, arg

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        arg, x, value = ctx.saved_tensors
        grad_x, grad_value = _spmm_extremum_backward_op(grad, arg, x, value, ctx.adjacency, ctx.transpose)
        return grad_x, grad_value if value is not None else None, None, None, None, None


def _spmm_extremum_backward(
    grad: Tensor, arg: Tensor, x: Tensor, value: Tensor | None, adjacency: int, transpose: bool
) -> tuple[Tensor, Tensor]:
    adj = structure(adjacency, transpose)
    heads = num_heads(value)
    # Sums of 16-bit gradients are accumulated in float32, as in the forward pass.
    dtype = accumulation_dtype(x.dtype)
    grad_x = torch.zeros(x.shape, dtype=dtype, device=x.device)
    grad_value = torch.zeros(adj.num_values if value is not None else 0, heads, dtype=dtype, device=x.device)
    if adj.num_edges and x.size(1):
        entry = adj.rowptr[:-1, None] + arg.clamp(min=0)
        chosen = grad.to(dtype).masked_fill(arg < 0, 0)
        entry = torch.where(arg < 0, 0, entry)
        source = adj.col[entry].long()
        if value is not None:
            position = entry if adj.edge_id is None else adj.edge_id[entry].long()
            head = torch.arange(x.size(1), device=x.device) // (x.size(1) // heads)
            flat = position * heads + head
            weight = value.to(dtype).reshape(-1)[flat]
            # Of an empty row they are 0 times entry 0's numbers, which may be infinity.
            term = (chosen * x.to(dtype).gather(0, source)).masked_fill(arg < 0, 0)
            _scatter_add(grad_value.view(-1), flat.reshape(-1), term.reshape(-1))
            chosen = (chosen * weight).masked_fill(arg < 0, 0)
        feature = torch.arange(x.size(1), device=x.device)
        _scatter_add(grad_x.view(-1), (source * x.size(1) + feature).reshape(-1), chosen.reshape(-1))
    value_shape = grad_value.shape if value is None else value.shape
    value_dtype = dtype if value is None else value.dtype
    return grad_x.to(x.dtype), grad_value.to(value_dtype).reshape(value_shape)


def _scatter_add(out: Tensor, index: Tensor, source: Tensor) -> None:
    if torch.are_deterministic_algorithms_enabled():
        out.index_put_((index,), source, accumulate=True)  # sorts; scatter_add_ uses atomics
    else:
        out.scatter_add_(0, index, source)


def _spmm_extremum_fake(
    x: Tensor, value: Tensor | None, num_dst: int, adjacency: int, transpose: bool, minimum: bool
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(num_dst, x.size(1))
    return out, out.new_empty(out.shape, dtype=torch.int32)


def _spmm_extremum_backward_fake(
    grad: Tensor, arg: Tensor, x: Tensor, value: Tensor | None, adjacency: int, transpose: bool
) -> tuple[Tensor, Tensor]:
    if value is None:
        return x.new_empty(x.shape), x.new_empty(0, 1, dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), value.new_empty(value.shape)


for _key in ("CPU", "CUDA"):
    library.impl("spmm_extremum", spmm_extremum, _key)
    library.impl("spmm_extremum_backward", _spmm_extremum_backward, _key)
torch.library.register_fake("fastsparse::spmm_extremum", _spmm_extremum_fake, lib=library)
torch.library.register_fake("fastsparse::spmm_extremum_backward", _spmm_extremum_backward_fake, lib=library)
register_autograd("spmm_extremum", _SpmmExtremum)


def _differentiable_backward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The kernel is made of PyTorch's operators, which have gradients; only then are they recorded."""
    if torch.is_grad_enabled() and any(isinstance(it, Tensor) and it.requires_grad for it in arguments):
        return _spmm_extremum_backward(*arguments)
    with below_autograd():
        out: tuple[Tensor, Tensor] = _spmm_extremum_backward_op(*arguments)
    return out


library.impl("spmm_extremum_backward", _differentiable_backward, "Autograd")
