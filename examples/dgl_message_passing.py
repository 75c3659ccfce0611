"""Trains a user's layer, written with DGL's message functions, on DGL's and on FastSparse's operators.

    python examples/dgl_message_passing.py
    python examples/dgl_message_passing.py --model gcn gat gin rgcn gated-gcn --device cpu cuda
    python examples/dgl_message_passing.py --nodes 200000 --edges 4000000 --epochs 10

The layer, `gated-gcn`, is a gated convolution: `apply_edges` makes a gate of both ends of an edge,
`update_all` sums the gated features. The layer does not use FastSparse's API. DGL's wheels on PyPI are built
without CUDA, so DGL itself trains on the CPU. After `fastsparse_dgl.enable()`, the same code trains on the
GPU if there is one.
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
from common.message_layers import GAT, GCN, GIN, RGCN, graph_for
from torch import Tensor, nn

import fastsparse_dgl
from fastsparse_dgl.compat import dgl

fn = dgl.function


class GatedConv(nn.Module):
    """Averages the neighbours' features, weighted by a gate for every edge and feature.

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
        """Computes (num_nodes, out_channels) from (num_nodes, in_channels)."""
        with graph.local_scope():
            graph.ndata["sent"] = self.sent(x)
            graph.ndata["source"] = self.gate_of_source(x)
            graph.ndata["target"] = self.gate_of_target(x)
            graph.apply_edges(fn.u_add_v("source", "target", "gate"))
            graph.edata["gate"] = graph.edata["gate"].sigmoid()
            graph.update_all(fn.u_mul_e("sent", "gate", "m"), fn.sum("m", "total"))
            graph.update_all(fn.copy_e("gate", "m"), fn.sum("m", "gates"))
            return self.own(x) + graph.ndata["total"] / (graph.ndata["gates"] + 1e-6)


LAYERS: dict[str, type[nn.Module]] = {
    "gcn": GCN,
    "gat": GAT,
    "gin": GIN,
    "rgcn": RGCN,
    "gated-gcn": GatedConv,
}


class Model(nn.Module):
    """A model of two layers of the same kind."""

    def __init__(self, layer: type[nn.Module], in_channels: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.first = layer(in_channels, hidden)
        self.second = layer(hidden, num_classes)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes logits (num_nodes, num_classes)."""
        return self.second(graph, self.first(graph, x).relu())


class Trained(NamedTuple):
    """The results of a training run."""

    accuracy: float
    seconds_per_epoch: float
    seconds: float
    losses: list[float]


def train(layer: type[nn.Module], graph: Any, data: Any, options: argparse.Namespace, device: str) -> Trained:
    """Trains a model on a graph that is on ``device``, with the same weights every time."""
    torch.manual_seed(0)
    model = Model(layer, data.x.size(1), options.hidden, data.num_classes).to(device)
    x, y = data.x.to(device), data.y.to(device)
    split = data.split(0, seed=0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, times = [], []
    for _ in range(options.epochs):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph, x)[split.train], y[split.train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - begin)
    with torch.no_grad():
        right = model(graph, x)[split.test].argmax(1) == y[split.test]
    return Trained(float(right.float().mean()), sorted(times)[len(times) // 2], sum(times), losses)


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, str], Trained]:
    """Trains the models of --model with DGL and with FastSparse, and prints accuracy and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--model", nargs="+", choices=tuple(LAYERS), default=["gated-gcn"])
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=200_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--device",
        nargs="+",
        default=["cuda" if torch.cuda.is_available() else "cpu"],
        help="where FastSparse trains, one or several; DGL itself trains on the CPU",
    )
    options = parser.parse_args(arguments)
    data = planted_partition(num_nodes=options.nodes, num_edges=options.edges, num_classes=5, num_features=32)
    print(f"{'model':12s}{'where':28s}{'test accuracy':>14s}{'ms per epoch':>14s}{'seconds in all':>16s}")
    results: dict[tuple[str, str], Trained] = {}

    def show(name: str, where: str, found: Trained) -> None:
        results[name, where] = found
        numbers = f"{100 * found.accuracy:12.1f} %{1e3 * found.seconds_per_epoch:14.1f}"
        print(f"{name:12s}{where:28s}{numbers}{found.seconds:16.2f}", flush=True)

    for name in options.model:
        layer = LAYERS[name]
        graph = graph_for(layer, data.edge_index, options.nodes)
        show(name, "DGL, cpu", train(layer, graph, data, options, "cpu"))
        fastsparse_dgl.enable()  # the only line that uses FastSparse
        try:
            for device in options.device:
                found = train(layer, graph.to(device), data, options, device)
                show(name, f"DGL on FastSparse, {device}", found)
        finally:
            fastsparse_dgl.disable()
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
