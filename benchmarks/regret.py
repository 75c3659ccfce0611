"""What `auto` costs against the best algorithm of spmm, for structures seen once and for those seen often.

The grid: graphs, a sampled block and pruned weight matrices; widths; dtypes; the first product of a new
structure, its construction included, and products of a prepared one. The algorithms are those that
`policy.SPMM_ALGORITHMS` names, as far as they can serve a call.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastsparse_core import Adjacency, policy, spmm

from . import suite
from .blocks import sample
from .choice import runs_as
from .common import DTYPES, WrongResult, add_common, attempt, progress, recorder, relative_error, release
from .spmm import TOLERANCE
from .timing import kernel_time, wall_times

#: Prefixes of names: the first layer's block of a batch of that graph; a random matrix of DLMC's shape with
#: that share of zeros; a file of DLMC in the folder that FASTSPARSE_DATA names.
BLOCK, PRUNED, DLMC = "block:", "pruned:", "dlmc:"
PRUNED_SHAPE = (2048, 512)
SEEN = ("first", "repeated")


class Structure(NamedTuple):
    """Compressed rows, int64 and int32."""

    rowptr: Tensor
    col: Tensor
    shape: tuple[int, int]

    def adjacency(self) -> Adjacency:
        return Adjacency.from_csr(self.rowptr, self.col, self.shape)


def default_structures() -> list[str]:
    """Graphs, a block, pruned matrices, and the files of DLMC at hand."""
    folder = os.environ.get("FASTSPARSE_DATA")
    files = sorted(Path(folder).glob("dlmc_*.npz")) if folder else []
    return [
        *("pubmed", "peptides-batch", "ogbn-arxiv", "yelp", "reddit", BLOCK + "ogbn-products"),
        *(PRUNED + share for share in ("0.8", "0.9", "0.98")),
        *(DLMC + path.stem.removeprefix("dlmc_") for path in files),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, budget_ms=15.0)
    kinds = f"names of the suite, {BLOCK}<graph>, {PRUNED}<share of zeros>, {DLMC}<file>"
    parser.add_argument("--structures", nargs="+", default=default_structures(), help=kinds)
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 128, 256], help="feature widths")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["float32", "float16"])
    parser.add_argument("--seen", nargs="+", choices=SEEN, default=list(SEEN))


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("regret", options)
    out.note(
        "forward without values; 'first' is construction from compressed rows, what the algorithm converts"
        " and one product, by the clock, algorithms in turn; 'repeated' is one product of a prepared"
        " structure; regret is the time of what auto picks over the best time"
    )
    device = torch.device(options.device)
    for name in progress(options.structures, "regret"):
        setup = attempt(lambda name=name: {"structure": load(name, device)})
        if setup["status"] != "ok":
            out.add(structure=name, status=setup["status"])
            continue
        structure: Structure = setup["structure"]
        prepared = structure.adjacency().prepare() if "repeated" in options.seen else None
        for seen, width, dtype in itertools.product(options.seen, options.widths, options.dtypes):
            fresh = structure.adjacency
            adjacency = fresh if prepared is None or seen == "first" else partial(_same, prepared)
            job = partial(_measure, adjacency, seen, width, dtype, device, options.budget_ms)
            rows, edges = structure.shape[0], structure.col.numel()
            out.add(
                structure=name, rows=rows, edges=edges, seen=seen, width=width, dtype=dtype, **attempt(job)
            )
        del prepared, structure, setup
        release()
    return out.path


def load(name: str, device: torch.device) -> Structure:
    """A structure by name.

    Raises:
        ValueError: There is no such graph or file.
    """
    if name.startswith(PRUNED):
        generator = torch.Generator(device=device).manual_seed(0)
        kept = torch.rand(PRUNED_SHAPE, device=device, generator=generator) >= float(
            name.removeprefix(PRUNED)
        )
        return _compressed(*kept.nonzero().t(), PRUNED_SHAPE)
    if name.startswith(DLMC):
        path = Path(os.environ.get("FASTSPARSE_DATA", "."), f"dlmc_{name.removeprefix(DLMC)}.npz")
        if not path.is_file():
            raise ValueError(f"{name}: expected {path.name} in the folder that FASTSPARSE_DATA names")
        with np.load(path, allow_pickle=False) as archive:
            rowptr, col = (torch.from_numpy(archive[key]).to(device) for key in ("rowptr", "col"))
            num_rows, num_cols = (int(size) for size in archive["shape"])
        return Structure(rowptr.long(), col, (num_rows, num_cols))
    graph = suite.load(name.removeprefix(BLOCK), device)
    if not name.startswith(BLOCK):
        return Structure(graph.rowptr.long(), graph.col, (graph.num_nodes, graph.num_nodes))
    generator = torch.Generator(device=device).manual_seed(0)
    seeds = torch.randperm(graph.num_nodes, device=device, generator=generator)[:1024]
    block = sample(graph, seeds, (15, 10, 5), generator)[0][0]
    return _compressed(block.edge_index[1], block.edge_index[0], (block.num_dst, block.num_src))


def _compressed(row: Tensor, col: Tensor, shape: tuple[int, int]) -> Structure:
    rowptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=shape[0]), 0, out=rowptr[1:])
    return Structure(rowptr, col.int(), shape)


def _same(adjacency: Adjacency) -> Adjacency:
    return adjacency


def _measure(
    adjacency: Callable[[], Adjacency],
    seen: str,
    width: int,
    dtype: str,
    device: torch.device,
    budget_ms: float,
) -> dict[str, Any]:
    adj = adjacency()
    x = torch.randn(adj.num_src, width, device=device).to(DTYPES[dtype])
    exact = spmm(adj, x.double(), algorithm="csr")

    def product(algorithm: str) -> Tensor:
        return spmm(adjacency(), x, algorithm=algorithm)

    calls: dict[str, Callable[[], Tensor]] = {}
    for algorithm in policy.SPMM_ALGORITHMS:
        call = partial(product, algorithm)
        if algorithm == "auto" or runs_as(call, adj) != algorithm:
            continue
        error = relative_error(call(), exact)
        if error > TOLERANCE[dtype]:
            raise WrongResult(error, f"{algorithm} has ")
        calls[algorithm] = call
    if seen == "first":  # mostly the host's time
        timings = wall_times(calls, device, budget_ms=budget_ms)
    else:
        timings = {name: kernel_time(call, device, budget_ms=budget_ms) for name, call in calls.items()}
    times = {algorithm: timing.median_ms for algorithm, timing in timings.items()}
    pick = runs_as(partial(product, "auto"), adj)
    best = min(times, key=lambda algorithm: times[algorithm])
    return {
        "times_ms": {algorithm: round(time, 6) for algorithm, time in times.items()},
        "pick": pick,
        "best": best,
        "regret": round(times[pick] / times[best], 4),
    }
