"""Binary sparse blocks: the structure as non-zero 8x1 vectors with bitmaps, for the tensor cores.

After FlashSparse (section 3.2: the 8x1 granularity) and Fused3S (section 3.1: bitmaps instead of values).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsparse_core.formats.compress import compress

#: Rows of a window.
HEIGHT = 8
#: Vectors of a block.
BLOCK = 16
#: Blocks behind the last one that the kernels may read (and ignore), so that they can read ahead.
_OVERREAD = 4


@dataclass(frozen=True)
class Bsb:
    """A structure of shape (num_dst, num_src) in binary sparse blocks.

    The rows are grouped in windows of 8. A column that has an entry in one of a window's rows is a *non-zero
    vector*: a column index and a mask whose bit r says that row r of the window has the entry. Vectors of a
    window are stored by ascending column, 16 to a block; the last block is padded with vectors of mask 0. An
    edge that occurs twice starts a second vector of the same column.

    Attributes:
        shape: (num_dst, num_src).
        window_ptr: int64 (num_windows + 1,), the range of blocks of every window.
        col: int32 (num_blocks, 16), the column of every vector; padding repeats the block's first.
        mask: uint8 (num_blocks, 16), 0 in the padding.
        window_row: int32 (num_windows, 8), the rows of every window, -1 for none; None: consecutive rows.
        entry_order: (num_edges,) position in the CSR structure of every entry, ordered by block, vector, row;
            None where no edge values are wanted.
        block_entry: int64 (num_blocks + 1,), the range of entries of every block.
        num_vectors: non-zero vectors, without padding.
    """

    shape: tuple[int, int]
    window_ptr: Tensor
    col: Tensor
    mask: Tensor
    window_row: Tensor | None
    entry_order: Tensor | None
    block_entry: Tensor
    num_vectors: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks of 16 vectors."""
        return self.col.size(0)

    @property
    def num_windows(self) -> int:
        """Number of windows of 8 rows."""
        return self.window_ptr.numel() - 1

    @classmethod
    def from_csr(
        cls,
        rowptr: Tensor,
        row: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        window_row: Tensor | None = None,
        *,
        with_entries: bool = True,
    ) -> Bsb:
        """Converts a CSR structure.

        Args:
            rowptr: int64 (num_dst + 1,).
            row: int32 (num_edges,), ascending.
            col: int32 (num_edges,).
            shape: (num_dst, num_src).
            window_row: rows of every window, a permutation of the rows padded with -1; None: consecutive
                rows.
            with_entries: keep the place of every entry, which products with edge values need.
        """
        device = col.device
        num_windows = -(-shape[0] // HEIGHT)
        permutation: Tensor | None = None
        if window_row is None:
            window, bit = row // HEIGHT, row % HEIGHT
        else:
            # Entries in the order of their rows' places: the sort is stable, so bits of a vector ascend.
            places = torch.nonzero(window_row.reshape(-1) >= 0).flatten()
            rows = window_row.reshape(-1)[places].long()
            length = rowptr.diff()[rows]
            place = torch.repeat_interleave(places.int(), length, output_size=col.numel())
            shift = rowptr[rows] - (length.cumsum(0) - length)
            permutation = torch.arange(col.numel(), device=device) + torch.repeat_interleave(
                shift, length, output_size=col.numel()
            )
            window, bit, col = place // HEIGHT, place % HEIGHT, col[permutation]
        window_entry, col, order = compress(window, col, num_windows, shape[1], sort_minor=True)
        bit = bit[order.long()]
        if permutation is not None:
            order = permutation[order.long()].to(order.dtype)
        num_edges = col.numel()

        # An entry starts a vector where window or column change, or where its bit is not beyond the last
        # one's.
        head = torch.ones(num_edges, dtype=torch.bool, device=device)
        head[1:] = (col[1:] != col[:-1]) | (bit[1:] <= bit[:-1])
        first = window_entry[:-1]
        head[first[first < num_edges]] = True
        vector_of_entry = head.cumsum(0) - 1
        head_entry = torch.nonzero(head).flatten()
        num_vectors = head_entry.numel()
        ends = torch.cat([head_entry, head_entry.new_tensor([num_edges])])

        if num_edges:
            vectors_before = torch.cat([vector_of_entry, torch.full((1,), num_vectors, device=device)])
            window_vector = vectors_before[window_entry]
        else:
            window_vector = torch.zeros(num_windows + 1, dtype=torch.int64, device=device)
        window_blocks = (window_vector.diff() + (BLOCK - 1)) // BLOCK
        window_ptr = torch.zeros(num_windows + 1, dtype=torch.int64, device=device)
        torch.cumsum(window_blocks, 0, out=window_ptr[1:])
        num_blocks = int(window_ptr[-1]) if num_windows else 0

        # Place of every vector: its window's first block, then consecutive.
        shift = window_ptr[:-1] * BLOCK - window_vector[:-1]
        place_of_vector = torch.arange(num_vectors, device=device) + torch.repeat_interleave(
            shift, window_vector.diff(), output_size=num_vectors
        )
        block_col = torch.zeros((num_blocks + _OVERREAD) * BLOCK, dtype=torch.int32, device=device)
        block_col[place_of_vector] = col[head_entry]
        bits_before = torch.zeros(num_edges + 1, dtype=torch.int64, device=device)
        torch.cumsum(1 << bit.long(), 0, out=bits_before[1:])
        mask = torch.zeros((num_blocks + _OVERREAD) * BLOCK, dtype=torch.uint8, device=device)
        mask[place_of_vector] = (bits_before[ends[1:]] - bits_before[ends[:-1]]).to(torch.uint8)
        block_vector = torch.zeros(num_blocks * BLOCK + 1, dtype=torch.int64, device=device)
        block_vector[place_of_vector + 1] = ends.diff()
        block_entry = block_vector.cumsum(0)[::BLOCK].contiguous()
        block_col, mask = block_col.view(-1, BLOCK), mask.view(-1, BLOCK)
        # Padding repeats a column that is read anyway: a load from the cache is cheaper than a predicate.
        block_col = torch.where(mask == 0, block_col[:, :1], block_col)
        return cls(
            shape,
            window_ptr,
            block_col[:num_blocks],
            mask[:num_blocks],
            window_row,
            order if with_entries else None,
            block_entry,
            num_vectors,
        )

    def to_dense(self) -> Tensor:
        """How often every entry occurs, float32 (num_dst, num_src); for tests."""
        vector, bit = self.bits()
        window = torch.searchsorted(self.window_ptr, vector // BLOCK, right=True) - 1
        row = window * HEIGHT + bit
        if self.window_row is not None:
            row = self.window_row.flatten()[row].long()
        dense = torch.zeros(self.shape, device=self.col.device)
        column = self.col.flatten()[vector].long()
        return dense.index_put_((row, column), dense.new_ones(()), accumulate=True)

    def bits(self) -> tuple[Tensor, Tensor]:
        """Vector and row in the window of every entry, int64 (num_edges,), by block, vector, row."""
        row = torch.arange(HEIGHT, device=self.mask.device)
        vector, bit = torch.nonzero((self.mask.reshape(-1, 1) >> row) & 1, as_tuple=True)
        return vector, bit

    def memory_usage(self) -> dict[str, int]:
        """Bytes of every stored tensor, by name."""
        return {name: tensor.nbytes for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        named = {
            "window_ptr": self.window_ptr,
            "col": self.col,
            "mask": self.mask,
            "block_entry": self.block_entry,
        }
        if self.entry_order is not None:
            named["entry_order"] = self.entry_order
        if self.window_row is not None:
            named["window_row"] = self.window_row
        return named
