"""What `auto` costs against the best algorithm of spmm, for structures seen once and for those seen often.

The grid: graphs, a sampled block and pruned weight matrices; widths; dtypes; the first product of a new
structure, its construction included, and products of a prepared one. The algorithms are those that
`policy.SPMM_ALGORITHMS` names, as far as they support the call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fastsparse_core import Adjacency, policy, spmm

from . import suite
from .blocks import sample
from .runner import DTYPES, TOLERANCE, Benchmark, Cell, Job, Run, attempt, check, option, relative_error
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


def cells(run: Run, name: str) -> Iterator[Job | Cell]:
    """All cells of one structure."""
    setup = attempt(lambda: {"structure": load(name, run.device)})
    if setup["status"] != "ok":
        yield {"structure": name, **setup}
        return
    structure: Structure = setup["structure"]
    prepared = structure.adjacency().prepare() if "repeated" in run.options.seen else None
    shared = {"structure": name, "rows": structure.shape[0], "edges": structure.col.numel()}
    for seen, width, dtype in run.grid("seen", "widths", "dtypes"):
        adjacency = structure.adjacency if prepared is None or seen == "first" else lambda: prepared
        job = partial(_measure, run, adjacency, seen, width, dtype)
        yield {**shared, "seen": seen, "width": width, "dtype": dtype}, job


def runs_as(call: Callable[[], Tensor], adj: Adjacency, operator: str = "spmm") -> str:
    """The algorithm that a call of an operator actually runs."""
    adj.plans.clear()  # otherwise an earlier choice would be reused
    resolved = []
    original = getattr(policy, f"{operator}_algorithm")

    def listen(*args: Any, **kwargs: Any) -> policy.Choice:
        choice: policy.Choice = original(*args, **kwargs)
        resolved.append(choice.algorithm)
        return choice

    with mock.patch.object(policy, f"{operator}_algorithm", listen):
        call()
    return resolved[-1]


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


def _measure(run: Run, adjacency: Callable[[], Adjacency], seen: str, width: int, dtype: str) -> Cell:
    adj = adjacency()
    x = torch.randn(adj.num_src, width, device=run.device).to(DTYPES[dtype])
    exact = spmm(adj, x.double(), algorithm="csr")

    def product(algorithm: str) -> Tensor:
        return spmm(adjacency(), x, algorithm=algorithm)

    calls: dict[str, Callable[[], Tensor]] = {}
    for algorithm in policy.SPMM_ALGORITHMS:
        call = partial(product, algorithm)
        if algorithm == "auto" or runs_as(call, adj) != algorithm:
            continue
        check(relative_error(call(), exact), TOLERANCE[dtype], f"{algorithm} has ")
        calls[algorithm] = call
    budget_ms = run.options.budget_ms
    if seen == "first":  # mostly the host's time
        timings = wall_times(calls, run.device, budget_ms=budget_ms)
    else:
        timings = {name: kernel_time(call, run.device, budget_ms=budget_ms) for name, call in calls.items()}
    times = {algorithm: timing.median_ms for algorithm, timing in timings.items()}
    pick = runs_as(partial(product, "auto"), adj)
    best = min(times, key=lambda algorithm: times[algorithm])
    return {
        "times_ms": {algorithm: round(time, 6) for algorithm, time in times.items()},
        "pick": pick,
        "best": best,
        "regret": round(times[pick] / times[best], 4),
    }


BENCHMARK = Benchmark(
    "regret",
    cells,
    "structures",
    budget_ms=15.0,
    options={
        "structures": option(
            default_structures(),
            f"names of the suite, {BLOCK}<graph>, {PRUNED}<share of zeros>, {DLMC}<file>",
        ),
        "widths": option([32, 128, 256], "feature widths"),
        "dtypes": option(["float32", "float16"], choices=tuple(DTYPES)),
        "seen": option(choices=SEEN),
    },
    notes=(
        "forward without values; 'first' is construction from compressed rows, what the algorithm converts"
        " and one product, by the clock, algorithms in turn; 'repeated' is one product of a prepared"
        " structure; regret is the time of what auto picks over the best time",
    ),
)
