"""CUDA graphs as the CPU can have them: what they would break breaks here too.

A recording stores only the kernels that ran, with the memory that they read and wrote: calls
of PyTorch's operators below autograd (a dispatch mode sees them, in every thread) and of the compiled
extension (whose tensors stand for their memory). A replay runs them again on that memory. As with CUDA:

- backward passes run in a thread of autograd's own, where `threading.local` is empty;
- what the host would read from the device, while it records, is an error, as is a structure that is built;
- memory without references at the end of the recording holds NaN after every replay, because other graphs use
  it; replays also overwrite memory that later graphs use, because it may be memory that this one had freed,
  and memory of earlier graphs that was free when this one was recorded;
- a pool lives as long as a graph that was recorded to it; a recording that was made invalid stays open.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fastsparse_core import _C, log, recorded
from fastsparse_core.capturing import graphs

#: What CUDA would have to wait for.
_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
)
#: Functions of the extension that are no kernels, and those that wait for one.
_NO_KERNELS = ("build_info", "num_", "compress_scratch_bytes")
_WAITS = ("wait", "inspect")
#: The methods of its classes that launch.
_METHODS = {"run", "forward", "backward"}
#: How deep backward passes are nested before autograd gives one to another thread.
_DEPTH = 61


class Invalid(RuntimeError):
    """What CUDA says."""


class _Launch:
    """One kernel: a function, and what it was called with."""

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, outs: list[Tensor | None]
    ) -> None:
        self.function, self.args, self.kwargs, self.outs = function, args, kwargs, outs

    def run(self) -> None:
        made = self.function(*self.args, **self.kwargs)
        made = [item for item in tree_leaves(made) if isinstance(item, Tensor)] if self.outs else []
        for out, new in zip(self.outs, made, strict=False):
            if out is not None:
                out.copy_(new)


class Tape(TorchDispatchMode):
    """Records what runs in its context, in all threads that autograd uses."""

    is_harmless = True  # see `rollback`
    #: The one in force.
    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[_Launch] = []
        self.threads: set[int] = set()
        self.names: list[str] = []
        self._made: dict[int, Tensor] = {}  # memory that was allocated, by the address of its storage
        self._host: list[Tensor] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.is_invalid = self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "fastsparse":  # several kernels
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        self.threads.add(threading.get_ident())
        self._check(name, args, kwargs)
        if func._schema.is_mutable or "batch_norm" in name:
            self._save(tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        if name == "lift_fresh":  # a number of the host
            self._host.append(result)
            return result
        given = {_memory(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        outs: list[Tensor | None] = []
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                is_new = _memory(item) not in given
                if is_new:
                    self._made.setdefault(_memory(item), item.detach())
                outs.append(item.detach() if is_new else None)
        if func._schema.is_mutable or any(out is not None for out in outs) or "batch_norm" in name:
            held = _apart(args, kwargs)
            if not name.startswith("empty") and name != "new_empty":
                self.launches.append(_Launch(func, *held, outs))
                self.names.append(name)
        return result

    def launch(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Records a call of the extension."""
        if name in _WAITS:
            self.invalidate(f"{name}: the host waits")
        _pause(self, True)
        self.launches.append(_Launch(function, *_apart(args, kwargs), []))
        _pause(self, False)
        self.names.append(name)
        return function(*args, **kwargs)

    def invalidate(self, what: str) -> None:
        self.is_invalid = True
        raise Invalid(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        of_host = [any(_memory(item) == _memory(known) for known in self._host) for item in tensors]
        if name in _READS and not all(of_host):
            self.invalidate(name)
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(item, Tensor) and item.dtype == torch.bool for item in args[1]
        ):
            self.invalidate(f"{name} with a mask")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.invalidate(name)
        if any(is_host and item.dim() for is_host, item in zip(of_host, tensors, strict=True)):
            self.invalidate(f"{name}: a copy from the host's memory")

    def _save(self, items: list[Any]) -> None:
        for item in items:
            if isinstance(item, Tensor) and _memory(item) not in self._made:
                storage = item.untyped_storage()
                self._before.setdefault(storage._cdata, (storage, storage.clone()))

    def undo(self) -> None:
        """What is recorded is not done."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def finish(self, others: Iterable[Tape] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Memory that only this tape and others still hold, and all that was allocated."""
        gc.collect()
        own: Counter[int] = Counter()
        for launch in [launch for tape in (self, *others) for launch in tape.launches]:
            items = tree_leaves((launch.args, launch.kwargs, launch.outs))
            own.update(_memory(item) for item in items if isinstance(item, Tensor))
        freed = []
        for address, tensor in self._made.items():
            count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
            if count - own[address] <= 2:  # those of launches, the tensor here and its storage object
                freed.append(tensor)
        return freed, list(self._made.values())


def _apart(args: Any, kwargs: Any) -> Any:
    """Other tensors with the same memory, which later changes of the objects do not affect."""
    return tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, (args, kwargs))


def _memory(item: Tensor) -> int:
    return item.untyped_storage()._cdata


def _fill(tensors: list[Tensor]) -> None:
    for item in tensors:
        whole = torch.empty(0, dtype=torch.uint8).set_(item.untyped_storage())  # type: ignore[call-overload]
        whole.fill_(0xFF)  # NaN, or -1


class _Graph:
    """What was recorded.

    Args:
        tape: the kernels.
        pool: where memory came from.
        taken: memory of earlier graphs that was free then.
    """

    def __init__(self, tape: Tape, pool: _Pool, taken: list[Tensor]) -> None:
        self.tape = tape
        self.freed, self.made = tape.finish()
        self.pool, self.taken = pool, taken
        pool.graphs.append(self)

    def replay(self) -> None:
        with _disable_current_modes(), torch.no_grad():
            place = self.pool.graphs.index(self)
            for other in self.pool.graphs[place + 1 :]:
                _fill(other.made)
            _fill(self.taken + self.freed)
            for launch in self.tape.launches:
                launch.run()
            _fill(self.freed)


class _Pool:
    def __init__(self) -> None:
        self.graphs: list[_Graph] = []


class SimulatedGraphs:
    """In the place of `graphs.CudaGraphs`.

    Attributes:
        tapes: of all recordings, for tests.
    """

    def __init__(self) -> None:
        self._pool: _Pool | None = None
        self.tapes: list[Tape] = []

    @staticmethod
    def supports(device: torch.device) -> bool:
        return device.type == "cpu"

    @staticmethod
    def is_recording() -> bool:
        return Tape.current is not None

    def beside(self, job: Callable[[], Any]) -> Any:
        return job()

    def record(self, job: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        assert Tape.current is None
        self._pool = self._pool or _Pool()
        tapes = [graph.tape for graph in self._pool.graphs]
        taken = [
            item for tape in tapes for item in tape.finish(other for other in tapes if other is not tape)[0]
        ]
        tape = Tape.current = Tape()
        try:
            with torch.random.fork_rng([]), tape:
                result = job()
            if tape.is_invalid:
                raise Invalid("CUDA error: operation failed due to a previous error during capture")
        finally:
            Tape.current = None
            tape.undo()
        self.tapes.append(tape)
        graph = _Graph(tape, self._pool, taken)
        _fill(graph.made)  # nothing was computed
        return graph.replay, result

    def forget_memory(self) -> None:
        self._pool = None


class _Nested(torch.autograd.Function):
    """A backward pass that calls a function in the thread where autograd runs the deepest of many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, job: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.job = depth, job
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.depth:
            _nest(ctx.depth - 1, ctx.job)
        else:
            ctx.job()
        return grad, None, None


def _nest(depth: int, job: Callable[[], None]) -> None:
    with torch.enable_grad():
        start = torch.ones((), requires_grad=True)
        out = _Nested.apply(start, depth, job)
    _run_backward((out,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    return torch.autograd.Variable._execution_engine.run_backward(*args, **kwargs)


def in_engine_thread(job: Callable[[], Any]) -> Any:
    """Calls a function in a thread of autograd's, with what PyTorch hands to backward passes there."""
    found: list[Any] = []
    failure: list[BaseException] = []
    grad_enabled, tape = torch.is_grad_enabled(), Tape.current

    def call() -> None:
        _pause(tape, False)
        try:
            with torch.set_grad_enabled(grad_enabled):
                found.append(job())
        except BaseException as error:  # it must not pass through autograd, which would change it
            failure.append(error)
        finally:
            _pause(tape, True)

    _pause(tape, True)  # the passes around it are none of the step's
    try:
        _nest(_DEPTH, call)
    finally:
        _pause(tape, False)
    if failure:
        raise failure[0]
    return found[0]


def _backward(*args: Any, **kwargs: Any) -> Any:
    """A backward pass, in another thread as on a GPU; but where nothing is recorded, for it takes long."""
    if recorded.current() is None and Tape.current is None:
        return _run_backward(*args, **kwargs)
    return in_engine_thread(lambda: _run_backward(*args, **kwargs))


def _pause(tape: Tape | None, is_paused: bool) -> None:
    if tape is not None:
        tape.is_paused = is_paused


def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tape = Tape.current
        return function(*args, **kwargs) if tape is None else tape.launch(name, function, args, kwargs)

    return call


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs on the CPU, for what is captured from now on."""
    monkeypatch.setattr(log, "seen", set())
    monkeypatch.setattr(log, "_NOT_THE_USER", log._NOT_THE_USER | {__name__})
    monkeypatch.setattr(graphs, "CudaGraphs", SimulatedGraphs)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Tape.current is not None)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", _backward)
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]:
        if hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **options: ["cpu"])
    for name, function in vars(_C).items():
        if isinstance(function, type):  # of prepared calls
            for method in _METHODS & vars(function).keys():
                monkeypatch.setattr(function, method, _wrapped(f"{name}.{method}", getattr(function, method)))
        elif callable(function) and not name.startswith(_NO_KERNELS):
            monkeypatch.setattr(_C, name, _wrapped(name, function))
