"""Row panels: the entries of many rows at a time, sorted by source, for sums over destinations.

A kernel adds everything that a window contributes to a source's result in one addition to memory. So taller
windows need fewer additions. Windows of :mod:`fastsparse_core.formats.bsb` have 8 rows because of the tensor
cores; windows of row panels have as many rows as fit into shared memory with their features.
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
    """Sizes of the parts of a structure; `fastsparse_core.policy.panel_layout` chooses them.

    Attributes:
        height: number of rows per window, at most `HEIGHT`.
        num_blocks: number of blocks of consecutive sources. All windows are processed for one block before
            the next block, so that the block's results stay in the cache. The entries of a window in a block
            are a segment.
        strip: number of entries that are summed together, from the start of a segment on; a power of two.
        longest: largest number of entries in a slice of a segment, a multiple of ``strip``.
    """

    height: int
    num_blocks: int
    strip: int
    longest: int


class RowPanels(NamedTuple):
    """A structure of shape (num_dst, num_src) in windows of consecutive rows.

    Attributes:
        entry: ``64 * source + row in the window`` of every entry, int32 (num_edges,), by window, source and
            row. The highest bit says that the strip has all entries of the source, so its sum is the result.
        other_source: all other sources, int32, ascending: those without this bit, and those without entries.
            Their results must start from 0.
        slices: int64 (num_slices, 2), the segments cut into slices, block by block, packed as in `RowSplit`;
            the target is always the window.
        layout: sizes of the parts.
    """

    entry: Tensor
    other_source: Tensor
    slices: Tensor
    layout: PanelLayout

    @classmethod
    def from_csr(cls, row: Tensor, col: Tensor, shape: tuple[int, int], layout: PanelLayout) -> RowPanels:
        """Converts a CSR structure.

        Args:
            row: int32 (num_edges,), ascending.
            col: int32 (num_edges,).
            shape: (num_dst, num_src).
            layout: how to cut it.

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

        # A source has only one sum if the strip or the source changes only once among its entries.
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
        """Position in the CSR structure of every entry, (num_edges,), int32 if it fits, else int64.

        Only products with edge values need this order. It takes another sort, and is the same for all layouts
        with this height.
        """
        pairs = _window_and_entry(row, col, height)
        return compress(*pairs, -(-shape[0] // height), HEIGHT * shape[1])[2]


def _window_and_entry(row: Tensor, col: Tensor, height: int) -> tuple[Tensor, Tensor]:
    return row // height, torch.add(row % height, col, alpha=HEIGHT)


def _cut(segment_ptr: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Cuts segments into pieces of ``longest`` entries; returns segment and first entry of every piece."""
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
    # floor(log2(length)) + 1, less than 32: slices of one bucket differ in length by less than two.
    bucket = torch.frexp(length.float()).exponent
    order = torch.sort(segment % num_blocks * 32 - bucket, stable=True).indices
    slices = torch.empty(order.numel(), 2, dtype=torch.int64, device=order.device)
    words = slices.view(torch.int32)
    slices[:, 0] = begin[order]
    words[:, 2] = length[order].int()
    words[:, 3] = (segment // num_blocks)[order].int()
    return slices
