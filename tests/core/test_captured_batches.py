"""Steps on batches that are padded to the sizes of a record."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, relative_error
from hopper import prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import fill

from fastsparse_core import Adjacency, CapturedBatches, log, spmm
from fastsparse_core.capturing import batches as captured_batches
from fastsparse_core.capturing.padded_adjacency import PaddedAdjacency, write
from fastsparse_core.formats.inspection import Facts
from fastsparse_core.fused.aggregate_linear import aggregate_linear
from fastsparse_core.reference import spmm as reference_spmm

WIDTH = 8


def draw_edges(generator, num_dst, num_src, num_edges, dtype=torch.int64):
    row = torch.randint(0, num_dst, (num_edges,), generator=generator).sort().values
    return row.to(dtype), torch.randint(0, num_src, (num_edges,), generator=generator).to(dtype)


def check_products(structure, row, col, shape, device):
    """Sums, means and gradients of a padded structure equal those of the edges; padding gives zeros."""
    num_dst, num_src = shape
    exact = Adjacency.from_coo(row, col, shape)
    x = torch.randn(structure.num_src, WIDTH, device=device)
    grad = torch.randn(structure.num_dst, WIDTH, device=device)
    for scaled in (False, True):
        scale = structure.inv_degree() if scaled else None
        leaf = x.clone().requires_grad_()
        out = spmm(structure, leaf, scale_dst=scale)
        out.backward(grad)
        own = x[:num_src].double().requires_grad_()
        expected = reference_spmm(exact, own, scale_dst=exact.inv_degree(torch.float64) if scaled else None)
        expected.backward(grad[:num_dst].double())
        assert relative_error(out[:num_dst], expected) <= TOLERANCE[torch.float32]
        assert relative_error(leaf.grad[:num_src], own.grad) <= TOLERANCE[torch.float32]
        assert not out[num_dst:].any()
        assert not leaf.grad[num_src:].any()
    degree = structure.out_degree()
    assert torch.equal(degree[:num_src], exact.out_degree())
    assert not degree[num_src:].any()


@settings(deadline=None)
@given(st.data())
def test_padded_structures_hold_what_was_written_last(data):
    structure = PaddedAdjacency((9, 14), 32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for _ in range(2):
        num_dst, num_src = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14))
        num_edges = data.draw(st.integers(1, 32))  # no row is longer than a slice
        dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
        row, col = draw_edges(generator, num_dst, num_src, num_edges, dtype)
        assert structure.holds(fill(structure, row, col), (num_dst, num_src))
        check_products(structure, row, col, (num_dst, num_src), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 1, 1), (300, 1000, 2500), (7, 800, 30), (5000, 5000, 9000)])
def test_padded_structures_on_the_gpu(sizes):
    generator = torch.Generator().manual_seed(0)
    structure = PaddedAdjacency((5003, 5010), 9500, torch.device("cuda"))
    for num_dst, num_src, num_edges in ((5003, 5010, 9500), sizes):
        row, col = (part.cuda() for part in draw_edges(generator, num_dst, num_src, num_edges))
        assert structure.holds(fill(structure, row, col), (num_dst, num_src))
        check_products(structure, row, col, (num_dst, num_src), "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_number_of_structures_is_written_at_once(device):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3 + 40 * k, 5 + 70 * k) for k in range(11)]  # more than one launch takes
    structures = [
        PaddedAdjacency(shape, 90 * (k + 1), torch.device(device)) for k, shape in enumerate(shapes)
    ]
    edges = [
        tuple(
            part.to(device)
            for part in draw_edges(generator, *shape, 80 * (k + 1), (torch.int64, torch.int32)[k % 2])
        )
        for k, shape in enumerate(shapes)
    ]
    facts = Facts(len(shapes), torch.device(device))
    write(structures, edges, facts)
    for structure, shape, (row, col), words in zip(structures, shapes, edges, facts.wait(), strict=True):
        assert structure.holds(words, shape) == (int(row.bincount().max()) <= structure._longest)
        exact = Adjacency.from_coo(row, col, shape)
        assert torch.equal(structure.rowptr, exact.rowptr)
        assert torch.equal(structure.col[: col.numel()], exact.col)
        assert torch.equal(structure.inv_degree(), exact.inv_degree())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_must_not_be_used_is_noticed(device):
    structure = PaddedAdjacency((50, 60), 400, torch.device(device))
    shape = (40, 55)
    longest = structure._longest
    good = torch.arange(40, device=device)
    for row, col, holds in [
        (good, good, True),
        (good.flip(0), good, False),
        (good + 1, good, False),
        (good, good + 16, False),
        (good, good - 1, False),
        (good - 1, good, False),
        (good.new_zeros(longest), good.new_zeros(longest), True),
        (good.new_zeros(longest + 1), good.new_zeros(longest + 1), False),
    ]:
        assert structure.holds(fill(structure, row, col), shape) == holds


def test_what_a_padded_structure_cannot_do_is_refused():
    structure = PaddedAdjacency((5, 5), 20, torch.device("cpu"))
    for read in (
        structure.t,
        structure.row,
        lambda: structure.bsb,
        lambda: structure.hybrid_structure,
        lambda: structure.edge_groups(32),
    ):
        with pytest.raises(RuntimeError, match="a padded structure cannot be read .*such as GraphSAGE"):
            read()


# ---------------------------------------------------------------- batches


class Task:
    """Two levels of means and linear maps, and a loss of the seeds."""

    def __init__(self, device="cpu", margin=40):
        generator = torch.Generator().manual_seed(0)
        self.device, self.margin = device, margin
        self.weight = [
            (torch.randn(WIDTH, WIDTH, generator=generator) / 3).to(device).requires_grad_() for _ in range(2)
        ]
        self.optimizer = torch.optim.Adam(self.weight, lr=0.01, capturable=device == "cuda")
        self.shapes: list[list[tuple[int, int]]] = []

    def step(self, structures, x, y):
        self.shapes.append([structure.shape for structure in structures])
        for structure, weight in zip(structures, self.weight, strict=True):
            x = self.aggregate(structure, x, weight).relu()
        loss = F.cross_entropy(x[: y.size(0)], y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def aggregate(self, structure, x, weight):
        own = x[: structure.num_dst]
        return spmm(structure, x @ weight, scale_dst=structure.inv_degree()) + own

    def batch(self, seed, seeds=16):
        generator = torch.Generator().manual_seed(seed)
        first, second = (int(torch.randint(self.margin, (), generator=generator)) for _ in range(2))
        counts = (seeds, 60 + first, 200 + first + second)
        edges = []
        for num_dst, num_src in ((counts[1], counts[2]), (counts[0], counts[1])):
            row, col = draw_edges(generator, num_dst, num_src, 3 * num_dst + first)
            edges.append((row.to(self.device), col.to(self.device), (num_dst, num_src)))
        x = torch.randn(counts[2], WIDTH, generator=generator).to(self.device)
        return edges, {"x": x, "y": torch.randint(WIDTH, (seeds,), generator=generator).to(self.device)}


class LayerTask(Task):
    """GraphSAGE's layers, one weight for both maps."""

    def __init__(self, device="cpu", margin=40):
        super().__init__(device, margin)
        self.bias = torch.zeros(WIDTH, device=device)

    def aggregate(self, structure, x, weight):
        return aggregate_linear(structure, x, weight, self.bias, weight, "mean")


def check_training(device, batches, kind=Task):
    """Losses and weights of padded batches equal those of batches as they are."""
    plain, task = kind(device), kind(device)
    captured = CapturedBatches(task.step, fill={"x": 0.0}, observe=4)
    for edges, tensors in batches(task):
        expected = plain.step([Adjacency.from_coo(*part) for part in edges], **tensors)
        loss = captured(edges, **tensors)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for own, other in zip(task.weight, plain.weight, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    return task, captured


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Batches on the CPU are padded too; the steps of a record run instead of being replayed."""
    monkeypatch.setattr(captured_batches, "_can_record", lambda edges: True)
    monkeypatch.setattr(log, "_seen", set())


def test_padded_batches_train_like_batches_as_they_are(pretended_gpu):
    task, captured = check_training("cpu", lambda task: map(task.batch, range(12)))
    assert captured.is_recorded
    padded = task.shapes[4:]
    assert len({tuple(shapes) for shapes in padded}) <= 3  # all batches of a record have the same shapes
    for first, second in padded:
        assert first[0] == second[1]
        assert second[0] == 16  # seeds do not vary


def test_padded_batches_of_layers_that_are_one_kernel(pretended_gpu, monkeypatch):
    hopper = prepare("cpu", monkeypatch)
    _, captured = check_training("cpu", lambda task: map(task.batch, range(12)), LayerTask)
    assert captured.is_recorded
    assert len(hopper.launched) == 2 * 12 * 2 * 2  # both trainings, forward and backward of two layers


@pytest.mark.gpu
def test_recorded_layers_that_are_one_kernel(monkeypatch):
    hopper = prepare("cuda", monkeypatch)
    _, captured = check_training("cuda", lambda task: map(task.batch, range(24)), LayerTask)
    assert captured.is_recorded
    assert 24 * 2 * 2 < len(hopper.launched) < 2 * 24 * 2 * 2  # one training is plain; replays launch nothing


@pytest.mark.parametrize("short", [(3, 7), (4, 8)])  # 4: the first batch that is not run as it is
def test_a_last_batch_with_fewer_seeds_runs_as_it_is(pretended_gpu, short):
    def batches(task):
        for number in range(10):
            task.margin = 40 if number < 5 else 10
            yield task.batch(number, seeds=5 if number in short else 16)

    task, captured = check_training("cpu", batches)
    assert captured.is_recorded
    assert [shapes[1][0] for shapes in task.shapes] == [5 if number in short else 16 for number in range(10)]


def test_a_larger_batch_makes_room(pretended_gpu, caplog):
    def batches(task):
        for number in range(9):
            task.margin = 40 if number < 6 else 400
            yield task.batch(3 * number)

    with caplog.at_level(logging.INFO, logger="fastsparse_core"):
        task, _ = check_training("cpu", batches)
    assert (
        "CapturedBatches: a batch is larger than all before it; the step is recorded anew" in caplog.messages
    )
    assert task.shapes[-1][0][1] > task.shapes[4][0][1]


def test_fewer_edges_than_ever_fit(pretended_gpu):
    def batches(task):
        for number in range(9):
            edges, tensors = task.batch(0)
            if number > 6:
                edges = [(row[:-2], col[:-2], shape) for row, col, shape in edges]
            yield edges, tensors

    seen = []
    task = Task()
    captured = CapturedBatches(task.step, fill={"x": 0.0}, observe=2)
    for edges, tensors in batches(task):
        captured(edges, **tensors)
        seen.append(captured.is_recorded)
    assert seen == [False] * 2 + [True] * 7
    assert len({tuple(shapes) for shapes in task.shapes}) == 1
    check_training("cpu", batches)


def test_unsorted_edges_run_as_they_are(pretended_gpu, caplog):
    def batches(task):
        for number in range(7):
            edges, tensors = task.batch(number)
            if number == 5:
                edges = [(row.flip(0), col.flip(0), shape) for row, col, shape in edges]
            yield edges, tensors

    with caplog.at_level(logging.INFO, logger="fastsparse_core"):
        check_training("cpu", batches)
    assert any("its edges are not sorted by destination" in message for message in caplog.messages)


def test_a_wrong_index_is_named(pretended_gpu):
    task = Task()
    captured = CapturedBatches(task.step, fill={"x": 0.0}, observe=2)
    for number in range(4):
        edges, tensors = task.batch(number)
        captured(edges, **tensors)
    row, col, shape = edges[0]
    with pytest.raises(ValueError, match="col: expected"):
        captured([(row, col.index_fill(0, torch.tensor(3), shape[1]), shape), edges[1]], **tensors)


def test_gathered_features_are_written_in_place(pretended_gpu):
    task = Task()
    captured = CapturedBatches(task.step, fill={"x": 0.0}, observe=2)
    table = torch.randn(500, WIDTH)
    places = []
    for number in range(6):
        task.margin = 40 if number < 2 else 10
        edges, tensors = task.batch(number)
        index = torch.randint(500, (edges[0][2][1],))
        x = captured.gather("x", table, index)
        assert torch.equal(x, table[index])
        places.append(x.data_ptr())
        captured(edges, x=x, y=tensors["y"])
    assert captured.is_recorded
    assert len(set(places[3:])) == 1  # the first three were gathered before there was such a place
    assert captured.gather("x", table.double(), index).dtype == torch.float64


def test_errors(pretended_gpu):
    with pytest.raises(ValueError, match="observe: expected at least 1, got 0"):
        CapturedBatches(lambda structures: None, observe=0)
    task = Task()
    unnamed = CapturedBatches(task.step, observe=3)
    for number in range(3):
        edges, tensors = task.batch(number)
        unnamed(edges, **tensors)
    edges, tensors = task.batch(3)
    with pytest.raises(ValueError, match=r"x: its number of rows varies .* fill=\{'x': 0\} for features"):
        unnamed(edges, **tensors)
    captured = CapturedBatches(task.step, fill={"x": 0.0}, observe=1)
    edges, tensors = task.batch(0)
    for _ in range(2):
        captured(edges, **tensors)
    captured(edges, y=tensors["y"], x=tensors["x"])
    with pytest.raises(ValueError, match="call reset"):
        captured(edges[:1], **tensors)
    with pytest.raises(ValueError, match="x: expected a tensor of one or more dimensions without gradient"):
        captured(edges, x=tensors["x"].requires_grad_(), y=tensors["y"])
    with pytest.raises(ValueError, match="x: expected torch.float32 of shape"):
        captured(edges, x=tensors["x"].detach().double(), y=tensors["y"])


def test_batches_on_the_cpu_run_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(log, "_seen", set())
    with caplog.at_level(logging.INFO, logger="fastsparse_core"):
        task, captured = check_training("cpu", lambda task: map(task.batch, range(12)))
    assert not captured.is_recorded
    assert caplog.messages == [
        "CapturedBatches: batches run as they are on the CPU and under deterministic algorithms"
    ]
    assert len(task.shapes) == 12


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
def test_replays_train_like_batches_as_they_are():
    def batches(task):
        for number in range(40):
            task.margin = 40 if number < 30 else 400
            yield task.batch(number, seeds=5 if number == 20 else 16)

    task, captured = check_training("cuda", batches)
    assert captured.is_recorded
    assert len(task.shapes) < 30  # the others were replayed
