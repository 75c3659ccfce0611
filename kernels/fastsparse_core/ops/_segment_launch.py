"""Launches the kernels on segments of rows, without checks and without autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import current_stream, place_of
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._operands import unit_stride
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.segments import Segments

#: Reductions and their codes in kernels/include/fastsparse/views.h.
REDUCTION_CODE = {"sum": 0, "mean": 1, "max": 2, "min": 3, "mul": 4, "var": 5, "std": 6}
EXTREMA = ("max", "min")
MOMENTS = ("var", "std")


def extra_dtype(reduce: str, dtype: torch.dtype) -> torch.dtype | None:
    """Dtype of a reduction's second result (the chosen rows or the means); None: no second result."""
    if reduce in EXTREMA:
        return torch.int64
    return accumulation_dtype(dtype) if reduce in MOMENTS else None


def _state_bytes(reduce: str, dtype: torch.dtype) -> int:
    """Bytes of the kernel's state per feature."""
    if reduce in EXTREMA:
        return 16
    return accumulation_dtype(dtype).itemsize * {"sum": 2, "mean": 2, "mul": 1, "var": 3, "std": 3}[reduce]


def sum_rows(src: Tensor, segments: Segments, reduce: str) -> Tensor:
    """Sums or means (num_segments, width) of the rows of a matrix."""
    out = src.new_empty(segments.num_segments, src.shape[1])
    if out.numel():
        launch_reduce(src, segments, reduce, out, None)
    return out


def partial_bytes(segments: Segments, width: int, reduce: str, dtype: torch.dtype) -> int:
    """Bytes of the partial results of segments that are cut into slices."""
    return segments.row_split.num_slots * width * _state_bytes(reduce, dtype)


def launch_reduce(src: Tensor, segments: Segments, reduce: str, out: Tensor, extra: Tensor | None) -> None:
    """Writes a reduction of rows to ``out``, and its second result (`extra_dtype`) to ``extra``."""
    if src.stride(1) != 1:
        src = unit_stride(src)
    device = src.get_device()
    partial = None
    if device >= 0 and segments.row_split.num_slots:
        size = partial_bytes(segments, src.size(1), reduce, src.dtype)
        partial = torch.empty(size, dtype=torch.uint8, device=src.device)
    _C.segment_reduce(
        structure=segments.structure,
        reduction=REDUCTION_CODE[reduce],
        x=src,
        out=out,
        extra=extra,
        partial=partial,
        facts=segments.facts,
        device=device,
        queue=torch.get_num_threads() if device < 0 else current_stream(device),
    )


def gather_rows(src: Tensor, index: Tensor) -> Tensor:
    """``src.index_select(0, index)`` of a matrix on CUDA, without checking indices.

    PyTorch's kernel launches a thread block for every row, even if rows are narrow.
    """
    src, index = src.contiguous(), index.long().contiguous()
    num_rows = index.numel()
    out = src.new_empty(num_rows, src.size(1))
    row_bytes = src.size(1) * src.element_size()
    device, stream = place_of(src.device)
    _C.gather_rows(
        table=src,
        index=index,
        out=out,
        num_rows=num_rows,
        row_bytes=row_bytes,
        out_row_bytes=row_bytes,
        device=device,
        queue=stream,
    )
    return out


def launch_softmax(matrix: Tensor, grad: Tensor | None, find: Callable[[], Segments]) -> Tensor:
    """Softmax of `matrix`; with `grad`, the gradient of a softmax whose result is `matrix`."""
    matrix = matrix.contiguous()
    grad = None if grad is None else grad.contiguous()
    out = torch.empty_like(matrix)
    if out.numel() == 0:
        return out
    segments = find()
    return softmax_of_rows(segments, segments.structure, matrix, grad, out)


def softmax_of_rows(
    of: Segments | Adjacency, structure: _C.CsrStructure, matrix: Tensor, grad: Tensor | None, out: Tensor
) -> Tensor:
    """Writes the softmax of contiguous rows, or its gradient, to `out`; returns `out`."""
    width = matrix.size(1)
    device = matrix.get_device()
    partial = None
    if device >= 0 and of.row_split.num_slots:
        dtype = accumulation_dtype(matrix.dtype)
        partial = matrix.new_empty(of.row_split.num_slots, width, 2, dtype=dtype)
    _C.edge_softmax(
        structure=structure,
        input=matrix,
        grad=grad,
        out=out,
        partial=partial,
        device=device,
        queue=torch.get_num_threads() if device < 0 else current_stream(device),
    )
    return out
