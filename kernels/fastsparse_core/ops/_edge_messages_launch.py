"""Launches the kernels of messages that depend on edge features: padding, scratch memory, results.

On CUDA, rows are padded with zeros to multiples of 16 bytes, and raw features to multiples of 4. Results are
cut back to the original width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import current_stream
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE
from fastsparse_core.ops._facts import used_csr
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.structure.adjacency import Adjacency

#: Values of EdgeMessage in kernels/include/fastsparse/edge_messages.h.
RELU, GATE, GATE_AND_STATE = 0, 1, 2
#: Largest number of raw edge features that the kernels project.
MOST_FEATURES = 32
#: Largest number of row groups with separate partial sums of the maps' gradients: enough to fill a large GPU.
_CUDA_GROUPS = 4096
#: Number of bytes before relu's signs. These bytes store 1 + eps; 16 bytes keep the signs aligned.
_SCALE_BYTES = 16
#: Addresses of the partial sums of a backward pass that has no partial sums.
_NO_PARTS = [0] * 5
#: A structure without rows, to skip a pass that is not needed.
_NO_ROWS = _C.CsrStructure(
    rowptr=None, col=None, edge_id=None, edge_id_is_64bit=False, num_rows=0, num_cols=0, num_edges=0
)


def sign_bytes(width: int) -> tuple[int, int]:
    """Number of tiles of a width, and bytes of an edge's signs: one byte for every lane of every tile."""
    lanes = 1
    while lanes < 8 and lanes * 8 < width:
        lanes *= 2
    tiles = -(-width // (8 * lanes))
    return tiles, tiles * lanes


#: `sign_bytes` with a cache, for widths that are numbers and not symbols of a trace.
_sign_bytes = functools.cache(sign_bytes)


def kept_bytes(num_values: int, width: int) -> int:
    """Number of bytes that relu's forward pass stores: 1 + eps, and the signs of rows of this width."""
    return _SCALE_BYTES + num_values * sign_bytes(width)[1]


def scale_of(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads 1 + eps, shape (1,), from the start of the bytes that the forward pass of relu stored."""
    return kept[: dtype.itemsize].view(dtype)


def padded_width(x: Tensor) -> int:
    """Width of the rows after padding."""
    return x.size(1) + (-x.size(1) % (16 // x.itemsize) if x.is_cuda else 0)


def rows(x: Tensor) -> Tensor:
    """A matrix with unit column stride, as kernels need it; on CUDA also padded and aligned to 16 bytes."""
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
    """Memory with one row per edge value; zeros if the kernel does not write every row."""
    every = adj.num_values == adj.col.numel() and 0 not in shape
    return (like.new_empty if every else like.new_zeros)(shape, dtype=dtype)


class Operands(NamedTuple):
    """The padded operands of the kernels."""

    message: int
    k: Tensor | None
    q: Tensor
    v: Tensor | None
    edge: Tensor | None
    #: For raw features: the rows of the transposed map, then the rows of the transposed map of the values
    #: (gates) or the bias (relu).
    maps: Tensor | None = None
    #: The map, a matrix that is added to the map, the values' map and the bias. The next launch writes them
    #: to `maps`.
    given: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] = (None,) * 4

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
        """Pads the caller's tensors.

        Args:
            message: RELU, GATE or GATE_AND_STATE.
            k: rows of the destinations; gates only.
            q: rows of the sources.
            v: values of the sources; gates only.
            edge: rows per edge; with `weight`, raw features.
            weight: map of raw features.
            of_value: map of raw features to the values; gates only.
            bias: bias of the map; relu only.
            added: a matrix that is added to `weight`.
        """
        is_cuda = q.is_cuda
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
        dtype = accumulated = ACCUMULATION_DTYPE[q.dtype]
        if (weight.dtype == torch.float64) == (accumulated == torch.float64):
            dtype = weight.dtype
        if not (weight.dtype is dtype and weight.stride(1) == 1):
            weight = unit_stride(weight.to(dtype))
        if bias is not None and not (bias.dtype is dtype and bias.stride(0) == 1):
            bias = bias.to(dtype).contiguous()
        if added is not None:
            added = unit_stride(added.to(dtype))
        if of_value is not None:
            of_value = unit_stride(of_value.to(dtype))
        count = edge.shape[1] * (1 if of_value is None else 2) + (bias is not None)
        maps = q.new_empty(count, q.shape[1], dtype=accumulated)
        return cls(message, k, q, v, edge, maps, (weight, added, of_value, bias))


def forward(
    adj: Adjacency,
    operands: Operands,
    width: int,
    side_wanted: bool,
    root: Tensor | None = None,
    eps: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Sums of messages, and the other results of the kernel, which are None if the message has none.

    Args:
        adj: structure.
        operands: operands of the kernels.
        width: width of the results.
        side_wanted: whether relu's signs and 1 + eps, or the sums of the gates' slopes, are kept for the
            backward pass.
        root: (num_dst, width) rows, in the form of :func:`rows`, that are added to the sums of relu or gates.
        eps: one number: root is multiplied by 1 + eps; relu only.

    Returns:
        Sums (num_dst, width); sums of gates, or of their slopes, (num_dst, width); the state
        (num_values, width); the bytes that relu stores (`kept_bytes`).
    """
    message, k, q, v, edge, maps, (weight, added, of_value, bias) = operands
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
        adj.plans.get("csr") or used_csr(adj),
        message,
        k,
        q,
        v,
        edge,
        maps,
        weight,
        added,
        of_value,
        bias,
        out,
        side,
        state,
        at and at + _SCALE_BYTES,
        sign_width,
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
    """Memory on CUDA for one or two partial sums of rows that are cut into slices; None if no row is cut."""
    slots = adj.row_split.num_slots
    if not slots:
        return None, None
    dtype = ACCUMULATION_DTYPE[like.dtype]
    partial = like.new_empty(slots, like.size(1), dtype=dtype)
    return partial, torch.empty_like(partial) if both else partial


class Gradients(NamedTuple):
    """Gradients of the sources' rows, the edges' rows or raw features, and the maps; None: not wanted."""

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
    """Gradients of `forward`'s operands except k.

    Args:
        adj: structure.
        operands: operands of the forward pass, but with the rows of ``grad`` as q for relu.
        grad: gradient of the sums, (num_dst, width).
        edge_width: number of raw features per edge before padding.
        grad_side: gradient of the sums of gates; only with a state.
        state: edge state of the forward pass.
        grad_state: gradient of the state; None: 0.
        kept: bytes that the forward pass stored; relu only.
        has_scale: whether the forward pass had a root.
        source_wanted: whether to compute the gradient of the sources' rows; gates always compute it.
        edge_wanted: whether to compute the gradient of the edges' rows or raw features.
        weight_wanted: whether to compute the gradients of the maps.
        bias_wanted: whether to compute the gradient of relu's bias; only with the gradients of the maps.
        map_dtype: dtype of the gradients of maps and bias; None: the accumulation dtype.
    """
    message, k, q, v, edge, maps, (weight, added, of_value, _) = operands
    both, raw, dtype = message != RELU, maps is not None, ACCUMULATION_DTYPE[grad.dtype]
    width, padded, index = grad.shape[1], q.shape[1], grad.get_device()
    grad = rows(grad) if both else q
    sign_width = positive = 0
    if kept is not None:
        sign_width, positive = _sign_bytes(padded)[1], kept.data_ptr() + _SCALE_BYTES
    if message == GATE_AND_STATE:
        assert grad_side is not None
        assert state is not None
        grad_side, state = rows(grad_side), rows(state)
        grad_state = None if grad_state is None else rows(grad_state)
    else:
        grad_side = state = grad_state = None
    grad_q = grad_v = grad_edge = grad_weight = grad_of_value = grad_bias = columns = None
    transposed = _NO_ROWS
    if source_wanted or edge_wanted:
        columns = adj.t()
        transposed = columns.plans.get("csr") or used_csr(columns)
        grad_q = grad.new_empty(adj.num_src, padded)
        grad_v = torch.empty_like(grad_q) if both else None
    if edge_wanted:
        grad_edge = _edge_rows(adj, adj.num_values, edge_width if raw else padded, like=grad)
    if raw and weight_wanted:
        grad_weight = grad.new_empty(width, edge_width, dtype=map_dtype or dtype)
        grad_of_value = torch.empty_like(grad_weight) if both else None
        grad_bias = grad_weight.new_empty(width) if bias_wanted else None
    first: tuple[Any, int] | None = adj.plans.get("first rows")
    if first is None:
        first = (adj.csr_structure, adj.num_dst)
        if index >= 0:
            first = (adj.first_csr_structure, adj.first_row_split.place()[1])
        adj.plans["first rows"] = first
    groups, parts, _kept = 0, _NO_PARTS, None
    if index >= 0 or (raw and edge_wanted and grad.dtype != dtype):
        groups = min(max(first[1] // 4, 1), _CUDA_GROUPS) if index >= 0 and grad_weight is not None else 0
        parts, _kept = _partial_results(adj, operands, grad, edge_width, groups, columns, raw and edge_wanted)
    of_raw, of_rows = (grad_edge, None) if raw else (None, grad_edge)
    _C.edge_messages_backward(
        first[0],
        transposed,
        message,
        k,
        q,
        v,
        edge,
        maps,
        weight,
        added,
        of_value,
        grad,
        grad_side,
        state,
        grad_state,
        positive,
        sign_width,
        kept if has_scale else None,
        adj.num_values,
        grad_q,
        grad_v,
        of_rows,
        parts[0] or of_raw,
        parts[1],
        parts[2],
        groups,
        of_raw,
        grad_weight,
        grad_of_value,
        grad_bias,
        parts[3],
        parts[4],
        index,
        torch.get_num_threads() if index < 0 else current_stream(index),
    )
    if padded != width:
        grad_edge = grad_edge if grad_edge is None or raw else _cut(grad_edge, width)
        grad_q, grad_v = (None if each is None else _cut(each, width) for each in (grad_q, grad_v))
    return Gradients(grad_q, grad_v, grad_edge, grad_weight, grad_of_value, grad_bias)


def relu_backward_on_cpu(
    adj: Adjacency,
    grad: Tensor,
    edge: Tensor | None,
    maps: Tensor | None,
    kept: Tensor,
    edge_width: int,
    scale: Tensor | None,
    needs: Sequence[bool],
    map_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """:func:`backward` for relu on the CPU, with less host time, which dominates on small graphs.

    Args:
        adj: structure.
        grad: gradient of the sums, with unit column stride; with raw features that need a gradient, in the
            accumulation dtype.
        edge: raw features of the forward pass, or None.
        maps: maps of the forward pass, or None.
        kept: bytes that the forward pass stored.
        edge_width: number of features per edge.
        scale: the same tensor as ``kept`` if the forward pass had a root, otherwise None.
        needs: whether gradients of sources, edges, map and bias are wanted.
        map_dtype: dtype of the gradients of map and bias.

    Returns:
        Gradients of sources, edges, map and bias. If edges need a gradient, the gradient of the sources is
        computed too; if the bias needs one, the gradient of the map is computed too.
    """
    width, wants_edge = grad.shape[1], needs[1]
    grad_q = grad_edge = grad_weight = grad_bias = of_raw = None
    transposed = _NO_ROWS
    if needs[0] or wants_edge:
        columns = adj.t()
        transposed = columns.plans.get("csr") or used_csr(columns)
        grad_q = grad.new_empty(adj.num_src, width)
        if wants_edge:
            grad_edge = _edge_rows(adj, adj.num_values, edge_width, like=grad)
    if maps is not None:
        of_raw = grad_edge
        if needs[2] or needs[3]:
            grad_weight = grad.new_empty(width, edge_width, dtype=map_dtype)
            grad_bias = grad_weight.new_empty(width) if needs[3] else None
    _C.edge_messages_backward(
        adj.plans.get("csr") or used_csr(adj),
        transposed,
        RELU,
        None,
        grad,
        None,
        edge,
        maps,
        None,
        None,
        None,
        grad,
        None,
        None,
        None,
        kept.data_ptr() + _SCALE_BYTES,
        _sign_bytes(width)[1],
        scale,
        adj.num_values,
        grad_q,
        None,
        grad_edge if of_raw is None else None,
        of_raw,
        0,
        0,
        0,
        of_raw,
        grad_weight,
        None,
        grad_bias,
        0,
        0,
        -1,
        torch.get_num_threads(),
    )
    return grad_q, grad_edge, grad_weight, grad_bias


def _partial_results(
    adj: Adjacency,
    operands: Operands,
    grad: Tensor,
    edge_width: int,
    groups: int,
    columns: Adjacency | None,
    features_wanted: bool,
) -> tuple[list[int], Tensor | None]:
    """Allocates the partial sums of a backward pass; returns addresses (0: no array) and the allocation.

    Args:
        adj: structure.
        operands: operands of the backward pass.
        grad: gradient of the sums, padded.
        edge_width: number of raw features per edge before padding.
        groups: number of row groups with parts of the maps' gradients.
        columns: the transposed structure, if a pass over it runs on CUDA; otherwise, None.
        features_wanted: whether the gradient of raw features is computed.
    """
    both, width, dtype = operands.message != RELU, grad.shape[1], ACCUMULATION_DTYPE[grad.dtype]
    features = 0 if operands.edge is None else operands.edge.shape[1]
    tiles = _sign_bytes(width)[0] if grad.is_cuda else 1
    is_direct = tiles == 1 and features == edge_width and grad.dtype == dtype
    of_features = tiles * adj.num_values * features if features_wanted and not is_direct else 0
    of_maps = groups * (features + (not both)) * width
    slots = columns.row_split.num_slots * width if columns is not None and grad.is_cuda else 0
    lengths = (of_features, of_maps, of_maps * both, slots, slots * both)
    total = sum(lengths)
    if total == 0:
        return _NO_PARTS, None
    # `_edge_rows` returns zeros if some edge values have no entry in the structure. No kernel writes partial
    # sums for these values, but the kernel that adds partial sums reads them. Every array begins at a
    # multiple of 16 bytes.
    workspace = _edge_rows(adj, total + 4 * len(lengths), like=grad, dtype=dtype)
    at, starts = workspace.data_ptr(), []
    for length in lengths:
        starts.append(at if length else 0)
        at += (length + -length % 4) * workspace.itemsize
    return starts, workspace
