"""Tensors as kernels read and write them: strides, signs, scratch memory, values of edges."""

from __future__ import annotations

from typing import TypeGuard, overload

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.structure.adjacency import Adjacency


def untouched(like: Tensor, *size: int) -> Tensor:
    """``like.new_empty(size)``. On the CPU, large tensors use huge pages, as the kernels' results do."""
    out = like.new_empty(size)
    if out.device.type == "cpu":
        _C.prefer_huge_pages(out=out, bytes=out.nbytes, collapse=False)
    return out


def contiguous_floats(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous float32; else a copy that is."""
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def unit_stride(matrix: Tensor) -> Tensor:
    """The matrix itself where its column stride is 1, whatever its row stride; else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.size(1) <= 1 else matrix.contiguous()


def scratch(device: torch.device, *lengths: int) -> tuple[Tensor | None, list[int]]:
    """Room that a launch needs for itself: float32 arrays in one allocation.

    Args:
        device: where.
        lengths: numbers of each array.

    Returns:
        What has to live until the launch, and the address of every array, a multiple of 16 bytes.
    """
    starts, total = [], 0
    for length in lengths:
        starts.append(4 * total)
        total += -(-length // 4) * 4
    if total == 0:
        return None, [0] * len(lengths)
    workspace = torch.empty(total, dtype=torch.float32, device=device)
    return workspace, [workspace.data_ptr() + start for start in starts]


def with_zeros_behind(padded: Tensor, width: int) -> Tensor:
    """The first columns of a matrix whose others are zeros: a view that `zero_padded` finds all of."""
    rows = padded[:, :width]
    rows._fastsparse_padded = padded, width  # type: ignore[attr-defined]
    return rows


def zero_padded(x: Tensor, columns: int) -> Tensor | None:
    """The matrix whose first columns are ``x``, and others, up to ``columns``, zeros, where one is known."""
    padded, width = getattr(x, "_fastsparse_padded", (None, 0))
    if (
        padded is None
        or padded.shape != (x.shape[0], columns)
        # In-place operations on x, such as `resize_` or `t_`, keep the attribute.
        or x.shape[1] != width
        or x.stride() != padded.stride()
        or x.data_ptr() != padded.data_ptr()
        or x.dtype is not padded.dtype
        # Copies have it too, but autograd would not see writes to them.
        or not (x.is_inference() or x._base is padded)
    ):
        return None
    matrix: Tensor = padded
    return matrix


@overload
def written_out(tensor: Tensor) -> Tensor: ...
@overload
def written_out(tensor: None) -> None: ...
@overload
def written_out(tensor: Tensor | None) -> Tensor | None: ...


def written_out(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its sign in memory: that of ``z.conj().imag`` is a flag, which no kernel sees.

    Traces, which cannot ask for it, end in PyTorch's dispatcher, which writes such operands out.
    """
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_neg():
        return tensor
    return tensor.resolve_neg()


# ---------------------------------------------------------------- values of edges


def num_heads(value: Tensor | None) -> int:
    """Columns of edge values, 1 where they have one dimension or are not given."""
    return value.size(-1) if value is not None and value.dim() > 1 else 1


def is_dense(value: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an operator's values are dense vectors, (num_vectors, 8, heads), not one per edge and head."""
    return value is not None and value.dim() == 3


def dense_from_edges(adj: Adjacency, value: Tensor) -> Tensor:
    """Values (num_values, heads) as dense vectors (num_vectors, 8, heads), 0 where there is no entry."""
    length, heads = adj.bsb.num_vectors, value.size(1)
    out = value.new_zeros(length * HEIGHT, heads)
    out.index_copy_(0, adj.dense_place.long(), value.index_select(0, adj.bsb_value_id))
    return out.view(length, HEIGHT, heads)


def edges_from_dense(adj: Adjacency, value: Tensor) -> Tensor:
    """The inverse: values (num_values, heads) in the caller's edge order."""
    every_value_is_written = adj.num_values == adj.num_edges
    out = (value.new_empty if every_value_is_written else value.new_zeros)(adj.num_values, value.size(2))
    return out.index_copy_(0, adj.bsb_value_id.long(), value.flatten(0, 1).index_select(0, adj.dense_place))


def empty_values(adj: Adjacency, like: Tensor) -> Tensor:
    """Space for a result per edge value, for kernels that write those of stored entries.

    Values of edges that inserted loops replaced, which no entry stands for, are 0.
    """
    every_value_is_written = adj.num_values == adj.num_edges
    return (torch.empty_like if every_value_is_written else torch.zeros_like)(like)


def edge_workspace(adj: Adjacency, *shape: int, dtype: torch.dtype) -> Tensor:
    """Space for numbers of every value; zeros where not every value has an entry that was written."""
    every = adj.num_values == adj.num_edges and not adj.is_padded
    return (torch.empty if every else torch.zeros)(shape, dtype=dtype, device=adj.device)
