"""Sending the features of nodes to the ranks whose rows have them for neighbours, and gradients back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastsparse_core.adjacency import Adjacency
from fastsparse_core.ops.spmm import spmm

#: Above this share of all rows needed, all are sent: at most a quarter more bytes, and no copies.
SEND_ALL = 0.8


def exchange_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group whose messages go first: give it to a PartitionedAdjacency on GPUs. All processes must call it.

    On CUDA the exchange and the local product start at the same moment. In a stream of high priority the few
    blocks of the exchange get the first multiprocessors that are free; at equal priority the product's, which
    are many, are all dispatched before, and little of the exchange is left to overlap.

    Args:
        ranks: the processes; None: all.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(ranks, pg_options=options)


@dataclass
class Transfer:
    """Messages on their way."""

    works: list[dist.Work]

    def wait(self) -> None:
        """Waits for all of them; on CUDA it is the current stream that waits."""
        for work in self.works:
            work.wait()


class HaloExchange:
    """Who sends which rows to whom.

    The halo of a rank are nodes of other ranks, in the order of their positions: first those of rank 0, then
    those of rank 1, ... They are the neighbours of its rows; or all others' nodes, where most are neighbours
    anyway: then nobody copies rows together for each rank, and gradients come back in whole blocks.

    Attributes:
        group: the processes; None: all.
        rank: of this process in the group.
        sizes: number of nodes of every rank.
        sends_all: whether every rank gets all rows of the others.
        send_index: int64, local rows to send: for rank 0, for rank 1, ...; None where all are sent.
        send_counts: how many for each rank.
        recv_counts: how many halo nodes each rank sends.
    """

    def __init__(
        self,
        needed: Tensor,
        starts: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        send: Literal["auto", "needed", "all"] = "auto",
    ) -> None:
        """Tells every rank what it must send; all processes of the group must call it.

        Args:
            needed: bool, for every position whether it is another rank's and a neighbour of this one's rows.
            starts: position of every rank's first node.
            rank: of this process in the group.
            group: the processes; None: all.
            send: what: the rows needed, or all; ``"auto"``: all where 80 % are needed.
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
        """Rows that all ranks need, of those they would get if all were sent."""
        rows = torch.tensor([halo.numel()], device=halo.device)
        dist.all_reduce(rows, group=self.group)
        return int(rows) / max((len(self.sizes) - 1) * sum(self.sizes), 1)

    @property
    def num_local(self) -> int:
        """Nodes of this rank."""
        return self.sizes[self.rank]

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks."""
        return sum(self.recv_counts)

    @cached_property
    def returned(self) -> Adjacency:
        """Sums what comes back onto the local rows it was sent from, in a fixed order: (num_local, sent)."""
        assert self.send_index is not None
        sent = self.send_index.numel()
        column = torch.arange(sent, device=self.send_index.device)
        returned = Adjacency.from_coo(self.send_index, column, (self.num_local, sent))
        returned.scatters_left = None  # used again and again: the same bits every time
        return returned

    def pack(self, x: Tensor) -> Tensor:
        """The rows to send of data (num_local, ...)."""
        return x.contiguous() if self.send_index is None else x.index_select(0, self.send_index)

    def add_up(self, received: Tensor) -> Tensor:
        """(num_local, F): what came back for each row, added in the order of the ranks."""
        if self.send_index is None:
            return received.view(len(self.sizes) - 1, self.num_local, *received.shape[1:]).sum(0)
        if not received.is_floating_point():
            zeros = received.new_zeros(self.num_local, *received.shape[1:])
            return zeros.index_add(0, self.send_index, received)
        return spmm(self.returned, received)

    def to_halo(self, rows: Tensor) -> tuple[Tensor, Transfer]:
        """Starts to send packed rows; returns where the halo's arrive, and what to wait for."""
        out = rows.new_empty(self.num_halo, *rows.shape[1:])
        if self.sends_all:
            sent = [rows if other != self.rank else rows[:0] for other in range(len(self.sizes))]
            return out, self._blocks(list(out.split(self.recv_counts)), sent)
        return out, self._send(out, rows, self.recv_counts, self.send_counts)

    def from_halo(self, rows: Tensor) -> tuple[Tensor, Transfer]:
        """Starts to send rows (num_halo, ...) back to the halo's owners."""
        out = rows.new_empty(sum(self.send_counts), *rows.shape[1:])
        if self.sends_all:
            return out, self._blocks(list(out.split(self.send_counts)), list(rows.split(self.recv_counts)))
        return out, self._send(out, rows, self.send_counts, self.recv_counts)

    def _send(self, out: Tensor, rows: Tensor, out_counts: list[int], counts: list[int]) -> Transfer:
        work = dist.all_to_all_single(out, rows, out_counts, counts, group=self.group, async_op=True)
        return Transfer([work])

    def _blocks(self, out: list[Tensor], sent: list[Tensor]) -> Transfer:
        """One message for each other rank and back; the same rows may go to several without copies."""
        operations = []
        for other in range(len(self.sizes)):
            if other != self.rank:
                peer = other if self.group is None else dist.get_global_rank(self.group, other)
                if sent[other].numel():
                    operations.append(dist.P2POp(dist.isend, sent[other], peer, self.group))
                if out[other].numel():
                    operations.append(dist.P2POp(dist.irecv, out[other], peer, self.group))
        return Transfer(dist.batch_isend_irecv(operations) if operations else [])

    def halo_of(self, x: Tensor) -> Tensor:
        """The halo's rows of constants (num_local, ...), without gradient."""
        rows = self.pack(x.detach())
        received, transfer = self.to_halo(rows)
        transfer.wait()
        return received

    def memory_usage(self) -> dict[str, int]:
        """Bytes of what is kept, by name."""
        sizes = {"halo": self.halo.nbytes}
        if self.send_index is not None:
            sizes["send_index"] = self.send_index.nbytes
        if "returned" in self.__dict__:
            sizes |= {f"returned.{name}": size for name, size in self.returned.memory_usage().items()}
        return sizes


class HaloFeatures:
    """Features of the halo on their way: between start and :meth:`wait` the local product runs.

    The backward pass mirrors that. Autograd calls the last function first: the gradient of the halo's product
    comes first, leaves for its owners in :class:`_Arrive`, and is waited for in :class:`_Leave`, after the
    gradient of the local product.
    """

    def __init__(self, exchange: HaloExchange, x: Tensor, dtype: torch.dtype | None) -> None:
        """Starts to send features (num_local, F).

        Args:
            exchange: who gets which.
            x: the features.
            dtype: on the way, gradients too; None: that of the features.
        """
        self.exchange = exchange
        self.dtype = x.dtype
        self.sent_dtype = dtype or x.dtype
        self.transfer: Transfer | None = None
        self.kept: Any = None  # tensors that the transfer uses
        self.arriving = _Leave.apply(x, self)

    def wait(self) -> Tensor:
        """The halo's features, (num_halo, F), in the dtype of the local ones; differentiable."""
        arriving, self.arriving = self.arriving, None  # kept, it would close a cycle through autograd's graph
        return _Arrive.apply(arriving, self).to(self.dtype)

    def finish(self) -> Any:
        """Waits for the transfer; on CUDA it is the stream that waits."""
        assert self.transfer is not None
        self.transfer.wait()
        kept, self.transfer, self.kept = self.kept, None, None
        return kept


class _Leave(torch.autograd.Function):
    """Starts the exchange; backward: ends the exchange of the gradients and adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: HaloFeatures) -> Tensor:
        ctx.way, ctx.dtype = way, x.dtype
        rows = way.exchange.pack(x).to(way.sent_dtype)
        received, way.transfer = way.exchange.to_halo(rows)
        way.kept = rows
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received = ctx.way.finish()[1]
        return ctx.way.exchange.add_up(received.to(ctx.dtype)), None


class _Arrive(torch.autograd.Function):
    """Ends the exchange; backward: starts that of the gradients."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, way: HaloFeatures) -> Tensor:
        ctx.way = way
        way.finish()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.contiguous()
        received, ctx.way.transfer = ctx.way.exchange.from_halo(grad)
        ctx.way.kept = (grad, received)
        # Its place in the graph keeps the order; what it holds is not what `_Leave` goes on with.
        return grad, None
