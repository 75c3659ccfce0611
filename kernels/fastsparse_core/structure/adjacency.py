"""The structure of a sparse graph: immutable, and without edge values. Derived data are built once."""

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
from fastsparse_core.structure.storage import Storage, move, send_copies

_T = TypeVar("_T")

#: Handle -> Adjacency. Not a WeakValueDictionary, because its look-ups take five times as long.
_registry: dict[int, weakref.ref[Adjacency]] = {}
_next_handle = itertools.count(1)
#: Structures with at most this number of entries are transposed without checking for symmetry first.
_FEW_ENTRIES = 2**22
#: Structures with more entries than this cache only requested results, to save memory.
_MANY_ENTRIES = 2**28


class Adjacency(Storage):
    r"""Sparse structure of shape ``(num_dst, num_src)``: rows are destinations, columns are sources.

    A message flows from column to row, so aggregation is :math:`A X`. The structure is immutable. Derived
    data (transpose, work lists, degrees) are built on first use, on the structure's device, and cached. Edge
    values are separate tensors in the caller's edge order, so new weights do not rebuild the structure.

    Build one with :meth:`from_coo`, :meth:`from_csr` or :meth:`from_csc`.

    Args:
        rowptr, col, shape, group_rows: see the attributes. The constructor does not check them.
        edge_id: position of every entry in the caller's edge order, int32 or int64 (num_edges,); None:
            entries are in that order.
        num_values: see the attributes; None: one value per entry.
        num_given: number of the caller's edges, before self loops are inserted; None: ``num_values``.
        loop_edge: None: no self loops were inserted. Otherwise int64 (min(shape),), the position of the
            caller's edge that the loop of every node replaced, or -1; or () if no edge was replaced.
        merge: None: no edges were merged. Otherwise two int64 tensors (number of edges before merging,): the
            position of every edge in the caller's order, and the number of its merged edge.

    Attributes:
        rowptr: int64 (num_dst + 1,); row i has the entries ``rowptr[i]`` to ``rowptr[i + 1] - 1``.
        col: int32 (num_edges,), the source of every entry.
        shape: (num_dst, num_src).
        num_dst: number of rows.
        num_src: number of columns.
        num_values: length of an edge-value tensor. It differs from ``num_edges`` if self loops were inserted
            or replaced (:meth:`extend_value`).
        group_rows: which 8 rows share a window in the format of the tensor-core kernels: ``"none"``:
            consecutive rows; ``"minhash"``: similar rows; ``"auto"``: similar rows if rows have on average 8
            entries or more, and this saves at least 10 % of the format's vectors of 8 entries. The order of
            features, edge values and results does not change.
        handle: number under which PyTorch operators find this object.

    Example:
        >>> import torch
        >>> from fastsparse_core import Adjacency
        >>> adj = Adjacency.from_coo(row=torch.tensor([0, 0, 2]), col=torch.tensor([1, 2, 0]), shape=(3, 3))
        >>> adj.rowptr, adj.col
        (tensor([0, 2, 2, 3]), tensor([1, 2, 0], dtype=torch.int32))
    """

    #: True for one rank's part of a graph (:class:`fastsparse_core.distributed.PartitionedAdjacency`).
    is_partitioned: ClassVar[bool] = False
    #: True if the edges change between uses: replays of a CUDA graph rebuild the structure for other edges
    #: (``FreshAdjacency``), and compiled code builds it whenever it runs (``TracedAdjacency``).
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
        """Wraps tensors without checks; the ``from_*`` constructors check and convert."""
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
        self._of_rows = BuiltOnce()  # results that depend only on rowptr; shared with `incidence()`
        # Results that depend on rowptr and col. The transpose of a symmetric structure shares both.
        self._of_pattern = BuiltOnce()
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

        Entries are sorted by (row, column). If ``duplicates`` and ``self_loops`` are ``"keep"``, edges that
        are already sorted by row, for example from a sampler, keep their order within a row, which saves the
        sort and `edge_id`. The exception is a structure that may be symmetric: its columns are sorted too, so
        that its transpose can share its tensors.

        Args:
            row: destinations, int32 or int64 (E,).
            col: sources, like ``row``.
            shape: (num_dst, num_src).
            duplicates: ``"keep"`` stores repeated edges as often as they occur. ``"sum"`` stores each edge
                once. Edge values then belong to the merged edges, sorted by (row, col), and
                :meth:`coalesce_value` sums the caller's values.
            self_loops: ``"keep"`` changes nothing; ``"append"`` adds a loop (i, i) for every i < min(shape)
                after the caller's edges; ``"replace"`` also drops the caller's own loops;
                ``"replace_if_some"`` does the same if the caller's edges have loops, and otherwise changes
                nothing; read `has_inserted_loops` to find out. For edge values, see :meth:`extend_value`.
            group_rows: ``"auto"``, ``"none"`` or ``"minhash"``, see :class:`Adjacency`.

        Raises:
            TypeError: ``row`` or ``col`` is not an int32 or int64 tensor, or ``shape`` is not a pair of ints.
            ValueError: lengths or devices differ, a tensor is not 1-D, an index is outside ``shape``, a size
                is above 2^31 - 1, or an option is unknown.
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
        """Restores and checks a pickled structure: files may be damaged, and kernels check nothing.

        Raises:
            ValueError: a part is missing, or a check of :meth:`from_csr` fails.
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
                f"expected an intact pickled Adjacency, got a damaged one ({error}); build it from its edges "
                "and save it again"
            ) from error
        self._take(rows, shape, group_rows)

    def _learn(self, found: Inspection) -> None:
        """Caches results of checking the edges; for a large structure, only results without tensors."""
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
        if self.col.is_cuda:  # on the CPU, rows are not cut into slices
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
        """Builds the structure from compressed rows; the order within rows does not change.

        Args:
            rowptr: int32 or int64 (num_dst + 1,), ascending from 0 to the number of edges.
            col: sources, int32 or int64 (num_edges,).
            shape: (num_dst, num_src).
            edge_id: position of every entry in the caller's edge order, a permutation, int32 or int64
                (num_edges,); None: entries are in that order.
            group_rows: ``"auto"``, ``"none"`` or ``"minhash"``, see :class:`Adjacency`.
            copy: if True, copies the tensors. If False, a contiguous int64 ``rowptr`` and a contiguous int32
                ``col`` are used directly, which saves half of the memory of a large graph. As long as the
                structure is alive, do not write to these tensors, and do not move them to shared memory
                (``share_memory_()``): kernels would read invalid memory.

        Raises:
            TypeError: a tensor is not int32 or int64, or ``shape`` is not a pair of ints.
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

        Raises:
            TypeError: as in :meth:`from_csr`.
            ValueError: as in :meth:`from_csr`.
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
        """True if the transposed structure was built and is still alive."""
        return "t" in self._built.results or (self._parent is not None and self._parent() is not None)

    def t(self, *, valued: bool = True) -> Adjacency:
        """The transposed structure, for the same edge values. It shares tensors if A is symmetric.

        Args:
            valued: if True, stores `edge_id` of the transpose, which takes 4 bytes per edge (8 for 2^31 edges
                or more). Only edge values need `edge_id`. If it was not stored and is needed later, it is
                computed again.
        """
        parent = self._parent() if self._parent is not None else None
        found: Adjacency | None = parent or self._built.results.get(
            "t"
        )  # read here, which saves the call of `get`
        return found or self._built.get("t", lambda: self._transpose(valued))

    def keep_transpose(self, transposed: Adjacency) -> None:
        """Stores a structure as the transpose of this structure.

        Args:
            transposed: the transpose; no other structure may own it.
        """
        # This structure owns its transpose, which has only a weak reference back: no reference cycle.
        self._parent = None
        self._built.results["t"] = transposed
        transposed._parent = weakref.ref(self)

    def _transpose(self, valued: bool) -> Adjacency:
        if self.symmetric is None and self.num_edges > _FEW_ENTRIES:
            self._look_at_entries()  # one pass over the entries is cheaper than the sort of a transpose
        symmetric = self.symmetric if self.num_dst == self.num_src else False
        is_known = symmetric is not None
        if symmetric:
            colptr, row = self.rowptr, self.col
        elif valued:
            colptr, row, order = transpose(self.rowptr, self.col, self.num_src)
        else:
            colptr, row = transpose_pairs(self.rowptr, self.col, self.num_src)
        if not is_known:  # one `bool` for both comparisons, because each waits for the device
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
        """Sets `has_loops`, and sets `symmetric` by a checksum, if it is not known yet.

        The checksum of a structure that is not symmetric is 0 with a probability of 2^-64.
        """
        if self.num_dst != self.num_src:
            self.symmetric = False
            return
        found = inspect_square_rows(self.rowptr, self.col)
        self.has_loops = found.has_loops
        if self.symmetric is None:
            self.symmetric = found.checksum == 0 and not found.cols_descend

    def is_free_of_loops(self) -> bool:
        """Returns True if the structure is square and no entry is a loop (i, i).

        The first call may wait for the device. While a CUDA graph is captured, the entries cannot be read:
        the result is False, unless loops were looked for before.
        """
        if self.has_loops is None and self.num_dst == self.num_src:
            if self.col.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            self._look_at_entries()
        return self.has_loops is False

    def _with_columns(self, col: Tensor, num_src: int) -> Adjacency:
        """A structure with the same rows and other columns; the order of edge values does not change."""
        other = Adjacency(
            self.rowptr,
            col,
            (self.num_dst, num_src),
            edge_id=self.edge_id,
            num_values=self.num_values,
            group_rows="none",
        )
        other._of_rows = self._of_rows  # results that depend only on rowptr are equal
        return other

    def derived(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Result of ``build()``, computed once and cached: for constants that layers derive from a structure.

        Args:
            key: name of the result. Choose a name that no other module uses.
            build: function that computes the result and must not return None. It is called at most once,
                under a lock.

        Raises:
            RuntimeError: the result would have to be built while a CUDA graph is captured.
        """
        found: _T | None = self._built.results.get(("user", key))
        return self._built.get(("user", key), build) if found is None else found

    def incidence(self) -> Adjacency:
        """The structure (num_dst, num_values) that connects every edge, as a source, to its destination.

        With this structure, :func:`spmm` sums edge features per destination, and :func:`sddmm` computes the
        dot product of every edge's features and its destination's features.
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
        """True if A equals its transpose, and columns ascend within rows. Builds the transpose."""
        return self.t(valued=False).col is self.col

    def prepare(self, *, backward: bool = True) -> Adjacency:
        """Builds the formats that calls without edge values need, so that they build none; returns self.

        While a CUDA graph is captured, no format can be built: call this method before the capture. Calls
        with edge values and :func:`ssd` may need further formats. Run such a call once before the capture,
        forward and backward.

        Args:
            backward: if True, also builds the transposed structure, which gradients need.
        """
        self.sort_slices()
        self.usage.scattered = None
        self.csr_structure  # noqa: B018
        self.plain_structure  # noqa: B018
        longest = lengths.edge_group_length(self.num_edges, self.num_dst, self.gpu)
        self.edge_group_structure(longest)
        if self.device.type == "cuda":
            # Reading these properties waits for the device once; later reads do not.
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
        """The same structure on another device; self if it is already on this device.

        Derived data are not copied.

        Args:
            device: target device.
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
            device: target device.
            non_blocking: as in :meth:`torch.Tensor.to`.
        """
        return self.to(device, non_blocking=non_blocking)

    def __repr__(self) -> str:
        return f"Adjacency(shape={self.shape}, num_edges={self.num_edges}, device={str(self.device)!r})"


send_copies(Adjacency)


def from_handle(handle: int) -> Adjacency:
    """The Adjacency with this handle.

    Raises:
        RuntimeError: the Adjacency was freed, for example between forward and backward pass of a compiled
            model.
    """
    reference = _registry.get(handle)
    adjacency = None if reference is None else reference()
    if adjacency is None:
        raise RuntimeError(
            f"adjacency: the structure with handle {handle} was freed while an operator still needed it; "
            "keep a reference to the Adjacency until the backward pass is done"
        )
    return adjacency
