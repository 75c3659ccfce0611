"""Training steps as CUDA graphs, for the layers of both plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fastsparse_core import capture
from fastsparse_core.capturing.captured import CALLS

#: Calls until replays begin.
_UNTIL_REPLAYS = CALLS + 4


def moved(model: nn.Module, loss: Callable[[], Tensor], *, captures: bool) -> Tensor:
    """By how much a model's parameters move in ten steps after some others.

    Args:
        model: on the GPU.
        loss: of the model, computed again.
        captures: whether the ten steps are replays of a CUDA graph.
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    run = capture(step) if captures else step
    for _ in range(_UNTIL_REPLAYS):
        run()
    before = parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(10):
        run()
    assert not captures or run.captured.is_recorded
    return parameters_to_vector(model.parameters()).detach() - before
