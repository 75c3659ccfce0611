"""NeighborSampler: samples the nodes and edges of mini-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastsparse_core.sampling.draw import Draw
from fastsparse_core.sampling.part import Layout
from fastsparse_core.sampling.relations import ONLY_NODES, EdgeType, make_graph
from fastsparse_core.sampling.sample import Sample
from fastsparse_core.structure.adjacency import Adjacency

_MOST_SEEDS_DISJOINT = 2**24
_EDGES_AT_ONCE = 2**26


class NeighborSampler:
    r"""Samples neighbours hop by hop, starting from seed nodes; on the GPU or in C++ threads.

    Hamilton et al., `Inductive Representation Learning on Large Graphs <https://arxiv.org/abs/1706.02216>`_,
    section 3.1. The neighbours of a destination are the sources in its row of the structure. A node's
    neighbours are sampled once, in the hop after the hop that added the node. Without replacement and
    without weights, all sets of neighbours are equally likely. Without replacement but with weights,
    neighbours are sampled one after the other: each is chosen from the remaining neighbours in proportion to
    the weights.
    The same random seed gives the same batch on the CPU and on GPUs. The exception is sampling with weights,
    where batches may differ, because logarithms are rounded differently.

    On a GPU, the host waits for the device once per batch, at the end, to read the sizes of the batch.
    Batches with more than 2^23 possible edges, and batches of all neighbours of many nodes, are sampled in
    parts; the host waits once or twice for each part.

    Args:
        graph: a square :class:`Adjacency` whose rows are destinations; or a dict of such structures by edge
            type ``(source, name, destination)``.
        fanouts: number of neighbours per hop, starting at the seeds; -1: all. Or a dict of such lists by edge
            type; edge types that are not in the dict are not sampled.
        replace: if True, draws with replacement.
        weight: one real number per edge in the caller's order, (num_edges,), finite and not negative; a
            tensor, or a dict from edge types to tensors. Neighbours are sampled in proportion to the weights,
            and never if their weight is 0.
        disjoint: if True, every seed gets its own subgraph, which shares no nodes with the subgraphs of other
            seeds.
        induced: if True, returns all edges between the batch's nodes, not only the sampled edges.
        blocks: if True, returns a block per hop. In each hop, neighbours of all nodes of earlier hops are
            sampled again. Not together with ``disjoint`` or ``induced``.
        num_nodes: number of nodes by node type; needed for types without edges.

    Raises:
        TypeError: an argument has another type.
        ValueError: fan-outs, weights or sizes do not fit the graph.

    Examples:
        >>> import torch
        >>> from fastsparse_core import Adjacency, NeighborSampler
        >>> ring = Adjacency.from_coo(torch.arange(6), torch.arange(6).roll(1), (6, 6))
        >>> sampler = NeighborSampler(ring, [2, 2])
        >>> sampler.sample(torch.tensor([3])).nodes
        tensor([3, 2, 1])
    """

    def __init__(
        self,
        graph: Adjacency | Mapping[EdgeType, Adjacency],
        fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool = False,
        weight: Tensor | Mapping[EdgeType, Tensor] | None = None,
        disjoint: bool = False,
        induced: bool = False,
        blocks: bool = False,
        num_nodes: Mapping[str, int] | None = None,
    ) -> None:
        if blocks and (induced or disjoint):
            raise ValueError(
                "blocks: expected False with induced=True or disjoint=True, which return one graph, got True"
            )
        self.graph = make_graph(graph, fanouts, weight, num_nodes, replace=replace)
        self.layout = Layout(replace=replace, disjoint=disjoint, induced=induced, blocks=blocks)

    @property
    def device(self) -> torch.device:
        """Device of the graph, on which batches are sampled."""
        return self.graph.device

    def sample(self, seeds: Tensor | Mapping[str, Tensor], *, seed: int | None = None) -> Sample:
        """Samples a batch.

        Args:
            seeds: node ids, int32 or int64 (num_seeds,); for a graph with types, a dict by node type. An id
                that occurs twice becomes two nodes of the batch. Seeds on another device are copied to the
                device of the graph.
            seed: seed of the random numbers; None: taken from PyTorch's CPU generator, so
                ``torch.manual_seed`` makes batches repeatable.

        Raises:
            TypeError: ``seeds`` are not integers.
            ValueError: an id is not in the graph, a node type is unknown, or the batch is too large.
        """
        return self.start(seeds, seed=seed).finish()

    def start(self, seeds: Tensor | Mapping[str, Tensor], *, seed: int | None = None) -> Draw:
        """Starts to sample a batch without waiting for the GPU; ``finish()`` of the result waits.

        The arguments are those of :meth:`NeighborSampler.sample`.
        """
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        by_type = self._check_seeds(seeds)
        return Draw(self.graph, self.layout, by_type, seed % 2**64)

    def most_drawn(self, count: int) -> dict[str, Tensor]:
        """Returns the nodes with the most outgoing edges, which are sampled most often, by node type.

        A graph without types has the single type ``""``.

        Args:
            count: largest number of nodes of each type.
        """
        graph = self.graph
        edges = [torch.zeros(size, dtype=torch.int32, device=self.device) for size in graph.num_nodes]
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        for relation in graph.relations:
            for col in relation.adjacency.col.split(_EDGES_AT_ONCE):
                edges[relation.src].index_add_(0, col, one.expand(col.numel()))
        pairs = zip(graph.node_types, edges, strict=True)
        return {name: of.topk(min(count, of.numel()), sorted=False).indices for name, of in pairs}

    def _check_seeds(self, seeds: Tensor | Mapping[str, Tensor]) -> list[Tensor]:
        """Checks the seeds and moves them to the device; returns one tensor per node type."""
        if isinstance(seeds, Tensor):
            if self.graph.is_hetero:
                raise TypeError(
                    "seeds: expected a dict by node type for a graph of several types, got a tensor"
                )
            seeds = {ONLY_NODES: seeds}
        elif not self.graph.is_hetero:
            raise TypeError(f"seeds: expected a tensor, got {type(seeds).__name__}")
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        by_type = [none] * len(self.graph.node_types)
        for name, of_type in seeds.items():
            if name not in self.graph.node_types:
                raise ValueError(f"seeds: expected node types among {self.graph.node_types}, got {name!r}")
            if not isinstance(of_type, Tensor) or of_type.dtype not in (torch.int32, torch.int64):
                kind = of_type.dtype if isinstance(of_type, Tensor) else type(of_type).__name__
                raise TypeError(f"seeds: expected int32 or int64 ids of nodes, got {kind}")
            if of_type.dim() != 1:
                raise ValueError(f"seeds: expected a 1-D tensor, got shape {tuple(of_type.shape)}")
            if self.device.type == "cuda" and not of_type.is_cuda:
                of_type = of_type.pin_memory()
            of_type = of_type.detach().to(self.device, torch.int64, non_blocking=True).contiguous()
            by_type[self.graph.node_types.index(name)] = of_type
        num_seeds = sum(of_type.numel() for of_type in by_type)
        if self.layout.disjoint and num_seeds > _MOST_SEEDS_DISJOINT:
            raise ValueError(
                f"seeds: expected at most {_MOST_SEEDS_DISJOINT} ids with disjoint=True, got {num_seeds}"
            )
        return by_type
