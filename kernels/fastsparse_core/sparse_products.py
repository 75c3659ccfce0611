"""Runs ``torch.sparse.mm``, ``A @ x``, ``torch.mm`` and ``torch.addmm`` of sparse matrices on the kernels.

:func:`enable` registers kernels with PyTorch's dispatcher, only for sparse tensors, so products of dense
matrices take no longer. Calls that no kernel supports fall back to PyTorch's implementation. The fallback
calls the operator's ``out=`` form, which is registered separately, because before PyTorch 2.9 an overridden
kernel cannot be called.

Structures are cached as long as the matrix exists. A CSR matrix and its transpose share a structure, because
one is a view of the other. PyTorch copies a COO matrix to transpose it, so the structure is also cached for
the copy. A new matrix made of the same tensors gets a new structure, because it has a version counter of its
own.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fastsparse_core import recorded
from fastsparse_core.cache import AdjacencyCache, CacheInfo, Sightings
from fastsparse_core.call_report import record, timed
from fastsparse_core.locks import ForkSafeLock
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import PLAIN, is_plain_eager, is_wrapped
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.ops.spmm import plain_spmm, spmm, spmm_of_values
from fastsparse_core.replacement import enabled_parts
from fastsparse_core.structure.adjacency import Adjacency

#: For COO matrices on the CPU with at least this number of entries, building the structure takes less time
#: than one product of PyTorch, so the structure is built at the first product. Other structures are built at
#: the second product, or at the first product if PyTorch has no product in a 16-bit dtype.
FROM_FIRST_PRODUCT = 4096
#: For COO matrices on the CPU with at most this number of entries, PyTorch computes gradients of ``A @ x``:
#: marking the transposed copy of every backward pass with its structure takes as long as the product.
_FEW = 2048
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc)
_16_BITS = (torch.float16, torch.bfloat16)
#: Reason in the report if the structure was not built yet, and the advice for reasons that have one.
_NEW = "the matrix is new"
_CURES = {_NEW: "Make it once and keep it"}
_KEYS = ("SparseCPU", "SparseCsrCPU", "SparseCUDA", "SparseCsrCUDA")

_lock = ForkSafeLock()
_library: torch.library.Library | None = None
_cache = AdjacencyCache("torch.sparse")
_met = Sightings()


def enable() -> None:
    """Runs products of sparse and dense matrices on the kernels, unless ``FASTSPARSE_DISABLE=sparse_mm``.

    A second call changes nothing. :func:`disable` undoes :func:`enable`.
    """
    global _library
    with _lock:
        if _library is not None or not enabled_parts(["sparse_mm"]):
            return
        library = torch.library.Library("aten", "IMPL")
        for key in _KEYS:
            _register(library, "addmm", _addmm, key)
        for key in ("SparseCsrCPU", "SparseCsrCUDA"):
            _register(library, "mm", _mm, key)
        for key in ("SparseCPU", "SparseCUDA"):
            _register(library, "transpose.int", _transpose, key)
        for key in ("AutogradCPU", "AutogradCUDA"):
            _register(library, "_sparse_mm", _sparse_mm, key)
        _library = library


def disable() -> None:
    """Restores PyTorch's kernels, and frees the structures."""
    global _library
    with _lock:
        if _library is not None:
            _library._destroy()
            _library = None
        clear_structures()


def is_enabled() -> bool:
    """Returns True if `enable` is active, so that products of sparse PyTorch matrices run on the kernels."""
    return _library is not None


def clear_structures() -> None:
    """Frees the cached structures of all matrices."""
    _cache.clear()
    _met.clear()
    _repeated.clear()


def structures_info() -> CacheInfo:
    """Counters of the cache of structures (`CacheInfo`)."""
    return _cache.info()


def _register(library: Any, name: str, function: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():  # PyTorch warns of the override, which is intended
        warnings.simplefilter("ignore")
        library.impl(name, timed(function), key)


# ---------------------------------------------------------------- structures


def _structure(matrix: Tensor, dtype: torch.dtype) -> Adjacency | None:
    """The structure of a matrix; None if the matrix is new, or edits of the matrix could not be detected."""
    if matrix.is_inference():  # inference tensors have no version counter
        return None
    owner = matrix
    is_coo = matrix.layout is torch.sparse_coo
    if not is_coo and matrix._is_view():  # a transposed view, as in backward passes
        base = matrix._base
        if base is not None and base.layout in _COMPRESSED and _has_same_memory(base, matrix):
            owner = base
    pointers, indices = _indices_of(owner)
    if not _cache.holds(owner):
        if matrix.is_cuda:
            from_first = is_coo and dtype in _16_BITS
        else:
            from_first = dtype in _16_BITS or (is_coo and indices.shape[1] >= FROM_FIRST_PRODUCT)
        if not from_first and _met.count(owner) == 1:
            return None
    stamp = _stamp(owner, pointers, indices)
    adj = _cache.lookup(owner, stamp, None, lambda: _build(owner.layout, owner.shape, pointers, indices))
    return adj if owner.layout is matrix.layout else adj.t()


def _indices_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Pointers and indices of a compressed matrix; for COO, the indices twice."""
    if matrix.layout is torch.sparse_coo:
        indices = matrix._indices()
        return indices, indices
    if matrix.layout is torch.sparse_csr:
        return matrix.crow_indices(), matrix.col_indices()
    return matrix.ccol_indices(), matrix.row_indices()


def _stamp(matrix: Tensor, pointers: Tensor, indices: Tensor) -> Hashable:
    """Properties that change with the matrix. Matrix, indices and values share a version counter."""
    return matrix._version, pointers.data_ptr(), indices.data_ptr(), indices.shape


def _has_same_memory(one: Tensor, other: Tensor) -> bool:
    places = zip(_indices_of(one), _indices_of(other), strict=True)
    return all(mine.data_ptr() == its.data_ptr() and mine.shape == its.shape for mine, its in places)


def _build(layout: torch.layout, size: torch.Size, pointers: Tensor, indices: Tensor) -> Adjacency:
    shape = (size[0], size[1])
    if layout is torch.sparse_coo:
        row, col = indices.unbind(0)
        return Adjacency.from_coo(row, col, shape)
    if layout is torch.sparse_csr:
        return Adjacency.from_csr(pointers, indices, shape)
    return Adjacency.from_csc(pointers, indices, shape)


def _is_small(matrix: Tensor) -> bool:
    return matrix.layout is torch.sparse_coo and matrix.is_cpu and matrix._nnz() <= _FEW


def _transpose(matrix: Tensor, dim0: int, dim1: int) -> Tensor:
    """Transposes a COO matrix like PyTorch. If the matrix has a cached structure, the result gets one too."""
    out = matrix.clone().transpose_(dim0, dim1)
    if _is_small(matrix):
        return out
    kept = _cache.kept(matrix, None)
    if kept is not None and dim0 % 2 != dim1 % 2 and kept[1] == _stamp(matrix, *_indices_of(matrix)):
        _cache.keep(out, _stamp(out, *_indices_of(out)), None, kept[2].t())
    return out


# ---------------------------------------------------------------- products


class _Repeated(NamedTuple):
    """Properties of a product. The next product with these properties skips all checks.

    On the CPU, PyTorch multiplies small matrices in 6 us, and the checks would take as long.
    """

    matrix: weakref.ref[Tensor]
    version: int
    indices_at: int
    values_at: int
    shape: torch.Size  # shape of the dense operand
    dtype: torch.dtype
    device: torch.device
    adj: Adjacency
    plan: Hashable  # key of the plan on the CPU; None on a GPU, where it depends on the operand's alignment


_repeated: dict[int, _Repeated] = {}


def _remember(matrix: Tensor, x: Tensor, values: Tensor, adj: Adjacency) -> None:
    if not (type(x) is Tensor and x.is_contiguous() and values.is_contiguous()):
        return
    if recorded.current() is not None:  # the structure may be valid only in this run of a captured step
        return
    number, indices_at = id(matrix), _indices_of(matrix)[1].data_ptr()
    reference = weakref.ref(matrix, lambda _: _repeated.pop(number, None))
    at = indices_at, values.data_ptr()
    plan = ("spmm", x.dtype, x.shape[1], "auto", False, values.dtype, values.shape[1:]) if x.is_cpu else None
    _repeated[number] = _Repeated(reference, matrix._version, *at, x.shape, x.dtype, x.device, adj, plan)


def _again(matrix: Tensor, x: Tensor) -> tuple[_Repeated, Tensor] | None:
    """Properties of the matrix's last product, and the matrix's values; None if this product differs."""
    known = _repeated.get(id(matrix))
    if known is None or known[0]() is not matrix or matrix._version != known[1]:
        return None
    layout = matrix.layout
    if layout is torch.sparse_coo:
        indices, values = matrix._indices(), matrix._values()
    else:
        indices = matrix.col_indices() if layout is torch.sparse_csr else matrix.row_indices()
        values = matrix.values()
    _, _, indices_at, values_at, shape, dtype, device, _, _ = known
    if (
        indices.data_ptr() != indices_at
        or values.data_ptr() != values_at
        or x.shape != shape
        or x.dtype is not dtype
        or x.device != device
        or not (is_plain_eager(x) and x.is_contiguous())
    ):
        return None
    return known, values


def _known(matrix: Tensor, x: Tensor) -> tuple[Adjacency, Tensor] | None:
    """Structure and values of a matrix that multiplies ``x``; None: PyTorch's own code has to run."""
    layout = matrix.layout
    is_coo = layout is torch.sparse_coo
    if x.layout is not torch.strided or not (is_coo or layout in _COMPRESSED):
        return None
    dtype = x.dtype
    if dtype not in DTYPE_CODE or matrix.dtype is not dtype:
        reason = f"dtypes {matrix.dtype} and {dtype}"
    elif len(matrix.shape) != 2 or len(x.shape) != 2 or matrix.shape[1] != x.shape[0] or not x.numel():
        reason = "operands that are not two matrices of matching shapes, or are empty"
    elif matrix.device != x.device:
        reason = "operands on two devices"
    elif is_coo and matrix.dense_dim():
        reason = "a matrix with dense dimensions"
    elif not (type(matrix) in PLAIN and is_plain_eager(x.detach() if type(x) is Parameter else x)):
        reason = "a subclass of Tensor, a transform of torch.func, or a dispatch mode such as FakeTensorMode"
    else:
        try:
            adj = _structure(matrix, dtype)
        except ValueError as error:  # raised for indices out of range
            adj, reason = None, str(error)
        else:
            reason = _NEW
        if adj is not None:
            record("torch.sparse product", "spmm")
            return adj, matrix._values() if is_coo else matrix.values()
    record("torch.sparse product", "PyTorch", reason, _CURES.get(reason, ""))
    return None


def _product(matrix: Tensor, x: Tensor) -> Tensor | None:
    """Computes ``matrix @ x`` without gradients; None: PyTorch's own code has to compute the product."""
    again = _again(matrix, x)
    if again is not None:
        (*_, adj, key), values = again
        record("torch.sparse product", "spmm")
        plan = adj.plans.get(key)
        if plan is None:
            return launch_spmm(adj, x, values, None, None, None, "auto")
        return plan.run(adj, x, values, None, None, None, False, None)
    if _is_small(matrix) and not _cache.holds(matrix) and _met.count(matrix) == 1:
        record("torch.sparse product", "PyTorch", _NEW, _CURES[_NEW])
        return None
    known = _known(matrix, x)
    if known is None:
        return None
    adj, values = known
    x, values = x.detach(), values.detach()
    _remember(matrix, x, values, adj)
    return launch_spmm(adj, x, values, None, None, None, "auto")


def _sparse_mm(matrix: Tensor, x: Tensor) -> Tensor:
    """Computes ``torch.sparse.mm`` with gradients.

    PyTorch's implementation also adds the product to zeros, transposes a copy of a COO matrix in every
    backward pass, and computes the gradient of the values from the gradient of a dense matrix.
    """
    is_cast = torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    is_recorded = torch.is_grad_enabled() and (matrix.requires_grad or x.requires_grad)
    if not (is_recorded or is_cast):
        out = _product(matrix, x)
        if out is not None:
            return out
        if x.layout is torch.strided and matrix.dim() == x.dim() == 2:
            return _original_addmm(x.new_zeros(matrix.size(0), x.size(1)), matrix, x, 0, 1)
    else:
        needs_values = matrix.requires_grad
        again = None if needs_values or is_cast or is_wrapped(x) else _again(matrix, x)
        if again is not None:
            record("torch.sparse product", "spmm")
            return spmm_of_values(again[0].adj, x, again[1])
        is_coo = matrix.layout is torch.sparse_coo
        # PyTorch has no gradient for CSC matrices, and coalesces the gradient of COO matrices.
        if not needs_values or (matrix.is_coalesced() if is_coo else matrix.layout is torch.sparse_csr):
            known = _known(matrix, x)
            if known is not None:
                adj, values = known
                if needs_values and is_coo:
                    values = matrix.values()  # `_values` has no gradient
                out = None if is_cast else plain_spmm(adj, x, values, "sum", None, None, "auto")
                if out is None:
                    return spmm(adj, x, values)
                if not needs_values:
                    _remember(matrix, x, values, adj)
                return out
    original: Tensor = torch.ops.aten._sparse_mm.default.decompose(matrix, x)
    return original


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """Computes ``torch.mm`` of a CSR or CSC matrix, below autograd.

    PyTorch's implementation converts CSC matrices, which backward passes use, to CSR in every call.
    """
    out = None
    if right.layout is torch.strided:
        out = _product(left, right)
    elif left.layout is torch.strided and left.dim() == right.dim() == 2:
        out = _product(right.t(), left.t())
        out = None if out is None else out.t()
    elif left.layout in _COMPRESSED and right.layout in _COMPRESSED:
        right = right.to_sparse_csr()
    if out is not None:
        return out
    if left.layout is torch.sparse_csc and right.layout in (torch.strided, torch.sparse_csr):
        left = left.to_sparse_csr()
    like = right if right.layout is torch.strided or left.layout is right.layout else left
    size = (left.size(0), right.size(1))
    dtype = left.dtype if right.layout is torch.strided else like.dtype
    zeros = torch.zeros(size, dtype=dtype, device=like.device, layout=like.layout)
    return _original_addmm(zeros, left, right, 0, 1)


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Computes ``torch.addmm`` of a sparse matrix; PyTorch's ``mm`` calls it too, with ``beta=0``."""
    if bias.layout is torch.strided and bias.dtype is right.dtype and bias.device == right.device:
        out = _product(left, right) if not beta or _can_expand(bias, left, right) else None
        if out is not None:
            if alpha != 1:
                out.mul_(alpha)
            if beta:
                out.add_(bias.detach(), alpha=beta)
            return out
    return _original_addmm(bias, left, right, beta, alpha)


def _original_addmm(bias: Tensor, left: Tensor, right: Tensor, beta: Any, alpha: Any) -> Tensor:
    out = torch.empty((0, 0), dtype=bias.dtype, device=bias.device, layout=bias.layout)
    return torch.addmm(bias, left, right, beta=beta, alpha=alpha, out=out)


def _can_expand(bias: Tensor, left: Tensor, right: Tensor) -> bool:
    size = (left.shape[0], right.shape[-1])
    pairs = zip(reversed(bias.shape), reversed(size), strict=False)
    return bias.dim() <= 2 and all(mine in (1, due) for mine, due in pairs)
