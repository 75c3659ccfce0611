"""Replaces the layers of an existing model by drop-ins, and restores them."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fastsparse_core import layer_swap as core
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.first_calls import FIRST_CALLS
from fastsparse_dgl.nn import DROP_INS, FastPNAConv
from fastsparse_dgl.nn.base import AggregationMixin
from fastsparse_dgl.nn.pna_conv import why_no_kernel
from fastsparse_dgl.nn.sage_conv import NO_LSTM


def accelerate(model: Module, *, show: bool = True) -> core.Report:
    """Replaces the supported DGL layers of a model by FastSparse's, in place.

    Only the class of a layer object changes, for example from ``GraphConv`` to ``FastGraphConv``. Parameters,
    ``state_dict``, hooks, training mode and references (such as the optimizer's) stay the same. Layers are
    found in containers of any kind: nested modules, ``Sequential``, ``ModuleList``, and ``HeteroGraphConv``,
    which becomes ``FastHeteroGraphConv``. :func:`restore` undoes it.

    A subclass is replaced only if it defines nothing except a constructor, because the kernels would not call
    its other methods. The report names the layers that were not replaced, with the reasons.

    Args:
        model: any module, also a single layer.
        show: whether to print the report.

    Returns:
        The report: one row per graph layer; ``print`` shows it as a table.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch
        >>> from dgl.nn import GraphConv
        >>> from fastsparse_dgl import accelerate
        >>> model = torch.nn.ModuleList([GraphConv(8, 4), GraphConv(4, 2)])
        >>> accelerate(model, show=False)
        Report(2 of 2 graph layers swapped)
    """
    report = core.accelerate(model, DROP_INS, is_graph_layer=is_graph_layer, kernel=kernel_of, **_RULES)
    for module in model.modules():
        FIRST_CALLS.forget(module)
    if show:
        print(report)
    return report


def restore(model: Module) -> None:
    """Turns every drop-in layer of a model back into DGL's, in place; undoes :func:`accelerate`.

    Layers that were created as drop-ins also become DGL's, so the model no longer needs FastSparse. The
    exceptions are the MaxK layers and ``GraphTransformerLayer``, which DGL does not have.

    Args:
        model: any module, also a single layer.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch
        >>> from fastsparse_dgl import FastGraphConv, restore
        >>> model = torch.nn.ModuleList([FastGraphConv(8, 4)])
        >>> restore(model)
        >>> type(model[0]).__name__
        'GraphConv'
    """
    core.restore(model, DROP_INS)
    for module in model.modules():
        if is_graph_layer(module):
            FIRST_CALLS.forget(module, left="restore() was called on this layer")


def as_drop_in(layer: Module) -> Module:
    """A second object that shares the layer's parameters; it is a drop-in if the layer has one."""
    second = core.second_object(layer)
    core.swap(second, DROP_INS, **_RULES)
    return second


def why_left(layer: Module) -> str:
    """Returns why :func:`accelerate` does not replace a layer; "" if it does."""
    return core.swap(core.second_object(layer), DROP_INS, **_RULES)


def is_accelerated(module: Module) -> bool:
    """True if a layer is a drop-in."""
    return isinstance(module, AggregationMixin)


def kernel_of(layer: Module) -> str:
    """Returns the name of the kernel that computes a drop-in; "" for other modules."""
    return layer._kernel if isinstance(layer, AggregationMixin) else ""


def is_graph_layer(module: Module) -> bool:
    """True if a module is a graph layer of DGL or a drop-in."""
    if isinstance(module, AggregationMixin):
        return True
    if type(module).__name__ == "PNAConvTower":  # a part of PNAConv
        return False
    return any(klass.__module__.startswith("dgl.nn.pytorch.conv.") for klass in type(module).__mro__)


def _why_not(layer: Any, drop_in: type[Module]) -> str:
    """Returns why the drop-in would run DGL's code for all inputs; "" if it would not."""
    if drop_in is FastPNAConv:
        reason = why_no_kernel(layer)
    else:
        reason = NO_LSTM if getattr(layer, "_aggre_type", None) == "lstm" else None
    return reason.message if reason else ""


_RULES: Any = {"why_not": _why_not, "is_generated": lambda klass, name: False, "any_layer": None}
FIRST_CALLS.define(
    DROP_INS,
    (AggregationMixin, *DROP_INS.values()),
    kernel_of,
    _RULES,
    containers=(dgl.nn.pytorch.HeteroGraphConv,),
)
