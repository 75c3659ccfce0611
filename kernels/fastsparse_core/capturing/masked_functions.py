"""Replaces functions that mix all rows by versions that ignore padding; stores masks as indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastsparse_core import recorded
from fastsparse_core.capturing.batch_norm import masked_batch_norm
from fastsparse_core.capturing.constants import Carried
from fastsparse_core.capturing.device_reads import DeviceReads
from fastsparse_core.capturing.padding import Rows
from fastsparse_core.ops._autocast import autocast_dtype, version_of, without_autocast
from fastsparse_core.ops._eager import PLAIN, is_plain_eager
from fastsparse_core.ops._sum_of_rows import sum_of_rows


class Masks:
    """Bool tensors that a step indexes with, and the indices of their True entries."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def add(self, mask: Tensor) -> None:
        """Reads the indices of a mask from the device and stores them."""
        self._known[id(mask)] = (mask, version_of(mask), mask.nonzero().flatten())

    def read_again(self) -> None:
        """Reads the indices of all known masks again."""
        for mask, _, _ in list(self._known.values()):
            self.add(mask)

    def index_of(self, mask: Tensor) -> Tensor | None:
        """The stored indices of a mask; None if no indices are stored or the mask was written to since."""
        known = self._known.get(id(mask))
        return None if known is None or known[0] is not mask or known[1] != version_of(mask) else known[2]

    def are_unchanged(self) -> bool:
        """Returns whether no known mask was written to since its indices were read."""
        return all(version_of(mask) == version for mask, version, _ in self._known.values())


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


class WithoutDropout(TorchFunctionMode):
    """Within this mode, functional dropout returns a copy of its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUTS:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class MaskedFunctions(TorchFunctionMode):
    """Mode in which a step runs for a recording: functions ignore padding and read nothing from the device.

    Args:
        rows: which rows are padding, for every padded kind of nodes and edges.
        greatest: the greatest index in an index tensor, by (address of its storage, offset, number of
            indices); offset and number -1: any. Functions that count nodes or graphs would read it from the
            device.
        masks: the masks that the step indexes with.
        reads: replaces functions that read from the device; None: they are not replaced.
        carried: finds tensors that the previous run created.
    """

    def __init__(
        self,
        rows: list[Rows],
        greatest: dict[tuple[int, int, int], int],
        masks: Masks,
        reads: DeviceReads | None = None,
        carried: Carried | None = None,
    ) -> None:
        super().__init__()
        self.reads, self.carried = reads, carried
        self.rows = {of_kind.capacity: of_kind for of_kind in rows}
        self.greatest = greatest
        self.masks = masks

    def greatest_of(self, index: Tensor) -> int | None:
        """The greatest index that a tensor may contain; None if it is not known."""
        address, first = index.untyped_storage().data_ptr(), index.storage_offset()
        places = [(address, first, size) for size in index.shape]
        known = [self.greatest[place] for place in places if place in self.greatest]
        return max(known) if known else self.greatest.get((address, -1, -1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, reads = kwargs or {}, self.reads
        masked = _MASKED.get(func)
        result = NotImplemented if masked is None else masked(self, func, *args, **kwargs)
        if reads is None:
            return func(*args, **kwargs) if result is NotImplemented else result
        if result is NotImplemented:
            result = reads.call(func, args, kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        reads.origins.follow(func, args, kwargs, result)
        if self.carried is not None:
            self.carried.follow(func, args, kwargs, result)
        return result


def is_mask(index: Any) -> bool:
    """Returns whether an index is a bool mask of rows. The host would have to count the rows it selects."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 1


def _item(mode: MaskedFunctions, func: Any, x: Tensor, index: Any) -> Any:
    _check_capacity(mode, x, 0, index)
    if is_mask(index):
        places = mode.masks.index_of(index)
        return NotImplemented if places is None else x.index_select(0, places)
    run = recorded.current()
    entries = next((entries for mask, entries in run.masks if mask is index), None) if run else None
    return NotImplemented if entries is None else x.flatten(0, 1).index_select(0, entries)


def _indexed(mode: MaskedFunctions, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Checks the index of functions with the arguments ``dim`` and ``index``."""
    given = dict(zip(("dim", "index"), args, strict=False)) | kwargs
    _check_capacity(mode, x, given.get("dim", 0), given.get("index"))
    return NotImplemented


def _check_capacity(mode: MaskedFunctions, x: Any, dim: Any, index: Any) -> None:
    """Raises an error if indices of padding exceed a tensor, which would end the process on a GPU."""
    if not isinstance(index, Tensor) or index.is_floating_point() or not isinstance(x, Tensor):
        return
    greatest = mode.greatest_of(index) if isinstance(dim, int) else None
    if greatest is not None and x.dim() and x.size(dim) <= greatest:
        raise RuntimeError(
            f"capture pads batches, so ids of nodes or edges reach {greatest}, but they index dimension "
            f"{dim} of a tensor of shape {tuple(x.shape)}. Put the tensor into the batch, or use PyG's or "
            "DGL's pooling"
        )


def _max(mode: MaskedFunctions, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    greatest = mode.greatest_of(x)
    if greatest is None:
        return NotImplemented
    found = torch.tensor(greatest, dtype=x.dtype)
    if mode.reads is not None:
        mode.reads.origins.add(found, ())
    return found


# ---------------------------------------------------------------- batch normalisation


def _batch_norm(
    mode: MaskedFunctions,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    rows = mode.rows.get(input.size(0)) if input.dim() == 2 else None
    if rows is None or not training:
        return NotImplemented
    how = (weight, bias, running_mean, running_var, momentum, eps)
    return masked_batch_norm(input, rows.mask, rows.count, *how)


# ---------------------------------------------------------------- linear maps


def _linear(
    mode: MaskedFunctions, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """Replaces PyTorch's slow sum for the gradient of a bias, a tenth of GIN's step time on molecules."""
    if not (
        bias is not None
        and bias.requires_grad
        and input.is_cuda
        and input.dim() == 2
        and torch.is_grad_enabled()
        and is_plain_eager(input)
        and type(weight) in PLAIN
        and type(bias) in PLAIN
    ):
        return NotImplemented
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = input.to(dtype), weight.to(dtype), bias.to(dtype)
    return _Linear.apply(input, weight, bias) if input.dtype == weight.dtype == bias.dtype else NotImplemented


class _Linear(torch.autograd.Function):
    """dX = dY W, dW = dY^T X, db = sum of dY."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result: tuple[Tensor | None, ...] = without_autocast(_gradients_of_linear, ctx, grad)
        return result


def _gradients_of_linear(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), (needs_x, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
    return (
        grad.mm(weight) if needs_x else None,
        grad.t().mm(x) if needs_weight else None,
        sum_of_rows(grad, grad.dtype) if needs_bias else None,
    )


# ---------------------------------------------------------------- sums and means over all nodes or edges


def _sum(mode: MaskedFunctions, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    mask, _ = _padding_of(mode, x, *args, **kwargs)
    return NotImplemented if mask is None else x.masked_fill(mask, 0).sum(*args, **kwargs)


def _mean(mode: MaskedFunctions, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    mask, count = _padding_of(mode, x, *args, **kwargs)
    return NotImplemented if mask is None else x.masked_fill(mask, 0).sum(*args, **kwargs) / count


def _padding_of(
    mode: MaskedFunctions, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor | None, Any]:
    """Bool mask, True where a reduction's input is padding, and number of reduced entries without padding."""
    rows = mode.rows.get(x.size(0)) if x.dim() else None
    dims = range(x.dim()) if dim is None or dim == () else dim if isinstance(dim, (tuple, list)) else (dim,)
    if rows is None:
        return None, None
    reduced = {each % x.dim() for each in dims}
    if 0 not in reduced:
        return None, None
    mask = rows.mask.view(-1, *[1] * (x.dim() - 1)).logical_not()
    return mask, rows.count * math.prod(x.size(each) for each in reduced - {0})


# ---------------------------------------------------------------- losses of every node or edge


def _classes(
    mode: MaskedFunctions, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Computes a loss with ``ignore_index``: targets of padding get the ignored index."""
    rows = mode.rows.get(input.size(0))
    if rows is None or target.is_floating_point() or kwargs.get("reduction", "mean") == "none":
        return NotImplemented
    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
    mask = rows.mask.view(-1, *[1] * (target.dim() - 1))
    return func(input, target.masked_fill(mask.logical_not(), ignored), *args, **kwargs)


def _elementwise(
    mode: MaskedFunctions, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Computes an elementwise loss without the rows of the padding."""
    rows = mode.rows.get(input.size(0))
    reduction = kwargs.get("reduction", "mean")
    if rows is None or args or reduction not in ("mean", "sum") or input.shape != target.shape:
        return NotImplemented
    loss = func(input, target, **{**kwargs, "reduction": "none"})
    mask = rows.mask.view(-1, *[1] * (loss.dim() - 1))
    total = loss.masked_fill(mask.logical_not(), 0).sum()
    return total if reduction == "sum" else total / (rows.count * max(loss[0].numel(), 1))


_MASKED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _item,
    **dict.fromkeys(
        (
            getattr(kind, name)
            for kind in (Tensor, torch)
            for name in ("gather", "index_add", "index_select", "scatter", "scatter_add", "scatter_reduce")
        ),
        _indexed,
    ),
    **dict.fromkeys(
        (getattr(Tensor, name) for name in ("index_add_", "scatter_", "scatter_add_", "scatter_reduce_")),
        _indexed,
    ),
    Tensor.max: _max,
    torch.max: _max,
    **dict.fromkeys((Tensor.sum, torch.sum), _sum),
    **dict.fromkeys((Tensor.mean, torch.mean), _mean),
    F.batch_norm: _batch_norm,
    F.linear: _linear,
    F.cross_entropy: _classes,
    F.nll_loss: _classes,
    **dict.fromkeys(
        (
            F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
            F.mse_loss,
            F.l1_loss,
            F.smooth_l1_loss,
            F.huber_loss,
        ),
        _elementwise,
    ),
}
