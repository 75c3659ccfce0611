"""Blocks have all data of the graph, gathered when first read: as DGL's blocks on the CPU, and on the GPU."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl_cases import dgl, fastsparse_dgl
from hook_cases import enabled
from test_dgl_loader import hetero, loader, with_data
from torch import Tensor

from fastsparse_dgl import block_data
from fastsparse_dgl.dataloading import neighbor_sampler

pytestmark = pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")
NID, EID = dgl.NID, dgl.EID


def unread_on_cpu(frame: Any, ids: Tensor, id_name: str, reads: set[Any], key: Any) -> Any:
    """What blocks on a GPU have."""
    made = block_data.unread(frame, ids, reads, key)
    made[id_name] = ids
    return made


@pytest.fixture(params=["DGL's block", "DGL's block as on a GPU", "SampledBlock"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "DGL's block":
        monkeypatch.setattr(neighbor_sampler, "gathered", unread_on_cpu)
    if request.param == "SampledBlock":
        monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)
    return str(request.param)


def drawn(graph: Any, *fanouts: int, seeds: Any = None) -> Any:
    seeds = torch.tensor([4, 9, 17, 2]) if seeds is None else seeds
    return fastsparse_dgl.NeighborSampler(list(fanouts)).sample_blocks(graph, seeds)


def check(graph: Any, block: Any, device: str = "cpu") -> None:
    """All data of a block of one type are the graph's."""
    for data, own, ids in (
        (block.srcdata, graph.ndata, NID),
        (block.dstdata, graph.ndata, NID),
        (block.edata, graph.edata, EID),
    ):
        assert sorted(data) == sorted([*own, ids])
        for name, table in own.items():
            assert name in data
            assert data[name].device.type == device
            assert torch.equal(data[name].cpu(), table[data[ids].cpu().long()])


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [False, True])
def test_loops(idtype: torch.dtype, workers: int, prefetch: bool, device: str) -> None:
    graph = with_data(idtype)
    names = {"prefetch_node_feats": ["feat"], "prefetch_labels": ["label"]} if prefetch else {}
    sampler = fastsparse_dgl.NeighborSampler([3, -1], **names)
    for _, outputs, blocks in loader(graph, sampler, device, num_workers=workers):
        assert torch.equal(blocks[-1].dstdata["label"].cpu(), outputs.cpu().long())
        for block in blocks:
            check(graph, block, device)


def test_loops_of_types(device: str) -> None:
    graph = hetero()
    for name in graph.canonical_etypes:
        graph.edges[name].data["w"] = torch.rand(graph.num_edges(name))
    seeds = {"paper": torch.arange(12)}
    for _, _, blocks in loader(graph, fastsparse_dgl.NeighborSampler([2, 2]), device, indices=seeds):
        for block in blocks:
            of_types = block.srcdata["feat"]
            for name in graph.ntypes:
                for views in (block.srcnodes, block.dstnodes):
                    data = views[name].data
                    assert torch.equal(data["feat"].cpu(), graph.nodes[name].data["feat"][data[NID].cpu()])
                assert torch.equal(of_types[name], block.srcnodes[name].data["feat"])
            for name in graph.canonical_etypes:
                data = block.edges[name].data
                assert torch.equal(data["w"].cpu(), graph.edges[name].data["w"][data[EID].cpu()])


def test_like_dgls_sampler(kind: str) -> None:
    """A block of all neighbours has the same names and numbers as DGL's."""
    graph, seeds = with_data(), torch.arange(30)
    _, _, (found,) = drawn(graph, -1, seeds=seeds)
    _, _, (expected,) = dgl.dataloading.NeighborSampler([-1]).sample_blocks(graph, seeds)
    for ours, theirs in ((found.srcdata, expected.srcdata), (found.dstdata, expected.dstdata)):
        assert sorted(ours) == sorted(theirs)
        assert torch.equal(ours["feat"][ours[NID].argsort()], theirs["feat"][theirs[NID].argsort()])
    ours, theirs = found.edata, expected.edata
    assert sorted(ours) == sorted(theirs)
    assert torch.equal(ours["weight"][ours[EID].argsort()], theirs["weight"][theirs[EID].argsort()])


SAME: dict[str, Callable[[Any], Any]] = {
    "itself": lambda block: block,
    "to": lambda block: block.to("cpu"),
    "int": lambda block: block.int(),
    "pickle": lambda block: pickle.loads(pickle.dumps(block)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_copies(name: str, read: bool, kind: str) -> None:
    graph = with_data()
    _, _, (block,) = drawn(graph, 3)
    if read:
        check(graph, block)
    check(graph, SAME[name](block))
    check(graph, block)


def test_slices_and_scopes(kind: str) -> None:
    graph = hetero()
    _, _, (block,) = drawn(graph, 3, seeds={"paper": torch.tensor([3, 8, 1])})
    expected = graph.nodes["paper"].data["feat"][block.srcnodes["paper"].data[NID]]
    with block.local_scope():
        assert torch.equal(block["cites"].srcdata["feat"], expected)
        block.srcnodes["paper"].data["feat"] = torch.zeros(len(expected), 5)
        assert (block["cites"].srcdata["feat"] == 0).all()
    assert torch.equal(block["cites"].srcdata["feat"], expected)
    assert torch.equal(block.srcnodes["paper"].data["feat"], expected)


def test_message_passing(kind: str) -> None:
    graph = with_data()
    _, _, (block,) = drawn(graph, 3)
    with enabled():
        block.update_all(dgl.function.u_mul_e("feat", "weight", "m"), dgl.function.sum("m", "out"))
        block.apply_edges(lambda edges: {"twice": 2 * edges.src["feat"]})
    source, destination = block.edges()
    message = block.srcdata["feat"][source] * block.edata["weight"][:, None]
    torch.testing.assert_close(
        block.dstdata["out"], torch.zeros(4, 6).index_add_(0, destination, message), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(block.edata["twice"], 2 * block.srcdata["feat"][source])


def test_writes(kind: str) -> None:
    """As in DGL, a feature has the numbers of its first read, and data written to a block stays there."""
    graph = with_data()
    graph.ndata["feat"] = torch.arange(180.0).reshape(30, 6)
    _, _, (block,) = drawn(graph, 3)
    ids, table = block.srcdata[NID], graph.ndata["feat"]
    table += 1
    assert torch.equal(block.srcdata["feat"], table[ids])
    table += 1
    assert torch.equal(block.srcdata["feat"], table[ids] - 1)
    label = graph.ndata["label"]
    graph.ndata["label"] = torch.zeros(30)
    assert torch.equal(block.srcdata["label"], label[ids])
    block.srcdata["feat"] = torch.zeros(len(ids), 6)
    block.dstdata["feat"][0] = 7
    del block.srcdata["label"]
    assert "label" not in block.srcdata
    assert torch.equal(graph.ndata["feat"], table)
    with pytest.raises(dgl.DGLError):
        block.srcdata["feat"] = torch.zeros(len(ids) + 1, 6)
    with pytest.raises(KeyError, match="other"):
        block.srcdata["other"]


def test_gradients_reach_the_graphs_features(device: str) -> None:
    graph = with_data()
    table = graph.ndata["feat"] = torch.nn.Parameter(graph.ndata["feat"])
    (batch, *_) = loader(graph, fastsparse_dgl.NeighborSampler([3]), device, shuffle=False)
    inputs, _, (block,) = batch
    block.srcdata["feat"].sum().backward()
    expected = torch.zeros(30, 6).index_fill_(0, inputs.cpu().long(), 1.0)
    assert torch.equal(table.grad, expected)


def test_a_dropped_block_is_gone(kind: str) -> None:
    """Without the garbage collector, which does not know how full the GPU is."""
    _, _, (block,) = drawn(with_data(), 3)
    block.srcdata["feat"], block.edata["weight"]
    with block.local_scope():
        feature = weakref.ref(block.srcdata["feat"])
    gc.disable()
    try:
        del block
        assert feature() is None
    finally:
        gc.enable()


def test_a_loop_without_workers_warns_of_nothing(device: str) -> None:
    graph = with_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, _, blocks in loader(graph, fastsparse_dgl.NeighborSampler([3]), device):
            check(graph, blocks[0], device)


@pytest.mark.gpu
@pytest.mark.parametrize("pins", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_moved_unread(pins: bool, is_enabled: bool) -> None:
    graph = with_data()
    if pins:
        graph.ndata["feat"] = graph.ndata["feat"].pin_memory()
    with enabled() if is_enabled else contextlib.nullcontext():
        for _, _, (block,) in loader(graph, fastsparse_dgl.NeighborSampler([3]), "cuda"):
            check(graph, block.to("cpu"))
            check(graph, block, "cuda")
            if is_enabled:
                check(graph, block.to("cpu").to("cuda"), "cuda")


def test_only_what_is_read_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step only holds the data that was read from an earlier batch."""
    monkeypatch.setattr(neighbor_sampler, "gathered", unread_on_cpu)
    monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)
    tables, gather = [], block_data._rows
    monkeypatch.setattr(
        block_data, "_rows", lambda table, *args: tables.append(table) or gather(table, *args)
    )
    graph, sampler = with_data(), fastsparse_dgl.NeighborSampler([3, 2])
    for nth in range(2):
        _, _, blocks = sampler.sample_blocks(graph, torch.tensor([4, 9]))
        held = [
            [sorted(block_data.read_before(frame)) for frame in block.frames.values()] for block in blocks
        ]
        assert held[0][0] == ([NID] if nth == 0 else [NID, "feat"])
        assert held[1][1] == ([NID] if nth == 0 else [NID, "label"])
        assert held[0][1] == held[1][0] == [NID]
        assert held[0][2] == held[1][2] == [EID]
        before = len(tables)
        for _ in range(2):
            blocks[0].srcdata["feat"], blocks[-1].dstdata["label"]
        assert len(tables) - before == (2 if nth == 0 else 0)
    assert {id(table) for table in tables} == {id(graph.ndata["feat"]), id(graph.ndata["label"])}
