"""`gradient_terms`: sizes of the terms that gradients of parameters with one number sum up."""

from __future__ import annotations

import torch
from gradient_terms import gradient_terms
from torch import nn


class Scaled(nn.Module):
    """A factor, and an offset for every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
        self.offset = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x + self.offset * self.frozen


def test_terms_that_cancel_count_in_full():
    layer = Scaled()
    x = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64)
    upstream = torch.tensor([[6.0, 6.0, 2.0]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((layer(x) * upstream).sum(), layer.factor)
    assert gradient.item() == 0
    terms = gradient_terms(layer, lambda: layer(x), upstream)
    assert terms.keys() == {"factor"}
    assert abs(terms["factor"] - 24) < 1e-9
    assert layer.factor.item() == 2
