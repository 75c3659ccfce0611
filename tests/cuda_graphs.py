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


def check_replays(make: Callable[[], nn.Module], run: Callable[[nn.Module], Tensor]) -> None:
    """Checks that a layer's training step is replayed, and trains as the step itself does.

    Args:
        make: the layer, on the GPU.
        run: its result on some inputs.
    """

    def movement(captures: bool) -> Tensor:
        torch.manual_seed(0)
        layer = make()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.nan_to_num_()  # PyG's RGATConv leaves those that it does not use uninitialised
        # A layer may have no parameters of its own.
        model = nn.ModuleList([layer, nn.Linear(1, 1).cuda()])

        def loss() -> Tensor:
            return run(layer).float().mul(0.1).square().mean() * model[1].weight.sum()

        return moved(model, loss, captures=captures)

    steps, replays = movement(False), movement(True)
    assert steps.norm() > 0
    assert (replays - steps).norm() <= 1e-4 * steps.norm()
