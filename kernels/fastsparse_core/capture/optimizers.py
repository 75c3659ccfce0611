"""Optimisers of steps that are recorded: what they decide on the host is kept in tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Optimisers with one kernel for a whole step, which also takes what a gradient scaler finds.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)


class RecordedOptimizer:
    """An optimiser whose steps a CUDA graph can repeat: its learning rates are tensors from now on.

    Schedulers and assignments change them as before. Other settings are part of the record.

    Args:
        optimizer: whose state exists.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: list[Tensor | None] = []
        self._values: list[float] = []
        for group in optimizer.param_groups:
            self._prepare(group)
        self._state = optimizer.state
        self._settings = self._read_settings()

    def _prepare(self, group: dict[str, Any]) -> None:
        on_gpu = all(parameter.is_cuda for parameter in group["params"])
        rate = group["lr"]
        self._values.append(float(rate))
        if not on_gpu or not group["params"]:
            self._rates.append(None)
            return
        if "capturable" in group:
            group["capturable"] = True
        if type(self.optimizer) in _FUSED and group["fused"] is None and group["foreach"] is None:
            group["fused"] = True
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        device = group["params"][0].device
        if not isinstance(rate, Tensor) or rate.device != device:
            group["lr"] = torch.tensor(float(rate), device=device)
        self._rates.append(group["lr"])
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device=device, dtype=torch.float32)

    def _read_settings(self) -> list[dict[str, Any]]:
        return [
            {name: setting for name, setting in group.items() if name not in ("params", "lr", "initial_lr")}
            | {"number": len(group["params"])}
            | ({"lr": group["lr"]} if rate is None else {})
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False)
        ]

    def is_as_recorded(self) -> bool:
        """Whether nothing changed but learning rates."""
        groups = self.optimizer.param_groups
        return (
            len(groups) == len(self._rates)
            and self.optimizer.state is self._state
            and self._read_settings() == self._settings
        )

    def write(self) -> None:
        """Puts learning rates that were assigned as numbers where the record reads them."""
        for nth, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._rates, strict=True)):
            given = group["lr"]
            if rate is not None and given is not rate:
                rate.fill_(float(given))
                group["lr"] = rate
                self._values[nth] = float(given)
