"""Handles functions that wait for the GPU: provides their results in a recorded step, or refuses the step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastsparse_core.capturing.constants import Answers, Origins, is_ours
from fastsparse_core.capturing.numbers import number_of
from fastsparse_core.capturing.refused import Refused
from fastsparse_core.log import current_line

#: Largest tensor, in elements, that a recorded step may return as a list of Python numbers.
_MOST_NUMBERS = 64
_OF_HOST = (int, float, bool)


class DeviceReads:
    """Replaces functions that read from the GPU during a run of a step.

    Args:
        origins: tells which tensors are the same in every run.
        answers: values that were read from tensors that are the same in every run.
        supports: whether graphs can be recorded on a device.
        defers: whether numbers are read only after the run.
    """

    def __init__(
        self, origins: Origins, answers: Answers, supports: Callable[[torch.device], bool], defers: bool
    ) -> None:
        self.origins, self.answers, self.supports, self.defers = origins, answers, supports, defers
        answers.begin_run()

    def read(self, tensor: Tensor) -> Any:
        """The number in a tensor, or a `Number` that is read later."""
        if not self.supports(tensor.device):
            return tensor.item()
        sources = self.origins.of(tensor)
        if sources is not None:
            return self.answers.ask("item", tensor.item, sources)
        return number_of(tensor) if self.defers else tensor.item()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that reads from the GPU; NotImplemented if it can be called unchanged."""
        handler = _HANDLERS.get(func)
        if handler is None or is_ours(sys._getframe(2)):
            return NotImplemented
        return handler(self, func, *args, **kwargs)

    def ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The stored result if it depends only on persistent tensors, otherwise NotImplemented."""
        sources = self.origins.of((args, kwargs))
        if sources is None:
            return NotImplemented
        found = self.answers.ask(func.__name__, lambda: func(*args, **kwargs), sources)
        self.origins.add(found, sources)
        return found


def _refuse(what: str) -> Refused:
    return Refused(f"{current_line()} {what}")


def _is_read(reads: DeviceReads, x: Any) -> bool:
    return isinstance(x, Tensor) and reads.supports(x.device)


def _item(reads: DeviceReads, func: Any, x: Tensor) -> Any:
    return reads.read(x) if _is_read(reads, x) else NotImplemented


def _list(reads: DeviceReads, func: Any, x: Tensor) -> Any:
    if not _is_read(reads, x):
        return NotImplemented
    found = reads.ask(func, (x,), {})
    if found is not NotImplemented or not reads.defers:
        return found
    if x.dim() > 1 or x.numel() > _MOST_NUMBERS:
        raise _refuse("reads numbers from the GPU. Return the tensor and read it after the step")
    return [number_of(part) for part in x.unbind()] if x.dim() else number_of(x)


def _value(what: str) -> Callable[..., Any]:
    """Makes a handler of functions that read a number which Python code then uses."""

    def read(reads: DeviceReads, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_read(reads, x):
            return NotImplemented
        found = reads.ask(func, (x, *args), kwargs)
        if found is NotImplemented and reads.defers:
            raise _refuse(what)
        return found

    return read


def _conversion(kind: type) -> Callable[..., Any]:
    """Makes a handler of ``float(x)`` or ``int(x)`` in unpatched code. It returns Python numbers."""

    def convert(reads: DeviceReads, func: Any, x: Any) -> Any:
        if not _is_read(reads, x):
            return NotImplemented
        sources = reads.origins.of(x)
        if sources is not None:
            return kind(reads.answers.ask("item", x.item, sources))
        if reads.defers:
            raise _refuse(
                "reads a number from the GPU that the step then uses. Return it with .item(), or compute "
                "with the tensor"
            )
        return NotImplemented

    return convert


def _size(reads: DeviceReads, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Handles functions whose output size is known only on the GPU."""
    if not _is_read(reads, x):
        return NotImplemented
    if func in (torch.where, Tensor.where) and (args or kwargs):
        return NotImplemented
    found = reads.ask(func, (x, *args), kwargs)
    if found is NotImplemented and reads.defers:
        raise _refuse(
            f"calls {func.__name__}(), whose output size is known only on the GPU. Call it outside of the "
            "step, or use a tensor of fixed size and a mask: torch.where(mask, x, 0)"
        )
    return found


def _repeat(reads: DeviceReads, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    given = args[0] if args else kwargs.get("repeats")
    counts = x if given is None else given
    if not _is_read(reads, counts) or kwargs.get("output_size") is not None:
        return NotImplemented
    sources = reads.origins.of(counts)
    if sources is None or counts.numel() == 1:
        return _size(reads, func, x, *args, **kwargs)
    total = reads.answers.ask("repeats", lambda: int(counts.sum()), sources)
    return func(x, *args, **{**kwargs, "output_size": total})


def _select(reads: DeviceReads, func: Any, x: Tensor, index: Any, *value: Any) -> Any:
    """Handles reads and writes of the rows that a bool mask selects."""
    parts = index if isinstance(index, tuple) else (index,)
    masks = [item for item in parts if isinstance(item, Tensor) and item.dtype == torch.bool and item.dim()]
    if not masks or not all(_is_read(reads, item) for item in (x, *masks)):
        return NotImplemented
    places: list[Any] = []
    for part in parts:
        if not any(part is mask for mask in masks):
            places.append(part)
            continue
        sources = reads.origins.of(part)
        if sources is None:
            if not reads.defers or (value and not (isinstance(value[0], Tensor) and value[0].dim())):
                return NotImplemented  # the version counter does not count such a write
            raise _refuse(
                "selects rows by a mask that changes, and their number is known only on the GPU. Multiply by "
                "the mask instead, for example with edge weights `mask.float()`"
            )
        places += reads.answers.ask("mask", functools.partial(part.nonzero, as_tuple=True), sources)
    result = func(x, tuple(places), *value)
    if not value:
        reads.origins.follow(func, (x, tuple(masks)), {}, result)
    return result


def _from_host(reads: DeviceReads, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Handles functions that make a tensor of Python numbers; it is copied to the device once."""
    data = args[-1:] if args else [kwargs.get("data")]
    device = args[0].device if isinstance(args[0] if args else None, Tensor) else kwargs.get("device")
    if device is None and not reads.supports(torch.device("cpu")):
        return NotImplemented
    if (device is not None and not reads.supports(torch.device(device))) or kwargs.get("requires_grad"):
        return NotImplemented
    if not all(type(item) in _OF_HOST for item in tree_leaves(data)):
        return NotImplemented
    found = reads.answers.ask(
        f"{func.__name__}{data!r}",
        lambda: func(*args, **kwargs),
        (),
        "makes a tensor of Python numbers that change between calls. Compute the numbers on the GPU",
    )
    reads.origins.add(found, ())
    return found


def _copy(reads: DeviceReads, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not (isinstance(x, Tensor) and x.is_cuda and reads.defers):
        return NotImplemented
    if func is Tensor.to:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, Tensor):
            target = target.device
        if not isinstance(target, (torch.device, str)):
            return NotImplemented
        if torch.device(target).type != "cpu":
            return NotImplemented
    raise _refuse("copies a tensor to the CPU. Return the tensor and copy it after the step")


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.item: _item,
    Tensor.tolist: _list,
    Tensor.__float__: _conversion(float),
    Tensor.__int__: _conversion(int),
    Tensor.__index__: _conversion(int),
    **dict.fromkeys(
        (
            Tensor.__bool__,
            Tensor.is_nonzero,
            torch.is_nonzero,
            Tensor.equal,
            torch.equal,
            Tensor.allclose,
            torch.allclose,
        ),
        _value("branches on a value on the GPU. Use torch.where, or branch outside of the step"),
    ),
    **dict.fromkeys(
        (Tensor.__format__, Tensor.__repr__), _value("prints a tensor. Return it and print it after the step")
    ),
    **dict.fromkeys(
        (
            getattr(kind, name)
            for kind in (Tensor, torch)
            for name in (
                *(
                    "nonzero",
                    "argwhere",
                    "masked_select",
                    "unique",
                    "unique_consecutive",
                    "bincount",
                    "where",
                ),
            )
            if hasattr(kind, name)
        ),
        _size,
    ),
    Tensor.repeat_interleave: _repeat,
    torch.repeat_interleave: _repeat,
    Tensor.__getitem__: _select,
    Tensor.__setitem__: _select,
    **dict.fromkeys((torch.tensor, torch.as_tensor, Tensor.new_tensor), _from_host),
    **dict.fromkeys((Tensor.cpu, Tensor.numpy, Tensor.to), _copy),
}
