"""Sums over the rows of tall matrices, as of a bias's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import _C, recorded
from fastsparse_core.device import place_of
from fastsparse_core.gpu import multiprocessors
from fastsparse_core.ops._eager import is_first_derivative

#: Rows, and numbers of up to twice as many rows, up to which PyTorch's sum is taken: the host saves a launch
#: and two allocations (20,000 rows of 128: 23 us each; 15,832 of 256 take PyTorch 34 us in float32, 59 in
#: bfloat16).
_FEW_ROWS, _FEW_NUMBERS = 10_000, 20_000 * 128
#: The same where a step is recorded and the host does not count (of 128 columns 1,533 rows take 5.3
#: us and 7.4, 13,000 5.8 and 17): biases' sums are a tenth of a step of GIN on 512 molecules.
_FEW_NUMBERS_RECORDED = 500 * 128
#: Parts of a matrix for each multiprocessor: enough blocks of threads to keep its memory busy.
_PARTS = 4


def sum_of_rows(rows: Tensor, dtype: torch.dtype, once: bool | None = None) -> Tensor:
    """``rows.sum(0, dtype=dtype)``, added up in float64 where PyTorch's takes longer.

    PyTorch's sum of a tall matrix leaves most of a GPU idle: that of (160,000, 128) takes 125 us in 16 bits
    on an H200.

    Args:
        rows: (N, ...); a gradient whose own gradient someone wants is summed by PyTorch.
        dtype: of the result.
        once: what `is_first_derivative` says of it, for callers that asked.
    """
    num_rows = rows.shape[0]
    is_small = num_rows <= _FEW_ROWS or (num_rows <= 2 * _FEW_ROWS and rows.numel() <= _FEW_NUMBERS)
    if is_small and rows.is_cuda and recorded.current() is not None:
        is_small = rows.numel() <= _FEW_NUMBERS_RECORDED
    if (
        is_small
        or not rows.is_cuda
        or not (is_first_derivative(rows) if once is None else once)
        or 0 in rows.stride()  # one row for all, as after out.sum()
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
