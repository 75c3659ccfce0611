"""scatter against PyTorch's scatter_reduce and index_add, with a new index each time and with a kept one.

Rows are the edges of a suite's graph in random order, or rows that fall into ten segments, grouped by
destination. A new index is forgotten before each call: it is checked, sorted and cut into slices again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fastsparse_core import scatter
from fastsparse_core.segment import clear_segments

from . import suite
from .runner import DTYPES, Benchmark, Cell, Job, Run, option, relative_error, release

HUBS = "ten segments"


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph, or of ten segments."""
    graph = suite.load(run.options.graphs[0] if name == HUBS else name, run.device)
    generator = torch.Generator(device=run.device).manual_seed(0)
    size = 10 if name == HUBS else graph.num_nodes
    index = graph.row().long()[torch.randperm(graph.num_edges, device=run.device, generator=generator)] % size
    for width, dtype, reduce in run.grid("widths", "dtypes", "reductions"):
        src = torch.randn(index.numel(), width, device=run.device, generator=generator).to(DTYPES[dtype])
        for backward in (False, True):
            expected: list[Tensor] = []
            for implementation in ("torch", "new index", "kept index"):
                step = _step(implementation, src, index, size, reduce, backward)
                cell = {
                    "graph": name,
                    "rows": index.numel(),
                    "segments": size,
                    "width": width,
                    "dtype": dtype,
                }
                cell |= {"reduce": reduce, "backward": backward, "implementation": implementation}
                yield cell, partial(_measure, run, step, expected, implementation == "torch")
        del src, step
        release()


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
        return scatter(leaf, index, size, reduce)

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


def _measure(run: Run, step: Callable[[], Tensor], expected: list[Tensor], is_first: bool) -> Cell:
    """Time of a step, whether it repeats to the bit, and how far it is from torch's."""
    result = step()
    error = relative_error(result, expected[0].double()) if expected else None
    repeats = all(torch.equal(result, step()) for _ in range(3))
    cell = {"error": error, "repeats": repeats, **run.time(step)}
    expected.extend([result] if is_first else [])
    return cell


BENCHMARK = Benchmark(
    "segments",
    cells,
    lambda options: [*options.graphs, HUBS],
    graphs=["ogbn-arxiv"],
    budget_ms=30.0,
    options={
        "widths": option([1, 16, 128]),
        "dtypes": option(["float32", "bfloat16"], choices=tuple(DTYPES)),
        "reductions": option(choices=("sum", "mean", "max", "std")),
    },
    notes=(
        "torch is index_add for sums and scatter_reduce for means and maxima; its deviation is two means",
    ),
)
