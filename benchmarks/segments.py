"""scatter against PyTorch's scatter_reduce and index_add, with a new index each time and with a kept one.

Rows are the edges of a suite's graph in random order, or rows that fall into ten segments, grouped by
destination. A new index is forgotten before each call: it is checked, sorted and cut into slices again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import scatter
from fastsparse_core.segment import clear_segments

from . import suite
from .common import DTYPES, add_common, attempt, progress, recorder, relative_error, release
from .timing import kernel_time

HUBS = "ten segments"
REDUCTIONS = ("sum", "mean", "max", "std")
IMPLEMENTATIONS = ("torch", "new index", "kept index")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=["ogbn-arxiv"], budget_ms=30.0)
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--reductions", nargs="+", choices=REDUCTIONS, default=list(REDUCTIONS))


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("segments", options)
    out.note(
        "torch is index_add for sums and scatter_reduce for means and maxima; its deviation is two means"
    )
    device = torch.device(options.device)
    for name in progress([*options.graphs, HUBS], "segments"):
        graph = suite.load(options.graphs[0] if name == HUBS else name, device)
        generator = torch.Generator(device=device).manual_seed(0)
        size = 10 if name == HUBS else graph.num_nodes
        index = graph.row().long()[torch.randperm(graph.num_edges, device=device, generator=generator)] % size
        for width, dtype, reduce in itertools.product(options.widths, options.dtypes, options.reductions):
            src = torch.randn(index.numel(), width, device=device, generator=generator).to(DTYPES[dtype])
            for backward in (False, True):
                expected: Tensor | None = None
                for implementation in IMPLEMENTATIONS:
                    step = _step(implementation, src, index, size, reduce, backward)
                    cell = attempt(partial(_measure, step, expected, device, options.budget_ms))
                    expected = cell.pop("result", None) if implementation == "torch" else expected
                    cell.pop("result", None)
                    out.add(
                        graph=name,
                        rows=index.numel(),
                        segments=size,
                        width=width,
                        dtype=dtype,
                        reduce=reduce,
                        backward=backward,
                        implementation=implementation,
                        **cell,
                    )
            del src
            release()
    return out.path


def _step(
    implementation: str, src: Tensor, index: Tensor, size: int, reduce: str, backward: bool
) -> Callable[[], Tensor]:
    """The reduction, and where asked its gradient."""
    leaf = src.detach().requires_grad_(backward)
    upstream = torch.randn(size, src.size(1), device=src.device).to(src.dtype)

    def forward() -> Tensor:
        if implementation == "torch":
            return _torch(leaf, index, size, reduce)
        if implementation == "new index":
            clear_segments()
        return scatter(leaf, index, size, reduce)  # type: ignore[call-overload, no-any-return]

    def both() -> Tensor:
        result = forward()
        torch.autograd.grad(result, leaf, upstream)
        return result.detach()

    return both if backward else forward


def _torch(src: Tensor, index: Tensor, size: int, reduce: str) -> Tensor:
    zeros = src.new_zeros(size, src.size(1))
    if reduce == "sum":
        return zeros.index_add(0, index, src)
    wide = index[:, None].expand_as(src)
    if reduce == "std":
        mean = zeros.scatter_reduce(0, wide, src, "mean", include_self=False)
        squares = zeros.scatter_reduce(0, wide, src.square(), "mean", include_self=False)
        return (squares - mean.square()).clamp(min=0).sqrt()
    return zeros.scatter_reduce(0, wide, src, "amax" if reduce == "max" else reduce, include_self=False)


def _measure(
    step: Callable[[], Tensor], expected: Tensor | None, device: torch.device, budget_ms: float
) -> dict[str, Any]:
    """Time of a step, whether it repeats to the bit, and how far it is from torch's."""
    result = step()
    error = None if expected is None else relative_error(result, expected.double())
    repeats = all(torch.equal(result, step()) for _ in range(3))
    timing = kernel_time(step, device, budget_ms=budget_ms)
    return {"result": result, "error": error, "repeats": repeats, **timing.as_cell()}
