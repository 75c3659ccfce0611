"""What layers lose of large features, in float32, compared with what the originals lose."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Standard deviations of features. Scores are as large, so their rounding alone costs the weights digits.
SCALES = (1e4, 1e6)
#: Errors of single problems differ by chance, as softmax is steep where features are large.
_PROBLEMS = 20
#: Of the original's error, on the geometric mean over problems.
_MOST = 2.0


class Problem(NamedTuple):
    """The original, the layer, what is differentiated in addition to the parameters, and how either is
    called.

    ``call`` takes a layer, these tensors in its dtype and on its device, and the device.
    """

    original: nn.Module
    layer: nn.Module
    inputs: Sequence[Tensor]
    call: Callable[[Any, Sequence[Tensor], str], Tensor]


def check_digits(make: Callable[[int], Problem], ignore: Sequence[str] = ()) -> None:
    """Result and gradients are as close to float64 as the original's.

    Args:
        make: a problem from a seed.
        ignore: parameters whose gradient is 0 except for rounding.
    """
    ratios = defaultdict(list)
    for seed in range(_PROBLEMS):
        torch.manual_seed(seed)
        problem = make(seed)
        exact = _results(problem, problem.original, torch.float64)
        theirs = _results(problem, problem.original, torch.float32)
        ours = _results(problem, problem.layer, torch.float32)
        largest = max(tensor.norm().item() for tensor in exact.values())
        for name in exact.keys() - set(ignore):
            # Rounding of the result, and numbers that underflow in float32.
            floor = 2e-7 * exact[name].norm().item() + 1e-20 * largest
            error, usual = ((found[name] - exact[name]).norm().item() for found in (ours, theirs))
            ratios[name].append((error + floor) / (usual + floor))
    means = {name: math.exp(sum(map(math.log, each)) / len(each)) for name, each in ratios.items()}
    assert max(means.values()) < _MOST, means


def _results(
    problem: Problem, module: nn.Module, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    module = copy.deepcopy(module).to(device, dtype)
    inputs = [tensor.detach().to(device, dtype).requires_grad_() for tensor in problem.inputs]
    out = problem.call(module, inputs, device)
    names, parameters = zip(*module.named_parameters(), strict=True)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(out.shape, generator=generator).to(device, dtype)
    found = torch.autograd.grad(out, [*inputs, *parameters], grad)
    every = zip(("result", *(f"input {i}" for i in range(len(inputs))), *names), (out, *found), strict=True)
    return {name: tensor.detach().double().cpu() for name, tensor in every}
