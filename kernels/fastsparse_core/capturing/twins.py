"""Functions that mix all rows, without those of padding; and masks of tensors that stay, as indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fastsparse_core.capturing.padding import Rows


class Masks:
    """Bool tensors of nodes that a step was seen to index with, and their indices."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def add(self, mask: Tensor) -> None:
        """Reads a mask."""
        self._known[id(mask)] = (mask, mask._version, mask.nonzero().flatten())

    def read_again(self) -> None:
        """Reads all masks as they are now."""
        for mask, _, _ in list(self._known.values()):
            self.add(mask)

    def index_of(self, mask: Tensor) -> Tensor | None:
        """The indices of a mask that was read, and is the same object with the same content."""
        known = self._known.get(id(mask))
        return None if known is None or known[0] is not mask or known[1] != mask._version else known[2]

    def are_unchanged(self) -> bool:
        """Whether nothing was written to the masks since."""
        return all(mask._version == version for mask, version, _ in self._known.values())


class WithoutDropout(TorchFunctionMode):
    """Functional dropout drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.dropout, F.feature_alpha_dropout, F.alpha_dropout, F.dropout1d):
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class Twins(TorchFunctionMode):
    """Runs a step in the form that is recorded.

    Args:
        rows: of nodes and of edges, where they are padded.
        greatest: the greatest index in a tensor of indices, by address of its storage, where it begins there,
            and number of indices (-1, -1: any): what functions that count nodes or graphs would read from the
            device.
        masks: that the step was seen to use.
    """

    def __init__(self, rows: list[Rows], greatest: dict[tuple[int, int, int], int], masks: Masks) -> None:
        super().__init__()
        self.rows = {of_kind.room: of_kind for of_kind in rows}
        self._shares: dict[tuple[int, torch.dtype], _Shares] = {}
        self.greatest = greatest
        self.masks = masks

    def greatest_of(self, index: Tensor) -> int | None:
        """The greatest index there can be, if that is known."""
        address, first = index.untyped_storage().data_ptr(), index.storage_offset()
        places = [(address, first, size) for size in index.shape]
        known = [self.greatest[place] for place in places if place in self.greatest]
        return max(known) if known else self.greatest.get((address, -1, -1))

    def shares_of(self, rows: Rows, dtype: torch.dtype) -> _Shares:
        """What averages over the batch's rows need, computed once in a run."""
        found = self._shares.get((rows.room, dtype))
        if found is None:
            found = self._shares[rows.room, dtype] = _Shares.of(rows, dtype)
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        twin = _TWINS.get(func)
        if twin is not None:
            result = twin(self, func, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def is_mask(index: Any) -> bool:
    """Whether an index selects rows by truth values, which the host would have to count."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 1


def _item(twins: Twins, func: Any, x: Tensor, index: Any) -> Any:
    _check_room(twins, x, 0, index)
    places = twins.masks.index_of(index) if is_mask(index) else None
    return NotImplemented if places is None else x.index_select(0, places)


def _indexed(twins: Twins, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions of a dimension and an index."""
    given = dict(zip(("dim", "index"), args, strict=False)) | kwargs
    _check_room(twins, x, given.get("dim", 0), given.get("index"))
    return NotImplemented


def _check_room(twins: Twins, x: Any, dim: Any, index: Any) -> None:
    """Refuses indices of padding into what has no row for it, which would end the process on a GPU."""
    if not isinstance(index, Tensor) or index.is_floating_point() or not isinstance(x, Tensor):
        return
    greatest = twins.greatest_of(index) if isinstance(dim, int) else None
    if greatest is not None and x.dim() and x.size(dim) <= greatest:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} is indexed by a batch's nodes or edges, and has no row for "
            "padding; readouts of the framework have"
        )


def _max(twins: Twins, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    greatest = twins.greatest_of(x)
    return NotImplemented if greatest is None else torch.tensor(greatest, dtype=x.dtype)


# ---------------------------------------------------------------- batch normalisation


class _Shares(NamedTuple):
    """What averages over the batch's rows need of a batch.

    Attributes:
        share: of every row in a mean, (room,): 1 / count, 0 for padding.
        unbiased: count / (count - 1), ().
        rows: how many there are, int32 (1,).
        is_padding: bool (room, 1).
    """

    share: Tensor
    unbiased: Tensor
    rows: Tensor
    is_padding: Tensor

    @classmethod
    def of(cls, rows: Rows, dtype: torch.dtype) -> _Shares:
        return cls(
            rows.mask.to(dtype) / rows.count.clamp(min=1),
            rows.count / (rows.count - 1).clamp(min=1),
            rows.count.to(torch.int32).view(1),
            rows.mask.logical_not()[:, None],
        )


def _batch_norm(
    twins: Twins,
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
    rows = twins.rows.get(input.size(0)) if input.dim() == 2 else None
    if rows is None or not training:
        return NotImplemented
    shares = twins.shares_of(rows, torch.float64 if input.dtype == torch.float64 else torch.float32)
    return _BatchNorm.apply(input, weight, bias, running_mean, running_var, shares, momentum, eps)


class _BatchNorm(torch.autograd.Function):
    """Batch normalisation by the mean and variance of the batch's rows.

    In few operators: in a step on molecules every one takes the GPU about as long as a launch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        shares: _Shares,
        momentum: float,
        eps: float,
    ) -> Tensor:
        share = shares.share
        x, wide = x.contiguous(), x.to(share.dtype).contiguous()
        with torch.autocast(x.device.type, enabled=False):  # which would lower the products' precision
            mean = wide.t().mv(share)
            # The square of the difference, in one operator.
            var = torch.ops.aten.mse_loss(wide, mean.expand_as(wide), 0).t().mv(share)
        if running_mean is not None and running_var is not None:
            now = [mean.to(running_mean.dtype), (var * shares.unbiased).to(running_var.dtype)]
            torch._foreach_lerp_([running_mean, running_var], now, momentum)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.shares, ctx.has_bias = shares, bias is not None
        if x.is_cuda:
            return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)
        out = (wide - mean) * inverse
        out = out if weight is None else out * weight
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        shares, grad = ctx.shares, grad.contiguous()
        if x.is_cuda:
            sums = torch.batch_norm_backward_reduce(grad, x, mean, inverse, weight, True, True, True)
            sum_grad, sum_product, grad_weight, grad_bias = sums
            out = torch.batch_norm_backward_elemt(
                grad, x, mean, inverse, weight, sum_grad, sum_product, shares.rows
            )
        else:
            wide, centred = grad.to(mean.dtype), x.to(mean.dtype) - mean
            sum_grad, sum_product = wide.sum(0), (wide * centred).sum(0)
            grad_weight, grad_bias = sum_product * inverse, sum_grad
            mean_product = centred * (inverse.square() * (sum_product / shares.rows))
            out = (wide - sum_grad / shares.rows - mean_product) * inverse
            out = (out if weight is None else out * weight).to(x.dtype)
        out.masked_fill_(shares.is_padding, 0)  # padding has no part in the statistics
        return (
            out,
            None if weight is None else grad_weight.to(weight.dtype),
            grad_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            *(None,) * 5,
        )


# ---------------------------------------------------------------- losses of every node or edge


def _classes(twins: Twins, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Losses that ignore an index: that of padding."""
    rows = twins.rows.get(input.size(0))
    if rows is None or target.is_floating_point() or kwargs.get("reduction", "mean") == "none":
        return NotImplemented
    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
    mask = rows.mask.view(-1, *[1] * (target.dim() - 1))
    return func(input, target.masked_fill(mask.logical_not(), ignored), *args, **kwargs)


def _elementwise(twins: Twins, func: Any, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Losses of every number."""
    rows = twins.rows.get(input.size(0))
    reduction = kwargs.get("reduction", "mean")
    if rows is None or args or reduction not in ("mean", "sum") or input.shape != target.shape:
        return NotImplemented
    loss = func(input, target, **{**kwargs, "reduction": "none"})
    mask = rows.mask.view(-1, *[1] * (loss.dim() - 1))
    total = loss.masked_fill(mask.logical_not(), 0).sum()
    return total if reduction == "sum" else total / (rows.count * max(loss[0].numel(), 1))


_TWINS: dict[Any, Callable[..., Any]] = {
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
    F.batch_norm: _batch_norm,
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
