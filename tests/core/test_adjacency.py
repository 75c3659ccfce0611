"""Construction, validation, transposition, self loops, duplicates, pickling and memory of Adjacency."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing
from cases import EdgeList, Operations, edge_lists
from hypothesis import HealthCheck, given, settings

from fastsparse_core import Adjacency, spmm
from fastsparse_core.formats.compress import transpose
from fastsparse_core.formats.row_split import split_rows, unsplit_rows
from fastsparse_core.fused.aggregate_transform import graph_convolution
from fastsparse_core.structure import adjacency as adjacency_module
from fastsparse_core.structure import row_formats
from fastsparse_core.structure.segments import Segments

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def stored_edges(adj: Adjacency) -> list[tuple[int, int, int]]:
    """(row, col, caller's position) in stored order."""
    position = torch.arange(adj.num_edges) if adj.edge_id is None else adj.edge_id
    return list(zip(adj.row().tolist(), adj.col.tolist(), position.tolist(), strict=True))


def given_edges(edges: EdgeList) -> list[tuple[int, int, int]]:
    return list(zip(edges.row.tolist(), edges.col.tolist(), range(edges.row.numel()), strict=True))


@given(edges=edge_lists())
@SETTINGS
def test_from_coo_sorts_stably(device, edges):
    adj = edges.adjacency(device)
    assert adj.rowptr.dtype == torch.int64
    assert adj.col.dtype == torch.int32
    come_sorted = bool((edges.row.diff() >= 0).all())
    stored = stored_edges(adj)
    assert stored == sorted(given_edges(edges)) or (come_sorted and stored == given_edges(edges))
    assert adj.in_degree().tolist() == torch.bincount(edges.row, minlength=edges.shape[0]).tolist()
    assert adj.out_degree().tolist() == torch.bincount(edges.col, minlength=edges.shape[1]).tolist()


@given(edges=edge_lists())
@SETTINGS
def test_transpose(device, edges):
    adj = edges.adjacency(device)
    transposed = adj.t()
    assert transposed.shape == adj.shape[::-1]
    assert sorted((c, r, e) for r, c, e in stored_edges(transposed)) == sorted(given_edges(edges))
    assert transposed.t() is adj
    assert adj.t() is transposed
    assert adj.out_degree().tolist() == transposed.in_degree().tolist()


@given(edges=edge_lists())
@SETTINGS
def test_from_csr_and_csc(device, edges):
    adj = edges.adjacency(device)
    again = Adjacency.from_csr(adj.rowptr.int(), adj.col.long(), adj.shape, edge_id=adj.edge_id)
    assert stored_edges(again) == stored_edges(adj)
    transposed = adj.t()
    columns = Adjacency.from_csc(transposed.rowptr, transposed.col, adj.shape, edge_id=transposed.edge_id)
    assert sorted(stored_edges(columns)) == sorted(stored_edges(adj))


@pytest.mark.parametrize("self_loops", ["keep", "append", "replace"])
@pytest.mark.parametrize(("nodes", "pairs"), [(1, 3), (5, 40), (2000, 6000)])
def test_ids_of_a_symmetric_transpose_are_those_of_a_sort(device, nodes, pairs, self_loops):
    ends = torch.randint(nodes, (2, pairs), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(2 * pairs, generator=torch.Generator().manual_seed(1))
    row, col = torch.cat([ends, ends.flip(0)], 1)[:, order].to(device)
    ids = []
    for valued in (True, False):
        adj = Adjacency.from_coo(row, col, (nodes, nodes), self_loops=self_loops)
        assert adj.symmetric
        ids.append(adj.t(valued=valued).edge_id)
    sorted_ids = transpose(adj.rowptr, adj.col, nodes)[2]
    if adj.edge_id is not None:
        sorted_ids = adj.edge_id.index_select(0, sorted_ids)
    for found in ids:
        assert found.dtype == sorted_ids.dtype
        assert torch.equal(found, sorted_ids)


def test_the_first_work_list_stays_the_first():
    adj = Adjacency.from_csr(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 0, 1, 2]), (3, 3))
    adj.has_sorted_slices = False  # as on CUDA, where no row is cut
    first = unsplit_rows(torch.zeros(3, 2, dtype=torch.int64))
    adj._of_rows.results["row_split"] = first
    assert adj.first_row_split is first
    assert adj.first_csr_structure is adj.csr_structure
    before = adj.csr_structure
    adj.sort_slices()
    assert adj.row_split is not first
    assert adj.first_row_split is first
    assert adj.first_csr_structure is adj.first_csr_structure is not adj.csr_structure
    assert adj.csr_structure is not before


def test_symmetric_structure_shares_memory_with_its_transpose(device):
    row = torch.tensor([0, 1, 1, 2, 3, 3], device=device)
    col = torch.tensor([1, 0, 2, 1, 3, 3], device=device)
    adj = Adjacency.from_coo(row, col, (4, 4))
    assert adj.is_symmetric
    assert adj.t().col.data_ptr() == adj.col.data_ptr()
    assert adj.t().row() is adj.row()
    # On CUDA, the conversion also makes the work list of the rows.
    before = sum(size for name, size in adj.memory_usage().items() if not name.startswith("row_split"))
    kept = (adj.rowptr, adj.col, adj.row(), adj.inv_degree(), adj.inv_sqrt_degree(loops=1))
    assert before == sum(t.nbytes for t in kept)
    assert adj.t().edge_id.tolist() == [1, 0, 3, 2, 4, 5]  # computed at the first read, then cached
    assert adj.memory_usage()["t.edge_id"] == adj.t().edge_id.nbytes
    assert not Adjacency.from_coo(row[:3], col[:3], (4, 4)).is_symmetric
    assert not Adjacency.from_coo(row, col, (4, 5)).is_symmetric


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_of_edges_without_values_keep_nothing_of_the_edges_but_columns(symmetric):
    edges = torch.randint(0, 300, (2, 13_000), generator=torch.Generator().manual_seed(0))
    edges = torch.cat([edges, edges.flip(0)], 1) if symmetric else edges
    edges = edges[:, (edges[0] * 300 + edges[1]).argsort()]
    adj = Adjacency.from_coo(*edges, (300, 300))
    x = torch.randn(300, 8, requires_grad=True)
    adj.usage.scattered = None  # otherwise the first gradients need no transpose
    for reduce in ("sum", "mean"):
        spmm(adj, x, reduce=reduce).sum().backward()
    weight = torch.randn(8, 4, requires_grad=True)
    graph_convolution(adj, x, weight, None, out_by_in=False, aggregate_first=False).sum().backward()
    assert adj.has_transpose != symmetric  # a symmetric structure is its own transpose
    assert sum(adj.memory_usage().values()) <= (4.3 if symmetric else 8.6) * adj.num_edges


@pytest.mark.parametrize("has_ids", [True, False])
@given(edges=edge_lists())
@SETTINGS
def test_order_of_a_transpose_is_found_when_it_is_asked_for(device, edges, has_ids):
    def build() -> Adjacency:
        adj = edges.adjacency(device)
        return adj if has_ids else Adjacency.from_csr(adj.rowptr, adj.col, adj.shape)

    expected, adj = build().t(), build()
    later = adj.t(valued=False)
    back = pickle.loads(pickle.dumps(later))
    del adj  # the later structure keeps what it needs
    for found in (later, back):
        assert torch.equal(found.edge_id, expected.edge_id)
    assert stored_edges(later.t()) == stored_edges(expected.t())


@pytest.mark.parametrize(
    ("order", "valued", "most"),
    [("random", True, 11), ("sorted", True, 10), ("sorted", False, 9), ("symmetric", False, 6)],
)
def test_a_new_structure_and_its_transpose_take_few_operations(device, order, valued, most):
    """Operations add host time to a batch that is used once: only allocations and one kernel are left."""
    edges = torch.randint(0, 300, (2, 2000), generator=torch.Generator().manual_seed(0))
    edges = torch.cat([edges, edges.flip(0)], 1) if order == "symmetric" else edges
    edges = edges[:, edges[0].argsort()] if order == "sorted" else edges
    row, col = edges.to(device)
    with Operations() as seen:
        adj = Adjacency.from_coo(row, col, (300, 300))
        transposed = adj.t(valued=valued)
    assert (transposed.col is adj.col) == (order == "symmetric")
    assert len(seen.names) <= most
    assert set(seen.names) <= {"empty.memory_format", "split.Tensor", "index_select.default"}


@pytest.mark.parametrize("copy", [True, False])
def test_csr_of_the_caller_is_copied_unless_that_is_declined(device, copy):
    rowptr = torch.tensor([0, 2, 3], device=device)
    col = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    adj = Adjacency.from_csr(rowptr, col, (2, 2), copy=copy)
    assert (adj.rowptr.data_ptr() == rowptr.data_ptr()) == (not copy)
    assert (adj.col.data_ptr() == col.data_ptr()) == (not copy)
    again = Adjacency.from_csr(rowptr.int(), col.long(), (2, 2), copy=copy)  # other dtypes are converted
    assert stored_edges(again) == stored_edges(adj) == [(0, 1, 0), (0, 0, 1), (1, 1, 2)]
    with pytest.raises(ValueError, match="col: expected indices"):
        Adjacency.from_csr(rowptr, col, (2, 1), copy=copy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_sorted_by_row_are_taken_as_they_are(device, dtype, monkeypatch):
    row = torch.tensor([0, 0, 2, 2, 2], dtype=dtype, device=device)
    col = torch.tensor([5, 1, 3, 0, 3], dtype=dtype, device=device)
    expected = Adjacency.from_coo(row.flip(0), col.flip(0), (4, 6))
    monkeypatch.setattr("fastsparse_core.structure.construction.compress", None)  # nothing is sorted
    adj = Adjacency.from_coo(row, col, (4, 6))
    assert adj.edge_id is None
    assert adj.rowptr.tolist() == [0, 2, 2, 5, 5] == expected.rowptr.tolist()
    assert adj.col.tolist() == col.tolist()
    assert adj.inv_degree().tolist() == expected.inv_degree().tolist()
    assert adj.has_empty_rows()
    assert adj.inv_degree().tolist() == [0.5, 0, pytest.approx(1 / 3), 0]
    row[0] = 1  # the caller's tensors are copied
    col[0] = 0
    assert adj.col.tolist()[0] == 5


def test_edges_come_sorted_or_otherwise(device):
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(50, (2, 400), generator=generator)
    hub = torch.cat([row, row.new_full((700,), 7)])  # a row that is cut into slices
    unsorted = [(row, col), (hub, torch.arange(1100) % 50)]
    by_row = [(ends[0].sort().values, ends[1]) for ends in unsorted]
    for ends in (*by_row, *unsorted):
        given = [each.to(device) for each in ends]
        adj, expected = Adjacency.from_coo(*given, (50, 50)), Adjacency.from_coo(*ends, (50, 50))
        assert stored_edges(adj.cpu()) == stored_edges(expected)
        assert stored_edges(adj.t().cpu()) == stored_edges(expected.t())
        x = torch.randn(50, 3, generator=generator)
        torch.testing.assert_close(spmm(adj, x.to(device)).cpu(), spmm(expected, x))
        assert adj.has_short_rows == expected.has_short_rows
    with pytest.raises(ValueError, match="col: expected indices"):
        Adjacency.from_coo(given[0], given[1] + 40, (50, 50))
    with pytest.raises(ValueError, match="row: expected indices"):
        Adjacency.from_coo(given[0] - 1, given[1], (50, 50))


def test_sorted_rows_of_a_symmetric_structure_are_sorted_by_column_too(device):
    row = torch.tensor([0, 0, 1, 2], device=device)
    adj = Adjacency.from_coo(row, torch.tensor([2, 1, 0, 0], device=device), (3, 3))
    assert adj.col.tolist() == [1, 2, 0, 0]
    assert adj.edge_id.tolist() == [1, 0, 2, 3]
    assert adj.is_symmetric


def test_a_transpose_that_must_differ_is_not_compared(device, monkeypatch):
    row = torch.tensor([2, 0, 1], device=device)
    col = torch.tensor([0, 1, 1], device=device)
    for adj in (
        Adjacency.from_coo(row, col, (3, 3)),
        Adjacency.from_coo(*row.sort(), (3, 3)),
        Adjacency.from_coo(row, col, (3, 3), self_loops="replace"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "equal", None)
            assert not adj.is_symmetric


def test_memory_usage_counts_what_layers_keep():
    adj = Adjacency.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), (2, 3))
    before = sum(adj.memory_usage().values())
    pair = adj.derived("pair", lambda: (torch.ones(5), torch.ones(7)))
    kept = adj.derived(
        "structure",
        lambda: Adjacency.from_csr(adj.rowptr, torch.tensor([0, 1, 2]), (2, 3)),
    )
    kept.row()
    usage = adj.memory_usage()
    assert [usage[f"user_pair.{nth}"] for nth in (0, 1)] == [tensor.nbytes for tensor in pair]
    assert usage["user_structure.row"] == kept.row().nbytes
    inner = sum(kept.memory_usage().values())
    assert sum(usage.values()) == before + sum(tensor.nbytes for tensor in pair) + inner
    # A structure that keeps its owner is counted once.
    kept.derived("owner", lambda: adj)
    assert adj.memory_usage() == usage


@pytest.mark.parametrize("mode", ["append", "replace"])
def test_self_loops(device, mode):
    row = torch.tensor([2, 0, 1, 1, 1], device=device)
    col = torch.tensor([0, 1, 1, 2, 1], device=device)
    adj = Adjacency.from_coo(row, col, (3, 4), self_loops=mode)
    loops = [(0, 0, 5), (1, 1, 6), (2, 2, 7)]
    own = [(2, 0, 0), (0, 1, 1), (1, 2, 3)]
    own_loops = [(1, 1, 2), (1, 1, 4)]
    expected = own + loops + (own_loops if mode == "append" else [])
    assert stored_edges(adj) == sorted(expected)
    assert adj.num_values == 8
    assert adj.has_inserted_loops
    assert not Adjacency.from_coo(row, col, (3, 4)).has_inserted_loops
    value = torch.arange(10.0, 15.0, device=device, requires_grad=True)
    extended = adj.extend_value(value, 1.0)
    kept = [1.0, 14.0, 1.0] if mode == "replace" else [1.0] * 3
    assert extended.tolist() == [10, 11, 12, 13, 14, *kept]
    assert adj.extend_value(value, 2.0, keep_existing=False).tolist() == [10, 11, 12, 13, 14, 2, 2, 2]
    assert adj.extend_value(value, torch.tensor([5.0, 6, 7], device=device), keep_existing=False)[
        5:
    ].tolist() == [5, 6, 7]
    extended.sum().backward()
    assert value.grad.tolist() == [1, 1, 1, 1, 2 if mode == "replace" else 1]
    with pytest.raises(ValueError, match="value: expected 5 values, one per edge that the Adjacency"):
        adj.extend_value(value[:4], 1.0)
    with pytest.raises(ValueError, match="extend_value: expected an Adjacency built with self_loops"):
        Adjacency.from_coo(row, col, (3, 4)).extend_value(value, 1.0)


@pytest.mark.parametrize("self_loops", ["keep", "append", "replace"])
def test_merged_duplicates(device, self_loops):
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, 5, (60,), generator=generator).to(device) for _ in range(2))
    kept = Adjacency.from_coo(row, col, (5, 5), self_loops=self_loops)
    merged = Adjacency.from_coo(row, col, (5, 5), duplicates="sum", self_loops=self_loops)
    assert merged.num_edges == merged.num_values == len({(r, c) for r, c, _ in stored_edges(kept)})
    value = torch.rand(60, device=device, dtype=torch.float64, requires_grad=True)
    values = value if self_loops == "keep" else kept.extend_value(value, 0.5)
    again = value if self_loops == "keep" else merged.extend_value(value, 0.5)
    x = torch.randn(5, 3, device=device, dtype=torch.float64)
    expected = spmm(kept, x, values)
    actual = spmm(merged, x, merged.coalesce_value(again))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sum(), value)[0], torch.autograd.grad(expected.sum(), value)[0]
    )
    ones = merged.coalesce_value().double()
    torch.testing.assert_close(spmm(merged, x, ones), spmm(kept, x))
    with pytest.raises(ValueError, match="duplicates='sum'"):
        kept.coalesce_value()


def test_degree_powers(device):
    adj = Adjacency.from_coo(torch.tensor([0, 0, 0, 0, 2]), torch.tensor([1, 1, 1, 1, 0]), (3, 2)).to(device)
    assert adj.inv_sqrt_degree().tolist() == [0.5, 0, 1]
    assert adj.inv_degree(torch.float64).tolist() == [0.25, 0, 1]
    assert adj.inv_sqrt_out_degree().tolist() == [1, 0.5]
    assert adj.inv_out_degree().tolist() == [1, 0.25]
    assert adj.has_empty_rows()
    assert not adj.t().has_empty_rows()
    assert adj.inv_degree() is adj.inv_degree()


def test_built_once_from_many_threads(device, monkeypatch):
    calls = []
    build = Adjacency._transpose
    monkeypatch.setattr(Adjacency, "_transpose", lambda *call: calls.append(call) or build(*call))
    adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), (3, 3)).to(device)
    results = []
    threads = [threading.Thread(target=lambda: results.append(adj.t())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert all(result is results[0] for result in results)
    assert adj.derived("answer", lambda: [42]) is adj.derived("answer", lambda: [43])


@pytest.mark.parametrize("interrupted", ["plans", "split_rows"])
def test_who_sorts_slices_second_waits_for_the_first(interrupted, monkeypatch):
    """Otherwise it would use the old work list, or free the new one while kernels have its address."""
    adj = Adjacency.from_csr(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 0, 1, 2]), (3, 3))
    adj.has_sorted_slices = False  # as on CUDA, where no row is cut
    first = adj._of_rows.results["row_split"] = unsplit_rows(torch.zeros(3, 2, dtype=torch.int64))
    before = adj.csr_structure
    reached, second_is_back = threading.Event(), threading.Event()

    def interrupt():
        reached.set()
        second_is_back.wait(0.3)

    class Plans(dict):
        def clear(self):
            interrupt()
            super().clear()

    def split(*arguments, **options):
        interrupt()
        return split_rows(*arguments, **options)

    if interrupted == "plans":
        adj.plans = Plans()
    else:
        monkeypatch.setattr(row_formats, "split_rows", split)
    thread = threading.Thread(target=adj.sort_slices)
    thread.start()
    if interrupted == "plans":
        assert reached.wait(1800)
    adj.sort_slices()
    found = adj.row_split, adj.csr_structure, adj.first_row_split
    second_is_back.set()
    thread.join()
    assert found[0] is adj.row_split is not first
    assert found[1] is adj.csr_structure is not before
    assert found[2] is first


def test_freed_without_the_cycle_collector(device):
    gc.collect()
    gc.disable()
    try:
        adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), (3, 3)).to(device).prepare()
        handle, watch = adj.handle, weakref.ref(adj)
        transposed = adj.t()
        del adj
        assert watch() is None
        assert sorted(stored_edges(transposed.t())) == [(0, 1, 0), (1, 2, 1)]
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="was freed while an operator still needed it"):
        adjacency_module.from_handle(handle)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_and_pickles(device, copier):
    row, col = torch.tensor([2, 0, 1], device=device), torch.tensor([0, 1, 1], device=device)
    adj = Adjacency.from_coo(row, col, (3, 3), self_loops="replace").prepare()
    again = copier(adj)
    assert again.handle != adj.handle
    assert stored_edges(again) == stored_edges(adj)
    assert again.has_inserted_loops
    assert again.extend_value(torch.ones(3, device=device), 2.0).tolist() == [1, 1, 1, 2, 1, 2]


@pytest.mark.parametrize("of", [lambda adj: adj, lambda adj: adj.t(), lambda adj: adj.prepare()])
def test_sending_to_a_process_keeps_memory(of):
    adj = Adjacency.from_coo(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 1]), (3, 3), self_loops="replace")
    sent = of(adj)
    segments = Segments.from_index(torch.tensor([2, 0, 2]), 3)
    own = [tensor for each in (adj, sent) for tensor in each._own_tensors().values()]
    own += [segments.rowptr, segments.order]
    before = [tensor.data_ptr() for tensor in own]
    again, segments_again = pickle.loads(ForkingPickler.dumps((sent, segments)))
    assert [tensor.data_ptr() for tensor in own] == before  # compiled kernels keep these addresses
    assert stored_edges(again) == stored_edges(sent)
    assert torch.equal(segments_again.order, segments.order)
    assert sum(name.startswith("sent") for name in sent.memory_usage()) >= 2


def _add_to(result: torch.Tensor, adj: Adjacency, x: torch.Tensor) -> None:
    result += spmm(adj, x)


def test_another_process_uses_it():
    row, col = torch.randint(50, (2, 300))
    adj, x, result = Adjacency.from_coo(row, col, (50, 50)), torch.randn(50, 4), torch.zeros(50, 4)
    want = spmm(adj, x)
    for _ in range(2):
        process = torch.multiprocessing.get_context("spawn").Process(
            target=_add_to, args=(result.share_memory_(), adj, x)
        )
        process.start()
        process.join()
    torch.testing.assert_close(result, 2 * want)
    torch.testing.assert_close(spmm(adj, x), want)


def test_to(device):
    adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), (3, 3))
    moved = adj.to(device)
    assert moved.device.type == device
    assert moved.to(device) is moved
    assert stored_edges(moved.cpu()) == stored_edges(adj)
    assert adj.to("cpu") is adj


def test_made_under_inference_mode_serves_training(device):
    with torch.inference_mode():
        adj = Adjacency.from_coo(torch.tensor([0, 1]), torch.tensor([1, 2]), (3, 3)).to(device)
        spmm(adj, torch.ones(3, 2, device=device), reduce="mean", scale_src=adj.inv_sqrt_out_degree())
    x = torch.ones(3, 2, device=device, requires_grad=True)
    spmm(adj, x, reduce="mean", scale_src=adj.inv_sqrt_out_degree()).sum().backward()
    assert x.grad.tolist() == [[0, 0], [1, 1], [1, 1]]


LONG, SHORT = torch.tensor([0, 1, 2]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: Adjacency.from_coo(LONG, SHORT, (3, 3)),
            ValueError,
            "row and col: expected the same length, got 3 and 2",
        ),
        (
            lambda: Adjacency.from_coo(LONG, LONG, (3, 2)),
            ValueError,
            r"col: .*num_src - 1 = 1, got values from 0 to 2",
        ),
        (lambda: Adjacency.from_coo(LONG, LONG - 1, (3, 3)), ValueError, r"col: .*got values from -1 to 1"),
        (
            lambda: Adjacency.from_coo(LONG, LONG, (0, 3)),
            ValueError,
            "row: expected none for num_dst = 0, got values from 0 to",
        ),
        (
            lambda: Adjacency.from_coo(LONG.float(), LONG, (3, 3)),
            TypeError,
            "row: expected dtype int32 or int64",
        ),
        (
            lambda: Adjacency.from_coo([0], LONG, (3, 3)),
            TypeError,
            "row: expected an int32 or int64 tensor, got list",
        ),
        (lambda: Adjacency.from_coo(LONG[None], LONG, (3, 3)), ValueError, "row: expected a 1-D tensor"),
        (
            lambda: Adjacency.from_coo(LONG, LONG.to("meta"), (3, 3)),
            ValueError,
            "row and col: expected one device",
        ),
        (lambda: Adjacency.from_coo(LONG, LONG, (3, 2**31)), ValueError, "shape: expected sizes from 0"),
        (lambda: Adjacency.from_coo(LONG, LONG, (-1, 3)), ValueError, "shape: expected sizes from 0"),
        (
            lambda: Adjacency.from_coo(LONG, LONG, (3.0, 3)),
            TypeError,
            "shape: expected .num_dst, num_src., two ints",
        ),
        (
            lambda: Adjacency.from_coo(LONG, LONG, (3, 3), duplicates="drop"),
            ValueError,
            "duplicates: expected",
        ),
        (
            lambda: Adjacency.from_coo(LONG, LONG, (3, 3), self_loops="yes"),
            ValueError,
            "self_loops: expected",
        ),
        (
            lambda: Adjacency.from_csr(LONG, SHORT, (3, 3)),
            ValueError,
            "rowptr: expected num_dst . 1 = 4 entries",
        ),
        (
            lambda: Adjacency.from_csr(LONG, LONG, (2, 3)),
            ValueError,
            "rowptr: expected ascending values from 0 to 3",
        ),
        (lambda: Adjacency.from_csr(torch.tensor([0, 3, 1, 2]), SHORT, (3, 3)), ValueError, "not ascending"),
        (lambda: Adjacency.from_csr(LONG, SHORT, (2, 1)), ValueError, "col: expected indices"),
        (
            lambda: Adjacency.from_csr(LONG, SHORT, (2, 2), edge_id=LONG),
            ValueError,
            "positions, one per entry",
        ),
        (
            lambda: Adjacency.from_csr(LONG, SHORT, (2, 2), edge_id=SHORT + 1),
            ValueError,
            "edge_id: expected indices",
        ),
    ],
)
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_more_sources_than_blocks_can_name_stay_with_csr(device, caplog):
    row, col = torch.tensor([0, 1], device=device), torch.tensor([0, 2**24], device=device)
    adj = Adjacency.from_coo(row, col, (2, 2**24 + 1))
    assert not adj.try_bsb()
    assert not adj.has_bsb
    assert not caplog.records
    with pytest.raises(ValueError, match="num_src: expected at most 2\\^24"):
        _ = adj.bsb
    adj.prepare(backward=False)
    assert not adj.has_bsb


@pytest.mark.parametrize("edge_id", [[0, 0], [1, 1]])
def test_edge_ids_are_a_permutation(device, edge_id):
    rowptr, col = torch.tensor([0, 1, 2], device=device), torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match="edge_id: expected a different position from 0 to 1"):
        Adjacency.from_csr(rowptr, col, (2, 2), edge_id=torch.tensor(edge_id, device=device))


def test_columns_of_more_than_16_bits(device):
    """The CPU sorts them 16 bits at a time."""
    col = torch.tensor([131_071, 70_000, 65_535, 3, 65_536, 1], device=device)
    adj = Adjacency.from_coo(torch.tensor([1, 1, 1, 1, 1, 0], device=device), col, (2, 131_072))
    assert adj.col.tolist() == [1, 3, 65_535, 65_536, 70_000, 131_071]
    assert adj.edge_id.tolist() == [5, 3, 2, 4, 1, 0]


def test_equal_degrees_make_no_symmetric_structure(device):
    ring = Adjacency.from_csr(torch.arange(4, device=device), torch.tensor([1, 2, 0], device=device), (3, 3))
    assert not ring.is_symmetric
    assert ring.t().col.tolist() == [2, 0, 1]
