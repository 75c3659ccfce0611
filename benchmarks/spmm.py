"""Sparse-dense product, forward and backward, against cuSPARSE (``torch.sparse_csr @ X``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastsparse_core import Adjacency, spmm

from . import roofline, suite
from .runner import DTYPES, Benchmark, Job, Run, option

DIRECTIONS = ("forward", "backward")


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.device)
    adj = graph.adjacency().prepare()
    exact = graph.sparse_csr(torch.float64)
    for width, dtype in run.grid("widths", "dtypes"):
        x = torch.randn(graph.num_nodes, width, device=run.device).to(DTYPES[dtype])
        reference = exact @ x.double()
        size = x.element_size()
        for direction in run.options.directions:
            for implementation, fn in _calls(graph, adj, x, direction, run.options.algorithm).items():
                rows = rows_gathered(adj, implementation)
                cell = {**graph.facts(), "width": width, "dtype": dtype, "direction": direction}
                cell |= {
                    "implementation": implementation,
                    "gather_bytes": roofline.gather_bytes(rows, width, size),
                    "floor_ms": roofline.spmm_floor_ms(rows, graph.num_nodes, width, size),
                }
                yield cell, run.checked(fn, reference, dtype)


def rows_gathered(adj: Adjacency, implementation: str) -> int:
    """Rows of the features that a product reads: one per vector from blocks, else one per edge."""
    if implementation == "fastsparse flashsparse" and adj.has_bsb:
        return adj.bsb.num_vectors
    return adj.num_edges


def _calls(
    graph: suite.Graph, adj: Adjacency, x: Tensor, direction: str, algorithm: str
) -> dict[str, Callable[[], Tensor]]:
    """The calls to compare; both give A x, since the suite's graphs are symmetric."""
    matrix = graph.sparse_csr(x.dtype)
    leaf = torch.zeros_like(x).requires_grad_()
    y = spmm(adj, leaf, algorithm=algorithm)
    ours = {
        "forward": lambda: spmm(adj, x, algorithm=algorithm),
        "backward": lambda: torch.autograd.grad(y, leaf, x, retain_graph=True)[0],
    }
    baseline = "cuSPARSE" if x.is_cuda else "torch.sparse CSR"
    return {f"fastsparse {algorithm}": ours[direction], baseline: lambda: matrix @ x}


BENCHMARK = Benchmark(
    "spmm",
    cells,
    graphs=suite.PEER_GRAPHS,
    budget_ms=60.0,
    options={
        "widths": option([64, 128], "feature widths"),
        "dtypes": option(["float32"], choices=tuple(DTYPES)),
        "algorithm": option("csr", "our algorithm"),
        "directions": option(choices=DIRECTIONS),
    },
    notes=(
        "backward is the gradient of the features: ours through autograd, the baseline's as the product with"
        " the transposed CSR matrix in hand (the stand-ins are symmetric, so with the matrix itself)",
        "gathered are the rows that the kernel reads: one per edge, with flashsparse one per vector; the"
        " roofline is the rate of gathering uniformly random rows, which graphs with popular nodes can"
        " exceed",
    ),
    variant=lambda options: "" if options.algorithm == "csr" else options.algorithm,
)
