"""Calls as scripts make them, plain and under `fastsparse_pyg.enable()`; how long a script takes to start.

- products: `torch.sparse.mm` with a normalised matrix, as COO and as CSR, that is kept.
- functions: `scatter` and `softmax` of `torch_geometric.utils` with ``edge_index[1]``, and the global pools
  with a sorted ``batch`` of graphs of about 26 nodes.
- start: a process that imports PyTorch and PyG, alone and by `fastsparse run`.

On a GPU, calls follow each other without synchronisation, so the time of the host counts only if the host is
the slower part.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch_geometric.nn
import torch_geometric.utils
from torch import Tensor

import fastsparse_pyg

from .any_layer import draw_graph
from .runner import DTYPES, Benchmark, Cell, Run, attempt, option, relative_error, release
from .timing import step_time, summarise

#: Functions are measured on graphs of up to this number of edges: they need a row of features per edge.
MOST_EDGES = 20_000_000
HEADS, NODES_OF_A_GRAPH = 4, 26
#: Rounds in which plain and enabled calls alternate; the best of each counts.
ROUNDS = 3
FUNCTIONS = ("scatter sum", "scatter mean", "scatter max", "softmax", "add pool", "mean pool", "max pool")


def cells(run: Run, name: str) -> Iterator[Cell]:
    """All cells of one graph, or those of starting a script."""
    if name == "start":
        yield from _start(run.options.starts)
        return
    edges, nodes = draw_graph(name, run.device)
    facts = {"graph": name, "nodes": nodes, "edges": edges.size(1)}
    for call, dtype, backward in _calls(run, edges.size(1)):
        make = partial(_step, call, edges, nodes, run.options.width, DTYPES[dtype], backward)
        for implementation, cell in _compare(run, make).items():
            what = {"call": call, "dtype": dtype, "backward": backward, "implementation": implementation}
            yield {**facts, **what, **cell}
        fastsparse_pyg.clear_cache()
        release()


def _calls(run: Run, edges: int) -> Iterator[tuple[str, str, bool]]:
    products = [(f"sparse.mm {layout}", dtype) for layout in ("COO", "CSR") for dtype in run.options.dtypes]
    functions = [(call, "float32") for call in FUNCTIONS] if edges <= MOST_EDGES else []
    chosen = {"products": products, "functions": functions}
    for part in run.options.parts:
        for call, dtype in chosen.get(part, ()):
            for backward in (False, True):
                yield call, dtype, backward


def _step(
    call: str, edges: Tensor, nodes: int, width: int, dtype: torch.dtype, backward: bool
) -> Callable[[], Tensor]:
    """The call as a function without arguments, with or without the gradient."""
    name, _, how = call.rpartition(" ")
    if how in ("COO", "CSR"):
        scale = torch.bincount(edges[1], minlength=nodes).clamp(min=1).rsqrt()
        values = (scale[edges[0]] * scale[edges[1]]).to(dtype)
        matrix = torch.sparse_coo_tensor(edges.flip(0), values, (nodes, nodes)).coalesce()
        matrix = matrix.to_sparse_csr() if how == "CSR" else matrix
        rows, forward = nodes, lambda: torch.sparse.mm(matrix, x)
    elif how == "pool":
        batch = torch.arange(nodes, device=edges.device) // NODES_OF_A_GRAPH
        graphs = -(-nodes // NODES_OF_A_GRAPH)
        rows, forward = nodes, lambda: getattr(torch_geometric.nn, f"global_{name}_pool")(x, batch, graphs)
    elif name == "scatter":
        rows, forward = edges.size(1), lambda: torch_geometric.utils.scatter(x, edges[1], 0, nodes, how)
    else:
        rows, width = edges.size(1), HEADS
        forward = lambda: torch_geometric.utils.softmax(x, edges[1], num_nodes=nodes)  # noqa: E731
    generator = torch.Generator(device=edges.device).manual_seed(0)
    x = torch.randn(rows, width, device=edges.device, generator=generator).to(dtype).requires_grad_(backward)
    upstream = None
    if backward:  # the gradient is the same with and without enable()
        given = forward()
        upstream = torch.randn(given.shape, device=given.device, generator=generator).to(given.dtype)

    def step() -> Tensor:
        out: Tensor = forward()
        return out if upstream is None else torch.autograd.grad(out, x, upstream)[0]

    return step


def _compare(run: Run, make: Callable[[], Callable[[], Tensor]]) -> dict[str, Cell]:
    """The best times of both, and the difference of their results."""
    best: dict[str, Cell] = {}
    expected: list[Tensor] = []

    def measure() -> Cell:
        step = make()
        for _ in range(3):  # structures are built when they are used again
            result = step()
        expected.extend([] if expected else [result.double()])
        return {"error": relative_error(result, expected[0]), **run.time(step, step_time)}

    for _ in range(ROUNDS):
        for implementation in ("plain", "enabled"):
            if implementation == "enabled":
                fastsparse_pyg.enable()
            cell = attempt(measure)
            fastsparse_pyg.disable()
            known = best.setdefault(implementation, cell)
            if cell["status"] == "ok" and cell["median_ms"] < known.get("median_ms", math.inf):
                best[implementation] = cell
    return best


def _start(count: int) -> Iterator[Cell]:
    """Time of a script that only imports, until its process has ended."""
    command = "import sys, fastsparse_run; sys.exit(fastsparse_run.main(sys.argv[1:]))"
    times: dict[str, list[float]] = {"plain": [], "enabled": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text("import torch, torch_geometric\n")
        starts = {"plain": [str(script)], "enabled": ["-c", command, "run", str(script)]}
        for _ in range(count + 1):
            for name, arguments in starts.items():
                begin = time.perf_counter()
                subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
                times[name].append((time.perf_counter() - begin) * 1e3)
    facts = {"graph": "-", "call": "start", "dtype": "-", "backward": False}
    for name, found in times.items():
        timing = summarise(found[1:], "wall clock, a process")
        yield {**facts, "implementation": name, "status": "ok", **timing.as_cell()}


def _cases(options: argparse.Namespace) -> list[str]:
    graphs = options.drawn if {"products", "functions"} & set(options.parts) else []
    return [*graphs, *(["start"] if "start" in options.parts else [])]


BENCHMARK = Benchmark(
    "enabled",
    cells,
    _cases,
    budget_ms=40.0,
    options={
        "parts": option(choices=("products", "functions", "start")),
        "graphs": option(["ogbn-arxiv", "reddit", "yelp", "cora", "molecules"], "graphs", dest="drawn"),
        "dtypes": option(["float32", "bfloat16"], choices=tuple(DTYPES)),
        "width": option(64, "features; softmax has four heads"),
        "starts": option(5, "processes that are started to time a start"),
    },
    notes=("indices and matrices are kept; functions are in float32",),
)
