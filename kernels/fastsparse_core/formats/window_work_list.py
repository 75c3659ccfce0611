"""Work lists of the tensor-core kernels: slices of long windows, and runs of short windows.

A warp with a single short window waits for the window's columns, then for the features, and is done. A warp
with a run of windows loads the features of the next window while it computes the current window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core.formats.bsb import BLOCK, HEIGHT, QUAD, Bsb
from fastsparse_core.formats.row_split import RowSplit

#: Largest number of windows of a run: each lane of a warp stores the end of one window.
MOST_WINDOWS = 32
_BLOCK_QUADS = BLOCK // QUAD


def join_short_windows(window_ptr: Tensor, split: RowSplit, blocks: int) -> Tensor:
    """Joins consecutive windows with one slice each into runs of about ``blocks`` blocks.

    Args:
        window_ptr: range of quads of every window (`Bsb`), int32 or int64 (num_windows + 1,).
        split: the windows cut into slices. Slices of windows with several slices are not joined.
        blocks: number of blocks of a run, from 1 (joins only windows without blocks) to 32.

    Returns:
        The runs and the slices of long windows, int32 (num_runs, 4), long runs first: first quad, number of
        quads, target (the first window, or ``~slot`` for a slice of a long window), number of windows.
    """
    assert 1 <= blocks <= MOST_WINDOWS
    device = window_ptr.device
    length = window_ptr.diff()
    num_windows = length.numel()
    if num_windows == 0:
        return torch.empty(0, 4, dtype=torch.int32, device=device)
    cut = torch.zeros(num_windows, dtype=torch.bool, device=device)
    cut[split.split_row.long()] = True
    # A window counts as at least one block, because storing its rows takes time. This also limits the number
    # of windows in a run.
    weight = _blocks(length).clamp(min=1).masked_fill(cut, 0)
    group = (weight.cumsum(0) - weight) // blocks
    starts = torch.ones(num_windows, dtype=torch.bool, device=device)
    starts[1:] = (group[1:] != group[:-1]) | cut[1:] | cut[:-1]
    first = torch.nonzero(starts).flatten()
    count = torch.cat([first, first.new_tensor([num_windows])]).diff()
    whole = ~cut[first]
    first, count = first[whole], count[whole]
    begin = window_ptr[first]
    joined = torch.stack([begin, window_ptr[first + count] - begin, first, count], 1).int()

    words = split.slices.view(torch.int32)
    slices = words[words[:, 3] < 0]
    slices = torch.stack([slices[:, 0], slices[:, 2], slices[:, 3], torch.ones_like(slices[:, 3])], 1)
    runs = torch.cat([slices, joined])
    # floor(log2(blocks)) + 1: the lengths of runs in one bucket differ by a factor below two.
    bucket = torch.frexp(_blocks(runs[:, 1]).float()).exponent
    return runs[torch.sort(bucket.to(torch.int8), stable=True, descending=True).indices]


def _blocks(quads: Tensor) -> Tensor:
    return (quads + (_BLOCK_QUADS - 1)) // _BLOCK_QUADS


def slot_starts(bsb: Bsb, rowptr: Tensor, split: RowSplit) -> tuple[Tensor, Tensor]:
    """Positions in the CSR structure at which the slices of windows with several slices start.

    The entries of a row have the same order in the vectors and in the CSR structure. So counting the row's
    bits in the masks before a slice gives the number of the row's entries before the slice.

    Args:
        bsb: the structure in blocks.
        rowptr: row pointers of the structure, int64 (num_rows + 1,).
        split: the windows cut into slices.

    Returns:
        The window of every slot, int32 (num_slots,). And for every slot and row of the window, the CSR
        position of the row's first entry in the slice, int64 (num_slots, 8), undefined for rows that do not
        exist.
    """
    window = torch.repeat_interleave(split.split_row, split.split_ptr.diff(), output_size=split.num_slots)
    entry = rowptr.new_empty(split.num_slots, HEIGHT)
    if split.num_slots == 0:
        return window, entry
    target = split.slices.view(torch.int32)[:, 3]
    begin = torch.empty_like(entry[:, 0])
    begin[~target[target < 0].long()] = split.slices[target < 0, 0]
    window_begin = bsb.window_ptr[window.long()].long()
    before = torch.zeros(bsb.num_quads + 1, dtype=torch.int64, device=rowptr.device)
    for bit in range(HEIGHT):
        torch.cumsum((bsb.mask >> bit & 1).sum(1, dtype=torch.int32), 0, out=before[1:])
        row = window.long() * HEIGHT + bit
        if bsb.window_row is not None:
            row = bsb.window_row.flatten()[row].long()
        row = row.clamp(0, bsb.shape[0] - 1)
        entry[:, bit] = rowptr[row] + before[begin] - before[window_begin]
    return window, entry
