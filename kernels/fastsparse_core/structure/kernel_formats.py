"""What the kernels read of a structure: its work lists and formats, each built on first use and kept."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import _C, gpu
from fastsparse_core.formats import lengths
from fastsparse_core.formats.bsb import BLOCK, HEIGHT, MOST_COLUMNS, QUAD, Bsb
from fastsparse_core.formats.compress import compress, expand_rows, transpose
from fastsparse_core.formats.grouping import Method
from fastsparse_core.formats.grouping import group_rows as similar_rows
from fastsparse_core.formats.hybrid_rows import HybridRows
from fastsparse_core.formats.inspection import inspect_rows
from fastsparse_core.formats.row_split import RowSplit, split_rows
from fastsparse_core.formats.window_work_list import join_short_windows, slot_starts
from fastsparse_core.structure.build_once import BuiltOnce

_logger = logging.getLogger("fastsparse_core")
_INT32_MAX = 2**31 - 1


@dataclass
class Usage:
    """How often a structure was used, for what decides whether another form of it is worth building.

    Attributes:
        products: that counted for a conversion.
        csr: calls that took slices in row order.
        scattered: gradients that were added without a transpose; None where none may be.
    """

    products: int = 0
    csr: int = 0
    scattered: int | None = None


class TransposedOrder(NamedTuple):
    """Where the entries of a transposed structure lie in the caller's order, as long as nobody has asked.

    Attributes:
        rowptr: of the structure that was transposed.
        col: likewise.
        num_src: likewise.
        given: its own `edge_id`.
    """

    rowptr: Tensor
    col: Tensor
    num_src: int
    given: Tensor | TransposedOrder | None

    def edge_id(self) -> Tensor:
        """The positions."""
        order = transpose(self.rowptr, self.col, self.num_src)[2]
        given = self.given.edge_id() if isinstance(self.given, TransposedOrder) else self.given
        return order if given is None else given.index_select(0, order)


class KernelFormats:
    """The part of :class:`fastsparse_core.Adjacency` that the kernels are served from.

    Attributes:
        rowptr: int64 (num_dst + 1,), the range of entries of every row.
        col: int32 (num_edges,), the source of every entry.
        edge_id: (num_edges,) position of every entry in the caller's edge order; None: the identity.
        shape: (num_dst, num_src).
        num_dst: number of rows.
        num_src: number of columns.
        group_rows: which rows share a window of the binary sparse blocks.
        handle: number by which the operators know the object.
        plans: what earlier calls found out, by operator and shape, for calls that repeat them.
        usage: how often it was used.
        has_sorted_slices: whether slices of like length lie together in `row_split`, once it is built.
        symmetric: whether it equals its transpose, edge values apart; None: nobody has compared them yet.
    """

    rowptr: Tensor
    col: Tensor
    shape: tuple[int, int]
    num_dst: int
    num_src: int
    group_rows: Method
    handle: int
    plans: dict[Hashable, Any]
    usage: Usage
    has_sorted_slices: bool
    symmetric: bool | None
    _edge_id: Tensor | TransposedOrder | None
    _built: BuiltOnce
    _of_rows: BuiltOnce
    _of_pattern: BuiltOnce
    _bsb_refused: bool

    @property
    def edge_id(self) -> Tensor | None:
        """Position of every entry in the caller's edge order, (num_edges,); None: the identity."""
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
        """Where the structure lies."""
        return self.col.device

    @property
    def gpu(self) -> gpu.GpuProfile:
        """What is known of the GPU that it lies on."""
        return gpu.profile_of(self.col.device)

    def row(self) -> Tensor:
        """Destination of every stored entry, int32 (num_edges,); kept, for operators that read it."""
        if torch.compiler.is_compiling() and "row" not in self._of_rows.results:
            row = torch.arange(self.num_dst, dtype=torch.int32, device=self.device)
            return row.repeat_interleave(self.rowptr.diff(), output_size=self.num_edges)
        return self._of_rows.get("row", lambda: expand_rows(self.rowptr, self.num_edges))

    def row_once(self) -> Tensor:
        """The same, not kept: for formats that are made of it."""
        kept = self._of_rows.results.get("row")
        return expand_rows(self.rowptr, self.num_edges) if kept is None else kept

    def in_degree(self) -> Tensor:
        """Number of entries per row, int64 (num_dst,)."""
        return self._of_rows.get("in_degree", self.rowptr.diff)

    # ---------------------------------------------------------------- CSR

    @property
    def row_split(self) -> RowSplit:
        """Work list of the CSR kernels."""
        return self._of_rows.get("row_split", self._row_split)

    @property
    def has_row_split(self) -> bool:
        """Whether `row_split` was built."""
        return "row_split" in self._of_rows.results

    @property
    def has_short_rows(self) -> bool:
        """Whether no row is longer than a slice.

        Where no work list says so the device is read once; False while a CUDA graph is captured.
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
        longest = lengths.slice_length(self.num_edges, self.gpu)
        if not self.has_sorted_slices:  # of a structure that is perhaps seen once: one launch, not three
            found = inspect_rows(self.rowptr, self.col, None, longest, copy=False)
            self._of_rows.results.setdefault(("inv_degree", torch.float32), found.inv_degree)
            self._of_rows.results["has_empty_rows"] = (found.has_empty_rows,)
            if found.row_split is not None:
                return found.row_split
            self.has_sorted_slices = True
        unsorted = self._of_rows.results.get("unsorted_row_split")
        return split_rows(self.rowptr, longest, is_cut=not unsorted or unsorted.num_slots > 0)

    @property
    def csr_structure(self) -> Any:
        """The structure as the compiled kernels take it."""
        return self._built.get("csr_structure", self._csr_structure)

    def structure_for(self, *, valued: bool, work_list: Literal["csr", "plain", "hybrid"] = "csr") -> Any:
        """`csr_structure`, `plain_structure` or `hybrid_structure`, for a product.

        Args:
            valued: whether edges have values: else kernels do not read `edge_id`, which is not found then.
            work_list: which of them.
        """
        if valued or not isinstance(self._edge_id, TransposedOrder):
            return getattr(self, f"{work_list}_structure")
        return self._built.get(
            (f"{work_list}_structure", "without ids"), lambda: self._without_ids(work_list)
        )

    def _without_ids(self, work_list: str) -> Any:
        if work_list == "hybrid":
            return self._rows(self.hybrid_rows.row_split(), valued=False)
        is_cuda = self.device.type == "cuda"
        return self._rows(self.row_split if work_list == "csr" and is_cuda else None, valued=False)

    def sort_slices(self) -> None:
        """Puts slices of like length together, if they are in row order so far.

        What was made of them is made anew at once: a CUDA graph may be captured next, which can make nothing.
        """
        if not self.has_sorted_slices:
            self.has_sorted_slices = True
            self.plans.clear()
            results = self._of_rows.results
            # Kept, for CUDA graphs were perhaps captured with it; another thread may have been here before.
            results.setdefault("unsorted_row_split", results.pop("row_split", ()))
            for key, valued in (("csr_structure", True), (("csr_structure", "without ids"), False)):
                if self._built.results.pop(key, None) is not None:
                    self.structure_for(valued=valued)

    def _csr_structure(self) -> Any:
        return self._rows(self.row_split if self.device.type == "cuda" else None)

    @property
    def plain_structure(self) -> Any:
        """The structure without any work list, as kernels take it that need none."""
        return self._built.get("plain_structure", lambda: self._rows(None))

    @property
    def hybrid_rows(self) -> HybridRows:
        """Work list of spmm on both kinds of units, see `HybridRows`."""
        return self._of_rows.get("hybrid_rows", lambda: HybridRows.from_rowptr(self.rowptr, self.num_edges))

    @property
    def hybrid_structure(self) -> Any:
        """The structure with that work list, as the compiled kernel takes it; the first use waits for it."""
        return self._built.get("hybrid_structure", lambda: self._rows(self.hybrid_rows.row_split()))

    def edge_groups(self, longest: int) -> RowSplit:
        """Work list of ssd: the entries of a row in groups of at most ``longest``, and who shares a row."""
        return self._of_rows.get(("edge_groups", longest), lambda: RowSplit.from_rowptr(self.rowptr, longest))

    def edge_group_structure(self, longest: int) -> Any:
        """The structure as the compiled ssd takes it; on the CPU there are no groups."""
        return self._built.get(
            ("edge_group_structure", longest),
            lambda: self._rows(self.edge_groups(longest) if self.device.type == "cuda" else None),
        )

    def _rows(self, split: RowSplit | None, *, valued: bool = True) -> Any:
        edge_id = self.edge_id if valued else None
        addresses = (
            (
                split.slices.data_ptr(),
                split.slices.size(0),
                split.split_row.data_ptr(),
                split.split_ptr.data_ptr(),
                split.split_row.numel(),
            )
            if split is not None
            else (0, 0, 0, 0, 0)
        )
        return _C.CsrStructure(
            self.rowptr.data_ptr(),
            self.col.data_ptr(),
            0 if edge_id is None else edge_id.data_ptr(),
            edge_id is not None and edge_id.dtype == torch.int64,
            *self.shape,
            self.num_edges,
            *addresses,
        )

    # ---------------------------------------------------------------- binary sparse blocks

    @property
    def has_bsb(self) -> bool:
        """Whether the binary sparse blocks were built."""
        return "bsb" in self._of_pattern.results

    @property
    def can_convert(self) -> bool:
        """Whether nothing has refused the binary sparse blocks yet."""
        return not self._bsb_refused

    def try_bsb(self) -> bool:
        """Builds the binary sparse blocks where they can be; returns whether they are there.

        Without the memory the CSR kernels go on, and with more vectors than can be counted, which is said
        once and not tried again. They also serve structures with more sources than the blocks can name.
        """
        if not self.has_bsb and not self._bsb_refused and self.num_src <= MOST_COLUMNS:
            try:
                self.bsb  # noqa: B018
            except torch.OutOfMemoryError:
                self._refuse_bsb("not enough memory to convert it for the tensor cores")
            except ValueError as error:
                self._refuse_bsb(str(error))
        return self.has_bsb

    def _refuse_bsb(self, reason: str) -> None:
        self._bsb_refused = True
        _logger.warning("%r: %s; it stays with the CSR kernels", self, reason)

    @property
    def bsb(self) -> Bsb:
        """The structure in binary sparse blocks, for the tensor cores."""
        return self._of_pattern.get("bsb", self._bsb)

    def _bsb(self) -> Bsb:
        window_row: Tensor | None = None
        try:
            window_row = similar_rows(self, self.group_rows)
        except torch.OutOfMemoryError:
            _logger.warning("%r: not enough memory to group similar rows; their order stays", self)
        return Bsb.from_csr(self.row_once(), self.col, self.shape, window_row)

    @property
    def bsb_split(self) -> RowSplit:
        """Work list of the tensor-core kernels: windows cut into slices, of whole blocks but for the last."""
        return self._of_pattern.get(
            "bsb_split", lambda: self._slices(lengths.slice_blocks(self.bsb.num_blocks, self.gpu))
        )

    def _slices(self, blocks: int) -> RowSplit:
        quads = BLOCK // QUAD
        return RowSplit.from_rowptr(self.bsb.window_ptr, quads * blocks, step=quads)

    @property
    def bsb_runs(self) -> Tensor:
        """The same, with short windows joined to runs."""
        return self._of_pattern.get(
            "bsb_runs",
            lambda: join_short_windows(
                self.bsb.window_ptr, self.bsb_split, lengths.run_blocks(self.bsb.num_blocks, self.gpu)
            ),
        )

    def bsb_structure(self, *, valued: bool) -> Any:
        """The binary sparse blocks as the compiled kernels take them.

        Args:
            valued: with the place of every entry among the edge values.
        """
        return self._built.get(("bsb_structure", valued), lambda: self._bsb_structure(valued))

    def _bsb_structure(self, valued: bool) -> Any:
        return self._blocks(
            self.bsb_split,
            self.bsb_runs,
            # Found only now: most structures never meet edge values, and the places take 4 bytes an edge.
            self._of_pattern.get("quad_entry", self.bsb.quad_entry) if valued else None,
            self.bsb_value_id if valued else None,
        )

    @property
    def bsb_value_id(self) -> Tensor:
        """Position in the caller's edge order of every entry, (num_edges,), by quad, vector, row."""
        return self._built.get("bsb_value_id", self._bsb_value_id)

    def _bsb_value_id(self) -> Tensor:
        order = self.bsb.entry_order(self.row_once(), self.col)
        return order if self.edge_id is None else self.edge_id.index_select(0, order)

    @property
    def dense_place(self) -> Tensor:
        """Place of every entry among the values of dense vectors, (num_edges,), by quad, vector, row."""
        return self._of_pattern.get("dense_place", self._dense_place)

    def _dense_place(self) -> Tensor:
        place = self.bsb.dense_place()
        return place.int() if HEIGHT * self.bsb.num_vectors <= _INT32_MAX else place

    @property
    def sddmm_split(self) -> RowSplit:
        """As `bsb_split`, in the shorter slices that sddmm takes: it has no partial results to add."""
        return self._of_pattern.get(
            "sddmm_split",
            lambda: self._slices(lengths.sddmm_slice_blocks(self.bsb.num_blocks)),
        )

    @property
    def has_sddmm_structure(self) -> bool:
        """Whether `sddmm_structure` was built."""
        return "sddmm_starts" in self._of_pattern.results and "sorted_edge_id" in self._built.results

    def sddmm_structure(self) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        """The binary sparse blocks as the compiled sddmm takes them, and the starts of its slices.

        Returns:
            the structure; int32 (num_slots,) and int64 (num_slots, 8), see `slot_starts`; `sorted_edge_id`.
        """
        split = self.sddmm_split
        runs = self._of_pattern.get(
            "sddmm_runs",
            lambda: join_short_windows(
                self.bsb.window_ptr, split, lengths.sddmm_run_blocks(self.bsb.num_blocks, self.gpu)
            ),
        )
        structure = self._of_pattern.get("sddmm_structure", lambda: self._blocks(split, runs))
        starts = self._of_pattern.get("sddmm_starts", lambda: slot_starts(self.bsb, self.rowptr, split))
        return structure, *starts, self.sorted_edge_id

    @property
    def sorted_edge_id(self) -> Tensor | None:
        """As `edge_id`, with the entries of every row sorted by column, as the blocks hold them.

        Other orders within rows come from :meth:`from_csr`, from :meth:`from_coo` of edges whose rows ascend,
        and from layers' own structures.
        """
        return self._built.get("sorted_edge_id", lambda: (self._sorted_edge_id(),))[0]

    def _sorted_edge_id(self) -> Tensor | None:
        row = self.row_once()
        if bool(((self.col[1:] >= self.col[:-1]) | (row[1:] != row[:-1])).all()):
            return self.edge_id
        order = compress(row, self.col, *self.shape)[2]
        return order if self.edge_id is None else self.edge_id.index_select(0, order)

    def quad_vector(self) -> Tensor:
        """Number of vectors before every quad, int64 (num_quads,), for values as dense vectors."""
        return self._of_pattern.get("quad_vector", self.bsb.quad_vector)

    def _blocks(
        self, split: RowSplit, runs: Tensor, quad_entry: Tensor | None = None, value_id: Tensor | None = None
    ) -> Any:
        bsb = self.bsb
        return _C.BsbStructure(
            # Of the storage: an empty view has no address, yet the kernels read ahead, behind its end.
            bsb.quad.untyped_storage().data_ptr(),
            bsb.window_ptr.data_ptr(),
            0 if bsb.window_row is None else bsb.window_row.data_ptr(),
            0 if quad_entry is None else quad_entry.data_ptr(),
            0 if value_id is None else value_id.data_ptr(),
            value_id is not None and value_id.dtype == torch.int64,
            self.num_dst,
            split.slices.data_ptr(),
            split.slices.size(0),
            split.split_row.data_ptr(),
            split.split_ptr.data_ptr(),
            split.split_row.numel(),
            runs.data_ptr(),
            runs.size(0),
        )

    def vector_scale(self, scale_src: Tensor) -> Tensor:
        """Factor of every vector's column, float32 (num_quads, 4); kept for the last ``scale_src``."""
        kept = self._built.results.get("vector_scale")
        # Inference tensors have no version, and cannot be written outside inference mode either.
        version = 0 if scale_src.is_inference() else scale_src._version
        if kept is not None and kept[0]() is scale_src and kept[1] == version:
            return kept[2]
        with torch.inference_mode(False):
            result = scale_src.float()[self.bsb.col.long()]
        if torch.cuda.is_current_stream_capturing():
            return result  # recorded with the graph, and computed by every replay
        self._built.results["vector_scale"] = (weakref.ref(scale_src), version, result)
        return result
