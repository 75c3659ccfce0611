"""The size of the terms that a gradient sums up, for parameters with one number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

#: How far a parameter is moved to see what the output makes of it.
STEP = 0.1


def gradient_terms(layer: nn.Module, output: Callable[[], Tensor], upstream: Tensor) -> dict[str, float]:
    r"""Sums of the magnitudes of the terms of some gradients, by the names of their parameters.

    The gradient of a parameter of one number, as GIN's :math:`\epsilon`, is
    :math:`\sum_i g_i \, \partial y_i / \partial \epsilon` over all entries of the output. Where its terms
    cancel, rounding is small against the sum of their magnitudes, but not against the sum itself.

    Args:
        layer: whose parameters these are.
        output: calls it, to the same end each time.
        upstream: :math:`g`, in the shape of the output.
    """
    found = {}
    for name, parameter in layer.named_parameters():
        if parameter.numel() != 1 or not parameter.requires_grad:
            continue
        with torch.no_grad():
            before, here = parameter.clone(), output()
            parameter.add_(STEP)
            change = (output() - here) / STEP
            parameter.copy_(before)
        found[name] = (upstream * change).abs().sum().item()
    return found
