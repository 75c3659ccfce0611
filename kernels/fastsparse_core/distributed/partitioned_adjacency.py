"""The structure of one rank's rows of a graph, for the layers and operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fastsparse_core.distributed.agreement import check_agreement
from fastsparse_core.distributed.exchange import AddColumns, ColumnExchange, HaloExchange, HaloFeatures
from fastsparse_core.distributed.latest import Latest
from fastsparse_core.distributed.local_rows import (
    PIECE_ENTRIES,
    check_ends,
    columns_of,
    columns_of_rank,
    local_rows,
    rows_in_order,
)
from fastsparse_core.distributed.partitions import Partition
from fastsparse_core.distributed.statistics import PartitionStatistics, tiles_that_pay
from fastsparse_core.formats.grouping import Method
from fastsparse_core.ops._autocast import autocast
from fastsparse_core.ops._checks import check_features, check_scale
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops.spmm import Reduce, spmm
from fastsparse_core.structure.adjacency import Adjacency

#: Options of `from_coo` that `from_csr` has too, and their defaults.
_OPTIONS: dict[str, Any] = {
    "self_loops": "keep",
    "group_rows": "auto",
    "halo_dtype": None,
    "overlap": True,
    "tiles": None,
    "cache_inputs": False,
    "send": "auto",
}
_HALO_DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)


class PartitionedAdjacency(Adjacency):
    r"""One rank's rows of a graph, which layers accept in place of an :class:`~fastsparse_core.Adjacency`.

    .. math::
        \mathbf{Y}_r = \mathbf{A}_{rr} \mathbf{X}_r + \mathbf{A}_{rh} \mathbf{X}_h

    :math:`\mathbf{X}_r` are the features of the rank's own nodes. :math:`\mathbf{X}_h` are the features of
    the halo: the neighbours of these nodes that other ranks own. A layer sees a square structure (local
    nodes, local nodes): inputs and outputs are features of the rank's own nodes. The operators
    (:func:`fastsparse_core.spmm`, ``sddmm``, ``edge_softmax``, the attentions) receive the halo in the
    forward pass and return its gradients in the backward pass. Degrees count the edges of the whole graph.
    Edge values belong to the rank's edges only.

    In ``spmm``, features are exchanged during the product with :math:`\mathbf{A}_{rr}`, and gradients during
    the product with its transpose. Wide features are sent in tiles of columns: the product of
    :math:`\mathbf{A}_{rh}` with one tile runs while the next tile is sent. Attention needs all neighbours of
    a row at once, so it waits for the exchange and uses the concatenated rows. Results equal the results of
    one process up to rounding. Results and gradients have the same bits in every run, because no atomics are
    used.

    The constructors and all operators are collective: all processes must call them in the same order. The
    structure cannot be transposed, saved or moved. PyG's and DGL's own code and ``ssd`` do not support it,
    and second derivatives raise an error.

    Attributes:
        rows: structure (local nodes, local nodes + halo); its columns are the own nodes, then the halo.
        exchange: exchange of the halo's rows between ranks.
        partition: owners of all nodes.
        rank: rank of this process in the group.
        halo_dtype: dtype in which features and gradients are sent; None: their own dtype.
        overlap: if True, spmm computes with local columns while features of other ranks are received.
        tiles: largest number of tiles of columns in which features are sent; None: :meth:`num_tiles` chooses.
        cache_inputs: if True, features of other ranks that need no gradient are received only once.
        statistics: counts of nodes and edges of all ranks, which show how well the graph is divided.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or under torchrun
        >>> from fastsparse_core import spmm
        >>> from fastsparse_core.distributed import PartitionedAdjacency, partition
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> adj = PartitionedAdjacency.from_coo(edges[1], edges[0], partition(edges, 1, num_nodes=3))
        >>> spmm(adj, torch.tensor([[1.0], [2.0], [3.0]])).flatten()
        tensor([3., 1., 2.])
        >>> dist.destroy_process_group()
    """

    is_partitioned = True

    def __init__(
        self,
        rows: Adjacency,
        exchange: HaloExchange,
        partition: Partition,
        rank: int,
        *,
        halo_dtype: torch.dtype | None = None,
        overlap: bool = True,
        tiles: int | None = None,
        cache_inputs: bool = False,
    ) -> None:
        """Stores parts without checking them; the ``from_*`` constructors check and convert. Collective."""
        self.rows = rows
        self.rows.usage.scattered = None  # no gradients with atomics, so that every run gives the same bits
        self.exchange = exchange
        self.partition = partition
        self.rank = rank
        self.halo_dtype = halo_dtype
        self.overlap = overlap
        self.tiles = tiles
        self.cache_inputs = cache_inputs
        self._inputs: Latest[Tensor] = Latest()
        self.shape = (rows.num_dst, rows.num_dst)
        self.num_values = rows.num_values
        self._num_given = rows._num_given
        self._loop_edge = rows._loop_edge
        self._merge = None
        self.group_rows = rows.group_rows
        self._scales: Latest[tuple[Tensor, Tensor]] = Latest()
        self._start()
        self._out_degree = self._count_out_degree()
        self.statistics, self._has_empty_rows = self._survey()

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_coo(  # type: ignore[override]
        cls,
        row: Tensor,
        col: Tensor,
        partition: Partition,
        *,
        group: dist.ProcessGroup | None = None,
        self_loops: Literal["keep", "append", "replace"] = "keep",
        group_rows: Method = "auto",
        halo_dtype: torch.dtype | None = None,
        overlap: bool = True,
        tiles: int | None = None,
        cache_inputs: bool = False,
        send: Literal["auto", "needed", "all"] = "auto",
    ) -> PartitionedAdjacency:
        """Builds this process's part from edges in any order. Collective, with equal options.

        Args:
            row: destinations, ids of the whole graph, int32 or int64 (E,), on the device of the structure.
                The rank uses only the edges whose destination it owns (:meth:`Partition.owned_edges`), so you
                can pass all edges or only these.
            col: sources, like ``row``.
            partition: owners of the nodes, the same on all ranks.
            group: the processes, as many as the partition has parts; None: all.
            self_loops: ``"keep"``, ``"append"`` or ``"replace"``, as for :meth:`Adjacency.from_coo`. Edge
                values have the order of the rank's edges, then of the inserted loops.
            group_rows: as for :meth:`Adjacency.from_coo`.
            halo_dtype: dtype in which features and gradients are sent; None: their own dtype, so sending
                rounds nothing. A 16-bit dtype halves the bytes of float32 features, and rounds them.
            overlap: if True, the exchange runs during the local product. If False, one product over all
                columns runs after the exchange.
            tiles: largest number of tiles of columns in which features are sent; None: :meth:`num_tiles`
                chooses.
            cache_inputs: if True, spmm caches the received rows of features that need no gradient. In
                full-graph training, the first layer aggregates the same features in every step; with this
                option they are sent only once. The cached rows take memory. If one rank changes its features,
                in place or by passing another tensor, all ranks must do so.
            send: ``"needed"``: a rank receives the rows that its edges read; ``"all"``: a rank receives all
                rows of the other ranks; ``"auto"``: all rows if at least 80 % are needed.

        Raises:
            TypeError: an argument is not an integer tensor.
            ValueError: lengths, devices or ranges do not fit together, the partition does not have one part
                per process, or an option is not the same on all ranks.
        """
        check_ends(row, col, partition.num_nodes)

        def rows_of(rank: int) -> tuple[Adjacency, HaloExchange]:
            return local_rows(row, col, partition, rank, group, send, self_loops, group_rows)

        options: dict[str, Any] = {
            "halo_dtype": halo_dtype,
            "overlap": overlap,
            "tiles": tiles,
            "cache_inputs": cache_inputs,
        }
        return cls._of_rank(rows_of, partition, row.device, group, send, self_loops, options)

    @classmethod
    def _of_rank(
        cls,
        rows_of: Callable[[int], tuple[Adjacency, HaloExchange]],
        partition: Partition,
        device: torch.device,
        group: dist.ProcessGroup | None,
        send: str,
        self_loops: str,
        options: dict[str, Any],
    ) -> PartitionedAdjacency:
        """Checks options, compares them on all ranks, and wraps the result of ``rows_of(rank)``."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if size != partition.num_parts:
            raise ValueError(f"partition: expected {size} parts, one per process, got {partition.num_parts}")
        if send not in ("auto", "needed", "all"):
            raise ValueError(f"send: expected 'auto', 'needed' or 'all', got {send!r}")
        halo_dtype, tiles = options["halo_dtype"], options["tiles"]
        if halo_dtype not in _HALO_DTYPES:
            raise ValueError(f"halo_dtype: expected a floating dtype or None, got {halo_dtype}")
        if tiles is not None and tiles < 1:
            raise ValueError(f"tiles: expected at least 1 or None, got {tiles}")
        alike = {"partition.starts": partition.starts, "self_loops": self_loops, **options, "send": send}
        check_agreement(alike, device, rank, group)
        rows, exchange = rows_of(rank)
        return cls(rows, exchange, partition, rank, **options)

    @classmethod
    def from_csr(  # type: ignore[override]
        cls,
        rowptr: Tensor,
        col: Tensor,
        partition: Partition,
        *,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> PartitionedAdjacency:
        """Builds this process's part from the whole graph in compressed rows. Collective.

        Only the rank's rows are read and moved to ``device``, so the whole graph may be in host memory, or in
        a file that all processes of a machine map into memory.

        Args:
            rowptr: int32 or int64 (num_nodes + 1,), ascending from 0 to the number of edges.
            col: sources, int32 or int64 (num_edges,).
            partition: owners of the nodes, the same on all ranks.
            device: device of the structure; None: the device of ``col``.
            group: the processes; None: all.
            **options: further options of :meth:`from_coo`.

        Raises:
            TypeError: an option is not one of :meth:`from_coo`.
            ValueError: ``rowptr`` does not have ``num_nodes + 1`` entries; or for a reason of
                :meth:`from_coo`.
        """
        if rowptr.numel() != partition.num_nodes + 1:
            raise ValueError(
                f"rowptr: expected num_nodes + 1 = {partition.num_nodes + 1} entries, got {rowptr.numel()}"
            )
        place = col.device if device is None else torch.empty(0, device=device).device
        given = _OPTIONS | options
        unknown = options.keys() - _OPTIONS.keys()
        if unknown:
            raise TypeError(
                f"from_csr: expected options among {', '.join(_OPTIONS)}, got {', '.join(sorted(unknown))}"
            )
        send, self_loops, group_rows = (given.pop(name) for name in ("send", "self_loops", "group_rows"))

        def rows_of(rank: int) -> tuple[Adjacency, HaloExchange]:
            pointers, columns = columns_of_rank(rowptr, col, partition, rank, place)
            return rows_in_order(pointers, columns, partition, rank, group, send, group_rows, self_loops)

        return cls._of_rank(rows_of, partition, place, group, send, self_loops, given)

    def with_self_loops(self, kind: Literal["append", "replace"]) -> PartitionedAdjacency:
        """The same part with a self loop on every node, see :meth:`Adjacency.from_coo`. Collective.

        Args:
            kind: value of ``self_loops`` in :meth:`Adjacency.from_coo`.
        """
        row, col = self.rows.row(), self.rows.col
        if self.rows.edge_id is not None:
            order = self.rows.edge_id.argsort()
            row, col = row[order], col[order]
        rows = Adjacency.from_coo(row, col, self.rows.shape, self_loops=kind, group_rows=self.group_rows)
        return PartitionedAdjacency(
            rows,
            self.exchange,
            self.partition,
            self.rank,
            halo_dtype=self.halo_dtype,
            overlap=self.overlap,
            tiles=self.tiles,
            cache_inputs=self.cache_inputs,
        )

    # ---------------------------------------------------------------- facts

    def __getattr__(self, name: str) -> Any:
        if name in ("rowptr", "col", "edge_id"):
            _unsupported(f"the attribute {name!r}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def num_edges(self) -> int:
        """Number of stored entries of this rank's rows."""
        return self.rows.num_edges

    @property
    def device(self) -> torch.device:
        """Device of the structure."""
        return self.rows.device

    @property
    def num_halo(self) -> int:
        """Number of nodes of other ranks whose features are received."""
        return self.exchange.num_halo

    @property
    def local(self) -> Adjacency:
        """The entries whose source is one of the rank's own nodes, (local nodes, local nodes)."""
        return self._built.get("local", lambda: columns_of(self.rows, own=True))

    @property
    def halo(self) -> Adjacency:
        """The entries whose source is a node of another rank, (local nodes, halo)."""
        return self._built.get("halo", lambda: columns_of(self.rows, own=False))

    def row(self) -> Tensor:
        """Raises an error: entries refer to nodes of other ranks, so a list of the entries is of no use."""
        _unsupported("lists of edges")

    def t(self, *, valued: bool = True) -> Adjacency:
        """Raises an error, because the rows of the transpose are on other ranks.

        Args:
            valued: as in :meth:`Adjacency.t`.
        """
        _unsupported("the transpose")

    def in_degree(self) -> Tensor:
        """Number of entries per row, int64 (num_dst,)."""
        return self.rows.in_degree()

    def out_degree(self) -> Tensor:
        """Number of edges of the whole graph that leave each of the rank's nodes, int64 (num_dst,)."""
        return self._out_degree

    def _count_out_degree(self) -> Tensor:
        count = self.rows.out_degree()
        received = self.exchange.from_halo(count[self.num_dst :].contiguous()).wait()
        own = count[: self.num_dst]
        return own + self.exchange.add_up(received, own.dtype)

    def has_empty_rows(self) -> bool:
        """True if some destination of the whole graph has no edge. The result is the same on all ranks."""
        return self._has_empty_rows

    def _survey(self) -> tuple[PartitionStatistics, bool]:
        halo_edges = sum(int((part >= self.num_dst).sum()) for part in self.rows.col.split(PIECE_ENTRIES))
        empty = int((self.in_degree() == 0).any()) if self.num_dst else 0
        own = torch.tensor(
            [self.num_dst, self.num_edges, halo_edges, self.num_halo, empty], device=self.device
        )
        every = [torch.empty_like(own) for _ in range(self.partition.num_parts)]
        dist.all_gather(every, own, group=self.exchange.group)
        rows, edges, cut, halo, without = torch.stack(every, 1).tolist()
        return PartitionStatistics(rows, edges, cut, halo), any(without)

    # ---------------------------------------------------------------- data of nodes

    def scatter(self, x: Tensor) -> Tensor:
        """Selects the rows of this rank's nodes from data of all nodes.

        Args:
            x: (num_nodes, ...), any dtype.

        Returns:
            (local nodes, ...).
        """
        return self.partition.scatter(x, self.rank)

    def gather(self, x: Tensor) -> Tensor:
        """Collects the rows of all nodes from all ranks, in the order of the node ids. Collective.

        Args:
            x: (local nodes, ...), any dtype. Gradients do not flow through this method.

        Returns:
            (num_nodes, ...).

        Raises:
            ValueError: ``x`` does not have one row per local node.
        """
        if x.size(0) != self.num_dst:
            raise ValueError(
                f"x: expected {self.num_dst} rows, one per node of this rank, got shape {tuple(x.shape)}"
            )
        sizes = self.statistics.rows
        # All pieces have the same size, because gloo cannot gather pieces of different sizes.
        piece = x.new_zeros(max(sizes), *x.shape[1:])
        piece[: x.size(0)] = x.detach()
        pieces = [torch.empty_like(piece) for _ in sizes]
        dist.all_gather(pieces, piece, group=self.exchange.group)
        together = torch.cat([part[:size] for part, size in zip(pieces, sizes, strict=True)])
        place = self.partition.place
        return together if place is None else together[place.to(x.device)]

    # ---------------------------------------------------------------- operators

    def sources(self, *features: Tensor | None, exact: bool = False) -> tuple[Tensor, ...]:
        """Features of the rank's own nodes, then of the halo: the columns of ``rows``.

        Collective, differentiable.

        Args:
            features: floating (local nodes, ...) each; None is skipped. They are cast under autocast, unless
                ``exact``.
            exact: if True, sends the features in their own dtype and ignores ``halo_dtype``.

        Returns:
            (local nodes + halo, ...) for each of the features.
        """
        given = [x for x in features if x is not None]
        for x in given:
            check_features("features", x, self.num_dst, "num_dst", self)
        cast = given if exact else [x for x in autocast(*given) if x is not None]
        flat = [x.reshape(x.size(0), x.shape[1:].numel()) for x in cast]
        dtype = None if exact else self.halo_dtype
        with ExitStack() as stack:
            ways = [stack.enter_context(HaloFeatures(self.exchange, x, dtype)) for x in flat]
            whole = [torch.cat([x, way.whole()]) for x, way in zip(flat, ways, strict=True)]
        return tuple(
            x.reshape(-1, *like.shape[1:]) if like.dim() != 2 else x
            for x, like in zip(whole, cast, strict=True)
        )

    @property
    def column_exchange(self) -> ColumnExchange:
        """A new `ColumnExchange`, which exchanges the features of the halo some columns at a time."""
        return ColumnExchange(self.exchange)

    def needed_sources(self, col: Tensor) -> tuple[Tensor, Tensor, ColumnExchange]:
        """Restricts the halo to the nodes that some edges read. Collective.

        Args:
            col: int32 (num_edges,), the columns of these edges in ``rows``.

        Returns:
            ``col`` with new numbers, in which the rank's own nodes come first, then the needed nodes of the
            halo; the column in ``rows`` of each of these nodes, int64; the exchange of their features.
        """
        own, every = self.num_dst, self.exchange
        is_needed = torch.zeros(every.num_halo, dtype=torch.bool, device=col.device)
        of_halo = col >= own
        is_needed[col[of_halo].long() - own] = True
        needed = torch.zeros(self.partition.num_nodes, dtype=torch.bool, device=col.device)
        needed[every.halo[is_needed]] = True
        exchange = HaloExchange(needed, self.partition.starts, self.rank, every.group, "needed")
        place = is_needed.cumsum(0, dtype=torch.int32).add_(own - 1)
        numbered = col.clone()
        numbered[of_halo] = place[col[of_halo].long() - own]
        kept = torch.cat([torch.arange(own, device=col.device), is_needed.nonzero().flatten() + own])
        return numbered, kept, ColumnExchange(exchange)

    def spmm(
        self,
        x: Tensor,
        value: Tensor | None,
        reduce: Reduce,
        *,
        scale_dst: Tensor | None,
        scale_src: Tensor | None,
        bias: Tensor | None,
        relu: bool,
        algorithm: str,
    ) -> Tensor:
        """Computes :func:`fastsparse_core.spmm` with the features of all ranks. Collective.

        The arguments are those of :func:`fastsparse_core.spmm`.
        """
        check_features("x", x, self.num_src, "num_src", self)
        given = x
        (x,) = autocast(x)  # type: ignore[assignment]
        scale_dst = check_scale("scale_dst", scale_dst, self.num_dst, x)
        scale_halo = scale_rows = None
        if scale_src is not None:
            scale_halo, scale_rows = self.scales(scale_src, x)
        if reduce == "mean":
            mean = self.inv_degree(accumulation_dtype(x.dtype))
            scale_dst, reduce = mean if scale_dst is None else scale_dst * mean, "sum"
        options: dict[str, Any] = {"scale_dst": scale_dst, "algorithm": algorithm}
        if reduce != "sum" or not self.overlap:
            (whole,) = self.sources(x)
            return spmm(
                self.rows, whole, value, reduce, scale_src=scale_rows, bias=bias, relu=relu, **options
            )
        flat = x.reshape(x.size(0), x.shape[1:].numel())
        local: dict[str, Any] = {"scale_src": scale_src, "bias": bias, **options}
        halo: dict[str, Any] = {"scale_src": scale_halo, **options}
        if self.cache_inputs and not given.requires_grad:
            arrived = self._halo_of_inputs(given, flat)
            out = spmm(self.local, flat, value, **local) + spmm(self.halo, arrived, value, **halo)
        else:
            # One tile for several heads: a tile could end inside a head, but each head has its edge values.
            tiles = 1 if value is not None and value.dim() > 1 else self.num_tiles(flat.size(1), flat.dtype)
            with HaloFeatures(self.exchange, flat, self.halo_dtype, tiles) as way:
                out = spmm(self.local, flat, value, **local)
                for columns, arrived in way.tiles():
                    out = AddColumns.apply(out, spmm(self.halo, arrived, value, **halo), columns)
        if relu:
            out = out.relu()
        return out if x.dim() == 2 else out.reshape(self.num_dst, *x.shape[1:])

    def num_tiles(self, width: int, dtype: torch.dtype) -> int:
        """Number of tiles of columns in which spmm sends features, the same on all ranks.

        The product with one tile of the halo runs while the next tile is sent, so only the last product runs
        after the exchange. Without ``overlap``, the number is 1. If ``tiles`` is not None, the number is
        ``tiles``. Otherwise, it is 1 if, by a rough estimate, the local product takes at least as long as the
        exchange on every rank: more tiles would hide nothing, and cost copies. In all other cases, there is
        one tile per 64 columns, but at most 4 tiles, and a tile has at least 32 MiB on the rank that receives
        most.

        Args:
            width: number of features per node.
            dtype: dtype of the features.
        """
        if not self.overlap:
            return 1
        if self.tiles is not None:
            return self.tiles
        sent = (self.halo_dtype or dtype).itemsize
        return tiles_that_pay(self.statistics, width, dtype.itemsize, sent)

    def _halo_of_inputs(self, given: Tensor, flat: Tensor) -> Tensor:
        """The halo's rows (num_halo, F) of features without gradient; cached for the last ``given``."""

        def fetch() -> Tensor:
            rows = self.exchange.pack(flat.detach(), self.halo_dtype or flat.dtype)
            return self.exchange.to_halo(rows).wait().to(flat.dtype)

        return self._inputs.get(given, flat.dtype, fetch)

    def scales(self, scale_src: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the halo's nodes and of all columns of ``rows``; cached for the last ``scale_src``.

        Args:
            scale_src: floating (local nodes,), this rank's factors.
            x: floating (local nodes, ...), the features that are scaled.
        """

        def fetch() -> tuple[Tensor, Tensor]:
            checked = check_scale("scale_src", scale_src, self.num_src, x)
            assert checked is not None
            halo = self.exchange.halo_of(checked)
            return halo, torch.cat([checked, halo])

        return self._scales.get(scale_src, accumulation_dtype(x.dtype), fetch)

    def prepare(self, *, backward: bool = True) -> PartitionedAdjacency:
        """Builds the formats that calls without edge values need; returns self.

        Args:
            backward: if True, also builds the formats that the backward pass needs.
        """
        if self.overlap:
            self.local.prepare(backward=backward)
            self.halo.prepare(backward=backward)
        else:
            self.rows.prepare(backward=backward)
        if backward and not self.exchange.sends_all:
            self.exchange.returned.prepare(backward=False)
        return self

    # ---------------------------------------------------------------- memory, devices, pickling

    def memory_usage(self) -> dict[str, int]:
        """Bytes of this rank's part and of its derived data, by name."""
        parts = {"rows": self.rows}
        parts |= {
            name: self._built.results[name] for name in ("local", "halo") if name in self._built.results
        }
        sizes = {
            f"{name}.{key}": size for name, part in parts.items() for key, size in part.memory_usage().items()
        }
        sizes |= self.exchange.memory_usage() | {"out_degree": self._out_degree.nbytes}
        inputs = self._inputs.result
        return sizes if inputs is None else sizes | {"inputs": inputs.nbytes}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Adjacency:
        """Returns self if the structure is on ``device``; otherwise raises an error.

        Args:
            device: target device.
            non_blocking: ignored.

        Raises:
            NotImplementedError: the structure is on another device.
        """
        if torch.empty(0, device=device).device == self.device:
            return self
        _unsupported("copies on other devices (build it from edges on that device)")

    def __getstate__(self) -> dict[str, Any]:
        _unsupported("pickling (build it on every rank)")

    def __setstate__(self, state: dict[str, Any]) -> None:
        _unsupported("pickling (build it on every rank)")

    def __repr__(self) -> str:
        facts = self.statistics
        return (
            f"PartitionedAdjacency(rank {self.rank} of {self.partition.num_parts}: {self.num_dst} of "
            f"{self.partition.num_nodes} nodes, num_edges={self.num_edges}, halo={self.num_halo}; all ranks: "
            f"edge_cut={facts.edge_cut:.3f}, balance={facts.balance:.3f}, device={str(self.device)!r})"
        )


def _unsupported(what: str) -> NoReturn:
    raise NotImplementedError(
        f"a PartitionedAdjacency does not support {what}. It supports spmm, sddmm, edge_softmax and "
        "attention, and layers that use only these operators. PyG's and DGL's own code, ssd (MaxK layers) "
        "and explanations need the whole graph"
    )
