"""What a step uses: found while it runs as it is, needed before it can be recorded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from fastsparse_core.capturing.twins import Masks, is_mask

_LOW = (torch.float16, torch.bfloat16)


class Observed:
    """What was seen so far.

    Attributes:
        optimizers: that made a step.
        masks: bool tensors that indexed others.
        differentiates: whether autograd was called.
        schedules: whether a scheduler of learning rates made a step.
        rounds: whether some of it is computed in 16 bits without autocast.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self.optimizers: list[Optimizer] = []
        self.masks = Masks()
        self.differentiates = self.schedules = self.rounds = False
        self._parameters: list[Tensor] | None = None

    def add_module(self, module: torch.nn.Module) -> None:
        """Notes a module, and so its parameters."""
        if not any(module is other for other in self.modules):
            self._modules.append(weakref.ref(module))
            self._parameters = None

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Those that were called and live on; some are made for one call."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def parameters(self) -> list[Tensor]:
        """Trainable ones of the modules and optimisers, each once."""
        if self._parameters is None:
            found: dict[int, Tensor] = {}
            for module in self.modules:
                found |= {id(item): item for item in module.parameters(recurse=False)}
            for optimizer in self.optimizers:
                found |= {id(item): item for group in optimizer.param_groups for item in group["params"]}
            self._parameters = [item for item in found.values() if item.requires_grad]
        return self._parameters

    def buffers(self) -> list[Tensor]:
        """Those of the modules that hold numbers, as running statistics."""
        items = (item for module in self.modules for item in module.buffers(recurse=False))
        return [item for item in items if item.is_floating_point()]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what runs in this context."""
        scheduled = LRScheduler.step

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
        try:
            with _Watching(self):
                yield
        finally:
            LRScheduler.step = scheduled  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()


class _Watching(TorchFunctionMode):
    def __init__(self, observed: Observed) -> None:
        super().__init__()
        self._observed = observed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observed = self._observed
        if func is Tensor.__getitem__ and is_mask(args[1]):
            observed.masks.add(args[1])
        elif func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            observed.differentiates = True
        elif not observed.rounds and args and isinstance(args[0], Tensor) and args[0].dtype in _LOW:
            observed.rounds = not torch.is_autocast_enabled(args[0].device.type)
        return func(*args, **(kwargs or {}))
