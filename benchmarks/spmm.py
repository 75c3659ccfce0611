"""Sparse-dense product, forward and backward, against cuSPARSE (``torch.sparse_csr @ X``)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fastsparse_core import Adjacency, spmm

from . import roofline, suite
from .common import DTYPES, add_common, attempt, progress, recorder, release
from .record import Recorder
from .steps import timed

#: Largest relative error against float64 that a result may have and still be timed. cuSPARSE's float16 result
#: is rounded once, at the end, as ours is.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=suite.PEER_GRAPHS, budget_ms=60.0)
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128], help="feature widths")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["float32"])
    parser.add_argument("--algorithm", default="csr", help="our algorithm")
    directions = ("forward", "backward")
    parser.add_argument("--directions", nargs="+", choices=directions, default=list(directions))


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("spmm", options, variant="" if options.algorithm == "csr" else options.algorithm)
    out.note(
        "backward is the gradient of the features: ours through autograd, the rival's as the product with the"
        " transposed CSR matrix in hand (the stand-ins are symmetric, so with the matrix itself)"
    )
    out.note(
        "gathered are the rows that the kernel reads: one per edge, with flashsparse one per vector; the"
        " roofline is the rate of gathering uniformly random rows, which graphs with popular nodes can exceed"
    )
    for name in progress(options.graphs, "spmm"):
        _run_graph(name, options, out)
        release()
    return out.path


def _run_graph(name: str, options: argparse.Namespace, out: Recorder) -> None:
    """All cells of one graph; what it holds on the device ends with the call."""
    device = torch.device(options.device)
    graph = suite.load(name, device)
    adj = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes)).prepare()
    exact = graph.sparse_csr(torch.float64)
    for width, dtype in itertools.product(options.widths, options.dtypes):
        x = torch.randn(graph.num_nodes, width, device=device).to(DTYPES[dtype])
        reference = exact @ x.double()
        size = x.element_size()
        for direction in options.directions:
            for implementation, fn in _calls(graph, adj, x, direction, options.algorithm).items():
                rows = rows_gathered(adj, implementation)
                measure = partial(timed, fn, reference, DTYPES[dtype], TOLERANCE[dtype], options.budget_ms)
                out.add(
                    **graph.facts(),
                    width=width,
                    dtype=dtype,
                    direction=direction,
                    implementation=implementation,
                    gather_bytes=roofline.gather_bytes(rows, width, size),
                    floor_ms=roofline.spmm_floor_ms(rows, graph.num_nodes, width, size),
                    **attempt(measure),
                )


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

    def forward() -> Tensor:
        return spmm(adj, x, algorithm=algorithm)

    def backward() -> Tensor:
        return torch.autograd.grad(y, leaf, x, retain_graph=True)[0]

    y = spmm(adj, leaf, algorithm=algorithm)
    ours = forward if direction == "forward" else backward
    rival = "cuSPARSE" if x.is_cuda else "torch.sparse CSR"
    return {f"fastsparse {algorithm}": ours, rival: lambda: matrix @ x}
