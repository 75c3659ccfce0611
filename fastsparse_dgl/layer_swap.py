"""Drop-in layers for models that exist already."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fastsparse_core import layer_swap as core
from fastsparse_dgl.nn import DROP_INS, FastPNAConv
from fastsparse_dgl.nn.base import AggregationMixin
from fastsparse_dgl.nn.pna_conv import why_no_kernel
from fastsparse_dgl.nn.sage_conv import NO_LSTM


def accelerate(model: Module, *, show: bool = True) -> core.Report:
    """Puts every supported DGL layer of a model on FastSparse kernels, in place.

    The layers stay the same objects with another class, ``GraphConv`` becoming ``FastGraphConv``: parameters,
    ``state_dict``, hooks, training mode, optimisers and everything else that refers to them are kept.
    Containers of any kind are searched: nested modules, ``Sequential``, ``ModuleList``, ``HeteroGraphConv``,
    which becomes ``FastHeteroGraphConv``. :func:`restore` undoes it.

    Subclasses are swapped only if they define nothing but a constructor, since a method of their own might be
    one that the kernels do without; the report names what stays and why.

    Args:
        model: any module; a layer itself too.
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
    """Makes every drop-in layer of a model DGL's again, in place: the inverse of :func:`accelerate`.

    Layers that were constructed as drop-ins become DGL's too, so that the model needs FastSparse no more.

    Args:
        model: any module; a layer itself too.

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
            FIRST_CALLS.forget(module, left="restore() was called on it")


def as_drop_in(layer: Module) -> Module:
    """A second object of a layer with the same parameters, of the drop-in's class where it has one."""
    second = core.second_object(layer)
    core.swap(second, DROP_INS, **_RULES)
    return second


def is_accelerated(module: Module) -> bool:
    """Whether a layer is one of ours."""
    return isinstance(module, AggregationMixin)


def kernel_of(layer: Module) -> str:
    """What computes a layer that is a drop-in."""
    return layer._kernel if isinstance(layer, AggregationMixin) else ""


def is_graph_layer(module: Module) -> bool:
    """Whether a module is one of DGL's layers, or ours."""
    if isinstance(module, AggregationMixin):
        return True
    if type(module).__name__ == "PNAConvTower":  # a part of PNAConv
        return False
    return any(klass.__module__.startswith("dgl.nn.pytorch.conv.") for klass in type(module).__mro__)


def _why_not(layer: Any, drop_in: type[Module]) -> str:
    """Why DGL's own code would run whatever the drop-in is given."""
    if drop_in is FastPNAConv:
        reason = why_no_kernel(layer)
    else:
        reason = NO_LSTM if getattr(layer, "_aggre_type", None) == "lstm" else None
    return reason.message if reason else ""


_RULES: Any = {"why_not": _why_not, "is_generated": lambda klass, name: False, "any_layer": None}
#: What `enable()` made of layers.
FIRST_CALLS = core.FirstCalls("DGL", DROP_INS, (AggregationMixin, *DROP_INS.values()), kernel_of, _RULES)
