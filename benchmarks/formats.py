"""Formats of the tensor-core kernels: vectors, zeros, instructions, bytes; conversion and products on a GPU.

FlashSparse's table 2 (zeros in vectors), table 7 (ME-BCRS against SR-BCRS) and figure 14 (8x1 against 16x1),
with rows in natural order and grouped by similarity; what the grouping costs, and what products gain by it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsparse_core import Adjacency, spmm
from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.formats.grouping import Method, choose_grouping, group_rows
from fastsparse_core.formats.statistics import statistics

from . import suite
from .common import add_common, attempt, progress, recorder, release
from .timing import kernel_time, wall_time

#: Real graphs, small ones first.
REAL_GRAPHS = (
    "cora",
    "citeseer",
    "pubmed",
    "minesweeper",
    "proteins",
    "dblp",
    "delaunay_n15",
    "nell",
    "nci1",
    "p2p_gnutella31",
    "twitch_de",
    "fe_body",
    "facebook",
    "blogcatalog",
    "email_enron",
    "fb_newsites",
    "deezer_hu",
    "amazon_computers",
    "coauthor_physics",
    "finan512",
    "github",
    "bcsstk33",
    "blogcatalog3",
    "soc_slashdot0902",
    "cornell5",
    "dd",
    "ogbl_ddi",
    "molhiv",
    "collab_tu",
)


def default_graphs() -> list[str]:
    """The real graphs at hand, and the stand-ins where a GPU draws them."""
    real = suite.at_hand(REAL_GRAPHS)
    return [*real, *(suite.PEER_GRAPHS if torch.cuda.is_available() or not real else ())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=default_graphs(), budget_ms=200.0)
    parser.add_argument("--width", type=int, default=128, help="features of the timed products")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("formats", options)
    out.note(
        "counts are of structures without values; bytes are of BSB as stored, of the others with 16-bit"
        " values and 32-bit indices; matrix instructions are m16n8k16, for 16 features"
    )
    out.note(
        "'minhash' groups similar rows, 'auto' also decides whether to keep that ('kept'); conversions, timed"
        " on a GPU only, start from CSR with the row of every entry in hand and include the grouping"
    )
    out.note(f"products with {options.width} features, without edge values, on a GPU only")
    for name in progress(options.graphs, "formats"):
        graph = suite.load(name, device)
        adj = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes))
        kept = choose_grouping(adj) is not None
        groupings: tuple[Method, ...] = ("none", "minhash", "auto")
        for grouping in groupings:
            release()
            out.add(
                graph=name.removeprefix(suite.REAL),
                real=name.startswith(suite.REAL),
                nodes=graph.num_nodes,
                edges=graph.num_edges,
                grouping=grouping,
                kept=kept,
                **attempt(partial(_measure, adj, grouping, options)),
            )
        del adj, graph
    return out.path


def _measure(adj: Adjacency, grouping: Method, options: argparse.Namespace) -> dict[str, Any]:
    def convert() -> Bsb:
        return Bsb.from_csr(adj.row(), adj.col, adj.shape, group_rows(adj, grouping))

    cell: dict[str, Any] = dataclasses.asdict(statistics(adj, group_rows(adj, grouping)))
    del cell["num_edges"]
    if adj.device.type != "cuda":
        return cell
    timing = wall_time(convert, adj.device, budget_ms=options.budget_ms, least=3, most=50)
    cell |= timing.as_cell() | {"scratch_gb": _scratch_gb(convert, adj.device)}
    own = Adjacency.from_csr(adj.rowptr, adj.col, adj.shape, group_rows=grouping)
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(adj.num_src, options.width, device=adj.device).to(dtype)
        timing = kernel_time(
            partial(spmm, own, x, algorithm="flashsparse"), adj.device, budget_ms=options.budget_ms
        )
        cell[f"spmm_{str(dtype).removeprefix('torch.')}_ms"] = timing.median_ms
    return cell


def _scratch_gb(convert: Callable[[], Bsb], device: torch.device) -> float:
    """Peak of what a conversion takes above what it leaves."""
    release()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    bsb = convert()
    peak = torch.cuda.max_memory_allocated(device) - before
    kept = sum(bsb.memory_usage().values())
    return max(peak - kept, 0) / 1e9
