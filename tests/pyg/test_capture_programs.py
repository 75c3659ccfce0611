"""Steps as people write them: they replay, or say why not, and give what they give without `capture`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captured_steps import compare
from simulated_graphs import simulate
from torch import nn
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GCNConv,
    MFConv,
    RGCNConv,
    SuperGATConv,
    global_add_pool,
)

from benchmarks.step_forms import FORMS, REFUSED, Problem
from fastsparse_core import SlowPathWarning, capture, log
from fastsparse_core.capturing.captured import CALLS
from fastsparse_pyg import FastGATConv, FastGINConv, FastSAGEConv, FastTransformerConv


@pytest.fixture(autouse=True)
def graphs_on(request, monkeypatch):
    """The CPU has something like CUDA graphs."""
    monkeypatch.setattr(log, "seen", set())
    if request.node.get_closest_marker("gpu") is None:
        simulate(monkeypatch)


def problem(device):
    return Problem(device, 60, 300, 8, 16)


def run(step, calls=CALLS + 6, seed=3):
    """Results of calls, as numbers, and the warnings."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (negative_sampling draws there)
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        found = [tree_leaves(step()) for _ in range(calls)]
    messages = [
        item for item in warned if item.category is SlowPathWarning and "capture:" in str(item.message)
    ]
    return [
        [float(item.detach().sum()) if torch.is_tensor(item) else item for item in each] for each in found
    ], messages


@pytest.mark.parametrize("name", FORMS)
def test_forms(device, name):
    """Random numbers are those of the plain step, too."""
    expected, _ = run(FORMS[name](problem(device)))
    step = capture(FORMS[name](problem(device)))
    found, messages = run(step)
    tolerance = 0.05 if name in ("autocast", "grad_scaler") else 1e-3
    for one, other in zip(found, expected, strict=True):
        assert [type(item) for item in one] == [type(item) for item in other]
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    if name not in REFUSED:
        assert step.captured.status == "replaying"
        assert not messages
        return
    assert step.captured.status.startswith("refused: ")
    assert REFUSED[name] in step.captured.status
    (message,) = messages
    assert REFUSED[name] in str(message.message)
    assert message.filename == __file__


# ---------------------------------------------------------------- numbers


KEPT = []


class Holder:
    last = 0.0


def appended(x):
    KEPT.append(x.sum().item())


def assigned(x):
    Holder.last = x.sum().item() * 2


def returned_and_kept(x):
    Holder.last = x.sum().item()
    return Holder.last


def in_an_object(x):
    holder = Holder()
    holder.last = x.sum().item()
    return holder


def branch(x):
    return x + 1 if x.sum().item() > 0 else x


def truth(x):
    return x + 1 if x.sum() > 0 else x


def largest(x):
    return max(x.sum().item(), float(x[0]))


def printed(x):
    print(f"{x.sum().item():.3f}")


def scaled(x):
    return x * x.sum().item()


def counted(x):
    return [x + nth for nth in range(int((x > 0).sum()))]


def exponential(x):
    return math.exp(x.sum().item())


def checked(x):
    if math.isnan(float(x.sum())):
        raise ValueError("no number")


def written(x):
    return json.dumps({"loss": x.sum().item()})


def in_total(x):
    Holder.last += float(x.sum())


def changed_after(x):
    total = x.sum()
    found = total.item()
    total.add_(1)
    return found


@pytest.mark.parametrize(
    "step",
    [
        *(
            appended,
            assigned,
            returned_and_kept,
            in_an_object,
            branch,
            truth,
            largest,
            printed,
            scaled,
            counted,
        ),
        *(exponential, checked, written, in_total, changed_after),
    ],
    ids=lambda step: step.__name__,
)
def test_numbers_that_the_step_goes_on_to_use(device, step):
    """The step is refused, naming the line, and its side effects happen as often as without `capture`."""
    x = torch.arange(1.0, 5.0, device=device)
    states, code = [], step.__code__
    for run_ in (step, capture(step)):
        KEPT.clear()
        Holder.last = 0.0
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = [run_(x) for _ in range(CALLS + 6)][-1]
        assert not {type(item) for item in (*KEPT, Holder.last)} - {float} or step is not run_
        states.append((list(KEPT), Holder.last, getattr(result, "last", result)))
    assert repr(states[0]) == repr(states[1])
    assert run_.captured.status.startswith("refused: ")
    assert "test_capture_programs.py" in run_.captured.status
    assert step.__code__ is code


def halves(x):
    total = int(x.sum())
    return {
        "a": [float(x[0]) / 2, -total],
        "b": (round(x.sum().item() / 3, 2), 1 + total % 3, abs(x[1].item() ** 2)),
    }


def lists(x):
    return (2 * x).tolist()


def helped(x):
    return [helper(part) for part in x.split(2)]


def helper(x):
    return float(x.sum())


def averages(x):
    return sum(part.item() for part in 2 * x) / len(x)


@pytest.mark.parametrize("step", [halves, lists, helped, averages], ids=lambda step: step.__name__)
def test_numbers_that_are_returned(device, step):
    x, captured = torch.arange(1.0, 5.0, device=device), capture(step)
    for _ in range(CALLS + 8):
        x += 1
        assert captured(x) == step(x)
    assert captured.captured.status == "replaying"


def test_float_stays_what_it_is_elsewhere(device):
    """`float` may also be used as a type, and convert text, in the same function."""

    def step(x):
        assert isinstance(1.0, float)
        return float(x.sum().to(float)) + float("2.5") + int("11", base=2) + 0.0

    captured, x = capture(step), torch.ones(3, device=device)
    assert {captured(x) for _ in range(CALLS + 6)} == {8.5}
    assert captured.captured.status == "replaying"
    assert float is __builtins__["float"]


# ---------------------------------------------------------------- inputs that are not recorded


def test_edges_that_change_in_place_are_read_again(device):
    """The number of loops of PyG's own layers is known from the calls before."""
    results = []
    for captures in (False, True):
        given = problem(device)
        step = FORMS["pyg_gcn"](given)
        step = capture(step) if captures else step
        losses, _ = run(step)
        given.edge_index[:, :7] = 5  # loops
        losses += run(step, 60)[0]
        results.append(losses)
        if captures:
            assert step.captured.status == "replaying"
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("conv", [GCNConv, partial(GATConv, edge_dim=1)], ids=["gcn", "gat"])
def test_pygs_layers_with_edge_features(device, conv):
    given = problem(device)
    edge_index = torch.cat([given.edge_index, torch.arange(5, device=device).expand(2, 5)], 1)
    weight = torch.rand(edge_index.size(1), device=device)
    torch.manual_seed(0)
    layer = conv(8, 4).to(device)
    step = capture(lambda: layer(given.x, edge_index, weight).detach())
    for _ in range(CALLS + 6):
        torch.testing.assert_close(step(), layer(given.x, edge_index, weight).detach(), rtol=1e-4, atol=1e-5)
    assert step.captured.status == "replaying"


@pytest.mark.parametrize(
    "make",
    [
        lambda: RGCNConv(8, 4, 3),
        lambda: MFConv(8, 4),
        lambda: ChebConv(8, 4, K=2),
        lambda: ClusterGCNConv(8, 4),
        lambda: SuperGATConv(8, 4),
    ],
    ids=["rgcn", "mf", "cheb", "cluster", "supergat"],
)
def test_more_of_pygs_layers(device, make):
    """What they count follows from the edges. SuperGAT draws edges on the CPU, and the reason says where."""
    given = problem(device)
    layer = make().to(device)
    kinds = [given.edge_index[0] % 3] if isinstance(layer, RGCNConv) else []
    step = capture(lambda: layer(given.x, given.edge_index, *kinds).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(CALLS + 6):
            torch.manual_seed(0)
            found = step()
    torch.manual_seed(0)
    expected = layer(given.x, given.edge_index, *kinds).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    status = step.captured.status
    if isinstance(layer, SuperGATConv):
        assert "layer(given.x, given.edge_index, *kinds)" in status
        assert "negative_sampling()" in status
    else:
        assert status == "replaying"


def test_a_step_leaves_its_model_in_the_mode_that_it_sets(device):
    """Though a replay calls neither ``train()`` nor ``eval()``."""
    given = problem(device)
    model = given.model(normalizes=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        model.train()
        optimizer.zero_grad()
        loss = model(given.x, given.edge_index).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def test():
        model.eval()
        return model(given.x, given.edge_index).square().mean().item()

    steps = [capture(train), capture(test)]
    for nth in range(60):
        for step, trains in zip(steps, (True, False), strict=True):
            step()
            assert {module.training for module in model.modules()} == {trains}, nth
    assert [step.captured.status for step in steps] == ["replaying"] * 2


def test_numbers_of_the_host_that_change(device):
    """Random numbers of Python and of NumPy, and tensors of them."""
    x = torch.ones(4, device=device)
    numbers = iter(range(10_000))
    for step in (
        lambda: x * random.random(),
        lambda: x * np.random.rand(),  # noqa: NPY002
        lambda: x * torch.tensor([float(next(numbers))], device=device),
        lambda: (x.sum(), next(numbers)),
    ):
        captured = capture(step)
        with pytest.warns(SlowPathWarning, match="is not recorded"):
            found = [tree_leaves(captured())[-1] for _ in range(CALLS + 8)]
        assert captured.captured.status.startswith("refused: ")
        assert len({float(torch.as_tensor(item).sum()) for item in found}) == len(found)


def test_tensors_of_the_hosts_constants(device):
    x = torch.arange(4.0, device=device)
    step = capture(lambda: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=device) + x.new_tensor(2.0))
    for _ in range(CALLS + 6):
        assert step().tolist() == [2.0, 4.0, 8.0, 14.0]
    assert step.captured.status == "replaying"


def test_status_and_warnings(device):
    """Each refusal is logged once, at the line that calls the step."""
    x, step = torch.ones(3, device=device), capture(lambda x, n: x.sum().item() > n)
    assert step.captured.status == "watching (no call yet)"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for nth in range(2 * CALLS + 5):
            if nth == 3:
                assert step.captured.status == f"watching (3 of {CALLS} calls)"
            assert step(x, 1) is True
            assert step(x, 2) is True
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert "`x.sum().item() > n`" in str(warned[0].message) or "x.sum().item() > n" in str(warned[0].message)


@pytest.mark.parametrize("late", [-2, 0, 2])
def test_errors_of_the_recorded_form_leave_the_step(device, late):
    """What a trial did before it failed is undone, and the call runs as it is."""
    given, calls = problem(device), []
    model = given.model(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss = model(given.x, given.edge_index).square().mean()
        loss.backward()
        optimizer.step()
        calls.append(len(calls))
        if torch.overrides._get_current_function_mode() is not None and len(calls) > CALLS - late:
            raise KeyError("only under a mode")
        return loss

    plain = problem(device).model(dropout=0.0)
    plain.load_state_dict(model.state_dict())
    other = torch.optim.SGD(plain.parameters(), lr=0.01)
    captured = capture(step)
    with pytest.warns(SlowPathWarning, match="KeyError: 'only under a mode'"):
        losses = [captured().item() for _ in range(CALLS + 6)]
    expected = []
    for _ in range(CALLS + 6):
        other.zero_grad()
        loss = plain(given.x, given.edge_index).square().mean()
        loss.backward()
        other.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- rounding


_draws = random.Random(0)


@torch.library.custom_op("fastsparse_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor, size: float) -> torch.Tensor:
    """Like sums by atomics in 16 bits: other digits in every run, and in every replay."""
    return x * (1 + size * _draws.uniform(-1, 1))


def test_noise_of_the_device_is_told_from_faults(monkeypatch):
    """Noise beyond the usual tolerance is measured; a fault of the same size without noise is refused."""
    x, calls = torch.ones(5), []

    def step(noise, drift):
        calls.append(0)
        return noisy(x, noise) * (1 + drift * (len(calls) % 7))

    for noise, drift, replays in ((0.1, 0.0, True), (0.0, 0.1, False), (0.01, 0.1, False), (0.0, 0.0, True)):
        captured = capture(partial(step, noise, drift))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(CALLS + 6):
                captured()
        assert (captured.captured.status == "replaying") is replays, (noise, drift, captured.captured.status)


WIDTH = 16


def threads(device, number, width=WIDTH):
    """Batches of threads: most answers go to the first post, so its degree and its gradients are large."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        graphs = []
        for nth in range(8):
            size = int(torch.randint(60, 120, (), generator=generator))
            to = (torch.rand(size - 1, generator=generator) ** 4 * torch.arange(1, size)).long()
            edges = torch.stack([torch.arange(1, size), to])
            x = torch.ones(size, width)
            x[:, 0] = torch.bincount(to, minlength=size).float().log1p()
            graphs.append(
                Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.tensor([nth % 2]))
            )
        batches.append(Batch.from_data_list(graphs).to(device))
    return batches


class Threads(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.convs = nn.ModuleList([conv(WIDTH), conv(WIDTH)])
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, batch):
        x = batch.x
        for conv in self.convs:
            x = conv(x, batch.edge_index).relu()
        return self.out(global_add_pool(x, batch.batch))


THREADS = {
    "gin": lambda width: FastGINConv(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    ),
    "sage": lambda width: FastSAGEConv(width, width, aggr="sum"),
    "gat": lambda width: FastGATConv(width, width),
    "transformer": lambda width: FastTransformerConv(width, width),
}


def loss_under_autocast(net, batch):
    with torch.autocast(batch.x.device.type, torch.bfloat16):
        return F.cross_entropy(net(batch).float(), batch.y)


@pytest.mark.parametrize("conv", THREADS)
def test_batches_of_threads_under_autocast(device, conv):
    batches = threads(device, 16)
    adam = partial(torch.optim.Adam, lr=1e-3)
    make = partial(Threads, THREADS[conv])
    found, _ = compare(
        device, make, loss_under_autocast, lambda: batches, adam, rtol=0.3, atol=0.3, outputs=0
    )
    assert found.status == "replaying"


@pytest.mark.parametrize("fault", ["deviation", "norm"])
def test_faults_under_autocast_are_still_refused(device, fault):
    """Steps in 16 bits that mix the graphs of a batch."""

    def loss(net, batch):
        with torch.autocast(batch.x.device.type, torch.bfloat16):
            out = net(batch).float()
            x = net.convs[0](batch.x, batch.edge_index).float()
            mixed = x - x.std(0) if fault == "deviation" else 10 * F.normalize(x, dim=0)
            return F.cross_entropy(out, batch.y) + mixed.square().mean()

    batches = threads(device, 16)
    adam = partial(torch.optim.Adam, lr=1e-3)
    with pytest.warns(SlowPathWarning, match="padding would change"):
        found, _ = compare(
            device,
            partial(Threads, THREADS["sage"]),
            loss,
            lambda: batches,
            adam,
            rtol=0.3,
            atol=0.3,
            outputs=0,
        )
    assert not found.records
