"""What fused operators keep for the backward pass, and their second derivatives."""

from __future__ import annotations

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
    own instead, which autograd frees like any saved tensor, and beside it an empty tensor that shares the
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
    # Aliases: one tensor may be several inputs, of which each has a gradient of its own.
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    wants = [tensor is not None and needs for tensor, needs in zip(aliases, needed, strict=False)]
    wanted = [tensor for tensor, each in zip(aliases, wants, strict=True) if tensor is not None and each]
    with torch.autocast(grad.device.type, enabled=False):  # the forward pass has decided every dtype
        found = iter(torch.autograd.grad(compute(*aliases), wanted, grad, create_graph=True))
    return [next(found) if each else None for each in wants]
