"""Replaces the layers of an existing model by drop-ins, and restores them."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing

from fastsparse_core import layer_swap as core
from fastsparse_pyg.first_calls import FIRST_CALLS
from fastsparse_pyg.nn import DROP_INS, FastPNAConv
from fastsparse_pyg.nn.any_layer import AnyLayer, accelerated_class
from fastsparse_pyg.nn.base import MESSAGE_METHODS, FastConv
from fastsparse_pyg.nn.by_hand import ByHand, by_hand_class, gathers_by_hand
from fastsparse_pyg.nn.pna_conv import why_no_kernel
from fastsparse_pyg.verification import forget_verification, verify_first_calls

#: Internal methods of `MessagePassing`. FastSparse cannot run a layer that overrides one of them.
_MACHINERY = (
    "propagate",
    "edge_updater",
    "collect",
    "edge_collect",
    "_collect",
    "_lift",
    "_index_select",
    "_index_select_safe",
    "_set_size",
    "_check_input",
    "__getattribute__",
)


def accelerate(model: Module, *, show: bool = True, verify: bool = False) -> core.Report:
    """Replaces the graph layers of a PyG model by FastSparse's in place, including your own layers.

    Only the class of a layer object changes, for example from ``GCNConv`` to ``FastGCNConv``. Parameters,
    ``state_dict``, hooks, caches, training mode and references (such as the optimizer's) stay the same.
    Layers are found in containers of any kind: nested modules, ``Sequential``, ``ModuleList``,
    ``HeteroConv``, the result of ``to_hetero``, and PyG's models. :func:`restore` undoes it.

    A layer without a drop-in, such as your own, keeps its code, and so does a module that gathers and
    scatters by hand. FastSparse changes how features are gathered per edge and how messages are reduced per
    node (without atomics). If ``message()`` only copies the source's features, weighted or not, no messages
    are stored. The report shows what computes each layer, and why a layer was not replaced. Call this
    function before ``torch.jit``. Under ``torch.compile``, layers without a drop-in run PyG's code.

    Args:
        model: any module, also a single layer.
        show: whether to print the report.
        verify: whether every layer compares its first call on a kernel with PyG's own code: outputs, and
            gradients of inputs and parameters for a random output gradient, all without dropout. If they
            differ, the call raises a :class:`VerificationError` and the layer is restored, so the next call
            runs PyG's code. If the first calls fall back to PyG's code, for example on small graphs, a log
            record reports this, and the first later call that runs on a kernel is compared.

    Returns:
        The report: one row per graph layer; ``print`` shows it as a table.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> from torch_geometric.nn.models import GCN
        >>> from fastsparse_pyg import accelerate
        >>> accelerate(GCN(8, 16, num_layers=2), show=False)
        Report(2 of 2 graph layers swapped)
    """
    report = core.accelerate(model, DROP_INS, is_graph_layer=is_graph_layer, kernel=kernel_of, **_RULES)
    for module in model.modules():
        FIRST_CALLS.forget(module)
    if verify:
        verify_first_calls(model, is_accelerated, restore)
    if show:
        print(report)
    return report


def restore(model: Module) -> None:
    """Turns every drop-in layer of a model back into PyG's, in place; undoes :func:`accelerate`.

    Layers that were created as drop-ins also become PyG's, so the model no longer needs FastSparse. The
    exceptions are the MaxK layers, ``GraphTransformerLayer`` and :class:`FastLightGCN`, which stay.

    Args:
        model: any module, also a single layer.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> from fastsparse_pyg import FastGCNConv, restore
        >>> layer = FastGCNConv(8, 4)
        >>> restore(layer)
        >>> type(layer).__name__
        'GCNConv'
    """
    core.restore(model, DROP_INS)
    for module in model.modules():
        if isinstance(module, MessagePassing):
            FIRST_CALLS.forget(module, left="restore() was called on this layer")
            forget_verification(module)
            if getattr(vars(module).get("propagate"), "__func__", None) is AnyLayer.propagate:
                del module.propagate  # left there by explain mode


def is_accelerated(module: Module) -> bool:
    """True if a layer is a drop-in, or if its class was made by :func:`accelerate`."""
    return isinstance(module, (AnyLayer, ByHand, FastConv))


def _any_layer(layer: Any) -> type[Module] | str:
    """Returns the accelerated class for a layer without a drop-in, or why PyG's code always has to run."""
    if isinstance(layer, FastConv):
        return "is a drop-in already"
    if not isinstance(layer, MessagePassing):
        return (
            "forward is replaced on the instance" if "forward" in vars(layer) else by_hand_class(type(layer))
        )
    for klass in type(layer).__mro__[: type(layer).__mro__.index(MessagePassing)]:
        own = [name for name in _MACHINERY if name in vars(klass) and not _is_generated(klass, name)]
        if own:
            return f"a layer with its own {', '.join(own)}"
    replaced = vars(layer).get("propagate")
    if replaced is not None:
        function = getattr(replaced, "__func__", None)
        if function not in (type(layer)._orig_propagate, type(layer)._jinja_propagate):
            return "propagate is replaced on the instance"
        if not layer.explain and layer.decomposed_layers == 1:
            del layer.propagate
    if "forward" in vars(layer):
        return "forward is replaced on the instance"
    try:
        return accelerated_class(type(layer))
    except Exception as error:
        return f"its class cannot be subclassed ({error})"


def as_drop_in(layer: Module) -> Module:
    """A second object that shares the layer's parameters; it is a drop-in if the layer has one."""
    second = core.second_object(layer)
    core.swap(second, DROP_INS, **_RULES | {"any_layer": None})
    return second


def why_left(layer: Module) -> str:
    """Returns why :func:`accelerate` does not replace a layer; "" if it does."""
    return core.swap(core.second_object(layer), DROP_INS, **_RULES)


def kernel_of(layer: Any) -> str:
    """Returns the name of the kernel that computes a layer, or why PyG's code does, for the report."""
    if isinstance(layer, (AnyLayer, ByHand)):
        return layer._shown()
    return f"PyG: {layer._overridden}() is overridden" if layer._overridden else layer._kernel


def is_graph_layer(module: Module) -> bool:
    """True if a module is a `MessagePassing` layer, or one that gathers and scatters by hand."""
    return isinstance(module, MessagePassing) or gathers_by_hand(module)


def _why_not(layer: Any, drop_in: Any) -> str:
    """Returns why the drop-in would run PyG's code for all inputs; "" if it would not."""
    replaced = [name for name in MESSAGE_METHODS if name != "propagate" and name in vars(layer)]
    if replaced:
        return f"{replaced[0]} is replaced on the instance"
    if drop_in is FastPNAConv:
        reason = why_no_kernel(layer)
        return reason.message if reason else ""
    if type(layer.aggr_module) not in drop_in._aggregations:
        return f"aggr={layer.aggr!r} has no kernel"
    return ""


def _is_generated(klass: type, name: str) -> bool:
    """True if PyG's templates added this method to the class, as they do when it is first instantiated."""
    if name in ("_orig_propagate", "_jinja_propagate", "_orig_edge_updater", "_jinja_edge_updater"):
        return True
    return getattr(vars(klass)[name], "__module__", "").startswith(f"{klass.__module__}_{klass.__name__}_")


_RULES: Any = {"why_not": _why_not, "is_generated": _is_generated, "any_layer": _any_layer}
FIRST_CALLS.define(DROP_INS, (AnyLayer, FastConv), kernel_of, _RULES)
