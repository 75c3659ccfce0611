"""Linear maps that share features, as in attention layers, or a result, as in GraphSAGE: passes saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsparse_core.fused.bias import linear
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import is_plain_eager, is_plain_linear


def may_be_cast(network: Any) -> bool:
    """Whether a network may be given autocast's dtype: that is off, or a linear map comes first."""
    return not is_any_autocast_enabled() or first_linear(network)[0] is not None


def first_linear(network: Any) -> tuple[Any, Sequence[Any]]:
    """The plain linear map that a network begins with, and what follows it; None and nothing: it has none."""
    if type(network) is nn.Linear:
        return (network, ()) if is_plain_linear(network) else (None, ())
    if (
        type(network) is nn.Sequential
        and not (network._forward_hooks or network._forward_pre_hooks or network._backward_hooks)
        and not network._backward_pre_hooks
        and "forward" not in network.__dict__
    ):
        modules = list(network._modules.values())
        if modules and is_plain_linear(modules[0]):
            return modules[0], modules[1:]
    return None, ()


def joint_linear(x: Tensor, modules: Sequence[Any], kind: type[nn.Module] = nn.Linear) -> tuple[Tensor, ...]:
    r"""Results of linear layers on the same features.

    .. math::
        [\mathbf{y}_1 \Vert \dots \Vert \mathbf{y}_m] = \mathbf{x} \,
        [\mathbf{W}_1^{\top} \Vert \dots \Vert \mathbf{W}_m^{\top}] + [\mathbf{b}_1 \Vert \dots \Vert
        \mathbf{b}_m]

    One product forward and two backward instead of one and two for each layer, and no sum of the layers'
    gradients of the features. Equal to the layers' own results up to rounding. Layers that cannot be joined
    (hooks, another class, biases in some of them only) are called one by one.

    Args:
        x: features (..., F).
        modules: linear layers of input width F.
        kind: the class of linear layers that the framework has.

    Returns:
        One tensor (..., width of the layer) for each layer: columns of one tensor where they were joined.
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
    r"""``out + module(x) + ...``, added to ``out`` in place by the products themselves where that can be.

    .. math::
        \mathbf{y} + \sum_k \mathbf{x}_k \, \mathbf{W}_k^{\top}

    Saves writing and reading matrices of the result's size. Equal to the sum up to rounding.

    Args:
        out: (N, width of the layers), a result without other references, which no backward pass needs.
        features: (N, F) each, of one kind.
        modules: a linear layer for each of them.
        kind: the class of linear layers that the framework has.
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
