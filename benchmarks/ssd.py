"""Sparse rows times a sparse structure, forward and backward, against stored baselines and the dense product.

Also the ablation and the scaling of the decoupled SSD paper (figures 11 to 14 and 16), its table I, and maxk
against `torch.topk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsparse_core import CBSR, Adjacency, maxk, spmm, ssd
from fastsparse_core.formats.row_split import shared_group_share

from . import suite
from .runner import DTYPES, Benchmark, Cell, Job, Run, option
from .ssd_slots import slotted_ssd

#: Graphs on which the paper's ablation and scaling are repeated, if they are among the chosen graphs.
ABLATION_GRAPHS = ("ogbn-arxiv", "yelp", "dd", "reddit")
SCALING_GRAPHS = ("ogbn-arxiv", "yelp")
#: The paper's default: 256 features; 16 of them are kept in the detailed experiments.
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


PARTS = ("forward", "backward", "groups", "ablation", "scaling", "slots", "maxk")


class Subject(NamedTuple):
    """A graph to measure, with the exact result that others are checked against."""

    name: str
    adj: Adjacency
    exact: Tensor
    run: Run

    @property
    def facts(self) -> Cell:
        return {"graph": self.name, "nodes": self.adj.num_dst, "edges": self.adj.num_edges}

    def kept(self, k: int, width: int) -> tuple[CBSR, Tensor]:
        """Kept entries that float16 can hold too, so that all types compute one product, and the product."""
        # Values that both bfloat16 and float16 represent exactly: 8 significant bits.
        x = torch.randn(self.adj.num_src, width, device=self.adj.device).bfloat16().float()
        cbsr = maxk(x, k)
        return cbsr, self.exact @ cbsr.to_dense().double()

    def job(
        self, fn: Callable[[], Tensor], reference: Tensor, part: str, dtype: str = "float32", **labels: Any
    ) -> Job:
        """Checks and times one call."""
        return {"part": part, "dtype": dtype, **self.facts, **labels}, self.run.checked(fn, reference, dtype)

    def dataflow(self, name: str, cbsr: CBSR, reference: Tensor, part: str) -> Job:
        """One of the papers', or ours."""
        fn = partial(ssd, self.adj, cbsr, algorithm=name)
        if name in DATAFLOWS:
            fn = partial(slotted_ssd, self.adj, cbsr.values, cbsr.ids, cbsr.width, **DATAFLOWS[name])
        return self.job(fn, reference, part, k=cbsr.k, width=cbsr.width, implementation=name)


def cells(run: Run, name: str | None) -> Iterator[Job]:
    """All cells of one graph, or those of the selection of the largest entries."""
    parts, options = run.options.parts, run.options
    if name is None:
        yield from _maxk(run)
        return
    graph = suite.load(name, run.device)
    adj = graph.adjacency().prepare()
    subject = Subject(name, adj, graph.sparse_csr(torch.float64), run)
    if "groups" in parts:
        shares = {f"share_{length}": shared_group_share(adj.rowptr, length) for length in GROUP_LENGTHS}
        yield {"part": "groups", **subject.facts}, lambda: shares
    for k in sorted({*options.kept, *options.backward_kept}):
        yield from _products(subject, k)
    if not adj.rowptr.is_cuda:
        return  # the papers' dataflows are CUDA kernels
    if "ablation" in parts and name in ABLATION_GRAPHS:
        cbsr, reference = subject.kept(KEPT, options.width)
        for dataflow in (*DATAFLOWS, "decoupled"):
            yield subject.dataflow(dataflow, cbsr, reference, "ablation")
    if "scaling" in parts and name in SCALING_GRAPHS:
        yield from _scaling(subject)
    if "slots" in parts and name in SCALING_GRAPHS:
        for width in SLOT_WIDTHS:
            cbsr, reference = subject.kept(8, width)
            for slots in SLOTS:
                fn = partial(slotted_ssd, adj, cbsr.values, cbsr.ids, width, slots=slots)
                yield subject.job(fn, reference, "slots", k=cbsr.k, width=width, slots=slots)


def _products(subject: Subject, k: int) -> Iterator[Job]:
    """Forward and backward with k kept entries."""
    options, adj = subject.run.options, subject.adj
    cbsr, reference = subject.kept(k, options.width)
    grad = torch.randn(adj.num_dst, options.width, device=adj.device).bfloat16().float()
    for dtype in options.dtypes:
        typed = cbsr.with_values(cbsr.values.to(DTYPES[dtype]))
        labels = {"k": k, "width": options.width}
        if "forward" in options.parts and k in options.kept:
            for algorithm in ("decoupled", "densify"):
                fn = partial(ssd, adj, typed, algorithm=algorithm)
                yield subject.job(fn, reference, "forward", dtype, implementation=algorithm, **labels)
        if "backward" in options.parts and k in options.backward_kept:
            # The stand-ins are symmetric: the transposed product is the product.
            wanted = (subject.exact @ grad.double()).gather(1, cbsr.ids.long())
            values = typed.values.detach().requires_grad_()
            y = ssd(adj, typed.with_values(values))
            fn = partial(_gradient, y, values, grad.to(DTYPES[dtype]))
            yield subject.job(fn, wanted, "backward", dtype, implementation="fastsparse", **labels)


def _gradient(y: Tensor, values: Tensor, grad: Tensor) -> Tensor:
    return torch.autograd.grad(y, values, grad, retain_graph=True)[0]


def _scaling(subject: Subject) -> Iterator[Job]:
    """From few kept entries to half of all: both papers' dataflows, ours, and the dense product."""
    adj, width = subject.adj, subject.run.options.width
    for k in PRUNED:
        cbsr, reference = subject.kept(k, width)
        for name in ("slots and update_mode", "maxk", "decoupled"):
            yield subject.dataflow(name, cbsr, reference, "scaling")
    x = torch.randn(adj.num_src, width, device=adj.device)
    ones = torch.ones(adj.num_edges, device=adj.device)
    matrix = torch.sparse_csr_tensor(adj.rowptr.int(), adj.col, ones, adj.shape)
    wanted = subject.exact @ x.double()
    for name, fn in (("cuSPARSE", lambda: matrix @ x), ("spmm", lambda: spmm(adj, x))):
        yield subject.job(fn, wanted, "scaling", k=width, width=width, implementation=f"{name}, dense rows")


def _maxk(run: Run) -> Iterator[Job]:
    """The selection against torch.topk and against copying the bytes that it reads and writes."""
    width, rows = run.options.width, run.options.rows
    for dtype in run.options.dtypes:
        k = min(32, width)
        x = torch.randn(rows, width, device=run.device).to(DTYPES[dtype])
        moved = x.nbytes + sum(maxk(x, k).memory_usage().values())
        # Half the number of bytes, because a copy reads and writes each byte.
        source = torch.empty(moved // 2, dtype=torch.uint8, device=run.device)
        calls: dict[str, Callable[[], Any]] = {
            "fastsparse": partial(maxk, x, k),
            "torch.topk": partial(torch.topk, x, k),
            "copy of as many bytes": partial(torch.empty_like(source).copy_, source),
        }
        for implementation, fn in calls.items():
            cell = {"part": "maxk", "implementation": implementation, "bytes": moved}
            yield cell | {"dtype": dtype, "k": k, "width": width, "rows": rows}, partial(run.time, fn)


BENCHMARK = Benchmark(
    "ssd",
    cells,
    lambda options: [None] * ("maxk" in options.parts) + options.graphs,
    graphs=suite.PEER_GRAPHS,
    budget_ms=25.0,
    options={
        "parts": option(choices=PARTS),
        "kept": option([8, 16, 32, 64], "kept entries, forward"),
        "backward_kept": option([16, 32], "and backward"),
        "width": option(WIDTH, "features per node"),
        "dtypes": option(["float32", "float16"], choices=tuple(DTYPES)),
        "rows": option(200_000, "rows of maxk"),
    },
    notes=(
        "backward is the gradient of the kept values through autograd; densify writes dense rows and"
        " multiplies them, with prepared structures",
        "errors are against the float64 product of the dense rows, on all rows",
        "the dataflows of the papers, with float sums, are our own plain kernels of them (ssd_slots.cu), and"
        " their times include zeroing the output; on small graphs launches count",
    ),
)
