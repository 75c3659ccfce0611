"""The edges of one rank's rows, columns renumbered: own nodes, then the halo."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastsparse_core.distributed.exchange import HaloExchange
from fastsparse_core.distributed.partitions import Partition
from fastsparse_core.formats.grouping import Method
from fastsparse_core.log import range_text
from fastsparse_core.structure.adjacency import Adjacency


def local_rows(
    row: Tensor,
    col: Tensor,
    partition: Partition,
    rank: int,
    group: dist.ProcessGroup | None,
    send: Literal["auto", "needed", "all"],
    self_loops: Literal["keep", "append", "replace"],
    group_rows: Method,
) -> tuple[Adjacency, HaloExchange]:
    """The rank's rows of edges in any order, and who sends which of the halo's. Collective.

    Arguments as of :meth:`PartitionedAdjacency.from_coo`, checked.
    """
    mine = partition.owned_edges(row, rank)
    if mine.numel() != row.numel():
        row, col = row[mine], col[mine]
    first, last = partition.starts[rank], partition.starts[rank + 1]
    num_local = last - first
    column = partition.position(col)
    # Marks instead of sorted ids: a pass over the nodes costs less than sorting the edges.
    needed = torch.zeros(partition.num_nodes, dtype=torch.bool, device=row.device)
    needed[column.long()] = True
    needed[first:last] = False
    exchange = HaloExchange(needed, partition.starts, rank, group, send)
    halo = exchange.halo
    number = torch.empty(partition.num_nodes, dtype=torch.int64, device=row.device)
    number[first:last] = torch.arange(num_local, device=row.device)
    number[halo] = torch.arange(num_local, num_local + halo.numel(), device=row.device)
    rows = Adjacency.from_coo(
        partition.position(row).long() - first,
        number[column.long()],
        (num_local, num_local + halo.numel()),
        self_loops=self_loops,
        group_rows=group_rows,
    )
    return rows, exchange


def columns_of(rows: Adjacency, *, own: bool) -> Adjacency:
    """The entries of a rank's rows whose column is one of its own nodes, or another rank's."""
    num_local, num_columns = rows.shape
    kept = rows.col < num_local if own else rows.col >= num_local
    before = torch.zeros(rows.num_edges + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(kept, 0, out=before[1:])
    edge_id = rows.edge_id
    if edge_id is None:
        edge_id = torch.arange(rows.num_edges, dtype=torch.int32, device=rows.device)
    col = rows.col[kept]
    return Adjacency(
        before[rows.rowptr],
        col if own else col - num_local,
        (num_local, num_local if own else num_columns - num_local),
        edge_id=edge_id[kept],
        num_values=rows.num_values,
        group_rows=rows.group_rows,
    )


def edges_of_rank(
    rowptr: Tensor, col: Tensor, partition: Partition, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Destinations and sources of the rank's edges, on ``device``, of a whole graph in compressed rows."""
    node = partition.nodes(rank).to(rowptr.device)
    begin, end = rowptr[node].long(), rowptr[node + 1].long()
    count = end - begin
    total = int(count.sum())
    if partition.order is None:
        start = int(begin[0]) if node.numel() else 0
        part = col[start : start + total]
    else:
        before = torch.cumsum(count, 0) - count
        entry = torch.arange(total, device=rowptr.device)
        part = col[entry + torch.repeat_interleave(begin - before, count, output_size=total)]
    row = torch.repeat_interleave(node.to(device), count.to(device), output_size=total)
    return row.to(col.dtype), part.to(device)


def check_ends(row: Tensor, col: Tensor, num_nodes: int) -> None:
    """Raises an error unless both name nodes, on one device and as many."""
    for name, index in (("row", row), ("col", col)):
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
            kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"{name}: expected an int32 or int64 tensor, got {kind}")
        if index.dim() != 1 or index.numel() != row.numel() or index.device != row.device:
            raise ValueError(
                f"{name}: expected {row.numel()} entries on {row.device} like row, got shape "
                f"{tuple(index.shape)} on {index.device}"
            )
        if index.numel():
            low, high = (int(end) for end in torch.aminmax(index))
            if low < 0 or high >= num_nodes:
                raise ValueError(f"{name}: expected nodes from 0 to {num_nodes - 1}, {range_text(low, high)}")
