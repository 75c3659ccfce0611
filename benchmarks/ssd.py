"""Sparse rows times a sparse structure, forward and backward, against stored rivals and the dense product.

Also the ablation and the scaling of the decoupled SSD paper (figures 11 to 14 and 16), its table I, and maxk
against `torch.topk`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import CBSR, Adjacency, maxk, spmm, ssd
from fastsparse_core.formats.row_split import shared_group_share

from . import suite
from .common import DTYPES, add_common, attempt, progress, recorder, release
from .record import Recorder
from .spmm import TOLERANCE
from .ssd_slots import slotted_ssd
from .steps import timed
from .timing import kernel_time

#: What the paper's ablation and scaling are repeated on, of the graphs asked for.
ABLATION_GRAPHS = ("ogbn-arxiv", "yelp", "dd", "reddit")
SCALING_GRAPHS = ("ogbn-arxiv", "yelp")
#: The paper's default: 256 features, of which 16 are kept where it looks closer.
WIDTH, KEPT = 256, 16
PRUNED = (2, 4, 8, 16, 32, 64, 128)
SLOT_WIDTHS = (128, 256, 512)
SLOTS = (1, 2, 4, 8, 16)
#: Lengths of edge groups in table I.
GROUP_LENGTHS = (32, 64, 128)

#: The papers' dataflows with float sums: name -> arguments of `slotted_ssd`.
DATAFLOWS: dict[str, dict[str, Any]] = {
    "slots and update_mode": {"slots": 2},
    "without update_mode": {"slots": 2, "update_mode": False},
    "without slots": {"slots": 1},
    "without both": {"slots": 1, "update_mode": False},
    "maxk": {"slots": 1, "update_mode": False, "coupled": True},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=suite.PEER_GRAPHS, budget_ms=25.0)
    parts = ("forward", "backward", "groups", "ablation", "scaling", "slots", "maxk")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--kept", nargs="+", type=int, default=[8, 16, 32, 64], help="kept entries, forward")
    parser.add_argument("--backward-kept", nargs="+", type=int, default=[16, 32], help="and backward")
    parser.add_argument("--width", type=int, default=WIDTH, help="features per node")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["float32", "float16"])
    parser.add_argument("--rows", type=int, default=200_000, help="rows of maxk")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("ssd", options)
    out.note(
        "backward is the gradient of the kept values through autograd; densify writes dense rows and"
        " multiplies them, with prepared structures"
    )
    out.note("errors are against the float64 product of the dense rows, on all rows")
    out.note(
        "the dataflows of the papers, with float sums, are our own plain kernels of them (ssd_slots.cu), and"
        " their times include zeroing the output; on small graphs launches count"
    )
    if "maxk" in options.parts:
        _run_maxk(options, out)
    for name in progress(options.graphs, "ssd"):
        _run_graph(name, options, out)
        release()
    return out.path


@dataclass(frozen=True)
class Subject:
    """What is measured on one graph, and how its results are checked."""

    name: str
    adj: Adjacency
    exact: Tensor
    options: argparse.Namespace
    out: Recorder

    def kept(self, k: int, width: int) -> tuple[CBSR, Tensor]:
        """Kept entries that float16 can hold too, so that all types compute one product, and the product."""
        # Of bfloat16 and float16 alike: 8 significant bits.
        x = torch.randn(self.adj.num_src, width, device=self.adj.device).bfloat16().float()
        cbsr = maxk(x, k)
        return cbsr, self.exact @ cbsr.to_dense().double()

    def time(
        self, fn: Callable[[], Tensor], reference: Tensor, *, part: str, dtype: str, **labels: Any
    ) -> None:
        """Checks, times and records one call."""
        graph = {"graph": self.name, "nodes": self.adj.num_dst, "edges": self.adj.num_edges}
        measure = partial(self._measure, fn, reference, dtype)
        self.out.add(part=part, dtype=dtype, **graph, **labels, **attempt(measure))

    def _measure(self, fn: Callable[[], Tensor], reference: Tensor, dtype: str) -> dict[str, object]:
        return timed(fn, reference, DTYPES[dtype], TOLERANCE[dtype], self.options.budget_ms)


def _run_graph(name: str, options: argparse.Namespace, out: Recorder) -> None:
    """All cells of one graph; what it holds on the device ends with the call."""
    device = torch.device(options.device)
    graph = suite.load(name, device)
    adj = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes)).prepare()
    subject = Subject(name, adj, graph.sparse_csr(torch.float64), options, out)
    if "groups" in options.parts:
        shares = {f"share_{length}": shared_group_share(adj.rowptr, length) for length in GROUP_LENGTHS}
        out.add(part="groups", graph=name, nodes=adj.num_dst, edges=adj.num_edges, status="ok", **shares)
    for k in sorted({*options.kept, *options.backward_kept}):
        _run_products(subject, k)
    if not adj.rowptr.is_cuda:
        return  # the papers' dataflows are CUDA kernels
    if "ablation" in options.parts and name in ABLATION_GRAPHS:
        cbsr, reference = subject.kept(KEPT, options.width)
        for label, arguments in DATAFLOWS.items():
            _time_dataflow(subject, cbsr, reference, arguments, part="ablation", implementation=label)
        labels = {"part": "ablation", "dtype": "float32", "k": KEPT, "width": options.width}
        fn = partial(ssd, adj, cbsr, algorithm="decoupled")
        subject.time(fn, reference, implementation="decoupled", **labels)
    if "scaling" in options.parts and name in SCALING_GRAPHS:
        _run_scaling(subject)
    if "slots" in options.parts and name in SCALING_GRAPHS:
        for width in SLOT_WIDTHS:
            cbsr, reference = subject.kept(8, width)
            for slots in SLOTS:
                _time_dataflow(subject, cbsr, reference, {"slots": slots}, part="slots", slots=slots)


def _run_products(subject: Subject, k: int) -> None:
    """Forward and backward with k kept entries."""
    options, adj = subject.options, subject.adj
    cbsr, reference = subject.kept(k, options.width)
    grad = torch.randn(adj.num_dst, options.width, device=adj.device).bfloat16().float()
    for dtype in options.dtypes:
        typed = cbsr.with_values(cbsr.values.to(DTYPES[dtype]))
        labels = {"dtype": dtype, "k": k, "width": options.width}
        if "forward" in options.parts and k in options.kept:
            for algorithm in ("decoupled", "densify"):
                fn = partial(ssd, adj, typed, algorithm=algorithm)
                subject.time(fn, reference, part="forward", implementation=algorithm, **labels)
        if "backward" in options.parts and k in options.backward_kept:
            # The stand-ins are symmetric: the transposed product is the product.
            wanted = (subject.exact @ grad.double()).gather(1, cbsr.ids.long())
            values = typed.values.detach().requires_grad_()
            y = ssd(adj, typed.with_values(values))
            given = grad.to(DTYPES[dtype])
            fn = partial(_gradient, y, values, given)
            subject.time(fn, wanted, part="backward", implementation="fastsparse", **labels)


def _gradient(y: Tensor, values: Tensor, grad: Tensor) -> Tensor:
    return torch.autograd.grad(y, values, grad, retain_graph=True)[0]


def _time_dataflow(
    subject: Subject, cbsr: CBSR, reference: Tensor, arguments: dict[str, Any], **labels: Any
) -> None:
    fn = partial(slotted_ssd, subject.adj, cbsr.values, cbsr.ids, cbsr.width, **arguments)
    subject.time(fn, reference, dtype="float32", k=cbsr.k, width=cbsr.width, **labels)


def _run_scaling(subject: Subject) -> None:
    """From few kept entries to half of all: both papers' dataflows, ours, and the dense product."""
    adj, width = subject.adj, subject.options.width
    for k in PRUNED:
        cbsr, reference = subject.kept(k, width)
        for label in ("slots and update_mode", "maxk"):
            _time_dataflow(subject, cbsr, reference, DATAFLOWS[label], part="scaling", implementation=label)
        labels = {"part": "scaling", "dtype": "float32", "k": k, "width": width}
        fn = partial(ssd, adj, cbsr, algorithm="decoupled")
        subject.time(fn, reference, implementation="decoupled", **labels)
    x = torch.randn(adj.num_src, width, device=adj.device)
    matrix = torch.sparse_csr_tensor(
        adj.rowptr.int(), adj.col, torch.ones(adj.num_edges, device=adj.device), adj.shape
    )
    wanted = subject.exact @ x.double()
    labels = {"part": "scaling", "dtype": "float32", "k": width, "width": width}
    subject.time(lambda: matrix @ x, wanted, implementation="cuSPARSE, dense rows", **labels)
    subject.time(lambda: spmm(adj, x), wanted, implementation="spmm, dense rows", **labels)


def _run_maxk(options: argparse.Namespace, out: Recorder) -> None:
    """The selection against torch.topk and against copying the bytes that it reads and writes."""
    device = torch.device(options.device)
    for dtype in options.dtypes:
        k = min(32, options.width)
        x = torch.randn(options.rows, options.width, device=device).to(DTYPES[dtype])
        moved = x.nbytes + sum(maxk(x, k).memory_usage().values())
        # A copy reads and writes each byte: half as many.
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        calls: dict[str, Callable[[], Any]] = {
            "fastsparse": partial(maxk, x, k),
            "torch.topk": partial(torch.topk, x, k),
            "copy of as many bytes": partial(target.copy_, source),
        }
        for implementation, fn in calls.items():
            timing = attempt(partial(_time_alone, fn, device, options.budget_ms))
            labels = {"dtype": dtype, "k": k, "width": options.width, "rows": options.rows}
            out.add(part="maxk", implementation=implementation, bytes=moved, **labels, **timing)


def _time_alone(fn: Callable[[], Any], device: torch.device, budget_ms: float) -> dict[str, Any]:
    return kernel_time(fn, device, budget_ms=budget_ms).as_cell()
