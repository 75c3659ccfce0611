"""The storage of a SparseTensor: entries sorted by row, and properties derived from them on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency, scatter
from fastsparse_core.formats.compress import compress, sort_rows

Sizes = tuple[int | None, int | None]
#: Names of the derived properties, in the order of torch_sparse's constructor.
_CACHED = ("rowcount", "colptr", "colcount", "csr2csc", "csc2csr")
_LAYOUTS = ("coo", "csr", "csc")


class SparseStorage:
    """Entries sorted by (row, column).

    Args:
        row: int64 (nnz,), or None if ``rowptr`` is given.
        rowptr: int64 (num_rows + 1,), or None if ``row`` is given.
        col: int64 (nnz,).
        value: values of the entries, (nnz, ...), or None.
        sparse_sizes: (num_rows, num_cols); None: the smallest sizes that contain all entries.
        rowcount: number of entries per row, int64 (num_rows,); None: computed on first use.
        colptr: column pointers, int64 (num_cols + 1,); None: computed on first use.
        colcount: number of entries per column, int64 (num_cols,); None: computed on first use.
        csr2csc: permutation that sorts entries by (column, row), int64 (nnz,); None: computed on first use.
        csc2csr: the inverse of ``csr2csc``, int64 (nnz,); None: computed on first use.
        is_sorted: whether the given entries are sorted by (row, column).
        trust_data: whether to skip the check of the indices.
    """

    _rowcount: Tensor | None  # properties, set at the end of this module
    _colcount: Tensor | None

    def __init__(
        self,
        row: Tensor | None = None,
        rowptr: Tensor | None = None,
        col: Tensor | None = None,
        value: Tensor | None = None,
        sparse_sizes: Sizes | None = None,
        rowcount: Tensor | None = None,
        colptr: Tensor | None = None,
        colcount: Tensor | None = None,
        csr2csc: Tensor | None = None,
        csc2csr: Tensor | None = None,
        is_sorted: bool = False,
        trust_data: bool = False,
    ) -> None:
        if col is None or (row is None and rowptr is None):
            raise ValueError("row, rowptr and col: expected col, and either row or rowptr, got None")
        for name, index in (("row", row), ("rowptr", rowptr), ("col", col)):
            if index is not None and (index.dtype != torch.int64 or index.dim() != 1):
                raise ValueError(f"{name}: expected int64 of one dimension, got {index.dtype} {index.shape}")
        given = sparse_sizes or (None, None)
        num_rows = given[0] if given[0] is not None else _rows_needed(row, rowptr)
        num_cols = given[1] if given[1] is not None else _most(col)
        if not trust_data:
            _check("row", row, num_rows)
            _check("col", col, num_cols)
        self._sparse_sizes = (int(num_rows), int(num_cols))
        self._row = None if row is None else row.contiguous()
        self._rowptr = None if rowptr is None else rowptr.contiguous()
        self._col = col.contiguous()
        self._value = None if value is None else value.to(col.device).contiguous()
        self._cache: dict[str, Any] = {
            "rowcount": rowcount,
            "colptr": colptr,
            "colcount": colcount,
            "csr2csc": csr2csc,
            "csc2csr": csc2csr,
        }
        if not is_sorted and row is not None:
            self._sort()

    def _sort(self) -> None:
        row = self.row()
        key = row * self._sparse_sizes[1] + self._col
        if not bool((key[1:] >= key[:-1]).all()):
            rowptr, _, order = compress(row, self._col, *self._sparse_sizes)
            order = order.long()
            self._row, self._col, self._rowptr = row[order], self._col[order], rowptr
            self._value = None if self._value is None else self._value[order]
            self._cache = dict.fromkeys(_CACHED)

    @classmethod
    def empty(cls) -> SparseStorage:
        """A storage without entries, rows and columns."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, None, none, None, (0, 0), is_sorted=True, trust_data=True)

    # ---------------------------------------------------------------- copies

    def _with(self, **changes: Any) -> SparseStorage:
        """Returns a storage with some fields changed. Both storages share the cache unless it is changed."""
        other = SparseStorage.__new__(SparseStorage)
        other.__dict__ = {**self.__dict__, **changes}
        return other

    def apply(self, change: Callable[[Tensor], Tensor], value_too: bool = True) -> SparseStorage:
        """A storage with ``change`` applied to every index tensor and, if ``value_too``, to the value."""

        def changed(item: Any) -> Any:
            return change(item) if isinstance(item, Tensor) else None

        return self._with(
            _row=changed(self._row),
            _rowptr=changed(self._rowptr),
            _col=changed(self._col),
            _value=changed(self._value) if value_too else self._value,
            _cache={name: changed(item) for name, item in self._cache.items()},
        )

    def apply_value(self, change: Callable[[Tensor], Tensor]) -> SparseStorage:
        """A storage with ``change`` applied to the value, if it has one."""
        return self if self._value is None else self._with(_value=change(self._value))

    def copy(self) -> SparseStorage:
        """A shallow copy, which shares the tensors."""
        return self._with()

    def clone(self) -> SparseStorage:
        """A copy of the storage and all its tensors."""
        return self.apply(lambda tensor: tensor.clone())

    # ---------------------------------------------------------------- entries

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._col.device

    def has_row(self) -> bool:
        """True if the row of every entry is already computed."""
        return self._row is not None

    def row(self) -> Tensor:
        """Row of every entry, int64 (nnz,)."""
        if self._row is None:
            assert self._rowptr is not None
            rows = torch.arange(self._sparse_sizes[0], device=self.device)
            self._row = torch.repeat_interleave(rows, self._rowptr.diff(), output_size=self._col.numel())
        return self._row

    def has_rowptr(self) -> bool:
        """True if the row pointers are already computed."""
        return self._rowptr is not None

    def rowptr(self) -> Tensor:
        """Row pointers, int64 (num_rows + 1,)."""
        if self._rowptr is None:
            assert self._row is not None
            self._rowptr = torch._convert_indices_from_coo_to_csr(self._row, self._sparse_sizes[0])
        return self._rowptr

    def col(self) -> Tensor:
        """Column of every entry, int64 (nnz,)."""
        return self._col

    def has_value(self) -> bool:
        """True if the entries have values."""
        return self._value is not None

    def value(self) -> Tensor | None:
        """Values in the order of the entries, (nnz, ...); None for a matrix without values."""
        return self._value

    def set_value_(self, value: Tensor | None, layout: str | None = None) -> SparseStorage:
        """Replaces the values, given in row order, or in column order with layout "csc"."""
        if layout is not None and layout not in _LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(map(repr, _LAYOUTS))}, got {layout!r}")
        if value is not None:
            if value.size(0) != self._col.numel():
                raise ValueError(
                    f"value: expected {self._col.numel()} rows, one per entry, got shape {value.shape}"
                )
            value = value.to(self.device)
            value = (value[self.csc2csr()] if layout == "csc" else value).contiguous()
        self._value = value
        return self

    def set_value(self, value: Tensor | None, layout: str | None = None) -> SparseStorage:
        """The same entries with other values."""
        return self.copy().set_value_(value, layout)

    # ---------------------------------------------------------------- sizes

    def sparse_sizes(self) -> tuple[int, int]:
        """(num_rows, num_cols)."""
        return self._sparse_sizes

    def sparse_size(self, dim: int) -> int:
        """Number of rows (dim=0) or columns (dim=1)."""
        return self._sparse_sizes[dim]

    def sparse_resize(self, sparse_sizes: tuple[int, int]) -> SparseStorage:
        """A matrix of another size with the same entries. Raises an error if an entry would be outside."""
        rows, cols = sparse_sizes
        other = SparseStorage(
            self.row(), None, self._col, self._value, (rows, cols), is_sorted=True, trust_data=False
        )
        other._cache["csr2csc"], other._cache["csc2csr"] = self._cache["csr2csc"], self._cache["csc2csr"]
        return other

    def sparse_reshape(self, num_rows: int, num_cols: int) -> SparseStorage:
        """The matrix reshaped in row-major order, like ``Tensor.reshape``; one size may be -1."""
        rows, cols = self._sparse_sizes
        total = rows * cols
        sizes = [
            total // other if size == -1 and other > 0 else size
            for size, other in ((num_rows, num_cols), (num_cols, num_rows))
        ]
        if min(sizes) < 0 or sizes[0] * sizes[1] != total:
            raise ValueError(
                f"num_rows * num_cols must be {total} (now {rows} x {cols}), got {num_rows} x {num_cols}; "
                "pass -1 for one of them"
            )
        position = self.row() * cols + self._col
        row, col = position // max(sizes[1], 1), position % max(sizes[1], 1)
        return SparseStorage(
            row, None, col, self._value, (sizes[0], sizes[1]), is_sorted=True, trust_data=True
        )

    # ---------------------------------------------------------------- derived properties

    def _kept(self, name: str, build: Callable[[], Any]) -> Any:
        if self._cache.get(name) is None:
            self._cache[name] = build()
        return self._cache[name]

    def rowcount(self) -> Tensor:
        """Number of entries per row, int64 (num_rows,)."""
        count: Tensor = self._kept("rowcount", lambda: self.rowptr().diff())
        return count

    def colcount(self) -> Tensor:
        """Number of entries per column, int64 (num_cols,)."""
        count: Tensor = self._kept("colcount", lambda: self.colptr().diff())
        return count

    def colptr(self) -> Tensor:
        """Column pointers, int64 (num_cols + 1,)."""
        self._by_column()
        pointers: Tensor = self._cache["colptr"]
        return pointers

    def csr2csc(self) -> Tensor:
        """Permutation that sorts the entries by (column, row), int64 (nnz,)."""
        self._by_column()
        order: Tensor = self._cache["csr2csc"]
        return order

    def csc2csr(self) -> Tensor:
        """The inverse of :meth:`csr2csc`, int64 (nnz,)."""

        def inverse() -> Tensor:
            order = self.csr2csc()
            return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=self.device))

        order: Tensor = self._kept("csc2csr", inverse)
        return order

    def _by_column(self) -> None:
        if self._cache.get("colptr") is None or self._cache.get("csr2csc") is None:
            colptr, order = sort_rows(self._col, self._sparse_sizes[1])
            self._cache["colptr"], self._cache["csr2csc"] = colptr, order.long()

    def adjacency(self) -> Adjacency:
        """The structure that products use. Storages that differ only in their values share it."""
        if not isinstance(self._cache.get("adjacency"), Adjacency):
            with torch.inference_mode(False):
                self._cache["adjacency"] = Adjacency.from_csr(self.rowptr(), self._col, self._sparse_sizes)
        adjacency: Adjacency = self._cache["adjacency"]
        return adjacency

    # ---------------------------------------------------------------- repeated entries

    def is_coalesced(self) -> bool:
        """True if all entries have different positions."""
        row, col = self.row(), self._col
        return not bool(((row[1:] == row[:-1]) & (col[1:] == col[:-1])).any())

    def coalesce(self, reduce: str = "add") -> SparseStorage:
        """Merges entries at the same position; their values are reduced."""
        row, col = self.row(), self._col
        first = torch.ones_like(col, dtype=torch.bool)
        first[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
        if bool(first.all()):
            return self
        value = self._value
        if value is not None:
            name: Any = {"add": "sum"}.get(reduce, reduce)
            value = scatter(value, first.cumsum(0) - 1, int(first.sum()), name)
        return SparseStorage(
            row[first], None, col[first], value, self._sparse_sizes, is_sorted=True, trust_data=True
        )

    # ---------------------------------------------------------------- the cache by name

    def fill_cache_(self) -> SparseStorage:
        """Computes all derived properties now."""
        self.row(), self.rowptr(), self.rowcount(), self.colcount(), self.csc2csr()
        return self

    def clear_cache_(self) -> SparseStorage:
        """Drops the derived properties."""
        self._cache = dict.fromkeys(_CACHED)
        return self

    def cached_keys(self) -> list[str]:
        """Names of the derived properties that are computed already."""
        return [name for name in _CACHED if self._cache.get(name) is not None]

    def num_cached_keys(self) -> int:
        """Number of derived properties that are computed already."""
        return len(self.cached_keys())

    def __getstate__(self) -> dict[str, Any]:
        cache = {name: self._cache.get(name) for name in _CACHED}
        return {**self.__dict__, "_cache": cache}

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseStorage:
        other = memo[id(self)] = self.clone()
        return other

    def __repr__(self) -> str:
        return f"SparseStorage(nnz={self._col.numel()}, sparse_sizes={self._sparse_sizes})"


def _kept(name: str) -> property:
    return property(lambda self: self._cache.get(name))


def _has(name: str) -> Callable[[SparseStorage], bool]:
    return lambda self: self._cache.get(name) is not None


for _name in _CACHED:  # torch_sparse has these attributes and methods, and user code reads them
    setattr(SparseStorage, f"_{_name}", _kept(_name))
    setattr(SparseStorage, f"has_{_name}", _has(_name))


def _most(index: Tensor) -> int:
    return int(index.max()) + 1 if index.numel() else 0


def _rows_needed(row: Tensor | None, rowptr: Tensor | None) -> int:
    if rowptr is not None:
        return rowptr.numel() - 1
    assert row is not None
    return _most(row)


def _check(name: str, index: Tensor | None, size: int) -> None:
    if index is not None and index.numel() and int(index.max()) >= size:
        raise ValueError(f"{name}: expected indices below {size}, got {int(index.max())}")
