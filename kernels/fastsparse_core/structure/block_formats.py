"""Formats of a structure for tensor-core kernels: binary sparse blocks and work lists, each built once."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C
from fastsparse_core.formats import lengths
from fastsparse_core.formats.bsb import BLOCK, HEIGHT, MOST_COLUMNS, QUAD, Bsb
from fastsparse_core.formats.compress import compress
from fastsparse_core.formats.grouping import Method
from fastsparse_core.formats.grouping import group_rows as similar_rows
from fastsparse_core.formats.row_split import RowSplit, addresses_of
from fastsparse_core.formats.window_work_list import join_short_windows, slot_starts
from fastsparse_core.structure.build_once import BuiltOnce
from fastsparse_core.structure.degrees import Degrees

_logger = logging.getLogger("fastsparse_core")
_INT32_MAX = 2**31 - 1
#: Bytes per entry that the conversion to blocks allocates: rows, and two sorts of 64-bit keys.
_CONVERSION_BYTES = 48
#: A conversion that allocates at most this number of bytes is tried without asking for the free memory.
_FEW_BYTES = 2**30
#: A larger conversion may allocate this share of the free memory.
_SHARE_OF_FREE = 0.5


def _free_bytes(device: torch.device) -> float:
    """Bytes that PyTorch can still allocate on a GPU; unlimited on the CPU."""
    if device.type != "cuda":
        return float("inf")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


class BlockFormats(Degrees):
    """The part of :class:`fastsparse_core.Adjacency` for kernels on tensor-core blocks.

    Attributes:
        group_rows: which rows share a window of the binary sparse blocks.
    """

    group_rows: Method
    _of_pattern: BuiltOnce
    _bsb_refused: bool

    @property
    def has_bsb(self) -> bool:
        """True if the binary sparse blocks were built."""
        return "bsb" in self._of_pattern.results

    @property
    def can_convert(self) -> bool:
        """True if the conversion to binary sparse blocks has not failed yet."""
        return not self._bsb_refused

    def try_bsb(self) -> bool:
        """Builds the binary sparse blocks if possible; returns True if they exist.

        If memory is too small, or the structure has too many vectors or sources, the CSR kernels are used. If
        the reason is memory or the number of vectors, it is logged once, and the conversion is not tried
        again.
        """
        if not self.has_bsb and not self._bsb_refused and self.num_src <= MOST_COLUMNS:
            needed = self.num_edges * _CONVERSION_BYTES
            if needed > _FEW_BYTES and needed > _SHARE_OF_FREE * _free_bytes(self.col.device):
                self._refuse_bsb(
                    "converting the structure for the tensor cores would take most of the free memory"
                )
                return False
            try:
                self.bsb  # noqa: B018
            except torch.OutOfMemoryError:
                self._refuse_bsb("not enough memory to convert the structure for the tensor cores")
            except ValueError as error:
                self._refuse_bsb(str(error))
        return self.has_bsb

    def _refuse_bsb(self, reason: str) -> None:
        self._bsb_refused = True
        _logger.warning("%r: %s, so the CSR kernels are used", self, reason)

    @property
    def bsb(self) -> Bsb:
        """The structure in binary sparse blocks, for the tensor cores."""
        return self._of_pattern.get("bsb", self._bsb)

    def _bsb(self) -> Bsb:
        window_row: Tensor | None = None
        try:
            window_row = similar_rows(self, self.group_rows)
        except torch.OutOfMemoryError:
            _logger.warning(
                "%r: not enough memory to group similar rows, so windows have consecutive rows", self
            )
        return Bsb.from_csr(self.row_once(), self.col, self.shape, window_row)

    @property
    def bsb_split(self) -> RowSplit:
        """Work list of the tensor-core kernels: windows cut into slices of whole blocks."""
        return self._of_pattern.get(
            "bsb_split", lambda: self._slices(lengths.slice_blocks(self.bsb.num_blocks, self.gpu))
        )

    def _slices(self, blocks: int) -> RowSplit:
        quads = BLOCK // QUAD
        return RowSplit.from_rowptr(self.bsb.window_ptr, quads * blocks, step=quads)

    @property
    def bsb_runs(self) -> Tensor:
        """Like `bsb_split`, with short windows joined to runs."""
        return self._of_pattern.get(
            "bsb_runs",
            lambda: join_short_windows(
                self.bsb.window_ptr, self.bsb_split, lengths.run_blocks(self.bsb.num_blocks, self.gpu)
            ),
        )

    def bsb_structure(self, *, valued: bool) -> Any:
        """The binary sparse blocks in the form that the compiled kernels take.

        Args:
            valued: if True, includes the position of every entry among the edge values.
        """
        return self._built.get(("bsb_structure", valued), lambda: self._bsb_structure(valued))

    def _bsb_structure(self, valued: bool) -> Any:
        return self._blocks(
            self.bsb_split,
            self.bsb_runs,
            # Computed on demand: most structures are never used with edge values, and the positions take 4
            # bytes per edge.
            self._of_pattern.get("quad_entry", self.bsb.quad_entry) if valued else None,
            self.bsb_value_id if valued else None,
        )

    @property
    def bsb_value_id(self) -> Tensor:
        """Position of every entry in the caller's edge order, int32 or int64 (num_edges,).

        The entries are sorted by quad, then by vector, then by row.
        """
        return self._built.get("bsb_value_id", self._bsb_value_id)

    def _bsb_value_id(self) -> Tensor:
        order = self.bsb.entry_order(self.row_once(), self.col)
        return order if self.edge_id is None else self.edge_id.index_select(0, order)

    @property
    def dense_place(self) -> Tensor:
        """Position of every entry among the values of dense vectors, int32 or int64 (num_edges,).

        The entries are sorted by quad, then by vector, then by row.
        """
        return self._of_pattern.get("dense_place", self._dense_place)

    def _dense_place(self) -> Tensor:
        place = self.bsb.dense_place()
        return place.int() if HEIGHT * self.bsb.num_vectors <= _INT32_MAX else place

    @property
    def sddmm_split(self) -> RowSplit:
        """Like `bsb_split`, with shorter slices, which cost sddmm nothing: it adds no partial results."""
        return self._of_pattern.get(
            "sddmm_split",
            lambda: self._slices(lengths.sddmm_slice_blocks(self.bsb.num_blocks)),
        )

    @property
    def has_sddmm_structure(self) -> bool:
        """True if `sddmm_structure` was built."""
        return "sddmm_starts" in self._of_pattern.results and "sorted_edge_id" in self._built.results

    def sddmm_structure(self) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        """The binary sparse blocks in the form that the compiled sddmm takes, and the starts of its slices.

        Returns:
            The structure; the two results of `slot_starts`; and `sorted_edge_id`.
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
        """Like `edge_id`, for the entries of every row sorted by column, which is their order in the blocks.

        Rows of a structure may have another order: after :meth:`from_csr`, after :meth:`from_coo` of edges
        whose rows ascend, and in structures that layers build.
        """
        return self._built.get("sorted_edge_id", lambda: (self._sorted_edge_id(),))[0]

    def _sorted_edge_id(self) -> Tensor | None:
        row = self.row_once()
        if bool(((self.col[1:] >= self.col[:-1]) | (row[1:] != row[:-1])).all()):
            return self.edge_id
        order = compress(row, self.col, *self.shape)[2]
        return order if self.edge_id is None else self.edge_id.index_select(0, order)

    def quad_vector(self) -> Tensor:
        """Number of vectors before every quad, int64 (num_quads,), for values stored as dense vectors."""
        return self._of_pattern.get("quad_vector", self.bsb.quad_vector)

    def _blocks(
        self, split: RowSplit, runs: Tensor, quad_entry: Tensor | None = None, value_id: Tensor | None = None
    ) -> Any:
        bsb = self.bsb
        slices, num_slices, split_row, split_ptr, num_split_rows = addresses_of(split)
        return _C.BsbStructure(
            # The address of the storage: an empty view has no address, but kernels read a few quads past the
            # end of the view.
            quad=bsb.quad.untyped_storage().data_ptr(),
            window_ptr=bsb.window_ptr,
            window_row=bsb.window_row,
            quad_entry=quad_entry,
            value_id=value_id,
            value_id_is_64bit=value_id is not None and value_id.dtype == torch.int64,
            num_rows=self.num_dst,
            slices=slices,
            num_slices=num_slices,
            split_row=split_row,
            split_ptr=split_ptr,
            num_split_rows=num_split_rows,
            runs=runs,
            num_runs=runs.size(0),
        )

    def vector_scale(self, scale_src: Tensor) -> Tensor:
        """Factor of every vector's column, float32 (num_quads, 4); cached for the last ``scale_src``.

        Args:
            scale_src: floating (num_src,), a factor for every source.
        """
        kept = self._built.results.get("vector_scale")
        # Inference tensors have no version counter, so changes of their content would not be noticed.
        version = None if scale_src.is_inference() else scale_src._version
        if kept is not None and version is not None and kept[0]() is scale_src and kept[1] == version:
            return kept[2]
        with torch.inference_mode(False):
            result = scale_src.float()[self.bsb.col.long()]
        # Memory of a captured CUDA graph is written by replays.
        if version is not None and not torch.cuda.is_current_stream_capturing():
            self._built.results["vector_scale"] = (weakref.ref(scale_src), version, result)
        return result
