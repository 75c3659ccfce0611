"""Building an Adjacency and its transpose from an unsorted edge list."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency

from . import suite
from .common import add_common, attempt, progress, recorder, release
from .record import Recorder
from .timing import wall_time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=suite.PEER_GRAPHS, budget_ms=500.0)


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("adjacency", options)
    out.note(
        "from int64 (row, col) in random order to an Adjacency with its transpose and the work lists of the"
        " CSR kernels; 'prepared' converts both for the tensor cores as well, with similar rows grouped where"
        " that pays; scratch is the peak above what the Adjacency keeps; 'directed' has one edge removed, so"
        " that no transpose can be shared"
    )
    for name in progress(options.graphs, "adjacency"):
        _run_graph(name, options, out)
        release()
    return out.path


def _run_graph(name: str, options: argparse.Namespace, out: Recorder) -> None:
    """Both cells of one graph; what it holds on the device ends with the call."""
    device = torch.device(options.device)
    graph = suite.load(name, device)
    nodes = graph.num_nodes
    order = torch.randperm(graph.num_edges, device=device)
    col, row = (end[order].contiguous() for end in graph.edge_index())
    del graph, order
    for structure, edges in (("symmetric", (row, col)), ("directed", (row[1:], col[1:]))):
        for prepared in (False, True):
            out.add(
                graph=name,
                nodes=nodes,
                edges=edges[0].numel(),
                structure=f"{structure}, prepared" if prepared else structure,
                implementation="fastsparse",
                **attempt(partial(_measure, *edges, nodes, prepared, options.budget_ms)),
            )


def _measure(row: Tensor, col: Tensor, nodes: int, prepared: bool, budget_ms: float) -> dict[str, Any]:
    device = row.device

    def build() -> Adjacency:
        adj = Adjacency.from_coo(row, col, (nodes, nodes))
        if prepared:
            return adj.prepare(backward=True)
        for part in (adj, adj.t()):
            _ = part.csr_structure
        return adj

    timing = wall_time(build, device, budget_ms=budget_ms, least=3, most=20)
    memory: dict[str, Any] = {}
    if device.type == "cuda":
        release()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        adj = build()
        peak = torch.cuda.max_memory_allocated(device) - before
        kept = torch.cuda.memory_allocated(device) - before
        memory = {"kept_gb": kept / 1e9, "scratch_gb": (peak - kept) / 1e9}
        del adj
    return {**timing.as_cell(), **memory}
