"""Sums the gradients of parameters over all processes. Every process has a copy of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastsparse_core.distributed.agreement import check_agreement

#: Process group -> shapes and dtypes of parameters that are equal in all its processes, as compared before.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def all_reduce_gradients(
    parameters: nn.Module | Iterable[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    r"""Replaces the gradients of replicated parameters by their sums over all processes.

    .. math::
        \nabla_\theta \sum_r L_r = \sum_r \nabla_\theta L_r

    The loss :math:`L_r` of each process must be its share of the whole loss: the sum over local rows, divided
    by the number of rows of the whole graph. Then the result is the gradient that one GPU with the whole
    graph would compute. (DDP, in contrast, divides the sums by the number of processes.) 16-bit gradients are
    summed in float32, others in their dtype, with one message per dtype. Sparse gradients become dense. All
    processes must call this function with the same parameters.

    If a process has no gradient for a parameter, for example because its part of the graph has no edges of a
    type, its gradient becomes the sum of the other processes' gradients. If no process has a gradient, the
    gradient stays None.

    Args:
        parameters: a model, or a list of parameters. Parameters with ``requires_grad=False`` and without a
            gradient are ignored.
        group: the processes; None: all.

    Raises:
        ValueError: the processes passed parameters that differ in number, shape or dtype. All processes raise
            the error, in the first call with these parameters.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or under torchrun
        >>> from fastsparse_core.distributed import all_reduce_gradients
        >>> model = torch.nn.Linear(4, 1)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> all_reduce_gradients(model)
        >>> dist.destroy_process_group()
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    # Each parameter once, because its gradient is summed in place.
    each = {id(it): it for it in parameters}.values()
    trained = [it for it in each if it.requires_grad or it.grad is not None]
    _check_parameters(trained, group)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in trained:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_dtype.values():
        _all_reduce(alike, group)


def _check_parameters(parameters: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Raises an error if the processes passed different parameters, whose sum would hang or be wrong."""
    if not parameters:
        return
    kinds = tuple(f"{tuple(it.shape)} of {it.dtype}" for it in parameters)
    processes = group or dist.group.WORLD
    assert processes is not None
    agreed = _agreed.setdefault(processes, set())
    if kinds not in agreed:
        device, rank = parameters[0].device, dist.get_rank(group)
        check_agreement({"number of parameters": len(kinds)}, device, rank, group)
        shapes = {f"parameter {nth}": kind for nth, kind in enumerate(kinds)}
        check_agreement(shapes, device, rank, group)
        agreed.add(kinds)


def _all_reduce(parameters: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sums the gradients of parameters of one dtype over all processes, in one message.

    The message also counts, for each parameter, the processes that have a gradient. A process without a
    gradient for a parameter reads this count.
    """
    dtype, device = parameters[0].dtype, parameters[0].device
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    grads = [it.grad for it in parameters]
    absent = [nth for nth, grad in enumerate(grads) if grad is None]
    count = torch.ones(len(grads), dtype=wide, device=device)
    if absent:
        count[absent] = 0
    sums, addresses = list[Tensor](), set[int]()
    for it, grad in zip(parameters, grads, strict=True):
        if grad is None:
            total = torch.zeros_like(it, dtype=wide, memory_format=torch.contiguous_format)
        else:  # the gradient itself, if it has this form already
            dense = grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()
            total = dense.to(wide).contiguous().resolve_conj().resolve_neg()
            if total.data_ptr() in addresses:  # parameters share a gradient, which must not be summed twice
                total = total.clone()
            addresses.add(total.data_ptr())
        sums.append(total)
    processes = group or dist.group.WORLD
    assert processes is not None
    # One launch sums all tensors in place, without copies of them.
    processes.allreduce_coalesced([*sums, count]).wait()
    copied = list[tuple[Tensor, Tensor]]()
    for it, grad, total in zip(parameters, grads, sums, strict=True):
        if grad is not None and not _is_writable(grad):
            it.grad = total.to(dtype)
        elif grad is not None and grad.data_ptr() != total.data_ptr():
            copied.append((grad, total))
    if copied:  # one launch for all parameters
        torch._foreach_copy_([it for it, _ in copied], [total for _, total in copied])
    # The counts are read only if necessary, because the host waits for the GPU when it reads them.
    elsewhere = count.tolist() if absent else []
    for nth in absent:
        if elsewhere[nth]:
            parameters[nth].grad = sums[nth].to(dtype)


def _is_writable(grad: Tensor) -> bool:
    """True if sums can be copied into a gradient: it is dense, and every element has its own memory."""
    return (
        grad.layout is torch.strided
        and not (grad.is_neg() or grad.is_conj())
        and torch._debug_has_internal_overlap(grad) != 1
    )
