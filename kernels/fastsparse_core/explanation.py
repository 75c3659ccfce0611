"""Finds what computes every graph layer of a model for given inputs, for `why` of both plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from fastsparse_core.fallback import Reason, listening
from fastsparse_core.log import NOT_FOUND, table_text

_KERNELS = "FastSparse"


@dataclass(frozen=True)
class Explanation:
    """The implementation that computed one layer, and the reason.

    Attributes:
        path: name of the layer in the model; "" if the layer is the model.
        layer: name of the layer's class.
        by: ``"FastSparse"``, the name of the framework, or ``"not called"``.
        kernel: the kernel or plan of FastSparse that computed the layer, as in the report of ``accelerate``;
            "" if FastSparse did not compute the layer.
        reason: why the framework computed the layer, and advice for the user; "" if FastSparse computed the
            layer or it was not called.

    Example:
        >>> from fastsparse_core.explanation import Explanation
        >>> Explanation("conv1", "FastGCNConv", by="FastSparse").reason
        ''
    """

    path: str
    layer: str
    by: str
    reason: str = ""
    kernel: str = ""


class Explanations(tuple[Explanation, ...]):
    """One :class:`Explanation` for each graph layer; ``print`` shows them as a table.

    Args:
        iterable: the explanations.


    Example:
        >>> from fastsparse_core.explanation import Explanation, Explanations
        >>> len(Explanations([Explanation("conv1", "FastGCNConv", by="FastSparse")]))
        1
    """

    _if_empty = NOT_FOUND

    def __str__(self) -> str:
        from rich.table import Table
        from rich.text import Text

        if not self:
            return f"no graph layers found. {self._if_empty}"
        table = Table()
        for title in ("layer", "class", "computed by", "because"):
            table.add_column(title, overflow="fold")
        for item in self:
            by = f"{item.by}: {item.kernel}" if item.kernel else item.by
            cells = (item.path or "(the model)", item.layer, by, item.reason)
            table.add_row(*(Text(cell) for cell in cells))
        return table_text(table)


def explain(
    model: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    framework: str,
    package: str,
    is_graph_layer: Callable[[Module], bool],
    is_ours: Callable[[Module], bool],
    kernel: Callable[[Module], str],
    drop_ins: Mapping[type[Module], type[Module]],
    why_left: Callable[[Module], str],
    if_empty: str = NOT_FOUND,
) -> Explanations:
    """Runs a model once, and finds which implementation computed each of its graph layers, and why.

    The call computes no gradients, and does not change the buffers of the model or random generators.

    Args:
        model: a layer or a model.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        framework: name of the framework.
        package: name of the plugin.
        is_graph_layer: function that returns True for a module that is a graph layer.
        is_ours: function that returns True for a layer that is a drop-in or accelerated.
        kernel: function that names the kernel that computes a drop-in or accelerated layer.
        drop_ins: original class -> drop-in class.
        why_left: function that tells why `accelerate` does not replace a layer; "" if it replaces the layer.
        if_empty: message for the user if the model has no graph layer.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if is_graph_layer(module)}
    reasons: dict[int, list[Reason]] = {}
    running: list[int] = []

    def enter(module: Module, _: Any) -> None:
        running.append(id(module))
        reasons.setdefault(id(module), [])

    def leave(module: Module, _: Any, __: Any) -> None:
        running.pop()

    handles = []
    for layer in layers.values():
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {item.device.index for item in model.parameters() if item.is_cuda}
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(sorted(index for index in devices if index is not None)),
            listening(lambda reason: reasons[running[-1]].append(reason) if running else None),
        ):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def explanation(path: str, layer: Module) -> Explanation:
        name, found = type(layer).__name__, reasons.get(id(layer))
        if found is None:
            return Explanation(path, name, "not called")
        if is_ours(layer):
            if not found:
                return Explanation(path, name, _KERNELS, kernel=kernel(layer))
            return Explanation(path, name, framework, "; ".join(dict.fromkeys(map(str, found))))
        drop_in, left = drop_ins.get(type(layer)), why_left(layer)
        cure = f"Use {package}.{drop_in.__name__}, or call" if drop_in else "Call"
        advice = (
            f"{cure} {package}.accelerate(model)" if not left else f"accelerate() leaves it unchanged: {left}"
        )
        return Explanation(path, name, framework, f"it is {framework}'s layer. {advice}")

    explanations = Explanations(explanation(path, layer) for path, layer in layers.items())
    explanations._if_empty = if_empty
    return explanations
