"""Sorts an index into segments on a GPU. The host can read sizes of the result while later kernels run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.row_split import RowSplit


class SortedIndex(NamedTuple):
    """Facts about a sorted index that the host has read from the device.

    Attributes:
        row_split: work list of the segments.
        descends: True if the index was not in ascending order before the sort.
        num_entries: number of entries from 0 to ``num_segments - 1``; the other entries are invalid.
    """

    row_split: RowSplit
    descends: bool
    num_entries: int


class IndexSort:
    """An index that is being sorted.

    Attributes:
        rowptr: segment i has the sorted entries ``rowptr[i]`` to ``rowptr[i + 1] - 1``, int64
            (num_segments + 1,).
        order: position of every sorted entry in the index, int32 (num_rows,); entries outside of 0 to
            ``num_segments - 1`` come last.
        workspace: work list of the segments, with memory for the largest possible number of slices and cut
            segments.
        facts_address: address on the device of the actual numbers, which :meth:`wait` reads.
    """

    def __init__(
        self, rowptr: Tensor, order: Tensor, workspace: RowSplit, facts: Tensor, sort: _C.SegmentSort
    ) -> None:
        self.rowptr, self.order, self.workspace = rowptr, order, workspace
        self.facts_address = facts.data_ptr()
        self._facts, self._sort = facts, sort

    def wait(self) -> SortedIndex:
        """Waits for the sort, but not for kernels that were launched after the sort; returns the facts."""
        num_cut, num_slots, descends, num_entries = self._sort.facts()
        num_slices = self.rowptr.numel() - 1 - num_cut + num_slots
        workspace = self.workspace
        split = RowSplit(
            workspace.slices[:num_slices],
            workspace.split_row[:num_cut],
            workspace.split_ptr[: num_cut + 1],
            num_slots,
        )
        return SortedIndex(split, descends, num_entries)


def sort_index(index: Tensor, num_segments: int, longest: int) -> IndexSort:
    """Starts a stable sort of an index on its GPU. The index may contain any numbers.

    Args:
        index: int32 or int64 (num_rows,), contiguous, on a GPU; num_rows is 1 to 2^31 - 1.
        num_segments: number of segments, 1 to 2^31 - 1.
        longest: largest number of entries per slice, a power of two.
    """
    device, num_rows = index.device, index.numel()
    most_cut = num_rows // longest
    rowptr = torch.empty(num_segments + 1, dtype=torch.int64, device=device)
    order = torch.empty(num_rows, dtype=torch.int32, device=device)
    slices = torch.empty(num_segments + most_cut, 2, dtype=torch.int64, device=device)
    split_row = torch.empty(most_cut, dtype=torch.int32, device=device)
    # The facts are stored after the pointers.
    split_ptr = torch.empty(most_cut + 1 + _C.NUM_SEGMENT_FACTS, dtype=torch.int64, device=device)
    facts = split_ptr[most_cut + 1 :]
    where = device_index(device)
    size = _C.num_segment_sort_bytes(num_rows=num_rows, num_segments=num_segments, device=where)
    scratch = torch.empty(size, dtype=torch.uint8, device=device)
    sort = _C.SegmentSort(
        index=index,
        index_is_64bit=index.dtype == torch.int64,
        num_rows=num_rows,
        num_segments=num_segments,
        longest=longest,
        rowptr=rowptr,
        order=order,
        slices=slices,
        split_row=split_row,
        split_ptr=split_ptr,
        facts=facts,
        scratch=scratch,
        scratch_bytes=size,
        device=where,
        queue=queue(where),
    )
    # A segment of n > longest entries has fewer than 2 n / longest slices.
    workspace = RowSplit(slices, split_row, split_ptr, 2 * most_cut)
    return IndexSort(rowptr, order, workspace, facts, sort)
