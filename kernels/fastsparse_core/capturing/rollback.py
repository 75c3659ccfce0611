"""Runs a step on trial, and restores everything that the step wrote."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastsparse_core.capturing.numbers import Number, check

_T = TypeVar("_T")
#: Types of results that can be compared, in addition to tensors.
_PLAIN = (bool, int, float, str, type(None))


class _Rollback(TorchDispatchMode):
    """Saves the content of memory before operators write to it, except memory allocated in this mode."""

    #: FastSparse's operators call their kernels directly if all active modes have this attribute. They may do
    #: so under this mode, because it needs no calls inside of operators.
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
        """Saves the present content of a tensor's memory."""
        storage = _storage(kept) if isinstance(kept, Tensor) else kept
        born = self._born.get(storage._cdata)
        if (born is None or born.expired()) and storage._cdata not in self._kept:
            self._kept[storage._cdata] = (storage, storage.clone())

    @property
    def written(self) -> list[torch.UntypedStorage]:
        """The memory whose content is saved."""
        return [storage for storage, _ in self._kept.values()]

    def undo(self) -> None:
        """Restores the saved content."""
        for storage, before in self._kept.values():
            storage.copy_(before)


def _has_memory(item: Any) -> bool:
    return isinstance(item, Tensor) and item.layout is torch.strided and not item.is_meta


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@dataclass
class Deferred:
    """The value of a `Number`, read at the end of a run."""

    value: float


@dataclass
class Trial:
    """Effects of a job that were undone.

    Attributes:
        results: results of the job; tensors are copied.
        buffers: copies of modules' buffers, each with the norm that differences are divided by.
        gradients: copies of the parameters' gradients; zeros if there is none.
        written: memory that the job wrote to and did not allocate itself.
    """

    results: list[Any]
    buffers: list[tuple[Tensor, float]]
    gradients: list[Tensor]
    written: list[torch.UntypedStorage]


@dataclass
class State:
    """State that a job may change in other ways than by operators that declare their writes.

    Attributes:
        parameters: parameters whose gradients the job may replace.
        buffers: buffers to compare, running means with their variances. Batch normalisation writes to them
            without declaring it.
        modes: modules and their training mode.
        devices: GPUs whose random number generators the job may use.
    """

    parameters: list[Tensor]
    buffers: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    modes: list[tuple[torch.nn.Module, bool]] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)


@contextlib.contextmanager
def _undone(
    state: State, keeps: Iterable[Tensor | torch.UntypedStorage] = (), only_failures: bool = False
) -> Iterator[_Rollback]:
    """Context at whose end all changes are undone.

    Args:
        state: state that may change.
        keeps: further memory that is written to without an operator, as by the replay of a CUDA graph.
        only_failures: whether to undo changes only if an exception leaves the context.
    """
    rollback, gradients = _Rollback(), [parameter.grad for parameter in state.parameters]
    for kept in (*(buffer for buffer, _ in state.buffers), *keeps):
        rollback.keep(kept)
    restore = _random_states(state.devices)
    is_undone = True
    try:
        with rollback:
            yield rollback
        is_undone = not only_failures
    finally:
        if is_undone:
            restore()
            with torch.no_grad():
                rollback.undo()
            for parameter, gradient in zip(state.parameters, gradients, strict=True):
                parameter.grad = gradient
            set_modes(state.modes)


def set_modes(modes: Iterable[tuple[torch.nn.Module, bool]]) -> None:
    """Sets the training mode of modules."""
    for module, trains in modes:
        if module.training is not trains:
            module.training = trains


def _random_states(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Returns a function that restores the present states of all generators, also Python's and NumPy's."""
    devices = [device for device in devices if device.type == "cuda"]
    numpy: Any = sys.modules.get("numpy.random")
    states = [torch.cuda.get_rng_state(device) for device in devices]
    ours, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()

    def restore() -> None:
        torch.set_rng_state(ours)
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)
        for device, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, device)

    return restore


@contextlib.contextmanager
def other_random_numbers() -> Iterator[None]:
    """Context in which the host's generators have other seeds: a recording keeps numbers from the host."""
    restore = _random_states([])
    torch.default_generator.manual_seed(torch.initial_seed() + 1)
    random.seed(random.random())
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(random.getrandbits(32))
    try:
        yield
    finally:
        restore()


def undone_if_it_fails(job: Callable[[], _T], state: State) -> _T:
    """Runs a job; if it raises an exception, its changes are undone."""
    with _undone(state, only_failures=True):
        return job()


def on_trial(
    job: Callable[[], Any], state: State, keeps: Iterable[Tensor | torch.UntypedStorage] = ()
) -> Trial:
    """Runs a job and undoes its changes of tensors, gradients, modes and random number generators.

    Args:
        job: function without arguments, called once.
        state: state that the job may change.
        keeps: further memory that the job writes to without an operator, as by the replay of a CUDA graph.

    Raises:
        Exception: the error of the job.
    """
    with _undone(state, keeps) as rollback:
        results = [_result(item) for item in tree_leaves(job())]
        buffers = [
            # A running mean of normalised numbers is only rounding error, so it is compared with the
            # deviation.
            (item.detach().clone(), _norm(item if variance is None else variance.detach().abs().sqrt()))
            for item, variance in state.buffers
        ]
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            for parameter in state.parameters
        ]
        return Trial(results, buffers, gradients, rollback.written)


def _result(item: Any) -> Any:
    if isinstance(item, Number):
        check(item)
        return Deferred(item.value())
    return item.detach().clone() if isinstance(item, Tensor) else item


def difference(one: Trial, other: Trial) -> tuple[float, str]:
    """The greatest relative difference between two trials, and the name of the value that differs most.

    Differences of gradients are divided by the largest norm of all gradients.
    """
    if len(one.results) != len(other.results):
        return float("inf"), "the number of results"
    worst, where = 0.0, ""
    for x, y in zip(one.results, other.results, strict=True):
        worst, where = max((worst, where), _between(x, y))
    for (x, length), (y, _) in zip(one.buffers, other.buffers, strict=True):
        worst, where = max((worst, where), (_relative(x, y, length), f"a buffer of shape {tuple(x.shape)}"))
    longest = max([_norm(x) for x in one.gradients], default=0.0)
    for x, y in zip(one.gradients, other.gradients, strict=True):
        worst, where = max(
            (worst, where), (_relative(x, y, longest), f"a gradient of shape {tuple(x.shape)}")
        )
    return worst, where


def _between(x: Any, y: Any) -> tuple[float, str]:
    """The relative difference between two results, and a description of the result that differs."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.shape != y.shape:
            return float("inf"), f"a result's shape, {tuple(y.shape)} instead of {tuple(x.shape)}"
        where = f"a result of shape {tuple(x.shape)}"
        if x.is_floating_point():
            return _relative(x, y, _norm(x)), where
        return 0.0 if torch.equal(x, y) else float("inf"), where
    if isinstance(x, Deferred) or isinstance(y, Deferred):
        x, y = (item.value if isinstance(item, Deferred) else item for item in (x, y))
        if type(x) is not type(y):
            return float("inf"), f"a result, {y!r} instead of {x!r}"
        found = 0.0 if x == y or (x != x and y != y) else abs(x - y) / max(abs(x), 1e-30)
        return found if found == found else float("inf"), f"a result, {y!r} instead of {x!r}"
    if type(x) is type(y) and not isinstance(x, _PLAIN):
        return 0.0, ""
    return 0.0 if type(x) is type(y) and (x == y or x != x) else float(
        "inf"
    ), f"a result, {y!r} instead of {x!r}"


def _relative(x: Tensor, y: Tensor, norm: float) -> float:
    x, y = x.double(), y.double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    return _norm(x - y) / max(norm, 1e-30)


def _norm(x: Tensor) -> float:
    """Norm of the finite numbers. With a gradient scaler, gradients may overflow in both compared runs."""
    return float(x.double().nan_to_num(0, 0, 0).norm())
