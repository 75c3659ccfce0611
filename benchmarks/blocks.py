"""Mini-batches of neighbours, sampled on the device of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import suite


@dataclass(frozen=True)
class Block:
    """One layer's graph: destinations are the first of the sources.

    Attributes:
        edge_index: int64 (2, num_edges): sources, destinations; sorted by destination.
        num_src: number of sources.
        num_dst: number of destinations.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int


def sample(
    graph: suite.Graph, seeds: Tensor, fanouts: Sequence[int], generator: torch.Generator
) -> tuple[list[Block], Tensor]:
    """Draws the seeds' neighbourhood, as DGL's NeighborSampler lays it out.

    Every node draws again in every hop, without replacement. If it has more neighbours than wanted, its list
    is divided into as many equal parts, and one neighbour is sampled from each part.

    Args:
        graph: where to draw.
        seeds: int64, different nodes.
        fanouts: neighbours of the seeds, of those together with the seeds, ...
        generator: of the graph's device.

    Returns:
        One block per fanout, the first layer's first; the nodes that are its sources.
    """
    blocks: list[Block] = []
    nodes = seeds
    place = torch.full((graph.num_nodes,), -1, device=seeds.device)
    for fanout in fanouts:
        begin, end = graph.rowptr[nodes].long(), graph.rowptr[nodes + 1].long()
        degree = end - begin
        drawn = degree.clamp(max=fanout)
        row = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), drawn)
        nth = torch.arange(row.numel(), device=nodes.device) - (drawn.cumsum(0) - drawn)[row]
        low = nth * degree[row] // drawn[row]
        high = (nth + 1) * degree[row] // drawn[row]
        chance = torch.rand(row.numel(), device=nodes.device, generator=generator)
        offset = (chance * (high - low)).long().clamp(max=high - low - 1)
        neighbour = graph.col[begin[row] + low + offset].long()
        place[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        new = torch.unique(neighbour[place[neighbour] < 0])
        num_dst = nodes.numel()
        nodes = torch.cat([nodes, new])
        place[new] = torch.arange(num_dst, nodes.numel(), device=nodes.device)
        blocks.append(Block(torch.stack([place[neighbour], row]), nodes.numel(), num_dst))
    return blocks[::-1], nodes
