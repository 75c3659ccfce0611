"""Optimizers of recorded steps: settings that they would read on the host are kept in tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastsparse_core.capturing.refused import Refused

#: Optimizers whose fused implementation reads the learning rate from a tensor and supports gradient scalers.
#: SGD's other implementations read the learning rate on the host.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
#: Settings that recording may turn on.
_CHANGED = ("capturable", "fused", "foreach")


class RecordedOptimizer:
    """An optimizer whose steps a CUDA graph can repeat, with learning rates in tensors if supported.

    Schedulers and assignments change learning rates as before. All other settings are constants of the
    record, and so are the learning rates of optimizers that read them on the host.

    Args:
        optimizer: an optimizer whose state exists already.
        supports: whether graphs can be recorded on a device.

    Raises:
        Refused: a replay would not repeat the optimizer's step.
    """

    def __init__(self, optimizer: Optimizer, supports: Callable[[torch.device], bool]) -> None:
        self.optimizer = optimizer
        self._supports = supports
        self._scales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._before: list[dict[str, Any]] = []
        self._moved: list[tuple[dict[str, Any], str]] = []
        self._rates: list[Tensor | None] = [self._prepare(group) for group in optimizer.param_groups]
        self._state = optimizer.state
        self._settings = self._read_settings()

    def _prepare(self, group: dict[str, Any]) -> Tensor | None:
        self._before.append({name: group[name] for name in ("lr", *_CHANGED) if name in group})
        parameters, rate = group["params"], group["lr"]
        if not parameters or not all(self._supports(parameter.device) for parameter in parameters):
            return None
        device = parameters[0].device
        fuses = type(self.optimizer) in _FUSED and (
            group["fused"]
            or (group["fused"] is None and not group["foreach"] and not group["differentiable"])
        )
        if fuses:
            group["fused"] = True
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if "capturable" in group:
            group["capturable"] = True
            if not fuses and group.get("foreach", True) is None and not group.get("differentiable"):
                group["foreach"] = True  # otherwise, the learning rate would be read for every parameter
            # PyTorch would warn of the runs that precede the record.
            self.optimizer._warned_capturable_if_run_uncaptured = True
        elif not fuses:
            if any("step" in self.optimizer.state.get(parameter, ()) for parameter in parameters):
                kind = type(self.optimizer).__name__
                raise Refused(f"{kind} counts its steps on the CPU. Use Adam, AdamW, SGD or RMSprop")
            return None
        if not isinstance(rate, Tensor) or rate.device != device:
            group["lr"] = torch.tensor(float(rate), device=device)
        for parameter in parameters:
            self._move_scalars(self.optimizer.state.get(parameter, {}), device)
        made: Tensor = group["lr"]
        return made

    def _move_scalars(self, state: dict[str, Any], device: torch.device) -> None:
        """Moves numbers of a parameter's state, such as its step count, from the CPU to the GPU."""
        for name, item in state.items():
            if isinstance(item, Tensor) and item.dim() == 0 and item.is_cpu and device.type != "cpu":
                state[name] = item.to(device=device, dtype=torch.float32)
                self._moved.append((state, name))

    def restore(self) -> None:
        """Restores the optimizer's original settings, except settings that the user has changed since."""
        self.optimizer._step_supports_amp_scaling = self._scales  # type: ignore[attr-defined]
        for group, before, rate in zip(self.optimizer.param_groups, self._before, self._rates, strict=False):
            for name in _CHANGED:
                if name in before and group[name] is True:
                    group[name] = before[name]
            if rate is not None and group["lr"] is rate and not isinstance(before["lr"], Tensor):
                known = float(before["lr"])
                number = float(rate)  # in float32
                group["lr"] = known if abs(number - known) <= 1e-6 * abs(known) else number
        for state, name in self._moved:
            if isinstance(state.get(name), Tensor):
                state[name] = state[name].cpu()

    def _read_settings(self) -> list[dict[str, Any]]:
        return [
            {name: setting for name, setting in group.items() if name not in ("params", "lr", "initial_lr")}
            | {"number": len(group["params"])}
            | ({"lr": group["lr"]} if rate is None else {})
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False)
        ]

    def is_as_recorded(self) -> bool:
        """Returns whether the settings equal the recorded ones; learning rates in tensors may differ."""
        groups = self.optimizer.param_groups
        return (
            len(groups) == len(self._rates)
            and self.optimizer.state is self._state
            and self._read_settings() == self._settings
        )

    def write(self) -> None:
        """Copies learning rates that were assigned as numbers into the tensors that the record reads."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            given = group["lr"]
            if rate is not None and given is not rate:
                rate.fill_(float(given))
                group["lr"] = rate
