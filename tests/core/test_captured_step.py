"""Training steps as CUDA graphs."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch

from fastsparse_core import Adjacency, attention, log, spmm
from fastsparse_core.capturing.step import CapturedStep
from fastsparse_core.streams import fork


def test_without_a_gpu_the_step_runs_as_it_is(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(log, "_seen", set())
    seen = []
    step = CapturedStep(lambda: seen.append(len(seen)) or len(seen), warm_up=2)
    with caplog.at_level(logging.INFO, logger="fastsparse_core"):
        assert [step() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert [record.message for record in caplog.records] == [
        "CapturedStep: there is no GPU, so the step runs as it is"
    ]


def test_warm_up_is_positive():
    with pytest.raises(ValueError, match="warm_up: expected at least 1, got 0"):
        CapturedStep(lambda: None, warm_up=0)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU on which a capture runs the step, and a replay says so; an empty capture ends with an error."""
    events = []

    @contextlib.contextmanager
    def capture(graph, *, stream, pool):
        assert stream is side
        try:
            yield
        finally:
            if "empty" in events:
                raise UserWarning("The CUDA Graph is empty")

    stream, side = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
    graph = SimpleNamespace(replay=lambda: events.append("replay"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return events


def test_runs_then_records_then_replays(pretended_gpu):
    captured = CapturedStep(lambda: pretended_gpu.append("step"), warm_up=2)
    for _ in range(4):
        captured()
    assert pretended_gpu == ["step", "step", "step", "replay", "replay"]
    captured.reset()
    captured()
    assert pretended_gpu[5:] == ["step"]


@pytest.mark.parametrize("own", [False, True])
def test_says_why_a_step_cannot_be_recorded(pretended_gpu, own):
    def step():
        pretended_gpu.append("step")
        if own and len(pretended_gpu) > 2:
            raise RuntimeError("what went wrong")

    captured = CapturedStep(step, warm_up=1)
    captured()
    pretended_gpu.append("empty")
    reason = "what went wrong" if own else "The CUDA Graph is empty"
    with pytest.raises(RuntimeError, match=f"step: cannot be recorded as a CUDA graph: {reason}; it must"):
        captured()


class Task:
    """A linear model of summed neighbours, and its training step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        row, col = torch.randint(0, 50, (2, 600), generator=generator).cuda()
        self.adj = Adjacency.from_coo(row, col, (50, 50))
        self.x = torch.randn(50, 16, generator=generator).cuda()
        self.weight = torch.randn(16, 16, generator=generator).cuda().requires_grad_()
        self.optimizer = torch.optim.Adam([self.weight], lr=0.01, capturable=True)
        self.runs = 0

    def step(self) -> torch.Tensor:
        self.runs += 1
        self.optimizer.zero_grad()
        loss = spmm(self.adj, self.x @ self.weight).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
def test_replays_train_as_steps_do():
    plain, task = Task(), Task()
    captured = CapturedStep(task.step)
    for nth in range(40):
        if nth == 30:  # what is written into the tensors is read by the replays
            plain.x.mul_(2)
            task.x.mul_(2)
        expected, loss = plain.step(), captured()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(task.weight, plain.weight, rtol=1e-3, atol=1e-4)
    assert task.adj.has_bsb == plain.adj.has_bsb
    assert task.runs == 21  # later calls replay


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
def test_reset_records_anew():
    task = Task()
    captured = CapturedStep(task.step, warm_up=20)
    for _ in range(25):
        captured()
    before = task.x
    task.x = torch.zeros_like(before)
    assert captured().item() > 0  # the record knows nothing of another tensor
    captured.reset()
    for _ in range(25):
        loss = captured()
    assert loss.item() == 0
    assert task.runs == 42


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["reads", "cpu"])
def test_what_cannot_be_recorded_is_an_error(fault):
    task, tensor = Task(), torch.zeros(3)
    step = {"reads": lambda: task.step().item(), "cpu": lambda: tensor.add_(1)}[fault]
    captured = CapturedStep(step, warm_up=20)
    for _ in range(20):
        captured()
    with pytest.raises(RuntimeError, match="step: cannot be recorded as a CUDA graph"):
        captured()


@pytest.mark.gpu
def test_dropout_of_attention_weights_is_refused():
    task = Task()
    heads = task.x.view(50, 2, 8)
    captured = CapturedStep(lambda: attention(task.adj, heads, heads, heads, dropout_p=0.5), warm_up=20)
    for _ in range(20):
        captured()
    with pytest.raises(RuntimeError, match="dropout_p: expected 0 while a CUDA graph is captured, got 0.5"):
        captured()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fork_gives_the_result_of_its_job(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = torch.ones(300, 300, device=device)

    def step():
        squared = fork(lambda: x @ x, x)
        cubed = fork(lambda: (x + 1) ** 3, x)
        return x.sum() + squared().sum() + cubed().sum()

    captured = CapturedStep(step, warm_up=1)
    for value in range(1, 6):
        x.fill_(value)
        assert captured().item() == pytest.approx(300**2 * (value + 300 * value**2 + (value + 1) ** 3))


@pytest.mark.gpu
def test_a_forked_job_that_fails_leaves_the_rest_of_the_step():
    x = torch.zeros(5, device="cuda")

    def fail():
        x.add(1)
        raise KeyError("job")

    def step():
        with contextlib.suppress(KeyError):
            fork(fail, x)
        return x.add_(1)

    captured = CapturedStep(step, warm_up=1)
    assert [captured()[0].item() for _ in range(4)] == [1, 2, 3, 4]


def test_what_is_no_step_is_refused():
    with pytest.raises(TypeError, match="step: expected a function without arguments, got int"):
        CapturedStep(3)
