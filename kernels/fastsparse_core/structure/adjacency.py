"""The structure of a sparse graph: immutable, without values, with everything derived from it built once."""

from __future__ import annotations

import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fastsparse_core import gpu, recorded
from fastsparse_core.formats import lengths
from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.formats.compress import compress, expand_rows, transpose, transpose_pairs
from fastsparse_core.formats.grouping import Method, check_method
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.inspection import (
    IndexFacts,
    Inspection,
    inspect_edges,
    inspect_indices,
    inspect_rows,
)
from fastsparse_core.formats.row_split import RowSplit, unsplit_rows
from fastsparse_core.structure.build_once import BuiltOnce
from fastsparse_core.structure.kernel_formats import KernelFormats, TransposedOrder, Usage

_logger = logging.getLogger("fastsparse_core")
_INT32_MAX = 2**31 - 1
_T = TypeVar("_T")

_registry: weakref.WeakValueDictionary[int, Adjacency] = weakref.WeakValueDictionary()
_next_handle = itertools.count(1)


class Adjacency(KernelFormats):
    r"""Sparse structure of shape ``(num_dst, num_src)``: rows are destinations, columns are sources.

    A message flows from column to row, so aggregation is :math:`A X`. The structure is immutable; whatever is
    derived from it (transpose, work lists, degrees) is built on first use on its device and kept. Edge values
    are separate tensors in the caller's edge order, so that trainable weights never rebuild anything.

    Build one with :meth:`from_coo`, :meth:`from_csr` or :meth:`from_csc`.

    Attributes:
        rowptr: int64 (num_dst + 1,), the range of entries of every row.
        col: int32 (num_edges,), the source of every entry.
        shape: (num_dst, num_src).
        num_dst: number of rows.
        num_src: number of columns.
        num_values: length of an edge-value tensor. It differs from ``num_edges`` where self loops were
            inserted or replaced (:meth:`extend_value`).
        group_rows: which rows share a window of the binary sparse blocks: ``"none"``, consecutive ones;
            ``"minhash"``, similar ones; ``"auto"``, similar ones where rows have 8 entries or more and that
            saves at least 10 % of the vectors. Only the blocks know of it: features, edge values and results
            keep their order.
        handle: number by which the operators know this object.
    """

    #: Whether it is one rank's part of a graph (:class:`fastsparse_core.distributed.PartitionedAdjacency`).
    is_partitioned: ClassVar[bool] = False
    #: Whether replays of a CUDA graph make it anew, for other edges (``fresh_adjacency.FreshAdjacency``).
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
        self._num_given = (
            self.num_values if num_given is None else num_given
        )  # the caller's edges, before loops
        # (min(shape),): the caller's edge that was this node's loop, -1: none; (): none of any node's. None:
        # no loops were inserted.
        self._loop_edge = loop_edge
        self.group_rows: Method = group_rows
        self._merge = merge  # (caller's edge, merged edge) of every edge before duplicates were merged
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
        self.handle: int = next(_next_handle)
        _registry[self.handle] = self

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_coo(
        cls,
        row: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        *,
        duplicates: Literal["keep", "sum"] = "keep",
        self_loops: Literal["keep", "append", "replace"] = "keep",
        group_rows: Method = "auto",
    ) -> Adjacency:
        """Builds the structure of an edge list in any order.

        Entries are sorted by (row, column). Edges that come sorted by row, as samplers give them, keep the
        order within rows, which saves the sort and `edge_id`; unless the structure may equal its transpose,
        which only sorted columns let it share.

        Args:
            row: destinations, int32 or int64 (E,).
            col: sources, like ``row``.
            shape: (num_dst, num_src).
            duplicates: ``"keep"`` stores repeated edges as often as they come. ``"sum"`` stores each once:
                edge values then follow the merged edges, sorted by (row, col); :meth:`coalesce_value` sums
                the caller's onto them.
            self_loops: ``"append"`` adds a loop (i, i) for every i < min(shape) after the caller's edges;
                ``"replace"`` first drops the caller's own loops. Values: :meth:`extend_value`.
            group_rows: ``"auto"``, ``"none"`` or ``"minhash"``, see :class:`Adjacency`.

        Raises:
            TypeError: an argument is not an integer tensor.
            ValueError: lengths or devices differ, an index lies outside ``shape``, or an option is unknown.
        """
        shape = _check_shape(shape)
        check_method(group_rows)
        _check_index("row", row)
        _check_index("col", col)
        if row.numel() != col.numel():
            raise ValueError(f"row and col: expected the same length, got {row.numel()} and {col.numel()}")
        if row.device != col.device:
            raise ValueError(f"row and col: expected one device, got {row.device} and {col.device}")
        if duplicates not in ("keep", "sum"):
            raise ValueError(f"duplicates: expected 'keep' or 'sum', got {duplicates!r}")
        if self_loops not in ("keep", "append", "replace"):
            raise ValueError(f"self_loops: expected 'keep', 'append' or 'replace', got {self_loops!r}")
        if row.dtype != col.dtype:
            row, col = row.long(), col.long()
        run = recorded.current()
        if run is not None:
            adjacency: Adjacency = run.of_edges(run, row, col, shape, duplicates, self_loops)
            return adjacency
        row, col = row.contiguous(), col.contiguous()
        square = shape[0] == shape[1]
        if duplicates == "keep" and self_loops == "keep":
            return cls._as_given(row, col, shape, group_rows)
        facts = inspect_indices(row, col, square=square)
        _check_range(facts, row, col, shape)
        num_given = num_values = row.numel()
        position: Tensor | None = None
        loop_edge: Tensor | tuple[()] | None = None
        if self_loops != "keep":
            row, col, position, loop_edge = _insert_loops(row, col, min(shape), self_loops == "replace")
            num_values += min(shape)
        rowptr, sorted_col, edge_id = compress(row, col, *shape)
        if position is not None:
            edge_id = position.index_select(0, edge_id)
        if duplicates == "sum":
            return cls._merged(rowptr, sorted_col, shape, edge_id, num_given, loop_edge, group_rows)
        adjacency = cls(
            rowptr,
            sorted_col,
            shape,
            edge_id=edge_id,
            num_values=num_values,
            num_given=num_given,
            loop_edge=loop_edge,
            group_rows=group_rows,
        )
        adjacency.symmetric = square and facts.checksum == 0  # loops are their own reverse
        adjacency.has_sorted_slices = not row.is_cuda
        return adjacency

    @classmethod
    def _as_given(cls, row: Tensor, col: Tensor, shape: tuple[int, int], group_rows: Method) -> Adjacency:
        """The structure of edges of which each is stored once, in their order where rows ascend."""
        square = shape[0] == shape[1]
        longest = lengths.slice_length(row.numel(), gpu.profile_of(row.device))
        found = inspect_edges(row, col, shape[0], longest, square=square)
        _check_range(found, row, col, shape)
        may_be_symmetric = square and found.checksum == 0
        if found.rows_descend or (found.cols_descend and may_be_symmetric):
            out = (found.rowptr, found.col)
            del found  # its other tensors, before the sort takes as much again
            rowptr, sorted_col, order = compress(row, col, *shape, out=out)
            adjacency = cls(rowptr, sorted_col, shape, edge_id=order, group_rows=group_rows)
            adjacency.has_sorted_slices = not row.is_cuda
        else:
            adjacency = cls(found.rowptr, found.col, shape, group_rows=group_rows)
            adjacency._learn(found)
        adjacency.symmetric = may_be_symmetric
        return adjacency

    def _learn(self, found: Inspection) -> None:
        """Keeps what was found out while the structure was checked."""
        self._of_rows.results[("inv_degree", torch.float32)] = found.inv_degree
        self._of_rows.results["has_empty_rows"] = (found.has_empty_rows,)
        if found.row_split is not None:
            self._of_rows.results["row_split"] = found.row_split
            self.has_sorted_slices = False
        self.usage.scattered = 0

    @classmethod
    def _merged(
        cls,
        rowptr: Tensor,
        col: Tensor,
        shape: tuple[int, int],
        edge_id: Tensor,
        num_given: int,
        loop_edge: Tensor | tuple[()] | None,
        group_rows: Method,
    ) -> Adjacency:
        """Merges equal neighbours of a structure sorted by (row, col)."""
        row = expand_rows(rowptr, col.numel())
        first = torch.ones(col.numel(), dtype=torch.bool, device=col.device)
        first[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
        merged = first.cumsum(0) - 1
        kept = torch.zeros(col.numel() + 1, dtype=torch.int64, device=col.device)
        torch.cumsum(first, 0, out=kept[1:])
        return cls(
            kept[rowptr],
            col[first],
            shape,
            num_given=num_given,
            loop_edge=loop_edge,
            merge=(edge_id.long(), merged),
            group_rows=group_rows,
        )

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
        """Builds the structure of compressed rows; the order within rows is kept.

        Args:
            rowptr: int32 or int64 (num_dst + 1,), ascending from 0 to the number of edges.
            col: sources, int32 or int64 (num_edges,).
            shape: (num_dst, num_src).
            edge_id: position of every entry in the caller's edge order, a permutation; None: the stored
                order.
            group_rows: ``"auto"``, ``"none"`` or ``"minhash"``, see :class:`Adjacency`.
            copy: False: ``rowptr`` is taken itself where it is int64 and contiguous, and ``col`` where it is
                int32 and contiguous, which saves half of the memory of a large graph. Then nobody may write
                to them as long as the structure lives: kernels would read beyond the features.

        Raises:
            TypeError: an argument is not an integer tensor.
            ValueError: lengths, devices or ranges do not fit together, or an option is unknown.
        """
        shape = _check_shape(shape)
        check_method(group_rows)
        tensors = {"rowptr": rowptr, "col": col}
        if edge_id is not None:
            tensors["edge_id"] = edge_id
        for name, tensor in tensors.items():
            _check_index(name, tensor)
            if tensor.device != rowptr.device:
                raise ValueError(f"{name}: expected device {rowptr.device} like rowptr, got {tensor.device}")
        if rowptr.numel() != shape[0] + 1:
            raise ValueError(
                f"rowptr: expected num_dst + 1 = {shape[0] + 1} entries for shape {shape}, "
                f"got {rowptr.numel()}"
            )
        if edge_id is not None and edge_id.numel() != col.numel():
            raise ValueError(f"edge_id: expected one per entry, {col.numel()}, got {edge_id.numel()}")
        rowptr = _own(rowptr, torch.int64) if copy else rowptr.detach().to(torch.int64).contiguous()
        col = col.detach().contiguous()
        edge_id = None if edge_id is None else edge_id.detach().contiguous()
        found = inspect_rows(
            rowptr,
            col,
            edge_id,
            lengths.slice_length(col.numel(), gpu.profile_of(col.device)),
            copy=copy,
        )
        if found.ends != (0, col.numel()) or found.rows_descend:
            raise ValueError(
                f"rowptr: expected ascending values from 0 to {col.numel()}, the length of col; "
                f"got {found.ends[0]} to {found.ends[1]}" + (", not ascending" if found.rows_descend else "")
            )
        if col.numel() and found.most_col >= shape[1]:
            _raise_range({"col": (col, shape[1], "num_src")})
        if edge_id is not None:
            if col.numel() and found.most_edge_id >= col.numel():
                _raise_range({"edge_id": (edge_id, col.numel(), "num_edges")})
            if not torch.zeros_like(edge_id, dtype=torch.bool).index_fill_(0, edge_id.long(), True).all():
                raise ValueError(
                    f"edge_id: expected a permutation of 0 to {col.numel() - 1}, the position of every entry "
                    "in the caller's edge order; got a position twice"
                )
            edge_id = _own(edge_id, torch.int32 if col.numel() <= _INT32_MAX else torch.int64)
        adjacency = cls(rowptr, found.col, shape, edge_id=edge_id, group_rows=group_rows)
        adjacency._learn(found)
        return adjacency

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
        """Builds the structure of compressed columns: :meth:`from_csr`, transposed."""
        num_dst, num_src = _check_shape(shape)
        options: dict[str, Any] = {"edge_id": edge_id, "group_rows": group_rows, "copy": copy}
        columns = cls.from_csr(colptr, row, (num_src, num_dst), **options)
        adjacency = columns._transpose(True)
        # The result owns its transpose, not the other way round: owning both ways would be a cycle.
        adjacency._parent = None
        adjacency._built.results["t"] = columns
        columns._parent = weakref.ref(adjacency)
        return adjacency

    # ---------------------------------------------------------------- facts

    def derived(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Result of ``build()``, computed once and kept: for constants that layers derive from a structure.

        Args:
            key: name of the result; take one that no other module uses. Results must not be None.
            build: called at most once, under a lock.
        """
        return self._built.get(("user", key), build)

    @property
    def has_inserted_loops(self) -> bool:
        """Whether self loops were inserted at construction (``self_loops="append"`` or ``"replace"``)."""
        return self._loop_edge is not None

    def out_degree(self) -> Tensor:
        """Number of entries per column, int64 (num_src,); needs no transpose."""
        if "t" in self._built.results or self._parent is not None:
            return self.t(valued=False).in_degree()
        return self._built.get("out_degree", lambda: torch.bincount(self.col, minlength=self.num_src))

    def has_empty_rows(self) -> bool:
        """Whether some destination has no edge (read from the device once)."""
        return self._of_rows.get("has_empty_rows", lambda: (bool((self.in_degree() == 0).any()),))[0]

    def inv_sqrt_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_i^{-1/2}` of the in-degrees, 0 where :math:`d_i = 0`; (num_dst,)."""
        return self._of_rows.get(("inv_sqrt_degree", dtype), lambda: self._inv_sqrt_degree(dtype))

    def _inv_sqrt_degree(self, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32 and self._finds_inv_degree():
            return self.inv_degree().sqrt()
        return _power(self.in_degree(), -0.5, dtype)

    def inv_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_i^{-1}` of the in-degrees, 0 where :math:`d_i = 0`; (num_dst,)."""
        return self._of_rows.get(("inv_degree", dtype), lambda: self._inv_degree(dtype))

    def _inv_degree(self, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32 and self._finds_inv_degree():
            found: Tensor = self._of_rows.results["inv_degree", dtype]
            return found
        return _power(self.in_degree(), -1.0, dtype)

    def _finds_inv_degree(self) -> bool:
        """Whether it is known: what makes the work list of a new structure on CUDA finds it on its way."""
        if not self.has_sorted_slices:
            self.row_split  # noqa: B018
        return ("inv_degree", torch.float32) in self._of_rows.results

    def inv_sqrt_out_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_j^{-1/2}` of the out-degrees, 0 where :math:`d_j = 0`; (num_src,)."""
        return self._built.get(("inv_sqrt_out_degree", dtype), lambda: _power(self.out_degree(), -0.5, dtype))

    def inv_out_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        r""":math:`d_j^{-1}` of the out-degrees, 0 where :math:`d_j = 0`; (num_src,)."""
        return self._built.get(("inv_out_degree", dtype), lambda: _power(self.out_degree(), -1.0, dtype))

    # ---------------------------------------------------------------- derived structures

    @property
    def has_transpose(self) -> bool:
        """Whether the transposed structure was built, and still lives."""
        return "t" in self._built.results or (self._parent is not None and self._parent() is not None)

    def t(self, *, valued: bool = True) -> Adjacency:
        """The transposed structure, in the same caller's edge order; shares tensors where A is symmetric.

        Args:
            valued: whether its `edge_id` is kept from the sort that makes it. Without edge values nothing
                reads it, and it takes 4 bytes an edge; where it is read after all, edges are sorted again.
        """
        parent = self._parent() if self._parent is not None else None
        return parent if parent is not None else self._built.get("t", lambda: self._transpose(valued))

    def _transpose(self, valued: bool) -> Adjacency:
        symmetric = self.symmetric if self.num_dst == self.num_src else False
        if symmetric and not valued:
            colptr, row = self.rowptr, self.col
        elif valued:
            colptr, row, order = transpose(self.rowptr, self.col, self.num_src)
        else:
            colptr, row = transpose_pairs(self.rowptr, self.col, self.num_src)
        if symmetric is None:  # one read from the device for both
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
        if not valued:
            transposed._edge_id = TransposedOrder(self.rowptr, self.col, self.num_src, self._edge_id)
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

    @property
    def is_symmetric(self) -> bool:
        """Whether A equals its transpose. Builds it; rows with unsorted columns count as not symmetric."""
        return self.t(valued=False).col is self.col

    def prepare(self, *, backward: bool = True) -> Adjacency:
        """Builds now what the operators need later, so that no call has to; returns self.

        Call it before ``torch.compile`` or CUDA-graph capture: neither can build formats.

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

    # ---------------------------------------------------------------- edge values

    def extend_value(
        self, value: Tensor, fill_value: float | Tensor, *, keep_existing: bool = True
    ) -> Tensor:
        """Appends values of the inserted self loops to the caller's edge values; differentiable.

        Args:
            value: (E, ...) in the caller's edge order.
            fill_value: value of a loop, a number or (min(shape), ...).
            keep_existing: a loop that replaced one of the caller's keeps that edge's value (of several, the
                last), as PyG's ``add_remaining_self_loops``.

        Returns:
            (num_values, ...).
        """
        count = min(self.shape)
        if self._loop_edge is None:
            raise ValueError(
                "extend_value: expected an Adjacency built with self_loops='append' or 'replace'"
            )
        if value.size(0) != self._num_given:
            raise ValueError(f"value: expected one per given edge, {self._num_given}, got {value.size(0)}")
        if isinstance(fill_value, Tensor):
            loops = fill_value.to(value.dtype)
        else:
            loops = value.new_full((count, *value.shape[1:]), fill_value)
        if keep_existing and isinstance(self._loop_edge, Tensor) and value.size(0):
            existing = (self._loop_edge >= 0).reshape(-1, *[1] * (value.dim() - 1))
            loops = torch.where(existing, value[self._loop_edge.clamp(min=0)], loops)
        return torch.cat([value, loops])

    def coalesce_value(self, value: Tensor | None = None) -> Tensor:
        """Sums the caller's edge values onto the merged edges of ``duplicates="sum"``; differentiable.

        Args:
            value: (E, ...) in the caller's edge order; None: ones, which gives multiplicities.

        Returns:
            (num_values, ...), sorted by (row, col).
        """
        if self._merge is None:
            raise ValueError("coalesce_value: expected an Adjacency built with duplicates='sum'")
        source, target = self._merge
        num_values = self._num_given + (min(self.shape) if self.has_inserted_loops else 0)
        if value is None:
            value = torch.ones(num_values, device=self.device)
        if value.size(0) != num_values:
            raise ValueError(
                f"value: expected one per edge before merging, {num_values}, got {value.size(0)}"
            )
        out = value.new_zeros(self.num_values, *value.shape[1:])
        return out.index_add(0, target, value[source])

    # ---------------------------------------------------------------- memory, devices, pickling

    def _own_tensors(self) -> dict[str, Tensor]:
        tensors = {"rowptr": self.rowptr, "col": self.col}
        if isinstance(self._edge_id, Tensor):
            tensors["edge_id"] = self._edge_id
        elif isinstance(self._edge_id, TransposedOrder):
            tensors["transposed_rowptr"], tensors["transposed_col"] = self._edge_id[:2]
        if isinstance(self._loop_edge, Tensor):
            tensors["loop_edge"] = self._loop_edge
        if self._merge is not None:
            tensors["merge_source"], tensors["merge_target"] = self._merge
        return tensors

    def memory_usage(self) -> dict[str, int]:
        """Bytes held by this structure and what was derived from it, by name; shared memory counts once."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for name, tensor in self._tensors(set()):
            if tensor.data_ptr() not in seen or not tensor.numel():
                sizes[name] = tensor.nbytes
            seen.add(tensor.data_ptr())
        return sizes

    def _tensors(self, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor kept, by name, of structures that are not among ``visited`` (handles) yet."""
        visited.add(self.handle)
        yield from self._own_tensors().items()
        results = self._of_rows.results | self._of_pattern.results | self._built.results
        for key, result in results.items():
            name = "_".join(map(str, key)) if isinstance(key, tuple) else key
            yield from self._tensors_of(name, result, visited)

    def _tensors_of(self, name: str, result: Any, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
        """Those of one result that is kept under that name."""
        if isinstance(result, Tensor):
            yield name, result
        elif isinstance(result, (RowSplit, HybridRows, Bsb)):
            yield from ((f"{name}.{item}", tensor) for item, tensor in result.tensors().items())
        elif isinstance(result, Adjacency) and result.handle not in visited:
            yield from ((f"{name}.{item}", tensor) for item, tensor in result._tensors(visited))
        elif isinstance(result, (tuple, dict)):
            parts = result.values() if isinstance(result, dict) else result
            for nth, part in enumerate(parts):
                yield from self._tensors_of(name if len(parts) == 1 else f"{name}.{nth}", part, visited)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Adjacency:
        """The same structure on another device (self where it is there); derived structures are rebuilt."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        state = self.__getstate__()
        moved = Adjacency.__new__(Adjacency)
        moved.__setstate__({name: _move(item, target, non_blocking) for name, item in state.items()})
        return moved

    def cpu(self) -> Adjacency:
        """The same structure on the CPU."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str = "cuda", non_blocking: bool = False) -> Adjacency:
        """The same structure on a CUDA device."""
        return self.to(device, non_blocking=non_blocking)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "rowptr": self.rowptr,
            "col": self.col,
            "shape": self.shape,
            "edge_id": self.edge_id,
            "num_values": self.num_values,
            "_num_given": self._num_given,
            "_loop_edge": self._loop_edge,
            "_merge": self._merge,
            "group_rows": self.group_rows,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._edge_id = self.__dict__.pop("edge_id")
        self._start()

    def __repr__(self) -> str:
        return f"Adjacency(shape={self.shape}, num_edges={self.num_edges}, device={str(self.device)!r})"


def from_handle(handle: int) -> Adjacency:
    """The living Adjacency with this handle.

    Raises:
        RuntimeError: it was freed, for example between the forward and the backward pass of a compiled model.
    """
    adjacency = _registry.get(handle)
    if adjacency is None:
        raise RuntimeError(
            f"adjacency: the structure with handle {handle} was freed while an operator still needed it; "
            "keep a reference to the Adjacency until the backward pass is done"
        )
    return adjacency


def adjacency_of_batch(
    rowptr: Tensor,
    col: Tensor,
    shape: tuple[int, int],
    inv_degree: Tensor,
    slices: Tensor | None,
    *,
    most_entries: int,
) -> Adjacency:
    """The structure of a sampled batch, as the sampler wrote it; nothing is checked.

    Args:
        rowptr: int64 (num_dst + 1,).
        col: int32 (num_edges,).
        shape: (num_dst, num_src).
        inv_degree: see :meth:`Adjacency.inv_degree`.
        slices: on CUDA, the work list of uncut rows in row order; used where no row needs cutting.
        most_entries: bound of the entries of a row.
    """
    adjacency = Adjacency(rowptr, col, shape)
    adjacency.symmetric = False
    adjacency._of_rows.results[("inv_degree", torch.float32)] = inv_degree
    if slices is not None and most_entries <= lengths.slice_length(col.numel(), gpu.profile_of(col.device)):
        adjacency._of_rows.results["row_split"] = unsplit_rows(slices)
        adjacency.has_sorted_slices = False
    adjacency.usage.scattered = 0
    return adjacency


def _own(index: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that later in-place edits of the caller's tensor cannot reach."""
    return index.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _power(degree: Tensor, exponent: float, dtype: torch.dtype) -> Tensor:
    return degree.to(dtype).pow(exponent).nan_to_num_(posinf=0.0)


def _insert_loops(
    row: Tensor, col: Tensor, count: int, replace: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | tuple[()]]:
    """Edges with loops appended.

    Returns:
        rows; columns; the caller's position of each, None: their own; each node's own loop edge, as
        `Adjacency` keeps it.
    """
    num_edges = row.numel()
    loop_edge: Tensor | tuple[()] = ()
    position: Tensor | None = None
    if replace:
        is_loop = row == col
        if is_loop.any():
            loops = torch.nonzero(is_loop).flatten()
            loop_edge = torch.full((count,), -1, dtype=torch.int64, device=row.device)
            loop_edge.scatter_reduce_(0, row[loops].long(), loops, "amax")
            kept = torch.nonzero(~is_loop).flatten()
            row, col = row[kept], col[kept]
            position = torch.cat([kept, torch.arange(num_edges, num_edges + count, device=row.device)])
            if num_edges + count <= _INT32_MAX:
                position = position.int()
    node = torch.arange(count, dtype=row.dtype, device=row.device)
    return torch.cat([row, node]), torch.cat([col, node]), position, loop_edge


def _move(item: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(item, Tensor):
        return item.to(device, non_blocking=non_blocking)
    if isinstance(item, tuple):
        return tuple(_move(part, device, non_blocking) for part in item)
    return item


def _check_shape(shape: tuple[int, int]) -> tuple[int, int]:
    try:
        num_dst, num_src = shape
        num_dst, num_src = operator.index(num_dst), operator.index(num_src)
    except (TypeError, ValueError) as error:
        raise TypeError(f"shape: expected (num_dst, num_src), two ints, got {shape!r}") from error
    if not (0 <= num_dst <= _INT32_MAX and 0 <= num_src <= _INT32_MAX):
        raise ValueError(f"shape: expected sizes from 0 to 2^31 - 1, got {tuple(shape)}")
    return num_dst, num_src


def _check_index(name: str, index: Tensor) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {index.dtype}; convert it with .long()")
    if index.dim() != 1:
        raise ValueError(f"{name}: expected a 1-D tensor, got shape {tuple(index.shape)}")


def _check_range(found: Inspection | IndexFacts, row: Tensor, col: Tensor, shape: tuple[int, int]) -> None:
    if row.numel() and (found.most_row >= shape[0] or found.most_col >= shape[1]):
        _raise_range({"row": (row, shape[0], "num_dst"), "col": (col, shape[1], "num_src")})


def _raise_range(indices: dict[str, tuple[Tensor, int, str]]) -> None:
    """Says which index is not 0 <= index < size."""
    for name, (index, size, size_name) in indices.items():
        low, high = (int(end) for end in torch.aminmax(index))
        if low < 0 or high >= size:
            expected = (
                f"indices from 0 to {size_name} - 1 = {size - 1}" if size else f"none for {size_name} = 0"
            )
            raise ValueError(f"{name}: expected {expected}, got values from {low} to {high}")
