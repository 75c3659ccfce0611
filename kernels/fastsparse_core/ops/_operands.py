"""Tensors as kernels read them: strides, signs, scratch memory."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from fastsparse_core import _C


def untouched(like: Tensor, *size: int) -> Tensor:
    """``like.new_empty(size)``; large memory on the CPU comes in huge pages, as that of kernels' results."""
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
    """The first columns of a matrix whose others are zeros: a view, of which `zero_padded` finds all."""
    rows = padded[:, :width]
    rows._fastsparse_padded = padded, width  # type: ignore[attr-defined]
    return rows


def zero_padded(x: Tensor, columns: int) -> Tensor | None:
    """The matrix whose first columns are ``x``, and others, up to ``columns``, zeros, where one is known."""
    padded, width = getattr(x, "_fastsparse_padded", (None, 0))
    if (
        padded is None
        or padded.shape != (x.shape[0], columns)
        # What is made of x in place, as by `resize_` or `t_`, has the attribute, too.
        or x.shape[1] != width
        or x.stride() != padded.stride()
        or x.data_ptr() != padded.data_ptr()
        or x.dtype is not padded.dtype
        # So have copies, but autograd would not see that they are written.
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
