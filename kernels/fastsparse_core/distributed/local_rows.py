"""Builds the structure of one rank's rows; its columns are the rank's own nodes, then the halo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastsparse_core.distributed.exchange import HaloExchange
from fastsparse_core.distributed.partitions import Partition
from fastsparse_core.formats.compress import expand_rows, row_pieces, select_rows
from fastsparse_core.formats.grouping import Method
from fastsparse_core.log import range_text
from fastsparse_core.structure.adjacency import Adjacency

#: Number of edges that are processed at a time: a 64-bit copy of their sources takes 0.5 GB.
PIECE_ENTRIES = 2**26


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
    """Builds the rank's rows and the exchange of the halo from edges in any order. Collective.

    The arguments are those of :meth:`PartitionedAdjacency.from_coo`, which checks them.

    Returns:
        The structure (local nodes, local nodes + halo), and the exchange.
    """
    num_local = partition.size(rank)
    count = torch.zeros(num_local, dtype=torch.int64, device=row.device)
    ascends, latest = True, 0
    for rows, _ in _owned(row, col, partition, rank):
        if rows.numel():
            count += torch.bincount(rows, minlength=num_local)
            ascends = ascends and int(rows[0]) >= latest and not bool((rows[1:] < rows[:-1]).any())
            latest = int(rows[-1])
    rowptr = torch.zeros(num_local + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(count, 0, out=rowptr[1:])
    del count
    is_in_order = ascends and self_loops == "keep"  # `rowptr` and `column` are the structure: no sort
    column = torch.empty(int(rowptr[-1]), dtype=torch.int32, device=row.device)
    local_row = torch.empty_like(column) if not is_in_order else column
    filled = 0
    for rows, columns in _owned(row, col, partition, rank):
        local_row[filled : filled + rows.numel()] = rows
        column[filled : filled + rows.numel()] = columns
        filled += rows.numel()
    if is_in_order:
        return rows_in_order(rowptr, column, partition, rank, group, send, group_rows)
    exchange, num_columns = _renumber(column, partition, rank, group, send)
    rows_and_halo = (num_local, num_columns)
    made = Adjacency.from_coo(local_row, column, rows_and_halo, self_loops=self_loops, group_rows=group_rows)
    return made, exchange


def rows_in_order(
    rowptr: Tensor,
    column: Tensor,
    partition: Partition,
    rank: int,
    group: dist.ProcessGroup | None,
    send: Literal["auto", "needed", "all"],
    group_rows: Method,
    self_loops: Literal["keep", "append", "replace"] = "keep",
) -> tuple[Adjacency, HaloExchange]:
    """Builds the rank's rows and the exchange of the halo from compressed rows. Collective.

    Args:
        rowptr: int64 (local nodes + 1,).
        column: int32 (num_edges,), positions of the sources; overwritten, and used without a copy.
        partition: owners of the nodes.
        rank: rank of this process.
        group: as for :meth:`PartitionedAdjacency.from_coo`.
        send: as for :meth:`PartitionedAdjacency.from_coo`.
        group_rows: as for :meth:`PartitionedAdjacency.from_coo`.
        self_loops: as for :meth:`PartitionedAdjacency.from_coo`.

    Returns:
        The structure (local nodes, local nodes + halo), and the exchange.
    """
    exchange, num_columns = _renumber(column, partition, rank, group, send)
    shape = (partition.size(rank), num_columns)
    if self_loops != "keep":
        row = expand_rows(rowptr, column.numel())
        return Adjacency.from_coo(row, column, shape, self_loops=self_loops, group_rows=group_rows), exchange
    return Adjacency.from_csr(rowptr, column, shape, group_rows=group_rows, copy=False), exchange


def _owned(row: Tensor, col: Tensor, partition: Partition, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the edges whose destination a rank owns, in pieces.

    Yields:
        Rows, counted from the rank's first row, and positions of the sources, both int32.
    """
    first = partition.starts[rank]
    for rows, columns in zip(row.split(PIECE_ENTRIES), col.split(PIECE_ENTRIES), strict=True):
        mine = partition.owned_edges(rows, rank)
        if mine.numel() != rows.numel():
            rows, columns = rows[mine], columns[mine]
        yield partition.position(rows).int() - first, partition.position(columns).int()


def _renumber(
    column: Tensor,
    partition: Partition,
    rank: int,
    group: dist.ProcessGroup | None,
    send: Literal["auto", "needed", "all"],
) -> tuple[HaloExchange, int]:
    """Renumbers the columns of a rank's rows in place: own nodes first, then the halo. Collective.

    Args:
        column: int32 (num_edges,), positions of the sources.
        partition: owners of the nodes.
        rank: rank of this process.
        group: as for :meth:`PartitionedAdjacency.from_coo`.
        send: as for :meth:`PartitionedAdjacency.from_coo`.

    Returns:
        The exchange of the halo's rows, and the number of columns.
    """
    first, last = partition.starts[rank], partition.starts[rank + 1]
    num_local, device = last - first, column.device
    # A mask over all nodes finds the halo in less time than sorting the edges would take.
    needed = torch.zeros(partition.num_nodes, dtype=torch.bool, device=device)
    for part in column.split(PIECE_ENTRIES):
        needed[part.long()] = True
    needed[first:last] = False
    exchange = HaloExchange(needed, partition.starts, rank, group, send)
    del needed
    num_columns = num_local + exchange.halo.numel()
    number = torch.empty(partition.num_nodes, dtype=torch.int32, device=device)
    number[first:last] = torch.arange(num_local, dtype=torch.int32, device=device)
    number[exchange.halo] = torch.arange(num_local, num_columns, dtype=torch.int32, device=device)
    for part in column.split(PIECE_ENTRIES):
        part.copy_(number[part.long()])
    return exchange, num_columns


def columns_of(rows: Adjacency, *, own: bool) -> Adjacency:
    """The structure of the entries whose column is one of the rank's own nodes, (local nodes, local nodes).

    With ``own=False``, the structure of all other entries, (local nodes, halo). The order and the number of
    edge values do not change.
    """
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


def columns_of_rank(
    rowptr: Tensor, col: Tensor, partition: Partition, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Row pointers of the rank's rows (int64), and positions of their columns (int32).

    Args:
        rowptr: int32 or int64 (num_nodes + 1,), row pointers of the whole graph.
        col: int32 or int64 (num_edges,), columns of the whole graph.
        partition: owners of the nodes.
        rank: rank of this process.
        device: device of the results.

    Raises:
        ValueError: a column is not a node id.
    """
    node = partition.nodes(rank).to(rowptr.device)
    begin = rowptr[node].long()
    pointers = torch.zeros(node.numel() + 1, dtype=torch.int64, device=rowptr.device)
    torch.cumsum(rowptr[node + 1].long() - begin, 0, out=pointers[1:])
    columns = torch.empty(int(pointers[-1]), dtype=torch.int32, device=device)
    start = int(begin[0]) if node.numel() else 0
    for first, last, part in row_pieces(pointers, columns):
        if partition.order is None:
            before = start + int(pointers[first])
            found = col[before : before + part.numel()]
        else:
            _, found = select_rows(rowptr, col, node[first:last])
        found = found.to(device)
        check_range("col", found, partition.num_nodes)
        part.copy_(partition.position(found))
    return pointers.to(device), columns


def check_ends(row: Tensor, col: Tensor, num_nodes: int) -> None:
    """Raises an error unless both tensors contain node ids and have the same length and device.

    Raises:
        TypeError: an argument is not an int32 or int64 tensor.
        ValueError: a shape, a device or an id does not fit.
    """
    for name, index in (("row", row), ("col", col)):
        if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
            kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"{name}: expected an int32 or int64 tensor, got {kind}")
        if index.dim() != 1 or index.numel() != row.numel() or index.device != row.device:
            raise ValueError(
                f"{name}: expected {row.numel()} entries on {row.device} like row, got shape "
                f"{tuple(index.shape)} on {index.device}"
            )
        check_range(name, index, num_nodes)


def check_range(name: str, index: Tensor, num_nodes: int) -> None:
    """Raises a ValueError unless all entries of an index are node ids, from 0 to ``num_nodes`` - 1."""
    if index.numel():
        low, high = (int(end) for end in torch.aminmax(index))
        if low < 0 or high >= num_nodes:
            raise ValueError(f"{name}: expected nodes from 0 to {num_nodes - 1}, {range_text(low, high)}")
