"""Launches of the messages that meet their edges' features, on both devices: padding, scratch, results.

On CUDA rows are padded with zeros to multiples of 16 bytes and raw features to multiples of 4; what that adds
to results is cut off.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import current_stream
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE, DTYPE_CODE
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.structure.adjacency import Adjacency

#: EdgeMessage in kernels/include/fastsparse/edge_messages.h.
RELU, GATE, GATE_AND_STATE = 0, 1, 2
#: Most raw features of an edge that kernels project: more are projected to rows once.
MOST_FEATURES = 32
#: Groups of rows whose parts of the maps' gradients are kept apart: enough of them to fill a large GPU.
_CUDA_GROUPS = 4096
#: Bytes before relu's signs. They hold 1 + eps and keep the signs aligned.
_SCALE_BYTES = 16
#: A structure without rows, for a pass over them that is not needed.
_NO_ROWS = _C.CsrStructure(
    rowptr=None, col=None, edge_id=None, edge_id_is_64bit=False, num_rows=0, num_cols=0, num_edges=0
)


def sign_bytes(width: int) -> tuple[int, int]:
    """Tiles of a width, and bytes of an edge's signs: one for every lane of a tile's group."""
    lanes = 1
    while lanes < 8 and lanes * 8 < width:
        lanes *= 2
    tiles = -(-width // (8 * lanes))
    return tiles, tiles * lanes


#: The same, remembered: for widths that are numbers, not symbols of a trace.
_sign_bytes = functools.cache(sign_bytes)


def kept_bytes(num_values: int, width: int) -> int:
    """Bytes that relu's forward pass keeps for the backward pass; `scale_of` and signs of rows that wide."""
    return _SCALE_BYTES + num_values * sign_bytes(width)[1]


def scale_of(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """1 + eps, (1,), of what relu's forward pass kept."""
    return kept[: dtype.itemsize].view(dtype)


def padded_width(x: Tensor) -> int:
    """Width of the rows that kernels read."""
    return x.size(1) + (-x.size(1) % (16 // x.itemsize) if x.is_cuda else 0)


def rows(x: Tensor) -> Tensor:
    """(n, width) as kernels read it: unit stride; on CUDA rows of whole, aligned 16 bytes."""
    if not x.is_cuda:
        return x if x.stride(1) == 1 else unit_stride(x)
    step = 16 // x.itemsize
    if x.size(1) % step:
        return F.pad(x, (0, -x.size(1) % step))
    row_stride, column_stride = x.stride()
    aligned = column_stride == 1 and row_stride % step == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _cut(x: Tensor, width: int) -> Tensor:
    return x if x.shape[1] == width else x[:, :width].contiguous()


def _edge_rows(adj: Adjacency, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Space for numbers of every value; zeros where not every value has an entry."""
    every = adj.num_values == adj.col.numel() and 0 not in shape
    return (like.new_empty if every else like.new_zeros)(shape, dtype=dtype)


class Operands(NamedTuple):
    """What the kernels read, padded."""

    message: int
    k: Tensor | None
    q: Tensor
    v: Tensor | None
    edge: Tensor | None
    #: For raw features: rows of the transposed map, of the values' map with gates, then perhaps the bias.
    maps: Tensor | None = None

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
        added: Tensor | None = None,
    ) -> Operands:
        """From tensors as the caller gave them; with `weight` the edges' features are raw.

        Args:
            message: RELU, GATE or GATE_AND_STATE.
            k: rows of the destinations; gates only.
            q: rows of the sources.
            v: likewise; gates only.
            edge: features of the edges, raw or rows.
            weight: map of raw features.
            of_value: likewise, for the values; gates only.
            bias: of the map; relu only.
            added: what `weight` is the sum with.
        """
        given, is_cuda = q.shape[1], q.is_cuda
        if edge is not None and weight is not None and is_cuda and edge.shape[1] % 4:
            edge = F.pad(edge, (0, -edge.shape[1] % 4))
        if is_cuda or q.stride(1) != 1:
            q = rows(q)
        if k is not None and (is_cuda or k.stride(1) != 1):
            k = rows(k)
        if v is not None and (is_cuda or v.stride(1) != 1):
            v = rows(v)
        if edge is not None and (is_cuda or edge.stride(1) != 1):
            edge = rows(edge)
        if edge is None or weight is None:
            return cls(message, k, q, v, edge)
        maps = _laid_out(given, q, edge, weight, of_value, bias, added)
        return cls(message, k, q, v, edge, maps)

    def views(self) -> _C.EdgeMessageInput:
        """The same as addresses and strides."""
        message, k, q, v, edge, maps = self
        edge_width, weight, of_value, bias = 0, 0, 0, 0
        if edge is not None and maps is not None:
            edge_width, weight = edge.shape[1], maps.data_ptr()
            after = weight + edge_width * q.shape[1] * maps.itemsize
            if message != RELU:
                of_value = after
            elif maps.shape[0] > edge_width:
                bias = after
        return _C.EdgeMessageInput(
            message=message,
            k=k,
            q=q,
            v=v,
            edge=edge,
            edge_width=edge_width,
            weight=weight,
            of_value=of_value,
            bias=bias,
        )


def _laid_out(
    given: int,
    q: Tensor,
    edge: Tensor,
    weight: Tensor,
    of_value: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None,
) -> Tensor:
    """The maps of raw features transposed, padded and in the accumulation dtype, by one launch."""
    accumulated = ACCUMULATION_DTYPE[q.dtype]
    is_wide = weight.dtype == torch.float64
    dtype = weight.dtype if is_wide == (accumulated == torch.float64) else accumulated
    given_maps: list[Tensor | None] = []
    for each in (weight, of_value, added):
        given_maps.append(each)
        if each is not None and each.dtype != dtype:
            given_maps[-1] = each = each.to(dtype)
        if each is not None and each.stride(1) != 1:
            given_maps[-1] = unit_stride(each)
    if bias is not None and not (bias.dtype == dtype and bias.stride(0) == 1):
        bias = bias.to(dtype).contiguous()
    width, edge_width, index = q.shape[1], edge.shape[1], q.get_device()
    count = edge_width * (1 if of_value is None else 2) + (bias is not None)
    maps = q.new_empty(count, width, dtype=accumulated)
    _C.lay_out_edge_maps(
        weight=given_maps[0],
        added=given_maps[2],
        of_value=given_maps[1],
        bias=bias,
        given_width=given,
        out=maps,
        edge_width=edge_width,
        device=index,
        queue=torch.get_num_threads() if index < 0 else current_stream(index),
    )
    return maps


def forward(
    adj: Adjacency,
    operands: Operands,
    width: int,
    side_wanted: bool,
    root: Tensor | None = None,
    eps: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Sums of messages, and what the message brings besides (None where it does not).

    Args:
        adj: structure.
        operands: what the kernels read.
        width: of the results.
        side_wanted: whether relu's signs and 1 + eps, or the sums of the gates' slopes, are kept for the
            backward pass.
        root: (num_dst, width) rows that are added to the sums of relu or gates, as kernels read rows.
        eps: one number: root is added 1 + eps times; relu only.

    Returns:
        (num_dst, width) sums; the gates' (num_dst, width); the state (num_values, width); `kept_bytes` of
        relu.
    """
    q, message = operands.q, operands.message
    padded = q.shape[1]
    out = q.new_empty(adj.num_dst, padded)
    side = state = kept = partial = partial_side = None
    sign_width = at = 0
    if message == RELU:
        if side_wanted:
            sign_width = _sign_bytes(padded)[1]
            size = _SCALE_BYTES + adj.num_values * sign_width
            kept = _edge_rows(adj, size, like=q, dtype=torch.uint8)
            at = kept.data_ptr()
    elif message == GATE_AND_STATE:
        side, state = torch.empty_like(out), _edge_rows(adj, adj.num_values, padded, like=q)
    elif side_wanted:
        side = torch.empty_like(out)
    index = q.get_device()
    if index >= 0:
        partial, partial_side = _partial(adj, q, side is not None)
    _C.edge_messages(
        structure=adj.plans.get("csr") or used_csr(adj),
        input=operands.views(),
        out=out,
        side=side,
        state=state,
        positive=at and at + _SCALE_BYTES,
        sign_bytes=sign_width,
        root=root,
        eps=eps,
        scale=None if eps is None else at,
        partial=partial,
        partial_side=partial_side,
        device=index,
        queue=torch.get_num_threads() if index < 0 else current_stream(index),
    )
    if padded == width:
        return out, side, state, kept
    return (
        _cut(out, width),
        None if side is None else _cut(side, width),
        None if state is None else _cut(state, width),
        kept,
    )


def _partial(adj: Adjacency, like: Tensor, both: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room on CUDA for the sums of slices of rows that are cut, once or twice; None where no row is."""
    slots = adj.row_split.num_slots
    if not slots:
        return None, None
    dtype = ACCUMULATION_DTYPE[like.dtype]
    partial = like.new_empty(slots, like.size(1), dtype=dtype)
    return partial, torch.empty_like(partial) if both else partial


class Gradients(NamedTuple):
    """Those of the sources' rows, of edges' rows or raw features, and of the maps; None: not wanted."""

    q: Tensor | None
    v: Tensor | None
    edge: Tensor | None
    weight: Tensor | None
    of_value: Tensor | None
    bias: Tensor | None


def backward(
    adj: Adjacency,
    operands: Operands,
    grad: Tensor,
    edge_width: int,
    *,
    grad_side: Tensor | None = None,
    state: Tensor | None = None,
    grad_state: Tensor | None = None,
    kept: Tensor | None = None,
    has_scale: bool = False,
    source_wanted: bool = True,
    edge_wanted: bool,
    weight_wanted: bool = False,
    bias_wanted: bool = False,
    map_dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of `forward`'s operands but k.

    Args:
        adj: structure.
        operands: as of the forward pass, but relu's q are the rows of ``grad``.
        grad: of the sums, (num_dst, width).
        edge_width: raw features of an edge as given.
        grad_side: of the gates' sums, with state.
        state: of the forward pass.
        grad_state: None: 0.
        kept: of the forward pass; relu only.
        has_scale: whether there was a root.
        source_wanted: whether the sources' rows want a gradient; gates always give it.
        edge_wanted: whether edges' rows or raw features want a gradient.
        weight_wanted: whether the maps do.
        bias_wanted: whether relu's bias does.
        map_dtype: of the gradients of maps and bias; None: the accumulation dtype.
    """
    message, dtype = operands.message, ACCUMULATION_DTYPE[grad.dtype]
    both, transposed = message != RELU, _NO_ROWS
    width, padded, index = grad.shape[1], operands.q.shape[1], grad.get_device()
    is_cuda, raw = index >= 0, operands.maps is not None
    map_dtype = dtype if map_dtype is None else map_dtype
    grad = rows(grad) if both else operands.q
    if message == GATE_AND_STATE:
        assert grad_side is not None
        assert state is not None
        grad_side, state = rows(grad_side), rows(state)
        grad_state = None if grad_state is None else rows(grad_state)
    else:
        grad_side = state = grad_state = None
    first: tuple[Any, int] | None = adj.plans.get("first rows")
    if first is None:
        first = (adj.csr_structure, adj.num_dst)
        if is_cuda:
            first = (adj.first_csr_structure, adj.first_row_split.place()[1])
        adj.plans["first rows"] = first
    first_structure, count = first
    grad_q = grad_v = grad_edge = grad_weight = grad_of_value = grad_bias = None
    of_features = groups = size = tiles = slots = 0
    features_read = 0 if operands.edge is None or not raw else operands.edge.shape[1]
    if source_wanted or edge_wanted:
        grad_q = grad.new_empty(adj.num_src, padded)
        grad_v = torch.empty_like(grad_q) if both else None
        columns = adj.t()
        transposed = columns.plans.get("csr") or used_csr(columns)
        slots = columns.row_split.num_slots * padded if is_cuda else 0
    if edge_wanted and raw:
        grad_edge = _edge_rows(adj, adj.num_values, edge_width, like=grad)
        tiles = _sign_bytes(padded)[0] if is_cuda else 1
        if tiles != 1 or features_read != edge_width or grad.dtype != dtype:
            of_features = tiles * adj.num_values * features_read
    elif edge_wanted:
        grad_edge = _edge_rows(adj, adj.num_values, padded, like=grad)
    if raw and (weight_wanted or bias_wanted):
        if is_cuda:
            groups = min(max(count // 4, 1), _CUDA_GROUPS)
            size = groups * (features_read + (not both)) * padded
        if weight_wanted:
            grad_weight = grad.new_empty(width, edge_width, dtype=map_dtype)
            grad_of_value = torch.empty_like(grad_weight) if both else None
        if bias_wanted:
            grad_bias = grad.new_empty(width, dtype=map_dtype)
    lengths = (of_features, size, size * both, slots, slots * both)
    _kept, (features, of_weight, of_value, partial_q, partial_v) = _workspace(adj, grad, dtype, lengths)
    of_raw, of_rows = (grad_edge, None) if raw else (None, grad_edge)
    _C.edge_messages_backward(
        structure=first_structure,
        transposed=transposed,
        input=operands.views(),
        grad=grad,
        grad_side=grad_side,
        state=state,
        grad_state=grad_state,
        positive=None if kept is None else kept.data_ptr() + _SCALE_BYTES,
        sign_bytes=0 if kept is None else _sign_bytes(padded)[1],
        scale=kept if has_scale else None,
        num_values=adj.num_values,
        grad_q=grad_q,
        grad_v=grad_v,
        grad_edge=of_rows,
        grad_features=features or of_raw,
        grad_weight=of_weight,
        grad_of_value=of_value,
        groups=groups,
        maps=_C.EdgeMapGradients(
            weight=grad_weight,
            of_value=grad_of_value,
            bias=grad_bias,
            features=of_raw,
            width=width,
            edge_width=edge_width,
            dtype=DTYPE_CODE[map_dtype],
        ),
        partial_q=partial_q,
        partial_v=partial_v,
        device=index,
        queue=torch.get_num_threads() if index < 0 else current_stream(index),
    )
    if padded != width:
        grad_edge = grad_edge if grad_edge is None or raw else _cut(grad_edge, width)
        grad_q, grad_v = (None if each is None else _cut(each, width) for each in (grad_q, grad_v))
    return Gradients(grad_q, grad_v, grad_edge, grad_weight, grad_of_value, grad_bias)


def _workspace(
    adj: Adjacency, like: Tensor, dtype: torch.dtype, lengths: tuple[int, ...]
) -> tuple[Tensor | None, list[int]]:
    """Scratch of one backward pass in one allocation, and the address of every array, 0 of empty ones."""
    total = sum(lengths)
    if total == 0:
        return None, [0] * len(lengths)
    total += 4 * len(lengths)  # for every array begins at a multiple of 16 bytes
    # Of values without entries parts are read, too.
    workspace = _edge_rows(adj, total, like=like, dtype=dtype)
    at, starts = workspace.data_ptr(), []
    for length in lengths:
        starts.append(at if length else 0)
        at += (length + -length % 4) * workspace.itemsize
    return workspace, starts
