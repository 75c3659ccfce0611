"""Gradients of parameters that every process holds a copy of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def all_reduce_gradients(
    parameters: nn.Module | Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    r"""Replaces the gradients of replicated parameters by their sums over all processes.

    .. math::
        \nabla_\theta \sum_r L_r = \sum_r \nabla_\theta L_r

    With a loss :math:`L_r` that is a process's share of the whole (its sum over local rows, divided by the
    number of all rows), the result is the gradient that one GPU with the whole graph would have. DDP divides
    by the number of processes besides. Sums of float32 and wider are taken in their dtype, those of 16 bits
    in float32; one message for each dtype. All processes must call it, with the same parameters.

    Args:
        parameters: a model or its parameters; those without gradient are left out, on every process alike.
        group: the processes; None: all.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for dtype, grads in by_dtype.items():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        if dtype in (torch.float16, torch.bfloat16):
            flat = flat.float()
        dist.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
