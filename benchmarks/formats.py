"""Formats of the tensor-core kernels: vectors, zeros, instructions, bytes; conversion and products on a GPU.

FlashSparse's table 2 (zeros in vectors), table 7 (ME-BCRS against SR-BCRS) and figure 14 (8x1 against 16x1),
with rows in natural order and grouped by similarity; what the grouping costs, and what products gain by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch

from fastsparse_core import Adjacency, spmm
from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.formats.grouping import Method, choose_grouping, group_rows
from fastsparse_core.formats.statistics import statistics

from . import suite
from .runner import Benchmark, Cell, Job, Run, option, release
from .timing import kernel_time, wall_time

#: Real graphs, small ones first.
REAL_GRAPHS = """
cora citeseer pubmed minesweeper proteins dblp delaunay_n15 nell nci1 p2p_gnutella31 twitch_de
fe_body facebook blogcatalog email_enron fb_newsites deezer_hu amazon_computers coauthor_physics
finan512 github bcsstk33 blogcatalog3 soc_slashdot0902 cornell5 dd ogbl_ddi molhiv collab_tu
"""


def default_graphs() -> list[str]:
    """The real graphs whose files exist, and the stand-ins if a GPU can draw them."""
    real = suite.at_hand(REAL_GRAPHS.split())
    return [*real, *(suite.PEER_GRAPHS if torch.cuda.is_available() or not real else ())]


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.device)
    adj = graph.adjacency()
    cell = {"graph": name.removeprefix(suite.REAL), "real": name.startswith(suite.REAL)}
    cell |= {"nodes": graph.num_nodes, "edges": graph.num_edges}
    kept = choose_grouping(adj) is not None
    groupings: tuple[Method, ...] = ("none", "minhash", "auto")
    for grouping in groupings:
        release()
        yield {**cell, "grouping": grouping, "kept": kept}, partial(_measure, run, adj, grouping)


def _measure(run: Run, adj: Adjacency, grouping: Method) -> Cell:
    def convert() -> Bsb:
        return Bsb.from_csr(adj.row(), adj.col, adj.shape, group_rows(adj, grouping))

    cell: Cell = dataclasses.asdict(statistics(adj, group_rows(adj, grouping)))
    del cell["num_edges"]
    if run.device.type != "cuda":
        return cell
    cell |= run.time(convert, wall_time, min_calls=3, max_calls=50) | {
        "scratch_gb": _scratch_gb(convert, adj.device)
    }
    own = Adjacency.from_csr(adj.rowptr, adj.col, adj.shape, group_rows=grouping)
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(adj.num_src, run.options.width, device=adj.device).to(dtype)
        timing = kernel_time(
            partial(spmm, own, x, algorithm="flashsparse"), adj.device, budget_ms=run.options.budget_ms
        )
        cell[f"spmm_{str(dtype).removeprefix('torch.')}_ms"] = timing.median_ms
    return cell


def _scratch_gb(convert: Callable[[], Bsb], device: torch.device) -> float:
    """Peak memory of a conversion above the memory of its result, in GB."""
    release()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    bsb = convert()
    peak = torch.cuda.max_memory_allocated(device) - before
    kept = sum(bsb.memory_usage().values())
    return max(peak - kept, 0) / 1e9


BENCHMARK = Benchmark(
    "formats",
    cells,
    graphs=default_graphs(),
    budget_ms=200.0,
    options={"width": option(128, "features of the timed products")},
    notes=lambda options: (
        "counts are of structures without values; bytes are of BSB as stored, of the others with 16-bit"
        " values and 32-bit indices; matrix instructions are m16n8k16, for 16 features",
        "'minhash' groups similar rows, 'auto' also decides whether to keep that ('kept'); conversions, timed"
        " on a GPU only, start from CSR with the row of every entry in hand and include the grouping",
        f"products with {options.width} features, without edge values, on a GPU only",
    ),
)
