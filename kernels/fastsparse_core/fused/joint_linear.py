"""Joins linear maps that have the same input (attention layers), or whose results are added (GraphSAGE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsparse_core.fused.bias import linear
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import has_plain_call, is_plain_eager, is_plain_linear


def may_be_cast(network: Any) -> bool:
    """True if a network's input may have the autocast dtype: autocast is off or a linear map comes first."""
    return not is_any_autocast_enabled() or first_linear(network)[0] is not None


def first_linear(network: Any) -> tuple[Any, Sequence[Any]]:
    """A network's first module, if it is a plain linear map (otherwise None), and the modules after it."""
    if type(network) is nn.Linear:
        return (network, ()) if is_plain_linear(network) else (None, ())
    if type(network) is nn.Sequential and has_plain_call(network):
        modules = list(network._modules.values())
        if modules and is_plain_linear(modules[0]):
            return modules[0], modules[1:]
    return None, ()


def joint_linear(x: Tensor, modules: Sequence[Any], kind: type[nn.Module] = nn.Linear) -> tuple[Tensor, ...]:
    r"""Computes the results of several linear layers on the same features.

    .. math::
        [\mathbf{y}_1 \Vert \dots \Vert \mathbf{y}_m] = \mathbf{x} \,
        [\mathbf{W}_1^{\top} \Vert \dots \Vert \mathbf{W}_m^{\top}] + [\mathbf{b}_1 \Vert \dots \Vert
        \mathbf{b}_m]

    The forward pass takes one product and the backward pass two, for all layers together instead of for each
    layer. Gradients of the features need not be added. The results equal those of the layers up to rounding.
    Layers that cannot be joined (with hooks, of another class, or if only some have a bias) are called one by
    one.

    Args:
        x: features (..., F).
        modules: linear layers of input width F.
        kind: the framework's class of linear layers.

    Returns:
        One tensor (..., width of the layer) per layer. If layers were joined, they are columns of one tensor.
    """
    weights, biases, widths = [], [], []
    for module in modules:
        if not is_plain_linear(module, kind):
            break
        weights.append(module.weight)
        widths.append(module.weight.size(0))
        if module.bias is not None:
            biases.append(module.bias)
    if len(weights) == len(modules) > 1 and len(biases) in (0, len(modules)):
        by = linear if x.is_cuda else F.linear
        joint = by(x, torch.cat(weights), torch.cat(biases) if biases else None)
        return joint.split(widths, dim=-1)
    return tuple(module(x) for module in modules)


def add_linear(
    out: Tensor, features: Sequence[Tensor], modules: Sequence[Any], kind: type[nn.Module] = nn.Linear
) -> Tensor:
    r"""``out + module(x) + ...``; the products add to ``out`` in place if possible.

    .. math::
        \mathbf{y} + \sum_k \mathbf{x}_k \, \mathbf{W}_k^{\top}

    Adding in place saves writing and reading matrices of the result's size. The result equals the sum up to
    rounding.

    Args:
        out: (N, width of the layers), a result without other references that no backward pass needs.
        features: (N, F) each, with equal dtypes, devices and shapes.
        modules: one linear layer per tensor of ``features``.
        kind: the framework's class of linear layers.
    """
    x = features[0] if features else out
    may_add = (
        out.dim() == x.dim() == 2
        and out.dtype == x.dtype
        and is_plain_eager(x)
        and type(out) is Tensor
        and not out.is_neg()
        and not is_any_autocast_enabled()
    )
    for x, module in zip(features, modules, strict=True):
        if (
            may_add
            and is_plain_linear(module, kind)
            and module.bias is None
            and out.dtype == module.weight.dtype
        ):
            out.addmm_(x, module.weight.t())
        else:
            out = out + module(x)
    return out
