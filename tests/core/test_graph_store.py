"""Batches of whole graphs from contiguous tensors, against the graphs one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from fastsparse_core import Adjacency, graph_store
from fastsparse_core import device as device_module
from fastsparse_core.graph_store import (
    BatchEdges,
    Content,
    Field,
    FieldKind,
    Fields,
    GraphStore,
    StoredEdges,
    drawn_batches,
    place_tensors,
    same_outline,
)

SIZES = torch.tensor([3, 0, 5, 1, 40, 2])
EDGES = torch.tensor([4, 0, 7, 0, 90, 3])
CHOSEN = [[0], [4, 2], [1], [5, 5, 0, 1, 3, 2, 4], [-1, -6], list(range(6)) * 30]


def parts(tensor, counts, dim=0):
    return tensor.split(counts.tolist(), dim)


@pytest.fixture
def store(device):
    return GraphStore(len(SIZES), torch.device(device, 0) if device == "cuda" else torch.device("cpu"))


def gather(store, index, *fields):
    for field in fields:
        if field.tensor is not None:
            (field.tensor,) = place_tensors([field.tensor], store.device)
    return [item.cpu() for item in Fields(fields, store.device).of(store.choose(index))]


@pytest.mark.parametrize("index", CHOSEN)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.float32),
        ((), torch.uint8),
        ((3,), torch.uint8),
        ((5,), torch.bfloat16),
        ((64,), torch.float32),
        ((2, 3), torch.float64),
        ((0,), torch.float32),
        ((1,), torch.complex64),
    ],
)
def test_rows(store, index, shape, dtype):
    nodes = store.add_counts(SIZES)
    rows = (torch.rand(int(SIZES.sum()), *shape) * 100).to(dtype)
    (got,) = gather(store, index, Field(rows, nodes))
    assert torch.equal(got, torch.cat([parts(rows, SIZES)[nth] for nth in index]))


@pytest.mark.parametrize("index", CHOSEN)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("added", [(1, 1), (1, 2), (2, 1)])
def test_rows_of_another_kind_are_counted_from_the_start_of_the_batch(store, index, dtype, added):
    assert [store.add_counts(SIZES), store.add_counts(EDGES)] == [1, 2]
    ends = torch.randint(50, (2, int(EDGES.sum())), dtype=dtype)
    kind = FieldKind.ADD_INT64 if dtype == torch.int64 else FieldKind.ADD_INT32
    (got,) = gather(store, index, Field(ends, 2, kind, added, dim=1))
    expected, before = [], torch.zeros(2, 1, dtype=dtype)
    for nth in index:
        expected.append(parts(ends, EDGES, 1)[nth] + before)
        before = before + torch.tensor([[(SIZES, EDGES)[which - 1][nth]] for which in added], dtype=dtype)
    assert torch.equal(got, torch.cat(expected, dim=1))


@pytest.mark.parametrize("index", CHOSEN)
def test_members_and_pointers(store, index):
    nodes = store.add_counts(SIZES)
    got = gather(store, index, Field(None, nodes, FieldKind.GRAPH), Field(None, nodes, FieldKind.FIRST))
    sizes = SIZES[torch.tensor(index)]
    assert torch.equal(got[0], torch.arange(len(index)).repeat_interleave(sizes))
    assert torch.equal(got[1], torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]))


def test_more_fields_than_a_launch_takes(store):
    nodes = store.add_counts(SIZES)
    tables = [torch.randn(int(SIZES.sum()), 2) for _ in range(90)]
    got = gather(store, [2, 0], *(Field(table, nodes) for table in tables))
    for table, rows in zip(tables, got, strict=True):
        assert torch.equal(rows, torch.cat([parts(table, SIZES)[nth] for nth in (2, 0)]))


def test_positions(store):
    chosen = store.choose([0, -1, 2], torch.tensor([4, 4, 1, 3]))
    assert chosen.source[0].tolist()[:3] == [4, 3, 1]
    for index, positions in (
        ([6], None),
        ([-7], None),
        ([2], torch.tensor([0, 1])),
        ([-3], torch.tensor([0, 1])),
    ):
        with pytest.raises(IndexError, match="expected positions below"):
            store.choose(index, positions)


def test_equal_pointers_have_one_number(store):
    assert store.add_counts(SIZES) == store.add_counts(SIZES.clone()) == 1
    assert store.add_counts(torch.ones(6, dtype=torch.int64)) == 0


def test_several_threads_give_the_same(store):
    if store.device.type == "cuda":
        pytest.skip("threads of the CPU")
    nodes = store.add_counts(SIZES)
    rows = torch.randn(int(SIZES.sum()), 512)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results += gather(store, list(range(6)) * 40, Field(rows, nodes))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("index", CHOSEN)
@pytest.mark.parametrize("kind", ["random", "ascending", "symmetric", "partly symmetric", "bipartite"])
@pytest.mark.parametrize("at_once", [2**24, 20])
def test_structures(store, index, kind, at_once, monkeypatch):
    monkeypatch.setattr("fastsparse_core.graph_store._ROWS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    sources = SIZES if kind != "bipartite" else SIZES * 2 + (SIZES > 0)
    graphs = []
    for nth, count in enumerate(EDGES.tolist()):
        ends = [torch.randint(max(int(of[nth]), 1), (count,), generator=generator) for of in (sources, SIZES)]
        edges = torch.stack(ends)
        if kind == "symmetric" or (kind == "partly symmetric" and nth < 3):
            edges = torch.cat([edges, edges.flip(0)], dim=1)
        if kind == "ascending":
            edges = edges[:, edges[1].argsort(stable=True)]
        graphs.append(edges)
    counts = torch.tensor([edges.size(1) for edges in graphs])
    first, second, of_edges = (store.add_counts(item) for item in (sources, SIZES, counts))
    field = Field(torch.cat(graphs, dim=1), of_edges, FieldKind.ADD_INT64, (first, second), dim=1)
    (edge_index,) = gather(store, index, field)
    stored = StoredEdges(store, field, first, second)
    assert stored.is_sorted == (kind == "ascending")
    found = BatchEdges(stored, store.choose(index))
    assert found.has_structure
    adj = found.adjacency
    assert adj.device == store.device
    shape = tuple(int(of[torch.tensor(index)].sum()) for of in (SIZES, sources))
    assert adj.shape == found.shape == shape
    expected = Adjacency.from_coo(edge_index[1].to(store.device), edge_index[0].to(store.device), shape)
    for one, other in ((adj, expected), (adj.t(), expected.t())):
        assert torch.equal(one.rowptr, other.rowptr)
        for mine in (one, other):
            order = torch.arange(mine.num_edges) if mine.edge_id is None else mine.edge_id.cpu().long()
            ends = edge_index if mine in (adj, expected) else edge_index.flip(0)
            assert torch.equal(ends[1][order], mine.row().cpu().long())
            assert torch.equal(ends[0][order], mine.col.cpu().long())
        for mine, its in (
            (one.inv_degree(), other.inv_degree()),
            (one.inv_sqrt_degree(loops=1), other.inv_sqrt_degree(loops=1)),
        ):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=0)  # a GPU has two square roots
        if store.device.type == "cuda":
            assert torch.equal(one.row_split.slices.sort(0).values, other.row_split.slices.sort(0).values)
    assert found.has_loops == bool(shape[0] == shape[1] and (edge_index[0] == edge_index[1]).any())


def test_edges_between_graphs_have_no_structure(store):
    nodes, of_edges = store.add_counts(SIZES), store.add_counts(torch.ones(6, dtype=torch.int64))
    edges = torch.zeros(2, 6, dtype=torch.int64, device=store.device)  # the second graph has no node
    field = Field(edges, of_edges, FieldKind.ADD_INT64, (nodes, nodes), dim=1)
    stored = StoredEdges(store, field, nodes, nodes)
    assert not stored.has_structure
    assert not stored.is_sorted


SAMPLERS = {
    "in order": lambda items, generator: SequentialSampler(items),
    "shuffled": lambda items, generator: RandomSampler(items, generator=generator),
    "with replacement": lambda items, generator: RandomSampler(items, True, generator=generator),
    "fewer": lambda items, generator: RandomSampler(items, num_samples=7, generator=generator),
    "a subset": lambda items, generator: SubsetRandomSampler([3, 1, 2, 0, 8], generator=generator),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("count", "size"), [(10, 4), (12, 4), (3, 4), (9, 1)])
@pytest.mark.parametrize("own_generator", [True, False])
def test_batches_are_drawn_as_pytorch_draws_them(name, drop_last, count, size, own_generator):
    """Epoch for epoch, with the generators left as PyTorch leaves them, also behind each batch."""
    found = []
    for draw in (iter, lambda batches: drawn_batches(batches, torch.device("cpu"))):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(2) if own_generator else None
        order = SAMPLERS[name](range(max(count, 9) if name == "a subset" else count), generator)
        batches = BatchSampler(order, size, drop_last)
        drawn = []
        for _ in range(3):
            drawn += [(list(map(int, batch)), torch.randint(99, (1,)).item()) for batch in draw(batches)]
            drawn.append(torch.randint(99, (2,), generator=generator).tolist())
        found.append(drawn)
    assert found[0] == found[1]


def test_samplers_of_other_kinds_draw_themselves():
    assert list(drawn_batches([[1, 2], [0]], torch.device("cpu"))) == [[1, 2], [0]]
    assert list(drawn_batches(BatchSampler([4, 2, 3], 2, False), torch.device("cpu"))) == [[4, 2], [3]]


def test_positions_may_be_a_tensor(store):
    nodes = store.add_counts(SIZES)
    rows = torch.randn(int(SIZES.sum()), 3)
    expected = gather(store, [4, 2, -1], Field(rows, nodes))
    ids = torch.tensor([4, 2, -1])
    strided = torch.stack([ids, torch.zeros_like(ids)], 1)[:, 0]
    for given in (ids, ids.int(), strided):
        assert torch.equal(gather(store, given, Field(rows, nodes))[0], expected[0])
    with pytest.raises(IndexError, match="below 6, got 6"):
        store.choose(torch.tensor([0, 6]))


def test_changes_of_a_dataset_are_detected(monkeypatch):
    """Other objects are always detected, and writes once their tensor is checked: some in each call."""
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0  # for every group
        return now

    monkeypatch.setattr(graph_store, "perf_counter", clock)
    monkeypatch.setattr(graph_store, "_VERSIONS_AT_ONCE", 4)
    tensors = [torch.zeros(2) for _ in range(30)]
    mappings = [{"x": tensor, "name": "a"} for tensor in tensors]
    content = Content(mappings, tensors)
    assert all(content.is_as_it_was() for _ in range(20))
    for nth in range(30):
        tensors[nth] += 1
        content_now = [content.is_as_it_was() for _ in range(9)]
        assert content_now.count(False) == 1, nth
        content = Content(mappings, tensors)
        tensors[nth] += 1
        now += 9 / graph_store._SHARE_OF_CHECKS
        assert not content.is_as_it_was(), nth
        content = Content(mappings, tensors)
    for change in (
        lambda: mappings[7].update(name="b"),
        lambda: mappings[8].update(more=1),
        lambda: mappings[29].pop("name"),
        lambda: mappings[0].update(x=tensors[0].clone()),
    ):
        content = Content(mappings, tensors)
        change()
        assert not content.is_as_it_was()
        assert not content.is_as_it_was()
    assert Content([], []).is_as_it_was()


def test_outlines_are_the_same_for_the_same_objects():
    items = [object() for _ in range(3)]
    assert same_outline((items, [[1]]), (list(items), [[1]]))
    assert not same_outline((items, []), (items[:2], []))
    assert not same_outline((items[:2], []), (items, []))
    assert not same_outline(([*items[:2], object()], []), (items, []))
    assert not same_outline((items, [[1]]), (items, [[2]]))
    assert not same_outline(([[1]], []), ([[1]], []))


GROUP = "sys/fs/cgroup"
V2 = {"proc/self/cgroup": "0::/job/step\n", f"{GROUP}/job/step/memory.max": "max\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/7f\n1:name=systemd:/\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * 2**20),  # all that is free on the machine
        (V2, 8 * 2**20),
        (V2 | {f"{GROUP}/memory.max": "7000\n", f"{GROUP}/memory.current": "3000\n"}, 4000),
        (V2 | {f"{GROUP}/job/memory.max": "7000\n", f"{GROUP}/job/memory.current": "8000\n"}, 0),
        (
            V2
            | {f"{GROUP}/job/step/memory.max": "7000\n", f"{GROUP}/job/step/memory.current": "3000\n"}
            | {f"{GROUP}/job/step/memory.stat": "anon 10\ninactive_file 2000\nactive_file 20\n"},
            6000,
        ),
        (V1 | {f"{GROUP}/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8 * 2**20),
        (
            V1
            | {f"{GROUP}/memory/memory.limit_in_bytes": "7000\n"}
            | {f"{GROUP}/memory/memory.usage_in_bytes": "3000\n"}
            | {f"{GROUP}/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 2000\n"},
            6000,
        ),
    ],
)
def test_free_memory_respects_the_limits_of_control_groups(files, free, tmp_path, monkeypatch):
    meminfo = {"proc/meminfo": "MemTotal: 16384 kB\nMemFree: 4096 kB\nMemAvailable: 8192 kB\n"}
    for name, text in (meminfo | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device_module, "_ROOT", str(tmp_path))
    assert device_module.free_host_memory() == free


def test_unknown_free_memory_is_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(device_module, "_ROOT", str(tmp_path))
    assert device_module.free_host_memory() == math.inf
