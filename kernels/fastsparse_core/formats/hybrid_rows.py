"""Work lists that divide each row: multiples of 64 entries for tensor cores, the rest for CUDA cores.

The method is that of HR-SpMM (section 4.1), in time linear in the number of rows. On CUDA, two kernels make
the list, and the host does not wait for them. On other devices, PyTorch's operators make the same list.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import place_of
from fastsparse_core.formats.row_split import RowSplit

#: A long item has a multiple of this number of entries: 64 entries fill one 8 x 8 matrix on tensor cores.
MULTIPLE = 64
#: Largest number of entries of a long item, so that a long row does not delay the others.
LONGEST = 256


@dataclass(frozen=True)
class HybridRows:
    """Work list: the long items in the order of rows, then one short item per row.

    A row of n entries has ceil(floor(n / 64) / 4) long items of 256 entries (the last may have 64, 128 or
    192), and, if n % 64 is not 0, a short item of n % 64 entries. An empty row has a short item, so that its
    result is written. Each item of a row with several items has a slot for its partial result, as in
    `RowSplit`; the short item has the last slot.

    The numbers of long items, split rows and slots are computed on the device. The host does not wait for
    them: tensors have their largest possible length, and the numbers are read at their first use.

    Attributes:
        slices: int64 (largest number of long items + num_rows, 2), packed as in `RowSplit`. The first
            `num_long` are the long items. The last num_rows are the short items by row, of length -1 if a
            row has none. Items between them are undefined.
        split_row: rows with several items, int32; only the first `num_split_rows` elements are defined.
        split_ptr: ranges of slots of these rows, int64; only the first `num_split_rows` + 1 elements are
            defined.
        totals: `num_long`, `num_split_rows` and `num_slots`, int32 (3,).
    """

    slices: Tensor
    split_row: Tensor
    split_ptr: Tensor
    totals: Tensor

    @classmethod
    def from_rowptr(cls, rowptr: Tensor, num_entries: int) -> HybridRows:
        """Cuts rows into items.

        Args:
            rowptr: row pointers, int64 (num_rows + 1,).
            num_entries: value of ``rowptr[-1]``, so that the host need not read it.
        """
        num_rows = rowptr.numel() - 1
        # A long item has at least 64 entries, and only the last item of a row may have fewer than 256.
        most_long = min(num_entries // MULTIPLE, (num_entries + num_rows * (LONGEST - MULTIPLE)) // LONGEST)
        most_split = min(num_entries // (MULTIPLE + 1), num_rows)
        slices = rowptr.new_empty(most_long + num_rows, 2)
        split_row = rowptr.new_empty(most_split, dtype=torch.int32)
        split_ptr = rowptr.new_empty(most_split + 1)
        fill = _fill_on_cuda if rowptr.is_cuda and num_rows else _fill
        return cls(slices, split_row, split_ptr, fill(rowptr, slices, split_row, split_ptr))

    @functools.cached_property
    def _numbers(self) -> tuple[int, int, int]:
        num_long, num_split_rows, num_slots = self.totals.tolist()
        return num_long, num_split_rows, num_slots

    @property
    def num_long(self) -> int:
        """Number of long items.

        The first read of `num_long`, `num_split_rows` or `num_slots` waits for the device.
        """
        return self._numbers[0]

    @property
    def num_split_rows(self) -> int:
        """Number of rows with several items."""
        return self._numbers[1]

    @property
    def num_slots(self) -> int:
        """Number of slots for partial results."""
        return self._numbers[2]

    def row_split(self) -> RowSplit:
        """The list as a `RowSplit`: ``slices`` in full length, and the defined part of the other tensors."""
        count = self.num_split_rows
        return RowSplit(self.slices, self.split_row[:count], self.split_ptr[: count + 1], self.num_slots)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {
            "slices": self.slices,
            "split_row": self.split_row,
            "split_ptr": self.split_ptr,
            "totals": self.totals,
        }


def _fill_on_cuda(rowptr: Tensor, slices: Tensor, split_row: Tensor, split_ptr: Tensor) -> Tensor:
    """Writes the list with CUDA kernels; returns ``totals`` of `HybridRows`."""
    num_rows = rowptr.numel() - 1
    counts = rowptr.new_empty(_C.num_hybrid_rows_counts(num_rows=num_rows), 3, dtype=torch.int32)
    device, queue = place_of(rowptr.device)
    _C.hybrid_rows(
        rowptr=rowptr,
        num_rows=num_rows,
        multiple=MULTIPLE,
        longest=LONGEST,
        counts=counts,
        most_long=slices.size(0) - num_rows,
        slices=slices,
        split_row=split_row,
        split_ptr=split_ptr,
        device=device,
        queue=queue,
    )
    return counts[-1]


def _fill(rowptr: Tensor, slices: Tensor, split_row: Tensor, split_ptr: Tensor) -> Tensor:
    """Does the same as `_fill_on_cuda` with PyTorch's operators."""
    length = rowptr.diff()
    num_rows = length.numel()
    rest = length % MULTIPLE
    whole = length - rest
    num_long = (whole + (LONGEST - 1)) // LONGEST
    has_short = (rest > 0) | (length == 0)
    items = num_long + has_short
    split = items > 1
    slots = torch.where(split, items, 0)
    first_slot = slots.cumsum(0) - slots
    all_rows = torch.arange(num_rows, device=rowptr.device)

    row = torch.repeat_interleave(all_rows, num_long)
    nth = torch.arange(row.numel(), device=rowptr.device) - (num_long.cumsum(0) - num_long)[row]
    longs = slices[: row.numel()]
    words = longs.view(torch.int32)
    longs[:, 0] = rowptr[row] + nth * LONGEST
    words[:, 2] = torch.clamp(whole[row] - nth * LONGEST, max=LONGEST).int()
    words[:, 3] = torch.where(split[row], -1 - (first_slot[row] + nth), row).int()

    shorts = slices[slices.size(0) - num_rows :]
    words = shorts.view(torch.int32)
    shorts[:, 0] = rowptr[:-1] + whole
    words[:, 2] = torch.where(has_short, rest, -1).int()
    words[:, 3] = torch.where(split, -1 - (first_slot + num_long), all_rows).int()

    rows = split.nonzero().flatten()
    num_slots = slots.sum()
    split_row[: rows.numel()] = rows.int()
    split_ptr[: rows.numel()] = first_slot[rows]
    split_ptr[rows.numel()] = num_slots
    return torch.stack([num_long.sum(), split.sum(), num_slots]).int()
