"""Sampled dense-dense product, a dot product per edge: csr against flashsparse and what ``"auto"`` picks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fastsparse_core import sddmm

from . import roofline, suite
from .regret import runs_as
from .runner import DTYPES, TOLERANCE, Benchmark, Cell, Job, Run, check, option, poison, relative_error
from .spmm import rows_gathered

#: Number of edges whose results are compared with float64: all edges would take longer than the timings.
CHECKED = 200_000


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.device)
    adj = graph.adjacency()
    adj.prepare(backward=False)
    edge = torch.randint(graph.num_edges, (min(CHECKED, graph.num_edges),), device=run.device)
    row, col = adj.row()[edge], adj.col[edge]
    for width, dtype in run.grid("widths", "dtypes"):
        x_dst, x_src = (
            torch.randn(graph.num_nodes, width, device=run.device).to(DTYPES[dtype]) for _ in range(2)
        )
        reference = (x_dst[row].double() * x_src[col].double()).sum(1)

        def measure(
            algorithm: str, x_dst=x_dst, x_src=x_src, reference: Tensor = reference, dtype: str = dtype
        ) -> Cell:
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
            return {"error": error, "pick": pick, "gather_bytes": gathered, **run.time(call)}

        for algorithm in run.options.algorithms:
            cell = {
                **graph.facts(),
                "width": width,
                "dtype": dtype,
                "implementation": f"fastsparse {algorithm}",
            }
            yield cell, lambda algorithm=algorithm, measure=measure: measure(algorithm)


BENCHMARK = Benchmark(
    "sddmm",
    cells,
    graphs=suite.PEER_GRAPHS,
    budget_ms=60.0,
    options={
        "widths": option([32, 128], "feature widths"),
        "dtypes": option(choices=tuple(DTYPES)),
        "algorithms": option(["csr", "flashsparse", "auto"]),
    },
    notes=(
        f"errors are those of {CHECKED} random edges against float64",
        "gathered are the rows of the sources that the kernel reads: one per edge or one per vector",
    ),
)
