"""Drop-in layers for models that exist already."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core import accelerate as core
from fastsparse_pyg.nn import DROP_INS, FastGINConv, FastRGCNConv, FastSAGEConv
from fastsparse_pyg.nn.accelerated import MESSAGE_METHODS, REDUCE

#: The layers whose kernels take other aggregations than the sum.
_AGGREGATING = (FastSAGEConv, FastGINConv, FastRGCNConv)


def accelerate(model: Module, *, show: bool = True) -> core.Report:
    """Puts every supported PyG layer of a model on FastSparse kernels, in place.

    The layers stay the same objects with another class, ``GCNConv`` becoming ``FastGCNConv``: parameters,
    ``state_dict``, hooks, caches, training mode, optimisers and everything else that refers to them are
    kept. Containers of any kind are searched: nested modules, ``Sequential``, ``ModuleList``, ``HeteroConv``,
    the result of ``to_hetero``, PyG's own models. :func:`restore` undoes it.

    Subclasses are swapped only if they define nothing but a constructor, since a method of their own might be
    one that the kernels do without; the report names what stays and why. Call this before ``torch.jit``;
    under ``torch.compile`` the layers want an Adjacency in place of `edge_index`, as drop-ins do.

    Args:
        model: any module; a layer itself too.
        show: whether to print the report.

    Returns:
        The report: one row per graph layer; ``print`` shows it as a table.

    Raises:
        TypeError: ``model`` is not a module.
    """
    report = core.accelerate(
        model, DROP_INS, is_graph_layer=_is_graph_layer, why_not=_why_not, is_generated=_is_generated
    )
    if show:
        print(report)
    return report


def restore(model: Module) -> None:
    """Makes every drop-in layer of a model PyG's again, in place: the inverse of :func:`accelerate`.

    Layers that were constructed as drop-ins become PyG's too, so that the model needs FastSparse no more.

    Raises:
        TypeError: ``model`` is not a module.
    """
    core.restore(model, DROP_INS)


def _is_graph_layer(module: Module) -> bool:
    return isinstance(module, MessagePassing)


def _why_not(layer: Any, drop_in: type[Module]) -> str:
    """Why PyG's own code would run whatever the drop-in is given."""
    replaced = [name for name in MESSAGE_METHODS if name != "propagate" and name in vars(layer)]
    if replaced:
        return f"{replaced[0]} is replaced on the instance"
    aggregations = tuple(REDUCE) if drop_in in _AGGREGATING else (SumAggregation,)
    if type(layer.aggr_module) not in aggregations:
        return f"aggr={layer.aggr!r} has no kernel"
    return ""


def _is_generated(klass: type, name: str) -> bool:
    """Whether PyG's templates put that name into a class, as they do when it is first instantiated."""
    if name in ("_orig_propagate", "_jinja_propagate", "_orig_edge_updater", "_jinja_edge_updater"):
        return True
    return getattr(vars(klass)[name], "__module__", "").startswith(f"{klass.__module__}_{klass.__name__}_")
