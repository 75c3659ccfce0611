"""Statistics of a partitioned graph, and the number of tiles in which its features are sent."""

from __future__ import annotations

from dataclasses import dataclass

#: Number of columns that kernels gather per pass over a structure. Narrower tiles would need more passes.
_TILE_COLUMNS = 64
#: Smallest number of bytes per tile, which take 0.1 ms at 0.34 TB/s: every tile costs a few more launches.
_TILE_BYTES = 32 << 20
#: Approximate number of bytes that a product gathers while an exchange sends one byte, on H200s of one host:
#: 4.4 TB/s divided by 0.34 TB/s, rounded down.
_GATHERED_PER_RECEIVED = 12
#: Largest number of tiles. The exchange hides the products of all tiles except the last, so with 4 tiles a
#: quarter of the halo's product remains.
_MOST_TILES = 4


@dataclass(frozen=True)
class PartitionStatistics:
    """Counts that show how well a graph is divided; every list has an entry per rank.

    Attributes:
        rows: number of nodes that the rank owns.
        edges: number of edges that end at the rank's nodes.
        halo_edges: number of edges that end at the rank's nodes and start at nodes of other ranks.
        halo_rows: number of nodes of other ranks whose features the rank receives.

    Example:
        >>> from fastsparse_core.distributed import PartitionStatistics
        >>> statistics = PartitionStatistics(rows=[2, 2], edges=[6, 4], halo_edges=[1, 1], halo_rows=[1, 1])
        >>> statistics.balance, statistics.edge_cut
        (1.2, 0.2)
    """

    rows: list[int]
    edges: list[int]
    halo_edges: list[int]
    halo_rows: list[int]

    @property
    def edge_cut(self) -> float:
        """Share of all edges whose source and destination belong to different ranks."""
        return sum(self.halo_edges) / max(sum(self.edges), 1)

    @property
    def halo_share(self) -> float:
        """Number of rows that all ranks receive, divided by the number if each received all other rows."""
        most = (len(self.rows) - 1) * sum(self.rows)
        return sum(self.halo_rows) / max(most, 1)

    @property
    def balance(self) -> float:
        """Largest number of edges of a rank divided by the mean over ranks; 1 is perfectly even."""
        return max(self.edges) * len(self.edges) / max(sum(self.edges), 1)


def tiles_that_pay(facts: PartitionStatistics, width: int, itemsize: int, sent: int) -> int:
    """Chooses the number of tiles for :meth:`PartitionedAdjacency.num_tiles`.

    Args:
        facts: statistics of the partition.
        width: number of features per node.
        itemsize: number of bytes of a feature in memory.
        sent: number of bytes of a feature in the messages.
    """
    if not any(
        _GATHERED_PER_RECEIVED * rows * sent > (edges - halo_edges) * itemsize
        for rows, edges, halo_edges in zip(facts.halo_rows, facts.edges, facts.halo_edges, strict=True)
    ):
        return 1
    received = max(facts.halo_rows) * width * sent
    return max(1, min(_MOST_TILES, -(-width // _TILE_COLUMNS), received // _TILE_BYTES))
