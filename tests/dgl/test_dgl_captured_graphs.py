"""Captured steps on DGL's graphs that stay, and on blocks; other graphs run as they are."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from simulated_graphs import simulate

from fastsparse_core import capture
from fastsparse_core.capturing import captured as machinery
from fastsparse_dgl import (
    FastGATConv,
    FastGATv2Conv,
    FastGraphConv,
    FastSAGEConv,
    NeighborSampler,
)
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dataloading import neighbor_sampler

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """The CPU has something like CUDA graphs."""
    simulate(monkeypatch)


@pytest.mark.parametrize("batched", [False, True])
def test_graphs(batched):
    graph = dgl.add_self_loop(dgl.rand_graph(40, 200))
    graph.ndata["feat"] = torch.randn(40, 8)
    graph = dgl.batch([graph, graph]) if batched else graph
    losses = []
    for captures in (False, True):
        torch.manual_seed(0)
        conv = FastGATConv(8, 4, 2)
        optimizer = torch.optim.Adam(conv.parameters())

        def step(graph, conv=conv, optimizer=optimizer):
            optimizer.zero_grad()
            loss = conv(graph, graph.ndata["feat"]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = capture(step) if captures else step
        losses.append(torch.stack([run(graph).detach() for _ in range(machinery.CALLS + 8)]))
        if captures:
            assert len(run.captured.records) == (not batched)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-7)


CONVS = {
    "sage": lambda size: FastSAGEConv(size, 8, "mean"),
    "gcn": lambda size: FastGraphConv(size, 8, allow_zero_in_degree=True),
    "gat": lambda size: FastGATConv(size, 4, 2, allow_zero_in_degree=True),
    "gatv2": lambda size: FastGATv2Conv(size, 4, 2, allow_zero_in_degree=True),
    "weighted": lambda size: FastGraphConv(size, 8, norm="right", allow_zero_in_degree=True),
}


@pytest.mark.parametrize("is_dgls", [False, True])
@pytest.mark.parametrize("conv", CONVS)
def test_blocks(monkeypatch, conv, is_dgls):
    """Blocks of DGL, and those that stand in for them on a GPU."""
    monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: is_dgls)
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(290, (2, 1500), generator=generator)
    graph = dgl.graph(tuple(ends), num_nodes=300)
    feat, label = torch.randn(300, 6, generator=generator), torch.randint(8, (300,), generator=generator)
    weight = torch.rand(1500, generator=generator)
    losses = []
    for captures in (False, True):
        torch.manual_seed(0)
        convs = torch.nn.ModuleList([CONVS[conv](6), CONVS[conv](8)])
        norm = torch.nn.BatchNorm1d(8)
        optimizer = torch.optim.Adam([*convs.parameters(), *norm.parameters()], lr=0.01)

        def step(blocks, convs=convs, norm=norm, optimizer=optimizer):
            optimizer.zero_grad()
            x = blocks[0].srcdata["feat"]
            for layer, block in zip(convs, blocks, strict=True):
                options = {"edge_weight": block.edata["weight"]} if conv == "weighted" else {}
                x = norm(layer(block, x, **options).flatten(1)).relu()
            loss = F.cross_entropy(x, blocks[-1].dstdata["label"])
            loss.backward()
            optimizer.step()
            return loss, x

        run = capture(step) if captures else step
        sampler = NeighborSampler([3, 5])
        torch.manual_seed(1)
        results = []
        for seeds in torch.arange(90).split(16) * 8:
            nodes, _, blocks = sampler.sample(graph, seeds)
            blocks[0].srcdata["feat"], blocks[-1].dstdata["label"] = feat[nodes], label[seeds]
            for block in blocks:
                block.edata["weight"] = weight[block.edata[dgl.EID]]
            results.append(run(blocks))
        losses.append([(loss.detach(), x.detach()) for loss, x in results[:40]])
        if captures:
            (record,) = run.captured.records
            assert len(record.room.nodes) == 3
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)


def test_what_blocks_are_not_padded(caplog):
    graph = dgl.heterograph({("a", "x", "b"): ([0, 1], [0, 1]), ("b", "y", "b"): ([0], [1])})
    run = capture(lambda blocks: len(blocks))
    with caplog.at_level(logging.INFO, logger="fastsparse_core"):
        assert run([dgl.to_block(graph), dgl.to_block(graph)]) == 2
        block = dgl.to_block(dgl.graph(([0, 1], [2, 2])))
        assert run([block, block]) == 2
    assert "blocks of several edge types are not padded" in caplog.text
    assert "whose destinations are not the sources of the next" in caplog.text
