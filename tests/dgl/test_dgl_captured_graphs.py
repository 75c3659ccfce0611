"""Captured steps on DGL's graphs: one that stays is recorded, others run as they are."""

from __future__ import annotations

import pytest
import torch
from simulated_graphs import simulate

from fastsparse_core import capture
from fastsparse_core.capturing import captured as machinery
from fastsparse_dgl import FastGATConv
from fastsparse_dgl.compat import dgl


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
