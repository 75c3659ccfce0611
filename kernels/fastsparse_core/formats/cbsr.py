"""CBSR: MaxK-GNN's compressed balanced sparse rows (section 3.2), with k stored entries in every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Largest width of rows, because column ids have 16 bits.
MAX_WIDTH = 65_536

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def ids_dtype(width: int) -> torch.dtype:
    """Dtype of the column ids for ``width`` columns: uint8 up to 256 columns, uint16 up to 65,536.

    Raises:
        ValueError: ``width`` is more than 65,536.
    """
    if width > MAX_WIDTH:
        raise ValueError(f"width: expected at most {MAX_WIDTH} columns (ids have 16 bits), got {width}")
    return torch.uint8 if width <= 256 else torch.uint16


@dataclass(frozen=True)
class CBSR:
    """A matrix of shape (n, width) with k stored entries in every row.

    :func:`fastsparse_core.maxk` returns one. The constructor does not check its arguments.
    :meth:`from_parts` checks them, and synchronizes with the device.

    Attributes:
        values: (n, k), float64, float32, float16 or bfloat16; differentiable.
        ids: column of every value, (n, k), ascending in each row; uint8 if ``width`` is at most 256, else
            uint16.
        width: number of columns, at most 65,536.

    Example:
        >>> import torch
        >>> from fastsparse_core import maxk
        >>> cbsr = maxk(torch.tensor([[1.0, 5.0, -2.0, 3.0]]), k=2)
        >>> cbsr.to_dense()
        tensor([[0., 5., 0., 3.]])
    """

    values: Tensor
    ids: Tensor
    width: int

    @classmethod
    def from_parts(cls, values: Tensor, ids: Tensor, width: int) -> CBSR:
        """Makes a CBSR and checks its arguments.

        Args:
            values: (n, k), float64, float32, float16 or bfloat16.
            ids: column of every value, (n, k), any integer dtype, strictly ascending in each row.
            width: number of columns.

        Raises:
            TypeError: ``values`` or ``ids`` has another dtype, or ``width`` is not an int.
            ValueError: a shape, a device, the width or an id does not fit.
        """
        if not isinstance(values, Tensor) or values.dtype not in _FLOAT_DTYPES:
            kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"values: expected float64, float32, float16 or bfloat16, got {kind}")
        if not isinstance(ids, Tensor) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"ids: expected an integer tensor, got {kind}")
        if not isinstance(width, int) or isinstance(width, bool):
            raise TypeError(f"width: expected an int, got {type(width).__name__}")
        dtype = ids_dtype(width)
        columns = ids.long()
        if columns.numel() and (columns.min() < 0 or columns.max() >= width):  # the cast below may wrap
            raise ValueError(
                f"ids: expected columns from 0 to {width - 1}, got {int(columns.min())} to "
                f"{int(columns.max())}"
            )
        cbsr = cls(values, ids if ids.dtype == dtype else ids.to(dtype), width)
        cbsr.check()
        return cbsr

    def __reduce__(self) -> tuple[Any, ...]:
        return CBSR.from_parts, (
            self.values,
            self.ids,
            self.width,
        )  # `from_parts` checks the parts, because a file may be damaged

    def check(self) -> None:
        """Raises an error if the parts do not fit together. Synchronizes with the device.

        Raises:
            TypeError: the dtype of the ids does not fit the width.
            ValueError: shapes or devices differ, k is not from 1 to ``width``, or the ids of a row are not
                strictly ascending or not below ``width``.
        """
        values, ids, width = self.values, self.ids, self.width
        if ids.dtype != ids_dtype(width):
            raise TypeError(f"ids: expected {ids_dtype(width)} for width {width}, got {ids.dtype}")
        if values.dim() != 2 or ids.shape != values.shape:
            raise ValueError(
                f"values, ids: expected the same shape (n, k), got {tuple(values.shape)} and "
                f"{tuple(ids.shape)}"
            )
        if ids.device != values.device:
            raise ValueError(f"ids: expected device {values.device} like values, got {ids.device}")
        if not 1 <= self.k <= width:
            raise ValueError(f"values: expected 1 to width = {width} entries in each row, got {self.k}")
        columns = ids.long()
        if columns.numel() and columns.max() >= width:
            raise ValueError(f"ids: expected columns from 0 to {width - 1}, got {int(columns.max())}")
        step = columns.diff(dim=1)
        for wrong, what in ((step == 0, "a column twice"), (step < 0, "descending columns")):
            if wrong.any():
                row = int(wrong.any(1).nonzero()[0])
                raise ValueError(
                    f"ids: expected ascending columns in each row, got {what} in row {row}; "
                    "sort each row's ids together with its values and add up repeated ones"
                )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.values.size(0)

    @property
    def k(self) -> int:
        """Number of entries in every row."""
        return self.values.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.values.device

    def with_values(self, values: Tensor) -> CBSR:
        """A CBSR with the same columns and other values.

        Args:
            values: (n, k), floating.

        Raises:
            ValueError: the shape or the device differs.
        """
        if values.shape != self.values.shape or values.device != self.device:
            raise ValueError(
                f"values: expected shape {tuple(self.values.shape)} on {self.device}, "
                f"got {tuple(values.shape)} on {values.device}"
            )
        return CBSR(values, self.ids, self.width)

    def to_dense(self) -> Tensor:
        """The matrix (n, width), differentiable in the values."""
        return torch.ops.fastsparse.cbsr_to_dense.default(self.values, self.ids, self.width)

    def memory_usage(self) -> dict[str, int]:
        """Bytes of every stored tensor, by name."""
        return {"values": self.values.nbytes, "ids": self.ids.nbytes}
