"""Finds out what a step uses while the step runs unchanged, before it is recorded."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core.capturing.constants import Origins, Persistent
from fastsparse_core.capturing.masked_functions import Masks, is_mask
from fastsparse_core.capturing.numbers import Callers, Tracker, reading
from fastsparse_core.log import current_line, is_of_user

_LOW = (torch.float16, torch.bfloat16)


class Observed:
    """Records what the calls of a step have used so far.

    Args:
        step: the function that is watched.
        supports: whether graphs can be recorded on a device.

    Attributes:
        devices: devices of the tensors in the step's computations.
        persistent: integer and bool tensors that do not change.
        callers: functions that convert tensors to numbers.
        optimizers: optimizers whose ``step()`` was called.
        masks: bool tensors that were used as indices.
        differentiates: whether the step called autograd.
        schedules: whether the step called a learning rate scheduler.
        communicates: whether the step exchanged data with other processes.
        rounds: whether some operations ran in 16 bits without autocast.
        autocasts: whether some operations ran under autocast.
    """

    def __init__(
        self, step: Callable[..., Any] | None = None, supports: Callable[[torch.device], bool] = bool
    ) -> None:
        self.supports = supports
        self.devices: set[torch.device] = set()
        self.persistent = Persistent()
        self.callers = Callers(step)
        self._switched: list[weakref.ref[torch.nn.Module]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self.optimizers: list[Optimizer] = []
        self.masks = Masks()
        self.differentiates = self.schedules = self.communicates = self.rounds = self.autocasts = False
        self._parameters: list[Tensor] | None = None

    def add_module(self, module: torch.nn.Module) -> None:
        """Adds a module and its parameters."""
        if not any(module is other for other in self.modules):
            self._modules.append(weakref.ref(module))
            self._parameters = None

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that were called and still exist; some exist only during one call."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters of the modules and optimizers, each once."""
        if self._parameters is None:
            found: dict[int, Tensor] = {}
            for module in self.modules:
                found |= {id(item): item for item in module.parameters(recurse=False)}
            for optimizer in self.optimizers:
                found |= {id(item): item for group in optimizer.param_groups for item in group["params"]}
            self._parameters = [item for item in found.values() if item.requires_grad]
        return self._parameters

    def buffers(self) -> list[tuple[Tensor, Tensor | None]]:
        """Floating buffers of the modules. Each is paired with None, or a running mean with its variance."""
        return [
            (item, getattr(module, "running_var", None) if name == "running_mean" else None)
            for module in self.modules
            for name, item in module.named_buffers(recurse=False)
            if item.is_floating_point()
        ]

    def origins(self) -> Origins:
        """An `Origins` for a run that starts now."""
        return Origins(self.persistent.now())

    def modes(self) -> list[tuple[torch.nn.Module, bool]]:
        """Training mode of every module that the step called or switched."""
        switched = [module for reference in self._switched if (module := reference()) is not None]
        return [(module, module.training) for module in (*self.modules, *switched)]

    @property
    def switches(self) -> bool:
        """True if the step calls ``model.train()`` or ``model.eval()``."""
        return bool(self._switched)

    def _add_switched(self, root: torch.nn.Module) -> None:
        known = {id(reference()) for reference in self._switched}
        self._switched += [weakref.ref(module) for module in root.modules() if id(module) not in known]

    @contextlib.contextmanager
    def watching(self, tracker: Tracker | None = None) -> Iterator[None]:
        """Context that records what the step uses; with a tracker, also how it uses numbers that it reads."""
        scheduled, train = LRScheduler.step, torch.nn.Module.train

        def switch(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._add_switched(module)
            return train(module, *args, **kwargs)

        def step(*args: Any, **kwargs: Any) -> Any:
            self.schedules = True
            return scheduled(*args, **kwargs)

        def on_module(module: torch.nn.Module, _: Any) -> None:
            self.add_module(module)

        def on_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not any(optimizer is other for other in self.optimizers):
                self.optimizers.append(optimizer)
                self._parameters = None

        handles = [
            register_module_forward_pre_hook(on_module),
            register_optimizer_step_pre_hook(on_optimizer),
        ]
        LRScheduler.step = step  # type: ignore[method-assign]
        torch.nn.Module.train = switch  # type: ignore[method-assign,assignment]
        watching = _Watching(self, tracker)
        try:
            with contextlib.ExitStack() as stack:
                if tracker is not None:
                    stack.enter_context(self.callers.patched())
                    stack.enter_context(reading(watching))
                if dist.is_available() and dist.is_initialized():
                    stack.enter_context(_Communication(self))
                stack.enter_context(watching)
                yield
        finally:
            self.persistent.end_call()
            LRScheduler.step = scheduled  # type: ignore[method-assign]
            torch.nn.Module.train = train  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()


class _Communication(TorchDispatchMode):
    """Notices calls of `torch.distributed`, also those of DistributedDataParallel in a backward pass."""

    is_harmless = True  # kernels run as usual

    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self._observed = observed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # For example "c10d", "_c10d_functional" (functional and compiled collectives), "symm_mem".
        if "c10d" in func.namespace or func.namespace == "symm_mem":
            self._observed.communicates = True
        return func(*args, **(kwargs or {}))


class _Watching(TorchFunctionMode):
    def __init__(self, observed: Observed, tracker: Tracker | None) -> None:
        super().__init__()
        self._observed, self._tracker = observed, tracker
        self._origins = observed.origins()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observed, kwargs = self._observed, kwargs or {}
        if func is Tensor.__getitem__ and is_mask(args[1]):
            observed.masks.add(args[1])
        elif func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            observed.differentiates = True
        elif args and isinstance(args[0], Tensor):
            device = args[0].device
            observed.devices.add(device)
            if torch.is_autocast_enabled(device.type):
                observed.autocasts = True
            elif args[0].dtype in _LOW:
                observed.rounds = True
        observed.persistent.see(args)
        observed.persistent.see(kwargs.values())
        result = func(*args, **kwargs)
        if func in _NUMBERS:
            return self._number(func, args[0], result, sys._getframe(1))
        if self._tracker is not None:
            self._tracker.look(args, kwargs)
        self._origins.follow(func, args, kwargs, result)
        return result

    def read(self, tensor: Tensor) -> Any:
        """The number in a tensor, for patched calls of ``float`` and ``int``."""
        value = tensor.item()
        if self._tracker is None or not self._is_followed(tensor):
            return value
        return self._tracker.track(value, current_line())

    def _is_followed(self, tensor: Tensor) -> bool:
        return self._observed.supports(tensor.device) and self._origins.of(tensor) is None

    def _number(self, func: Any, x: Tensor, value: Any, frame: FrameType) -> Any:
        """Tracks a number that the user's code reads. Reads by other code show up in the trial run."""
        if not is_of_user(frame) or not self._is_followed(x):
            return value
        if func in (Tensor.__float__, Tensor.__int__):
            self._observed.callers.add(frame)
        tracker = self._tracker
        if tracker is None:
            return value
        if func is Tensor.item:
            return tracker.track(value, current_line())
        if func is Tensor.tolist and x.dim() == 1:
            return [tracker.track(item, current_line()) for item in value]
        tracker.note(current_line())
        return value


#: Methods of tensors that copy a value to the host, as a Python number or in a text.
_NUMBERS = (
    *(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__bool__),
    *(Tensor.__format__, Tensor.__repr__),
)
