"""Drop-in layers for models that exist already."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fastsparse_core import layer_swap as core
from fastsparse_dgl.nn import DROP_INS, FastPNAConv
from fastsparse_dgl.nn.pna_conv import why_no_kernel


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
    """
    report = core.accelerate(model, DROP_INS, is_graph_layer=_is_graph_layer, why_not=_why_not)
    if show:
        print(report)
    return report


def restore(model: Module) -> None:
    """Makes every drop-in layer of a model DGL's again, in place: the inverse of :func:`accelerate`.

    Layers that were constructed as drop-ins become DGL's too, so that the model needs FastSparse no more.

    Raises:
        TypeError: ``model`` is not a module.
    """
    core.restore(model, DROP_INS)


def _is_graph_layer(module: Module) -> bool:
    if type(module).__name__ == "PNAConvTower":  # a part of PNAConv
        return False
    return any(klass.__module__.startswith("dgl.nn.pytorch.conv.") for klass in type(module).__mro__)


def _why_not(layer: Any, drop_in: type[Module]) -> str:
    """Why DGL's own code would run whatever the drop-in is given."""
    if drop_in is FastPNAConv:
        return why_no_kernel(layer)
    if getattr(layer, "_aggre_type", None) == "lstm":
        return "aggregator_type='lstm' has no kernel"
    return ""
