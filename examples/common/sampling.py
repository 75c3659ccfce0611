"""Mini-batches of nodes with sampled neighbours, for both frameworks.

PyG: its own NeighborLoader where pyg-lib or torch-sparse is installed, else `NeighborSampler` from here. DGL:
DGL's NeighborSampler. Whatever draws them, they come as `MiniBatch`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from .framework_data import import_dgl
from .frameworks import Nodes, make_graph, move_graph
from .graph_data import ranges

#: In place of a number of neighbours: all of them.
ALL = -1


@dataclass(frozen=True)
class MiniBatch:
    """Some nodes and the neighbours that their results are computed from.

    Attributes:
        graphs: One graph per layer, in the framework's form. In each, the first nodes of the sources are the
            destinations.
        nodes: int64, ids of the nodes whose features the first layer takes.
        seeds: int64, ids of the nodes that the first rows of the last layer's result are for.
    """

    graphs: list[Any]
    nodes: Tensor
    seeds: Tensor

    def graphs_on(self, conv: str, device: torch.device) -> list[Any]:
        """The graphs on the device where that can be (see ``frameworks.make_graph``)."""
        moved = {id(graph): move_graph(graph, conv, device) for graph in self.graphs}
        return [moved[id(graph)] for graph in self.graphs]


class NeighborSampler:
    """Draws neighbours, without replacement, in plain PyTorch.

    As in GraphSAGE (Hamilton et al., 2017, section 3.1), for every node once: a node that several others
    reach has one set of neighbours.

    Args:
        edge_index: int64 (2, E) on the CPU.
        num_nodes: Number of nodes.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        source, target = edge_index
        self.source = source[torch.argsort(target, stable=True)]
        degree = torch.bincount(target, minlength=num_nodes)
        self.ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        self.place = torch.full((num_nodes,), -1)  # of a node in the batch being drawn; -1: not in it

    def sample(self, seeds: Tensor, fanouts: Sequence[int]) -> MiniBatch:
        """The seeds with ``fanouts[0]`` neighbours each, ``fanouts[1]`` of those, ...; as one graph."""
        nodes = frontier = seeds
        self.place[seeds] = torch.arange(seeds.numel())
        sources, targets = [], []
        for fanout in fanouts:
            edges, row = self._draw(frontier, fanout)
            neighbours = self.source[edges]
            targets.append(self.place[frontier][row])
            frontier = torch.unique(neighbours[self.place[neighbours] < 0])
            self.place[frontier] = torch.arange(nodes.numel(), nodes.numel() + frontier.numel())
            nodes = torch.cat([nodes, frontier])
            sources.append(self.place[neighbours])
        self.place[nodes] = -1
        edge_index = torch.stack([torch.cat(sources), torch.cat(targets)])
        return MiniBatch([edge_index] * len(fanouts), nodes, seeds)

    def _draw(self, nodes: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
        """Positions of drawn edges, and for each the place of its destination in `nodes`."""
        degree = self.ptr[nodes + 1] - self.ptr[nodes]
        if fanout == ALL:
            return ranges(self.ptr, nodes)
        few = (degree <= fanout).nonzero().flatten()
        edges, place = ranges(self.ptr, nodes[few])
        many = (degree > fanout).nonzero().flatten()
        drawn = self.ptr[nodes[many], None] + draw_distinct(degree[many], fanout)
        return torch.cat([edges, drawn.flatten()]), torch.cat([few[place], many.repeat_interleave(fanout)])


def draw_distinct(sizes: Tensor, count: int) -> Tensor:
    """(n, count): in row i, `count` different numbers below ``sizes[i]``, all sets equally likely.

    Floyd's algorithm (Bentley and Floyd, 1987, "A Sample of Brilliance"), all rows at once.
    """
    drawn = torch.empty(sizes.numel(), count, dtype=torch.long)
    for step in range(count):
        last = sizes - count + step
        # A float64 in [0, 1) times a size below 2^53 is never rounded up to the size plus one.
        number = (torch.rand(sizes.numel(), dtype=torch.float64) * (last + 1)).long().clamp(max=last)
        taken = (drawn[:, :step] == number[:, None]).any(1)
        drawn[:, step] = torch.where(taken, last, number)
    return drawn


def pyg_can_sample() -> bool:
    """Whether a package is installed that PyG's NeighborLoader needs."""
    typing = importlib.import_module("torch_geometric.typing")
    return typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE


class Batches:
    """Mini-batches over some nodes; iterating draws them anew.

    Everything is drawn from PyTorch's generator, so ``torch.manual_seed`` before iterating repeats it.

    Args:
        draw: Gives the batch of some seeds.
        seeds: The nodes.
        size: Nodes per batch.
        shuffle: Whether to shuffle the nodes.
        workers: Processes that draw.
    """

    def __init__(
        self, draw: Callable[[Tensor], MiniBatch], seeds: Tensor, size: int, shuffle: bool, workers: int
    ) -> None:
        order = RandomSampler(seeds) if shuffle else SequentialSampler(seeds)  # type: ignore[arg-type]
        self.loader = DataLoader(
            seeds,  # type: ignore[arg-type]
            sampler=BatchSampler(order, size, drop_last=False),
            batch_size=None,
            collate_fn=draw,
            num_workers=workers,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[MiniBatch]:
        return iter(self.loader)


class PygBatches:
    """The same from a NeighborLoader: PyG's, or the one of `package`, which may take further options."""

    def __init__(
        self,
        data: Nodes,
        fanouts: Sequence[int],
        seeds: Tensor,
        size: int,
        shuffle: bool,
        workers: int,
        package: str = "torch_geometric.loader",
        **options: Any,
    ) -> None:
        pyg_data = importlib.import_module("torch_geometric.data")
        loader = importlib.import_module(package)
        self.layers = len(fanouts)
        self.loader = loader.NeighborLoader(
            pyg_data.Data(edge_index=data.edge_index, num_nodes=data.num_nodes),
            list(fanouts),
            seeds,
            batch_size=size,
            shuffle=shuffle,
            num_workers=workers,
            **options,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[MiniBatch]:
        for batch in self.loader:
            yield MiniBatch([batch.edge_index] * self.layers, batch.n_id, batch.n_id[: batch.batch_size])


class Sampling:
    """Makes mini-batches of one graph.

    Args:
        framework: ``pyg`` or ``dgl``.
        data: The graph, on the CPU.
        self_loops: Whether DGL's graph gets self loops (see ``frameworks.make_graph``).
    """

    def __init__(self, framework: str, data: Nodes, *, self_loops: bool) -> None:
        self.framework = framework
        self.data = data
        if framework == "dgl":
            self.graph = make_graph("dgl", data, "fast", torch.device("cpu"), self_loops=self_loops)
        elif not pyg_can_sample():
            self.sampler = NeighborSampler(data.edge_index, data.num_nodes)

    def batches(
        self, fanouts: Sequence[int], seeds: Tensor, size: int, *, shuffle: bool = False, workers: int = 0
    ) -> Batches | PygBatches:
        """Batches of `size` of the seeds with ``fanouts[0]`` neighbours each, ``fanouts[1]`` of those, ..."""
        if self.framework == "dgl":
            return Batches(self._dgl(fanouts), seeds, size, shuffle, workers)
        if pyg_can_sample():
            return PygBatches(self.data, fanouts, seeds, size, shuffle, workers)
        draw = functools.partial(self.sampler.sample, fanouts=fanouts)
        return Batches(draw, seeds, size, shuffle, workers)

    def _dgl(self, fanouts: Sequence[int]) -> Callable[[Tensor], MiniBatch]:
        dgl = import_dgl()
        # DGL lists fanouts from the first layer to the last, the last being that of the seeds.
        sampler = dgl.dataloading.NeighborSampler(list(reversed(fanouts)))

        def draw(seeds: Tensor) -> MiniBatch:
            # DGL has a generator of its own: every batch seeds it from PyTorch's, in worker processes too.
            dgl.seed(int(torch.randint(2**31 - 1, ())))
            nodes, seeds, blocks = sampler.sample(self.graph, seeds)
            return MiniBatch(blocks, nodes, seeds)

        return draw
