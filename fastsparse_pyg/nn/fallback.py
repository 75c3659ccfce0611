"""What a user is told where PyG's implementation runs in place of the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from fastsparse_core.log import info_once, warn_once
from fastsparse_pyg.caching import logger

#: Beginnings of reasons that cost the user nothing: PyG's implementation was asked for, is faster, or runs
#: once.
_NO_LOSS = (
    "explain mode",
    "a hook on",
    "torch.jit",
    "at most ",
    "fewer than ",
    "no one kernel for the whole message, and at most ",
    "no edges",
    "no nodes",
    "a linear layer with hooks",
    "a linear layer that has no sizes yet",
    "a mode that watches operators",
    "a function transform of torch.func",
    "forward-mode differentiation",
    "tensors without content",
)
_PLAIN_EDGES = "Pass `edge_index` as one int64 tensor of shape (2, num_edges)"
_SIZE = "Pass `size=(num_src, num_dst)` to propagate()"
_USUAL_FLOW = "Use flow='source_to_target', with the rows of `edge_index` swapped"
#: How a reason begins -> what to do about it; the first that fits counts.
_CURES = {
    "torch.compile without an Adjacency": "Pass `fastsparse_pyg.prepare(edge_index)` as `edge_index`",
    "torch.compile": "Keep this layer out of torch.compile, for instance with `torch.compiler.disable`",
    "a sparse matrix": _PLAIN_EDGES,
    "a SparseTensor": _PLAIN_EDGES,
    "the attention weights of a sparse matrix": _PLAIN_EDGES,
    "edges as": _PLAIN_EDGES,
    "edges of dtype": _PLAIN_EDGES,
    "edges that are not": _PLAIN_EDGES,
    "features of dtype": "Convert them to a floating-point dtype, for instance with `x.float()`",
    "features of two dtypes": "Convert them to one dtype",
    "features of another dtype": "Convert them to the dtype of the parameters",
    "features ": "Pass `x` with shape (num_nodes, num_features)",
    "edge features with fill_value": "Use fill_value='mean', 'add' or a number",
    "edge features without edge_dim": "Pass `edge_attr` if and only if the layer has `edge_dim`",
    "edge features that are not": "Pass `edge_attr` with shape (num_edges, num_features)",
    "decomposed_layers": "Use decomposed_layers=1",
    "size is given": "Leave `size` out",
    "the number of nodes": _SIZE,
    "the edges have more nodes": _SIZE,
    "propagate() with positional": "Pass its arguments by name",
    "an Adjacency with flow": _PLAIN_EDGES,
    "autocast": "Call this layer outside of torch.autocast",
    "flow=": _USUAL_FLOW,
    "a bipartite graph with flow": _USUAL_FLOW,
    "a pair of features with flow": _USUAL_FLOW,
}
_ANY_CURE = "The page 'Layers' of the documentation lists what the kernels support"


#: Who is told instead of the user: see `listening`.
_listener: ContextVar[Callable[[str, str], None] | None] = ContextVar("fastsparse_pyg_listener", default=None)


@contextlib.contextmanager
def listening(listener: Callable[[str, str], None]) -> Iterator[None]:
    """Passes the reasons of fallbacks in this context, with their cures, to a function; nothing is logged."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(layer: str, reason: str) -> None:
    """Says once that PyG's implementation runs: a warning, or a log record where that is no loss.

    Args:
        layer: name of its class.
        reason: why the kernels do not run.
    """
    is_no_loss = reason.startswith(_NO_LOSS)
    cure = "" if is_no_loss else _cure_of(reason)
    listener = None if torch.compiler.is_compiling() else _listener.get()
    message = f"{layer} falls back to PyG's implementation"
    if listener is not None:
        listener(reason, cure)
    elif is_no_loss:
        info_once(logger, f"{message}: {reason}")
    else:
        warn_once(f"{message}, which is slower: {reason}. {cure}")


def _cure_of(reason: str) -> str:
    if reason.endswith(" is overridden"):
        return "Override it in a subclass of PyG's layer and call `fastsparse_pyg.accelerate(model)`"
    return next((cure for start, cure in _CURES.items() if reason.startswith(start)), _ANY_CURE)
