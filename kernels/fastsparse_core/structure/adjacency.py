"""The structure of a sparse graph: immutable, without values, with everything derived from it built once."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fastsparse_core import recorded
from fastsparse_core.formats import lengths
from fastsparse_core.formats.compress import transpose, transpose_pairs
from fastsparse_core.formats.grouping import Method, check_method
from fastsparse_core.formats.inspection import Inspection, inspect_square_rows
from fastsparse_core.structure.build_once import BuiltOnce
from fastsparse_core.structure.construction import (
    CompressedRows,
    SelfLoops,
    check_edges,
    check_shape,
    rows_of_edges,
    rows_of_pointers,
)
from fastsparse_core.structure.row_formats import TransposedOrder, Usage
from fastsparse_core.structure.storage import Storage, move

_T = TypeVar("_T")

#: Not a WeakValueDictionary, whose look-ups take the host five times as long.
_registry: dict[int, weakref.ref[Adjacency]] = {}
_next_handle = itertools.count(1)
#: Number of entries up to which a structure is transposed without checking first whether it is symmetric.
_FEW_ENTRIES = 2**22
#: Number of entries above which a structure caches only what was requested.
_MANY_ENTRIES = 2**28


class Adjacency(Storage):
    r"""Sparse structure of shape ``(num_dst, num_src)``: rows are destinations, columns are sources.

    A message flows from column to row, so aggregation is :math:`A X`. The structure is immutable. Derived
    data (transpose, work lists, degrees) are built on first use, on its device, and cached. Edge values are
    separate tensors in the caller's edge order, so new weights do not rebuild the structure.

    Build one with :meth:`from_coo`, :meth:`from_csr` or :meth:`from_csc`.

    Args:
        rowptr, col, shape, group_rows: see the attributes. The constructor does not check them.
        edge_id: position of every entry in the caller's edge order, int64 (num_edges,); None: entries are in
            that order.
        num_values: see the attributes; None: one per entry.
        num_given: number of edges that the caller gave; None: ``num_values``.
        loop_edge: for inserted self loops, the edges that they replaced.
        merge: for merged edges, which edge went into which.

    Attributes:
        rowptr: int64 (num_dst + 1,), the range of entries of every row.
        col: int32 (num_edges,), the source of every entry.
        shape: (num_dst, num_src).
        num_dst: number of rows.
        num_src: number of columns.
        num_values: length of an edge-value tensor. It differs from ``num_edges`` if self loops were inserted
            or replaced (:meth:`extend_value`).
        group_rows: which rows share a window of the binary sparse blocks: ``"none"``: consecutive rows;
            ``"minhash"``: similar rows; ``"auto"``: similar rows if rows have 8 entries or more and this
            saves at least 10 % of the vectors. The order of features, edge values and results does not
            change.
        handle: number by which operators find this object.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency
        >>> adj = Adjacency.from_coo(row=torch.tensor([0, 0, 2]), col=torch.tensor([1, 2, 0]), shape=(3, 3))
        >>> adj.rowptr, adj.col
        (tensor([0, 2, 2, 3]), tensor([1, 2, 0], dtype=torch.int32))
    """

    #: Whether it is one rank's part of a graph (:class:`fastsparse_core.distributed.PartitionedAdjacency`).
    is_partitioned: ClassVar[bool] = False
    #: Whether replays of a CUDA graph rebuild it for other edges (``fresh_adjacency.FreshAdjacency``).
    is_padded: ClassVar[bool] = False

    def __init__(
        self,
        rowptr: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        *,
        edge_id: Tensor | None = None,
        num_values: int | None = None,
        num_given: int | None = None,
        loop_edge: Tensor | tuple[()] | None = None,
        merge: tuple[Tensor, Tensor] | None = None,
        group_rows: Method = "auto",
    ) -> None:
        """Wraps checked tensors as they are; the ``from_*`` constructors check and convert."""
        self.rowptr = rowptr
        self.col = col
        self.shape = shape
        self._edge_id = edge_id
        self.num_values: int = col.numel() if num_values is None else num_values
        self._num_given = self.num_values if num_given is None else num_given
        self._loop_edge = loop_edge
        self.group_rows: Method = group_rows
        self._merge = merge
        self._start()

    def _start(self) -> None:
        self.num_dst, self.num_src = self.shape
        self._built = BuiltOnce()
        self._of_rows = BuiltOnce()  # what depends on rowptr alone; its incidence shares it
        self._of_pattern = BuiltOnce()  # what depends on rowptr and col; a symmetric transpose shares both
        self._parent: weakref.ref[Adjacency] | None = None
        self.plans = {}
        self.usage = Usage()
        self.has_sorted_slices = True
        self._bsb_refused = False
        self.symmetric = None
        self.has_loops = None
        self.handle: int = next(_next_handle)
        _registry[self.handle] = weakref.ref(self, functools.partial(_registry.pop, self.handle))

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_coo(
        cls,
        row: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        *,
        duplicates: Literal["keep", "sum"] = "keep",
        self_loops: SelfLoops = "keep",
        group_rows: Method = "auto",
    ) -> Adjacency:
        """Builds the structure from an edge list in any order.

        Entries are sorted by (row, column). Edges that are sorted by row already, as samplers return them,
        keep their order within a row, which saves the sort and `edge_id`. The exception is a structure that
        may equal its transpose: it needs sorted columns to share them.

        Args:
            row: destinations, int32 or int64 (E,).
            col: sources, like ``row``.
            shape: (num_dst, num_src).
            duplicates: ``"keep"`` stores repeated edges as often as they occur. ``"sum"`` stores each edge
                once. Edge values then belong to the merged edges, sorted by (row, col), and
                :meth:`coalesce_value` sums the caller's values.
            self_loops: ``"append"`` adds a loop (i, i) for every i < min(shape) after the caller's edges;
                ``"replace"`` first drops the caller's own loops; ``"replace_if_some"`` adds no loops if the
                caller's edges have none (`has_inserted_loops`). Values: :meth:`extend_value`.
            group_rows: ``"auto"``, ``"none"`` or ``"minhash"``, see :class:`Adjacency`.

        Raises:
            TypeError: an argument is not an integer tensor.
            ValueError: lengths or devices differ, an index is outside ``shape``, or an option is unknown.
        """
        shape = check_shape(shape)
        check_method(group_rows)
        check_edges(row, col, duplicates, self_loops)
        if row.dtype != col.dtype:
            row, col = row.long(), col.long()
        run = recorded.current()
        if run is not None:
            adjacency: Adjacency = run.of_edges(run, row, col, shape, duplicates, self_loops)
            return adjacency
        return cls._of(rows_of_edges(row, col, shape, duplicates, self_loops), shape, group_rows)

    @classmethod
    def _of(cls, rows: CompressedRows, shape: tuple[int, int], group_rows: Method) -> Adjacency:
        adjacency = cls.__new__(cls)
        adjacency._take(rows, shape, group_rows)
        return adjacency

    def _take(self, rows: CompressedRows, shape: tuple[int, int], group_rows: Method) -> None:
        Adjacency.__init__(
            self,
            rows.rowptr,
            rows.col,
            shape,
            edge_id=rows.edge_id,
            num_values=rows.num_values,
            num_given=rows.num_given,
            loop_edge=rows.loop_edge,
            merge=rows.merge,
            group_rows=group_rows,
        )
        self.symmetric = rows.symmetric
        self.has_loops = rows.has_loops
        self.has_sorted_slices = rows.has_sorted_slices
        if rows.found is not None:
            self._learn(rows.found)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled structure, whose file may be damaged: kernels do not check what they read.

        Raises:
            ValueError: something is missing, or what :meth:`from_csr` checks does not hold.
        """
        try:
            shape, group_rows, num_values = (
                check_shape(state["shape"]),
                state["group_rows"],
                state["num_values"],
            )
            check_method(group_rows)
            parts = (state["rowptr"], state["col"], shape, state["edge_id"])
            rows = rows_of_pointers(*parts, num_values=operator.index(num_values), copy=False)
            rows.num_given, rows.loop_edge, rows.merge = (
                state[name] for name in ("_num_given", "_loop_edge", "_merge")
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"expected a pickled Adjacency as it was saved, got a damaged one ({error}); build it from "
                "its edges and save it again"
            ) from error
        self._take(rows, shape, group_rows)

    def _learn(self, found: Inspection) -> None:
        """Keeps what was found out in the checks; of a large structure only what takes no memory."""
        if found.order is None:
            self.usage.scattered = 0
        if self.num_edges > _MANY_ENTRIES:
            self._of_rows.results["has_empty_rows"] = (found.has_empty_rows,)
            self.has_sorted_slices = not self.col.is_cuda
            return
        self._of_rows.results[("inv_degree", torch.float32)] = found.inv_degree
        self._of_rows.results["has_empty_rows"] = (found.has_empty_rows,)
        if found.inv_sqrt_degree is not None:
            self._of_rows.results[("inv_sqrt_degree", torch.float32, 1)] = found.inv_sqrt_degree
        split = found.row_split
        if self.col.is_cuda:  # otherwise nothing is cut, and no work list was requested
            self._of_rows.results["has_short_rows"] = split is not None and split.num_slots == 0
        if split is not None:
            self._of_rows.results["row_split"] = split
            self.has_sorted_slices = False

    @classmethod
    def from_csr(
        cls,
        rowptr: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        *,
        edge_id: Tensor | None = None,
        group_rows: Method = "auto",
        copy: bool = True,
    ) -> Adjacency:
        """Builds the structure from compressed rows, and keeps the order within rows.

        Args:
            rowptr: int32 or int64 (num_dst + 1,), ascending from 0 to the number of edges.
            col: sources, int32 or int64 (num_edges,).
            shape: (num_dst, num_src).
            edge_id: int32 or int64 (num_edges,), position of every entry in the caller's edge order, a
                permutation; None: the stored order.
            group_rows: ``"auto"``, ``"none"`` or ``"minhash"``, see :class:`Adjacency`.
            copy: False: a contiguous int64 ``rowptr`` and a contiguous int32 ``col`` are used without a copy,
                which saves half of the memory of a large graph. Do not write to them as long as the structure
                is alive: kernels would read beyond the features.

        Raises:
            TypeError: an argument is not an integer tensor.
            ValueError: lengths, devices or ranges do not fit together, or an option is unknown.
        """
        shape = check_shape(shape)
        check_method(group_rows)
        rows = rows_of_pointers(rowptr, col, shape, edge_id, copy=copy)
        return cls._of(rows, shape, group_rows)

    @classmethod
    def from_csc(
        cls,
        colptr: Tensor,
        row: Tensor,
        shape: tuple[int, int],
        *,
        edge_id: Tensor | None = None,
        group_rows: Method = "auto",
        copy: bool = True,
    ) -> Adjacency:
        """Builds the structure from compressed columns: :meth:`from_csr`, transposed.

        Args:
            colptr: int32 or int64 (num_src + 1,), ascending from 0 to the number of edges.
            row: destinations, int32 or int64 (num_edges,).
            shape: (num_dst, num_src).
            edge_id: as in :meth:`from_csr`.
            group_rows: as in :meth:`from_csr`.
            copy: as in :meth:`from_csr`.
        """
        num_dst, num_src = check_shape(shape)
        options: dict[str, Any] = {"edge_id": edge_id, "group_rows": group_rows, "copy": copy}
        columns = cls.from_csr(colptr, row, (num_src, num_dst), **options)
        adjacency = columns._transpose(True)
        adjacency.keep_transpose(columns)
        return adjacency

    # ---------------------------------------------------------------- derived structures

    @property
    def has_transpose(self) -> bool:
        """Whether the transposed structure was built and is still alive."""
        return "t" in self._built.results or (self._parent is not None and self._parent() is not None)

    def t(self, *, valued: bool = True) -> Adjacency:
        """The transposed structure, with edge values in the same order; shares tensors if A is symmetric.

        Args:
            valued: whether to keep its `edge_id`, which takes 4 bytes per edge. Only edge values need it. If
                it is needed later, the edges are sorted again.
        """
        parent = self._parent() if self._parent is not None else None
        found: Adjacency | None = parent or self._built.results.get(
            "t"
        )  # checked here, because `get` would be one more call
        return found or self._built.get("t", lambda: self._transpose(valued))

    def keep_transpose(self, transposed: Adjacency) -> None:
        """Stores a structure as the transpose; nothing else may use it.

        Args:
            transposed: the structure.
        """
        # One owns the other, not the other way round: owning both ways would be a cycle.
        self._parent = None
        self._built.results["t"] = transposed
        transposed._parent = weakref.ref(self)

    def _transpose(self, valued: bool) -> Adjacency:
        if self.symmetric is None and self.num_edges > _FEW_ENTRIES:
            self._look_at_entries()  # a pass over them, where the transpose is a sort
        symmetric = self.symmetric if self.num_dst == self.num_src else False
        is_known = symmetric is not None
        if symmetric:
            colptr, row = self.rowptr, self.col
        elif valued:
            colptr, row, order = transpose(self.rowptr, self.col, self.num_src)
        else:
            colptr, row = transpose_pairs(self.rowptr, self.col, self.num_src)
        if not is_known:  # one read from the device for both
            symmetric = bool((colptr == self.rowptr).all() & (row == self.col).all())
        self.symmetric = symmetric
        transposed = Adjacency(
            self.rowptr if symmetric else colptr,
            self.col if symmetric else row,
            (self.num_src, self.num_dst),
            num_values=self.num_values,
            num_given=self._num_given,
            loop_edge=self._loop_edge,
            merge=self._merge,
            group_rows=self.group_rows,
        )
        if not valued or (symmetric and is_known):
            kept = TransposedOrder(self.rowptr, self.col, self.num_src, self._edge_id, bool(symmetric))
            transposed._edge_id = kept.edge_id() if valued else kept
        else:
            given = self.edge_id
            transposed._edge_id = order if given is None else given.index_select(0, order)
        if symmetric:
            transposed._of_rows, transposed._of_pattern = self._of_rows, self._of_pattern
        else:
            transposed.has_sorted_slices = not self.col.is_cuda
        transposed.symmetric = symmetric
        transposed._parent = weakref.ref(self)
        return transposed

    def _look_at_entries(self) -> None:
        """Finds out whether there are loops, and whether it equals its transpose, which a checksum says.

        The checksum takes another structure for a symmetric one with a chance of 2^-64.
        """
        if self.num_dst != self.num_src:
            self.symmetric = False
            return
        found = inspect_square_rows(self.rowptr, self.col)
        self.has_loops = found.has_loops
        if self.symmetric is None:
            self.symmetric = found.checksum == 0 and not found.cols_descend

    def is_free_of_loops(self) -> bool:
        """Whether no entry is a loop; False while a CUDA graph is captured, unless it was checked before."""
        if self.has_loops is None and self.num_dst == self.num_src:
            if self.col.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            self._look_at_entries()
        return self.has_loops is False

    def _with_columns(self, col: Tensor, num_src: int) -> Adjacency:
        """The same rows with other columns; values keep the order of this structure's own."""
        other = Adjacency(
            self.rowptr,
            col,
            (self.num_dst, num_src),
            edge_id=self.edge_id,
            num_values=self.num_values,
            group_rows="none",
        )
        other._of_rows = self._of_rows  # cut into the same slices
        return other

    def derived(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Result of ``build()``, computed once and kept: for constants that layers derive from a structure.

        Args:
            key: name of the result; take one that no other module uses. Results must not be None.
            build: called at most once, under a lock.
        """
        found: _T | None = self._built.results.get(("user", key))
        return self._built.get(("user", key), build) if found is None else found

    def incidence(self) -> Adjacency:
        """The structure (num_dst, num_values) in which every edge is a source of its own destination.

        An aggregation over it sums features of edges; a sampled product gives every edge one with its
        destination.
        """

        def build() -> Adjacency:
            position = self.edge_id
            if position is None:
                position = torch.arange(self.num_edges, dtype=torch.int32, device=self.device)
            return self._with_columns(position.int(), self.num_values)

        return self.derived("incidence", build)

    def without_self_loops(self) -> Adjacency:
        """The structure without its self loops; edge values keep their order and number."""
        return self.derived("without_self_loops", self._without_self_loops)

    def _without_self_loops(self) -> Adjacency:
        row, col = self.row(), self.col
        kept = torch.nonzero(row != col).flatten()
        rowptr = torch.zeros_like(self.rowptr)
        torch.cumsum(torch.bincount(row[kept], minlength=self.num_dst), 0, out=rowptr[1:])
        edge_id = kept.to(torch.int32) if self.edge_id is None else self.edge_id[kept]
        return Adjacency(rowptr, col[kept], self.shape, edge_id=edge_id, num_values=self.num_values)

    @property
    def is_symmetric(self) -> bool:
        """Whether A equals its transpose. Builds it; rows with unsorted columns count as not symmetric."""
        return self.t(valued=False).col is self.col

    def prepare(self, *, backward: bool = True) -> Adjacency:
        """Builds everything that the operators need, so that no later call has to; returns self.

        Call it before ``torch.compile`` or the capture of a CUDA graph, which cannot build formats.

        Args:
            backward: also the transposed structure.
        """
        self.sort_slices()
        self.usage.scattered = None
        self.csr_structure  # noqa: B018
        self.plain_structure  # noqa: B018
        longest = lengths.edge_group_length(self.num_edges, self.num_dst, self.gpu)
        self.edge_group_structure(longest)
        if self.device.type == "cuda":
            # These read what they need from the device, once.
            groups = self.edge_groups(longest)
            groups.num_long, groups.num_longest, groups.longest  # noqa: B018
        if self.device.type == "cuda":
            self.row()
        if self.device.type == "cuda" and self.try_bsb():
            self.bsb_structure(valued=False)
            self.sddmm_structure()
        self.inv_sqrt_degree()
        self.inv_degree()
        self.inv_sqrt_out_degree()
        if backward:
            self.t().prepare(backward=False)
        return self

    # ---------------------------------------------------------------- devices

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Adjacency:
        """The same structure on another device (self if it is there); derived structures are rebuilt.

        Args:
            device: the target.
            non_blocking: as in :meth:`torch.Tensor.to`.
        """
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        parts = (self.rowptr, self.col, self.edge_id, self._loop_edge, self._merge)
        rowptr, col, edge_id, loop_edge, merge = move(parts, target, non_blocking)
        sizes = (self.num_values, self._num_given)
        rows = CompressedRows(rowptr, col, edge_id, *sizes, loop_edge, merge)
        return Adjacency._of(rows, self.shape, self.group_rows)

    def cpu(self) -> Adjacency:
        """The same structure on the CPU."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str = "cuda", non_blocking: bool = False) -> Adjacency:
        """The same structure on a CUDA device.

        Args:
            device: the target.
            non_blocking: as in :meth:`torch.Tensor.to`.
        """
        return self.to(device, non_blocking=non_blocking)

    def __repr__(self) -> str:
        return f"Adjacency(shape={self.shape}, num_edges={self.num_edges}, device={str(self.device)!r})"


def from_handle(handle: int) -> Adjacency:
    """The living Adjacency with this handle.

    Raises:
        RuntimeError: it was freed, for example between the forward and the backward pass of a compiled model.
    """
    reference = _registry.get(handle)
    adjacency = None if reference is None else reference()
    if adjacency is None:
        raise RuntimeError(
            f"adjacency: the structure with handle {handle} was freed while an operator still needed it; "
            "keep a reference to the Adjacency until the backward pass is done"
        )
    return adjacency
