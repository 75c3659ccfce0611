"""What all operators share: the torch.library namespace, dtypes and argument checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fastsparse_core import _C
from fastsparse_core.content import has_content
from fastsparse_core.device import device_index, queue
from fastsparse_core.formats.bsb import HEIGHT
from fastsparse_core.policy import MOST_HEADS
from fastsparse_core.structure.adjacency import Adjacency, from_handle

#: Namespace of the operators: ``torch.ops.fastsparse``. An operator takes the structure as the integer handle
#: of an Adjacency, so that schemas stay short, derived formats can be built lazily, and torch.compile sees a
#: plain integer.
library = torch.library.Library("fastsparse", "DEF")

#: Feature dtypes and their codes in kernels/include/fastsparse/views.h.
DTYPE_CODE = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


#: Classes of tensors whose operators nobody has changed.
PLAIN = (Parameter, Tensor)
#: Dtypes that autocast brings to its own.
CAST = (torch.float32, torch.bfloat16, torch.float16)
#: What decides, with the modes in force, how a tensor is computed with; quicker to ask at once, and to look
#: up, than one by one.
kind_of = attrgetter("__class__", "dtype", "shape", "device", "layout", "requires_grad")
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# What is asked in every call, without the way there.
_is_functional = torch._is_functional_tensor
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
#: Whether a tensor has outlived a transform of torch.func, or is within one.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

#: Whether products of 16-bit matrices give float32 without a cast (torch 2.8 and later, on CUDA).
_GIVES_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()


def direct(formula: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``formula.apply`` for tensors of which the first `is_plain_eager` and is not `is_wrapped`.

    What PyTorch's own does before, for transforms of torch.func, takes the host 5 us.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, formula).apply  # type: ignore[misc]
    return apply


def below_autograd() -> Any:
    """Context in which operators run their kernels, not their autograd formulas."""
    return torch._C._AutoDispatchBelowAutograd()


def register_autograd(name: str, formula: type[torch.autograd.Function]) -> None:
    """Registers the autograd formula of an operator.

    ``torch.library.register_autograd`` would do the same, at 15 us of host time more per call (measured on a
    CPU build of torch 2.13), which is more than all else around a kernel launch.
    """
    operator = getattr(torch.ops.fastsparse, name).default

    def dispatch(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, arguments)
        if torch.is_grad_enabled():
            for argument in arguments:
                if isinstance(argument, Tensor) and argument.requires_grad:
                    return formula.apply(*arguments)
        with below_autograd():
            return operator(*arguments)

    library.impl(name, dispatch, "Autograd")


def _refuse_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """Raises where forward-mode differentiation would lose what depends on an operator's result."""
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"{name}: expected tensors without tangents, got one of forward-mode differentiation; "
                "gradients come by backward()"
            )


def is_plain_eager(x: Tensor) -> bool:
    """Whether nothing but autograd watches a call: no trace, no fake or wrapped tensor, no mode, no tangents.

    Then the kernel (or its autograd formula) may be called without PyTorch's dispatcher, which would cost
    more host time than all else around a kernel launch.
    """
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not x.is_meta
        and not _is_functional(x)
        and not (_num_modes() and _modes_watch())
        and _transform() is None
        and not _is_batched(x)  # of is_grads_batched=True
        and forward_ad._current_level < 0
        and not x.is_neg()
    )


def _modes_watch() -> bool:
    """Whether one of the modes in force has to see what happens in operators; not so that of `journal`."""
    modes = (torch._C._get_dispatch_stack_at(nth) for nth in range(torch._C._len_torch_dispatch_stack()))
    return not all(getattr(mode, "is_harmless", False) for mode in modes)


def why_watched(x: Tensor) -> str:
    """Why a call on tensors like ``x`` is PyTorch's to run, operator by operator; "" if it is not.

    Function transforms, forward-mode differentiation and traces of operators know PyTorch's own operators,
    and there is no structure to look up, or to build, where tensors have no content. ``torch.compile`` traces
    our operators with their structure as they are.
    """
    if torch.compiler.is_compiling():
        return ""
    if torch._C._len_torch_dispatch_stack() and _modes_watch():
        return "a mode that watches operators (fake tensors, make_fx)"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return "tensors without content" if not has_content(x) else ""


def is_first_derivative(grad: Tensor) -> bool:
    """Whether a backward pass may call its kernel without PyTorch's dispatcher: nothing watches the gradient.

    A second derivative, which ``create_graph=True`` asks for, goes through the operators' own formulas.
    """
    return is_plain_eager(grad) and not torch.is_grad_enabled()


def without_autocast(gradients: Callable[[Any, Tensor], tuple[Any, ...]], ctx: Any, grad: Tensor) -> Any:
    """``gradients(ctx, grad)`` with autocast off: the forward pass has decided every dtype."""
    if not is_any_autocast_enabled():
        return gradients(ctx, grad)
    with torch.autocast(grad.device.type, enabled=False):
        return gradients(ctx, grad)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which takes the host 1 us even where it gives the tensor itself."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class Uncast(NamedTuple):
    """A weight as it came, of which a forward pass under autocast multiplied another dtype.

    Second derivatives alone need it, so it may be written before the backward pass, as with a linear layer,
    which keeps what autocast cast: saved by autograd, it could not.
    """

    weight: Tensor
    version: int

    @classmethod
    def of(cls, weight: Tensor, multiplied: Tensor) -> Uncast | None:
        """None where nothing was cast."""
        return None if multiplied is weight else cls(weight, version_of(weight))

    def cast_again(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the products, by a cast that has a gradient.

        Raises:
            RuntimeError: it was written since.
        """
        if version_of(self.weight) != self.version:
            raise RuntimeError(
                "weight: modified by an inplace operation between the forward pass and a backward pass with "
                "create_graph=True, which needs it as it was"
            )
        return self.weight.to(dtype)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written, which those made for inference do not count."""
    return 0 if tensor.is_inference() else tensor._version


def product_in(left: Tensor, right: Tensor, dtype: torch.dtype, once: bool = True) -> Tensor:
    """The product of two matrices in a dtype that need not be theirs, as a weight's gradient under autocast.

    Args:
        left: matrix.
        right: matrix of its dtype.
        dtype: of the result.
        once: whether nobody asks for the product's own gradient.
    """
    if left.dtype == dtype:
        return torch.mm(left, right)
    if once and left.is_cuda and dtype == torch.float32 and _GIVES_FLOAT32:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


def check_structure(adj: Adjacency) -> None:
    """Rejects whatever is no structure: operators look at it before anything else.

    Raises:
        TypeError: with what to pass.
    """
    if not hasattr(adj, "is_partitioned"):
        raise TypeError(
            f"adj: expected an Adjacency, got {type(adj).__name__}; make one with "
            "Adjacency.from_coo(row, col, (num_dst, num_src)), rows being destinations, or with "
            "prepare(graph) of fastsparse_pyg or fastsparse_dgl"
        )


def is_partitioned(adj: Adjacency) -> TypeGuard[Any]:
    """Whether a structure is one rank's part of a graph; `check_structure` where it is none at all."""
    try:
        return adj.is_partitioned
    except AttributeError:
        check_structure(adj)
        raise


def keep_alive(adjacency: int) -> Adjacency | None:
    """The structure behind a handle, for an autograd context that outlives the caller's reference.

    None for the symbolic handle of a trace, which stands for no object.
    """
    return from_handle(adjacency) if isinstance(adjacency, int) else None


def structure(adjacency: int, transpose: bool) -> Adjacency:
    """The structure behind a handle, or its transpose."""
    adj = from_handle(adjacency)
    return adj.t() if transpose else adj


def num_heads(value: Tensor | None) -> int:
    """Columns of edge values, 1 where they have one dimension or are not given."""
    return value.size(-1) if value is not None and value.dim() > 1 else 1


def allows_tf32() -> bool:
    """Whether products of float32 matrices may have fewer digits, as PyTorch's own were told."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was told by a setting of torch 2.9, after which that question is an error
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def is_dense(value: Tensor | None) -> TypeGuard[Tensor]:
    """Whether an operator's values are dense vectors, (num_vectors, 8, heads), not one per edge and head."""
    return value is not None and value.dim() == 3


def dense_from_edges(adj: Adjacency, value: Tensor) -> Tensor:
    """Values (num_values, heads) as dense vectors (num_vectors, 8, heads), 0 where there is no entry."""
    length, heads = adj.bsb.num_vectors, value.size(1)
    out = value.new_zeros(length * HEIGHT, heads)
    out.index_copy_(0, adj.dense_place.long(), value.index_select(0, adj.bsb_value_id))
    return out.view(length, HEIGHT, heads)


def edges_from_dense(adj: Adjacency, value: Tensor) -> Tensor:
    """The inverse: values (num_values, heads) in the caller's edge order."""
    every_value_is_written = adj.num_values == adj.num_edges
    out = (value.new_empty if every_value_is_written else value.new_zeros)(adj.num_values, value.size(2))
    return out.index_copy_(0, adj.bsb_value_id.long(), value.flatten(0, 1).index_select(0, adj.dense_place))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def address(tensor: Tensor | None) -> int:
    """Address of the first element, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def untouched(like: Tensor, *size: int) -> Tensor:
    """``like.new_empty(size)``; on the CPU in huge pages where it is large, as the kernels' results."""
    out = like.new_empty(size)
    if out.device.type == "cpu":
        _C.prefer_huge_pages(out.data_ptr(), out.nbytes)
    return out


def contiguous_floats(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous float32; else a copy that is."""
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def unit_stride(matrix: Tensor) -> Tensor:
    """The matrix itself where its column stride is 1, whatever its row stride; else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.size(1) <= 1 else matrix.contiguous()


def scratch(device: torch.device, *lengths: int) -> tuple[Tensor | None, list[int]]:
    """Room that a launch needs for itself: float32 arrays in one allocation.

    Args:
        device: where.
        lengths: numbers of each array.

    Returns:
        What has to live until the launch, and the address of every array, a multiple of 16 bytes.
    """
    starts, total = [], 0
    for length in lengths:
        starts.append(4 * total)
        total += -(-length // 4) * 4
    if total == 0:
        return None, [0] * len(lengths)
    room = torch.empty(total, dtype=torch.float32, device=device)
    return room, [room.data_ptr() + start for start in starts]


def empty_values(adj: Adjacency, like: Tensor) -> Tensor:
    """Room for a result per edge value, for kernels that write those of stored entries.

    Values of edges that inserted loops replaced, which no entry stands for, are 0.
    """
    every_value_is_written = adj.num_values == adj.num_edges
    return (torch.empty_like if every_value_is_written else torch.zeros_like)(like)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that matrix products of ``x`` take under autocast; None where it is off."""
    # The name of a device is a new string each time, which takes longer than both questions.
    device_type = "cuda" if x.is_cuda else x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Casts float32 features to the autocast dtype where autocast is on, as for a matrix product.

    Negative views are written out.
    """
    dtype = autocast_dtype(next(tensor for tensor in tensors if tensor is not None))
    if dtype is None:
        return [written_out(tensor) for tensor in tensors]
    return [
        tensor.to(dtype)
        if tensor is not None and tensor.dtype not in (dtype, torch.float64) and tensor.is_floating_point()
        else written_out(tensor)
        for tensor in tensors
    ]


@overload
def written_out(tensor: Tensor) -> Tensor: ...
@overload
def written_out(tensor: None) -> None: ...
@overload
def written_out(tensor: Tensor | None) -> Tensor | None: ...
def written_out(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its sign in memory: that of ``z.conj().imag`` is a flag, which no kernel sees.

    Traces, which cannot ask for it, end in PyTorch's dispatcher, which writes such operands out.
    """
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_neg():
        return tensor
    return tensor.resolve_neg()


def check_features(name: str, x: Tensor, rows: int, rows_name: str, adj: Adjacency) -> None:
    """Features of one node side: floating tensor of `rows` rows on the structure's device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPE_CODE:
        raise TypeError(f"{name}: expected float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() < 1 or x.size(0) != rows:
        raise ValueError(f"{name}: expected {rows_name} = {rows} rows, got shape {tuple(x.shape)}")
    if x.device != adj.device:
        raise ValueError(
            f"{name}: expected device {adj.device} like the Adjacency, got {x.device}; move one with .to()"
        )


def check_heads(heads: int, device: torch.device) -> None:
    """Rejects more heads than the grid of a CUDA kernel has room for."""
    if device.type == "cuda" and heads > MOST_HEADS:
        raise ValueError(
            f"expected at most {MOST_HEADS} heads on CUDA, got {heads}; pass them in several calls"
        )


def check_value(value: Tensor, x: Tensor, name: str) -> None:
    """Values of edges, whatever their shape: floating, on the device of the features ``x`` called `name`."""
    if not isinstance(value, Tensor) or value.dtype not in DTYPE_CODE:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"value: expected a floating tensor, got {kind}")
    if value.device != x.device:
        raise ValueError(f"value: expected device {x.device} like {name}, got {value.device}")


def widened_value(value: Tensor, x: Tensor) -> Tensor:
    """The values of edges in a dtype that kernels take beside features ``x``."""
    accumulation = accumulation_dtype(x.dtype)
    value = written_out(value)
    return value if value.dtype in (x.dtype, accumulation) else value.to(accumulation)


def check_bias(bias: Tensor, x: Tensor, width: int, name: str) -> Tensor:
    """One number per feature, flat, on the device of the features ``x`` called `name`."""
    if bias.numel() != width:
        raise ValueError(f"bias: expected {width} entries, one per feature, got {bias.numel()}")
    if bias.device != x.device:
        raise ValueError(f"bias: expected device {x.device} like {name}, got {bias.device}")
    bias = written_out(bias)
    return bias if bias.dim() == 1 else bias.reshape(-1)


def check_scale(name: str, scale: Tensor | None, rows: int, x: Tensor) -> Tensor | None:
    """A constant factor per row, in the accumulation dtype."""
    if scale is None:
        return None
    if scale.shape != (rows,):
        raise ValueError(f"{name}: expected shape ({rows},), got {tuple(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"{name}: expected device {x.device}, got {scale.device}")
    if scale.requires_grad:
        raise ValueError(
            f"{name}: is a constant and gets no gradient, but it requires one; "
            "multiply the features (scale_src) or the result (scale_dst) by it instead"
        )
    dtype = accumulation_dtype(x.dtype)
    scale = written_out(scale)
    return scale if scale.dtype == dtype and scale.is_contiguous() else scale.to(dtype).contiguous()


#: Rows up to which PyTorch's sum takes a GPU no longer than ours, and the host a launch and two allocations
#: less (20,000 of 128: 23 us each).
_FEW_ROWS = 20_000
#: Parts of a matrix for each multiprocessor: enough blocks of threads to keep its memory busy.
_PARTS = 4


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def sum_of_rows(rows: Tensor, dtype: torch.dtype, once: bool | None = None) -> Tensor:
    """``rows.sum(0, dtype=dtype)``, added up in float64 where PyTorch's takes longer.

    PyTorch's sum of a tall matrix leaves most of a GPU idle: that of (160,000, 128) takes 125 us in 16 bits
    on an H200.

    Args:
        rows: (N, ...); a gradient whose own gradient somebody wants is summed by PyTorch.
        dtype: of the result.
        once: what `is_first_derivative` says of it, for callers that asked.
    """
    num_rows = rows.shape[0]
    if (
        num_rows <= _FEW_ROWS
        or not rows.is_cuda
        or not (is_first_derivative(rows) if once is None else once)
        or 0 in rows.stride()  # one row for all, as after out.sum()
    ):
        return rows.sum(0, dtype=dtype)
    matrix = rows if rows.dim() == 2 else rows.flatten(1)
    width = matrix.shape[1]
    row_stride, column_stride = matrix.stride()
    if width == 0 or (width > 1 and column_stride != 1):
        return rows.sum(0, dtype=dtype)
    index, num_parts = device_index(rows.device), _PARTS * multiprocessors(rows.device)
    partial = rows.new_empty(num_parts, width, dtype=torch.float64)
    out = rows.new_empty(rows.shape[1:], dtype=dtype)
    place = (partial.data_ptr(), num_parts, out.data_ptr(), DTYPE_CODE[dtype], index, queue(index))
    _C.sum_of_rows(matrix.data_ptr(), num_rows, width, row_stride, DTYPE_CODE[matrix.dtype], *place)
    return out
