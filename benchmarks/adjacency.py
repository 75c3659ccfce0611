"""Building an Adjacency and its transpose from an unsorted edge list."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from fastsparse_core import Adjacency

from . import suite
from .runner import Benchmark, Cell, Job, Run, release
from .timing import wall_time


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.device)
    nodes = graph.num_nodes
    order = torch.randperm(graph.num_edges, device=run.device)
    col, row = (end[order].contiguous() for end in graph.edge_index())
    del graph, order
    for structure, edges in (("symmetric", (row, col)), ("directed", (row[1:], col[1:]))):
        for prepared in (False, True):
            cell = {"graph": name, "nodes": nodes, "edges": edges[0].numel()}
            cell |= {"structure": structure + ", prepared" * prepared, "implementation": "fastsparse"}
            yield cell, partial(_measure, run, *edges, nodes, prepared)


def _measure(run: Run, row: Tensor, col: Tensor, nodes: int, prepared: bool) -> Cell:
    def build() -> Adjacency:
        adj = Adjacency.from_coo(row, col, (nodes, nodes))
        if prepared:
            return adj.prepare(backward=True)
        for part in (adj, adj.t()):
            _ = part.csr_structure
        return adj

    cell = run.time(build, wall_time, min_calls=3, max_calls=20)
    if row.is_cuda:
        release()
        before = torch.cuda.memory_allocated(row.device)
        torch.cuda.reset_peak_memory_stats(row.device)
        adj = build()
        peak = torch.cuda.max_memory_allocated(row.device) - before
        kept = torch.cuda.memory_allocated(row.device) - before
        cell |= {"kept_gb": kept / 1e9, "scratch_gb": (peak - kept) / 1e9}
        del adj
    return cell


BENCHMARK = Benchmark(
    "adjacency",
    cells,
    graphs=suite.PEER_GRAPHS,
    budget_ms=500.0,
    notes=(
        "from int64 (row, col) in random order to an Adjacency with its transpose and the work lists of the"
        " CSR kernels; 'prepared' converts both for the tensor cores as well, with similar rows grouped where"
        " that pays; scratch is the peak above what the Adjacency keeps; 'directed' has one edge removed, so"
        " that no transpose can be shared",
    ),
)
