"""Sends features of nodes to the ranks that own neighbours of these nodes, and sends gradients back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fastsparse_core.ops.spmm import spmm
from fastsparse_core.structure.adjacency import Adjacency

#: If the ranks need at least this share of the other ranks' rows, all rows are sent. This sends at most a
#: quarter more bytes, and saves copies of the needed rows.
SEND_ALL = 0.8
#: Largest number of bytes of one piece of a `ColumnExchange`: some columns of the features of all sources.
#: Two pieces are in memory at a time.
PIECE_BYTES = 2**33
#: Number of rows of a piece of returned sums (`HaloExchange.add_up_in_pieces`).
_PIECE_ROWS = 2**22


def exchange_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Creates a process group with high priority for a PartitionedAdjacency on GPUs. Collective.

    On CUDA, the exchange and the product with the rank's own nodes start at the same time. On a stream with
    high priority, the few thread blocks of the exchange get the first free multiprocessors. With equal
    priority, the many blocks of the product are scheduled first, so the exchange hardly overlaps with it.

    Args:
        ranks: the processes; None: all.

    Returns:
        A process group; with NCCL, its stream has high priority.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or under torchrun
        >>> from fastsparse_core.distributed import exchange_group
        >>> group = exchange_group()
        >>> dist.get_world_size(group)
        1
        >>> dist.destroy_process_group()
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(ranks, pg_options=options)


@dataclass
class Transfer:
    """Rows that are being sent and received.

    Attributes:
        received: the rows that arrive from other ranks; complete after :meth:`wait`.
        sent: the rows that this rank sends; must stay alive until :meth:`wait`.
        works: handles of the messages.
    """

    received: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Waits for the messages and returns the received rows; on CUDA, only the current stream waits."""
        for work in self.works:
            work.wait()
        return self.received


class HaloExchange:
    """Sends rows between ranks; stores the rows that this rank sends to each other rank.

    The halo of a rank is a list of nodes of other ranks, ordered by position: first nodes of rank 0, then of
    rank 1, and so on. The halo contains the neighbours of the rank's rows. If most nodes are neighbours, the
    halo contains all nodes of the other ranks: then a rank sends all its rows without copying them, and the
    gradients of its rows return as one block per rank.

    Attributes:
        group: the processes; None: all.
        rank: rank of this process in the group.
        sizes: number of nodes of every rank.
        halo: positions of the halo's nodes, int64 (num_halo,), ascending.
        sends_all: True if every rank gets all rows of the other ranks.
        send_index: local rows to send to rank 0, then to rank 1, and so on, int64 (sum of send_counts,);
            None: all rows are sent to every rank.
        send_counts: number of rows to send to each rank.
        recv_counts: number of halo rows that each rank sends to this rank.
    """

    def __init__(
        self,
        needed: Tensor,
        starts: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        send: Literal["auto", "needed", "all"] = "auto",
    ) -> None:
        """Tells every rank which rows it must send. Collective.

        Args:
            needed: bool (num_nodes,), by position: True if the node belongs to another rank and is a
                neighbour of this rank's rows.
            starts: position of every rank's first node, then the number of nodes.
            rank: rank of this process in the group.
            group: the processes; None: all.
            send: ``"needed"``: ranks send only needed rows; ``"all"``: ranks send all rows; ``"auto"``: all
                rows if at least 80 % of them are needed.
        """
        self.group = group
        self.rank = rank
        self.sizes = [last - first for first, last in pairwise(starts)]
        self.send_index: Tensor | None = None
        halo = needed.nonzero().flatten()
        self.sends_all = send == "all" or (send == "auto" and self._share(halo) >= SEND_ALL)
        if self.sends_all:
            others = torch.ones_like(needed)
            others[starts[rank] : starts[rank + 1]] = False
            self.halo = others.nonzero().flatten()
            self.send_counts = [self.num_local * (other != rank) for other in range(len(self.sizes))]
            self.recv_counts = [size * (other != rank) for other, size in enumerate(self.sizes)]
            return
        self.halo = halo
        bounds = torch.searchsorted(halo, torch.tensor(starts, device=halo.device))
        wanted = bounds.diff()
        asked = torch.empty_like(wanted)
        dist.all_to_all_single(asked, wanted, group=group)
        self.recv_counts = wanted.tolist()
        self.send_counts = asked.tolist()
        self.send_index = halo.new_empty(sum(self.send_counts))
        dist.all_to_all_single(self.send_index, halo, self.send_counts, self.recv_counts, group=group)
        self.send_index -= starts[rank]

    def _share(self, halo: Tensor) -> float:
        """Number of rows that ranks need, divided by the number of sent rows if all are sent. Collective."""
        rows = torch.tensor([halo.numel()], device=halo.device)
        dist.all_reduce(rows, group=self.group)
        return int(rows) / max((len(self.sizes) - 1) * sum(self.sizes), 1)

    @property
    def num_local(self) -> int:
        """Number of nodes of this rank."""
        return self.sizes[self.rank]

    @property
    def num_halo(self) -> int:
        """Number of nodes of other ranks in the halo."""
        return sum(self.recv_counts)

    @cached_property
    def returned(self) -> Adjacency:
        """Structure (num_local, number of sent rows) that sums the returned rows of each local row."""
        assert self.send_index is not None
        sent = self.send_index.numel()
        column = torch.arange(sent, device=self.send_index.device)
        returned = Adjacency.from_coo(self.send_index, column, (self.num_local, sent))
        returned.usage.scattered = None  # no scattering with atomics, so that every run gives the same bits
        return returned

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of ``x`` (num_local, ...) that this rank sends, contiguous and in ``dtype``."""
        if self.send_index is not None:
            return x.index_select(0, self.send_index).to(dtype)
        x = x.to(dtype)
        strided = not x.is_contiguous() and x.dim() == 2 and x.stride(1) == 1 and x.data_ptr() % 8 == 0
        lengths = (x.size(1), x.stride(0), x.storage_offset()) if strided else ()
        if strided and all(length * dtype.itemsize % 8 == 0 for length in lengths):
            # PyTorch copies columns of a wider matrix element by element, so a view with fewer and larger
            # elements is copied faster.
            return x.view(torch.int64).contiguous().view(dtype)
        return x.contiguous()

    def add_up(self, received: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Sums the rows that other ranks returned for each local row, in the order of the ranks.

        Args:
            received: (number of returned rows, ...), any dtype.
            dtype: dtype of the sums.
            out: (num_local, ...), tensor for the sums; may be columns of a wider matrix. None: a new tensor.

        Returns:
            The sums, (num_local, ...).
        """
        if self.send_index is None:
            blocks = received.view(len(self.sizes) - 1, self.num_local, *received.shape[1:])
            return torch.sum(blocks, 0, dtype=dtype, out=out)
        if received.is_floating_point():
            sums = spmm(self.returned, received.to(dtype))
        else:
            zeros = received.new_zeros(self.num_local, *received.shape[1:], dtype=dtype)
            sums = zeros.index_add_(0, self.send_index, received)
        return sums if out is None else out.copy_(sums)

    def add_up_in_pieces(self, received: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yields the sums of `add_up` for some local rows at a time, which takes less memory.

        Args:
            received: (number of returned rows, ...), any dtype.
            dtype: dtype of the sums.

        Yields:
            Local rows, and their sums (number of these rows, ...).
        """
        if self.send_index is not None:
            yield slice(0, self.num_local), self.add_up(received, dtype)
            return
        blocks = received.view(len(self.sizes) - 1, self.num_local, *received.shape[1:])
        for begin in range(0, self.num_local, _PIECE_ROWS):
            rows = slice(begin, begin + _PIECE_ROWS)
            yield rows, torch.sum(blocks[:, rows], 0, dtype=dtype)

    def to_halo(self, rows: Tensor, out: Tensor | None = None) -> Transfer:
        """Starts to send packed rows to the ranks that have them in their halo.

        Args:
            rows: result of `pack`.
            out: tensor for the rows of the halo, (num_halo, ...), contiguous; None: a new tensor.
        """
        received = rows.new_empty(self.num_halo, *rows.shape[1:]) if out is None else out
        if not self.sends_all:
            return self._send(received, rows, self.recv_counts, self.send_counts)
        sent = [rows if other != self.rank else rows[:0] for other in range(len(self.sizes))]
        return Transfer(received, rows, self._blocks(received.split(self.recv_counts), sent))

    def from_halo(self, rows: Tensor) -> Transfer:
        """Starts to send rows (num_halo, ...) back to the ranks that own the halo's nodes."""
        received = rows.new_empty(sum(self.send_counts), *rows.shape[1:])
        if not self.sends_all:
            return self._send(received, rows, self.send_counts, self.recv_counts)
        out, sent = received.split(self.send_counts), rows.split(self.recv_counts)
        return Transfer(received, rows, self._blocks(out, sent))

    def _send(self, out: Tensor, rows: Tensor, out_counts: list[int], counts: list[int]) -> Transfer:
        work = dist.all_to_all_single(out, rows, out_counts, counts, group=self.group, async_op=True)
        return Transfer(out, rows, [work])

    def _blocks(self, out: Sequence[Tensor], sent: Sequence[Tensor]) -> list[dist.Work]:
        """Starts one message to and one from each other rank. The same rows can be sent to several ranks."""
        operations = []
        for other in range(len(self.sizes)):
            if other != self.rank:
                peer = other if self.group is None else dist.get_global_rank(self.group, other)
                if sent[other].numel():
                    operations.append(dist.P2POp(dist.isend, sent[other], peer, self.group))
                if out[other].numel():
                    operations.append(dist.P2POp(dist.irecv, out[other], peer, self.group))
        return dist.batch_isend_irecv(operations) if operations else []

    def halo_of(self, x: Tensor) -> Tensor:
        """The halo's rows of a tensor (num_local, ...), without gradient. Collective."""
        return self.to_halo(self.pack(x.detach(), x.dtype)).wait()

    def memory_usage(self) -> dict[str, int]:
        """Bytes of the stored tensors, by name."""
        sizes = {"halo": self.halo.nbytes}
        if self.send_index is not None:
            sizes["send_index"] = self.send_index.nbytes
        if "returned" in self.__dict__:
            sizes |= {f"returned.{name}": size for name, size in self.returned.memory_usage().items()}
        return sizes


def column_tiles(width: int, count: int) -> list[slice]:
    """Divides columns into at most ``count`` tiles of equal width; the last one may be narrower.

    The width of a tile is a multiple of 64, the number of columns that kernels gather per pass over a
    structure. If the tiles would be narrower than 64 columns, their width is a multiple of 16, so that their
    rows start at multiples of 32 bytes in every dtype.
    """
    step = -(-width // count)
    unit = 64 if step >= 64 else 16
    step = max(-(-step // unit) * unit, 1)
    return [slice(first, min(first + step, width)) for first in range(0, max(width, 1), step)]


class ColumnExchange:
    """Exchanges some columns of features or gradients at a time, outside of autograd. Calls are collective.

    Exchanging all columns at once could take as much memory as the features of the whole graph.

    Args:
        exchange: exchange of the halo's rows.
    """

    def __init__(self, exchange: HaloExchange) -> None:
        self.exchange = exchange
        self.num_own = exchange.num_local
        self.num_sources = exchange.num_local + exchange.num_halo

    def sources(self, x: Tensor, scale: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yields some columns of the features of all sources: first the rank's own nodes, then the halo.

        While the caller uses some columns, the next ones are exchanged.

        Args:
            x: floating (local nodes, F).
            scale: factors of the features, (at least the local nodes,); the products are rounded to the dtype
                of ``x``. None: 1.

        Yields:
            Columns, and their features (num_sources, columns), contiguous.
        """
        columns = self._columns(x)
        factor = None if scale is None else scale[: self.num_own, None]
        begun = [self._begin(x[:, columns[0]], factor)]
        for nth, each in enumerate(columns):
            begun += [self._begin(x[:, after], factor) for after in columns[nth + 1 : nth + 2]]
            sources, transfer = begun.pop(0)
            transfer.wait()
            yield each, sources
            del sources, transfer

    def to_owners(self, like: Tensor, gradients: Callable[[slice], Tensor]) -> Tensor:
        """Sums the gradients of each node's features on the rank that owns the node.

        Args:
            like: (any number of rows, F), a tensor with the width, dtype and device of the features; its
                values are not read.
            gradients: function that computes the gradients of all sources' features in some columns,
                (num_sources, number of these columns). While it runs, the gradients of the previous columns
                are sent.

        Returns:
            The sums, (local nodes, F).
        """
        out = like.new_empty(self.num_own, like.size(1))
        begun: list[tuple[slice, Tensor, Transfer]] = []

        def finish() -> None:
            columns, found, transfer = begun.pop(0)
            own = found[: self.num_own]
            for rows, sums in self.exchange.add_up_in_pieces(transfer.wait(), out.dtype):
                out[rows, columns] = sums.add_(own[rows])

        for columns in self._columns(like):
            found = gradients(columns)
            begun.append((columns, found, self.exchange.from_halo(found[self.num_own :])))
            del found
            if len(begun) > 1:
                finish()
        finish()
        return out

    def _columns(self, x: Tensor) -> list[slice]:
        size = self.num_sources * x.size(1) * x.itemsize
        return column_tiles(x.size(1), max(-(-size // PIECE_BYTES), 1))

    def _begin(self, x: Tensor, factor: Tensor | None) -> tuple[Tensor, Transfer]:
        """Starts to exchange columns ``x`` (local nodes, number of columns), times ``factor``.

        Returns:
            Features of all sources, and the transfer. The features of the halo are undefined until the
            transfer ends.
        """
        sources = x.new_empty(self.num_sources, x.size(1))
        own = sources[: self.num_own]
        if factor is None:
            own.copy_(x)
        else:
            torch.mul(x, factor, out=own)
        sent = own if self.exchange.sends_all else self.exchange.pack(own, x.dtype)
        return sources, self.exchange.to_halo(sent, sources[self.num_own :])


class HaloFeatures:
    """Features of the halo while they are exchanged, in tiles of columns, with one transfer per tile.

    In the forward pass, the constructor starts the exchange, and the local product runs before the first of
    :meth:`tiles`. The product with a tile of the halo runs while the next tile is sent. The backward pass has
    the reverse order: the gradient of the last tile is computed first. :class:`_Arrive` starts to send this
    gradient back, and the gradient of the previous tile is computed meanwhile. After the gradient of the
    local product, :class:`_Leave` waits for all transfers.

    Use this class as a context manager. If a product raises an exception, the context waits for the open
    transfers before it passes on the exception. Without this wait, a cycle through autograd's graph would
    keep the features alive forever, or the memory of an open message would be freed, and gloo would close the
    connection.
    """

    def __init__(
        self, exchange: HaloExchange, x: Tensor, dtype: torch.dtype | None = None, tiles: int = 1
    ) -> None:
        """Starts to send features.

        Args:
            exchange: exchange of the halo's rows.
            x: floating (num_local, F), the features.
            dtype: dtype in which features and gradients are sent; None: the dtype of the features.
            tiles: largest number of tiles; all ranks must pass the same number.
        """
        self.exchange = exchange
        self.dtype = dtype or x.dtype
        self.feature_dtype = x.dtype
        self.columns = column_tiles(x.size(1), tiles)
        self.transfers: list[Transfer | None] = [None] * len(self.columns)
        self.arriving: Sequence[Tensor] = _Leave.apply(x, self)

    def __enter__(self) -> HaloFeatures:
        return self

    def __exit__(self, *exception: object) -> None:
        self.arriving = ()
        for tile, transfer in enumerate(self.transfers):
            if transfer is not None:
                self.finish(tile)

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields the columns of every tile and the halo's features in these columns. Call it only once.

        The features are (num_halo, columns), contiguous, differentiable, and in the dtype of the local
        features.
        """
        arriving, self.arriving = self.arriving, ()  # avoids a cycle through autograd's graph
        for tile, columns in enumerate(self.columns):
            yield columns, _Arrive.apply(arriving[tile], self, tile).to(self.feature_dtype)

    def whole(self) -> Tensor:
        """The halo's features (num_halo, F). Only if they are sent in one tile; call it only once."""
        ((_, rows),) = self.tiles()
        return rows

    def finish(self, tile: int) -> Tensor:
        """Waits for a tile and returns its rows; on CUDA, only the current stream waits."""
        transfer, self.transfers[tile] = self.transfers[tile], None
        assert transfer is not None
        return transfer.wait()


def _refuse_second_derivatives() -> None:
    # Not PyTorch's once_differentiable: it raises an error in `backward()`, but `autograd.grad` would
    # silently omit terms.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "create_graph: expected False, got True; features that are exchanged between processes do not "
            "support second derivatives"
        )


class _Leave(torch.autograd.Function):
    """Forward: starts the exchange of features. Backward: ends the exchange of gradients and adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: HaloFeatures) -> tuple[Tensor, ...]:
        ctx.way, ctx.dtype = way, x.dtype
        exchange = way.exchange
        started = [exchange.to_halo(exchange.pack(x[:, tile], way.dtype)) for tile in way.columns]
        way.transfers[:] = started
        return tuple(transfer.received for transfer in started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        way = ctx.way
        if len(way.columns) == 1:
            return way.exchange.add_up(way.finish(0), ctx.dtype), None
        total = grads[0].new_empty(way.exchange.num_local, way.columns[-1].stop, dtype=ctx.dtype)
        for tile in reversed(range(len(way.columns))):  # the order in which the gradients were sent
            way.exchange.add_up(way.finish(tile), ctx.dtype, total[:, way.columns[tile]])
        return total, None


class _Arrive(torch.autograd.Function):
    """Forward: ends the exchange of a tile. Backward: starts the exchange of the tile's gradients."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, way: HaloFeatures, tile: int) -> Tensor:
        ctx.way, ctx.tile = way, tile
        way.finish(tile)
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        grad = grad.contiguous()
        ctx.way.transfers[ctx.tile] = ctx.way.exchange.from_halo(grad)
        # The returned gradient only makes autograd call `_Leave.backward`, which does not read the gradient.
        return grad, None, None


class AddColumns(torch.autograd.Function):
    """Adds a part to some columns of a total, in place, so that no wide matrix is copied."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, part: Tensor, columns: slice) -> Tensor:
        """Adds ``part`` (N, number of columns) to some columns of ``total`` (N, F), and returns ``total``."""
        ctx.columns = columns
        ctx.mark_dirty(total)
        total[:, columns].add_(part)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the total and of the part."""
        return grad, grad[:, ctx.columns], None
