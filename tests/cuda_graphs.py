"""Training steps as CUDA graphs, for the layers of both plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fastsparse_core import CapturedStep


def moved(model: nn.Module, loss: Callable[[], Tensor], *, captures: bool) -> Tensor:
    """By how much a model's parameters move in ten steps after the first twenty.

    Args:
        model: on the GPU.
        loss: of the model, computed anew.
        captures: whether the ten steps are replays of a CUDA graph.
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    run = CapturedStep(step, warm_up=20) if captures else step
    for _ in range(20):
        run()
    before = parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(10):
        run()
    return parameters_to_vector(model.parameters()).detach() - before
