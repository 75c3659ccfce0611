"""Tensors that fused operators store for the backward pass, and their second derivatives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsparse_core.ops._eager import is_plain_eager


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def kept_result(ctx: Any, out: Tensor) -> Tensor | None:
    """The result that the backward pass needs; None on the CPU, whose kernels sum <grad, out> per entry."""
    ctx.written = None
    return alias_of(ctx, out) if out.is_cuda else None


def alias_of(ctx: Any, out: Tensor) -> Tensor:
    """An alias of a result that may be edited before the backward pass, as in ``relu_(conv(x, graph))``.

    If the result itself were saved, autograd would raise an error after such an edit. The alias has its own
    version counter, and autograd frees it like any saved tensor. In addition, ``ctx.written`` stores an empty
    tensor that shares the result's counter. If that counter has changed, the backward pass computes the
    result again.
    """
    ctx.written = None
    if not is_plain_eager(out):
        return out  # tensors of a trace have no version counters to compare
    counter = out.detach()
    counter.data = _nothing(out.dtype, out.device)
    ctx.written = (counter, counter._version)
    return out.data


def was_written(ctx: Any) -> bool:
    return ctx.written is not None and ctx.written[0]._version != ctx.written[1]


def saved_tensors(ctx: Any, unread: Sequence[int], first: bool) -> tuple[Any, ...]:
    """The saved tensors of an autograd node, some of which may have been edited in place.

    A first derivative reads only the shapes of the tensors ``unread``, so ``x += conv(x, graph)`` may edit
    them before the backward pass. Autograd would raise an error because of their versions. It does not
    compare versions of tensors with saved-tensor hooks, so after such an error, hooks that change nothing are
    registered. Without edits this costs nothing.

    Args:
        ctx: context of the node.
        unread: positions of the tensors whose content a first derivative does not read.
        first: whether this is a first derivative.

    Raises:
        RuntimeError: a tensor that is read was edited since the forward pass.
    """
    if first:
        try:
            saved: tuple[Any, ...] = ctx.saved_tensors
        except RuntimeError:
            pass
        else:
            return saved
        raw = ctx._raw_saved_tensors
        for place in unread:
            with contextlib.suppress(RuntimeError):  # raised if nothing was saved, or it has hooks already
                raw[place].register_hooks(_itself, _itself)
        ctx.ignores_versions = True
    elif getattr(ctx, "ignores_versions", False):
        raise RuntimeError(
            "features: modified by an inplace operation between the forward pass and a backward pass with "
            "create_graph=True, which needs the original features"
        )
    found: tuple[Any, ...] = ctx.saved_tensors
    return found


def with_cure(error: RuntimeError, who: str) -> RuntimeError:
    """Adds to autograd's error about edited features which operator needs them and what to write instead."""
    if "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\n{who}: the backward pass needs the features of the forward pass, but they were changed in "
        "place; write `x = x + conv(x, graph)` instead of `x += conv(x, graph)`, and do the same for edge "
        "features"
    )


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def unfused_gradients(
    compute: Callable[..., Tensor], grad: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Differentiable gradients by the unfused operators, which store rows per edge.

    Args:
        compute: function that computes the result from ``inputs`` with unfused operators.
        grad: gradient of the result.
        inputs: inputs of the operator.
        needed: whether each input requires a gradient.
    """
    # Aliases, because one tensor may be used as several inputs, and each input has its own gradient.
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    wants = [tensor is not None and needs for tensor, needs in zip(aliases, needed, strict=False)]
    wanted = [tensor for tensor, each in zip(aliases, wants, strict=True) if tensor is not None and each]
    with torch.autocast(grad.device.type, enabled=False):  # the forward pass has already chosen the dtypes
        found = iter(torch.autograd.grad(compute(*aliases), wanted, grad, create_graph=True))
    return [next(found) if each else None for each in wants]
