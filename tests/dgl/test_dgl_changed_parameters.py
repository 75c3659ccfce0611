"""Pruned, normalised and parametrised parameters: drop-ins compute with them as DGL's layers do."""

from __future__ import annotations

import copy

import pytest
import torch
from changed_parameters import CHANGES, check_changed
from dgl_cases import homogeneous
from dgl_layer_cases import CASES, Case, each_case
from torch import Tensor, nn

from fastsparse_dgl import accelerate


@pytest.mark.parametrize("change", CHANGES)
@each_case(CASES)
def test_changed_parameters(case: Case, change: str) -> None:
    """On the CPU, where pip's DGL can run its layers; the device of the parameters makes no difference."""
    graph = homogeneous()
    torch.manual_seed(3)
    layer, _ = case.pair(6, 4)
    drop_in = copy.deepcopy(layer)
    assert accelerate(drop_in, show=False).swapped
    inputs = [torch.randn(graph.num_nodes(), 6), *(each.detach() for each in case.rest(graph, 6))]

    def call(one: nn.Module) -> Tensor:
        out = case.run(one, graph, *inputs)
        return torch.cat([each.flatten() for each in out]) if isinstance(out, tuple) else out

    assert check_changed(layer, drop_in, call, change, 2e-5) or change == "spectral_norm"
