"""Row panels: the entries of many rows at a time, sorted by source, for sums over destinations.

For each source, a kernel first sums the contributions of all rows of a window, and then adds the sum to the
source's result in memory. So taller windows need fewer additions to memory. Windows of
:mod:`fastsparse_core.formats.bsb` have 8 rows because of the tensor cores; windows of row panels have as many
rows as fit into shared memory with their features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core.formats.compress import compress, compress_pairs

#: Largest number of rows of a window: an entry stores the row in 6 bits.
HEIGHT = 64
#: Largest number of source nodes that an entry can represent.
MOST_SOURCES = (2**31 - 1) // HEIGHT
_SOLE = -(2**31)


class PanelLayout(NamedTuple):
    """Sizes of the windows, blocks and slices; `fastsparse_core.policy.panel_layout` chooses them.

    Attributes:
        height: number of rows per window, at most `HEIGHT`.
        num_blocks: number of blocks of consecutive sources. Kernels process all windows for one block before
            the next block, so that the block's results stay in the cache. The entries of a window in a block
            are a segment.
        strip: number of consecutive entries of a segment that are summed together; a power of two.
        longest: largest number of entries in a slice of a segment, a multiple of ``strip``.
    """

    height: int
    num_blocks: int
    strip: int
    longest: int


class RowPanels(NamedTuple):
    """A structure of shape (num_dst, num_src) in windows of consecutive rows.

    Attributes:
        entry: ``64 * source + row in the window`` of every entry, int32 (num_edges,), sorted by segment,
            source and row. The highest bit is set if one strip has all entries of the source: then the
            strip's sum is the source's result.
        other_source: sources without this bit, including sources without entries, int32, ascending. The
            caller must set their results to 0 before kernels add to them.
        slices: the segments cut into slices, block by block, int64 (num_slices, 2), packed as in `RowSplit`;
            the target is always the window.
        layout: sizes of the windows, blocks and slices.
    """

    entry: Tensor
    other_source: Tensor
    slices: Tensor
    layout: PanelLayout

    @classmethod
    def from_csr(cls, row: Tensor, col: Tensor, shape: tuple[int, int], layout: PanelLayout) -> RowPanels:
        """Converts a CSR structure.

        Args:
            row: row of every entry, int32 (num_edges,), ascending.
            col: column of every entry, int32 (num_edges,).
            shape: (num_dst, num_src).
            layout: sizes of the windows, blocks and slices.

        Raises:
            ValueError: there are too many sources for an entry's 31 bits.
        """
        if shape[1] > MOST_SOURCES:
            raise ValueError(
                f"num_src: expected at most {MOST_SOURCES} for row panels, got {shape[1]}; use "
                "algorithm='csr' for larger structures"
            )
        height, num_blocks, strip, longest = layout
        num_windows = -(-shape[0] // height)
        segment, entry = _window_and_entry(row, col, height)
        if num_blocks > 1:
            block = col // -(-shape[1] // num_blocks)
            segment = block.add_(segment, alpha=num_blocks)
        segment_ptr, entry = compress_pairs(segment, entry, num_windows * num_blocks, HEIGHT * shape[1])

        # `first` marks the entries at which a strip or a source begins. A source with one such entry has only
        # one sum.
        first = torch.ones(col.numel(), dtype=torch.bool, device=col.device)
        torch.ge(entry[1:] ^ entry[:-1], HEIGHT, out=first[1:])
        first[_cut(segment_ptr, strip)[1]] = True
        source = entry[first] // HEIGHT
        sole = torch.bincount(source, minlength=shape[1]) == 1
        other_source = torch.nonzero(~sole).flatten().int()
        entry |= sole.index_select(0, entry // HEIGHT).int() * _SOLE
        return cls(entry, other_source, _slices(segment_ptr, num_blocks, longest), layout)

    @staticmethod
    def entry_order(row: Tensor, col: Tensor, shape: tuple[int, int], height: int) -> Tensor:
        """Position of every entry in the CSR structure, (num_edges,), int32 if it fits, else int64.

        Only products with edge values need these positions, which take another sort. The entries are sorted
        by window, source and row, which is the order of all layouts with this height.
        """
        pairs = _window_and_entry(row, col, height)
        return compress(*pairs, -(-shape[0] // height), HEIGHT * shape[1])[2]


def _window_and_entry(row: Tensor, col: Tensor, height: int) -> tuple[Tensor, Tensor]:
    return row // height, torch.add(row % height, col, alpha=HEIGHT)


def _cut(segment_ptr: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Cuts segments into pieces of at most ``longest`` entries; returns their segments and first entries."""
    per_segment = (segment_ptr.diff() + (longest - 1)) // longest
    end = per_segment.cumsum(0)
    num_pieces = int(end[-1]) if end.numel() else 0
    number = torch.arange(per_segment.numel(), device=segment_ptr.device)
    segment = torch.repeat_interleave(number, per_segment, output_size=num_pieces)
    shift = segment_ptr[:-1] - longest * (end - per_segment)
    begin = torch.arange(0, longest * num_pieces, longest, device=segment_ptr.device)
    return segment, begin.add_(shift.index_select(0, segment))


def _slices(segment_ptr: Tensor, num_blocks: int, longest: int) -> Tensor:
    """Slices of the segments, block by block: in a block, long slices first, then by window."""
    segment, begin = _cut(segment_ptr, longest)
    length = (segment_ptr[segment + 1] - begin).clamp_(max=longest)
    # floor(log2(length)) + 1, less than 32: the lengths of slices in one bucket differ by a factor below two.
    bucket = torch.frexp(length.float()).exponent
    order = torch.sort(segment % num_blocks * 32 - bucket, stable=True).indices
    slices = torch.empty(order.numel(), 2, dtype=torch.int64, device=order.device)
    words = slices.view(torch.int32)
    slices[:, 0] = begin[order]
    words[:, 2] = length[order].int()
    words[:, 3] = (segment // num_blocks)[order].int()
    return slices
