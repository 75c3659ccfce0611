"""Replacements of functions in `torch_geometric.utils` that reduce rows by an index.

They use the core's segment operators. The first argument of each replacement is PyG's function, which runs if
the operators would be slower, do not support the arguments, or raise an error. So users see PyG's errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.utils.num_nodes import maybe_num_nodes

from fastsparse_core import scatter as core_scatter
from fastsparse_core import scatter_softmax, segment_reduce, segment_softmax, sparse_products
from fastsparse_core.cache import Sightings
from fastsparse_core.call_report import is_recording, record
from fastsparse_core.ops._dtypes import DTYPE_CODE
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._segment import find_segments, is_kept
from fastsparse_core.policy import MOST_HEADS
from fastsparse_pyg.fallback import FEW_EDGES, FEW_EDGES_ON_GPU

_Original = Callable[..., Tensor]

_REDUCTIONS = {
    "sum": "sum",
    "add": "sum",
    "mean": "mean",
    "min": "min",
    "amin": "min",
    "max": "max",
    "amax": "max",
    "mul": "mul",
}
#: Reductions that are faster than PyTorch's on the CPU even if the index is sorted for a single call. With a
#: new index, softmax is 1.5 times and max 3.6 times faster than PyTorch's, but sums take a third longer
#: (10,000 rows of 16 features).
_PAY_WHEN_NEW = ("min", "max", "softmax")
#: Below this number of rows on a GPU, sums and means run PyTorch's operators, because launch overhead decides
#: the time, and PyTorch's is smaller. For pools of 169,000 rows, 64 features wide, forward and backward,
#: FastSparse took 1.25 to 1.75 times as long as PyTorch (H100, record `enabled`).
_FEW_SUMS_ON_GPU = 262_144
_NEW = "the index is new"
_CURES = {_NEW: "Keep one index tensor instead of making it in every call"}
_met = Sightings()
_is_tracing = torch._C._is_tracing
_is_compiling = torch.compiler.is_compiling


def _few(index: Tensor) -> int:
    """Returns the number of rows below which PyG's own function is faster on the index's device."""
    return FEW_EDGES_ON_GPU if index.is_cuda else FEW_EDGES


def _few_first(place: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorates a replacement so that few rows go to PyG's own function directly, because it is faster.

    Models of molecules call these functions often, so the time of one more Python frame is measurable. While
    calls are recorded, all of them go through the replacement, so that the report contains them.

    Args:
        place: position of the index among the arguments.
    """

    def bind(function: Callable[..., Tensor], original: _Original) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Tensor:
            if (
                len(args) > place
                and type(args[place]) is Tensor
                and not (_is_tracing() or is_recording())
                and args[place].numel() < _few(args[place])
            ):
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        return replaced

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        function.bind = bind  # type: ignore[attr-defined]
        return function

    return decorate


@_few_first(1)
def scatter(
    original: _Original,
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Replaces PyG's ``scatter``."""
    how = _REDUCTIONS.get(reduce)
    reason = f"reduce={reduce!r}"
    if how is not None:
        reason = _why_not(src, index, dim) or _why_new(index, how) or _why_slower(src, index, how)
    if how is not None and not reason:
        out = _served("scatter", lambda: core_scatter(src, index, dim_size, how))  # type: ignore[call-overload]
        if out is not None:
            return out
    else:
        record("scatter", "PyG", reason, _CURES.get(reason, ""))
    return original(src, index, dim, dim_size, reduce)


@_few_first(1)
def softmax(
    original: _Original,
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """Replaces PyG's ``softmax``."""
    reason = _why_not(src, index, dim) if ptr is None else _why_no_segments(src, ptr, dim)
    if not reason and src.numel() > src.size(0) * MOST_HEADS:
        reason = f"more than {MOST_HEADS} columns"
    if not reason and ptr is not None:
        out = _served("softmax", lambda: segment_softmax(src, ptr))
    elif not reason and index is not None and not (reason := _why_new(index, "softmax")):
        out = _served("softmax", lambda: scatter_softmax(src, index, maybe_num_nodes(index, num_nodes)))
    else:
        record("softmax", "PyG", reason, _CURES.get(reason, ""))
        out = None
    if out is not None:
        return out
    return original(src, index, ptr, num_nodes, dim)


def segment(original: _Original, src: Tensor, ptr: Tensor, reduce: str = "sum") -> Tensor:
    """Replaces PyG's ``segment``."""
    how = _REDUCTIONS.get(reduce)
    reason = f"reduce={reduce!r}" if how in (None, "mul") else _why_no_segments(src, ptr, 0)
    if how is not None and not reason:
        out = _served("segment", lambda: segment_reduce(src, ptr, how))  # type: ignore[call-overload]
        if out is not None:
            return out
    else:
        record("segment", "PyG", reason)
    return original(src, ptr, reduce)


@_few_first(0)
def degree(
    original: _Original, index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Replaces PyG's ``degree``: if the index is sorted already, its row pointers give the counts."""
    is_plain = type(index) is Tensor and not _is_tracing() and is_plain_eager(index)
    if is_plain and index.dim() == 1 and not index.is_inference() and is_kept(index):
        try:
            size = maybe_num_nodes(index, num_nodes)
            counts = find_segments(index, None, size, index.numel()).rowptr.diff()
        except (TypeError, ValueError):
            return original(index, num_nodes, dtype)
        record("degree", "segments")
        return counts.to(torch.get_default_dtype() if dtype is None else dtype)
    record("degree", "PyG", "no other call has sorted this index")
    return original(index, num_nodes, dtype)


def spmm(original: _Original, src: Any, other: Tensor, reduce: str = "sum") -> Tensor:
    """Replaces PyG's ``spmm`` for COO matrices, which PyG converts in every call."""
    if (
        isinstance(src, Tensor)
        and src.layout is torch.sparse_coo
        and reduce in ("sum", "add")
        and sparse_products.is_enabled()
        and not _is_compiling()
        and other.dim() == 2
    ):
        return torch.sparse.mm(src, other)
    return original(src, other, reduce)


def _served(name: str, call: Callable[[], Any]) -> Any:
    """Returns the operator's result; None if the operator raises, so that PyG's code raises its own error."""
    try:
        out = call()
    except (TypeError, ValueError) as error:
        record(name, "PyG", str(error))
        return None
    record(name, "segments")
    return out


def _why_not(src: Any, index: Any, dim: int) -> str:
    """Returns why PyG's own code has to reduce these rows, or is faster; "" if the operators run."""
    if _is_compiling() or _is_tracing():
        return "torch.compile or torch.jit.trace"
    if type(index) is not Tensor or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return "an index that is not one plain tensor"
    if index.numel() < _few(index):
        return f"fewer than {_few(index):,} rows: PyG is faster there"
    return _why_no_rows(src, dim, index.numel(), index.device)


def _why_no_segments(src: Any, ptr: Any, dim: int) -> str:
    if _is_compiling() or _is_tracing():
        return "torch.compile or torch.jit.trace"
    if type(ptr) is not Tensor or ptr.dim() != 1 or ptr.dtype not in (torch.int64, torch.int32):
        return "pointers that are not one plain tensor"
    if ptr.is_inference() or not ptr.numel():
        return "empty pointers, or pointers made in inference mode"
    if isinstance(src, Tensor) and src.dim() and src.size(0) < _few(ptr):
        return f"fewer than {_few(ptr):,} rows: PyG is faster there"
    return _why_no_rows(src, dim, None, ptr.device)


def _why_no_rows(src: Any, dim: int, rows: int | None, device: torch.device) -> str:
    if not isinstance(src, Tensor) or src.dtype not in DTYPE_CODE:
        return "values that are not floating-point"
    if src.device != device:
        return "tensors on two devices"
    if not src.dim() or (dim != 0 and dim != -src.dim()):
        return "a reduction that is not along the first dimension"
    if (rows is not None and src.size(0) != rows) or not src.numel():
        return "sizes that differ, or no values"
    plain = src.detach() if type(src) is Parameter else src
    return (
        ""
        if is_plain_eager(plain)
        else "a subclass of Tensor, a transform of torch.func, or a dispatch mode such as FakeTensorMode"
    )


def _why_slower(src: Tensor, index: Tensor, how: str) -> str:
    """Returns why PyTorch's reduction is faster than FastSparse's; "" if it is not.

    Without a gradient, PyTorch's max and min read the rows in order. FastSparse reads them in the order of
    the sorted index, which takes up to 1.6 times as long on a CPU.
    """
    is_sum = how in ("sum", "mean")
    if index.is_cuda and is_sum and src.element_size() > 2 and index.numel() < _FEW_SUMS_ON_GPU:
        return f"fewer than {_FEW_SUMS_ON_GPU:,} rows to add: PyG is faster there"
    wants = src.requires_grad and torch.is_grad_enabled()
    if index.is_cpu and how in ("min", "max") and not wants and bool((index[1:] < index[:-1]).any()):
        return "max or min without a gradient, with an index that is not sorted"
    return ""


def _why_new(index: Tensor, how: str) -> str:
    """Returns a reason if an index is new and sorting it costs more time than it saves; otherwise ""."""
    if how in _PAY_WHEN_NEW and index.is_cpu:
        return ""
    if index.is_inference():
        return "an index made in inference mode"
    return "" if is_kept(index) or _met.count(index.untyped_storage()) > 1 else _NEW
