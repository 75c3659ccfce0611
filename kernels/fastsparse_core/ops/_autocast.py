"""Mixed precision: casts operands like autocast, and stores weights for backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core.ops._operands import written_out

#: Dtypes that autocast casts.
CAST = (torch.float32, torch.bfloat16, torch.float16)
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
#: True if products of 16-bit matrices can return float32 without a cast (torch 2.8 and later, on CUDA).
_GIVES_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()


def without_autocast(gradients: Callable[..., tuple[Any, ...]], ctx: Any, *grads: Tensor | None) -> Any:
    """``gradients(ctx, *grads)`` with autocast off, because the forward pass has chosen every dtype."""
    if not is_any_autocast_enabled():
        return gradients(ctx, *grads)
    some = next(each for each in grads if each is not None)
    with torch.autocast(some.device.type, enabled=False):
        return gradients(ctx, *grads)


class Uncast(NamedTuple):
    """A weight in its own dtype; a forward pass under autocast multiplied a cast copy of it.

    Only second derivatives need the weight itself. Autograd does not save the weight, because a saved weight
    must not be edited before the backward pass. A linear layer also saves only the cast copy.
    """

    weight: Tensor
    version: int

    @classmethod
    def of(cls, weight: Tensor, multiplied: Tensor) -> Uncast | None:
        """An `Uncast` if ``multiplied`` is a cast copy of ``weight``; None if they are the same tensor."""
        return None if multiplied is weight else cls.kept(weight)

    @classmethod
    def kept(cls, weight: Tensor) -> Uncast:
        """An `Uncast` of a weight. The forward pass multiplied a copy of the weight in another dtype."""
        return cls(weight, version_of(weight))

    def as_it_was(self) -> Tensor:
        """Returns the weight, after checking that it has not changed.

        Raises:
            RuntimeError: the weight was edited after the forward pass.
        """
        check_versions((self.weight,), (self.version,))
        return self.weight

    def cast_again(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the products, by a differentiable cast; raises errors of `as_it_was`."""
        return self.as_it_was().to(dtype)


def version_of(tensor: Tensor) -> int:
    """The version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """:func:`version_of` for several tensors; 0 for None."""
    versions: tuple[int, ...] = ()
    for tensor in tensors:  # in Python 3.11, a comprehension is one more call
        versions += (0 if tensor is None or tensor.is_inference() else tensor._version,)
    return versions


def check_versions(tensors: Sequence[Tensor | None], versions: tuple[int, ...]) -> None:
    """Raises an error if weights were edited after the forward pass.

    Raises:
        RuntimeError: a weight was edited.
    """
    if versions_of(tensors) != versions:
        raise RuntimeError(
            "weight: modified by an inplace operation between the forward pass and a backward pass with "
            "create_graph=True, which needs it as it was"
        )


def product_in(left: Tensor, right: Tensor, dtype: torch.dtype, once: bool = True) -> Tensor:
    """The product of two matrices in a dtype other than their own, for weights' gradients under autocast.

    Args:
        left: matrix.
        right: matrix, in the dtype of ``left``.
        dtype: dtype of the result.
        once: whether the product itself needs no gradient.
    """
    if left.dtype == dtype:
        return torch.mm(left, right)
    if once and left.is_cuda and dtype == torch.float32 and _GIVES_FLOAT32:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of matrix products of ``x`` under autocast; None if autocast is off."""
    # Reading `device.type` creates a string in every call, which takes longer than both checks.
    device_type = "cuda" if x.is_cuda else x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """Casts float32 features to the autocast dtype if autocast is on, as for a matrix product.

    Views with PyTorch's negative bit are copied.
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
