"""Runs of short windows, which hold every quad once and cut no window further, and where slices start."""

from __future__ import annotations

import pytest
import torch
from cases import RAGGED, edge_lists, ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsparse_core import policy
from fastsparse_core.formats import lengths
from fastsparse_core.formats.bsb import BLOCK, QUAD, Bsb
from fastsparse_core.formats.row_split import RowSplit
from fastsparse_core.formats.window_work_list import MOST_WINDOWS, join_short_windows, slot_starts

STEP = BLOCK // QUAD


def runs_of(lengths: list[int], longest: int, blocks: int) -> tuple[list[list[int]], RowSplit]:
    """Runs of windows of so many quads each; ``longest`` and ``blocks`` count blocks."""
    window_ptr = torch.tensor([0, *lengths]).cumsum(0)
    split = RowSplit.from_rowptr(window_ptr, STEP * longest, step=STEP)
    return join_short_windows(window_ptr, split, blocks).tolist(), split


@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 7, 30, 160]), max_size=80),
    longest=st.sampled_from([4, 16]),
    blocks=st.sampled_from([1, 2, 8, MOST_WINDOWS]),
)
@settings(max_examples=200, deadline=None)
def test_runs_cover_every_window_once(lengths, longest, blocks):
    runs, split = runs_of(lengths, longest, blocks)
    first_quad = torch.tensor([0, *lengths]).cumsum(0).tolist()
    whole, slots = [], []
    for begin, length, target, num_windows in runs:
        assert 1 <= num_windows <= MOST_WINDOWS
        if target < 0:
            assert num_windows == 1
            assert 1 <= length <= STEP * longest
            slots.append((~target, begin, length))
            continue
        assert first_quad[target] == begin
        assert first_quad[target + num_windows] == begin + length
        assert num_windows == 1 or length < 2 * STEP * max(blocks, longest)
        whole += range(target, target + num_windows)
    cut = split.split_row.tolist()
    assert sorted(whole + cut) == list(range(len(lengths)))
    # Slots are in the order of the cut windows, and cover them.
    expected = [quad for window in cut for quad in range(first_quad[window], first_quad[window + 1])]
    assert [quad for _, begin, length in sorted(slots) for quad in range(begin, begin + length)] == expected
    # Only the last slice of a window may end within a block.
    ends = {first_quad[window + 1] for window in cut}
    assert all(length % STEP == 0 or begin + length in ends for _, begin, length in slots)
    assert len(slots) == split.num_slots


def test_long_runs_come_first():
    lengths = [length for _, length, _, _ in runs_of([1, 1, 119, 35, 0, 7, 400], 64, 4)[0]]
    buckets = [(-(-length // STEP)).bit_length() for length in lengths]
    assert buckets == sorted(buckets, reverse=True)


@pytest.mark.parametrize(("blocks", "count"), [(1, 64), (4, 16), (MOST_WINDOWS, 2)])
def test_joins_as_many_blocks_as_asked(blocks, count):
    assert len(runs_of([3] * 64, 64, blocks)[0]) == count


def test_joins_windows_without_blocks():
    assert runs_of([0] * 40, 64, 8)[0] == [[0, 0, first, 8] for first in range(0, 40, 8)]


@given(edges=edge_lists(), longest=st.sampled_from([1, 2, 8]), grouped=st.booleans())
@settings(max_examples=40, deadline=None)
def test_slices_start_where_the_masks_before_them_end(edges, longest, grouped):
    adj = edges.adjacency("cpu")
    window_row = None
    if grouped and adj.num_dst:
        window_row = torch.full((-(-adj.num_dst // 8) * 8,), -1, dtype=torch.int32)
        window_row[: adj.num_dst] = torch.randperm(adj.num_dst).int()
        window_row = window_row.view(-1, 8)
    bsb = Bsb.from_csr(adj.row(), adj.col, adj.shape, window_row)
    split = RowSplit.from_rowptr(bsb.window_ptr, STEP * longest, step=STEP)
    window, entry = slot_starts(bsb, adj.rowptr, split)
    assert window.dtype == torch.int32
    assert entry.shape == (split.num_slots, 8)
    runs = join_short_windows(bsb.window_ptr, split, 1).tolist()
    slots = {~target: begin for begin, _, target, _ in runs if target < 0}
    assert len(slots) == split.num_slots
    for slot, begin in slots.items():
        first = int(bsb.window_ptr[window[slot]])
        assert begin - first >= 0
        assert begin < int(bsb.window_ptr[window[slot] + 1])
        for bit in range(8):
            place = int(window[slot]) * 8 + bit
            row = place if window_row is None else int(window_row.flatten()[place])
            if not 0 <= row < adj.num_dst:
                continue
            passed = int((bsb.mask[first:begin] >> bit & 1).sum())
            assert int(entry[slot, bit]) == int(adj.rowptr[row]) + passed


@pytest.mark.parametrize(("num_edges", "group_rows"), RAGGED)
def test_ragged_structures_have_what_kernels_cut(stored_in_quads, num_edges, group_rows):
    """What the operators' tests of cut blocks rely on, in both directions."""
    adj = ragged(num_edges, "cpu", group_rows)
    for each in (adj, adj.t()):
        quads = each.bsb.window_ptr.diff()
        assert set((quads % STEP).tolist()) == set(range(STEP))
        assert (quads == 0).any()
        assert ((quads > STEP) & (quads % STEP != 0)).any(), "whole blocks before one that is cut"
        assert policy.blocks_per_step(each.bsb.num_blocks, each.bsb.num_windows) == 1 + (num_edges == 4000)
        for split in (each.bsb_split, each.sddmm_split):
            assert split.num_slots > 1
            words = split.slices.view(torch.int32)
            assert (words[words[:, 3] < 0, 2] % STEP != 0).any()
        blocks = lengths.sddmm_run_blocks(each.bsb.num_blocks, each.gpu)
        runs = join_short_windows(each.bsb.window_ptr, each.sddmm_split, blocks)
        assert all((work[:, 3] > 1).any() for work in (each.bsb_runs, runs))
