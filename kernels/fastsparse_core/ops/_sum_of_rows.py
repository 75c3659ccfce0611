"""Sums over the rows of tall matrices, for gradients of biases."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C, recorded
from fastsparse_core.device import place_of
from fastsparse_core.gpu import multiprocessors
from fastsparse_core.ops._eager import is_first_derivative

#: PyTorch's sum is used for up to `_FEW_ROWS` rows, and for up to twice as many rows with up to
#: `_FEW_NUMBERS` numbers. It takes one launch and two allocations less. For 20,000 rows of 128 numbers, both
#: sums take 23 us; for 15,832 rows of 256, PyTorch's sum takes 34 us in float32 and 59 us in bfloat16.
_FEW_ROWS, _FEW_NUMBERS = 10_000, 20_000 * 128
#: The limit in recorded steps, where host time does not matter. With 128 columns, our sum of 1,533 rows takes
#: 5.3 us (PyTorch: 7.4 us) and of 13,000 rows 5.8 us (PyTorch: 17 us). Sums of biases' gradients are a tenth
#: of a step of GIN on 512 molecules.
_FEW_NUMBERS_RECORDED = 500 * 128
#: Parts of a matrix per multiprocessor: enough thread blocks to use the memory bandwidth.
_PARTS = 4


def sum_of_rows(rows: Tensor, dtype: torch.dtype, once: bool | None = None) -> Tensor:
    """Computes ``rows.sum(0, dtype=dtype)``; for tall matrices on CUDA, with a faster kernel, in float64.

    PyTorch's sum of a tall matrix leaves most of a GPU idle. It takes 125 us for (160,000, 128) in 16 bits on
    an H200.

    Args:
        rows: (N, ...), a gradient. If it needs a gradient itself, PyTorch's sum is used.
        dtype: dtype of the result.
        once: result of `is_first_derivative` for ``rows``, if the caller knows it.
    """
    num_rows = rows.shape[0]
    is_small = num_rows <= _FEW_ROWS or (num_rows <= 2 * _FEW_ROWS and rows.numel() <= _FEW_NUMBERS)
    if is_small and rows.is_cuda and recorded.current() is not None:
        is_small = rows.numel() <= _FEW_NUMBERS_RECORDED
    if (
        is_small
        or not rows.is_cuda
        or not (is_first_derivative(rows) if once is None else once)
        or 0 in rows.stride()  # all rows share memory, as in the gradient of out.sum()
    ):
        return rows.sum(0) if rows.dtype is dtype else rows.sum(0, dtype=dtype)
    matrix = rows if rows.dim() == 2 else rows.flatten(1)
    width = matrix.shape[1]
    _, column_stride = matrix.stride()
    if width == 0 or (width > 1 and column_stride != 1):
        return rows.sum(0, dtype=dtype)
    num_parts = _PARTS * multiprocessors(rows.device)
    partial = rows.new_empty(num_parts, width, dtype=torch.float64)
    out = rows.new_empty(rows.shape[1:], dtype=dtype)
    device, queue = place_of(rows.device)
    _C.sum_of_rows(
        rows=matrix,
        partial=partial,
        num_parts=num_parts,
        out=out,
        out_dtype=dtype,
        device=device,
        queue=queue,
    )
    return out
