"""Binary sparse blocks, ME-BCRS, row grouping and format statistics against brute force."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import TOLERANCE, EdgeList, edge_lists, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsparse_core import Adjacency, spmm
from fastsparse_core.formats import grouping
from fastsparse_core.formats.bsb import BLOCK, HEIGHT, QUAD, Bsb, vectors_together
from fastsparse_core.formats.grouping import choose_grouping, count_vectors, group_rows
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.inspection import inspect_edges, inspect_rows
from fastsparse_core.formats.me_bcrs import MeBcrs
from fastsparse_core.formats.row_split import RowSplit, split_rows
from fastsparse_core.formats.statistics import statistics

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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

    Entries of a column go by row; each starts a vector unless its row lies behind the last one's.
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
        ValueError, match=r"num_src: expected at most 2\^24 .* got 16777217; .* stays with csr"
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
    assert sum("got 3; it stays with the CSR" in record.message for record in caplog.records) == 1


def test_bsb_of_many_rows_and_columns(device):
    """Windows and columns that do not fit into 32 bits together."""
    shape, generator = (2**19 + 3, 2**20 + 5), torch.Generator().manual_seed(4)
    row = torch.randint(0, shape[0], (5000,), generator=generator)
    row[:2500] = row[0] // HEIGHT * HEIGHT + row[:2500] % 3
    col = torch.randint(0, shape[1], (5000,), generator=generator)
    col[:2500] = col[:2500] % 40 + 2**20 - 40
    adj = Adjacency.from_coo(row.to(device), col.to(device), shape)
    bsb = bsb_of(adj, None)
    assert bsb.num_vectors == count_vectors(adj) == sum(vectors_by_hand(adj, None, HEIGHT))
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


@given(
    edges=edge_lists(),
    kind=st.sampled_from(GROUPINGS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    valued=st.booleans(),
)
@SETTINGS
def test_me_bcrs_is_the_matrix(device, edges, kind, dtype, valued):
    adj = edges.adjacency(device)
    value = torch.arange(1.0, edges.row.numel() + 1) % 16 if valued else None
    stored = MeBcrs.from_adjacency(
        adj, None if value is None else value.to(device), dtype, window_row=window_rows(adj, kind)
    )
    assert torch.equal(stored.to_dense().cpu(), dense_of(edges, value))
    assert stored.value.dtype == dtype
    assert stored.value.numel() == HEIGHT * stored.num_vectors
    assert stored.num_vectors == count_vectors(adj, stored.window_row)
    assert sum(stored.memory_usage().values()) == sum(t.nbytes for t in stored.tensors().values())


def test_me_bcrs_stores_blocks_row_by_row(device):
    """Figure 10 of the paper, with blocks of 4: a whole block and a residue of two vectors."""
    row = torch.tensor([0, 0, 1, 1, 1, 7])
    col = torch.tensor([0, 5, 1, 2, 9, 3])
    adj = Adjacency.from_coo(row.to(device), col.to(device), (8, 10))
    stored = MeBcrs.from_adjacency(adj, torch.arange(1.0, 7.0, device=device), torch.float32)
    assert stored.block == 4
    assert stored.col.tolist() == [0, 1, 2, 3, 5, 9]
    block, residue = stored.value[:32].view(8, 4), stored.value[32:].view(8, 2)
    assert block[0].tolist() == [1, 0, 0, 0]
    assert block[1].tolist() == [0, 3, 4, 0]
    assert block[7].tolist() == [0, 0, 0, 6]
    assert residue[:2].tolist() == [[2, 0], [0, 5]]
    assert int((stored.value != 0).sum()) == 6


def test_me_bcrs_refuses_what_it_cannot_hold(device):
    adj = Adjacency.from_coo(
        torch.zeros(3, dtype=torch.long, device=device), torch.arange(3).to(device), (1, 3)
    )
    with pytest.raises(TypeError, match="dtype: expected float16"):
        MeBcrs.from_adjacency(adj, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"value: expected shape \(3,\)"):
        MeBcrs.from_adjacency(adj, torch.ones(2, device=device))


@given(edges=edge_lists(), kind=st.sampled_from(GROUPINGS))
@SETTINGS
def test_statistics_against_brute_force(device, edges, kind):
    adj = edges.adjacency(device)
    window_row = window_rows(adj, kind)
    found = statistics(adj, window_row)
    low, high = (vectors_by_hand(adj, window_row, height) for height in (8, 16))
    assert found.num_edges == adj.num_edges
    assert found.vectors_8x1 == sum(low) == count_vectors(adj, window_row)
    assert found.vectors_16x1 == sum(high) == count_vectors(adj, window_row, height=16)
    assert found.zeros_8x1 == 8 * sum(low) - adj.num_edges
    assert found.zeros_16x1 == 16 * sum(high) - adj.num_edges
    assert found.mma_8x1 == sum(math.ceil(n / 16) for n in low)
    assert found.mma_16x1 == 2 * sum(math.ceil(n / 16) for n in high)
    assert found.vectors_per_edge_8x1 == pytest.approx(sum(low) / max(adj.num_edges, 1))
    assert found.vectors_per_edge_16x1 == pytest.approx(sum(high) / max(adj.num_edges, 1))

    blocks = Bsb.from_csr(adj.row(), adj.col, adj.shape, window_row)
    assert blocks.num_vectors == found.vectors_8x1
    assert blocks.num_blocks == found.mma_8x1
    assert sum(blocks.memory_usage().values()) == found.bsb_bytes
    # The tensors hold 64-bit pointers, the paper's formats 32-bit ones.
    tensors = MeBcrs.from_adjacency(adj, window_row=window_row).tensors()
    pointers = tensors.pop("window_ptr")
    assert found.me_bcrs_bytes == sum(tensor.nbytes for tensor in tensors.values()) + pointers.nbytes // 2
    indices = 0 if window_row is None else window_row.nbytes
    padded = sum(8 * math.ceil(n / 8) for n in low)
    assert found.sr_bcrs_bytes == 8 * len(low) + padded * (4 + 8 * 2) + indices
    assert found.csr_bytes == 4 * (adj.num_dst + 1) + adj.num_edges * (4 + 2)


@given(edges=edge_lists())
@SETTINGS
def test_grouping_is_a_permutation(device, edges):
    adj = edges.adjacency(device)
    window_row = group_rows(adj)
    assert window_row is not None
    assert window_row.dtype == torch.int32
    assert window_row.shape == (math.ceil(adj.num_dst / HEIGHT), HEIGHT)
    rows = window_row.flatten()
    assert torch.equal(rows[: adj.num_dst].sort().values.cpu(), torch.arange(adj.num_dst, dtype=torch.int32))
    assert bool((rows[adj.num_dst :] == -1).all())
    empty = (adj.in_degree() == 0)[rows[: adj.num_dst].long()]
    assert torch.equal(empty, empty.sort().values), "rows without edges come last"
    assert torch.equal(group_rows(edges.adjacency(device)), window_row), "deterministic"
    assert torch.equal(group_rows(edges.adjacency("cpu")), window_row.cpu()), "the same on every device"
    assert group_rows(adj, "none") is None
    chosen = group_rows(adj, "auto")
    assert chosen is None or torch.equal(chosen, window_row)


def test_grouping_refuses_an_unknown_method(device):
    adj = Adjacency.from_coo(torch.tensor([0], device=device), torch.tensor([0], device=device), (1, 1))
    with pytest.raises(ValueError, match="group_rows: expected 'auto', 'none' or 'minhash', got 'louvain'"):
        group_rows(adj, "louvain")


@pytest.mark.parametrize("num_src", [512, 4096])
def test_grouping_finds_shuffled_communities(device, num_src):
    """Rows that drew their columns from the same 24 share windows again, in a rectangular structure."""
    generator = torch.Generator().manual_seed(1)
    community = torch.randperm(512, generator=generator) // 32
    drawn = torch.rand(512, 24, generator=generator).argsort(1)[:, :16]
    palette = torch.stack([torch.randperm(num_src, generator=generator)[:24] for _ in range(16)])
    col = palette[community][torch.arange(512)[:, None], drawn]
    row = torch.arange(512)[:, None].expand_as(col)
    adj = Adjacency.from_coo(row.flatten().to(device), col.flatten().to(device), (512, num_src))
    window_row = choose_grouping(adj)
    assert window_row is not None
    assert count_vectors(adj, window_row) < 0.6 * count_vectors(adj)
    assert count_vectors(adj, window_row) < 1.4 * 64 * 24


def shuffled_communities(device: str, group_rows: str, *, symmetric: bool = False) -> Adjacency:
    """512 rows in shuffled communities of 32, which draw 16 of 24 columns."""
    generator = torch.Generator().manual_seed(1)
    community = torch.randperm(512, generator=generator) // 32
    drawn = torch.rand(512, 24, generator=generator).argsort(1)[:, :16]
    palette = torch.stack([torch.randperm(512, generator=generator)[:24] for _ in range(16)])
    col = palette[community][torch.arange(512)[:, None], drawn].flatten()
    row = torch.arange(512).repeat_interleave(16)
    if symmetric:
        row, col = torch.cat([row, col]), torch.cat([col, row])
    return Adjacency.from_coo(row.to(device), col.to(device), (512, 512), group_rows=group_rows)


@pytest.mark.parametrize("symmetric", [False, True])
def test_adjacency_groups_its_blocks(device, symmetric):
    plain, auto, always = (
        shuffled_communities(device, method, symmetric=symmetric) for method in ("none", "auto", "minhash")
    )
    assert plain.bsb.window_row is None
    assert auto.bsb.num_vectors < 0.8 * plain.bsb.num_vectors
    assert auto.bsb.window_row is not None
    assert torch.equal(auto.bsb.window_row, always.bsb.window_row)
    assert torch.equal(auto.bsb.to_dense(), plain.bsb.to_dense())
    assert "bsb.window_row" in auto.memory_usage()
    assert auto.is_symmetric == symmetric
    assert (auto.t().bsb is auto.bsb) == symmetric
    assert torch.equal(auto.t().bsb.to_dense(), plain.bsb.to_dense().t())
    assert plain.t().bsb.window_row is None


def test_grouping_survives_pickling_moving_and_transposing(device):
    adj = shuffled_communities(device, "none")
    for copy in (pickle.loads(pickle.dumps(adj)), adj.to("cpu"), adj.t(), adj.t().t()):
        assert copy.group_rows == "none"
        assert copy.bsb.window_row is None
    merged = Adjacency.from_coo(adj.row(), adj.col, adj.shape, duplicates="sum", group_rows="minhash")
    by_row = Adjacency.from_csr(adj.rowptr, adj.col, adj.shape, group_rows="minhash")
    by_column = Adjacency.from_csc(adj.t().rowptr, adj.t().col, adj.shape, group_rows="minhash")
    for built in (merged, by_row, by_column):
        assert torch.equal(built.bsb.window_row, merged.bsb.window_row)
    with pytest.raises(ValueError, match="group_rows: expected 'auto', 'none' or 'minhash', got 'all'"):
        shuffled_communities(device, "all")
    with pytest.raises(ValueError, match="group_rows: expected 'auto', 'none' or 'minhash', got 'all'"):
        Adjacency.from_csr(adj.rowptr, adj.col, adj.shape, group_rows="all")


def test_autocast_does_not_round_hashes(device):
    adj, other = (shuffled_communities(device, "minhash") for _ in range(2))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert adj.bsb.window_row is not None
    assert torch.equal(adj.bsb.window_row, other.bsb.window_row)


def test_no_memory_to_group_leaves_the_natural_order(device, monkeypatch, caplog):
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(grouping, "_similar_order", fail)
    adj = shuffled_communities(device, "auto")
    assert adj.try_bsb()
    assert adj.bsb.window_row is None
    assert "not enough memory to group similar rows" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_grouped_products_equal_plain_ones(valued, symmetric, dtype):
    """Forward and backward: only the order of the sums differs."""
    results = []
    for method in ("none", "minhash"):
        adj = shuffled_communities("cuda", method, symmetric=symmetric)
        generator = torch.Generator("cuda").manual_seed(5)
        x = torch.randn(512, 64, generator=generator, device="cuda").to(dtype).requires_grad_()
        value = torch.randn(adj.num_values, generator=generator, device="cuda").to(dtype).requires_grad_()
        out = spmm(adj, x, value if valued else None, algorithm="flashsparse")
        out.backward(torch.randn(512, 64, generator=generator, device="cuda").to(dtype))
        assert (adj.bsb.window_row is None) == (method == "none")
        results.append([out.detach(), x.grad] + ([value.grad] if valued else []))
    for plain, grouped in zip(*results, strict=True):
        assert relative_error(grouped, plain.double()) <= TOLERANCE[dtype]


def test_natural_order_is_kept_where_it_is_good(device):
    """A band matrix: consecutive rows share all they can; and nothing can be shared in an identity."""
    row = torch.arange(4000).repeat_interleave(9)
    col = (row + torch.arange(-4, 5).repeat(4000)).clamp(0, 3999)
    for edges in ((row, col), (torch.arange(100), torch.arange(100)), (torch.empty(0).long(),) * 2):
        adj = Adjacency.from_coo(edges[0].to(device), edges[1].to(device), (4000, 4000), duplicates="sum")
        assert choose_grouping(adj) is None


def test_large_structures_are_judged_by_a_sample(device, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    # The last window is not full: only the grouping's sample has it.
    row = torch.arange(4099).repeat_interleave(12)
    shuffled = torch.randperm(4099, generator=generator)
    col = (shuffled[row] // 16 * 16 + torch.randint(0, 16, row.shape, generator=generator)).clamp(max=4098)
    adj = Adjacency.from_coo(row.to(device), col.to(device), (4099, 4099))
    full = choose_grouping(adj)
    monkeypatch.setattr(grouping, "_SAMPLE", 64)
    sampled = choose_grouping(adj)
    assert full is not None
    assert sampled is not None
    assert torch.equal(full, sampled)


def test_grouping_splits_its_scratch_memory(device, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    row, col = torch.randint(0, 200, (2, 4000), generator=generator).to(device)
    adj = Adjacency.from_coo(row, col, (200, 200))
    whole = group_rows(adj)
    monkeypatch.setattr(grouping, "_PAIRS", 600)
    assert torch.equal(group_rows(adj), whole)


@given(edges=edge_lists())
@SETTINGS
def test_columns_hash_to_different_numbers(edges):
    hashes, bits = grouping._column_hashes(edges.shape[1], torch.device("cpu"))
    assert bool((hashes < 2**bits).all())
    for column in hashes.t():
        assert column.unique().numel() == edges.shape[1]


def real_graph(folder: Path, name: str) -> Adjacency:
    """The graph made symmetric, without repeated edges and self loops."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"needs {path.name} in FASTSPARSE_DATA")
    with np.load(path, allow_pickle=False) as archive:
        num_nodes = int(archive["num_nodes"])
        ends = torch.from_numpy(archive["edge_index"].astype(np.int64))
    ends = ends[:, ends[0] != ends[1]]
    both = torch.cat([ends, ends.flip(0)], 1)
    return Adjacency.from_coo(both[0], both[1], (num_nodes, num_nodes), duplicates="sum")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("facebook", 0.60),
        ("coauthor_physics", 0.75),
        ("amazon_computers", 0.68),
        ("fb_newsites", 0.72),
        ("github", 0.86),
    ],
)
def test_grouping_saves_vectors_on_real_graphs(device, data_folder, name, most):
    adj = real_graph(data_folder, name).to(device)
    window_row = choose_grouping(adj)
    assert window_row is not None
    assert count_vectors(adj, window_row) / adj.num_edges <= most
    grouped = bsb_of(adj, window_row)
    assert grouped.num_vectors == count_vectors(adj, window_row)
    x = torch.randn(adj.num_src, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        device
    )
    vector, bit = grouped.bits()
    row = (torch.searchsorted(grouped.window_ptr.long(), vector // QUAD, right=True) - 1) * HEIGHT + bit
    product = torch.zeros(adj.num_dst, 3, dtype=torch.float64, device=device)
    product.index_add_(0, window_row.flatten()[row].long(), x[grouped.col.flatten()[vector].long()])
    assert torch.allclose(product, spmm(adj, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["delaunay_n15", "minesweeper"])
def test_grouping_leaves_good_real_graphs_alone(device, data_folder, name):
    assert choose_grouping(real_graph(data_folder, name).to(device)) is None


@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 80), st.sampled_from([63, 64, 65, 255, 256, 257, 320, 512, 1000])),
        max_size=40,
    )
)
@SETTINGS
def test_hybrid_rows_against_brute_force(device, lengths):
    """Long items in the order of rows, then short ones; what several share has slots in that order."""
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
    rows = HybridRows.from_rowptr(rowptr)
    words = rows.slices.view(torch.int32)
    slices = zip(rows.slices[:, 0].tolist(), words[:, 2].tolist(), words[:, 3].tolist(), strict=True)
    assert list(slices) == longs + shorts
    assert rows.num_long == len(longs)
    assert rows.split_row.tolist() == split_row
    assert rows.split_ptr.tolist() == split_ptr
    assert rows.num_slots == split_ptr[-1]
    assert rows.slices.device == rowptr.device


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
