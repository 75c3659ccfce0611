"""Samplers and loaders of dgl.dataloading with `enable()`, and processes and threads after it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_cases import DGLError, dgl, fastsparse_dgl, homogeneous
from hook_cases import AWAY, enabled, enabled_for, in_thread
from test_dgl_operators import heterogeneous
from torch import Tensor

import fastsparse_core

fn = dgl.function
pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity", "ignore:.*pin_memory")


@pytest.fixture(params=AWAY)
def device(request: pytest.FixtureRequest) -> Any:
    with enabled_for(request.param):
        yield request.param


def graph_with_data() -> Any:
    graph = homogeneous()
    graph.ndata["h"] = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    return graph


def check_blocks(input_nodes: Tensor, output_nodes: Tensor, blocks: Any, whole: Any, device: str) -> None:
    """The blocks are on the device with their data, and a layer on them computes there."""
    assert str(input_nodes.device) == str(output_nodes.device) == device
    for block in blocks:
        assert str(block.device) == device
        assert str(block.edges()[0].device) == device
    feature = blocks[0].srcdata["h"]
    assert torch.equal(feature.cpu(), whole.ndata["h"][input_nodes.cpu()])
    blocks[0].srcdata["x"] = feature
    blocks[0].update_all(fn.copy_u("x", "m"), fn.sum("m", "y"))
    found = blocks[0].dstdata["y"].cpu()
    host = blocks[0].cpu()
    src, dst = host.edges()
    expected = torch.zeros_like(found).index_add_(0, dst, host.srcdata["h"][src])
    torch.testing.assert_close(found, expected)


SAMPLERS = {
    "neighbours": lambda: dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["h"]),
    "ours": lambda: fastsparse_dgl.NeighborSampler([3, 3], prefetch_node_feats=["h"]),
    "ours, unread": lambda: fastsparse_dgl.NeighborSampler([3, 3]),
    "full": lambda: dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["h"]),
    "labor": lambda: dgl.dataloading.LaborSampler([3, 3], prefetch_node_feats=["h"]),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("place", ["graph on the CPU", "graph on the device"])
def test_blocks_arrive_on_the_device(sampler: str, place: str, device: str) -> None:
    whole = graph_with_data()
    graph, nodes = whole, torch.arange(12)
    if place == "graph on the device":
        graph, nodes = whole.to(device), nodes.to(device)
    loader = dgl.dataloading.DataLoader(graph, nodes, SAMPLERS[sampler](), batch_size=5, device=device)
    count = 0
    for batch in loader:
        check_blocks(*batch, whole, device)
        count += 1
    assert count == 3


@pytest.mark.gpu
def test_a_training_step_on_the_gpu_makes_no_block_of_dgls() -> None:
    graph = graph_with_data()
    layers = [dgl.nn.SAGEConv(4, 3, "mean").cuda(), dgl.nn.SAGEConv(3, 2, "mean").cuda()]
    with enabled_for("cuda:0"):
        sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["h"])
        loader = dgl.dataloading.DataLoader(graph, torch.arange(12), sampler, batch_size=5, device="cuda")
        for _, _, blocks in loader:
            x = blocks[0].srcdata["h"]
            for layer, block in zip(layers, blocks, strict=True):
                x = layer(block, x)
            x.sum().backward()
            assert all(isinstance(block, fastsparse_dgl.SampledBlock) for block in blocks)
            assert [block._dgls for block in blocks] == [None, None]


LOADERS = ("DataLoader", "GraphDataLoader", "NeighborSampler", "MultiLayerFullNeighborSampler")


def test_loaders_are_replaced_wherever_they_were_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    before = {name: getattr(dgl.dataloading, name) for name in LOADERS}
    for name, original in before.items():
        monkeypatch.setattr(module, f"imported_{name}", original, raising=False)
    with enabled():
        for name in LOADERS:
            assert getattr(dgl.dataloading, name) is getattr(fastsparse_dgl, name)
            assert vars(module)[f"imported_{name}"] is getattr(fastsparse_dgl, name)
        assert dgl.dataloading.MultiLayerNeighborSampler is fastsparse_dgl.NeighborSampler
        assert fastsparse_dgl.NeighborSampler.__mro__[1] is before["NeighborSampler"]
    for name, original in before.items():
        assert getattr(dgl.dataloading, name) is vars(module)[f"imported_{name}"] is original
    monkeypatch.setenv("FASTSPARSE_DISABLE", "loaders")
    with enabled():
        assert fastsparse_dgl.is_enabled()
        assert {name: getattr(dgl.dataloading, name) for name in LOADERS} == before


def test_loaders_are_in_the_report() -> None:
    class OwnSampler(fastsparse_dgl.NeighborSampler):
        def sample(self, g: Any, indices: Any, exclude_eids: Any = None) -> Any:
            return super().sample(g, indices, exclude_eids)

    graph, seeds = graph_with_data(), torch.arange(6)
    with enabled():
        fastsparse_dgl.enable(report=True)
        for sampler in (
            dgl.dataloading.NeighborSampler([2]),
            dgl.dataloading.ShaDowKHopSampler([2]),
            OwnSampler([2]),
        ):
            next(iter(dgl.dataloading.DataLoader(graph, seeds, sampler, batch_size=6)))
        next(iter(dgl.dataloading.GraphDataLoader([graph, graph], batch_size=2)))
    rows = [(row.call, row.by, row.reason) for row, _ in fastsparse_core.report().rows]
    loaders = {row for row in rows if "Loader" in row[0]}
    assert {row[:2] for row in loaders if not row[2]} == {
        ("DataLoader", "FastSparse"),
        ("GraphDataLoader", "FastSparse"),
    }
    others = sorted(row for row in loaders if row[2])
    assert [row[1] for row in others] == ["DGL", "DGL"]
    assert "not for ShaDowKHopSampler" in others[0][2]
    assert "OwnSampler overrides sample" in others[1][2]


def test_all_neighbours_are_those_of_dgl() -> None:
    graph = graph_with_data()
    seeds = torch.tensor([3, 17, 4])
    original = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["h"])
    with enabled():
        sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2, prefetch_node_feats=["h"])
        assert type(sampler) is not type(original)
        assert isinstance(sampler, type(original))
        found = sampler.sample(graph, seeds)
    expected = original.sample(graph, seeds)
    assert torch.equal(found[0].sort().values, expected[0].sort().values)
    assert torch.equal(found[1], expected[1])
    for mine, theirs in zip(found[2], expected[2], strict=True):
        assert mine.num_dst_nodes() == theirs.num_dst_nodes()
        assert torch.equal(mine.edata[dgl.EID].sort().values, theirs.edata[dgl.EID].sort().values)


def test_samplers_of_the_script_keep_their_methods(monkeypatch: pytest.MonkeyPatch, reasons: Any) -> None:
    """Also if batches would be sampled on a GPU, which would call none of these methods."""
    graph = graph_with_data()
    with enabled():

        class Counting(dgl.dataloading.NeighborSampler):  # type: ignore[misc, name-defined]
            calls = 0

            def sample_blocks(self, *args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return super().sample_blocks(*args, **kwargs)

        monkeypatch.setattr(
            "fastsparse_dgl.dataloading.dataloader.usable_device", lambda _: torch.device("cuda", 0)
        )
        monkeypatch.setattr(dgl.dataloading.dataloader, "_get_device", lambda _: torch.device("cpu"))
        sampler = Counting([2])
        loader = dgl.dataloading.DataLoader(graph, torch.arange(12), sampler, device="cuda", batch_size=5)
        assert len(list(loader)) == sampler.calls == 3
        assert "Counting overrides sample_blocks" in reasons.text
        sampler = dgl.dataloading.NeighborSampler([2])
        loader = dgl.dataloading.DataLoader(graph, Seeds(), sampler, device="cuda")
        assert [len(outputs) for _, outputs, _ in loader] == [3, 2]
        assert "indices is a Seeds" in reasons.text


class Seeds(list):  # type: ignore[type-arg]
    """A dataset of seeds, which DGL takes as it is."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__([torch.arange(3), torch.arange(2)])


def test_graphs_are_stored_and_follow_the_script_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [graph_with_data() for _ in range(5)]
    module = "fastsparse_dgl.dataloading.graph_data_loader"
    with enabled():
        loader = dgl.dataloading.GraphDataLoader(graphs, batch_size=2, num_workers=2)
        assert loader._graphs is not None
        assert [batch.batch_size for batch in loader] == [2, 2, 1]
        monkeypatch.setattr(f"{module}.script_uses_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        held = [False, True]
        monkeypatch.setattr(f"{module}.dgl_can_hold", lambda device: held.pop(0))
        assert str(next(iter(loader)).device) == "cpu"
        loader._current = lambda: None
        next(iter(loader))
        assert loader.device == torch.device("cuda", 0)
        assert loader._graphs is None
        kept = dgl.dataloading.GraphDataLoader(graphs, batch_size=2, device="cpu")
        assert str(next(iter(kept)).device) == "cpu"
    outside = fastsparse_dgl.GraphDataLoader(graphs, batch_size=2)
    assert str(next(iter(outside)).device) == "cpu"


@pytest.mark.gpu
def test_graphs_follow_the_script_to_the_gpu() -> None:
    torch.ones(1, device="cuda")
    with enabled_for("cuda:0"):
        loader = dgl.dataloading.GraphDataLoader([graph_with_data() for _ in range(4)], batch_size=2)
        for batch in loader:
            assert batch.device.type == batch.ndata["h"].device.type == "cuda"
            assert batch.to("cuda") is not None


def test_loader_of_edges(device: str) -> None:
    graph = graph_with_data().to(device)
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.NeighborSampler([3]),
        exclude="self",
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(2),
    )
    edges = torch.arange(20).to(device)
    for _, positive, negative, blocks in dgl.dataloading.DataLoader(
        graph, edges, sampler, batch_size=10, device=device
    ):
        assert str(positive.device) == str(negative.device) == str(blocks[0].device) == device
        positive.ndata["z"] = torch.ones(positive.num_nodes(), 2, device=device)
        positive.apply_edges(fn.u_dot_v("z", "z", "s"))
        assert positive.edata["s"].sum().item() == 2 * positive.num_edges()


def test_samplers_of_several_types(device: str) -> None:
    graph = heterogeneous().to(device)
    loader = dgl.dataloading.DataLoader(
        graph,
        {"user": torch.arange(4).to(device)},
        dgl.dataloading.NeighborSampler([2, 2]),
        batch_size=2,
        device=device,
    )
    for inputs, _, blocks in loader:
        assert {str(nodes.device) for nodes in inputs.values()} == {device}
        assert {str(block.device) for block in blocks} == {device}


def test_graph_loader_and_walks(device: str) -> None:
    graphs = [graph_with_data() for _ in range(4)]
    for batch in dgl.dataloading.GraphDataLoader(graphs, batch_size=2):
        moved = batch.to(device)
        assert str(dgl.sum_nodes(moved, "h").device) == device
        assert str(moved.batch_num_nodes().device) == device
    graph = graphs[0].to(device)
    walks, _ = dgl.sampling.random_walk(graph, graph.nodes()[:3], length=2)
    assert walks.shape == (3, 3)
    assert str(walks.device) == device
    assert dgl.sampling.node2vec_random_walk(graph, graph.nodes()[:3], 1, 1, 2).shape == (3, 3)
    graph.edata["w"] = torch.rand(graph.num_edges(), device=device)
    assert str(dgl.sampling.select_topk(graph, 1, "w", graph.nodes()[:2]).device) == device


def test_uva_says_what_to_do(device: str) -> None:
    with pytest.raises(DGLError, match="use_uva"):
        graph_with_data().pin_memory_()


@pytest.mark.parametrize("workers", [1])
def test_forked_workers_sample_on_the_cpu(workers: int) -> None:
    """A forked process inherits enable() and the parent's graphs."""
    whole = graph_with_data()
    with enabled():
        sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["h"])
        loader = dgl.dataloading.DataLoader(
            whole, torch.arange(12), sampler, batch_size=5, num_workers=workers
        )
        for batch in loader:
            check_blocks(*batch, whole, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("enables", [True, False])
def test_spawned_processes_enable_it_themselves(enables: bool) -> None:
    """A graph without data, on a device that needs no memory."""
    dgl.ndarray.DGLContext.STR2MASK.setdefault("meta", 2)
    with enabled(_devices=("meta",)):
        graph = homogeneous()
        index = fastsparse_dgl.device_graph.place(graph._graph, torch.device("meta"))
        pickled = pickle.dumps(index)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_load_in_child, args=(queue, pickled, enables))
    process.start()
    found = queue.get(timeout=1800)
    process.join()
    assert ("meta" in found) if enables else ("enable()" in found)


def _load_in_child(queue: Any, pickled: bytes, enables: bool) -> None:
    import fastsparse_dgl

    try:
        if enables:
            fastsparse_dgl.enable(_devices=("meta",))
        queue.put(repr(pickle.loads(pickled)))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def run_loaders(start: str, device: str, **environment: str) -> tuple[str, str]:
    """What the script printed; it and its workers are ended after half an hour."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("loader_processes.py")), start, device],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=1800)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # workers hold the pipes open
        return process.communicate()


def check_loaders(start: str, device: str) -> None:
    """Right batches where graphs are given on the CPU; where they are on the device, what to do instead."""
    printed, errors = run_loaders(start, device)
    assert "graphs: right batches" in printed, errors[-2000:]
    if device != "meta":
        assert "neighbours: right batches" in printed, errors[-2000:]
    if device != "cpu":
        assert "Give the loader graphs on the CPU" in printed.replace("\n", " "), errors[-2000:]
        assert "on the device: a batch" not in printed


@pytest.mark.gpu
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_beside_a_graph_on_the_gpu(start: str) -> None:
    check_loaders(start, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_workers(start: str, device: str) -> None:
    """Also without a GPU; `meta` replaces it."""
    check_loaders(start, device)


@pytest.mark.slow
def test_spawned_workers_that_do_not_enable_it() -> None:
    printed, errors = run_loaders("spawn", "meta", FASTSPARSE_NOT_IN_WORKERS="1")
    assert "exited unexpectedly" in printed
    assert "Call fastsparse_dgl.enable() in this process too" in errors


@pytest.mark.gpu
def test_no_workers_of_neighbours_on_the_gpu() -> None:
    """DGL itself refuses them before a process is started."""
    with enabled_for("cuda:0"):
        graph = graph_with_data().to("cuda:0")
        with pytest.raises(ValueError, match="num_workers must be 0"):
            dgl.dataloading.DataLoader(
                graph, graph.nodes(), dgl.dataloading.NeighborSampler([2]), num_workers=1
            )


def test_graphs_on_the_device_in_forked_processes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not work there; the error says so before PyTorch's."""
    graphs = [graph_with_data().to(device) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(DGLError, match="Give the loader graphs on the CPU"):
        dgl.batch(graphs)


@pytest.mark.parametrize("where", ["cpu", *AWAY])
def test_two_threads(where: str) -> None:
    """They may enable it, compute with one graph, and build its structures at the same time."""
    graph = graph_with_data()
    graph.update_all(fn.copy_u("h", "m"), fn.max("m", "expected"))
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            with in_thread(where):
                barrier.wait()
                fastsparse_dgl.enable()
                for _ in range(10):
                    with graph.local_scope():
                        found = dgl.ops.copy_u_max(graph, graph.ndata["h"])
                        degree = graph.in_degrees()
                    torch.testing.assert_close(found.cpu(), expected)
                    assert str(degree.device) == where
                    assert degree.sum().item() == graph.num_edges()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with enabled_for(where) if where != "cpu" else contextlib.nullcontext():
        expected = graph.ndata["expected"]
        graph = graph.to(where)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            fastsparse_dgl.disable()
    assert not failures
