"""What fused operators keep for the backward pass, and their second derivatives."""

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
    """What of a result the backward pass keeps where the CPU's kernels sum <grad, out> from the entries."""
    ctx.written = None
    return alias_of(ctx, out) if out.is_cuda else None


def alias_of(ctx: Any, out: Tensor) -> Tensor:
    """A result that may be written to before the backward pass, as by ``relu_(conv(x, graph))``.

    Saved as it is, autograd would refuse the backward pass. Saved is an alias with a version counter of its
    own instead, which autograd frees like any saved tensor, and next to it an empty tensor that shares the
    result's counter: where that has moved, the backward pass computes the result again.
    """
    ctx.written = None
    if not is_plain_eager(out):
        return out  # a trace has no versions to compare
    counter = out.detach()
    counter.data = _nothing(out.dtype, out.device)
    ctx.written = (counter, counter._version)
    return out.data


def was_written(ctx: Any) -> bool:
    return ctx.written is not None and ctx.written[0]._version != ctx.written[1]


def saved_tensors(ctx: Any, unread: Sequence[int], first: bool) -> tuple[Any, ...]:
    """What a node of autograd's graph saved. A first derivative reads only the shapes of some of it.

    Those may be written before the backward pass, as ``x += conv(x, graph)`` does, and cost nothing where
    they are not: autograd, which would refuse, does not compare the versions of what hooks bring back. As
    with PyTorch's own nodes, a backward pass frees results that were written to what a node keeps.

    Args:
        ctx: of the node.
        unread: places of what a first derivative does not read.
        first: whether this is one.

    Raises:
        RuntimeError: what is read was written since.
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
            with contextlib.suppress(RuntimeError):  # None, or what has hooks
                raw[place].register_hooks(_itself, _itself)
        ctx.ignores_versions = True
    elif getattr(ctx, "ignores_versions", False):
        raise RuntimeError(
            "features: modified by an inplace operation between the forward pass and a backward pass with "
            "create_graph=True, which needs them as they were"
        )
    found: tuple[Any, ...] = ctx.saved_tensors
    return found


def with_cure(error: RuntimeError, who: str) -> RuntimeError:
    """Autograd's refusal of features that were written to, with who needs them and what to write instead."""
    if "modified by an inplace operation" not in str(error):
        return error
    return RuntimeError(
        f"{error}\n{who}: needs features as they were in the forward pass; write `x = x + conv(x, graph)` in "
        "place of `x += conv(x, graph)`, and likewise for features of edges"
    )


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def unfused_gradients(
    compute: Callable[..., Tensor], grad: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients that have gradients themselves: those of the unfused operators, with memory for every edge.

    Args:
        compute: the result from ``inputs``, by unfused operators.
        grad: of the result.
        inputs: of the operator.
        needed: which of them want a gradient.
    """
    # Aliases: one tensor may be several inputs, and each has a gradient of its own.
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    wants = [tensor is not None and needs for tensor, needs in zip(aliases, needed, strict=False)]
    wanted = [tensor for tensor, each in zip(aliases, wants, strict=True) if tensor is not None and each]
    with torch.autocast(grad.device.type, enabled=False):  # the forward pass has decided every dtype
        found = iter(torch.autograd.grad(compute(*aliases), wanted, grad, create_graph=True))
    return [next(found) if each else None for each in wants]
