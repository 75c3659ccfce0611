"""Rows grouped into segments by an index or row pointers, in the form that segment kernels read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import _C, gpu
from fastsparse_core.content import check_content
from fastsparse_core.formats.compress import INT32_MAX, sort_rows
from fastsparse_core.formats.index_sort import sort_index
from fastsparse_core.formats.inspection import inspect_edges, inspect_rows
from fastsparse_core.formats.lengths import slice_length
from fastsparse_core.formats.row_split import RowSplit, addresses_of, split_rows
from fastsparse_core.log import range_text
from fastsparse_core.structure.build_once import built_results
from fastsparse_core.structure.construction import check_shape, rows_of_pointers
from fastsparse_core.structure.storage import send_copies

#: Bit lengths of (number of rows, number of segments) of indices on a GPU that were not ascending. The next
#: index with these bit lengths is sorted without waiting for the check of its order. If it turns out to
#: ascend, its bit lengths are removed.
_unsorted: set[tuple[int, int]] = set()


class Segments:
    """The rows of a matrix, grouped into segments.

    Attributes:
        rowptr: segment i has the entries ``rowptr[i]`` to ``rowptr[i + 1] - 1``, int64 (num_segments + 1,).
        order: row of the matrix for every entry, int32 or int64 (num_rows,); None: entry i is row i.
        num_segments: number of segments.
        num_rows: number of rows of the matrix; each belongs to one segment.
        facts: address of the results of the sort (`index_sort`) on the device, while the host has not read
            them. `row_split` then has its largest possible length. 0 for all other segments.
    """

    facts = 0

    def __init__(
        self, rowptr: Tensor, order: Tensor | None, num_rows: int, row_split: RowSplit | None = None
    ) -> None:
        """Stores tensors without checking or copying them."""
        self.rowptr = rowptr
        self.order = order
        self.num_rows = num_rows
        self.num_segments = rowptr.numel() - 1
        self._built = built_results()
        if row_split is not None:
            self._built.results["row_split"] = row_split

    @classmethod
    def from_index(
        cls, index: Tensor, num_segments: int, meanwhile: Callable[[Segments], None] | None = None
    ) -> Segments:
        """Makes segments of an index, by a stable sort. An ascending index needs no sort.

        Args:
            index: segment of every row, int32 or int64 (num_rows,).
            num_segments: number of segments.
            meanwhile: function that this method may call with the segments while the device still sorts the
                index. The function may launch only reductions. Their results are invalid if this method
                raises an error.

        Raises:
            ValueError: an index is negative or too large.
        """
        index = index.detach().contiguous()
        num_rows = index.numel()
        is_sorted_there = index.is_cuda and num_rows <= INT32_MAX and num_segments <= INT32_MAX
        if is_sorted_there and _kind(num_rows, num_segments) in _unsorted:
            segments = cls._of_unsorted(index, num_segments, meanwhile)
            if segments is not None:
                return segments
        longest = slice_length(num_rows, gpu.profile_of(index.device))
        found = inspect_edges(index, index, num_segments, longest, square=False)
        if num_rows and found.most_row >= num_segments:
            low, high = (int(end) for end in torch.aminmax(index))
            raise ValueError(
                f"index: expected values from 0 to dim_size - 1 = {num_segments - 1}, "
                f"{range_text(low, high)}; leave dim_size out to have as many segments as the index needs"
            )
        if not found.rows_descend:
            return cls(found.rowptr, None, num_rows, found.row_split)
        del found
        if is_sorted_there:
            _unsorted.add(_kind(num_rows, num_segments))
            segments = cls._of_unsorted(index, num_segments, meanwhile)
            assert segments is not None
            return segments
        return cls(*sort_rows(index, num_segments), num_rows)

    @classmethod
    def _of_unsorted(
        cls, index: Tensor, num_segments: int, meanwhile: Callable[[Segments], None] | None
    ) -> Segments | None:
        """Sorts an index on a GPU before its values are checked; returns None if a value is out of range."""
        check_content("index", index)
        num_rows = index.numel()
        # `sort.wait()` is the only read from the device. Work that does not depend on the read is launched
        # before it.
        sort = sort_index(index, num_segments, slice_length(num_rows, gpu.profile_of(index.device)))
        if meanwhile is not None:
            unseen = cls(sort.rowptr, sort.order, num_rows, sort.workspace)
            unseen.facts = sort.facts_address
            meanwhile(unseen)
        found = sort.wait()
        if found.num_entries != num_rows:
            return None
        if not found.descends:
            _unsorted.discard(_kind(num_rows, num_segments))
        made = cls(sort.rowptr, sort.order if found.descends else None, num_rows, found.row_split)
        if meanwhile is not None:  # built now, because the next call may be captured
            made._built.get("structure", made._structure)
        return made

    @classmethod
    def from_rowptr(cls, rowptr: Tensor, num_rows: int) -> Segments:
        """Makes segments of consecutive rows from row pointers.

        Args:
            rowptr: int32 or int64 (num_segments + 1,), ascending from 0 to ``num_rows``.
            num_rows: number of rows.

        Raises:
            ValueError: the pointers do not ascend, or do not cover all rows.
        """
        check_content("rowptr", rowptr)
        own = rowptr.detach().to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        descends = (own.diff() < 0).any()
        first, last, falls = torch.stack([own[0], own[-1], descends.long()]).tolist()
        if first != 0 or last != num_rows or falls:
            raise ValueError(
                f"rowptr: expected ascending values from 0 to {num_rows}, the number of rows of src; "
                f"got {first} to {last}" + (", not ascending" if falls else "")
            )
        return cls(own, None, num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"rowptr": self.rowptr, "order": self.order, "num_rows": self.num_rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores pickled segments, and checks them, because files may be damaged and kernels check nothing.

        Raises:
            ValueError: a part is missing, or some row does not belong to exactly one segment.
        """
        try:
            rowptr, order, num_rows = state["rowptr"], state["order"], state["num_rows"]
            if rowptr.dtype != torch.int64 or rowptr.dim() != 1:
                raise TypeError(f"rowptr: expected 1-D int64, got {rowptr.dtype} {tuple(rowptr.shape)}")
            if order is None:
                rowptr = Segments.from_rowptr(rowptr, num_rows).rowptr
            else:
                shape = check_shape((max(rowptr.numel() - 1, 0), num_rows))
                rowptr = rows_of_pointers(rowptr, order, shape, order, num_values=num_rows, copy=False).rowptr
                if order.numel() != num_rows:
                    raise ValueError(f"order: expected {num_rows} rows, got {order.numel()}")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"expected intact pickled segments, got damaged ones ({error}); make them again"
            ) from error
        Segments.__init__(self, rowptr, order, num_rows)

    @property
    def row_split(self) -> RowSplit:
        """Work list of the CUDA kernels: long segments cut into slices."""
        return self._built.get("row_split", self._row_split)

    def _row_split(self) -> RowSplit:
        longest = slice_length(self.num_rows, gpu.profile_of(self.rowptr.device))
        if self.order is not None and self.order.dtype == torch.int32:
            found = inspect_rows(self.rowptr, self.order, None, longest, copy=False).row_split
            if found is not None:
                return found
        return split_rows(self.rowptr, longest)

    @property
    def count(self) -> Tensor:
        """Number of rows of every segment, at least 1, int64 (num_segments,): the divisor of a mean."""
        return self._built.get("count", lambda: self.rowptr.diff().clamp_(min=1))

    @property
    def structure(self) -> Any:
        """The segments as the compiled kernels take them."""
        return self._built.results.get("structure") or self._built.get("structure", self._structure)

    def _structure(self) -> Any:
        split = self.row_split if self.rowptr.device.type == "cuda" else None
        slices, num_slices, split_row, split_ptr, num_split_rows = addresses_of(split)
        return _C.CsrStructure(
            rowptr=self.rowptr,
            col=None,
            edge_id=self.order,
            edge_id_is_64bit=self.order is not None and self.order.dtype == torch.int64,
            num_rows=self.num_segments,
            num_cols=self.num_rows,
            num_edges=self.num_rows,
            slices=slices,
            num_slices=num_slices,
            split_row=split_row,
            split_ptr=split_ptr,
            num_split_rows=num_split_rows,
        )

    def index(self) -> Tensor:
        """The segment of every row, int64 (num_rows,). Only for segments of consecutive rows."""
        assert self.order is None
        return self._built.get("index", self._index)

    def _index(self) -> Tensor:
        segment = torch.arange(self.num_segments, device=self.rowptr.device)
        return torch.repeat_interleave(segment, self.rowptr.diff(), output_size=self.num_rows)

    def memory_usage(self) -> dict[str, int]:
        """Bytes of the stored tensors, by name."""
        built = self._built.results
        tensors = {"rowptr": self.rowptr, "order": self.order}
        tensors |= {name: built.get(name) for name in ("index", "count")}
        split = built.get("row_split")
        if split is not None:
            tensors |= split.tensors()
        return {name: it.nbytes for name, it in tensors.items() if it is not None}


send_copies(Segments)


def _kind(num_rows: int, num_segments: int) -> tuple[int, int]:
    return num_rows.bit_length(), num_segments.bit_length()
