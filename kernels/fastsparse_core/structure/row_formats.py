"""Formats of a structure for kernels that work row by row: pointers, columns and work lists."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastsparse_core import _C, gpu
from fastsparse_core.formats import lengths
from fastsparse_core.formats.compress import expand_rows, reverse_entries, transpose
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.inspection import inspect_rows
from fastsparse_core.formats.row_split import RowSplit, addresses_of, split_rows
from fastsparse_core.structure.build_once import BuiltOnce

_T = TypeVar("_T")


@dataclass
class Usage:
    """Counts how often a structure was used, for the rules that decide whether to build another format.

    Attributes:
        products: number of products that count for a conversion.
        csr: number of calls that used slices in row order.
        scattered: number of gradients that were computed by scattering, without the transpose; None:
            gradients use the transpose.
    """

    products: int = 0
    csr: int = 0
    scattered: int | None = None


class TransposedOrder(NamedTuple):
    """Computes `edge_id` of a transposed structure when it is first used.

    Attributes:
        rowptr: row pointers of the untransposed structure.
        col: columns of the untransposed structure.
        num_src: number of columns of the untransposed structure.
        given: `edge_id` of the untransposed structure; None: the identity.
        symmetric: True if the structure equals its transpose.
    """

    rowptr: Tensor
    col: Tensor
    num_src: int
    given: Tensor | TransposedOrder | None
    symmetric: bool

    def edge_id(self) -> Tensor:
        """Computes `edge_id` of the transposed structure, int32 or int64 (num_edges,)."""
        given = self.given.edge_id() if isinstance(self.given, TransposedOrder) else self.given
        if self.symmetric:
            return reverse_entries(self.rowptr, self.col, given)
        order = transpose(self.rowptr, self.col, self.num_src)[2]
        return order if given is None else given.index_select(0, order)


class RowFormats:
    """The part of :class:`fastsparse_core.Adjacency` for kernels that work row by row.

    Attributes:
        rowptr: range of entries of every row, int64 (num_dst + 1,).
        col: source of every entry, int32 (num_edges,).
        edge_id: position of every entry in the caller's edge order, (num_edges,); None: the identity.
        shape: (num_dst, num_src).
        num_dst: number of rows.
        num_src: number of columns.
        handle: number by which operators identify the object.
        plans: plans of earlier calls, by operator and shape, for later calls of the same kind.
        usage: counts of how often the structure was used.
        has_sorted_slices: True if `row_split` sorts slices by length.
        symmetric: True if the structure, without edge values, equals its transpose; None: not compared yet.
        has_loops: True if some edge is a loop; None: not checked yet.
    """

    rowptr: Tensor
    col: Tensor
    shape: tuple[int, int]
    num_dst: int
    num_src: int
    handle: int
    plans: dict[Hashable, Any]
    usage: Usage
    has_sorted_slices: bool
    symmetric: bool | None
    has_loops: bool | None
    _edge_id: Tensor | TransposedOrder | None
    _built: BuiltOnce
    _of_rows: BuiltOnce

    @property
    def edge_id(self) -> Tensor | None:
        """Position of every entry in the caller's edge order, int32 or int64 (num_edges,).

        None: entries are in the caller's order.
        """
        kept = self._edge_id
        if isinstance(kept, TransposedOrder):
            kept = self._edge_id = self._built.get("edge_id", kept.edge_id)
        return kept

    @property
    def num_edges(self) -> int:
        """Number of stored entries."""
        return self.col.numel()

    @property
    def device(self) -> torch.device:
        """Device of the structure."""
        return self.col.device

    @property
    def gpu(self) -> gpu.GpuProfile:
        """Profile of the GPU that the structure is on."""
        return gpu.profile_of(self.col.device)

    def row(self) -> Tensor:
        """Destination of every stored entry, int32 (num_edges,); cached."""
        if torch.compiler.is_compiling() and "row" not in self._of_rows.results:
            row = torch.arange(self.num_dst, dtype=torch.int32, device=self.device)
            return row.repeat_interleave(self.rowptr.diff(), output_size=self.num_edges)
        return self._of_rows.get("row", lambda: expand_rows(self.rowptr, self.num_edges))

    def row_once(self) -> Tensor:
        """Like `row`, but does not cache the result: for formats, which read the rows once."""
        kept = self._of_rows.results.get("row")
        return expand_rows(self.rowptr, self.num_edges) if kept is None else kept

    # ---------------------------------------------------------------- CSR

    @property
    def row_split(self) -> RowSplit:
        """Work list of the CSR kernels."""
        return self._of_rows.get("row_split", self._row_split)

    @property
    def has_row_split(self) -> bool:
        """True if `row_split` was built."""
        return "row_split" in self._of_rows.results

    @property
    def has_short_rows(self) -> bool:
        """True if no row is longer than a slice.

        The answer comes from the work list if one was built. Otherwise the length of the longest row is read
        from the device, once; while a CUDA graph is captured, nothing can be read, and the result is False.
        """
        is_known = not self._of_rows.results.keys().isdisjoint(("row_split", "has_short_rows"))
        if not is_known and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        return self._of_rows.get("has_short_rows", self._has_short_rows)

    def _has_short_rows(self) -> bool:
        if self.has_row_split or not self.has_sorted_slices:
            return self.row_split.num_slots == 0
        longest = int(self.rowptr.diff().max()) if self.num_dst else 0
        return longest <= lengths.slice_length(self.num_edges, self.gpu)

    def _row_split(self) -> RowSplit:
        if not self.has_sorted_slices:  # one launch, not three: the structure may be used only once
            longest = lengths.slice_length(self.num_edges, self.gpu)
            found = inspect_rows(self.rowptr, self.col, None, longest, copy=False)
            self._of_rows.results.setdefault(("inv_degree", torch.float32), found.inv_degree)
            self._of_rows.results["has_empty_rows"] = (found.has_empty_rows,)
            if found.row_split is not None:
                return found.row_split
            self.has_sorted_slices = True
        return self._sorted_row_split(None)

    def _sorted_row_split(self, unsorted: RowSplit | None) -> RowSplit:
        """Work list with slices sorted by length; ``unsorted``: the work list in row order, if it exists."""
        longest = lengths.slice_length(self.num_edges, self.gpu)
        return split_rows(self.rowptr, longest, is_cut=unsorted is None or unsorted.num_slots > 0)

    @property
    def csr_structure(self) -> Any:
        """The structure, with the work list `row_split`, in the form that the compiled kernels take."""
        return self.structure_for(valued=True)

    @property
    def plain_structure(self) -> Any:
        """The structure without a work list, for kernels that need none."""
        return self.structure_for(valued=True, work_list="plain")

    def structure_for(self, *, valued: bool, work_list: Literal["csr", "plain", "hybrid"] = "csr") -> Any:
        """The structure in the form that a kernel takes.

        Args:
            valued: True if edges have values. If False, kernels do not read `edge_id`, so it may be missing.
            work_list: ``"csr"``: `row_split`; ``"plain"``: no work list; ``"hybrid"``: `hybrid_rows`.
        """
        key: Any = f"{work_list}_structure"
        if not valued and isinstance(self._edge_id, TransposedOrder):
            key = (key, "without ids")
        else:
            valued = True
        results = self._built.results
        found = results.get(key)
        # `hybrid_rows` reads from the device, so `get` raises an error while a CUDA graph is captured.
        if found is None and work_list == "hybrid":
            found = self._built.get(key, lambda: self._rows(self.hybrid_rows.row_split(), valued=valued))
        elif found is None:  # without a lock: if several threads get here, each builds an equal structure
            is_split = work_list == "csr" and self.device.type == "cuda"
            split = self.row_split if is_split else None
            found = results[key] = self._rows(split, valued=valued)
            while is_split and split is not self.row_split:  # another thread has sorted the slices
                split = self.row_split
                found = results[key] = self._rows(split, valued=valued)
        return found

    def sort_slices(self) -> None:
        """Sorts the slices of `row_split` by length, if they are in row order.

        Structures that were built from the slices are rebuilt at once, because they cannot be built later,
        while a CUDA graph is captured.
        """
        if self.has_sorted_slices:
            return
        # A second thread waits, so it never sees a structure that is incomplete or wrongly marked as sorted.
        with self._built.lock, self._of_rows.lock, torch.inference_mode(False):
            if not self.has_sorted_slices:
                self._sort_slices()

    def _sort_slices(self) -> None:
        results, built = self._of_rows.results, self._built.results
        unsorted = results.get("row_split")
        if unsorted is not None:
            # Not freed, because CUDA graphs may have been captured with this work list.
            results["unsorted_row_split"] = unsorted
            results["row_split"] = split = self._sorted_row_split(unsorted)
            for key, valued in (("csr_structure", True), (("csr_structure", "without ids"), False)):
                if key in built:
                    built[key] = self._rows(split if self.device.type == "cuda" else None, valued=valued)
        self.has_sorted_slices = True
        self.plans.clear()

    @property
    def first_row_split(self) -> RowSplit:
        """The work list that was built first, before `sort_slices`: its order of summation never changes."""
        return self._of_rows.results.get("unsorted_row_split") or self.row_split

    @property
    def first_csr_structure(self) -> Any:
        """`csr_structure` with the work list `first_row_split`."""
        first = self.first_row_split
        if first is self.row_split:
            return self.csr_structure
        return self._built.get("first_csr_structure", lambda: self._rows(first))

    @property
    def hybrid_rows(self) -> HybridRows:
        """Work list of spmm on CUDA cores and tensor cores (`HybridRows`)."""
        return self._of_rows.get("hybrid_rows", lambda: HybridRows.from_rowptr(self.rowptr, self.num_edges))

    def edge_groups(self, longest: int) -> RowSplit:
        """Work list of ssd: the entries of every row in groups.

        Args:
            longest: largest number of entries per group.
        """
        return self._of_rows.get(("edge_groups", longest), lambda: RowSplit.from_rowptr(self.rowptr, longest))

    def edge_group_structure(self, longest: int) -> Any:
        """The structure in the form that the compiled ssd takes; on the CPU there are no groups.

        Args:
            longest: largest number of entries per group.
        """
        return self._built.get(
            ("edge_group_structure", longest),
            lambda: self._rows(self.edge_groups(longest) if self.device.type == "cuda" else None),
        )

    def _rows(self, split: RowSplit | None, *, valued: bool = True) -> Any:
        edge_id = self.edge_id if valued else None
        slices, num_slices, split_row, split_ptr, num_split_rows = addresses_of(split)
        return _C.CsrStructure(
            rowptr=self.rowptr,
            col=self.col,
            edge_id=edge_id,
            edge_id_is_64bit=edge_id is not None and edge_id.dtype == torch.int64,
            num_rows=self.shape[0],
            num_cols=self.shape[1],
            num_edges=self.num_edges,
            slices=slices,
            num_slices=num_slices,
            split_row=split_row,
            split_ptr=split_ptr,
            num_split_rows=num_split_rows,
        )
