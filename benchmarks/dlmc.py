"""Pruned weight matrices of DLMC times dense features, and what hr's work list costs before a product.

Small matrices, used as they are: every kernel of spmm, cuSPARSE and the dense
product. Each result is checked against float64 before it is timed. Stored rivals were timed from a cold
cache, one call at a time, so this is the time that counts; calls of a few microseconds are also timed back to
back in a CUDA graph.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsparse_core import Adjacency, spmm
from fastsparse_core.formats.bsb import Bsb
from fastsparse_core.formats.grouping import group_rows
from fastsparse_core.formats.hybrid_rows import HybridRows

from . import suite
from .common import DTYPES, add_common, attempt, progress, recorder, release
from .record import Recorder
from .spmm import TOLERANCE
from .steps import timed
from .timing import Timing, graph_time, kernel_time, wall_time

PREFIX = "dlmc_"

#: Algorithms by dtype: tca and hr would run as csr in float32.
ALGORITHMS = {"float16": ("csr", "flashsparse", "tca", "hr"), "float32": ("csr", "flashsparse")}


@dataclass(frozen=True)
class Matrix:
    """A sparse weight matrix; DLMC publishes patterns, so its values are random.

    Attributes:
        rowptr: int32 (rows + 1,).
        col: int32 (entries,).
        shape: (rows, columns).
    """

    rowptr: Tensor
    col: Tensor
    shape: tuple[int, int]

    @property
    def sparsity(self) -> float:
        return 1 - self.col.numel() / (self.shape[0] * self.shape[1])

    def sparse_csr(self, value: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.rowptr, self.col, value, self.shape, check_invariants=False)


def _folder() -> Path | None:
    folder = os.environ.get("FASTSPARSE_DATA")
    return Path(folder) if folder and Path(folder).is_dir() else None


def at_hand() -> list[str]:
    """The matrices in the folder that FASTSPARSE_DATA names."""
    folder = _folder()
    return sorted(path.stem.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*.npz")) if folder else []


def load(name: str, device: torch.device) -> Matrix:
    """A matrix by name.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if name not in at_hand():
        raise FileNotFoundError(
            f"{name} needs {PREFIX}{name}.npz in the folder that the environment variable FASTSPARSE_DATA"
            f" names (now {os.environ.get('FASTSPARSE_DATA') or 'unset'})"
        )
    folder = _folder()
    assert folder is not None
    with np.load(folder / f"{PREFIX}{name}.npz", allow_pickle=False) as archive:
        rowptr, col = (torch.from_numpy(archive[key].astype(np.int32)) for key in ("rowptr", "col"))
        rows, columns = map(int, archive["shape"])
    return Matrix(rowptr.to(device), col.to(device), (rows, columns))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=suite.PEER_GRAPHS, budget_ms=20.0)
    parser.add_argument("--parts", nargs="+", choices=("matrices", "preprocessing"), default=["matrices"])
    parser.add_argument("--matrices", nargs="+", default=at_hand(), help="names without dlmc_ and .npz")
    parser.add_argument("--width", type=int, default=256, help="columns of the dense matrix")
    parser.add_argument("--graph-width", type=int, default=64, help="features of the graphs' products")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(ALGORITHMS), default=list(ALGORITHMS))


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("dlmc", options)
    out.note("values are random; dense is the product of the matrix with its zeros; both are torch's")
    out.note("hr's work list (where not on the device) and conversion by the wall clock, as a user waits")
    out.note("products by device time, where not by the wall clock")
    if "matrices" in options.parts:
        for name in progress(options.matrices, "dlmc"):
            _run_matrix(name, options, out)
            release()
    if "preprocessing" in options.parts:
        for name in progress(options.graphs, "preprocessing"):
            _run_graph(name, options, out)
            release()
    return out.path


def _run_matrix(name: str, options: argparse.Namespace, out: Recorder) -> None:
    device = torch.device(options.device)
    matrix = load(name, device)
    adj = Adjacency.from_csr(matrix.rowptr, matrix.col, matrix.shape).prepare()
    for dtype in options.dtypes:
        value = torch.randn(adj.num_edges, device=device).to(DTYPES[dtype])
        x = torch.randn(adj.num_src, options.width, device=device).to(DTYPES[dtype])
        exact = matrix.sparse_csr(value.double()) @ x.double()
        for implementation, fn in _calls(matrix, adj, value, x, dtype).items():
            out.add(
                part="matrices",
                matrix=name,
                rows=matrix.shape[0],
                columns=matrix.shape[1],
                entries=adj.num_edges,
                sparsity=matrix.sparsity,
                width=options.width,
                dtype=dtype,
                implementation=implementation,
                **attempt(partial(_measure, fn, implementation, exact, dtype, device, options.budget_ms)),
            )


def _calls(
    matrix: Matrix, adj: Adjacency, value: Tensor, x: Tensor, dtype: str
) -> dict[str, Callable[[], Tensor]]:
    sparse = matrix.sparse_csr(value)
    dense = sparse.to_dense()
    calls: dict[str, Callable[[], Tensor]] = {
        f"fastsparse {algorithm}": partial(spmm, adj, x, value, algorithm=algorithm)
        for algorithm in ALGORITHMS[dtype]
    }
    rival = "cuSPARSE" if x.is_cuda else "torch.sparse CSR"
    return calls | {rival: lambda: sparse @ x, "dense": lambda: dense @ x}


def _measure(
    fn: Callable[[], Tensor],
    implementation: str,
    exact: Tensor,
    dtype: str,
    device: torch.device,
    budget_ms: float,
) -> dict[str, Any]:
    cell = timed(fn, exact, DTYPES[dtype], TOLERANCE[dtype], budget_ms)
    if device.type == "cuda" and implementation != "cuSPARSE":  # which PyTorch may not let a graph capture
        cell |= graph_time(fn, replays=10).as_cell("warm_")
    return cell


def _run_graph(name: str, options: argparse.Namespace, out: Recorder) -> None:
    """The work list of hr and flashsparse's conversion, from CSR, against one product.

    Nothing waits for the list, so its device time stands beside a product's; by the wall clock, in which the
    host's work counts for both, it stands beside a call of `spmm`.
    """
    device = torch.device(options.device)
    graph = suite.load(name, device)
    adj = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes))
    x = torch.randn(graph.num_nodes, options.graph_width, device=device).half()

    def build() -> HybridRows:
        return HybridRows.from_rowptr(adj.rowptr, adj.num_edges)

    def convert() -> Bsb:
        return Bsb.from_csr(adj.row(), adj.col, adj.shape, group_rows(adj, "none"))

    def timed(timer: Callable[..., Timing], fn: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
        return lambda: timer(fn, device, budget_ms=options.budget_ms).as_cell()

    # Every timer first makes calls that it does not count: a product then has what it needs.
    products = {name: partial(spmm, adj, x, algorithm=name) for name in ALGORITHMS["float16"]}
    steps = {
        "hr work list, device": timed(kernel_time, build),
        "spmm hr": timed(kernel_time, products["hr"]),
        "hr work list": timed(wall_time, build),
        "spmm hr, wall clock": timed(wall_time, products["hr"]),
        "flashsparse conversion": timed(wall_time, convert),
        **{f"spmm {name}": timed(kernel_time, call) for name, call in products.items() if name != "hr"},
    }
    for step, measure in steps.items():
        out.add(
            part="preprocessing",
            **graph.facts(),
            width=options.graph_width,
            step=step,
            **attempt(measure),
        )
