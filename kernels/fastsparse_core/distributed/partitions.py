"""Divides the nodes of a graph among processes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from fastsparse_core.log import range_text
from fastsparse_core.structure.adjacency import Adjacency

Method = Literal["auto", "metis", "contiguous"]

#: Cost of a row in addition to its edges, as a number of edges. On a current GPU, multiplying a row by 256 x
#: 256 matrices, forward and backward, takes about 10 ns, and gathering an edge's features of 1 KB about
#: 0.5 ns.
ROW_EDGES = 16

#: Largest number of edges for which ``method="auto"`` uses METIS, which takes about a minute on one core.
METIS_EDGES = 20_000_000


@dataclass(frozen=True)
class Partition:
    """Assigns each node of a graph to a rank, its owner.

    Nodes are ordered so that every rank owns a contiguous range.

    Attributes:
        starts: position of the first node of every rank, then the number of nodes; num_parts + 1 ints.
        order: id of the node at every position, int64 (num_nodes,); None: position and id are equal.
        method: name of the method that divided the nodes, for display.

    Raises:
        TypeError: ``order`` is not an int64 tensor.
        ValueError: ``starts`` does not ascend from 0, or ``order`` does not contain every node once.

    Example:
        >>> import torch
        >>> from fastsparse_core.distributed import Partition
        >>> partition = Partition.from_assignment(torch.tensor([0, 1, 0]), num_parts=2)
        >>> partition.nodes(0)
        tensor([0, 2])
    """

    starts: tuple[int, ...]
    order: Tensor | None = None
    method: str = "given"

    @classmethod
    def from_assignment(cls, owner: Tensor, num_parts: int, method: str = "given") -> Partition:
        """The partition in which node i belongs to rank ``owner[i]``.

        Args:
            owner: rank of every node, integers (num_nodes,) from 0 to num_parts - 1. The ranks may come from
                any partitioner, such as ``dgl.metis_partition_assignment``.
            num_parts: number of ranks; a rank may own no nodes.
            method: name of the method that divided the nodes, for display.

        Raises:
            ValueError: ``owner`` is not 1-D or floating, an owner is not a rank, or ``num_parts`` is not
                positive.
        """
        _check_parts(num_parts)
        if owner.dim() != 1 or owner.is_floating_point():
            raise ValueError(
                f"owner: expected integers of shape (num_nodes,), got {owner.dtype} of shape "
                f"{tuple(owner.shape)}"
            )
        owner = owner.long()
        if owner.numel() and (int(owner.min()) < 0 or int(owner.max()) >= num_parts):
            raise ValueError(
                f"owner: expected ranks from 0 to {num_parts - 1}, "
                f"got {int(owner.min())} to {int(owner.max())}"
            )
        sizes = torch.bincount(owner, minlength=num_parts).tolist()
        return cls((0, *accumulate(sizes)), torch.argsort(owner, stable=True), method)

    def __post_init__(self) -> None:
        starts, order = self.starts, self.order
        if not starts or starts[0] != 0 or any(last < first for first, last in pairwise(starts)):
            raise ValueError(f"starts: expected positions that ascend from 0, got {starts}")
        if order is None:
            return
        if not isinstance(order, Tensor) or order.dtype != torch.int64:
            got = order.dtype if isinstance(order, Tensor) else type(order).__name__
            raise TypeError(f"order: expected an int64 tensor, got {got}")
        if order.shape != (self.num_nodes,):
            raise ValueError(
                f"order: expected shape ({self.num_nodes},), a node for every position, "
                f"got {tuple(order.shape)}"
            )
        if order.numel():
            low, high = (int(end) for end in torch.aminmax(order))
            is_taken = torch.zeros(self.num_nodes, dtype=torch.bool, device=order.device)
            if low < 0 or high >= self.num_nodes or not is_taken.index_fill_(0, order, True).all():
                raise ValueError(
                    f"order: expected every node from 0 to {self.num_nodes - 1} once, {range_text(low, high)}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Partition, (
            self.starts,
            self.order,
            self.method,
        )  # unpickling calls the constructor, whose checks detect damaged files

    @property
    def num_parts(self) -> int:
        """Number of ranks."""
        return len(self.starts) - 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the whole graph."""
        return self.starts[-1]

    def size(self, rank: int) -> int:
        """Number of nodes that a rank owns.

        Args:
            rank: from 0 to num_parts - 1.
        """
        return self.starts[rank + 1] - self.starts[rank]

    @cached_property
    def place(self) -> Tensor | None:
        """Position of every node, int64 (num_nodes,): the inverse of ``order``; None if ``order`` is None."""
        if self.order is None:
            return None
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(self.num_nodes, device=self.order.device)
        return place

    def position(self, node: Tensor) -> Tensor:
        """Positions of nodes, in the shape of ``node``.

        Args:
            node: ids of nodes, int32 or int64 of any shape (...,).
        """
        return node if self.place is None else self.place.to(node.device)[node.long()]

    def nodes(self, rank: int) -> Tensor:
        """Ids of the nodes that a rank owns, int64, in the order of its rows.

        Args:
            rank: from 0 to num_parts - 1.
        """
        first, last = self.starts[rank], self.starts[rank + 1]
        return torch.arange(first, last) if self.order is None else self.order[first:last]

    def scatter(self, x: Tensor, rank: int) -> Tensor:
        """Selects the rows of a rank's nodes from data of all nodes.

        Args:
            x: (num_nodes, ...), any dtype.
            rank: from 0 to num_parts - 1.

        Returns:
            The rows, in the order of :meth:`nodes`.

        Raises:
            ValueError: ``x`` does not have one row per node.
        """
        if x.size(0) != self.num_nodes:
            raise ValueError(f"x: expected {self.num_nodes} rows, one per node, got shape {tuple(x.shape)}")
        if self.order is None:
            return x[self.starts[rank] : self.starts[rank + 1]]
        return x[self.nodes(rank).to(x.device)]

    def owned_edges(self, row: Tensor, rank: int) -> Tensor:
        """Indices of the edges whose destination a rank owns, int64, ascending.

        Args:
            row: destinations, int32 or int64 (E,).
            rank: from 0 to num_parts - 1.
        """
        position = self.position(row)
        return ((position >= self.starts[rank]) & (position < self.starts[rank + 1])).nonzero().flatten()

    def __repr__(self) -> str:
        sizes = [last - first for first, last in pairwise(self.starts)]
        shown = sizes if len(sizes) <= 8 else f"{min(sizes)} to {max(sizes)} nodes each"
        return f"Partition(method={self.method!r}, num_parts={self.num_parts}, nodes={shown})"


def partition(
    graph: Adjacency | Tensor, num_parts: int, method: Method = "auto", *, num_nodes: int | None = None
) -> Partition:
    """Divides the nodes of a graph among ranks.

    The function does not communicate. Run METIS on one rank and send the result to the other ranks with
    ``torch.distributed.broadcast_object_list``. Contiguous blocks can be computed on every rank.

    Args:
        graph: square structure, or edges, int32 or int64 (2, E): sources, then destinations.
        num_parts: number of ranks.
        method: ``"contiguous"``: every rank owns consecutive nodes, with about equally many edges (each row
            counts as 16 more edges), so features keep their order. ``"metis"``: few edges connect nodes of
            different ranks (Karypis and Kumar, 1998). The first of these packages that is installed divides
            the graph: pymetis 2025.2 or later (balances edges too), pyg-lib or torch-sparse (balance nodes).
            ``"auto"``: METIS if one of the packages is installed and the graph has at most 20 million edges,
            otherwise contiguous.
        num_nodes: number of nodes; required if ``graph`` is edges.

    Returns:
        The owners of all nodes.

    Raises:
        ValueError: the graph is not square, or an argument is out of range.
        ImportError: ``method`` is ``"metis"``, and none of the packages is installed.

    Example:
        >>> import torch
        >>> from fastsparse_core.distributed import partition
        >>> edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
        >>> parts = partition(edges, 2, "contiguous", num_nodes=4)
        >>> parts.nodes(1)
        tensor([2, 3])
    """
    _check_parts(num_parts)
    if method not in ("auto", "metis", "contiguous"):
        raise ValueError(f"method: expected 'auto', 'metis' or 'contiguous', got {method!r}")
    if isinstance(graph, Adjacency):
        if graph.num_dst != graph.num_src:
            raise ValueError(f"graph: expected as many destinations as sources, got shape {graph.shape}")
        num_nodes, num_edges = graph.num_dst, graph.num_edges
    elif num_nodes is None:
        raise ValueError("num_nodes: expected the number of nodes if the graph is given as edges, got None")
    else:
        num_edges = graph.size(1)
    if method == "auto":
        method = (
            "metis" if num_edges <= METIS_EDGES and _metis() is not None and num_parts > 1 else "contiguous"
        )
    if isinstance(graph, Adjacency):
        degree = graph.in_degree()
    else:
        degree = torch.bincount(graph[1], minlength=num_nodes)
    if method == "contiguous" or num_parts == 1 or num_nodes == 0:
        return _blocks(degree, num_parts)
    found = _metis()
    if found is None:
        raise ImportError(
            "method: 'metis' needs pymetis, pyg-lib or torch-sparse, and none of them can be imported; "
            "install one (pip install pymetis), or use method='contiguous'"
        )
    ends = (
        torch.stack([graph.row().long(), graph.col.long()]) if isinstance(graph, Adjacency) else graph.long()
    )
    ends = ends[:, ends[0] != ends[1]]
    # METIS expects every edge once in each direction.
    both = Adjacency.from_coo(
        torch.cat([ends[0], ends[1]]).cpu(),
        torch.cat([ends[1], ends[0]]).cpu(),
        (num_nodes, num_nodes),
        duplicates="sum",
    )
    owner = found(both.rowptr, both.col.long(), degree.cpu() + ROW_EDGES, num_parts)
    return Partition.from_assignment(owner, num_parts, "metis")


def _blocks(degree: Tensor, num_parts: int) -> Partition:
    """The partition into blocks of consecutive nodes of about equal cost."""
    cost = torch.cumsum(degree.long() + ROW_EDGES, 0)
    total = int(cost[-1]) if cost.numel() else 0
    wanted = torch.tensor([total * part // num_parts for part in range(1, num_parts)], device=cost.device)
    # Row i ends at cost[i]. A block ends with the last row that ends at or before the target.
    ends = torch.searchsorted(cost, wanted.long(), right=True).tolist()
    return Partition((0, *ends, degree.numel()), None, "contiguous")


def _metis() -> Callable[[Tensor, Tensor, Tensor, int], Tensor] | None:
    """A function (rowptr, col, weight, num_parts) -> owner of every node; None: no package has METIS."""

    def of_pymetis(module: Any, rowptr: Tensor, col: Tensor, weight: Tensor, num_parts: int) -> Tensor:
        graph = module.CSRAdjacency(adj_starts=rowptr.numpy(), adjacent=col.numpy())
        return torch.tensor(module.part_graph(num_parts, graph, vweights=weight.numpy())[1])

    # pyg-lib and torch-sparse give all nodes the same weight.
    def of_pyg_lib(module: Any, rowptr: Tensor, col: Tensor, weight: Tensor, num_parts: int) -> Tensor:
        return torch.ops.pyg.metis(rowptr, col, None, num_parts, False)

    def of_torch_sparse(module: Any, rowptr: Tensor, col: Tensor, weight: Tensor, num_parts: int) -> Tensor:
        return torch.ops.torch_sparse.partition(rowptr, col, None, num_parts, False)

    calls = {"pymetis": of_pymetis, "pyg_lib": of_pyg_lib, "torch_sparse": of_torch_sparse}
    for name, call in calls.items():
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):
            continue
        return functools.partial(call, module)
    return None


def _check_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_parts: expected at least 1, got {num_parts}")
