"""How CUDA graphs are recorded: by PyTorch's rules for pools, generators and threads."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from simulated_graphs import in_engine_thread

from fastsparse_core import recorded
from fastsparse_core.capturing.graphs import CudaGraphs
from fastsparse_core.recorded import StepRun
from fastsparse_core.streams import fork


class Gpu:
    """What PyTorch keeps about recordings, and how it fails, after CUDACachingAllocator and CUDAGraph.

    Attributes:
        uses: number of graphs of every pool.
        underway: pools that are recorded to.
        generator_records: whether draws outside of a recording are refused.
        is_invalid: whether the stream's recording was made invalid.
    """

    def __init__(self, monkeypatch):
        self.uses, self.underway = {}, []
        self.generator_records = self.is_invalid = False
        self.side = SimpleNamespace(wait_stream=lambda other: None, device_index=0)
        handles = itertools.count(1)
        for name, value in {
            "Stream": lambda: self.side,
            "current_stream": lambda: self.side,
            "stream": lambda stream: contextlib.nullcontext(),
            "graph_pool_handle": lambda: (0, next(handles)),
            "CUDAGraph": lambda: type("Graph", (), {"replay": lambda graph: None})(),
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", lambda *size, **options: None)
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda index, pool: self.end(pool), raising=False
        )
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda index, pool: self.release(pool), raising=False
        )

    @contextlib.contextmanager
    def graph(self, graph, *, stream, pool=None, capture_error_mode="global"):
        pool = pool or torch.cuda.graph_pool_handle()
        assert self.uses.get(pool, 1) > 0, "use_count > 0"
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.underway.append(pool)
        self.generator_records = True
        try:
            yield
        finally:
            if self.is_invalid:
                self.is_invalid = False
                raise RuntimeError("operation failed due to a previous error during capture")
            self.end(pool)
            self.generator_records = False
            weakref.finalize(graph, self.release, pool)

    def end(self, pool):
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, pool):
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0

    def read(self):
        self.is_invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_graphs_share_memory_that_outlives_them(gpu):
    graphs = CudaGraphs()
    for _ in range(3):
        replay, result = graphs.record(lambda: "result")
        assert result == "result"
        replay()
        del replay  # an old record is forgotten before a new one is made
    assert list(gpu.uses.values()) == [1]
    graphs.forget_memory()
    assert list(gpu.uses.values()) == [0]


def test_a_recording_that_fails_leaves_no_trace(gpu):
    graphs = CudaGraphs()
    first, _ = graphs.record(lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            graphs.record(gpu.read)
        assert not gpu.underway
        assert not gpu.generator_records
    graphs.record(lambda: None)
    first()
    del first
    assert sorted(gpu.uses.values())[-1] == 1


def test_errors_of_other_kinds_are_cleaned_up_too(gpu):
    def fail():
        raise KeyError("step")

    graphs = CudaGraphs()
    with pytest.raises(KeyError, match="step"):
        graphs.record(fail)
    assert not gpu.underway
    assert graphs.record(lambda: 1)[1] == 1


@pytest.mark.parametrize("place", ["here", "backward"])
def test_backward_passes_know_the_run_that_they_belong_to(place):
    """On a GPU, backward passes run in autograd's threads."""
    run, seen = StepRun(has_padding=False, of_edges=lambda: None), []

    def look():
        seen.append((recorded.current(), recorded.drops(), threading.get_ident() == main))

    main = threading.get_ident()
    ask = look if place == "here" else lambda: in_engine_thread(look)
    with recorded.running(run), recorded.without_dropout():
        ask()
    ask()
    assert seen == [(run, False, place == "here"), (None, True, place == "here")]


@pytest.mark.gpu
def test_on_a_gpu():
    """A failed recording, then draws, then one in the same place; and again when the first graph is gone."""
    graphs, x = CudaGraphs(), torch.zeros(3, device="cuda")
    for _ in range(2):
        graphs.beside(lambda: x.add(1).sum())
        replay, _ = graphs.record(lambda: x.add_(1))
        before = x.clone()
        replay()
        assert torch.equal(x, before + 1)
        with pytest.raises(RuntimeError):
            graphs.record(lambda: x.sum().item())
        assert torch.rand(4, device="cuda").isfinite().all()
        del replay


@pytest.mark.gpu
def test_backward_passes_on_a_gpu_know_the_run_that_they_belong_to():
    run, seen = StepRun(has_padding=False, of_edges=lambda: None), []
    x = torch.ones(3, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((recorded.current(), threading.get_ident() == main)))
    main = threading.get_ident()
    with recorded.running(run):
        y.sum().backward()
    assert seen == [(run, False)]


def replayed(step, device):
    """A step that runs once, is recorded, and is replayed from then on; on the CPU it runs."""
    graphs, replay = CudaGraphs(), []

    def run():
        if device == "cpu":
            return step()
        if not replay:
            graphs.beside(step)
            replay.append(graphs.record(step))
        replay[0][0]()
        return replay[0][1]

    return run


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fork_gives_the_result_of_its_job(device):
    x = torch.ones(300, 300, device=device)

    def step():
        squared = fork(lambda: x @ x, x)
        cubed = fork(lambda: (x + 1) ** 3, x)
        return x.sum() + squared().sum() + cubed().sum()

    run = replayed(step, device)
    for value in range(1, 6):
        x.fill_(value)
        assert run().item() == pytest.approx(300**2 * (value + 300 * value**2 + (value + 1) ** 3))


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

    run = replayed(step, "cuda")
    assert [run()[0].item() for _ in range(3)] == [2, 3, 4]
