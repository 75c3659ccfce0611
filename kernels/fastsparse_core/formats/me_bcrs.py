"""ME-BCRS: FlashSparse's memory-efficient blocked format (section 3.5, figure 10), with dense values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastsparse_core.formats.bsb import HEIGHT, QUAD, Bsb

if TYPE_CHECKING:
    from fastsparse_core.adjacency import Adjacency


@dataclass(frozen=True)
class MeBcrs:
    """A matrix of shape (num_dst, num_src) in non-zero 8x1 vectors with all their values, zeros included.

    The vectors of a window of 8 rows are stored by ascending column, in blocks of ``block``; the last block
    of a window holds the residue without padding, so it is narrower. Values of a block of w vectors are
    row-major, 8 x w, as operand B of the swapped product reads them: value i of vector j lies at
    ``w * i + j`` of its block. An edge that occurs twice starts a second vector of the same column.

    Attributes:
        shape: (num_dst, num_src).
        window_ptr: int64 (num_windows + 1,), the range of vectors of every window ("RowPointers").
        col: int32 (num_vectors,), the column of every vector ("ColumnIndices").
        value: (8 * num_vectors,) in the layout above ("Values").
        block: vectors of a block, the k of the matrix instruction: 8 for 16-bit values, 4 for TF32.
        window_row: int32 (num_windows, 8), the rows of every window, -1 for none; None: consecutive rows.
    """

    shape: tuple[int, int]
    window_ptr: Tensor
    col: Tensor
    value: Tensor
    block: int
    window_row: Tensor | None

    @classmethod
    def from_adjacency(
        cls,
        adj: Adjacency,
        value: Tensor | None = None,
        dtype: torch.dtype = torch.float16,
        *,
        window_row: Tensor | None = None,
    ) -> MeBcrs:
        """Converts a structure with its edge values.

        Args:
            adj: the structure.
            value: (num_values,) in the caller's edge order; None: ones.
            dtype: of the stored values: float16, bfloat16 or float32.
            window_row: rows of every window, a permutation of the rows padded with -1; None: consecutive
                rows.

        Raises:
            TypeError: the instruction has no such type.
            ValueError: values are missing or too many.
        """
        widths = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
        if dtype not in widths:
            raise TypeError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
        if value is not None and tuple(value.shape) != (adj.num_values,):
            raise ValueError(f"value: expected shape ({adj.num_values},), got {tuple(value.shape)}")
        block = widths[dtype]
        bsb = Bsb.from_csr(adj.row(), adj.col, adj.shape, window_row)
        stored = bsb.mask.flatten() != 0
        before = torch.zeros(stored.numel() + 1, dtype=torch.int64, device=adj.device)
        torch.cumsum(stored, 0, out=before[1:])
        window_ptr = before[bsb.window_ptr.long() * QUAD]

        entry = torch.ones(adj.num_edges, dtype=dtype, device=adj.device)
        if value is not None:
            source = bsb.entry_order(adj.row(), adj.col)
            source = source if adj.edge_id is None else adj.edge_id[source]
            entry = value.detach()[source].to(dtype)
        vector, bit = bsb.bits()
        dense = torch.zeros(bsb.num_vectors * HEIGHT, dtype=dtype, device=adj.device)
        dense[_place(window_ptr, block, before[vector], bit)] = entry
        return cls(adj.shape, window_ptr, bsb.col.flatten()[stored], dense, block, window_row)

    @property
    def num_vectors(self) -> int:
        """Number of non-zero vectors."""
        return self.col.numel()

    def to_dense(self) -> Tensor:
        """The matrix, float32 (num_dst, num_src); repeated edges are summed."""
        device = self.col.device
        vector = torch.arange(self.num_vectors, device=device).repeat_interleave(HEIGHT)
        bit = torch.arange(HEIGHT, device=device).repeat(self.num_vectors)
        value = self.value[_place(self.window_ptr, self.block, vector, bit)].float()
        row = (torch.searchsorted(self.window_ptr, vector, right=True) - 1) * HEIGHT + bit
        if self.window_row is not None:
            row = self.window_row.flatten()[row].long()
        exists = (row >= 0) & (row < self.shape[0])
        dense = torch.zeros(self.shape, device=device)
        column = self.col[vector].long()
        return dense.index_put_((row[exists], column[exists]), value[exists], accumulate=True)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        named = {"window_ptr": self.window_ptr, "col": self.col, "value": self.value}
        if self.window_row is not None:
            named["window_row"] = self.window_row
        return named

    def memory_usage(self) -> dict[str, int]:
        """Bytes of every stored tensor, by name."""
        return {name: tensor.nbytes for name, tensor in self.tensors().items()}


def _place(window_ptr: Tensor, block: int, vector: Tensor, bit: Tensor) -> Tensor:
    """Place in ``value`` of row ``bit`` of ``vector``."""
    window = torch.searchsorted(window_ptr, vector, right=True) - 1
    first = vector - (vector - window_ptr[window]) % block
    width = (window_ptr[window + 1] - first).clamp(max=block)
    return first * HEIGHT + bit * width + (vector - first)
