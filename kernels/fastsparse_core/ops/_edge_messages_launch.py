"""Launches of the messages that meet their edges' features, on both devices: padding, scratch, results.

On CUDA rows are padded with zeros to multiples of 16 bytes and raw features to multiples of 4; what that adds
to results is cut off.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    accumulation_dtype,
    cast,
    sum_of_rows,
    unit_stride,
)
from fastsparse_core.structure.adjacency import Adjacency

#: EdgeMessage in kernels/include/fastsparse/edge_messages.h.
RELU, GATE, GATE_AND_STATE = 0, 1, 2
#: Most raw features of an edge that kernels project: more are projected to rows once.
MOST_FEATURES = 32
#: Groups of rows whose parts of the maps' gradients are kept apart: enough of them to fill a large GPU.
_CUDA_GROUPS, _CPU_GROUPS = 4096, 64


def sign_bytes(width: int) -> tuple[int, int]:
    """Tiles of a width, and bytes of an edge's signs: one for every lane of a tile's group."""
    lanes = 1
    while lanes < 8 and lanes * 8 < width:
        lanes *= 2
    tiles = -(-width // (8 * lanes))
    return tiles, tiles * lanes


#: The same, remembered: for widths that are numbers, not symbols of a trace.
_sign_bytes = functools.cache(sign_bytes)


def padded_width(x: Tensor) -> int:
    """Width of the rows that kernels read."""
    return x.size(1) + (-x.size(1) % (16 // x.itemsize) if x.is_cuda else 0)


def rows(x: Tensor) -> Tensor:
    """(n, width) as kernels read it: unit stride; on CUDA rows of whole, aligned 16 bytes."""
    if not x.is_cuda:
        return unit_stride(x)
    step = 16 // x.itemsize
    if x.size(1) % step:
        return F.pad(x, (0, -x.size(1) % step))
    x = unit_stride(x)
    aligned = x.stride(0) % step == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _cut(x: Tensor, width: int) -> Tensor:
    return x if x.shape[1] == width else x[:, :width].contiguous()


def _transposed(map: Tensor, dtype: torch.dtype, right: int, below: int) -> Tensor:
    map = cast(map, dtype).t()
    return (F.pad(map, (0, right, 0, below)) if right or below else map).contiguous()


def _one_row(bias: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """A row of the padded width."""
    bias, missing = cast(bias, dtype), width - bias.shape[0]
    if missing:
        return F.pad(bias, (0, missing))
    is_aligned = bias.data_ptr() % 16 == 0 or not bias.is_cuda
    return bias if is_aligned and bias.is_contiguous() else bias.clone(memory_format=torch.contiguous_format)


def _place(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def _edge_rows(adj: Adjacency, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for numbers of every value; zeros where not every value has an entry."""
    every = adj.num_values == adj.num_edges
    return (torch.empty if every else torch.zeros)(shape, dtype=dtype or like.dtype, device=like.device)


class Operands(NamedTuple):
    """What the kernels read, padded; `weight` and `of_value` transposed in the accumulation dtype."""

    message: int
    k: Tensor | None
    q: Tensor
    v: Tensor | None
    edge: Tensor | None
    weight: Tensor | None = None
    of_value: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        message: int,
        k: Tensor | None,
        q: Tensor,
        v: Tensor | None,
        edge: Tensor | None,
        weight: Tensor | None = None,
        of_value: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Operands:
        """From tensors as the caller gave them; with `weight` the edges' features are raw."""
        given = q.shape[1]
        k, q, v = None if k is None else rows(k), rows(q), None if v is None else rows(v)
        if edge is None or weight is None:
            return cls(message, k, q, v, None if edge is None else rows(edge))
        dtype = accumulation_dtype(q.dtype)
        missing = -edge.shape[1] % 4 if edge.is_cuda else 0
        edge = rows(F.pad(edge, (0, missing)) if missing else edge)
        right, below = q.shape[1] - given, edge.shape[1] - weight.shape[1]
        weight = _transposed(weight, dtype, right, below)
        if of_value is not None:
            of_value = _transposed(of_value, dtype, right, below)
        if bias is not None:
            bias = _one_row(bias, dtype, q.shape[1])
        return cls(message, k, q, v, edge, weight, of_value, bias)

    @property
    def edge_width(self) -> int:
        """Raw features of an edge, 0 where there are none."""
        return 0 if self.edge is None or self.weight is None else self.edge.size(1)

    def views(self) -> _C.EdgeMessageInput:
        """The same as addresses and strides."""
        # Without a call for each of them: a step of a small model takes as long as the host needs for it.
        message, k, q, v, edge, weight, of_value, bias = self
        return _C.EdgeMessageInput(
            message,
            DTYPE_CODE[q.dtype],
            q.shape[1],
            0 if edge is None or weight is None else edge.shape[1],
            0 if k is None else k.data_ptr(),
            0 if k is None else k.stride(0),
            q.data_ptr(),
            q.stride(0),
            0 if v is None else v.data_ptr(),
            0 if v is None else v.stride(0),
            0 if edge is None else edge.data_ptr(),
            0 if edge is None else edge.stride(0),
            0 if weight is None else weight.data_ptr(),
            0 if of_value is None else of_value.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )


def forward(
    adj: Adjacency, operands: Operands, width: int, side_wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Sums of messages, and what the message brings besides (None where it does not).

    Args:
        adj: structure.
        operands: what the kernels read.
        width: of the results.
        side_wanted: whether relu's signs, or the sums of the gates' slopes, are kept for the backward pass.

    Returns:
        (num_dst, width) sums; the gates' (num_dst, width); the state (num_values, width); signs.
    """
    q, message = operands.q, operands.message
    padded = q.shape[1]
    out = q.new_empty(adj.num_dst, padded)
    side = state = positive = partial = partial_side = None
    sign_width = 0
    if message == RELU:
        if side_wanted:
            sign_width = _sign_bytes(padded)[1]
            positive = _edge_rows(adj, adj.num_values, sign_width, like=q, dtype=torch.uint8)
    elif message == GATE_AND_STATE:
        side, state = torch.empty_like(out), _edge_rows(adj, adj.num_values, padded, like=q)
    elif side_wanted:
        side = torch.empty_like(out)
    index = -1
    if q.is_cuda:
        index = device_index(q.device)
        partial, partial_side = _partial(adj, q, side is not None)
    _C.edge_messages(
        adj.csr_structure,
        operands.views(),
        out.data_ptr(),
        0 if side is None else side.data_ptr(),
        0 if state is None else state.data_ptr(),
        0 if positive is None else positive.data_ptr(),
        sign_width,
        0 if partial is None else partial.data_ptr(),
        0 if partial_side is None else partial_side.data_ptr(),
        index,
        queue(index),
    )
    if padded == width:
        return out, side, state, positive
    return (
        _cut(out, width),
        None if side is None else _cut(side, width),
        None if state is None else _cut(state, width),
        positive,
    )


def _partial(adj: Adjacency, like: Tensor, both: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room on CUDA for the sums of slices of rows that are cut, once or twice; None where no row is."""
    slots = adj.row_split.num_slots
    if not slots:
        return None, None
    dtype = accumulation_dtype(like.dtype)
    partial = like.new_empty(slots, like.size(1), dtype=dtype)
    return partial, torch.empty_like(partial) if both else partial


class Gradients(NamedTuple):
    """Those of the sources' rows, of edges' rows or raw features, and of the two maps; None: not wanted."""

    q: Tensor
    v: Tensor | None
    edge: Tensor | None
    weight: Tensor | None
    of_value: Tensor | None


def backward(
    adj: Adjacency,
    operands: Operands,
    grad: Tensor,
    width: int,
    edge_width: int,
    *,
    grad_side: Tensor | None = None,
    state: Tensor | None = None,
    grad_state: Tensor | None = None,
    positive: Tensor | None = None,
    edge_wanted: bool,
    weight_wanted: bool = False,
) -> Gradients:
    """Gradients of `forward`'s operands but k.

    Args:
        adj: structure.
        operands: as of the forward pass; of relu's q only the width is looked at.
        grad: of the sums, (num_dst, width).
        width: of the results.
        edge_width: raw features of an edge as given.
        grad_side: of the gates' sums, with state.
        state: of the forward pass.
        grad_state: None: 0.
        positive: signs of the forward pass.
        edge_wanted: whether edges' rows or raw features want a gradient.
        weight_wanted: whether the maps do.
    """
    message, dtype = operands.message, accumulation_dtype(grad.dtype)
    padded, transposed, index = operands.q.shape[1], adj.t(), -1
    is_cuda, raw = grad.is_cuda, operands.weight is not None
    grad = rows(grad)
    if message == GATE_AND_STATE:
        grad_side, state, grad_state = (
            None if x is None else rows(x) for x in (grad_side, state, grad_state)
        )
    grad_q = grad.new_empty(adj.num_src, padded)
    grad_v = torch.empty_like(grad_q) if message != RELU else None
    grad_edge = features = grad_weight = grad_of_value = partial_q = partial_v = None
    if edge_wanted and raw:
        tiles = _sign_bytes(padded)[0] if is_cuda else 1
        features = _edge_rows(adj, tiles, adj.num_values, operands.edge_width, like=grad, dtype=dtype)
    elif edge_wanted:
        grad_edge = _edge_rows(adj, adj.num_values, padded, like=grad)
    groups = 0
    if weight_wanted and raw:
        if is_cuda and not torch.cuda.is_current_stream_capturing():
            adj.sort_slices()  # the maps' gradients are summed in their order, which must not change later
        count = adj.row_split.slices.shape[0] if is_cuda else adj.num_dst
        groups = min(max(count // 4, 1), _CUDA_GROUPS if is_cuda else _CPU_GROUPS)
        grad_weight = grad.new_empty(groups, operands.edge_width, padded, dtype=dtype)
        grad_of_value = None if message == RELU else torch.empty_like(grad_weight)
    if is_cuda:
        index = device_index(grad.device)
        partial_q, partial_v = _partial(transposed, grad, grad_v is not None)
    _C.edge_messages_backward(
        adj.csr_structure,
        transposed.csr_structure,
        operands.views(),
        grad.data_ptr(),
        grad.stride(0),
        *_place(grad_side),
        *_place(state),
        *_place(grad_state),
        0 if positive is None else positive.data_ptr(),
        0 if positive is None else positive.shape[1],
        adj.num_values,
        grad_q.data_ptr(),
        0 if grad_v is None else grad_v.data_ptr(),
        0 if grad_edge is None else grad_edge.data_ptr(),
        0 if features is None else features.data_ptr(),
        0 if grad_weight is None else grad_weight.data_ptr(),
        0 if grad_of_value is None else grad_of_value.data_ptr(),
        groups,
        0 if partial_q is None else partial_q.data_ptr(),
        0 if partial_v is None else partial_v.data_ptr(),
        index,
        queue(index),
    )

    def of_map(parts: Tensor) -> Tensor:
        total = sum_of_rows(parts, dtype)
        if total.shape != (edge_width, width):
            total = total[:edge_width, :width]
        return total.t()

    if features is not None:
        total = features[0] if features.shape[0] == 1 else features.sum(0)
        grad_edge = cast(_cut(total, edge_width), grad.dtype)
    elif grad_edge is not None:
        grad_edge = _cut(grad_edge, width)
    return Gradients(
        _cut(grad_q, width),
        None if grad_v is None else _cut(grad_v, width),
        grad_edge,
        None if grad_weight is None else of_map(grad_weight),
        None if grad_of_value is None else of_map(grad_of_value),
    )
