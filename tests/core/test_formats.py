"""Binary sparse blocks, ME-BCRS, row grouping and format statistics against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import SETTINGS, EdgeList, edge_lists
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.formats.bsb import BLOCK, HEIGHT, QUAD, Bsb, vectors_together
from fastsparse_core.formats.compress import compress
from fastsparse_core.formats.grouping import group_rows, vectors_per_window
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.inspection import inspect_edges, inspect_rows, sort_edges
from fastsparse_core.formats.row_split import RowSplit, split_rows
from fastsparse_core.formats.statistics import statistics

GROUPINGS = ("natural", "random", "minhash")


def window_rows(adj: Adjacency, kind: str) -> Tensor | None:
    """A grouping of the kind; random ones have their absent rows anywhere in the last window."""
    if kind == "natural":
        return None
    if kind == "minhash":
        return group_rows(adj)
    generator = torch.Generator().manual_seed(adj.num_edges)
    order = torch.randperm(adj.num_dst, generator=generator).int()
    padded = torch.cat([order, order.new_full((-adj.num_dst % HEIGHT,), -1)])
    return padded.view(-1, HEIGHT).to(adj.device)


def bsb_of(adj: Adjacency, window_row: Tensor | None) -> Bsb:
    return Bsb.from_csr(adj.row(), adj.col, adj.shape, window_row)


def dense_of(edges: EdgeList, value: Tensor | None = None) -> Tensor:
    value = torch.ones(edges.row.numel()) if value is None else value
    dense = torch.zeros(edges.shape)
    return dense.index_put_((edges.row.long(), edges.col.long()), value, accumulate=True)


def vectors_by_hand(adj: Adjacency, window_row: Tensor | None, height: int) -> list[int]:
    """Vectors of every window: per column as many as its most frequent row needs, but each entry in one.

    Entries of a column go by row; each starts a vector unless its row is behind the last one's.
    """
    rows = range(adj.num_dst) if window_row is None else [r for r in window_row.flatten().tolist() if r >= 0]
    place = {row: at for at, row in enumerate(rows)}
    entries = sorted(
        (place[row] // height, col, place[row])
        for row, col in zip(adj.row().tolist(), adj.col.tolist(), strict=True)
    )
    counts = [0] * math.ceil(adj.num_dst / height)
    last: tuple[int, int, int] | None = None
    for entry in entries:
        if last is None or entry[:2] != last[:2] or entry[2] <= last[2]:
            counts[entry[0]] += 1
        last = entry
    return counts


@given(edges=edge_lists(), kind=st.sampled_from(GROUPINGS))
@SETTINGS
def test_bsb_holds_every_entry(device, edges, kind):
    adj = edges.adjacency(device)
    bsb = bsb_of(adj, window_rows(adj, kind))
    assert torch.equal(bsb.to_dense().cpu(), dense_of(edges))
    assert bsb.num_windows == math.ceil(adj.num_dst / HEIGHT)
    assert bsb.quad.dtype == torch.uint8
    assert bsb.quad.shape == (bsb.num_quads, 16)
    behind = bsb.quad.untyped_storage().nbytes() - bsb.quad.nbytes
    assert behind == 4 * 64, "the kernels read up to 11 quads ahead"
    assert bsb.num_vectors == int((bsb.mask != 0).sum())
    assert int(bsb.window_ptr[-1]) == bsb.num_quads
    assert bsb.num_blocks == sum(-(-quads * QUAD // BLOCK) for quads in bsb.window_ptr.diff().tolist())


@pytest.mark.parametrize(
    ("count", "rows", "quads"),
    [
        pytest.param(5, 1, 2, id="two quads where a block would be half empty"),
        pytest.param(5, 8, 4, id="a block where CSR is much larger"),
        pytest.param(14, 1, 4, id="a block where it is nearly full"),
        pytest.param(18, 1, 5, id="a block and a quad"),
    ],
)
def test_bsb_pads_to_blocks_where_that_is_cheap(device, count, rows, quads):
    """Windows of so many vectors with so many entries each, and one without."""
    row, col = torch.tensor(list(itertools.product(range(rows), range(count)))).t()
    row = torch.cat([row, row + 8, row + 24]).to(device)
    adj = Adjacency.from_coo(row, col.repeat(3).to(device), (32, 40))
    assert bsb_of(adj, None).window_ptr.diff().tolist() == [quads, quads, 0, quads]


def test_bsb_holds_as_many_columns_as_fit(device):
    row, col = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 1, 2**24 - 1], dtype=torch.int32)
    widest = Bsb.from_csr(row.to(device), col.to(device), (1, 2**24))
    assert widest.col[0, :3].tolist() == col.tolist()
    assert widest.mask[0].tolist() == [1, 1, 1, 0]
    with pytest.raises(
        ValueError, match=r"num_src: expected at most 2\^24 .* got 16777217; use algorithm='csr'"
    ):
        Bsb.from_csr(row.to(device), col.to(device), (1, 2**24 + 1))


def test_bsb_refuses_more_quads_than_kernels_count(device, monkeypatch, caplog):
    monkeypatch.setattr("fastsparse_core.formats.bsb._MOST_QUADS", 2)
    row = torch.arange(24, device=device)
    few, many = (Adjacency.from_coo(row[:n], row[:n] // 8, (n, 3)) for n in (16, 24))
    assert few.try_bsb()
    with pytest.raises(ValueError, match="expected at most 2 quads of vectors, got 3"):
        bsb_of(many, None)
    assert not many.try_bsb()
    assert not many.try_bsb()
    assert sum("got 3, so the CSR kernels are used" in record.message for record in caplog.records) == 1


def test_bsb_of_many_rows_and_columns(device):
    """Windows and columns that do not fit into 32 bits together."""
    shape, generator = (2**19 + 3, 2**20 + 5), torch.Generator().manual_seed(4)
    row = torch.randint(0, shape[0], (5000,), generator=generator)
    row[:2500] = row[0] // HEIGHT * HEIGHT + row[:2500] % 3
    col = torch.randint(0, shape[1], (5000,), generator=generator)
    col[:2500] = col[:2500] % 40 + 2**20 - 40
    adj = Adjacency.from_coo(row.to(device), col.to(device), shape)
    bsb = bsb_of(adj, None)
    assert bsb.num_vectors == vectors_per_window(adj).sum() == sum(vectors_by_hand(adj, None, HEIGHT))
    vector, bit = bsb.bits()
    found = (torch.searchsorted(bsb.window_ptr.long(), vector // QUAD, right=True) - 1) * HEIGHT + bit
    order = bsb.entry_order(adj.row(), adj.col).long()
    assert torch.equal(order.sort().values, torch.arange(5000, device=device))
    assert torch.equal(found, adj.row()[order].long())
    assert torch.equal(bsb.col.flatten()[vector], adj.col[order])


@given(edges=edge_lists(), kind=st.sampled_from(GROUPINGS))
@SETTINGS
def test_bsb_layout(device, edges, kind):
    """Vectors ascend by column, padding is last and repeats a column, no quad or block is all padding."""
    adj = edges.adjacency(device)
    bsb = bsb_of(adj, window_rows(adj, kind))
    quads = sum(-(-int(n) // QUAD) for n in vectors_by_hand(adj, bsb.window_row, HEIGHT))
    together = vectors_together(quads, bsb.num_blocks, adj.num_dst, adj.num_edges)
    stored, col = (bsb.mask != 0).view(-1, together), bsb.col.view(-1, together)
    assert bool(stored[:, 0].all())
    assert bool((stored[:, :-1] | ~stored[:, 1:]).all())
    assert torch.equal(col[~stored], col[:, :1].expand_as(col)[~stored])
    ends = bsb.window_ptr.long() * QUAD // together
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        columns = col[begin:end][stored[begin:end]]
        assert bool((columns.diff() >= 0).all())
        assert columns.numel() > together * (end - begin - 1)


@given(edges=edge_lists(), kind=st.sampled_from(GROUPINGS))
@SETTINGS
def test_bsb_entries(device, edges, kind):
    """The k-th set bit stands for the entry `entry_order[k]`; quads know how many come before."""
    adj = edges.adjacency(device)
    bsb = bsb_of(adj, window_rows(adj, kind))
    order = bsb.entry_order(adj.row(), adj.col)
    assert order.dtype == torch.int32
    order = order.long()
    assert torch.equal(order.sort().values, torch.arange(adj.num_edges, device=device))
    vector, bit = bsb.bits()
    assert torch.equal(bsb.col.flatten()[vector], adj.col[order])
    window = torch.searchsorted(bsb.window_ptr.long(), vector // QUAD, right=True) - 1
    row = window * HEIGHT + bit
    if bsb.window_row is not None:
        row = bsb.window_row.flatten()[row].long()
    assert torch.equal(row, adj.row()[order].long())
    entries = torch.bincount(vector // QUAD, minlength=bsb.num_quads)
    assert torch.equal(bsb.quad_entry(), entries.cumsum(0) - entries)
    vectors = (bsb.mask != 0).sum(1)
    assert torch.equal(bsb.quad_vector(), vectors.cumsum(0) - vectors)


@pytest.mark.gpu
@given(edges=edge_lists(), kind=st.sampled_from(GROUPINGS))
@SETTINGS
def test_devices_convert_alike(edges, kind):
    on_cpu, on_cuda = edges.adjacency("cpu"), edges.adjacency("cuda")
    grouped = [window_rows(adj, kind) for adj in (on_cpu, on_cuda)]
    assert (grouped[0] is None) == (grouped[1] is None)
    expected = bsb_of(on_cpu, grouped[0]).tensors()
    actual = bsb_of(on_cuda, grouped[1]).tensors()
    expected["entry_order"], actual["entry_order"] = (
        Bsb.from_csr(adj.row(), adj.col, adj.shape, rows).entry_order(adj.row(), adj.col)
        for adj, rows in zip((on_cpu, on_cuda), grouped, strict=True)
    )
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype
        assert torch.equal(tensor, actual[name].cpu()), name


@given(edges=edge_lists(), kind=st.sampled_from(GROUPINGS))
@SETTINGS
def test_statistics_against_brute_force(device, edges, kind):
    adj = edges.adjacency(device)
    window_row = window_rows(adj, kind)
    found = statistics(adj, window_row)
    low, high = (vectors_by_hand(adj, window_row, height) for height in (8, 16))
    assert found.num_edges == adj.num_edges
    assert found.vectors_8x1 == sum(low) == vectors_per_window(adj, window_row).sum()
    assert found.vectors_16x1 == sum(high) == vectors_per_window(adj, window_row, height=16).sum()
    assert found.zeros_8x1 == 8 * sum(low) - adj.num_edges
    assert found.zeros_16x1 == 16 * sum(high) - adj.num_edges
    assert found.mma_8x1 == sum(math.ceil(n / 16) for n in low)
    assert found.mma_16x1 == 2 * sum(math.ceil(n / 16) for n in high)

    blocks = Bsb.from_csr(adj.row(), adj.col, adj.shape, window_row)
    assert blocks.num_vectors == found.vectors_8x1
    assert blocks.num_blocks == found.mma_8x1
    assert sum(blocks.memory_usage().values()) == found.bsb_bytes
    indices = 0 if window_row is None else window_row.nbytes
    assert found.me_bcrs_bytes == 4 * (len(low) + 1) + sum(low) * (4 + 8 * 2) + indices
    padded = sum(8 * math.ceil(n / 8) for n in low)
    assert found.sr_bcrs_bytes == 8 * len(low) + padded * (4 + 8 * 2) + indices
    assert found.csr_bytes == 4 * (adj.num_dst + 1) + adj.num_edges * (4 + 2)


@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 80), st.sampled_from([63, 64, 65, 255, 256, 257, 320, 512, 1000])),
        max_size=40,
    )
)
@SETTINGS
def test_hybrid_rows_against_brute_force(device, lengths):
    """Long items in the order of rows, then short ones; rows of several items have slots in that order.

    Unused items may follow the long ones. A row without a short item has one of length -1.
    """
    longs, shorts, split_row, split_ptr = [], [], [], [0]
    begin = 0
    for row, length in enumerate(lengths):
        whole = length // 64 * 64
        items = [(begin + at, min(256, whole - at)) for at in range(0, whole, 256)]
        count = len(items) + (length % 64 > 0 or length == 0)
        target = [row] if count == 1 else [~(split_ptr[-1] + nth) for nth in range(count)]
        longs += [(*item, at) for item, at in zip(items, target, strict=False)]
        if count > len(items):
            shorts.append((begin + whole, length % 64, target[-1]))
        if count > 1:
            split_row.append(row)
            split_ptr.append(split_ptr[-1] + count)
        begin += length
    rowptr = torch.tensor([0, *lengths]).cumsum(0).to(device)
    rows = HybridRows.from_rowptr(rowptr, begin)
    words = rows.slices.view(torch.int32)
    slices = list(zip(rows.slices[:, 0].tolist(), words[:, 2].tolist(), words[:, 3].tolist(), strict=True))
    assert rows.num_long == len(longs)
    assert slices[: len(longs)] == longs
    by_row = slices[len(slices) - len(lengths) :]
    assert [length for _, length, _ in by_row] == [n % 64 if n % 64 or n == 0 else -1 for n in lengths]
    assert [item for item in by_row if item[1] >= 0] == shorts
    assert rows.num_split_rows == len(split_row)
    assert rows.num_slots == split_ptr[-1]
    split = rows.row_split()
    assert split.slices is rows.slices
    assert split.split_row.tolist() == split_row
    assert split.split_ptr.tolist() == split_ptr
    assert split.num_slots == split_ptr[-1]
    assert all(tensor.device == rowptr.device for tensor in rows.tensors().values())


def hybrid_lengths(kind: str) -> Tensor:
    """Row lengths around every unit of `HybridRows`, by name, or as many random ones as the name says."""
    if kind == "units":
        return torch.tensor([63, 64, 65, 0, 255, 256, 257, 100_000, 0, 1, 128, 320])
    if kind == "empty":
        return torch.zeros(300, dtype=torch.int64)
    length = torch.randint(0, 600, (int(kind),), generator=torch.Generator().manual_seed(0))
    length[::7] = 0
    length[3::5] = 64
    return length


# The kernels handle tiles of 256 rows; with more than 1024 tiles, a block handles several tiles.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    ["units", "empty", "0", "1", "255", "256", "257", "3000", "262143", "262144", "262145", "600000"],
)
def test_hybrid_rows_of_both_devices_are_equal(poisoned_memory, kind):
    length = hybrid_lengths(kind)
    num_rows = length.numel()
    rowptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
    num_entries = int(rowptr[-1])
    expected = HybridRows.from_rowptr(rowptr, num_entries)
    rows = HybridRows.from_rowptr(rowptr.cuda(), num_entries)
    assert rows.totals.tolist() == expected.totals.tolist()
    assert rows.slices.shape == expected.slices.shape
    slices = rows.slices.cpu()
    assert torch.equal(slices[: rows.num_long], expected.slices[: rows.num_long])
    first_short = slices.size(0) - num_rows
    assert torch.equal(slices[first_short:], expected.slices[first_short:])
    split, expected_split = rows.row_split(), expected.row_split()
    assert torch.equal(split.split_row.cpu(), expected_split.split_row)
    assert torch.equal(split.split_ptr.cpu(), expected_split.split_ptr)


@pytest.mark.parametrize("lengths", [[64] * 9, [65] * 9, [1, 64], [64, 320], [256, 257], [100_000]])
def test_hybrid_rows_reserve_enough(lengths):
    """Memory is reserved for the largest number of items, which equal rows of the worst length reach."""
    rowptr = torch.tensor([0, *lengths]).cumsum(0)
    rows = HybridRows.from_rowptr(rowptr, sum(lengths))
    most_long = rows.slices.size(0) - len(lengths)
    assert rows.num_long <= most_long <= sum(lengths) // 64
    assert rows.num_split_rows <= rows.split_row.numel() == rows.split_ptr.numel() - 1
    if len(set(lengths)) == 1:
        assert rows.num_long == most_long
        assert rows.num_split_rows == rows.split_row.numel() or lengths[0] == 64


@pytest.mark.gpu
def test_hybrid_rows_are_built_without_waiting():
    length = hybrid_lengths("3000")
    rowptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
    num_entries = int(rowptr[-1])
    on_device = rowptr.cuda()
    HybridRows.from_rowptr(on_device, num_entries)  # loads the kernels, which may wait
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = HybridRows.from_rowptr(on_device, num_entries)
        with pytest.raises(RuntimeError, match="synchroniz"):
            rows.num_long  # noqa: B018
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert rows.num_long == HybridRows.from_rowptr(rowptr, num_entries).num_long


@pytest.mark.parametrize("longest", [32, 256])
@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257, 3000])
def test_slices_tile_the_rows(device, num_rows, longest):
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, 2 * longest, (num_rows,), generator=generator)
    length[::7] = 0
    length[3::500] = 5 * longest + 1
    rowptr = torch.cat([length.new_zeros(1), length.cumsum(0)])
    split = split_rows(rowptr.to(device), longest)
    again = split_rows(rowptr.to(device), longest)
    for name, tensor in split.tensors().items():
        assert torch.equal(tensor, again.tensors()[name])
    if not split.num_slots:
        assert torch.equal(split_rows(rowptr.to(device), longest, is_cut=False).slices, split.slices)
    expected = RowSplit.from_rowptr(rowptr, longest)
    assert split.num_slots == expected.num_slots == int(split.split_ptr[-1])
    assert split.split_row.tolist() == expected.split_row.tolist()
    assert split.split_ptr.tolist() == expected.split_ptr.tolist()
    assert sorted(split.slices.tolist()) == sorted(expected.slices.tolist())
    kinds = [count.bit_length() for count in split.slices.cpu().view(torch.int32)[:, 2].tolist()]
    assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_inspection_finds_what_is_wrong(device, dtype):
    row = torch.tensor([0, 1, 1, 3], dtype=dtype, device=device)
    col = torch.tensor([2, 0, 5, 5], dtype=dtype, device=device)
    found = inspect_edges(row, col, 4, 32, square=True)
    assert (found.most_row, found.most_col) == (3, 5)
    assert (found.rows_descend, found.cols_descend, found.has_empty_rows) == (False, False, True)
    assert found.checksum != 0
    assert found.rowptr.tolist() == [0, 1, 3, 3, 4]
    assert found.col.tolist() == col.tolist()
    assert found.inv_degree.tolist() == [1, 0.5, 0, 1]
    assert inspect_edges(row.flip(0), col, 4, 32, square=False).rows_descend
    assert inspect_edges(row, col.flip(0), 4, 32, square=False).cols_descend
    assert inspect_edges(row - 1, col, 4, 32, square=False).most_row == 2**64 - 1
    both = torch.cat([row, col]), torch.cat([col, row])
    assert inspect_edges(*both, 6, 32, square=True).checksum == 0
    rows = inspect_rows(torch.tensor([0, 3, 1, 4], device=device), col, row, 32)
    assert rows.rows_descend
    assert (rows.ends, rows.most_edge_id) == ((0, 4), 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_nodes", "num_edges"), [(900, 1), (900, 700), (900, 5_000), (31, 900), (5, 6_000)]
)
def test_few_edges_are_sorted_as_many_are(device, num_nodes, num_edges, dtype):
    generator = torch.Generator().manual_seed(num_edges)
    row, col = torch.randint(num_nodes, (2, num_edges), generator=generator, dtype=dtype).to(device)
    both = torch.cat([row, col]), torch.cat([col, row])
    order = both[0].sort(stable=True).indices
    for edges in ((row, col), both, (both[0][order], both[1][order])):
        found = sort_edges(*edges, (num_nodes, num_nodes), 32)
        plain = inspect_edges(*edges, num_nodes, 32, square=True)
        rowptr, sorted_col, positions = compress(*edges, num_nodes, num_nodes)
        assert found[3:9] == plain[3:9]
        assert found.has_loops == plain.has_loops
        assert found.has_empty_rows == bool((rowptr.diff() == 0).any())
        assert torch.equal(found.rowptr, rowptr)
        assert torch.equal(found.inv_degree, rowptr.diff().float().reciprocal().nan_to_num(posinf=0))
        if found.order is not None:
            assert torch.equal(found.col, sorted_col)
            assert torch.equal(found.order, positions)
        assert (found.row_split is None) == (device == "cpu")
        if found.row_split is not None:
            expected = RowSplit.from_rowptr(rowptr.cpu(), 32)
            split, words = found.row_split, found.row_split.slices.tolist()
            assert sorted(words) == sorted(expected.slices.tolist())
            assert words == sorted(words)  # by first entry; empty slices with the same first entry by row
            assert split.num_slots == expected.num_slots
            assert split.split_row.tolist() == expected.split_row.tolist()
            assert split.split_ptr.tolist() == expected.split_ptr.tolist()
    if device == "cpu" or num_nodes != 5:  # otherwise rows are too long for the comparison of all their edges
        assert (found.order is None) == (num_edges == 1)


def test_few_edges_stay_if_they_may(device):
    row = torch.tensor([0, 0, 1, 1, 1], device=device)
    col = torch.tensor([2, 1, 0, 2, 1], device=device)
    found = sort_edges(row, col, (2, 3), 32)  # not symmetric
    assert found.order is None
    assert found.col.tolist() == col.tolist()
    assert sort_edges(row.flip(0), col, (2, 3), 32).order.tolist() == [4, 3, 2, 1, 0]
    assert sort_edges(row - 1, col, (2, 3), 32).most_row == 2**64 - 1
    assert sort_edges(row, col + 7, (2, 3), 32).most_col == 9


def test_structures_with_very_long_rows(device):
    row = torch.randint(3, (9_000,), generator=torch.Generator().manual_seed(0)).to(device)
    col = torch.arange(9_000, device=device).flip(0)
    adj = Adjacency.from_coo(row, col, (3, 9_000))
    expected = compress(row, col, 3, 9_000)
    for found, tensor in zip((adj.rowptr, adj.col, adj.edge_id), expected, strict=True):
        assert torch.equal(found, tensor)
    assert not adj.has_short_rows or device == "cpu"
    assert adj.row_split.num_slots > 0
