"""How well a graph is divided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartitionStatistics:
    """How well a graph is divided; lists have an entry per rank.

    Attributes:
        rows: nodes.
        edges: edges of those nodes' rows.
        halo_edges: of them, edges from nodes of other ranks.
        halo_rows: nodes of other ranks whose features come.
    """

    rows: list[int]
    edges: list[int]
    halo_edges: list[int]
    halo_rows: list[int]

    @property
    def edge_cut(self) -> float:
        """Share of all edges that go from one rank to another."""
        return sum(self.halo_edges) / max(sum(self.edges), 1)

    @property
    def halo_share(self) -> float:
        """Rows that arrive in an exchange, of those that would if every rank got all others' rows."""
        most = (len(self.rows) - 1) * sum(self.rows)
        return sum(self.halo_rows) / max(most, 1)

    @property
    def balance(self) -> float:
        """Most edges of a rank over their mean; 1 is even."""
        return max(self.edges) * len(self.edges) / max(sum(self.edges), 1)
