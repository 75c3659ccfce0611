"""``why`` reports which implementation computes every graph layer of a model for given inputs."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fastsparse_core.explanation import Explanation, Explanations, explain
from fastsparse_core.log import NOT_FOUND
from fastsparse_dgl.layer_swap import is_accelerated, is_graph_layer, kernel_of, why_left
from fastsparse_dgl.nn import DROP_INS

__all__ = ["Explanation", "Explanations", "why"]

_IF_EMPTY = (
    f"{NOT_FOUND}. Calls of update_all and apply_edges are in fastsparse_core.report() after "
    "fastsparse_dgl.enable(report=True), and in the report of `fastsparse run --report`"
)


def why(model: Module, *args: Any, **kwargs: Any) -> Explanations:
    """Runs a model once and tells which implementation computed each of its graph layers, and why.

    The run computes no gradients. Afterwards, buffers (such as running statistics) and the random number
    generators are restored.

    Args:
        model: a layer or a model.
        *args: positional arguments of the call; for a layer, the graph and its features.
        **kwargs: keyword arguments of the call.

    Returns:
        One explanation for each graph layer, in the order of the model. Print it to see a table.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastSAGEConv, why
        >>> graph = dgl.graph(([0, 1], [1, 0]))
        >>> found = why(FastSAGEConv(4, 2, "lstm"), graph, torch.randn(2, 4))
        >>> found[0].by
        'DGL'
    """
    return explain(
        model,
        args,
        kwargs,
        framework="DGL",
        package="fastsparse_dgl",
        is_graph_layer=is_graph_layer,
        is_ours=is_accelerated,
        kernel=kernel_of,
        if_empty=_IF_EMPTY,
        drop_ins=DROP_INS,
        why_left=why_left,
    )
