"""Batches padded to sizes of a record: where rows of padding are, and what they hold.

Padding is a graph of its own behind those of the batch: nodes that copy the batch's first one, with edges
among themselves. So whatever a layer does per node, edge or graph has a meaning there too, and reaches
nothing else. What mixes all rows has a twin that leaves them out (`twins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Room beyond the greatest size seen, as a share of it; where sizes vary by more, as much as they vary.
ROOM = 1 / 64
#: Entries of padding for each of its nodes, at most, as far as sizes seen tell: a row is not cut.
_EDGES_PER_NODE = 8


@dataclass(frozen=True)
class Sizes:
    """How many nodes and edges a batch has, or there is room for."""

    nodes: int
    edges: int

    def hold(self, other: Sizes) -> bool:
        """Whether a batch of those sizes fits: two nodes are left for padding, or more."""
        return other.nodes + 2 <= self.nodes and other.edges <= self.edges


def room_for(seen: Sequence[Sizes]) -> Sizes:
    """Room for batches like those seen, and somewhat larger ones."""
    nodes, edges = ([getattr(sizes, name) for sizes in seen] for name in ("nodes", "edges"))
    more_edges = max(max(edges) - min(edges), int(max(edges) * ROOM), 8)
    more_nodes = max(max(nodes) - min(nodes), int(max(nodes) * ROOM), more_edges // _EDGES_PER_NODE, 4)
    room_nodes, room_edges = max(nodes) + more_nodes, max(edges) + more_edges
    # Odd and different, so that rows of nodes and of edges are told apart by their number.
    room_nodes += 1 - room_nodes % 2
    room_edges += 1 - room_edges % 2
    return Sizes(room_nodes, room_edges + 2 * (room_nodes == room_edges))


class Rows:
    """Which rows of tensors of one kind are the batch's.

    Args:
        room: number of rows.
        device: of the tensors.

    Attributes:
        room: number of rows.
        count: how many are the batch's, float32 ().
        mask: bool (room,).
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.room = room
        self.count = torch.zeros((), device=device)
        self.mask = torch.zeros(room, dtype=torch.bool, device=device)

    def write(self, count: int) -> None:
        """Says how many rows are the batch's."""
        self.count.fill_(count)
        self.mask[:count] = True
        self.mask[count:] = False


def write_rows(held: Tensor, tensor: Tensor, dim: int = 0) -> None:
    """Copies a tensor to the front of one with more rows; those behind copy its first one."""
    rows, room = tensor.size(dim), held.size(dim)
    held.narrow(dim, 0, rows).copy_(tensor)
    if rows < room:
        behind = held.narrow(dim, rows, room - rows)
        if rows:
            behind.copy_(tensor.narrow(dim, 0, 1).expand_as(behind))
        else:
            behind.zero_()


def write_edges(held: Tensor, edge_index: Tensor, num_nodes: int, room_nodes: int) -> None:
    """Copies edges (2, E); those behind connect nodes of padding, evenly, and are no loops."""
    num_edges, room = edge_index.size(1), held.size(1)
    held[:, :num_edges].copy_(edge_index)
    if num_edges < room:
        spare = room_nodes - num_nodes
        nth = torch.arange(room - num_edges, device=held.device)
        end = nth % spare
        held[1, num_edges:] = end + num_nodes
        # The step around the circle grows by one with every turn, but never to a whole turn.
        held[0, num_edges:] = (
            end + 1 + nth.div(spare, rounding_mode="floor") % (spare - 1)
        ) % spare + num_nodes
