"""Mini-batches of nodes with sampled neighbours, from FastSparse's loaders, for both frameworks.

PyG: `fastsparse_pyg.NeighborLoader`; DGL: `fastsparse_dgl.DataLoader` with `fastsparse_dgl.NeighborSampler`.
The batches of both are converted to `MiniBatch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .frameworks import Nodes, make_graph, move_graph

#: Number of neighbours that means all neighbours.
ALL = -1


@dataclass(frozen=True)
class MiniBatch:
    """The seeds of a batch, and the neighbours from which their results are computed.

    Attributes:
        graphs: One graph per layer, in the framework's form. In each, the first nodes of the sources are the
            destinations.
        nodes: int64 (num_nodes,), ids of the nodes whose features the first layer takes.
        seeds: int64 (num_seeds,), ids of the seeds. The first rows of the last layer's result belong to them.
        own: The framework's batch: PyG's `Data`, or a list of DGL's blocks.
    """

    graphs: list[Any]
    nodes: Tensor
    seeds: Tensor
    own: Any

    def graphs_on(self, conv: str, device: torch.device) -> list[Any]:
        """Moves the graphs to the device if possible (see ``frameworks.make_graph``)."""
        if all(graph.device == device for graph in self.graphs):
            return self.graphs
        return [move_graph(graph, conv, device) for graph in self.graphs]

    def holding(self, conv: str, device: torch.device, x: Tensor, y: Tensor) -> Any:
        """Returns the framework's batch on the device, with the nodes' features and the seeds' labels."""
        if isinstance(self.own, list):
            blocks = self.graphs_on(conv, device)
            blocks[0].srcdata["x"], blocks[-1].dstdata["y"] = x, y
            return blocks
        self.own.x, self.own.y = x, y
        return self.own.to(device)


def opened(own: Any, layers: int) -> tuple[list[Any], Tensor, Tensor]:
    """Returns one graph per layer, features and labels of a batch from `MiniBatch.holding`."""
    if isinstance(own, list):
        return own, own[0].srcdata["x"], own[-1].dstdata["y"]
    return [own.edge_index] * layers, own.x, own.y


@dataclass
class Batches:
    """Mini-batches of some nodes; every iteration samples new batches.

    All random numbers come from PyTorch's generator, so ``torch.manual_seed`` makes an iteration repeatable.

    Attributes:
        graph: `Nodes`, or DGL's graph.
        device: Device that samples neighbours.
        fanouts, seeds, size, shuffle, workers: Arguments of `Sampling.batches`.
    """

    graph: Any
    device: torch.device
    fanouts: Sequence[int]
    seeds: Tensor
    size: int
    shuffle: bool
    workers: int

    def __post_init__(self) -> None:
        """Makes the loader, which all epochs use."""

    def __len__(self) -> int:
        return -(-self.seeds.numel() // self.size)

    def __iter__(self) -> Iterator[MiniBatch]:
        raise NotImplementedError


class PygBatches(Batches):
    """Mini-batches from PyG's loader."""

    def __post_init__(self) -> None:
        pyg_data = importlib.import_module("torch_geometric.data")
        loader = importlib.import_module("fastsparse_pyg").NeighborLoader
        self.loader = loader(
            pyg_data.Data(edge_index=self.graph.edge_index, num_nodes=self.graph.num_nodes),
            list(self.fanouts),
            self.seeds,
            batch_size=self.size,
            shuffle=self.shuffle,
            num_workers=self.workers,
            device=self.device,
        )

    def __iter__(self) -> Iterator[MiniBatch]:
        for batch in self.loader:
            graphs = [batch.edge_index] * len(self.fanouts)
            yield MiniBatch(graphs, batch.n_id, batch.n_id[: batch.batch_size], batch)


class DglBatches(Batches):
    """Mini-batches from DGL's loader."""

    def __post_init__(self) -> None:
        self.plugin = importlib.import_module("fastsparse_dgl")
        # DGL's list begins with the fan-out of the first layer, and ends with the fan-out of the seeds.
        self.sampler = self.plugin.NeighborSampler(list(reversed(self.fanouts)))

    def __iter__(self) -> Iterator[MiniBatch]:
        # DGL's loader shuffles the order of the previous epoch with NumPy's generator, so no seed would
        # repeat an epoch.
        order = torch.randperm(self.seeds.numel()) if self.shuffle else slice(None)
        options = {"batch_size": self.size, "num_workers": self.workers}
        loader = self.plugin.DataLoader(
            self.graph, self.seeds[order], self.sampler, device=self.device, **options
        )
        for nodes, seeds, blocks in loader:
            yield MiniBatch(blocks, nodes, seeds, blocks)


class Sampling:
    """Makes mini-batches of one graph.

    Args:
        framework: ``pyg`` or ``dgl``.
        data: The graph, on the CPU.
        conv: The layers that take the batches: ``reference`` or ``fast``.
        device: Device that samples neighbours. Batches of a GPU stay on the GPU. For DGL's own layers, DGL's
            blocks are sampled on the CPU and then moved.
        self_loops: Whether DGL's graph gets self loops (see ``frameworks.make_graph``).
    """

    def __init__(
        self, framework: str, data: Nodes, conv: str, device: torch.device, *, self_loops: bool
    ) -> None:
        self.framework, self.data, self.device = framework, data, device
        if framework == "dgl":
            cpu = torch.device("cpu")
            self.graph = make_graph("dgl", data, "fast", cpu, self_loops=self_loops)
            if conv == "reference":
                self.device = cpu

    def batches(
        self, fanouts: Sequence[int], seeds: Tensor, size: int, *, shuffle: bool = False, workers: int = 0
    ) -> Batches:
        """Batches of `size` of the seeds with ``fanouts[0]`` neighbours each, ``fanouts[1]`` of those, ...

        Args:
            fanouts: Numbers of neighbours, or `ALL`.
            seeds: int64 on the CPU, ids of nodes.
            size: Seeds per batch.
            shuffle: Whether to shuffle the seeds.
            workers: Processes that draw; a GPU needs none.
        """
        if self.framework == "dgl":
            return DglBatches(self.graph, self.device, fanouts, seeds, size, shuffle, workers)
        return PygBatches(self.data, self.device, fanouts, seeds, size, shuffle, workers)
