"""Rows of a CSR structure cut into slices of bounded length, long slices first.

A slice is what one group of lanes works on, so its greatest length bounds how long one row can keep the grid
waiting. Slices of like length are neighbours (a warp works on several), in row order among themselves (rows
that lie together share columns on most graphs, and so the cache).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Slices from this length on are long: a power of two, so that they come before all others. Of the others a
#: warp may take several (kShortGroupEntries in views.h).
LONG = 8
#: Slices from this length on keep all lanes of a warp busy: a power of two for the same reason.
LONGEST = 32


@dataclass(frozen=True)
class RowSplit:
    """Work list of the CSR kernels.

    Attributes:
        slices: int64 (num_slices, 2). Word 0 is the first entry; word 1 packs two int32: the number of
            entries and the target. A target >= 0 is the row this slice alone computes; a target < 0 is
            ``~slot``, the place of its partial result.
        split_row: int32 (num_split_rows,), the rows that have several slices.
        split_ptr: int64 (num_split_rows + 1,), their ranges of slots.
        num_slots: number of partial results, ``split_ptr[-1]``.
        num_long: number of slices of at least `LONG` entries, which come first.
        num_longest: number of slices of at least `LONGEST` entries, which come first of those.
    """

    slices: Tensor
    split_row: Tensor
    split_ptr: Tensor
    num_slots: int
    num_long: int
    num_longest: int

    @classmethod
    def from_rowptr(cls, rowptr: Tensor, longest: int) -> RowSplit:
        """Cuts rows, ``rowptr`` (num_rows + 1,), into slices of at most ``longest`` entries."""
        length = rowptr.diff()
        num_rows = length.numel()
        per_row = ((length + (longest - 1)) // longest).clamp_(min=1)
        row_end = per_row.cumsum(0)
        split_row = torch.nonzero(per_row > 1).flatten()
        num_slices = int(row_end[-1]) if num_rows else 0
        row = torch.repeat_interleave(
            torch.arange(num_rows, device=rowptr.device), per_row, output_size=num_slices
        )
        nth = torch.arange(num_slices, device=rowptr.device) - (row_end - per_row)[row]
        begin = rowptr[row] + nth * longest
        slice_len = torch.minimum(rowptr[row + 1] - begin, torch.full_like(begin, longest))

        split_ptr = torch.zeros(split_row.numel() + 1, dtype=torch.int64, device=rowptr.device)
        torch.cumsum(per_row[split_row], 0, out=split_ptr[1:])
        first_slot = torch.zeros(num_rows, dtype=torch.int64, device=rowptr.device)
        first_slot[split_row] = split_ptr[:-1]
        target = torch.where(per_row[row] > 1, -1 - (first_slot[row] + nth), row)

        # floor(log2(length)) + 1: slices of one bucket differ in length by less than two.
        bucket = torch.frexp(slice_len.float()).exponent
        order = torch.sort(bucket.to(torch.int8), stable=True, descending=True).indices
        slices = torch.empty(num_slices, 2, dtype=torch.int64, device=rowptr.device)
        words = slices.view(torch.int32)
        slices[:, 0] = begin[order]
        words[:, 2] = slice_len[order].int()
        words[:, 3] = target[order].int()
        sums = [split_ptr[-1], *((slice_len >= least).sum() for least in (LONG, LONGEST))]
        num_slots, num_long, num_longest = torch.stack(sums).tolist()
        return cls(slices, split_row.int(), split_ptr, num_slots, num_long, num_longest)

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {"slices": self.slices, "split_row": self.split_row, "split_ptr": self.split_ptr}


def shared_group_share(rowptr: Tensor, longest: int) -> float:
    """Share of the edge groups that another group shares its row with ("Decoupled SSD", table I).

    Args:
        rowptr: int64 (num_rows + 1,).
        longest: entries of a group, at most.

    Returns:
        from 0 to 1: of all groups with entries those that cannot store their row by themselves.
    """
    groups = (rowptr.diff() + (longest - 1)) // longest
    shared = groups[groups > 1].sum()
    return int(shared) / max(int(groups.sum()), 1)
