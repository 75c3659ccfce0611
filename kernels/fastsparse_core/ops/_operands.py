"""Brings tensors into the form that kernels need: strides, signs, scratch memory, layouts of edge values."""

from __future__ import annotations

from typing import TypeGuard, overload

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.structure.adjacency import Adjacency


def untouched(like: Tensor, *size: int) -> Tensor:
    """Returns ``like.new_empty(size)``. On the CPU, large tensors use huge pages, as kernels' results do."""
    out = like.new_empty(size)
    if out.device.type == "cpu":
        _C.prefer_huge_pages(out=out, bytes=out.nbytes, collapse=False)
    return out


def contiguous_floats(tensor: Tensor) -> Tensor:
    """The tensor as contiguous float32; a copy only if it is needed."""
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def unit_stride(matrix: Tensor) -> Tensor:
    """The matrix itself if its column stride is 1, with any row stride; otherwise a contiguous copy."""
    return matrix if matrix.stride(1) == 1 or matrix.size(1) <= 1 else matrix.contiguous()


def scratch(device: torch.device, *lengths: int) -> tuple[Tensor | None, list[int]]:
    """Scratch memory for a launch: float32 arrays in one allocation.

    Args:
        device: device of the memory.
        lengths: number of elements of each array.

    Returns:
        The allocation, which must stay alive until the launch, and the address of every array, a multiple of
        16 bytes.
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
    """A view of the first columns of a matrix whose other columns are 0; `zero_padded` finds the matrix."""
    rows = padded[:, :width]
    rows._fastsparse_padded = padded, width  # type: ignore[attr-defined]
    return rows


def zero_padded(x: Tensor, columns: int) -> Tensor | None:
    """Returns the matrix of ``columns`` columns from which `with_zeros_behind` made ``x``; None if not."""
    padded, width = getattr(x, "_fastsparse_padded", (None, 0))
    if (
        padded is None
        or padded.shape != (x.shape[0], columns)
        # The attribute remains after in-place operations such as `resize_` or `t_`.
        or x.shape[1] != width
        or x.stride() != padded.stride()
        or x.data_ptr() != padded.data_ptr()
        or x.dtype is not padded.dtype
        # Python copies of x have the attribute too, but they are not views that autograd tracks.
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
    """Copies a tensor with PyTorch's negative bit, such as ``z.conj().imag``, because kernels do not read it.

    Traced code cannot read the bit. Its calls go through PyTorch's dispatcher, which copies such operands.
    """
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_neg():
        return tensor
    return tensor.resolve_neg()


# ---------------------------------------------------------------- values of edges


def num_heads(value: Tensor | None) -> int:
    """Number of columns of edge values; 1 if they have one dimension or are None."""
    return value.size(-1) if value is not None and value.dim() > 1 else 1


def is_dense(value: Tensor | None) -> TypeGuard[Tensor]:
    """Returns whether values are dense vectors, (num_vectors, 8, heads), instead of one per edge and head."""
    return value is not None and value.dim() == 3


def dense_from_edges(adj: Adjacency, value: Tensor) -> Tensor:
    """Converts values (num_values, heads) to dense vectors (num_vectors, 8, heads), 0 without an entry."""
    length, heads = adj.bsb.num_vectors, value.size(1)
    out = value.new_zeros(length * HEIGHT, heads)
    out.index_copy_(0, adj.dense_place.long(), value.index_select(0, adj.bsb_value_id))
    return out.view(length, HEIGHT, heads)


def edges_from_dense(adj: Adjacency, value: Tensor) -> Tensor:
    """Converts dense vectors to values (num_values, heads) in the caller's edge order."""
    every_value_is_written = adj.num_values == adj.num_edges
    out = (value.new_empty if every_value_is_written else value.new_zeros)(adj.num_values, value.size(2))
    return out.index_copy_(0, adj.bsb_value_id.long(), value.flatten(0, 1).index_select(0, adj.dense_place))


def empty_values(adj: Adjacency, like: Tensor) -> Tensor:
    """Memory for a result per edge value, for kernels that write the results of stored entries.

    Results of edges that self loops replaced, which have no entry, are 0.
    """
    every_value_is_written = adj.num_values == adj.num_edges
    return (torch.empty_like if every_value_is_written else torch.zeros_like)(like)


def edge_workspace(adj: Adjacency, *shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for numbers per edge value; filled with 0 if kernels do not write all of them."""
    every = adj.num_values == adj.num_edges and not adj.is_padded
    return (torch.empty if every else torch.zeros)(shape, dtype=dtype, device=adj.device)
