"""Sending the features of nodes to the ranks whose rows have them for neighbours, and gradients back."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastsparse_core.adjacency import Adjacency
from fastsparse_core.ops.spmm import spmm


class HaloExchange:
    """Who sends which rows to whom.

    The halo of a rank are the nodes of other ranks that its rows have for neighbours, in the order of their
    positions: first those of rank 0, then those of rank 1, ...

    Attributes:
        group: the processes; None: all.
        num_local: nodes of this rank.
        send_index: int64, local rows to send: for rank 0, for rank 1, ...
        send_counts: how many for each rank.
        recv_counts: how many halo nodes each rank sends.
    """

    def __init__(
        self, halo: Tensor, starts: tuple[int, ...], rank: int, group: dist.ProcessGroup | None
    ) -> None:
        """Tells every rank what it must send; all processes of the group must call it.

        Args:
            halo: int64, positions of the halo nodes, ascending.
            starts: position of every rank's first node.
            rank: of this process in the group.
            group: the processes; None: all.
        """
        self.group = group
        self.num_local = starts[rank + 1] - starts[rank]
        bounds = torch.searchsorted(halo, torch.tensor(starts, device=halo.device))
        wanted = bounds.diff()
        asked = torch.empty_like(wanted)
        dist.all_to_all_single(asked, wanted, group=group)
        self.recv_counts: list[int] = wanted.tolist()
        self.send_counts: list[int] = asked.tolist()
        self.send_index = halo.new_empty(sum(self.send_counts))
        dist.all_to_all_single(self.send_index, halo, self.send_counts, self.recv_counts, group=group)
        self.send_index -= starts[rank]

    @property
    def num_halo(self) -> int:
        """Nodes of other ranks."""
        return sum(self.recv_counts)

    @cached_property
    def returned(self) -> Adjacency:
        """Sums what comes back onto the local rows it was sent from, in a fixed order: (num_local, sent)."""
        sent = self.send_index.numel()
        column = torch.arange(sent, device=self.send_index.device)
        return Adjacency.from_coo(self.send_index, column, (self.num_local, sent))

    def to_halo(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        """Starts to send rows (sent, ...); returns where the halo's arrive, and what to wait for."""
        out = rows.new_empty(self.num_halo, *rows.shape[1:])
        return out, self._send(out, rows, self.recv_counts, self.send_counts)

    def from_halo(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        """Starts to send rows (num_halo, ...) back to the halo's owners."""
        out = rows.new_empty(self.send_index.numel(), *rows.shape[1:])
        return out, self._send(out, rows, self.send_counts, self.recv_counts)

    def _send(self, out: Tensor, rows: Tensor, out_counts: list[int], counts: list[int]) -> dist.Work:
        return dist.all_to_all_single(out, rows, out_counts, counts, group=self.group, async_op=True)

    def halo_of(self, x: Tensor) -> Tensor:
        """The halo's rows of constants (num_local, ...), without gradient."""
        received, work = self.to_halo(x.detach().index_select(0, self.send_index))
        work.wait()
        return received

    def memory_usage(self) -> dict[str, int]:
        """Bytes of what is kept, by name."""
        sizes = {"send_index": self.send_index.nbytes}
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
        self.work: dist.Work | None = None
        self.kept: Any = None  # tensors that the transfer uses
        self.arriving = _Leave.apply(x, self)

    def wait(self) -> Tensor:
        """The halo's features, (num_halo, F), in the dtype of the local ones; differentiable."""
        arriving, self.arriving = self.arriving, None  # kept, it would close a cycle through autograd's graph
        return _Arrive.apply(arriving, self).to(self.dtype)

    def finish(self) -> Any:
        """Waits for the transfer; on CUDA it is the stream that waits."""
        assert self.work is not None
        self.work.wait()
        kept, self.work, self.kept = self.kept, None, None
        return kept


class _Leave(torch.autograd.Function):
    """Starts the exchange; backward: ends the exchange of the gradients and adds them up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: HaloFeatures) -> Tensor:
        ctx.way, ctx.dtype = way, x.dtype
        rows = x.index_select(0, way.exchange.send_index).to(way.sent_dtype)
        received, way.work = way.exchange.to_halo(rows)
        way.kept = rows
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received = ctx.way.finish()[1]
        return spmm(ctx.way.exchange.returned, received.to(ctx.dtype)), None


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
        received, ctx.way.work = ctx.way.exchange.from_halo(grad)
        ctx.way.kept = (grad, received)
        # Its place in the graph keeps the order; what it holds is not what `_Leave` goes on with.
        return grad, None
