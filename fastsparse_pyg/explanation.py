"""``why`` reports which implementation computes every graph layer of a model for given inputs."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fastsparse_core.explanation import Explanation, Explanations, explain
from fastsparse_pyg.layer_swap import is_accelerated, is_graph_layer, kernel_of, why_left
from fastsparse_pyg.nn import DROP_INS
from fastsparse_pyg.nn.any_layer import AnyLayer

__all__ = ["Explanation", "Explanations", "why"]


def why(model: Module, *args: Any, **kwargs: Any) -> Explanations:
    """Runs a model once and tells which implementation computed each of its graph layers, and why.

    The run computes no gradients. Afterwards, buffers (such as running statistics) and the random number
    generators are restored.

    Args:
        model: a layer or a model.
        *args: positional arguments of the call.
        **kwargs: keyword arguments of the call.

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
    for layer in model.modules() if isinstance(model, Module) else ():
        if isinstance(layer, AnyLayer):
            type(layer).forget_reasons()
    return explain(
        model,
        args,
        kwargs,
        framework="PyG",
        package="fastsparse_pyg",
        is_graph_layer=is_graph_layer,
        is_ours=is_accelerated,
        kernel=kernel_of,
        drop_ins=DROP_INS,
        why_left=why_left,
    )
