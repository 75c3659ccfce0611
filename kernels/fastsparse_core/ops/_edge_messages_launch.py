"""Launches of the messages that meet their edges' features, on both devices: padding, scratch, results.

On CUDA rows are padded with zeros to multiples of 16 bytes and raw features to multiples of 4; what that adds
to results is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.ops._common import (
    DTYPE_CODE,
    accumulation_dtype,
    address,
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


def padded_width(x: Tensor) -> int:
    """Width of the rows that kernels read."""
    return x.size(1) + (-x.size(1) % (16 // x.itemsize) if x.is_cuda else 0)


def rows(x: Tensor) -> Tensor:
    """(n, width) as kernels read it: unit stride; on CUDA rows of whole, aligned 16 bytes."""
    step = 16 // x.itemsize if x.is_cuda else 1
    if x.size(1) % step:
        return F.pad(x, (0, -x.size(1) % step))
    x = unit_stride(x)
    aligned = step == 1 or (x.stride(0) % step == 0 and x.data_ptr() % 16 == 0)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _cut(x: Tensor, width: int) -> Tensor:
    return x if x.size(1) == width else x[:, :width].contiguous()


def _edge_rows(adj: Adjacency, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for numbers of every value; zeros where not every value has an entry."""
    every = adj.num_values == adj.num_edges
    return (torch.empty if every else torch.zeros)(shape, dtype=dtype or like.dtype, device=like.device)


@dataclass(frozen=True)
class Operands:
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
        dtype, given = accumulation_dtype(q.dtype), q.size(1)
        k, q, v = None if k is None else rows(k), rows(q), None if v is None else rows(v)
        if edge is not None and weight is not None:
            missing = -edge.size(1) % 4 if edge.is_cuda else 0
            edge = rows(F.pad(edge, (0, missing)) if missing else edge)
        elif edge is not None:
            edge = rows(edge)

        def padded(map: Tensor | None) -> Tensor | None:
            if map is None or edge is None:
                return None
            map, behind, below = map.to(dtype).t(), q.size(1) - given, edge.size(1) - map.size(1)
            return (F.pad(map, (0, behind, 0, below)) if behind or below else map).contiguous()

        if bias is not None:
            bias = rows(bias.to(dtype)[None])  # of a multiple of 16 bytes; 16-bit rows may be a little wider
            missing = q.size(1) - bias.size(1)
            bias = F.pad(bias, (0, missing)) if missing else bias
        return cls(message, k, q, v, edge, padded(weight), padded(of_value), bias)

    @property
    def edge_width(self) -> int:
        """Raw features of an edge, 0 where there are none."""
        return 0 if self.edge is None or self.weight is None else self.edge.size(1)

    def views(self) -> _C.EdgeMessageInput:
        """The same as addresses and strides."""

        def place(x: Tensor | None) -> tuple[int, int]:
            return (0, 0) if x is None else (x.data_ptr(), x.stride(0))

        return _C.EdgeMessageInput(
            self.message,
            DTYPE_CODE[self.q.dtype],
            self.q.size(1),
            self.edge_width,
            *place(self.k),
            *place(self.q),
            *place(self.v),
            *place(self.edge),
            address(self.weight),
            address(self.of_value),
            address(self.bias),
        )


def forward(
    adj: Adjacency, operands: Operands, width: int, side_wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of messages, and what the message brings besides (empty where it does not).

    Args:
        adj: structure.
        operands: what the kernels read.
        width: of the results.
        side_wanted: whether relu's signs, or the sums of the gates' slopes, are kept for the backward pass.

    Returns:
        (num_dst, width) sums; the gates' (num_dst, width); the state (num_values, width); signs.
    """
    q, message = operands.q, operands.message
    padded = q.size(1)
    nothing = q.new_empty(0)
    out, side, state, positive = q.new_empty(adj.num_dst, padded), nothing, nothing, nothing
    if message == RELU and side_wanted:
        positive = _edge_rows(adj, adj.num_values, sign_bytes(padded)[1], like=q, dtype=torch.uint8)
    elif message == GATE_AND_STATE or (message == GATE and side_wanted):
        side = torch.empty_like(out)
    if message == GATE_AND_STATE:
        state = _edge_rows(adj, adj.num_values, padded, like=q)
    index, slots = device_index(q.device), 0
    if q.is_cuda:
        slots = adj.row_split.num_slots
    partial = q.new_empty(2 if side.numel() else 1, slots, padded, dtype=accumulation_dtype(q.dtype))
    _C.edge_messages(
        adj.csr_structure,
        operands.views(),
        out.data_ptr(),
        address(side),
        address(state),
        address(positive),
        0 if positive is nothing else positive.size(1),
        address(partial[0]),
        address(partial[-1]),
        index,
        queue(index),
    )
    return (
        _cut(out, width),
        side if side is nothing else _cut(side, width),
        state if state is nothing else _cut(state, width),
        positive,
    )


@dataclass(frozen=True)
class Gradients:
    """Those of the sources' rows, of edges' rows or raw features, and of the two maps; empty: not wanted."""

    q: Tensor
    v: Tensor
    edge: Tensor
    weight: Tensor
    of_value: Tensor


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
    q, message, dtype = operands.q, operands.message, accumulation_dtype(grad.dtype)
    padded = q.size(1)
    grad = rows(grad)
    side, state, of_state = (None if x is None else rows(x) for x in (grad_side, state, grad_state))
    nothing = grad.new_empty(0)
    grad_q = grad.new_empty(adj.num_src, padded)
    grad_v = torch.empty_like(grad_q) if message != RELU else nothing
    grad_edge = features = grad_weight = grad_of_value = None
    raw = operands.weight is not None
    if edge_wanted and raw:
        tiles = sign_bytes(padded)[0] if q.is_cuda else 1
        features = _edge_rows(adj, tiles, adj.num_values, operands.edge_width, like=grad, dtype=dtype)
    elif edge_wanted:
        grad_edge = _edge_rows(adj, adj.num_values, padded, like=grad)
    groups, transposed, index, slots = 0, adj.t(), device_index(q.device), 0
    if q.is_cuda:
        slots = transposed.row_split.num_slots
    if weight_wanted and raw:
        if q.is_cuda and not torch.cuda.is_current_stream_capturing():
            adj.sort_slices()  # the maps' gradients are summed in their order, which must not change later
        count = adj.row_split.slices.size(0) if q.is_cuda else adj.num_dst
        groups = min(max(count // 4, 1), _CUDA_GROUPS if q.is_cuda else _CPU_GROUPS)
        grad_weight = grad.new_empty(groups, operands.edge_width, padded, dtype=dtype)
        grad_of_value = None if message == RELU else torch.empty_like(grad_weight)
    partial = grad.new_empty(2 if grad_v is not nothing else 1, slots, padded, dtype=dtype)

    def place(x: Tensor | None) -> tuple[int, int]:
        return (0, 0) if x is None else (x.data_ptr(), x.stride(0))

    _C.edge_messages_backward(
        adj.csr_structure,
        transposed.csr_structure,
        operands.views(),
        *place(grad),
        *place(side),
        *place(state),
        *place(of_state),
        address(positive),
        0 if positive is None else positive.size(1),
        adj.num_values,
        grad_q.data_ptr(),
        address(grad_v),
        address(grad_edge),
        address(features),
        address(grad_weight),
        address(grad_of_value),
        groups,
        address(partial[0]),
        address(partial[-1]),
        index,
        queue(index),
    )

    def of_map(parts: Tensor | None) -> Tensor:
        return nothing if parts is None else sum_of_rows(parts, dtype)[:edge_width, :width].t().contiguous()

    if features is not None:
        total = features[0] if features.size(0) == 1 else features.sum(0)
        grad_edge = cast(_cut(total, edge_width), grad.dtype)
    elif grad_edge is not None:
        grad_edge = _cut(grad_edge, width)
    return Gradients(
        _cut(grad_q, width),
        grad_v if grad_v is nothing else _cut(grad_v, width),
        nothing if grad_edge is None else grad_edge,
        of_map(grad_weight),
        of_map(grad_of_value),
    )
