"""The class SparseTensor: construction, formats, devices and dtypes. Other modules have its operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_pyg.compat.torch_sparse import diagonal, elementwise, missing, products, selection
from fastsparse_pyg.compat.torch_sparse.storage import Sizes, SparseStorage

_CASTS = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}


class SparseTensor:
    """torch_sparse's SparseTensor, a matrix with entries sorted by row; FastSparse's kernels multiply it.

    Args:
        row: int64 (nnz,), or None if ``rowptr`` is given.
        rowptr: int64 (num_rows + 1,), or None if ``row`` is given.
        col: int64 (nnz,).
        value: values of the entries, (nnz, ...), or None.
        sparse_sizes: (num_rows, num_cols); None: the smallest sizes that contain all entries.
        is_sorted: whether the given entries are sorted by (row, col).
        trust_data: whether to skip the check of the indices.
    """

    storage: SparseStorage

    def __init__(
        self,
        row: Tensor | None = None,
        rowptr: Tensor | None = None,
        col: Tensor | None = None,
        value: Tensor | None = None,
        sparse_sizes: Sizes | None = None,
        is_sorted: bool = False,
        trust_data: bool = False,
    ) -> None:
        self.storage = SparseStorage(
            row, rowptr, col, value, sparse_sizes, is_sorted=is_sorted, trust_data=trust_data
        )

    # ---------------------------------------------------------------- construction

    @classmethod
    def from_storage(cls, storage: SparseStorage) -> SparseTensor:
        """Wraps a storage."""
        out = cls.__new__(cls)
        out.storage = storage
        return out

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        sparse_sizes: Sizes | None = None,
        is_sorted: bool = False,
        trust_data: bool = False,
    ) -> SparseTensor:
        """The matrix of an edge index: ``edge_index[0]`` are the rows, ``edge_index[1]`` the columns."""
        return cls(edge_index[0], None, edge_index[1], edge_attr, sparse_sizes, is_sorted, trust_data)

    @classmethod
    def from_dense(cls, mat: Tensor, has_value: bool = True) -> SparseTensor:
        """The entries of a matrix (M, N, ...) that are not 0."""
        place = mat if mat.dim() <= 2 else mat.abs().flatten(2).sum(2)
        row, col = place.nonzero().t().contiguous()
        value = mat[row, col] if has_value else None
        return cls(row, None, col, value, (mat.size(0), mat.size(1)), True, True)

    @classmethod
    def from_torch_sparse_coo_tensor(cls, mat: Tensor, has_value: bool = True) -> SparseTensor:
        """The entries of a ``torch.sparse_coo`` tensor, coalesced; differentiable in its values."""
        mat = mat.coalesce()
        row, col = mat._indices()
        value = mat.values() if has_value else None
        return cls(row, None, col, value, (mat.size(0), mat.size(1)), True, True)

    @classmethod
    def from_torch_sparse_csr_tensor(cls, mat: Tensor, has_value: bool = True) -> SparseTensor:
        """The entries of a ``torch.sparse_csr`` tensor."""
        value = mat.values() if has_value else None
        pointers, col = mat.crow_indices().long(), mat.col_indices().long()
        return cls(None, pointers, col, value, (mat.size(0), mat.size(1)), True, True)

    @classmethod
    def from_scipy(cls, mat: Any, has_value: bool = True) -> SparseTensor:
        """The entries of a scipy.sparse matrix."""
        mat = mat.tocsr().sorted_indices()
        value = torch.from_numpy(mat.data) if has_value else None
        pointers, col = (torch.from_numpy(part).long() for part in (mat.indptr, mat.indices))
        return cls(None, pointers, col, value, mat.shape, True, True)

    @classmethod
    def eye(
        cls,
        M: int,
        N: int | None = None,
        has_value: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        fill_cache: bool = False,
    ) -> SparseTensor:
        """The identity matrix, (M, N)."""
        N = M if N is None else N
        index = torch.arange(min(M, N), device=device)
        value = torch.ones(index.numel(), dtype=dtype, device=device) if has_value else None
        out = cls(index, None, index, value, (M, N), True, True)
        return out.fill_cache_() if fill_cache else out

    # ---------------------------------------------------------------- formats

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tuple (row, col, value)."""
        return self.storage.row(), self.storage.col(), self.storage.value()

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tuple (rowptr, col, value)."""
        return self.storage.rowptr(), self.storage.col(), self.storage.value()

    def csc(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tuple (colptr, row, value), sorted by column."""
        order, value = self.storage.csr2csc(), self.storage.value()
        return self.storage.colptr(), self.storage.row()[order], None if value is None else value[order]

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense matrix."""
        row, col, value = self.coo()
        if value is not None and dtype is None:
            dtype = value.dtype
        out = torch.zeros(self.sizes(), dtype=dtype, device=self.device())
        if value is None:
            out[row, col] = 1
            return out
        return out.index_put((row, col), value.to(out.dtype), accumulate=True)

    def _values(self, dtype: torch.dtype | None) -> Tensor:
        value = self.storage.value()
        if value is None:
            return torch.ones(self.nnz(), dtype=dtype, device=self.device())
        return value if dtype is None else value.to(dtype)

    def to_torch_sparse_coo_tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix as a ``torch.sparse_coo`` tensor."""
        row, col, _ = self.coo()
        return torch.sparse_coo_tensor(
            torch.stack([row, col]), self._values(dtype), self.sizes(), check_invariants=False
        )

    def to_torch_sparse_csr_tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix as a ``torch.sparse_csr`` tensor."""
        rowptr, col, _ = self.csr()
        return torch.sparse_csr_tensor(rowptr, col, self._values(dtype), self.sizes(), check_invariants=False)

    def to_torch_sparse_csc_tensor(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix as a ``torch.sparse_csc`` tensor."""
        colptr, row, _ = self.csc()
        values = self._values(dtype)[self.storage.csr2csc()]
        return torch.sparse_csc_tensor(colptr, row, values, self.sizes(), check_invariants=False)

    def to_scipy(self, layout: str | None = None, dtype: torch.dtype | None = None) -> Any:
        """The matrix as a ``scipy.sparse`` matrix in layout "coo" (the default), "csr" or "csc"."""
        import scipy.sparse  # type: ignore[import-untyped]

        row, col, _ = (None if part is None else part.detach().cpu().numpy() for part in self.coo())
        value = self._values(dtype).detach().cpu().numpy()
        matrix = scipy.sparse.coo_matrix((value, (row, col)), self.sparse_sizes())
        return matrix if layout in (None, "coo") else matrix.asformat(layout)

    # ---------------------------------------------------------------- properties

    def sparse_sizes(self) -> tuple[int, int]:
        """(num_rows, num_cols)."""
        return self.storage.sparse_sizes()

    def sparse_size(self, dim: int) -> int:
        """Number of rows (dim=0) or columns (dim=1)."""
        return self.storage.sparse_size(dim)

    def sizes(self) -> list[int]:
        """Number of rows, number of columns, then the shape of a value."""
        value = self.storage.value()
        return [*self.sparse_sizes(), *(value.shape[1:] if value is not None else ())]

    def size(self, dim: int) -> int:
        """One of :meth:`sizes`."""
        return self.sizes()[dim]

    @property
    def shape(self) -> list[int]:
        """The same as :meth:`sizes`."""
        return self.sizes()

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes())

    def nnz(self) -> int:
        """Number of entries."""
        return self.storage.col().numel()

    def numel(self) -> int:
        """Number of elements of the values; the number of entries if there are no values."""
        value = self.storage.value()
        return self.nnz() if value is None else value.numel()

    def density(self) -> float:
        """Share of the matrix's positions that have an entry."""
        rows, cols = self.sparse_sizes()
        return self.nnz() / (rows * cols) if rows and cols else 0.0

    def sparsity(self) -> float:
        """Share of the matrix's positions without an entry."""
        return 1 - self.density()

    def avg_row_length(self) -> float:
        """Mean number of entries per row."""
        return self.nnz() / self.sparse_size(0)

    def avg_col_length(self) -> float:
        """Mean number of entries per column."""
        return self.nnz() / self.sparse_size(1)

    def bandwidth(self) -> int:
        """Largest distance of an entry from the diagonal."""
        row, col, _ = self.coo()
        return int((row - col).abs().max()) if self.nnz() else 0

    def avg_bandwidth(self) -> float:
        """Mean distance of the entries from the diagonal."""
        row, col, _ = self.coo()
        return float((row - col).abs().float().mean())

    def bandwidth_proportion(self, bandwidth: int) -> float:
        """Share of the entries whose distance from the diagonal is at most ``bandwidth``."""
        row, col, _ = self.coo()
        return int(((row - col).abs() <= bandwidth).sum()) / self.nnz()

    def is_quadratic(self) -> bool:
        """True if there are as many rows as columns."""
        return self.sparse_size(0) == self.sparse_size(1)

    def is_symmetric(self) -> bool:
        """True if the matrix equals its transpose, including the values."""
        if not self.is_quadratic():
            return False
        (rowptr, col, value), (colptr, row, other) = self.csr(), self.csc()
        same = torch.equal(rowptr, colptr) and torch.equal(col, row)
        return same and (value is None or (other is not None and torch.equal(value, other)))

    def has_value(self) -> bool:
        """True if the entries have values."""
        return self.storage.has_value()

    def requires_grad(self) -> bool:
        """True if the values require a gradient."""
        value = self.storage.value()
        return value is not None and value.requires_grad

    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.storage.device

    def is_cuda(self) -> bool:
        """True if the tensors are on a GPU."""
        return self.device().type == "cuda"

    def dtype(self) -> torch.dtype:
        """Dtype of the values; float32 for a matrix without values."""
        value = self.storage.value()
        return torch.float32 if value is None else value.dtype

    def is_floating_point(self) -> bool:
        """True if the dtype of the values is a floating-point type."""
        return self.dtype().is_floating_point

    def is_coalesced(self) -> bool:
        """True if all entries have different positions."""
        return self.storage.is_coalesced()

    # ---------------------------------------------------------------- changes

    def set_value_(self, value: Tensor | None, layout: str | None = None) -> SparseTensor:
        """Replaces the values."""
        self.storage.set_value_(value, layout)
        return self

    def set_value(self, value: Tensor | None, layout: str | None = None) -> SparseTensor:
        """The same entries with other values."""
        return self.from_storage(self.storage.set_value(value, layout))

    def fill_value_(self, fill_value: float, dtype: torch.dtype | None = None) -> SparseTensor:
        """Sets the value of all entries, in place. ``dtype=None`` means PyTorch's default dtype."""
        value = torch.full((self.nnz(),), float(fill_value), dtype=dtype, device=self.device())
        return self.set_value_(value)

    def fill_value(self, fill_value: float, dtype: torch.dtype | None = None) -> SparseTensor:
        """A copy in which all entries have the same value."""
        return self.copy().fill_value_(fill_value, dtype)

    def requires_grad_(self, requires_grad: bool = True, dtype: torch.dtype | None = None) -> SparseTensor:
        """Sets whether the values require a gradient; a matrix without values gets ones first."""
        if requires_grad and not self.has_value():
            self.fill_value_(1.0, dtype)
        value = self.storage.value()
        if value is not None:
            value.requires_grad_(requires_grad)
        return self

    def sparse_resize(self, sparse_sizes: tuple[int, int]) -> SparseTensor:
        """The same entries in a matrix of other sizes."""
        return self.from_storage(self.storage.sparse_resize(sparse_sizes))

    def sparse_reshape(self, num_rows: int, num_cols: int) -> SparseTensor:
        """The matrix reshaped in row-major order, like ``Tensor.reshape``; one size may be -1."""
        return self.from_storage(self.storage.sparse_reshape(num_rows, num_cols))

    def coalesce(self, reduce: str = "sum") -> SparseTensor:
        """Merges entries at the same position; their values are reduced by ``reduce``."""
        return self.from_storage(self.storage.coalesce(reduce))

    def t(self) -> SparseTensor:
        """The transpose."""
        colptr, row, value = self.csc()
        storage = self.storage
        cols, rows = storage.sparse_size(1), storage.sparse_size(0)
        order = storage.csr2csc()
        transposed = SparseStorage(
            storage.col()[order],
            colptr,
            row,
            value,
            (cols, rows),
            rowcount=storage._colcount,
            colptr=storage.rowptr(),
            colcount=storage._rowcount,
            csr2csc=storage.csc2csr(),
            csc2csr=order,
            is_sorted=True,
            trust_data=True,
        )
        return self.from_storage(transposed)

    def to_symmetric(self, reduce: str = "sum") -> SparseTensor:
        """Adds the reverse of every entry; values at the same position are reduced."""
        row, col, value = self.coo()
        size = max(self.sparse_sizes())
        both = None if value is None else torch.cat([value, value])
        out = SparseTensor(
            torch.cat([row, col]), None, torch.cat([col, row]), both, (size, size), False, True
        )
        return out.coalesce(reduce)

    def copy(self) -> SparseTensor:
        """A shallow copy: a new matrix that shares the tensors of this one."""
        return self.from_storage(self.storage.copy())

    def clone(self) -> SparseTensor:
        """A copy of the matrix and all its tensors."""
        return self.from_storage(self.storage.clone())

    def detach(self) -> SparseTensor:
        """The matrix with detached values."""
        return self.from_storage(self.storage.apply_value(lambda value: value.detach()))

    def detach_(self) -> SparseTensor:
        """Detaches the values in place."""
        value = self.storage.value()
        if value is not None:
            value.detach_()
        return self

    def fill_cache_(self) -> SparseTensor:
        """Computes all derived properties now."""
        self.storage.fill_cache_()
        return self

    def clear_cache_(self) -> SparseTensor:
        """Drops the derived properties."""
        self.storage.clear_cache_()
        return self

    # ---------------------------------------------------------------- moves and casts

    def to(self, *args: Any, **kwargs: Any) -> SparseTensor:
        """Moves the tensors and casts the values; takes the arguments of :meth:`torch.Tensor.to`."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        out = self
        if dtype is not None and dtype != self.dtype():
            out = out.type(dtype, non_blocking)
        if device is not None and torch.empty(0, device=device).device != self.device():
            out = self.from_storage(out.storage.apply(lambda it: it.to(device, non_blocking=non_blocking)))
        return out

    def type(self, dtype: torch.dtype, non_blocking: bool = False) -> SparseTensor:
        """Casts the values."""
        return self.from_storage(
            self.storage.apply_value(lambda value: value.to(dtype, non_blocking=non_blocking))
        )

    def type_as(self, tensor: Tensor) -> SparseTensor:
        """Casts the values to another tensor's dtype."""
        return self.type(tensor.dtype)

    def to_device(self, device: Any, non_blocking: bool = False) -> SparseTensor:
        """Moves the matrix to a device."""
        return self.to(device, non_blocking=non_blocking)

    def device_as(self, tensor: Tensor, non_blocking: bool = False) -> SparseTensor:
        """Moves the matrix to another tensor's device."""
        return self.to(tensor.device, non_blocking=non_blocking)

    def cpu(self) -> SparseTensor:
        """Moves the matrix to the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> SparseTensor:
        """Moves the matrix to a GPU."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def pin_memory(self) -> SparseTensor:
        """Copies the matrix to page-locked memory."""
        return self.from_storage(self.storage.apply(lambda tensor: tensor.pin_memory()))

    def is_pinned(self) -> bool:
        """True if the matrix is in page-locked memory."""
        return self.storage.col().is_pinned()

    def share_memory_(self) -> SparseTensor:
        """Moves the matrix to memory that processes share."""
        self.storage.apply(lambda tensor: tensor.share_memory_())
        return self

    def is_shared(self) -> bool:
        """True if the matrix is in memory that processes share."""
        return self.storage.col().is_shared()

    # ---------------------------------------------------------------- operators

    def __getitem__(self, index: Any) -> SparseTensor:
        return selection.at_index(self, index)

    def __matmul__(self, other: Any) -> Any:
        return products.matmul(self, other, "sum")

    def __add__(self, other: Any) -> SparseTensor:
        return elementwise.add(self, other)

    __radd__ = __add__

    def __iadd__(self, other: Any) -> SparseTensor:
        return NotImplemented if isinstance(other, SparseTensor) else elementwise.add_(self, other)

    def __mul__(self, other: Any) -> SparseTensor:
        return elementwise.mul(self, other)

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> SparseTensor:
        return NotImplemented if isinstance(other, SparseTensor) else elementwise.mul_(self, other)

    def __eq__(self, other: object) -> bool:
        """True if the other object is a matrix with the same sizes, entries and values."""
        if not isinstance(other, SparseTensor) or self.sizes() != other.sizes():
            return False
        if self.has_value() != other.has_value():
            return False
        pairs = zip(self.csr(), other.csr(), strict=True)
        return all(one is None or two is None or torch.equal(one, two) for one, two in pairs)

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return self.sparse_size(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseTensor:
        other = memo[id(self)] = self.clone()
        return other

    def __repr__(self) -> str:
        row, col, value = self.coo()
        parts = [f"row={row}", f"col={col}", *([] if value is None else [f"val={value}"])]
        sizes = tuple(self.sizes())
        parts.append(f"size={sizes}, nnz={self.nnz()}, density={100 * self.density():.02f}%")
        return f"{type(self).__name__}({', '.join(parts)})"

    matmul = products.matmul
    spmm = products.spmm
    spspmm = products.spspmm
    sum, mean, min, max = elementwise.sum, elementwise.mean, elementwise.min, elementwise.max
    reduction = elementwise.reduction
    add, add_nnz, mul, mul_nnz = elementwise.add, elementwise.add_nnz, elementwise.mul, elementwise.mul_nnz
    add_, add_nnz_, mul_, mul_nnz_ = (
        elementwise.add_,
        elementwise.add_nnz_,
        elementwise.mul_,
        elementwise.mul_nnz_,
    )
    set_diag, fill_diag = diagonal.set_diag, diagonal.fill_diag
    get_diag, remove_diag = diagonal.get_diag, diagonal.remove_diag
    narrow, select, permute = selection.narrow, selection.select, selection.permute
    index_select, index_select_nnz = selection.index_select, selection.index_select_nnz
    masked_select, masked_select_nnz = selection.masked_select, selection.masked_select_nnz


def _cast(dtype: torch.dtype) -> Any:
    def cast(self: SparseTensor) -> SparseTensor:
        return self.type(dtype)

    return cast


def _missing(name: str) -> Any:
    return lambda self, *args, **kwargs: missing.refuse(f"SparseTensor.{name}")


def _of_storage(name: str) -> Any:
    """Makes a method for SparseStorage that calls the method of SparseTensor with this name."""

    def method(self: SparseStorage, *args: Any, **kwargs: Any) -> Any:
        found = getattr(SparseTensor.from_storage(self), name)(*args, **kwargs)
        return found.storage if isinstance(found, SparseTensor) else found

    return method


_MOVES = ("cuda", "device_as", "is_pinned", "is_shared", "pin_memory", "share_memory_", "to_device", "type")
for _name in (*_MOVES, "type_as"):
    setattr(SparseStorage, _name, _of_storage(_name))
for _name in missing.METHODS:
    setattr(SparseTensor, _name, _missing(_name))
for _name, _dtype in _CASTS.items():
    setattr(SparseTensor, _name, _cast(_dtype))
