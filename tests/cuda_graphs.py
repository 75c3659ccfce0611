"""Training steps as CUDA graphs, for the layers of both plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector


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

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            step()
    torch.cuda.current_stream().wait_stream(side)
    before = parameters_to_vector(model.parameters()).detach().clone()
    if captures:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for _ in range(10):
        graph.replay() if captures else step()
    torch.cuda.synchronize()
    return parameters_to_vector(model.parameters()).detach() - before
