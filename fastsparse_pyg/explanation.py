"""``why``: what computes every graph layer of a model for given inputs."""

from __future__ import annotations

import io
import shutil
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch_geometric.nn.conv import MessagePassing

from fastsparse_pyg.layer_swap import is_accelerated
from fastsparse_pyg.nn import DROP_INS, fallback
from fastsparse_pyg.nn.any_layer import AnyLayer

_KERNELS = "FastSparse"
_PYG = "PyG"


@dataclass(frozen=True)
class Explanation:
    """What computed one layer.

    Attributes:
        path: name of the layer in the model; "" if it is the model.
        layer: name of its class.
        by: ``"FastSparse"``, ``"PyG"``, or ``"not called"``.
        reason: why it was PyG, and what to do about it; "" if it was not.
    """

    path: str
    layer: str
    by: str
    reason: str = ""


class Explanations(tuple[Explanation, ...]):
    """One :class:`Explanation` for each graph layer; ``print`` shows them as a table."""

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        if not self:
            return "no graph layers found"
        table = Table()
        for title in ("layer", "class", "computed by", "because"):
            table.add_column(title, overflow="fold")
        for item in self:
            cells = (item.path or "(the model)", item.layer, item.by, item.reason)
            table.add_row(*(Text(cell) for cell in cells))
        page = io.StringIO()
        Console(file=page, width=shutil.get_terminal_size((110, 24)).columns).print(table)
        return page.getvalue().rstrip()


def why(model: Module, *args: Any, **kwargs: Any) -> Explanations:
    """Runs a model once and tells which implementation computed each of its graph layers, and why.

    The run has no other effect: it computes no gradients, and buffers (such as running statistics) and the
    random number generators are put back.

    Args:
        model: a layer or a model.
        *args: what it is called with.
        **kwargs: likewise.

    Returns:
        One explanation for each graph layer, in the order of the model. Print it to see a table.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGATConv, why
        >>> edge_index = torch.tensor([[0, 1], [1, 0]])
        >>> found = why(FastGATConv(4, 2, edge_dim=3), torch.randn(2, 4), edge_index)
        >>> found[0].by
        'FastSparse'
    """
    if not isinstance(model, Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=True)
        if isinstance(module, MessagePassing)
    }
    reasons: dict[int, list[str]] = {}
    running: list[int] = []
    handles = []

    def enter(module: Module, _: Any) -> None:
        running.append(id(module))
        reasons.setdefault(id(module), [])

    def leave(module: Module, _: Any, __: Any) -> None:
        running.pop()

    def listen(reason: str, cure: str) -> None:
        if running:
            cure = f". {cure}" if cure else " (as asked for, or because it is faster so)"
            reasons[running[-1]].append(reason + cure)

    for layer in layers.values():
        if isinstance(layer, AnyLayer):
            type(layer)._left.clear()  # else the reason for small graphs is given only once in a process
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {item.device.index for item in model.parameters() if item.is_cuda}
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(sorted(index for index in devices if index is not None)),
            fallback.listening(listen),
        ):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return Explanations(_explain(name, layer, reasons.get(id(layer))) for name, layer in layers.items())


def _explain(path: str, layer: Any, reasons: list[str] | None) -> Explanation:
    name = getattr(type(layer), "__name__", "")
    if reasons is None:
        return Explanation(path, name, "not called")
    if is_accelerated(layer):
        return Explanation(path, name, _PYG if reasons else _KERNELS, "; ".join(dict.fromkeys(reasons)))
    drop_in = DROP_INS.get(type(layer))
    cure = f"Use fastsparse_pyg.{drop_in.__name__}, or call" if drop_in else "Call"
    return Explanation(path, name, _PYG, f"it is PyG's layer. {cure} fastsparse_pyg.accelerate(model)")
