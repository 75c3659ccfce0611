"""Binary sparse blocks: the structure as non-zero 8x1 vectors with bitmaps, for the tensor cores.

After FlashSparse (section 3.2: the 8x1 granularity) and Fused3S (section 3.1: bitmaps instead of values).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsparse_core.formats.compress import compress, compress_pairs

#: Number of rows of a window.
HEIGHT = 8
#: Number of vectors of a block: one instruction of the tensor cores sums over this number.
BLOCK = 16
#: Number of vectors of a quad, which are stored together.
QUAD = 4
#: Number of bits in which a vector stores its column.
COLUMN_BITS = 24
#: Number of bytes of a quad: its columns, then its masks.
QUAD_BYTES = QUAD * (COLUMN_BITS // 8 + 1)
_COLUMN_BYTES = QUAD * COLUMN_BITS // 8
#: Largest number of source nodes, because a vector stores its column in COLUMN_BITS bits.
MOST_COLUMNS = 1 << COLUMN_BITS
#: Windows are padded to whole blocks if these take at most this share of the bytes of CSR with 16-bit values.
_SHARE_OF_CSR = 0.6
#: They are also padded to whole blocks if these take at most this number of times the bytes of whole quads.
_BLOCKS_OVER_QUADS = 1.2
#: Number of quads after the last quad that kernels may read when they read ahead. They ignore the content.
_OVERREAD = 16
#: Largest number of quads: kernels count them in 32 bits, including those that they read ahead.
_MOST_QUADS = 2**31 - 1 - _OVERREAD


@dataclass(frozen=True)
class Bsb:
    """A structure of shape (num_dst, num_src) in binary sparse blocks.

    The rows are grouped into windows of 8. If a column has an entry in some row of a window, it is a
    *non-zero vector* of the window: a column index, and a mask whose bit r says whether row r has an entry.
    The vectors of a window are sorted by column and stored in groups of four, the *quads*; the last quad is
    padded with vectors of mask 0. An edge that occurs twice starts a second vector of the same column.

    The kernels read a window in *blocks* of up to four quads, that is, 16 vectors. If padding costs little,
    windows are padded to whole blocks, so that all blocks start at multiples of 64 bytes. Otherwise the last
    block of a window may be shorter, and the kernels fill it with vectors of mask 0 when they read it.

    Attributes:
        shape: (num_dst, num_src).
        window_ptr: window i has the quads ``window_ptr[i]`` to ``window_ptr[i + 1] - 1``, int32
            (num_windows + 1,).
        quad: uint8 (num_quads, 16): the columns of 4 vectors, 3 bytes each, low byte first, then the 4
            masks. A padding vector has mask 0, and the first column of its quad or block.
        window_row: rows of every window, int32 (num_windows, 8), padded with -1; None: consecutive rows.
        num_vectors: number of non-zero vectors, without padding.
        num_blocks: number of blocks of all windows.
    """

    shape: tuple[int, int]
    window_ptr: Tensor
    quad: Tensor
    window_row: Tensor | None
    num_vectors: int
    num_blocks: int

    @property
    def col(self) -> Tensor:
        """The column of every vector, int32 (num_quads, 4); computed at every call."""
        byte = self.quad[:, :_COLUMN_BYTES].reshape(-1, QUAD, 3).int()
        return byte[:, :, 0] | byte[:, :, 1] << 8 | byte[:, :, 2] << 16

    @property
    def mask(self) -> Tensor:
        """The mask of every vector, uint8 (num_quads, 4); a view."""
        return self.quad[:, _COLUMN_BYTES:]

    @property
    def num_quads(self) -> int:
        """Number of quads of 4 vectors."""
        return self.quad.size(0)

    @property
    def num_windows(self) -> int:
        """Number of windows of 8 rows."""
        return self.window_ptr.numel() - 1

    @classmethod
    def from_csr(
        cls,
        row: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        window_row: Tensor | None = None,
    ) -> Bsb:
        """Converts a CSR structure.

        Args:
            row: row of every entry, int32 (num_edges,), ascending.
            col: column of every entry, int32 (num_edges,).
            shape: (num_dst, num_src).
            window_row: rows of every window, int32 (num_windows, 8), a permutation of the rows padded with
                -1; None: consecutive rows.

        Raises:
            ValueError: there are too many sources for the 24 bits of a column, or too many vectors.
        """
        device = col.device
        place = row if window_row is None else place_of_row(window_row, shape[0]).index_select(0, row)
        window_entry, entry, head_entry = sort_vectors(place, col, shape, HEIGHT)
        num_vectors = head_entry.numel() - 1
        num_windows = window_entry.numel() - 1

        # A mask is the sum of its bits, computed as the difference of two running sums. The sums may
        # overflow, but their difference modulo 256 is still right.
        bits_through = torch.cumsum(1 << (entry & (HEIGHT - 1)), 0, dtype=torch.uint8)
        mask = bits_through[head_entry[1:] - 1]
        mask = torch.diff(mask, prepend=mask.new_zeros(1)).int() << COLUMN_BITS
        window_vector = torch.searchsorted(head_entry, window_entry)
        vectors = window_vector.diff()
        quads = ((vectors + (QUAD - 1)) // QUAD).sum()
        blocks = ((vectors + (BLOCK - 1)) // BLOCK).sum()
        num_quads, num_blocks = torch.stack([quads, blocks]).tolist()
        together = vectors_together(num_quads, num_blocks, shape[0], col.numel())
        if together == BLOCK:
            num_quads = num_blocks * (BLOCK // QUAD)
        if num_quads > _MOST_QUADS:
            raise ValueError(
                f"binary sparse blocks: expected at most {_MOST_QUADS} quads of vectors, got {num_quads}"
            )
        # The last window may read the zeros after the last vector.
        packed = entry.new_zeros(num_vectors + together)
        torch.bitwise_or(entry[head_entry[:-1]] // HEIGHT, mask, out=packed[:num_vectors])
        del bits_through, mask, entry

        groups = (vectors + (together - 1)) // together
        first_group = torch.zeros(num_windows + 1, dtype=torch.int64, device=device)
        torch.cumsum(groups, 0, out=first_group[1:])
        num_groups = num_quads * QUAD // together
        shift = window_vector[:-1] - together * first_group[:-1]
        first_vector = torch.arange(0, together * num_groups, together, device=device)
        first_vector += torch.repeat_interleave(shift, groups, output_size=num_groups)
        place = first_vector[:, None] + torch.arange(together, device=device)
        vector = packed.new_zeros(num_quads + _OVERREAD, QUAD)
        group = vector[:num_quads].view(num_groups, together)
        torch.take(packed, place, out=group)
        del packed, place
        # The last group of a window also contains vectors of the next window. They are replaced by vectors of
        # mask 0 with the first column of the group: loading cached features is cheaper than a predicate.
        window = torch.nonzero(groups).flatten()
        last = first_group[window + 1] - 1
        stored = vectors[window] - together * (groups[window] - 1)
        last_group = group[last]
        padding = torch.arange(together, device=device) >= stored[:, None]
        group[last] = torch.where(padding, last_group[:, :1] & (MOST_COLUMNS - 1), last_group)
        byte = vector.view(torch.uint8).view(-1, QUAD, 4)
        quad = byte.new_empty(num_quads + _OVERREAD, QUAD_BYTES)
        quad[:, :_COLUMN_BYTES].view(-1, QUAD, 3).copy_(byte[:, :, :3])
        quad[:, _COLUMN_BYTES:].copy_(byte[:, :, 3])
        window_ptr = (first_group * (together // QUAD)).int()
        return cls(shape, window_ptr, quad[:num_quads], window_row, num_vectors, num_blocks)

    def entry_order(self, row: Tensor, col: Tensor) -> Tensor:
        """Position of every entry in the CSR structure; entries are sorted by quad, vector and row.

        Only products with edge values need these positions, which take another sort.

        Args:
            row: as in :meth:`from_csr`.
            col: as in :meth:`from_csr`.

        Returns:
            The positions (num_edges,), int32 if they fit, else int64.
        """
        place = row
        if self.window_row is not None:
            place = place_of_row(self.window_row, self.shape[0]).index_select(0, row)
        window, entry = _window_and_entry(place, col, self.shape[1], HEIGHT)
        return compress(window, entry, self.num_windows, HEIGHT * self.shape[1])[2]

    def quad_entry(self) -> Tensor:
        """Number of entries before every quad, int64 (num_quads,); computed at every call."""
        # Counts the bits of four masks at a time: first in pairs, then in groups of four and eight, then of
        # all masks.
        count = self.quad.view(torch.int32)[:, _COLUMN_BYTES // 4]
        for width, ones in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
            count = (count & ones) + (count >> width & ones)
        count = count * 0x01010101 >> 24
        return count.cumsum(0) - count

    def quad_vector(self) -> Tensor:
        """Number of vectors, without padding, before every quad, int64 (num_quads,)."""
        count = (self.mask != 0).sum(1)
        return count.cumsum(0) - count

    def dense_place(self) -> Tensor:
        """Position of every entry in the flattened values (num_vectors, 8), int64 (num_edges,).

        Entries are sorted by quad, vector and row.
        """
        vector, bit = self.bits()
        number = (self.mask.flatten() != 0).cumsum(0) - 1
        return number[vector] * HEIGHT + bit

    def to_dense(self) -> Tensor:
        """Number of edges at every position, float32 (num_dst, num_src); for tests."""
        vector, bit = self.bits()
        window = torch.searchsorted(self.window_ptr.long(), vector // QUAD, right=True) - 1
        row = window * HEIGHT + bit
        if self.window_row is not None:
            row = self.window_row.flatten()[row].long()
        dense = torch.zeros(self.shape, device=self.quad.device)
        column = self.col.flatten()[vector].long()
        return dense.index_put_((row, column), dense.new_ones(()), accumulate=True)

    def bits(self) -> tuple[Tensor, Tensor]:
        """Number of every entry's vector (counting padding) and row in the window, int64 (num_edges,) each.

        Entries are sorted by quad, vector and row.
        """
        row = torch.arange(HEIGHT, dtype=torch.uint8, device=self.quad.device)
        vector, bit = torch.nonzero((self.mask.reshape(-1, 1) >> row) & 1, as_tuple=True)
        return vector, bit

    def memory_usage(self) -> dict[str, int]:
        """Bytes of every stored tensor, by name."""
        return {name: tensor.nbytes for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        named = {"window_ptr": self.window_ptr, "quad": self.quad}
        return named if self.window_row is None else named | {"window_row": self.window_row}


def vectors_together(num_quads: int, num_blocks: int, num_dst: int, num_edges: int) -> int:
    """Chooses to pad windows to a multiple of 16 vectors (a block) or of 4 vectors (a quad).

    Kernels read a block faster if its 64 bytes are in one cache line, but padding to blocks multiplies the
    size of windows with few vectors.

    Args:
        num_quads: number of quads of all windows.
        num_blocks: number of blocks of all windows.
        num_dst: number of rows.
        num_edges: number of entries.

    Returns:
        16 or 4.
    """
    of_blocks, of_quads = num_blocks * BLOCK // QUAD * QUAD_BYTES, num_quads * QUAD_BYTES
    of_csr = 4 * (num_dst + 1) + 6 * num_edges
    small = of_blocks <= _SHARE_OF_CSR * of_csr or of_blocks <= _BLOCKS_OVER_QUADS * of_quads
    return BLOCK if small else QUAD


def place_of_row(window_row: Tensor, num_rows: int) -> Tensor:
    """Position of every row in the order of the windows, int32 (num_rows,): the inverse of ``window_row``."""
    rows = window_row.reshape(-1)
    place = torch.empty(num_rows + 1, dtype=torch.int32, device=rows.device)
    # Padding rows (-1) write to the last element, which is cut off.
    place[rows] = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    return place[:num_rows]


def sort_vectors(
    place: Tensor, col: Tensor, shape: tuple[int, int], height: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts entries by window, column and position, so that the entries of a vector are neighbours.

    Args:
        place: position of every entry's row in the order of the windows, int32 (num_edges,).
        col: column of every entry, int32 (num_edges,).
        shape: (number of positions, num_src).
        height: number of rows per window.

    Returns:
        The range of entries of every window, int64 (num_windows + 1,); for every sorted entry ``height *
        column + position in the window``, int32 (num_edges,); the first entry of every vector, then the
        number of entries, int64 (num_vectors + 1,).

    Raises:
        ValueError: there are too many sources for the 24 bits of a column.
    """
    num_windows = -(-shape[0] // height)
    window, entry = _window_and_entry(place, col, shape[1], height)
    window_entry, entry = compress_pairs(window, entry, num_windows, height * shape[1])
    del window
    # A vector starts where the window or the column changes, and where an entry equals the previous entry.
    change = entry[1:] ^ entry[:-1]
    head = torch.ones(entry.numel() + 1, dtype=torch.bool, device=entry.device)
    torch.logical_or(change == 0, change >= height, out=head[1:-1])
    head[window_entry] = True
    return window_entry, entry, torch.nonzero(head).flatten()


def _window_and_entry(place: Tensor, col: Tensor, num_src: int, height: int) -> tuple[Tensor, Tensor]:
    if num_src > MOST_COLUMNS:
        raise ValueError(
            f"num_src: expected at most 2^{COLUMN_BITS} = {MOST_COLUMNS} for binary sparse blocks, got "
            f"{num_src}; use algorithm='csr' for larger structures"
        )
    return place // height, torch.add(place % height, col, alpha=height)
