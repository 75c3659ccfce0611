"""Tall windows: the entries of many rows at a time, sorted by source, for sums over destinations.

What a kernel adds to a source's result from one window, it adds at once: the taller the windows, the fewer
additions to memory. The 8 rows of the windows in :mod:`fastsparse_core.formats.bsb` are what tensor cores ask
for; these windows are as tall as shared memory has room for their features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core.formats.compress import compress, compress_pairs
from fastsparse_core.formats.row_split import RowSplit

#: Rows of a window.
HEIGHT = 64
#: Source nodes that an entry can name.
MOST_SOURCES = (2**31 - 1) // HEIGHT
_SOLE = -(2**31)


class TallWindows(NamedTuple):
    """A structure of shape (num_dst, num_src) in windows of 64 consecutive rows.

    Attributes:
        entry: int32 (num_edges,), by window, source and row: ``64 * source + row in the window``; the highest
            bit says that all entries of the source lie in this strip, so that its sum is its result.
        other_source: int32, ascending, the sources without that bit and those without entries: their results
            must start from 0.
        split: the windows cut into slices of entries.
        strip: entries that are summed together, counted from the first one of a window; a power of two.
    """

    entry: Tensor
    other_source: Tensor
    split: RowSplit
    strip: int

    @classmethod
    def from_csr(
        cls, row: Tensor, col: Tensor, shape: tuple[int, int], strip: int, longest: int
    ) -> TallWindows:
        """Converts a CSR structure.

        Args:
            row: int32 (num_edges,), ascending.
            col: int32 (num_edges,).
            shape: (num_dst, num_src).
            strip: entries that are summed together, a power of two.
            longest: entries of a slice at most, a multiple of ``strip``.

        Raises:
            ValueError: there are too many sources for an entry's 31 bits.
        """
        if shape[1] > MOST_SOURCES:
            raise ValueError(
                f"num_src: expected at most {MOST_SOURCES} for tall windows, got {shape[1]}; a larger "
                "structure stays with csr"
            )
        num_edges, num_windows = col.numel(), -(-shape[0] // HEIGHT)
        window_ptr, entry = compress_pairs(*_window_and_entry(row, col), num_windows, HEIGHT * shape[1])

        # A source's only sum: of all places where a strip or the source changes, one is of that source.
        first = torch.ones(num_edges, dtype=torch.bool, device=col.device)
        torch.ge(entry[1:] ^ entry[:-1], HEIGHT, out=first[1:])
        strips = (window_ptr.diff() + (strip - 1)) // strip
        shift = window_ptr[:-1] - strip * (strips.cumsum(0) - strips)
        total = int(strips.sum())
        first[
            torch.arange(0, strip * total, strip, device=col.device).add_(
                torch.repeat_interleave(shift, strips, output_size=total)
            )
        ] = True
        source = entry[first] // HEIGHT
        sole = torch.bincount(source, minlength=shape[1]) == 1
        other_source = torch.nonzero(~sole).flatten().int()
        entry |= sole.index_select(0, entry // HEIGHT).int() * _SOLE
        split = RowSplit.from_rowptr(window_ptr, longest)
        return cls(entry, other_source, split, strip)

    @staticmethod
    def entry_order(row: Tensor, col: Tensor, shape: tuple[int, int]) -> Tensor:
        """Position in the CSR structure of every entry, (num_edges,), int32 where that fits, else int64.

        Only products with edge values need it. It takes another sort.
        """
        num_windows = -(-shape[0] // HEIGHT)
        pairs = _window_and_entry(row, col)
        return compress(*pairs, num_windows, HEIGHT * shape[1], sort_minor=True)[2]


def _window_and_entry(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    return row // HEIGHT, torch.add(row % HEIGHT, col, alpha=HEIGHT)
