"""What ``algorithm="auto"`` picks for spmm, and what that costs against the better of csr and flashsparse."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastsparse_core import Adjacency, policy, spmm

from . import suite
from .common import DTYPES, WrongResult, add_common, attempt, progress, recorder, relative_error, release
from .spmm import TOLERANCE
from .timing import kernel_time

#: Stand-ins of every kind and size.
STAND_INS = ("pubmed", "ppi", "ogbn-arxiv", "dd", "igb-small", "yelp", "reddit")
#: Real graphs: sparse to dense, with and without rows that share columns.
REAL_GRAPHS = ("amazon_computers", "soc_slashdot0902", "cornell5", "collab_tu")
WIDTHS = (16, 32, 64, 100, 128, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=[*STAND_INS, *suite.at_hand(REAL_GRAPHS)], budget_ms=25.0)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="feature widths")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("choice", options)
    out.note(
        "forward, prepared structures without values; regret is the time of what auto picks over the best"
        " time; an algorithm without a time cannot serve the width and runs as csr"
    )
    for name in progress(options.graphs, "choice"):
        setup = attempt(partial(_load, name, torch.device(options.device)))
        if setup["status"] != "ok":
            out.add(graph=name, status=setup["status"])
            continue
        adj: Adjacency = setup["adj"]
        shared = {"graph": name, "nodes": adj.num_dst, "edges": adj.num_edges, "vectors": setup["vectors"]}
        for width, dtype in itertools.product(options.widths, options.dtypes):
            measure = partial(_measure, adj, width, dtype, options.budget_ms)
            out.add(**shared, width=width, dtype=dtype, **attempt(measure))
        del adj, setup
        release()
    return out.path


def _load(name: str, device: torch.device) -> dict[str, Any]:
    graph = suite.load(name, device)
    adj = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes)).prepare()
    return {"adj": adj, "vectors": adj.bsb.num_vectors if adj.has_bsb else None}


def runs_as(call: Callable[[], Tensor], adj: Adjacency, operator: str = "spmm") -> str:
    """The algorithm that a call of an operator comes down to, asked of the call itself."""
    adj.plans.clear()  # what was found out before would not be asked
    resolved = []
    original = getattr(policy, f"{operator}_algorithm")

    def listen(*args: Any, **kwargs: Any) -> policy.Choice:
        choice: policy.Choice = original(*args, **kwargs)
        resolved.append(choice.algorithm)
        return choice

    with mock.patch.object(policy, f"{operator}_algorithm", listen):
        call()
    return resolved[-1]


def _measure(adj: Adjacency, width: int, dtype: str, budget_ms: float) -> dict[str, Any]:
    x = torch.randn(adj.num_src, width, device=adj.device).to(DTYPES[dtype])
    exact = spmm(adj, x.double(), algorithm="csr")
    cell: dict[str, Any] = {}
    times: dict[str, float] = {}
    for algorithm in policy.SPMM_ALGORITHMS:
        call = partial(spmm, adj, x, algorithm=algorithm)
        if algorithm == "auto" or runs_as(call, adj) != algorithm:
            continue
        error = relative_error(call(), exact)
        if error > TOLERANCE[dtype]:
            raise WrongResult(error, f"{algorithm} has ")
        timing = kernel_time(call, adj.device, budget_ms=budget_ms)
        times[algorithm] = timing.median_ms
        cell |= timing.as_cell(f"{algorithm}_")
    pick = runs_as(partial(spmm, adj, x, algorithm="auto"), adj)
    return {**cell, "pick": pick, "regret": round(times[pick] / min(times.values()), 4)}
