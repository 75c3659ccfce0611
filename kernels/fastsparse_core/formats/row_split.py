"""Cuts the rows of a CSR structure into slices of bounded length, long slices first.

One group of lanes computes one slice, so bounded slices keep the grid from waiting for a single long row.
Slices are sorted by length, because a warp computes several neighbouring slices at once. Slices of similar
length are in row order, because neighbouring rows share columns, and so cache lines, on most graphs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue

#: Slices of at least this number of entries are long. It is a power of two, so that long slices come before
#: all others. A warp may compute several of the shorter slices (kShortGroupEntries in views.h).
LONG = 8
#: Slices of at least this number of entries keep all lanes of a warp busy. It is a power of two, so that
#: these slices come before all others.
LONGEST = 32


@dataclass(frozen=True)
class RowSplit:
    """Work list of the CSR kernels.

    Attributes:
        slices: int64 (num_slices, 2). Word 0 is the first entry. Word 1 packs two int32: the number of
            entries, and the target. A target >= 0 is the row, which has only this slice. A target < 0 is
            ``~slot``, where slot is the number of the slice's partial result.
        split_row: the rows with several slices, int32 (num_split_rows,).
        split_ptr: range of slots of each of these rows, int64 (num_split_rows + 1,).
        num_slots: number of partial results, ``split_ptr[-1]``.
    """

    slices: Tensor
    split_row: Tensor
    split_ptr: Tensor
    num_slots: int

    @classmethod
    def from_rowptr(cls, rowptr: Tensor, longest: int, step: int = 1) -> RowSplit:
        """Cuts rows into slices.

        Args:
            rowptr: row pointers, int32 or int64 (num_rows + 1,).
            longest: largest number of entries per slice.
            step: number of entries that a kernel processes at a time. Slices with the same number of steps
                count as equally long.
        """
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

        # floor(log2(steps)) + 1: the lengths of slices in one bucket differ by a factor below two.
        bucket = torch.frexp(((slice_len + (step - 1)) // step).float()).exponent
        order = torch.sort(bucket.to(torch.int8), stable=True, descending=True).indices
        slices = torch.empty(num_slices, 2, dtype=torch.int64, device=rowptr.device)
        words = slices.view(torch.int32)
        slices[:, 0] = begin[order]
        words[:, 2] = slice_len[order].int()
        words[:, 3] = target[order].int()
        return cls(slices, split_row.int(), split_ptr, int(split_ptr[-1]))

    @functools.cached_property
    def num_long(self) -> int:
        """Number of slices of at least `LONG` entries, which come first; read from the device once."""
        return self._num_of_at_least(LONG)

    @functools.cached_property
    def num_longest(self) -> int:
        """Number of slices of at least `LONGEST` entries, which come first; read from the device once."""
        return self._num_of_at_least(LONGEST)

    @functools.cached_property
    def longest(self) -> int:
        """Number of entries of the longest slice, 0 without slices; read from the device once."""
        return int(self.slices.view(torch.int32)[:, 2].max()) if self.slices.size(0) else 0

    def place(self) -> tuple[int, int]:
        """Address and number of the slices."""
        return self.slices.data_ptr(), self.slices.size(0)

    def _num_of_at_least(self, length: int) -> int:
        return int((self.slices.view(torch.int32)[:, 2] >= length).sum())

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {"slices": self.slices, "split_row": self.split_row, "split_ptr": self.split_ptr}


def addresses_of(split: RowSplit | None) -> tuple[int, int, int, int, int]:
    """Addresses and sizes of a work list, as the structures of `_C` take them; zeros if ``split`` is None."""
    if split is None:
        return (0, 0, 0, 0, 0)
    return (
        *split.place(),
        split.split_row.data_ptr(),
        split.split_ptr.data_ptr(),
        split.split_row.numel(),
    )


def unsplit_rows(workspace: Tensor, num_rows: int | None = None) -> RowSplit:
    """The work list for rows that have one slice each.

    Args:
        workspace: the slices in row order, int64 (num_rows, 2), possibly followed by other data.
        num_rows: number of slices; None: all rows of ``workspace``.
    """
    none, start = _no_split_rows(workspace.device)
    if num_rows is None:
        return RowSplit(workspace, none, start, 0)
    return _UnsplitRows(workspace, none, start, 0, num_rows)


class _UnsplitRows(RowSplit):
    """A work list at the beginning of a tensor; the view of its slices is made only when it is used."""

    def __init__(
        self, workspace: Tensor, split_row: Tensor, split_ptr: Tensor, num_slots: int, num_rows: int
    ) -> None:
        self.__dict__.update(
            _workspace=workspace,
            _num_rows=num_rows,
            split_row=split_row,
            split_ptr=split_ptr,
            num_slots=num_slots,
        )

    @functools.cached_property
    def slices(self) -> Tensor:
        """As of `RowSplit`."""
        workspace: Tensor = self.__dict__["_workspace"]
        return workspace[: self.__dict__["_num_rows"]]

    def place(self) -> tuple[int, int]:
        """As of `RowSplit`."""
        return self.__dict__["_workspace"].data_ptr(), self.__dict__["_num_rows"]


@functools.cache
def _no_split_rows(device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.int32, device=device), torch.zeros(
            1, dtype=torch.int64, device=device
        )


def split_rows(rowptr: Tensor, longest: int, *, is_cut: bool = True) -> RowSplit:
    """Makes the work list of rows; on CUDA, in few launches and with one read from the device.

    The slices are those of `RowSplit.from_rowptr`. On CUDA, their order differs: full slices of split rows
    come first.

    Args:
        rowptr: int64 (num_rows + 1,).
        longest: largest number of entries per slice, a power of two.
        is_cut: True if some row may have more entries than ``longest``. If False, nothing is read from the
            device.
    """
    if rowptr.device.type != "cuda":
        return RowSplit.from_rowptr(rowptr, longest)
    num_rows, device = rowptr.numel() - 1, rowptr.device
    # Counters per row, followed by the numbers of split rows and of slots.
    num_counts = _C.num_row_split_counts(num_rows=num_rows)
    counts = torch.empty(num_counts + 2, dtype=torch.int64, device=device)
    totals = counts.data_ptr() + 8 * num_counts
    index = device_index(device)
    stream = queue(index)
    _C.row_split_count(
        rowptr=rowptr,
        num_rows=num_rows,
        longest=longest,
        counts=counts,
        totals=totals,
        device=index,
        queue=stream,
    )
    num_split_rows, num_slots = counts[num_counts:].tolist() if is_cut else (0, 0)
    slices = torch.empty(num_rows - num_split_rows + num_slots, 2, dtype=torch.int64, device=device)
    split_row = torch.empty(num_split_rows, dtype=torch.int32, device=device)
    split_ptr = (torch.empty if num_rows else torch.zeros)(
        num_split_rows + 1, dtype=torch.int64, device=device
    )
    _C.row_split_fill(
        rowptr=rowptr,
        num_rows=num_rows,
        longest=longest,
        counts=counts,
        slices=slices,
        split_row=split_row,
        split_ptr=split_ptr,
        device=index,
        queue=stream,
    )
    return RowSplit(slices, split_row, split_ptr, num_slots)


def shared_group_share(rowptr: Tensor, longest: int) -> float:
    """Share of the edge groups of ssd whose row has several groups ("Decoupled SSD", table I).

    Args:
        rowptr: int64 (num_rows + 1,).
        longest: largest number of entries per group.

    Returns:
        The share, from 0 to 1. Groups without entries are not counted.
    """
    groups = (rowptr.diff() + (longest - 1)) // longest
    shared = groups[groups > 1].sum()
    return int(shared) / max(int(groups.sum()), 1)
