"""Layers on the structures that captured steps make again, for both plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastsparse_core import Adjacency, recorded
from fastsparse_core.capturing.fresh_adjacency import FreshAdjacency
from fastsparse_core.recorded import StepRun

WIDTH = 8


def check_layer(layer: nn.Module, call: Callable[[Adjacency, Tensor], Tensor], device: str) -> None:
    """A layer gives the same on a structure with padding as on the edges themselves, gradients too.

    Args:
        layer: with ``WIDTH`` inputs.
        call: the layer's call, of a bipartite structure and its sources' features.
        device: where.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (9, 14)
    row = torch.randint(0, shape[0], (25,), generator=generator).sort().values.to(device)
    col = torch.randint(0, shape[1], (25,), generator=generator).to(device)
    behind = torch.arange(7, device=device)
    wide = torch.cat([row, 9 + behind // 3]), torch.cat([col, 14 + behind % 6])
    x = torch.randn(20, WIDTH, generator=generator).to(device)
    results = []
    run = StepRun(has_padding=True, of_edges=FreshAdjacency.of_edges)
    with recorded.running(run):
        results.append(_results(layer, call, FreshAdjacency(*wide, (12, 20), is_sorted=True), x, shape))
    results.append(_results(layer, call, Adjacency.from_coo(row, col, shape), x, shape))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def _results(
    layer: nn.Module,
    call: Callable[[Adjacency, Tensor], Tensor],
    structure: Adjacency,
    x: Tensor,
    shape: tuple[int, int],
) -> list[Tensor]:
    own = x[: structure.num_src].clone().requires_grad_()
    out = call(structure, own)[: shape[0]]
    gradients = torch.autograd.grad(out.square().sum(), [own, *layer.parameters()])
    return [out, gradients[0][: shape[1]], *gradients[1:]]
