"""Captured steps on DGL's graphs that stay, and on blocks; other graphs run as they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from captured_steps import compare
from test_dgl_block_data import unread_on_cpu

import fastsparse_dgl
from fastsparse_core import SlowPathWarning, capture
from fastsparse_core.capturing import captured as machinery
from fastsparse_dgl import (
    DataLoader,
    FastEdgeGATConv,
    FastGATConv,
    FastGATv2Conv,
    FastGraphConv,
    FastHeteroGraphConv,
    FastSAGEConv,
    NeighborSampler,
)
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dataloading import neighbor_sampler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_on")]


def test_graphs():
    """The same graph in every call, with changing data; a step may store data in it."""
    graph = dgl.add_self_loop(dgl.rand_graph(40, 200))
    given = [torch.randn(40, 8) for _ in range(machinery.CALLS + 8)]

    def loss(conv, graph):
        graph.ndata["out"] = conv(graph, graph.ndata["feat"])
        return graph.ndata["out"].square().mean()

    def graphs():
        for nth, feat in enumerate(given):
            if nth == 0 or nth > 4:
                graph.ndata["feat"] = feat
            yield graph

    found, _ = compare("cpu", lambda: FastGATConv(8, 4, 2), loss, graphs, torch.optim.Adam, atol=1e-7)
    assert len(found.records) == 1


CONVS = {
    "sage": lambda size: FastSAGEConv(size, 8, "mean"),
    "gcn": lambda size: FastGraphConv(size, 8, allow_zero_in_degree=True),
    "gat": lambda size: FastGATConv(size, 4, 2, allow_zero_in_degree=True),
    "gatv2": lambda size: FastGATv2Conv(size, 4, 2, allow_zero_in_degree=True),
    "edgegat": lambda size: FastEdgeGATConv(size, 1, 4, 2, allow_zero_in_degree=True),
    "egat": lambda size: fastsparse_dgl.FastEGATConv(size, 1, 4, 4, 2),
    "gin": lambda size: fastsparse_dgl.FastGINConv(torch.nn.Linear(size, 8), "mean"),
    "gine": lambda size: fastsparse_dgl.FastGINEConv(torch.nn.Linear(size, 8)),
    "dotgat": lambda size: fastsparse_dgl.FastDotGatConv(size, 4, 2, allow_zero_in_degree=True),
    "weighted": lambda size: FastGraphConv(size, 8, norm="right", allow_zero_in_degree=True),
}


@pytest.mark.parametrize(
    ("conv", "is_dgls"),
    [*((name, False) for name in CONVS), ("gat", True), ("egat", True), ("weighted", True)],
)
def test_blocks(monkeypatch, conv, is_dgls):
    """Blocks of DGL, and those that stand in for them on a GPU."""
    monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: is_dgls)
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(290, (2, 1500), generator=generator)
    graph = dgl.graph(tuple(ends), num_nodes=300)
    feat, label = torch.randn(300, 6, generator=generator), torch.randint(8, (300,), generator=generator)
    if conv == "egat":  # EGATConv requires an edge into every node
        graph = dgl.add_self_loop(graph)
    weight = torch.rand(graph.num_edges(), generator=generator)

    def make():
        return torch.nn.ModuleList([CONVS[conv](6), CONVS[conv](8), torch.nn.BatchNorm1d(8)])

    def loss(model, blocks):
        *convs, norm = model
        x = blocks[0].srcdata["feat"]
        for layer, block in zip(convs, blocks, strict=True):
            options = {"edge_weight": block.edata["weight"]} if conv == "weighted" else {}
            of_edges = block.edata["weight"][:, None]
            args = [of_edges] if conv in ("edgegat", "egat") else []
            if conv == "gine":
                args = [of_edges.expand(-1, x.size(1))]
            x = layer(block, x, *args, **options)
            x = norm((x[0] if conv == "egat" else x).flatten(1)).relu()
        return F.cross_entropy(x, blocks[-1].dstdata["label"]), x, x.square().mean()

    def batches():
        sampler = NeighborSampler([3, 5])
        for seeds in torch.arange(90).split(16) * 8:
            nodes, _, blocks = sampler.sample(graph, seeds)
            blocks[0].srcdata["feat"], blocks[-1].dstdata["label"] = feat[nodes], label[seeds]
            for block in blocks:
                block.edata["weight"] = weight[block.edata[dgl.EID]]
            yield blocks

    adam = partial(torch.optim.Adam, lr=0.01)
    found, _ = compare("cpu", make, loss, batches, adam, rtol=1e-3, atol=1e-3, steps=40, outputs=40)
    (record,) = found.records
    assert len(record.capacity.nodes[0]) == 3


def test_features_that_the_step_reads(monkeypatch):
    """Blocks have all data of the graph; the record has only the data that the step read."""
    monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: False)
    monkeypatch.setattr(neighbor_sampler, "gathered", unread_on_cpu)
    generator = torch.Generator().manual_seed(0)
    graph = dgl.graph(tuple(torch.randint(290, (2, 1500), generator=generator)), num_nodes=300)
    graph.ndata["feat"] = torch.randn(300, 6, generator=generator)
    graph.ndata["label"] = torch.randint(8, (300,), generator=generator)
    graph.ndata["unread"] = torch.randn(300, 40, generator=generator)
    sampler = NeighborSampler([3, 5])

    def make():
        return torch.nn.ModuleList([CONVS["sage"](6), CONVS["sage"](8)])

    def loss(convs, blocks):
        x = blocks[0].srcdata["feat"]
        for conv, block in zip(convs, blocks, strict=True):
            x = conv(block, x.relu())
        return F.cross_entropy(x, blocks[-1].dstdata["label"]), x

    def batches():
        return [sampler.sample(graph, seeds)[2] for seeds in torch.arange(90).split(16) * 8]

    found, _ = compare("cpu", make, loss, batches, rtol=1e-3, atol=1e-3, steps=40, outputs=40)
    (record,) = found.records
    blocks = next(held.value for held in record.held if isinstance(held.value, list))
    assert ["feat" in block.srcdata for block in blocks] == [True, False]
    assert not any("unread" in block.srcdata for block in blocks)


def test_what_blocks_are_not_padded():
    graph = dgl.heterograph({("a", "x", "b"): ([0, 1], [0, 1]), ("b", "y", "b"): ([0], [1])})
    run = capture(lambda blocks: len(blocks))
    with pytest.warns(SlowPathWarning, match="blocks of different edge types are not padded"):
        assert run([dgl.to_block(graph), dgl.to_block(graph["x"])]) == 2
    block = dgl.to_block(dgl.graph(([0, 1], [2, 2])))
    with pytest.warns(SlowPathWarning, match="whose destinations are not the sources of the next"):
        assert run([block, block]) == 2


class Flat(FastGATConv):
    def forward(self, *args):
        return super().forward(*args).flatten(1)


@pytest.mark.parametrize("is_dgls", [False, True])
def test_blocks_of_several_types(device, monkeypatch, is_dgls):
    """One type of edges has none, and nodes of one type are no destinations in the last block."""
    if device == "cuda" and is_dgls:
        pytest.skip("pip's DGL has no blocks there")
    monkeypatch.setattr(neighbor_sampler, "dgl_can_hold", lambda device: is_dgls)
    generator = torch.Generator().manual_seed(0)

    def ends(of_sources, of_targets, count):
        return tuple(torch.randint(size, (count,), generator=generator) for size in (of_sources, of_targets))

    graph = dgl.heterograph(
        {
            ("user", "buys", "item"): ends(80, 190, 700),
            ("item", "bought", "user"): ends(200, 90, 500),
            ("user", "knows", "user"): ends(90, 80, 300),
            ("item", "like", "item"): ([], []),
        },
        num_nodes_dict={"user": 100, "item": 200},
    )
    feat = {name: torch.randn(graph.num_nodes(name), 6, generator=generator) for name in graph.ntypes}
    feat = {name: item.to(device) for name, item in feat.items()}
    label = torch.randint(8, (200,), generator=generator).to(device)

    def make():
        return torch.nn.ModuleList(
            FastHeteroGraphConv(
                {
                    "buys": FastSAGEConv((size, size), 8, "mean"),
                    "bought": Flat((size, size), 4, 2, allow_zero_in_degree=True),
                    "knows": FastSAGEConv((size, size), 8, "gcn"),
                    "like": FastGraphConv(size, 8, allow_zero_in_degree=True),
                }
            )
            for size in (6, 8)
        )

    def loss(convs, blocks):
        x = blocks[0].srcdata["feat"]
        for conv, block in zip(convs, blocks, strict=True):
            x = {name: item.relu() for name, item in conv(block, x).items()}
        return F.cross_entropy(x["item"], blocks[-1].dstnodes["item"].data["label"])

    def batches():
        sampler, items = NeighborSampler([3, 4]), torch.arange(200)
        if device == "cuda":
            loader = DataLoader(graph, {"item": items}, sampler, device=device, batch_size=20)
        else:
            loader = [sampler.sample(graph, {"item": seeds}) for seeds in items.split(20)]
        for nodes, seeds, blocks in [batch for _ in range(2) for batch in loader]:
            for name, of_type in nodes.items():
                blocks[0].srcnodes[name].data["feat"] = feat[name][of_type]
            blocks[-1].dstnodes["item"].data["label"] = label[seeds["item"]]
            yield blocks

    found, _ = compare(device, make, loss, batches)
    assert len(found.records) == 1
