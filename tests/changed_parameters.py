"""Layers with one parameter pruned, normalised or parametrised: no entry of `_parameters` any more."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class _Cubed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def _spectral_norm(module: nn.Module, name: str) -> None:
    """Not the form with hooks, which PyG's TAGConv, ChebConv and MixHopConv never run: `lin.forward()`."""
    parametrizations.spectral_norm(module, name)
    module.parametrizations[name].eval()  # training iterates at every read, and reads differ in number


#: How a parameter is changed: from the module and the parameter's name.
CHANGES: dict[str, Callable[[nn.Module, str], Any]] = {
    "pruned": lambda module, name: prune.l1_unstructured(module, name, 0.5),
    "parametrised": lambda module, name: parametrize.register_parametrization(module, name, _Cubed()),
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": _spectral_norm,
}


def parameters_of(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of every parameter that a module of its own reads."""
    for path, module in layer.named_modules():
        if not isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            yield from ((path, name) for name, item in module._parameters.items() if item is not None)


def check_changed(
    layer: nn.Module, drop_in: nn.Module, call: Callable[[Any], Tensor], change: str, tolerance: float
) -> int:
    """Changes one parameter after the other in both, and compares results and gradients; how many there were.

    Args:
        layer: the framework's.
        drop_in: the same one on the kernels.
        call: the result of either.
        change: one of :data:`CHANGES`.
        tolerance: relative to the largest of the numbers.
    """
    with torch.no_grad():
        for one, other in zip(layer.parameters(), drop_in.parameters(), strict=True):
            one.copy_(torch.randn_like(one))  # biases are zeros
            other.copy_(one)
    count = 0
    for path, name in parameters_of(layer):
        parameter = layer.get_submodule(path)._parameters[name]
        assert parameter is not None
        if (change == "spectral_norm" and parameter.dim() < 2) or parameter.dim() == 0:
            continue
        results = []
        for each in (copy.deepcopy(layer), copy.deepcopy(drop_in)):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of the forms with hooks
                CHANGES[change](each.get_submodule(path), name)
            assert name not in each.get_submodule(path)._parameters
            torch.manual_seed(1)
            out = call(each)
            leaves = dict(each.named_parameters())
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
            grads = torch.autograd.grad(out, list(leaves.values()), weight, allow_unused=True)
            results.append({"": out.detach(), **dict(zip(leaves, grads, strict=True))})
        expected, got = results
        assert got.keys() == expected.keys(), (path, name)
        scale = max(float(item.abs().max()) for item in expected.values() if item is not None)
        for key, item in expected.items():
            # A parameter that no result needs has no gradient, or zeros.
            ours, theirs = (torch.zeros(()) if one is None else one for one in (got[key], item))
            torch.testing.assert_close(
                *torch.broadcast_tensors(ours.to(theirs), theirs),
                rtol=tolerance,
                atol=tolerance * scale,
                msg=lambda text, where=(path, name, key): f"{where}: {text}",
            )
        count += 1
    return count
