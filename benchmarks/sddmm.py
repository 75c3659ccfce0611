"""Sampled dense-dense product, a dot product per edge: csr against flashsparse and what ``"auto"`` picks."""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fastsparse_core import Adjacency, sddmm

from . import roofline, suite
from .choice import runs_as
from .common import DTYPES, add_common, attempt, progress, recorder, relative_error, release
from .record import Recorder
from .spmm import TOLERANCE, rows_gathered
from .steps import check, poison
from .timing import kernel_time

#: Edges whose results are compared with float64: all of them would take longer than the timings.
CHECKED = 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=suite.PEER_GRAPHS, budget_ms=60.0)
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 128], help="feature widths")
    parser.add_argument(
        "--dtypes", nargs="+", choices=tuple(DTYPES), default=["float32", "float16", "bfloat16"]
    )
    parser.add_argument("--algorithms", nargs="+", default=["csr", "flashsparse", "auto"])


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("sddmm", options)
    out.note(f"errors are those of {CHECKED} random edges against float64")
    out.note("gathered are the rows of the sources that the kernel reads: one per edge or one per vector")
    for name in progress(options.graphs, "sddmm"):
        _run_graph(name, options, out)
        release()
    return out.path


def _run_graph(name: str, options: argparse.Namespace, out: Recorder) -> None:
    """All cells of one graph; what it holds on the device ends with the call."""
    device = torch.device(options.device)
    graph = suite.load(name, device)
    adj = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes))
    adj.prepare(backward=False)
    edge = torch.randint(graph.num_edges, (min(CHECKED, graph.num_edges),), device=device)
    row, col = adj.row()[edge], adj.col[edge]
    for width, dtype in itertools.product(options.widths, options.dtypes):
        x_dst, x_src = (
            torch.randn(graph.num_nodes, width, device=device).to(DTYPES[dtype]) for _ in range(2)
        )
        reference = (x_dst[row].double() * x_src[col].double()).sum(1)
        for algorithm in options.algorithms:
            measure = partial(
                _measure, adj, x_dst, x_src, algorithm, edge, reference, dtype, options.budget_ms
            )
            out.add(
                **graph.facts(),
                width=width,
                dtype=dtype,
                implementation=f"fastsparse {algorithm}",
                **attempt(measure),
            )


def _measure(
    adj: Adjacency,
    x_dst: Tensor,
    x_src: Tensor,
    algorithm: str,
    edge: Tensor,
    reference: Tensor,
    dtype: str,
    budget_ms: float,
) -> dict[str, object]:
    def call() -> Tensor:
        return sddmm(adj, x_dst, x_src, algorithm=algorithm)

    poison([adj.num_values], DTYPES[dtype], adj.device)
    result = call()
    error = relative_error(result[edge], reference)
    check(math.inf if result.isnan().any() else error, TOLERANCE[dtype])
    del result
    pick = runs_as(call, adj, "sddmm")
    rows = rows_gathered(adj, f"fastsparse {pick}")
    gathered = roofline.gather_bytes(rows, x_src.size(1), x_src.element_size())
    timing = kernel_time(call, adj.device, budget_ms=budget_ms)
    return {"error": error, "pick": pick, "gather_bytes": gathered, **timing.as_cell()}
