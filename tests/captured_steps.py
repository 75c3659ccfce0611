"""Captured training steps, compared with the same steps that are not captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastsparse_core import capture

SGD = partial(torch.optim.SGD, lr=0.05)


def compare(
    device: str,
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], Any],
    batches: Callable[[], Iterable[Any]],
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    *,
    captures_model: bool = False,
    rtol: float | None = None,
    atol: float = 1e-6,
    steps: int = 50,
    outputs: int = 30,
) -> tuple[Any, list[nn.Module]]:
    """Losses of a step and of the same step captured agree, and what a step returns behind its loss.

    Args:
        device: Where the model is.
        make: Makes the model, from the same random numbers both times.
        loss: `loss(model, batch)`, a loss or a tuple that begins with it.
        batches: The batches of one training.
        optimizer: Makes the optimizer of the parameters.
        captures_model: Captures the model and not the step.
        rtol: Of losses. None: 1e-5 on the CPU, 1e-4 elsewhere.
        atol: Of losses.
        steps: So many losses are compared: rounding grows from step to step.
        outputs: So many of what is returned behind them, within 1e-3.

    Returns:
        What captured the step, and both models.
    """
    found, models, captured = [], [], None
    for captures in (False, True):
        torch.manual_seed(0)
        model = make().to(device)
        models.append(model)

        updates = optimizer(model.parameters())

        def step(batch, model=model, updates=updates):
            updates.zero_grad()
            result = loss(model, batch)
            (result[0] if isinstance(result, tuple) else result).backward()
            updates.step()
            return result

        run = step
        if captures and captures_model:
            captured = capture(model).forward
        elif captures:
            run = capture(step)
            captured = run.captured
        torch.manual_seed(1)
        results = [run(batch) for batch in batches()]
        results = [result if isinstance(result, tuple) else (result,) for result in results]
        found.append([[part.detach() for part in result] for result in results])
    plain, ours = found
    rtol = rtol or (1e-5 if device == "cpu" else 1e-4)
    assert len(ours) == len(plain)
    first = [[result[0] for result in each[:steps]] for each in (ours, plain)]
    torch.testing.assert_close(*first, rtol=rtol, atol=atol)
    rest = [[result[1:] for result in each[:outputs]] for each in (ours, plain)]
    torch.testing.assert_close(*rest, rtol=1e-3, atol=1e-3)
    return captured, models
