"""Handles, the numbers by which operators identify structures, in compiled code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core.structure.adjacency import from_handle


class EdgesOfHandle(NamedTuple):
    """The edges that a symbolic handle refers to; `fastsparse_core.traced` stores them with the symbol.

    Attributes:
        edges: (2, num_edges) tensor in the trace.
        place: the other arguments of ``fastsparse::structure``.
        version: version counter of the edges at the look-up.
    """

    edges: Tensor
    place: tuple[Any, ...]
    version: int

    def in_backward(self, grad: Tensor, handle: Any) -> Any:
        """The handle for a backward pass, which keeps the edges alive until it runs.

        All layers of a trace share one look-up, because each ends a CUDA graph of ``reduce-overhead``.

        Args:
            grad: a tensor of the backward pass; as an argument, it makes the look-up run in that pass.
            handle: handle of the forward pass. It is returned if the edges were edited since then.
        """
        if self.edges._version != self.version:
            return handle
        known = self.edges.__dict__.setdefault("_fastsparse_handles", {})
        key = str(self.place)  # symbolic sizes have no hash
        if key not in known:
            known[key] = torch.ops.fastsparse.structure_backward.default(grad, self.edges, *self.place)
        return known[key]


def in_backward(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an operator, with symbolic handles of a forward pass replaced in its backward pass."""
    if torch._C._current_graph_task_id() < 0:
        return arguments
    return tuple(
        each.node.edges_of_handle.in_backward(arguments[0], each)
        if isinstance(each, torch.SymInt) and hasattr(each.node, "edges_of_handle")
        else each
        for each in arguments
    )


def built_outside_of_graphs(kernel: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Wraps a CUDA kernel for compiled code, which may run within a CUDA graph (``mode="reduce-overhead"``).

    PyTorch runs such a graph once before it records it. In that run, allocations come from the graph's own
    memory, which is reused, so cached results must not be allocated there. Formats and plans are therefore
    made first, by another thread on another stream: PyTorch redirects only the allocations of one thread or
    one stream.

    Args:
        kernel: the kernel; one of its arguments is the handle of a structure.
        place: position of the handle among the arguments.
    """

    def prepare(stream: torch.cuda.Stream, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            from_handle(arguments[place]).prepare()
            kernel(*arguments, **options)

    def run(*arguments: Any, **options: Any) -> Any:
        device = arguments[0].device
        if _precedes_recording(device.index):
            graphs, others = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            others.wait_stream(graphs)
            with ThreadPoolExecutor(1) as executor:
                executor.submit(prepare, others, arguments, options).result()
            graphs.wait_stream(others)
        return kernel(*arguments, **options)

    return run


def _precedes_recording(device: int) -> bool:
    """Returns whether PyTorch's compiler is in the warm-up run of a CUDA graph, before recording it."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device, create_if_none_exists=False)
    except AssertionError:  # PyTorch raises it in a thread that has run no such graph
        return False
    return manager is not None and bool(manager.in_warmup)
