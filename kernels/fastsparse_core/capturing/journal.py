"""A step that is run on trial: whatever it writes is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Journal(TorchDispatchMode):
    """Keeps what memory held before operators write to it, of memory that was there before."""

    #: For operators that leave PyTorch to run what a mode watches: this one has nothing to see in them.
    is_harmless = True

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._born: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for nth, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = kwargs.get(argument.name) if nth >= len(args) else args[nth]
                    for tensor in tree_leaves(given):
                        if isinstance(tensor, Tensor):
                            self.keep(tensor)
        result = func(*args, **kwargs)
        if not func._schema.is_mutable:
            given = {_storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if _has_memory(tensor)}
            for tensor in tree_leaves(result):
                if _has_memory(tensor) and _storage(tensor)._cdata not in given:
                    reference = StorageWeakRef(_storage(tensor))
                    self._born[reference.cdata] = reference
        return result

    def keep(self, kept: Tensor | torch.UntypedStorage) -> None:
        """Keeps what a tensor or its memory holds now."""
        storage = _storage(kept) if isinstance(kept, Tensor) else kept
        born = self._born.get(storage._cdata)
        if (born is None or born.expired()) and storage._cdata not in self._kept:
            self._kept[storage._cdata] = (storage, storage.clone())

    @property
    def written(self) -> list[torch.UntypedStorage]:
        """The memory that was there before."""
        return [storage for storage, _ in self._kept.values()]

    def undo(self) -> None:
        """Puts everything back."""
        for storage, before in self._kept.values():
            storage.copy_(before)


def _has_memory(item: Any) -> bool:
    return isinstance(item, Tensor) and item.layout is torch.strided and not item.is_meta


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@dataclass
class Trial:
    """What a job did that was undone.

    Attributes:
        results: copies of the tensors among its results, and of buffers.
        gradients: copies of the parameters' gradients.
        written: memory that it wrote to, and that was there before.
    """

    results: list[Tensor]
    gradients: list[Tensor]
    written: list[torch.UntypedStorage]


def on_trial(
    job: Callable[[], Any],
    parameters: Iterable[Tensor],
    buffers: Iterable[Tensor],
    device: torch.device,
    keeps: Iterable[Tensor | torch.UntypedStorage] = (),
) -> Trial:
    """Runs a job and undoes what it did to tensors, gradients and generators of random numbers.

    Args:
        job: called once.
        parameters: whose gradients it may replace.
        buffers: to be compared; batch normalisation writes to them without saying so.
        device: where it draws numbers, besides the CPU.
        keeps: what it writes to besides without saying so, as the replay of a CUDA graph does.
    """
    parameters, buffers = list(parameters), list(buffers)
    before = [parameter.grad for parameter in parameters]
    journal = _Journal()
    for kept in (*buffers, *keeps):
        journal.keep(kept)
    devices = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.callback(_set_gradients, parameters, before)
        stack.callback(torch.no_grad()(journal.undo))
        stack.enter_context(torch.random.fork_rng(devices))
        with journal:
            result = job()
        tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        results = [tensor.detach().clone() for tensor in (*tensors, *buffers)]
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            for parameter in parameters
        ]
        written = journal.written
    return Trial(results, gradients, written)


def _set_gradients(parameters: list[Tensor], gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def difference(one: Trial, other: Trial) -> tuple[float, str]:
    """The greatest relative difference of two trials, and of what; gradients relative to the longest."""
    if len(one.results) != len(other.results):
        return float("inf"), "the number of results"
    worst, where = 0.0, ""
    for x, y in zip(one.results, other.results, strict=True):
        if x.shape != y.shape:
            return float("inf"), f"a result's shape, {tuple(y.shape)} instead of {tuple(x.shape)}"
        if x.is_floating_point():
            found = _relative(x, y, _norm(x))
        else:
            found = 0.0 if torch.equal(x, y) else float("inf")
        worst, where = max((worst, where), (found, f"a result of shape {tuple(x.shape)}"))
    longest = max([_norm(x) for x in one.gradients], default=0.0)
    for x, y in zip(one.gradients, other.gradients, strict=True):
        worst, where = max(
            (worst, where), (_relative(x, y, longest), f"a gradient of shape {tuple(x.shape)}")
        )
    return worst, where


def _relative(x: Tensor, y: Tensor, norm: float) -> float:
    x, y = x.double(), y.double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    return _norm(x - y) / max(norm, 1e-30)


def _norm(x: Tensor) -> float:
    """Of the finite numbers: those that overflow, as a gradient scaler provokes, do so in both."""
    return float(x.double().nan_to_num(0, 0, 0).norm())
