"""`capture`: steps and models that are recorded as CUDA graphs, which the CPU simulates."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from simulated_graphs import simulate
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from fastsparse_core import (
    Adjacency,
    SlowPathWarning,
    additive_attention,
    attention,
    capture,
    gatv2_attention,
    log,
    recorded,
    spmm,
)
from fastsparse_core.capturing import captured as machinery
from fastsparse_core.capturing import masked_functions
from fastsparse_core.capturing.fresh_adjacency import FreshAdjacency
from fastsparse_core.capturing.masked_functions import MaskedFunctions, Masks
from fastsparse_core.capturing.optimizers import RecordedOptimizer
from fastsparse_core.capturing.padding import BatchPlaces, Rows, Sizes, capacity_for
from fastsparse_core.capturing.rollback import State, on_trial
from fastsparse_core.ops._sum_of_rows import sum_of_rows
from fastsparse_core.recorded import StepRun

CALLS = machinery.CALLS + 10


@pytest.fixture
def simulated(monkeypatch):
    """Simulates CUDA graphs on the CPU."""
    simulate(monkeypatch)


@pytest.fixture(autouse=True)
def graphs_on(request, monkeypatch):
    """Simulates CUDA graphs for tests that run on the CPU."""
    monkeypatch.setattr(log, "seen", set())
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        request.getfixturevalue("simulated")


class Task:
    """A linear model of summed neighbours with batch normalisation, and its training step."""

    def __init__(self, device, optimizer=torch.optim.Adam):
        generator = torch.Generator().manual_seed(0)
        row, col = torch.randint(0, 50, (2, 600), generator=generator).to(device)
        self.adj = Adjacency.from_coo(row, col, (50, 50))
        self.x = torch.randn(50, 16, generator=generator).to(device)
        self.y = torch.randint(4, (50,), generator=generator).to(device)
        self.mask = (torch.rand(50, generator=generator) < 0.5).to(device)
        torch.manual_seed(0)
        # No bias before the normalisation: its gradient is only rounding, which Adam makes large.
        layers = [
            torch.nn.Linear(16, 8, bias=False),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Linear(8, 4),
        ]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.runs = 0

    def step(self, x, y):
        self.runs += 1
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(spmm(self.adj, x))[self.mask], y[self.mask])
        loss.backward()
        self.optimizer.step()
        return loss


def check(device, change=lambda task, nth: None, calls=CALLS, **options):
    """Losses and parameters of a captured step equal those of the step."""
    plain, task = Task(device, **options), Task(device, **options)
    step, runs = capture(task.step), 0
    for nth in range(calls):
        for each in (plain, task):
            change(each, nth)
        runs = task.runs
        expected, loss = plain.step(plain.x, plain.y), step(task.x, task.y)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-4, atol=1e-6)
    for own, other in zip(task.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    assert task.runs == runs  # the last call is a replay
    return step.captured


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_steps_on_one_graph(device, optimizer):
    found = check(device, optimizer=optimizer)
    assert len(found.records) == 1


def test_other_tensors_are_copied(device):
    def change(task, nth):
        if nth >= machinery.CALLS + 4:
            task.y = task.y.roll(1)

    found = check(device, change)
    assert [type(held).__name__ for held in found.records[0].held] == ["Constant", "Held"]


def test_a_call_of_the_same_objects_sees_what_changed_in_them(device):
    def change(task, nth):
        if nth == CALLS - 8:
            task.x += 1  # read at the same address
        if nth == CALLS - 6:
            task.x.data = task.x * 2
        if nth == CALLS - 4:
            task.y = task.y.flip(0)

    check(device, change)
    task = Task(device)
    capture(task.model)
    for _ in range(CALLS):
        task.step(task.x, task.y)
    kept = [item.grad.clone() for item in task.model.parameters()]
    grads = [item.grad for item in task.model.parameters()]
    assert all(grad.is_contiguous() for grad in grads)
    task.step(task.x, task.y)
    for grad, before in zip(grads, kept, strict=True):
        assert torch.equal(grad, before)  # the next replay writes to other memory


def test_masks_that_are_written_are_read_again(device):
    def change(task, nth):
        if nth == machinery.CALLS + 4:
            task.mask[:25].logical_not_()

    check(device, change, machinery.CALLS + 35)


@pytest.mark.parametrize("assigns", [False, True])
def test_learning_rates_change(device, assigns):
    def change(task, nth):
        if nth == 0:
            task.scheduler = torch.optim.lr_scheduler.StepLR(task.optimizer, 2, 0.7)
        elif assigns:
            task.optimizer.param_groups[0]["lr"] = 0.01 / nth
        else:
            task.scheduler.step()

    check(device, change)


def test_other_settings_are_recorded_anew(device, caplog):
    def change(task, nth):
        if nth == machinery.CALLS + 4:
            task.optimizer.param_groups[0]["weight_decay"] = 0.1

    with caplog.at_level(logging.INFO, logger="fastsparse_core"):
        check(device, change)
    assert any("settings of an optimizer have changed" in message for message in caplog.messages)


def test_gradients_are_accumulated(device):
    grads = []
    for captures in (False, True):
        task = Task(device)

        def backward(x, scale, task=task):
            (task.model(spmm(task.adj, x)).square().mean() * scale).backward()

        run = capture(backward) if captures else backward
        one, two = torch.ones((), device=device), torch.full((), 2.0, device=device)
        for nth in range(2 * CALLS):
            run(task.x, one)
            run(task.x, two)
            if nth % 3 == 2:
                task.optimizer.step()
                task.optimizer.zero_grad()
        run(task.x, one)
        run(task.x, two)
        grads.append([item.grad for item in task.model.parameters()])
    for own, expected in zip(*grads, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)


def test_gradients_outlive_other_replays(device):
    """Graphs share memory, but the replay of one must not overwrite gradients of another."""
    task, plain = Task(device), Task(device)

    @capture
    def run(x, trains):
        if not trains:
            with torch.no_grad():
                return task.model(spmm(task.adj, x)).square().mean()
        loss = task.model(spmm(task.adj, x)).square().mean()
        loss.backward()
        return loss

    for each in (task, plain):
        each.model.eval()
    for _ in range(CALLS + 4):
        run(task.x, False)
        for each in (task, plain):
            each.optimizer.zero_grad()
        run(task.x, True)
        run(task.x, False)
        plain.model(spmm(plain.adj, plain.x)).square().mean().backward()
        for own, other in zip(task.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert len(run.captured.records) >= 2


def test_evaluation_leaves_gradients_alone(device):
    task = Task(device)
    run = capture(lambda x: task.model(spmm(task.adj, x)))
    with torch.no_grad():
        for _ in range(CALLS):
            run(task.x)
    task.step(task.x, task.y)
    kept = [item.grad.clone() for item in task.model.parameters()]
    with torch.no_grad():
        for _ in range(CALLS):
            run(task.x)
    for item, grad in zip(task.model.parameters(), kept, strict=True):
        assert torch.equal(item.grad, grad)
    assert len(run.captured.records) == 2  # with and without gradients


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_steps_that_run_as_they_are_keep_their_optimiser(device, optimizer):
    """If the step is not recorded, the optimiser's settings are restored."""
    task = Task(device, optimizer)
    before = [{name: item for name, item in group.items() if name != "params"} for group in groups(task)]

    def step(x, y):
        loss = task.step(x, y)
        return loss, loss.nonzero()

    run = capture(step)
    with pytest.warns(SlowPathWarning) as warned:
        repeat(lambda: run(task.x, task.y))
    reason = "counts its steps on the CPU" if optimizer is torch.optim.Adagrad else "nonzero()"
    assert reason in str(warned[0].message)
    assert reason in run.captured.status
    after = [{name: item for name, item in group.items() if name != "params"} for group in groups(task)]
    assert after == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_slow_path_is_one_that_the_machine_could_avoid(has_gpu, monkeypatch, reasons):
    monkeypatch.setattr(machinery, "machine_has_gpu", lambda: has_gpu)
    step = capture(lambda x: 2 * x)
    repeat(lambda: step(torch.ones(3)))
    assert step.captured.status == "refused: there is no CUDA device"
    (said,) = reasons.records
    assert said.levelname == ("WARNING" if has_gpu else "INFO")
    assert ("install a PyTorch" in said.message) == has_gpu


def repeat(call, times=CALLS):
    """Results of calls."""
    return [call() for _ in range(times)]


def groups(task):
    return task.optimizer.param_groups


@pytest.mark.parametrize("kind", ["tensor", "number", "in place"])
def test_what_the_host_keeps_from_call_to_call_is_not_recorded(device, kind):
    """State is only recorded if the step writes it into one tensor."""
    x, kept = torch.ones(5, device=device), [torch.zeros((), device=device), 1.0]

    @capture
    def run():
        if kind == "tensor":
            kept[0] = kept[0] + x.sum()
        elif kind == "in place":
            kept[0].copy_(kept[0] + x.sum())
        else:
            kept[1] *= 1.1
        return kept[0] + x.sum() * kept[1]

    if kind == "in place":
        assert repeat(lambda: run().item()) == [5.0 * (nth + 2) for nth in range(CALLS)]
        assert run.captured.status == "replaying"
        return
    reason = {
        "tensor": r"`kept\[0\] = kept\[0\] \+ x.sum\(\)`.*the previous call created",
        "number": "Python state",
    }
    with pytest.warns(SlowPathWarning, match=reason[kind]):
        outs = repeat(lambda: run().item())
    assert not run.captured.records
    assert len(set(outs)) == CALLS


def test_training_and_evaluation_are_recorded_apart(device):
    task = Task(device)

    @capture
    def run(x):
        return task.model(spmm(task.adj, x))

    with torch.no_grad():
        for _ in range(CALLS):
            task.model.train()
            run(task.x)
        task.model.eval()
        for _ in range(CALLS):
            out = run(task.x)
        torch.testing.assert_close(out, task.model(spmm(task.adj, task.x)), rtol=1e-4, atol=1e-5)
    assert len(run.captured.records) == 2


def test_two_steps_in_one_process(device):
    first, second = Task(device), Task(device)
    steps = [capture(first.step), capture(second.step)]
    for _ in range(CALLS):
        one, other = (step(task.x, task.y) for step, task in zip(steps, (first, second), strict=True))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_an_exception_in_a_step_leaves_the_rest(device):
    task = Task(device)
    step = capture(task.step)
    for _ in range(CALLS):
        step(task.x, task.y)
    for wrong in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            step(task.x[:, :3] * wrong, task.y)
    assert step(task.x, task.y).isfinite()


@pytest.mark.parametrize("fault", ["schedules", "forms"])
def test_says_why_a_step_runs_as_it_is(simulated, fault):
    task = Task("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(task.optimizer, 2)

    def step(x, y, nth):
        if fault == "schedules":
            task.step(x, y)
            scheduler.step()
        return x.sum()

    run = capture(step)
    numbers = itertools.count()
    with pytest.warns(SlowPathWarning) as warned:
        repeat(
            lambda: run(task.x, task.y, next(numbers) if fault == "forms" else 0), machinery._MOST_FORMS + 3
        )
    expected = {"schedules": "Call `scheduler.step()` after", "forms": "more than 32 different"}[fault]
    assert sum(expected in str(item.message) for item in warned) == 1
    assert warned[0].filename == __file__


@pytest.mark.parametrize("by", ["all_reduce", "functional", "compiled", "DDP"])
def test_steps_that_exchange_data_run_as_they_are(simulated, by):
    """A recording would call for data that the other processes do not send."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        task = Task("cpu")
        calls = []
        if by == "DDP":
            task.model = torch.nn.parallel.DistributedDataParallel(task.model)

        def summed(loss):
            return wait_tensor(all_reduce(loss, "sum", dist.group.WORLD))

        if by == "compiled":
            summed = torch.compile(summed, backend="aot_eager")

        def step(x, y):
            calls.append(1)
            loss = task.step(x, y)
            if by == "all_reduce":
                dist.all_reduce(loss)
            return summed(loss) if by in ("functional", "compiled") else loss

        run = capture(step)
        with pytest.warns(SlowPathWarning, match="it exchanges data with other processes"):
            repeat(lambda: run(task.x, task.y), CALLS + 4)
        assert len(calls) == CALLS + 4
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_recorded_runs_on(device):
    task, plain = Task(device), Task(device)
    step = capture(lambda x, y: max(task.step(x, y).item(), 0.0))
    with pytest.warns(SlowPathWarning, match=r"max\(task.step\(x, y\).item\(\), 0.0\).*test_capture.py"):
        found = repeat(lambda: step(task.x, task.y))
    assert found == pytest.approx(repeat(lambda: plain.step(plain.x, plain.y).item()), rel=1e-3)
    assert step.captured.status.startswith("refused: the step uses the number")


def test_too_little_memory_to_record_loses_nothing(device, monkeypatch):
    task, plain = Task(device), Task(device)
    step = capture(task.step)

    def record(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(step.captured._graphs, "record", record)
    with pytest.warns(SlowPathWarning, match="there is not enough memory to record it"):
        found = repeat(lambda: step(task.x, task.y).detach())
    expected = repeat(lambda: plain.step(plain.x, plain.y).detach())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert not step.captured.records


def test_dropout_differs_from_replay_to_replay(device):
    task = Task(device)

    @capture
    def run(x):
        heads = x.view(50, 2, 8)
        return F.dropout(x, 0.5), attention(task.adj, heads, heads, heads, dropout_p=0.5)

    outs = [run(task.x) for _ in range(CALLS)]
    assert len(run.captured.records) == 1
    for one, other in zip(outs[-1], outs[-2], strict=True):
        assert not torch.equal(one, other)


def test_gradient_scalers(device):
    losses = []
    for captures in (False, True):
        task, scaler = Task(device), torch.amp.GradScaler(device)

        def step(x, y, task=task, scaler=scaler):
            task.optimizer.zero_grad()
            with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
                loss = F.cross_entropy(task.model(spmm(task.adj, x)), y)
            scaler.scale(loss).backward()
            scaler.step(task.optimizer)
            scaler.update()
            return loss

        run = capture(step) if captures else step
        losses.append(torch.stack([run(task.x, task.y).detach() for _ in range(CALLS)]))
        if captures:
            assert len(run.captured.records) == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=1e-3)


def test_features_in_16_bits_under_autocast(device):
    """Steps are compared without autocast, where 16-bit features do not fit 32-bit weights."""
    model = torch.nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @capture
    def step(x):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(CALLS):
        step(torch.randn(50, 16, dtype=torch.bfloat16, device=device))
    assert len(step.captured.records) == 1


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("varies", [False, True])
def test_models(device, varies):
    plain, task = Task(device), Task(device)
    assert capture(task.model) is task.model
    assert capture(task.model) is task.model
    for nth in range(CALLS):
        for each in (plain, task):
            if varies and nth > 4:
                each.x = each.x.roll(1, 0)
        expected, loss = plain.step(plain.x, plain.y), task.step(task.x, task.y)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    task.model.eval()
    plain.model.eval()
    with torch.no_grad():
        for _ in range(CALLS):
            out = task.model(task.x)
        torch.testing.assert_close(out, plain.model(plain.x), rtol=1e-3, atol=1e-4)
    assert len(task.model.forward.records) == 2


def test_models_are_evaluated_before_their_backward_pass(device):
    plain, task = Task(device), Task(device)
    capture(task.model)
    for _ in range(CALLS + 4):
        for each in (plain, task):
            each.optimizer.zero_grad()
            each.model.train()
            out = each.model(each.x)
            each.model.eval()
            with torch.no_grad():
                each.model(each.x)
            F.cross_entropy(out, each.y).backward()
            each.optimizer.step()
    for own, other in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-5)
    assert len(task.model.forward.records) == 2


def test_a_model_that_is_called_twice_before_its_backward_pass_is_an_error(device):
    task = Task(device)
    capture(task.model)
    for _ in range(CALLS):
        task.step(task.x, task.y)
    first = task.model(task.x).sum()
    (task.model(task.x).sum()).backward()
    with pytest.raises(RuntimeError, match="was called again before the backward pass"):
        first.backward()


def test_gradients_of_a_captured_model_are_accumulated(device):
    plain, task = Task(device), Task(device)
    capture(task.model)
    for _ in range(CALLS):
        plain.step(plain.x, plain.y)
        task.step(task.x, task.y)
    for each in (plain, task):
        each.optimizer.zero_grad()
        for scale in (1.0, 2.0, -0.5):
            each.model(each.x * scale).square().mean().backward()
    for own, other in zip(task.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------- parts


def draw_sizes(generator, hops, is_typed):
    """Sizes of batches like each other."""
    nodes = torch.tensor([8, 20, 40][:hops])
    edges = torch.tensor([30, 70][: max(hops - 1, 1)])

    def draw(like, most):
        return tuple((like + torch.randint(most, like.shape, generator=generator)).tolist())

    kinds = 3 if is_typed else 1
    # Edges within a type, between two types, and none. In sampled batches, all seeds have one type.
    least = 1 if hops > 1 else 2
    ends = ((0, 0), (0, 1), (1, 0), (2, 0))[: 4 if is_typed else 1]
    return [
        Sizes(
            tuple((draw(nodes, 6)[0] * (kind < least), *draw(nodes, 6)[1:]) for kind in range(kinds)),
            tuple(draw(edges, 9) if source < 2 else (0,) * len(edges) for source, _ in ends),
            ends,
        )
        for _ in range(8)
    ]


@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("is_doubled", [False, True])
@pytest.mark.parametrize("is_typed", [False, True])
def test_padding_is_a_graph_of_its_own(device, hops, is_doubled, is_typed):
    """Rows and edges of a batch come first in every hop; padding is behind them, and has no loops."""
    generator = torch.Generator().manual_seed(hops)
    seen = draw_sizes(generator, hops, is_typed)
    capacity = capacity_for(seen[:4])
    capacity = capacity.doubled() if is_doubled else capacity
    places = BatchPlaces(capacity, torch.device(device))
    assert len({rows.capacity for rows in places.rows}) == len(places.rows)
    without = Sizes(seen[0].nodes, tuple((0,) * len(counts) for counts in seen[0].edges), seen[0].ends)
    for sizes in [*filter(capacity.holds, seen), without]:
        given = [torch.rand(sum(counts), 2, generator=generator).to(device) for counts in sizes.nodes]
        held = [torch.empty(sum(counts), 2, device=device) for counts in capacity.nodes]
        edges = [
            draw_edges(generator, counts, sizes.nodes[of_source], sizes.nodes[of_target]).to(device)
            for (of_source, of_target), counts in zip(sizes.ends, sizes.edges, strict=True)
        ]
        wides = [torch.empty(2, sum(counts), dtype=torch.int64, device=device) for counts in capacity.edges]
        narrow = [wide.int() for wide in wides]
        places.write(sizes, [(to, ends.int()) for to, ends in zip(narrow, edges, strict=True)])
        places.write(
            sizes, list(zip(wides, edges, strict=True)), list(zip(held, given, places.nodes, strict=True))
        )
        for rows, x, of_type, counts in zip(held, given, places.nodes, sizes.nodes, strict=True):
            assert torch.equal(capacity.cut(rows, sizes), x)
            first = x[:1] if len(x) else torch.zeros(1, 2, device=device)
            assert torch.equal(rows[~of_type.mask], first.expand((~of_type.mask).sum(), 2))
            assert [int(of_hops.count) for of_hops in of_type.rows] == torch.tensor(counts).cumsum(0).tolist()
        for nth, (of_source, of_target) in enumerate(sizes.ends):
            wide, ends = wides[nth], edges[nth]
            assert torch.equal(wide, narrow[nth].long())
            source, target = capacity.cut(wide.t(), sizes).t()
            assert torch.equal(held[of_source][source], given[of_source][ends[0]])
            assert torch.equal(held[of_target][target], given[of_target][ends[1]])
            assert places.nodes[of_source].mask[source].all()
            assert places.nodes[of_target].mask[target].all()
            source, target = wide[:, ~places.edges[nth].mask]
            assert not places.nodes[of_source].mask[source].any()
            assert not places.nodes[of_target].mask[target].any()
            assert of_source != of_target or (source != target).all()
            if of_target == 0 or hops == 1:  # otherwise the seeds' hop has no destinations
                assert torch.equal(wide[1], wide[1].sort().values)


def draw_edges(generator, counts, of_sources, of_targets):
    """Edges of every hop, by destination."""
    sources, targets = (torch.tensor(sizes).cumsum(0) for sizes in (of_sources, of_targets))
    parts = []
    for hop, number in enumerate(counts):
        first = int(targets[hop - 1]) if hop else 0
        if first == targets[hop]:  # no nodes of that type in the hop: any of them
            first, last = 0, int(targets[-1])
        else:
            last = int(targets[hop])
        source = torch.randint(
            max(int(sources[min(hop + 1, len(sources) - 1)]), 1), (number,), generator=generator
        )
        target = torch.randint(first, max(last, 1), (number,), generator=generator).sort().values
        parts.append(torch.stack([source, target]))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_of_padding_copy_the_first(rows, device):
    """Rows of nodes and edges, of any size and alignment, of all hops and the first, of many tensors."""
    sizes = Sizes(((rows, 4),), ((3 * rows,),))
    capacity = capacity_for([sizes])
    places = BatchPlaces(capacity, torch.device(device))
    held_edges, edges = (
        torch.zeros(2, count, dtype=torch.int64, device=device)
        for count in (sum(capacity.edges[0]), 3 * rows)
    )
    (nodes,), (of_edges,) = places.nodes, places.edges
    tensors = []
    for width in (0, 1, 2, 3, 4, 5, 8, 16, 25):
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
            for of, count in ((nodes, rows + 4), (nodes, rows), (of_edges, 3 * rows)):
                place = of.starts[1 if count == rows else -1]
                item = torch.randint(1, 100, (count, width), device=device).to(dtype)
                held = torch.full((place * width + 1,), 7, device=device, dtype=dtype)
                tensors.append(
                    (held[1:].view(place, width) if width % 2 else held[:-1].view(place, width), item, of)
                )
    places.write(sizes, [(held_edges, edges)], tensors)
    for held, item, of in tensors:
        mask = of.mask[: held.size(0)]
        assert torch.equal(held[mask], item)
        first = item[:1] if item.size(0) else item.new_zeros(1, item.size(1))
        assert torch.equal(held[~mask], first.expand(int((~mask).sum()), -1))


def test_there_is_room_for_more_than_was_seen():
    seen = [Sizes(((100,),), ((220,),)), Sizes(((90,),), ((300,),))]
    capacity = capacity_for(seen)
    assert capacity.holds(Sizes(((108,),), ((370,),)))
    assert not capacity.holds(Sizes(((capacity.nodes[0][0] - 1,),), ((1,),)))
    assert capacity.nodes != capacity.edges


@pytest.mark.parametrize("loops", ["keep", "append", "replace"])
@pytest.mark.parametrize("operator", ["spmm", "weighted", "attention", "additive", "gatv2"])
def test_fresh_structures(device, loops, operator):
    """Operators on a structure that is made without reading sizes equal those on the structure."""
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, 20, (2, 90), generator=generator).to(device)
    row, col = torch.cat([row, row.new_tensor([3, 4])]), torch.cat([col, col.new_tensor([3, 4])])
    value = torch.rand(92, generator=generator).to(device)
    q, k, v = (torch.randn(24, 2, 8, generator=generator).to(device) for _ in range(3))
    att = torch.randn(2, 8, generator=generator).to(device)
    results = []
    for fresh in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        one, two, three = leaves
        run = StepRun(has_padding=True, of_edges=FreshAdjacency.of_edges)
        context = recorded.running(run) if fresh else torch.enable_grad()
        with context:
            adj = Adjacency.from_coo(row, col, (24, 24), self_loops=loops)
            assert adj.is_padded == fresh
            if operator == "spmm":
                out = spmm(adj, one.flatten(1), reduce="mean") + spmm(adj, two.flatten(1)) * three.flatten(1)
            elif operator == "weighted":
                weight = value if loops == "keep" else adj.extend_value(value, 0.5)
                out = spmm(adj, one.flatten(1), weight) + two.flatten(1) * three.flatten(1)
            elif operator == "attention":
                out = attention(adj, one, two, three)
            elif operator == "additive":
                out = additive_attention(adj, one.sum(-1), two.sum(-1), three)
            else:
                out = gatv2_attention(adj, one, two, att) + three
            out = out.reshape(24, -1)[:20]
            grads = torch.autograd.grad(out.square().sum(), leaves)
        results.append([out.detach(), *(grad[:20] for grad in grads)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_batch_norm_without_padding(device):
    """A module's, running statistics included; `masked_batch_norm` has tests of its own."""
    rows = Rows(37, torch.arange(37, device=device) < 30, torch.tensor(30.0, device=device))
    norms = [torch.nn.BatchNorm1d(5, device=device) for _ in range(2)]
    x = 3 + torch.randn(37, 5, device=device)
    with MaskedFunctions([rows], {}, Masks()):
        out = norms[0](x)[:30]
    torch.testing.assert_close(out, norms[1](x[:30]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms[0].state_dict(), norms[1].state_dict(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_maps_sum_their_bias_gradients(monkeypatch, dtype, autocast):
    """Also where the result is written in place, and twice differentiable."""
    if autocast and dtype != torch.float32:
        pytest.skip("autocast casts float32")
    sums = []
    monkeypatch.setattr(
        masked_functions, "sum_of_rows", lambda *args: sums.append(args) or sum_of_rows(*args)
    )
    x = torch.randn(3000, 40, device="cuda", dtype=dtype, requires_grad=True)
    layer = torch.nn.Linear(40, 24, device="cuda", dtype=dtype)
    leaves = [x, layer.weight, layer.bias]

    def run():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = layer(x)
            kind = out.dtype
            loss = F.relu(out, inplace=True).float().square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        again = torch.autograd.grad(sum(item.float().square().sum() for item in first), leaves)
        return [kind, *(item.dtype for item in first)], [loss, *first, *again]

    kinds, expected = run()
    assert not sums
    with (
        MaskedFunctions([], {}, Masks()),
        recorded.running(StepRun(has_padding=False, of_edges=FreshAdjacency.of_edges)),
    ):
        kinds_masked, found = run()
    assert sums
    assert kinds_masked == kinds
    tolerance = 2e-2 if autocast or dtype == torch.bfloat16 else 1e-4
    for item, other in zip(found, expected, strict=True):
        assert (item - other).float().norm() <= tolerance * other.float().norm()


def test_a_mask_made_for_inference():
    """Inference tensors count no writes, so the mask is assumed to be unchanged."""
    with torch.inference_mode():
        mask = torch.tensor([True, False, True])
    masks, x = Masks(), torch.arange(6.0).view(3, 2)
    masks.add(mask)
    assert masks.are_unchanged()
    with MaskedFunctions([], {}, masks):
        assert torch.equal(x[mask], torch.tensor([[0.0, 1.0], [4.0, 5.0]]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits, F.l1_loss],
    ids=lambda f: f.__name__,
)
def test_losses_without_padding(loss, reduction):
    rows = Rows(12, torch.arange(12) < 9, torch.tensor(9.0))
    x = torch.randn(12, 4)
    y = torch.randint(4, (12,)) if loss is F.cross_entropy else torch.rand(12, 4)
    options = {"weight": torch.rand(4)} if loss is F.cross_entropy else {}
    with MaskedFunctions([rows], {}, Masks()):
        out = loss(x, y, reduction=reduction, **options)
    out = out[:9] if reduction == "none" else out
    torch.testing.assert_close(out, loss(x[:9], y[:9], reduction=reduction, **options))


def test_a_trial_leaves_nothing_behind(device):
    task = Task(device)
    task.step(task.x, task.y)
    total = torch.zeros(3, device=device)
    state = [item.clone() for item in task.optimizer.state[next(task.model.parameters())].values()]
    before = [item.clone() for item in task.model.state_dict().values()]
    grads = [item.grad for item in task.model.parameters()]
    kept = [grad.clone() for grad in grads]

    def job():
        total[1:].add_(1)
        return task.step(task.x, task.y), torch.rand(3)

    buffers = [(item, None) for item in task.model.buffers() if item.is_floating_point()]
    torch.manual_seed(3)
    changes = State(list(task.model.parameters()), buffers, devices=[torch.device(device)])
    loss, drawn, *_ = on_trial(job, changes).results
    assert torch.equal(torch.rand(3), drawn)
    assert not total.any()
    after = task.optimizer.state[next(task.model.parameters())].values()
    torch.testing.assert_close(list(after), state, rtol=0, atol=0)
    torch.testing.assert_close(list(task.model.state_dict().values())[:5], before[:5], rtol=0, atol=0)
    for item, grad, content in zip(task.model.parameters(), grads, kept, strict=True):
        assert item.grad is grad
        assert torch.equal(grad, content)
    torch.testing.assert_close(task.step(task.x, task.y), loss)


def test_optimizers_are_prepared(device):
    task = Task(device)
    task.step(task.x, task.y)
    found = RecordedOptimizer(task.optimizer, lambda of: of.type == device)
    group = task.optimizer.param_groups[0]
    rate = group["lr"]
    group["lr"] = 0.5
    found.write()
    assert group["lr"] is rate
    assert rate.item() == 0.5
    assert found.is_as_recorded()
    group["eps"] = 1e-3
    assert not found.is_as_recorded()


def test_what_is_no_step_is_refused():
    with pytest.raises(TypeError, match="step: expected a function or a torch.nn.Module, got int"):
        capture(3)


@pytest.mark.gpu
def test_arguments_on_two_devices():
    """A step whose argument changes on the CPU is not recorded."""
    run = capture(lambda x, index: x[index])
    x = torch.randn(8, 3, device="cuda")
    for nth in range(CALLS):
        assert torch.equal(run(x, torch.tensor([nth % 8])), x[nth % 8 : nth % 8 + 1])


def test_autocast_does_not_lower_the_statistics_of_padded_batches(device):
    """Nor does the GPU's kernel take statistics of 16 bits."""
    rows = Rows(capacity=12, mask=torch.arange(12, device=device) < 9, count=torch.tensor(9.0, device=device))
    x = torch.randn(12, 8, device=device).bfloat16() + 30
    norm, expected = (torch.nn.BatchNorm1d(8, device=device) for _ in range(2))
    with torch.autocast(device, torch.bfloat16):
        want = expected(x[:9])
        with MaskedFunctions([rows], {}, Masks()):
            found = norm(x)
    torch.testing.assert_close(found[:9], want)
    torch.testing.assert_close(norm.running_var, expected.running_var)
    torch.testing.assert_close(norm.running_mean, expected.running_mean)


def test_refused_models_keep_their_graph(device):
    """The loop calls ``backward()`` on what the model returns, in every call."""
    model = torch.nn.Linear(3, 1).to(device)
    forward = model.forward

    def refused(x):
        return forward(x) * (1 if x.sum() > 0 else -1)

    model.forward = refused
    capture(model)
    x = torch.ones(2, 3, device=device)
    with pytest.warns(SlowPathWarning, match="x.sum\\(\\) > 0"):
        repeat(lambda: model(x).sum().backward())
    torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 2.0 * CALLS, device=device))


def test_parentheses_and_the_status_in_repr():
    @capture()
    def double(x):
        return 2 * x

    assert repr(double.captured) == f"<Captured of {double.__qualname__}: watching (no call yet)>"
    assert double(torch.ones(1)) == 2
    assert repr(double.captured).endswith(f": {double.captured.status}>")
    model = capture(torch.nn.Linear(2, 2))
    assert repr(model.forward) == "<CapturedModel of Linear.forward: watching (no call yet)>"
