"""Row panels: the entries of many rows at a time, sorted by source, for sums over destinations.

What a kernel adds to a source's result from one window, it adds at once: the taller the windows, the fewer
additions to memory. The 8 rows of the windows in :mod:`fastsparse_core.formats.bsb` are what tensor cores ask
for; these windows are as tall as shared memory has space for their features.
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
    """How a structure is cut; `fastsparse_core.policy.panel_layout` chooses.

    Attributes:
        height: rows of a window, at most `HEIGHT`.
        num_blocks: blocks of consecutive sources; all windows are worked on for one block before the next, so
            that the block's results stay in the cache. What a window has in a block is a segment.
        strip: entries that are summed together, counted from the first one of a segment; a power of two.
        longest: entries of a slice of a segment at most, a multiple of ``strip``.
    """

    height: int
    num_blocks: int
    strip: int
    longest: int


class RowPanels(NamedTuple):
    """A structure of shape (num_dst, num_src) in windows of consecutive rows.

    Attributes:
        entry: int32 (num_edges,), by window, source and row: ``64 * source + row in the window``; the highest
            bit says that all entries of the source are in this strip, so that its sum is its result.
        other_source: int32, ascending, the sources without that bit and those without entries: their results
            must start from 0.
        slices: int64 (num_slices, 2), the segments cut into slices, block by block, as those of a
            `RowSplit`; the target is always the window.
        layout: as it was asked for.
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
                f"num_src: expected at most {MOST_SOURCES} for row panels, got {shape[1]}; a larger "
                "structure stays with csr"
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
        """Position in the CSR structure of every entry, (num_edges,), int32 where that fits, else int64.

        Only products with edge values need it. It takes another sort, and is the same for all layouts of that
        height.
        """
        pairs = _window_and_entry(row, col, height)
        return compress(*pairs, -(-shape[0] // height), HEIGHT * shape[1])[2]


def _window_and_entry(row: Tensor, col: Tensor, height: int) -> tuple[Tensor, Tensor]:
    return row // height, torch.add(row % height, col, alpha=HEIGHT)


def _cut(segment_ptr: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Segments cut into pieces of ``longest`` entries: the segment and the first entry of every piece."""
    per_segment = (segment_ptr.diff() + (longest - 1)) // longest
    end = per_segment.cumsum(0)
    num_pieces = int(end[-1]) if end.numel() else 0
    number = torch.arange(per_segment.numel(), device=segment_ptr.device)
    segment = torch.repeat_interleave(number, per_segment, output_size=num_pieces)
    shift = segment_ptr[:-1] - longest * (end - per_segment)
    begin = torch.arange(0, longest * num_pieces, longest, device=segment_ptr.device)
    return segment, begin.add_(shift.index_select(0, segment))


def _slices(segment_ptr: Tensor, num_blocks: int, longest: int) -> Tensor:
    """Slices of the segments: block by block, long ones of a block first, else in the order of windows."""
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
