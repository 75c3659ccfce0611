"""Runs of short windows: every block is some run's, once, and every window stays whole or stays cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsparse_core.formats.row_split import RowSplit
from fastsparse_core.formats.window_runs import MOST_WINDOWS, window_runs


def runs_of(lengths: list[int], longest: int, blocks: int) -> tuple[list[list[int]], RowSplit]:
    window_ptr = torch.tensor([0, *lengths]).cumsum(0)
    split = RowSplit.from_rowptr(window_ptr, longest)
    return window_runs(window_ptr, split, blocks).tolist(), split


@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 40]), max_size=80),
    longest=st.sampled_from([4, 16]),
    blocks=st.sampled_from([1, 2, 8, MOST_WINDOWS]),
)
@settings(max_examples=200, deadline=None)
def test_runs_cover_every_window_once(lengths, longest, blocks):
    runs, split = runs_of(lengths, longest, blocks)
    first_block = torch.tensor([0, *lengths]).cumsum(0).tolist()
    whole, slots = [], []
    for begin, length, target, num_windows in runs:
        assert 1 <= num_windows <= MOST_WINDOWS
        if target < 0:
            assert num_windows == 1
            assert 1 <= length <= longest
            slots.append((~target, begin, length))
            continue
        assert first_block[target] == begin
        assert first_block[target + num_windows] == begin + length
        assert num_windows == 1 or length < 2 * max(blocks, longest)
        whole += range(target, target + num_windows)
    cut = split.split_row.tolist()
    assert sorted(whole + cut) == list(range(len(lengths)))
    # Slots follow each other as the cut windows do, and tile them.
    expected = [block for window in cut for block in range(first_block[window], first_block[window + 1])]
    assert [block for _, begin, length in sorted(slots) for block in range(begin, begin + length)] == expected
    assert len(slots) == split.num_slots


def test_long_runs_come_first():
    lengths = [length for _, length, _, _ in runs_of([1, 1, 30, 9, 0, 2, 100], 64, 4)[0]]
    buckets = [length.bit_length() for length in lengths]
    assert buckets == sorted(buckets, reverse=True)


@pytest.mark.parametrize(("blocks", "count"), [(1, 64), (4, 16), (MOST_WINDOWS, 2)])
def test_joins_as_many_blocks_as_asked(blocks, count):
    assert len(runs_of([1] * 64, 64, blocks)[0]) == count


def test_joins_windows_without_blocks():
    assert runs_of([0] * 40, 64, 8)[0] == [[0, 0, first, 8] for first in range(0, 40, 8)]
