"""Layers on padded structures, for both plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastsparse_core import Adjacency
from fastsparse_core.capturing.padded_adjacency import PaddedAdjacency, write
from fastsparse_core.formats.inspection import Facts

WIDTH = 8


def fill(structure: PaddedAdjacency, row: Tensor, col: Tensor) -> list[int]:
    """Writes edges into a padded structure; the facts about them."""
    facts = Facts(1, structure.device)
    write([structure], [(row, col)], facts)
    return facts.wait()[0]


def check_layer(layer: nn.Module, call: Callable[[Adjacency, Tensor], Tensor], device: str) -> None:
    """A layer gives the same on a padded structure as on the edges themselves, gradients too.

    Args:
        layer: with ``WIDTH`` inputs.
        call: the layer's call, of a bipartite structure and its sources' features.
        device: where.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (9, 14)
    row = torch.randint(0, shape[0], (25,), generator=generator).sort().values.to(device)
    col = torch.randint(0, shape[1], (25,), generator=generator).to(device)
    padded = PaddedAdjacency((12, 20), 32, torch.device(device))
    assert padded.holds(fill(padded, row, col), shape)

    x = torch.randn(padded.num_src, WIDTH, generator=generator).to(device)
    results = []
    for structure in (padded, Adjacency.from_coo(row, col, shape)):
        own = x[: structure.num_src].clone().requires_grad_()
        out = call(structure, own)[: shape[0]]
        gradients = torch.autograd.grad(out.square().sum(), [own, *layer.parameters()])
        results.append([out, gradients[0][: shape[1]], *gradients[1:]])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
