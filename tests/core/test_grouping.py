"""Row grouping against brute force: which rows share a window, what that saves, and that results stay."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import SETTINGS, TOLERANCE, edge_lists, relative_error
from hypothesis import given

from fastsparse_core import Adjacency, spmm
from fastsparse_core.formats import grouping
from fastsparse_core.formats.bsb import HEIGHT, QUAD, Bsb
from fastsparse_core.formats.grouping import choose_grouping, group_rows, vectors_per_window

_random = random.Random(0)
#: Odd factors of the hashes: of the first multiplication, then of the second.
FACTORS = [[2 * _random.randrange(2**20, 2**23) + 1 for _ in range(16)] for _ in range(2)]


def hash_of(column: int, which: int, bits: int) -> int:
    """One of sixteen permutations of [0, 2^bits); the upper 24 bits of it."""
    mask = 2**bits - 1
    for factors in FACTORS:
        column = column * factors[which] & mask
        column ^= column >> (bits + 1) // 2
    return column >> max(bits - 24, 0)


def similar_order(adj: Adjacency) -> list[int]:
    """The rows by cluster, as :func:`group_rows` documents it, row by row."""
    num_rows, bits = adj.num_dst, max((adj.num_src - 1).bit_length(), 1)
    rowptr, col = adj.rowptr.tolist(), adj.col.tolist()
    columns = [col[rowptr[row] : rowptr[row + 1]] for row in range(num_rows)]
    most = 2 ** min(bits, 24) - 1
    signature = [
        [min((hash_of(c, which, bits) for c in some), default=most) for which in range(16)]
        for some in columns
    ]
    free = 28 - min(bits, 24)
    num_bands = min(max(adj.num_edges // num_rows, 3), 8)
    key = [[sig[band] << free | sig[band + 1] % 2**free for band in range(num_bands)] for sig in signature]
    best = [(-1, row) for row in range(num_rows)]
    for band in range(num_bands):
        order = sorted(range(num_rows), key=lambda row: key[row][band])
        neighbours = list(itertools.pairwise(order))
        for row, other in neighbours + [pair[::-1] for pair in neighbours]:
            equal = sum(a % 256 == b % 256 for a, b in zip(signature[row], signature[other], strict=True))
            best[row] = max(best[row], (equal, other))
    linked = [best[row][0] >= 3 and len(columns[row]) > 0 for row in range(num_rows)]
    link = [best[row][1] if linked[row] else row for row in range(num_rows)]
    in_order = 2 * sum(linked[r] and abs(link[r] - r) <= 64 for r in range(num_rows)) > sum(linked)

    def root_of(row: int) -> int:
        for _ in range(32):
            if link[link[row]] == row and row < link[row]:
                return row
            row = link[row]
        return row

    rank = [(root_of(row), row if in_order else key[row][0], row) for row in range(num_rows)]
    least: dict[int, int] = {}
    for root, first_key, _ in sorted(rank):
        least.setdefault(root, first_key)
    return sorted(range(num_rows), key=lambda r: (least[rank[r][0]] if columns[r] else 2**31, rank[r]))


def order_of(adj: Adjacency) -> list[int]:
    """The rows as :func:`group_rows` orders them."""
    window_row = group_rows(adj)
    assert window_row is not None
    return window_row.flatten()[: adj.num_dst].tolist()


@given(edges=edge_lists())
@SETTINGS
def test_grouping_against_brute_force(device, edges):
    adj = edges.adjacency(device)
    if adj.num_edges == 0:
        assert order_of(adj) == list(range(adj.num_dst))
    else:
        assert order_of(adj) == similar_order(adj)


@pytest.mark.parametrize("num_src", [5000, 2**24 + 1, 2**31 - 1])
def test_grouping_of_long_rows_and_large_numbers(device, num_src):
    """Rows beyond what a GPU's lane hashes alone (1024 entries), in one block of threads and in two."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([0, 1, 1023, 1024, 1025, 4000, 2, 7, 0, 3, 30, 1500, 1, 1, 9, 16, 17, 2048, 5, 40])
    row = torch.arange(20).repeat_interleave(lengths)
    # Most columns are among few, so that long rows are similar.
    col = (torch.rand(row.numel(), generator=generator, dtype=torch.float64) ** 3 * num_src).long()
    adj = Adjacency.from_coo(row.to(device), col.to(device), (20, num_src))
    assert order_of(adj) == similar_order(adj)


@pytest.mark.parametrize("near", [False, True])
def test_grouping_follows_chains_of_links(device, near):
    """Hundreds of rows in clusters, in their own order where similar rows are near each other."""
    generator = torch.Generator().manual_seed(5)
    cluster = torch.arange(600) // 12
    if not near:
        cluster = cluster[torch.randperm(600, generator=generator)]
    drawn = torch.randint(0, 14, (600, 9), generator=generator)
    palette = torch.randint(0, 900, (50, 14), generator=generator)
    row = torch.arange(600)[:, None].expand_as(drawn)
    col = palette[cluster[:, None], drawn]
    adj = Adjacency.from_coo(row.flatten().to(device), col.flatten().to(device), (600, 900))
    assert order_of(adj) == similar_order(adj)


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
    assert vectors_per_window(adj, window_row).sum() < 0.6 * vectors_per_window(adj).sum()
    assert vectors_per_window(adj, window_row).sum() < 1.4 * 64 * 24


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
    # The last window is not full, so only the sample of the grouping contains it.
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


@pytest.mark.parametrize("pairs", [1, 200, 400, 600, 1400])
def test_grouping_splits_its_scratch_memory(device, monkeypatch, pairs):
    """In chunks of one, two, three and seven of the eight orders, with and without a rest."""
    generator = torch.Generator().manual_seed(3)
    row, col = torch.randint(0, 200, (2, 4000), generator=generator).to(device)
    adj = Adjacency.from_coo(row, col, (200, 200))
    whole = group_rows(adj)
    monkeypatch.setattr(grouping, "_PAIRS", pairs)
    assert torch.equal(group_rows(adj), whole)


@pytest.mark.parametrize("bits", [1, 2, 7, 12])
def test_hashes_are_permutations(bits):
    """Of the reference, which the kernels agree with."""
    for which in range(16):
        assert sorted(hash_of(column, which, bits) for column in range(2**bits)) == list(range(2**bits))


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
    assert vectors_per_window(adj, window_row).sum() / adj.num_edges <= most
    grouped = Bsb.from_csr(adj.row(), adj.col, adj.shape, window_row)
    assert grouped.num_vectors == vectors_per_window(adj, window_row).sum()
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
