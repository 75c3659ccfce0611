"""Rows cut for two kinds of units: multiples of 64 entries for tensor cores, what is left for CUDA cores.

HR-SpMM, section 4.1. Everything follows from one prefix sum over the rows, in time linear in their number.
On CUDA that takes a kernel before and one after; elsewhere PyTorch makes the same list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.row_split import RowSplit

#: Entries that long items are multiples of: an 8 x 8 matrix.
MULTIPLE = 64
#: Most entries of a long item, so that no row holds up the others.
LONGEST = 256


@dataclass(frozen=True)
class HybridRows(RowSplit):
    """Work list: the long items in the order of rows, then the short ones.

    A row of n entries has ceil(floor(n / 64) / 4) long items of 256 entries, the last one of 64, 128, 192 or
    256, and a short one of n % 64 entries; an empty row has a short item, so that it is written. Rows with
    several items own as many slots for partial results, as in `RowSplit`, the short item the last.

    Attributes:
        num_long: how many of ``slices`` are long.
    """

    num_long: int

    @classmethod
    def from_rowptr(  # type: ignore[override]
        cls, rowptr: Tensor, longest: int = LONGEST
    ) -> HybridRows:
        """Cuts rows.

        Args:
            rowptr: int64 (num_rows + 1,).
            longest: most entries of a long item, a multiple of 64.
        """
        device = rowptr.device
        if device.type == "cuda" and rowptr.numel() > 1:
            return cls._on_cuda(rowptr, longest)
        length = rowptr.diff()
        rest = length % MULTIPLE
        num_long = (length - rest + (longest - 1)) // longest
        num_short = ((rest > 0) | (length == 0)).long()
        items = num_long + num_short
        shared = (items > 1).long()
        ends = torch.stack([num_long, num_short, shared, shared * items]).cumsum(1)
        starts = torch.zeros(4, length.numel() + 1, dtype=torch.int64, device=device)
        starts[:, 1:] = ends
        longs, shorts, num_shared, num_slots = starts[:, -1].tolist()
        long_start, slot_start = starts[0], starts[3]

        slices = torch.empty(longs + shorts, 2, dtype=torch.int64, device=device)
        words = slices.view(torch.int32)
        all_rows = torch.arange(length.numel(), device=device)

        row = torch.repeat_interleave(all_rows, num_long, output_size=longs)
        nth = torch.arange(longs, device=device) - long_start[row]
        slices[:longs, 0] = rowptr[row] + nth * longest
        words[:longs, 2] = torch.clamp(length[row] - rest[row] - nth * longest, max=longest).int()
        words[:longs, 3] = torch.where(shared[row] > 0, -1 - (slot_start[row] + nth), row).int()

        row = torch.repeat_interleave(all_rows, num_short, output_size=shorts)
        slices[longs:, 0] = rowptr[row + 1] - rest[row]
        words[longs:, 2] = rest[row].int()
        words[longs:, 3] = torch.where(shared[row] > 0, -1 - (slot_start[row] + num_long[row]), row).int()

        split_row = torch.repeat_interleave(all_rows, shared, output_size=num_shared)
        split_ptr = torch.full((num_shared + 1,), num_slots, dtype=torch.int64, device=device)
        split_ptr[:-1] = slot_start[split_row]
        return cls(slices, split_row.int(), split_ptr, num_slots, longs)

    @classmethod
    def _on_cuda(cls, rowptr: Tensor, longest: int) -> HybridRows:
        device, num_rows = rowptr.device, rowptr.numel() - 1
        index = device_index(device)
        sums = torch.empty(2 * num_rows, dtype=torch.int64, device=device)
        rows = (rowptr.data_ptr(), num_rows, MULTIPLE, longest)
        _C.count_hybrid_rows(*rows, sums.data_ptr(), index, queue(index))
        sums = sums.cumsum(0)
        items, everything = sums[num_rows - 1 :: num_rows].tolist()
        num_long, num_short = divmod(items, 1 << 32)
        num_slots, num_shared = divmod(everything - items, 1 << 32)
        slices = torch.empty(num_long + num_short, 2, dtype=torch.int64, device=device)
        split_row = torch.empty(num_shared, dtype=torch.int32, device=device)
        split_ptr = torch.empty(num_shared + 1, dtype=torch.int64, device=device)
        _C.fill_hybrid_rows(
            *rows,
            sums.data_ptr(),
            num_long,
            slices.data_ptr(),
            split_row.data_ptr(),
            split_ptr.data_ptr(),
            index,
            queue(index),
        )
        return cls(slices, split_row, split_ptr, num_slots, num_long)
