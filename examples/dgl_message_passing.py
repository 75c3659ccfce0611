"""Trains a layer of one's own, written as DGL's message functions, on DGL's operators and on FastSparse's.

    python examples/dgl_message_passing.py
    python examples/dgl_message_passing.py --nodes 200000 --edges 4000000 --epochs 50

The layer is a gated convolution: `apply_edges` makes a gate of both ends of an edge, `update_all` sums the
gated features. Nothing in it knows FastSparse. With pip's DGL, which has no CUDA, DGL itself trains on the
CPU, and the same code after `fastsparse_dgl.enable()` on the GPU if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import common  # noqa: F401, first: Ctrl-C during the other imports ends quietly
import torch
import torch.nn.functional as F
from common.data import planted_partition
from torch import Tensor, nn

import fastsparse_dgl
from fastsparse_dgl.compat import dgl

fn = dgl.function


class GatedConv(nn.Module):
    """Sums the neighbours' features, with a gate for every edge and feature, over the sum of the gates.

    Args:
        in_channels: width of the features.
        out_channels: width of the result.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_channels, out_channels)
        self.sent = nn.Linear(in_channels, out_channels)
        self.gate_of_source = nn.Linear(in_channels, out_channels)
        self.gate_of_target = nn.Linear(in_channels, out_channels)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """(num_nodes, out_channels) from (num_nodes, in_channels)."""
        with graph.local_scope():
            graph.ndata["sent"] = self.sent(x)
            graph.ndata["source"] = self.gate_of_source(x)
            graph.ndata["target"] = self.gate_of_target(x)
            graph.apply_edges(fn.u_add_v("source", "target", "gate"))
            graph.edata["gate"] = graph.edata["gate"].sigmoid()
            graph.update_all(fn.u_mul_e("sent", "gate", "m"), fn.sum("m", "total"))
            graph.update_all(fn.copy_e("gate", "m"), fn.sum("m", "gates"))
            return self.own(x) + graph.ndata["total"] / (graph.ndata["gates"] + 1e-6)


class Model(nn.Module):
    """Two gated convolutions."""

    def __init__(self, in_channels: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first = GatedConv(in_channels, hidden)
        self.second = GatedConv(hidden, num_classes)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Logits (num_nodes, num_classes)."""
        return self.second(graph, self.first(graph, x).relu())


class Trained(NamedTuple):
    """What a training run gave."""

    accuracy: float
    seconds_per_epoch: float
    losses: list[float]


def train(graph: Any, data: Any, hidden: int, epochs: int, device: str) -> Trained:
    """Trains the model on a graph that lies on ``device``, with the same weights every time."""
    torch.manual_seed(0)
    model = Model(data.x.size(1), hidden, data.num_classes).to(device)
    x, y = data.x.to(device), data.y.to(device)
    split = data.split(0, seed=0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, times = [], []
    for _ in range(epochs):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph, x)[split.train], y[split.train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    with torch.no_grad():
        right = model(graph, x)[split.test].argmax(1) == y[split.test]
    return Trained(float(right.float().mean()), sorted(times)[len(times) // 2], losses)


def main(arguments: Sequence[str] | None = None) -> dict[str, Trained]:
    """Runs both and prints accuracy and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=200_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    data = planted_partition(num_nodes=options.nodes, num_edges=options.edges, num_classes=5, num_features=32)
    source, target = data.edge_index
    graph = dgl.graph((source, target), num_nodes=options.nodes)
    results = {"DGL, cpu": train(graph, data, options.hidden, options.epochs, "cpu")}

    fastsparse_dgl.enable()  # the one line
    try:
        name = f"DGL on FastSparse, {options.device}"
        moved = graph.to(options.device)
        results[name] = train(moved, data, options.hidden, options.epochs, options.device)
    finally:
        fastsparse_dgl.disable()
    for name, result in results.items():
        time_of_one = f"{1e3 * result.seconds_per_epoch:8.1f} ms per epoch"
        print(f"{name:28s} test accuracy {100 * result.accuracy:5.1f} %   {time_of_one}")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
