"""Captured steps on batches of graphs: padding changes nothing, and readouts leave it out."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hook_cases import enabled
from torch import nn

import fastsparse_dgl as fast
from fastsparse_core import SlowPathWarning, capture
from fastsparse_dgl.compat import dgl

#: Tests of whole trainings; tests/core/test_capture.py has the tests for a quick run.
pytestmark = pytest.mark.slow
WIDTH = 8


@pytest.fixture(autouse=True)
def batches_on(device, graphs_on):
    """On a GPU DGL has graphs there."""
    with contextlib.nullcontext() if device == "cpu" else enabled():
        yield


def molecules(count, least=3, most=12):
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        nodes = int(torch.randint(least, most, (), generator=generator))
        ends = torch.randint(nodes, (2, 2 * nodes), generator=generator)
        graph = dgl.add_self_loop(dgl.graph(tuple(ends), num_nodes=nodes))
        graph.ndata["feat"] = torch.randn(nodes, WIDTH, generator=generator)
        graph.edata["feat"] = torch.randn(graph.num_edges(), WIDTH, generator=generator)
        made.append((graph, torch.randn(1, generator=generator)))
    return made


def batches(device, sizes, **options):
    graphs = molecules(sum(sizes), **options)
    made, start = [], 0
    for size in sizes:
        part = graphs[start : start + size]
        start += size
        batch = dgl.batch([graph for graph, _ in part]).to(device)
        made.append((batch, torch.stack([label for _, label in part]).to(device)))
    return made


CONVS = {
    "graph": lambda: fast.FastGraphConv(WIDTH, WIDTH),
    "sage": lambda: fast.FastSAGEConv(WIDTH, WIDTH, "mean"),
    "sage-pool": lambda: fast.FastSAGEConv(WIDTH, WIDTH, "pool"),
    "gin": lambda: fast.FastGINConv(nn.Linear(WIDTH, WIDTH), "sum"),
    "gine": lambda: fast.FastGINEConv(nn.Linear(WIDTH, WIDTH)),
    "gat": lambda: fast.FastGATConv(WIDTH, 4, 2),
    "gatv2": lambda: fast.FastGATv2Conv(WIDTH, 4, 2),
    "agnn": lambda: fast.FastAGNNConv(),
    "dotgat": lambda: fast.FastDotGatConv(WIDTH, 4, 2),
    "edgegat": lambda: fast.FastEdgeGATConv(WIDTH, WIDTH, 4, 2),
    "egat": lambda: fast.FastEGATConv(WIDTH, WIDTH, 4, 4, 2),
    "gated": lambda: fast.FastGatedGCNConv(WIDTH, WIDTH, WIDTH),
    "pna": lambda: fast.FastPNAConv(WIDTH, WIDTH, ["mean", "max"], ["identity", "amplification"], 1.5),
}
WITH_EDGES = ("gine", "edgegat", "egat", "gated")
PAIRS = ("egat", "gated")
if not hasattr(dgl.nn, "GatedGCNConv"):  # before 2.0
    del CONVS["gated"]


def stored(op):
    def readout(graph, x):
        with graph.local_scope():
            graph.ndata["h"] = x
            return op(graph)

    return readout


def centred(graph, x):
    mean = stored(lambda graph: dgl.mean_nodes(graph, "h"))
    return mean(graph, (x - dgl.broadcast_nodes(graph, mean(graph, x))).square())


READOUTS = {
    "mean": lambda: stored(lambda graph: dgl.mean_nodes(graph, "h")),
    "sum": lambda: stored(lambda graph: dgl.sum_nodes(graph, "h")),
    "max": lambda: stored(lambda graph: dgl.max_nodes(graph, "h")),
    "min": lambda: stored(lambda graph: dgl.readout_nodes(graph, "h", op="min")),
    "edges": lambda: lambda graph, x: x.new_zeros(()) + dgl.readout_edges(graph, "feat", op="mean"),
    "attention": lambda: dgl.nn.GlobalAttentionPooling(nn.Linear(WIDTH, 1)),
    "broadcast": lambda: centred,
    "avg": lambda: dgl.nn.AvgPooling(),
}


class Net(nn.Module):
    def __init__(self, conv="graph", readout="mean"):
        super().__init__()
        self.kind = conv
        self.convs = nn.ModuleList([CONVS[conv](), CONVS[conv]()])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.readout = READOUTS[readout]()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, graph):
        x = graph.ndata["feat"]
        for conv in self.convs:
            edges = [graph.edata["feat"]] if self.kind in WITH_EDGES else []
            x = conv(graph, x, *edges)
            x = self.norm((x[0] if self.kind in PAIRS else x).flatten(1)).relu()
        return self.out(self.readout(graph, x))


def check(given, forward=lambda net, graph: net(graph), **options):
    """Losses of a captured step agree with those of the step."""
    found = []
    for captures in (False, True):
        torch.manual_seed(0)
        net = Net(**options).to(given[0][0].device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)

        def step(graph, labels, net=net, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.mse_loss(forward(net, graph), labels)
            loss.backward()
            optimizer.step()
            return loss

        run = capture(step) if captures else step
        found.append(torch.stack([run(*item).detach() for item in given]))
    is_cpu = given[0][0].device.type == "cpu"
    torch.testing.assert_close(found[1], found[0], rtol=1e-5 if is_cpu else 1e-4, atol=1e-6)
    return run.captured.records


@pytest.mark.parametrize("conv", CONVS)
def test_layers(device, conv):
    assert len(check(batches(device, [9] * 16), conv=conv)) == 1


@pytest.mark.parametrize("readout", [name for name in READOUTS if name != "mean"])
def test_readouts(device, readout):
    assert len(check(batches(device, [9] * 14), readout=readout)) == 1


def test_data_that_a_step_leaves_behind(device):
    """Without a scope of its own, and with another epoch of the same graphs."""

    def forward(net, graph):
        graph.ndata["h"] = net.norm(net.convs[0](graph, graph.ndata["feat"]))
        graph.edata["w"] = graph.edata["feat"] * 2
        return net.out(dgl.mean_nodes(graph, "h"))

    given = batches(device, [9] * 14)
    assert len(check(given * 2, forward)) >= 1


def test_larger_batches_and_other_numbers_of_graphs(device):
    given = batches(device, [9] * 13) + batches(device, [9] * 4, least=12, most=30)
    assert len(check(given)) == 2
    assert len(check((batches(device, [9, 9, 9, 5])) * 12)) == 2


def test_what_is_not_padded_says_why(device):
    """DGL's own layers; and batches of several types."""

    def forward(net, graph):
        graph.update_all(dgl.function.copy_u("feat", "m"), dgl.function.sum("m", "h"))
        return net.out(dgl.mean_nodes(graph, "h"))

    with pytest.warns(SlowPathWarning, match="graph.update_all is not available on a padded batch"):
        assert not check(batches(device, [9] * 11), forward)
    typed = dgl.heterograph({("a", "x", "b"): ([0], [0]), ("b", "y", "a"): ([0], [0])})
    batch = dgl.batch([typed, typed]).to(device)
    with pytest.warns(SlowPathWarning, match="several node or edge types"):
        assert capture(lambda graph: graph.batch_size)(batch) == 2
