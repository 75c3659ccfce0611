"""Structures behind the handles that operators take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core.structure.adjacency import from_handle


class EdgesOfHandle(NamedTuple):
    """What a symbolic handle stands for; `fastsparse_core.traced` keeps it with the symbol.

    Attributes:
        edges: (2, num_edges), of the trace.
        place: the other arguments of ``fastsparse::structure``.
        version: of the edges when they were looked up.
    """

    edges: Tensor
    place: tuple[Any, ...]
    version: int

    def in_backward(self, grad: Tensor, handle: Any) -> Any:
        """The handle for a backward pass, which keeps the edges alive until it runs.

        All layers of a trace share one look-up, because each ends a CUDA graph of ``reduce-overhead``.

        Args:
            grad: some tensor of the backward pass, before which the look-up cannot happen.
            handle: of the forward pass, which is taken where the edges were written to since.
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
    """A kernel on CUDA for compiled code, which may run it within a CUDA graph of ``mode="reduce-overhead"``.

    PyTorch runs such a graph once before it records it, and that run allocates from the graph's own memory,
    where nothing may stay. What the kernel keeps, such as formats and plans, is therefore made before, by
    another thread on another stream, because PyTorch redirects the allocations of one thread or one stream.

    Args:
        kernel: takes the handle of a structure.
        place: of the handle among the arguments.
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
    """Whether PyTorch's compiler runs a graph that it records next."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(device, create_if_none_exists=False)
    except AssertionError:  # of a thread that has run no such graph
        return False
    return manager is not None and bool(manager.in_warmup)
