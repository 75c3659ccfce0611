"""Attention over neighbours, forward and backward: time, error and peak memory, against stored baselines.

Every result is checked against float64 before it is timed. On large graphs, a sample of rows is checked: the
upstream gradient is zero outside of them, so only their edges contribute to gradients, which must be zero
elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fastsparse_core
from fastsparse_core import Adjacency, reference

from . import suite
from .runner import DTYPES, TOLERANCE, Benchmark, Cell, Job, Run, check, option, poison, relative_error

#: Number of edges whose rows are compared with float64: all edges would take longer than the timings.
CHECKED = 200_000

#: Accepted error of a gradient, relative to that of a result: a gradient is computed from the rounded result,
#: and then rounded itself.
GRADIENT_ROUNDINGS = 2


@dataclass(frozen=True)
class Case:
    """An operator and the shape of its heads.

    Attributes:
        operator: Name in `fastsparse_core`.
        heads: Number of heads.
        width: Features per head.
        stored: Names of the baselines' times in ``peers.json`` by direction; empty where there are none.
    """

    operator: str
    heads: int
    width: int
    stored: dict[str, str]

    def inputs(self, nodes: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Random operands on every node; scores of nodes and GATv2's vector stay in float32, as in layers."""

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device)

        def features() -> Tensor:
            return draw(nodes, self.heads, self.width).to(dtype)

        if self.operator == "attention":
            return [features(), features(), features()]
        if self.operator == "additive_attention":
            return [draw(nodes, self.heads), draw(nodes, self.heads), features()]
        return [features(), features(), draw(self.heads, self.width) / math.sqrt(self.width)]

    def ends(self) -> tuple[str, str, str]:
        """The nodes for which each operand has rows: destinations, sources or none."""
        return ("dst", "src", "none" if self.operator == "gatv2_attention" else "src")

    def call(self, adj: Adjacency, inputs: Sequence[Tensor], algorithm: str) -> Tensor:
        return getattr(fastsparse_core, self.operator)(adj, *inputs, algorithm=algorithm)

    def exact(self, adj: Adjacency, inputs: Sequence[Tensor]) -> Tensor:
        """The float64 reference."""
        return getattr(reference, self.operator)(adj, *inputs)


def _stored(forward: str, backward: str) -> dict[str, str]:
    return {"forward": forward, "backward": backward}


CASES = {
    "attention@1x64": Case("attention", 1, 64, _stored("attn@64", "attn_bwd@64")),
    "attention@1x128": Case("attention", 1, 128, _stored("attn@128", "attn_bwd@128")),
    "attention@4x32": Case("attention", 4, 32, _stored("attn_fwd@4x32", "attn_bwd@4x32")),
    "additive_attention@1x64": Case("additive_attention", 1, 64, _stored("gat@64", "gat_bwd@64")),
    "additive_attention@4x32": Case("additive_attention", 4, 32, {}),
    "gatv2_attention@4x32": Case("gatv2_attention", 4, 32, _stored("gatv2_fwd@4x32", "gatv2_bwd@4x32")),
}


@dataclass(frozen=True)
class Sample:
    """Rows whose results are checked.

    Attributes:
        dst: int64 (rows,), ascending.
        src: int64 (columns,), the sources of their edges, ascending.
        adj: Their structure, (rows, columns).
    """

    dst: Tensor
    src: Tensor
    adj: Adjacency

    def rows(self, end: str) -> Tensor | None:
        return {"dst": self.dst, "src": self.src, "none": None}[end]


def sample(graph: suite.Graph, edges: int) -> Sample:
    """The row with most edges, and random rows until the sample has this number of edges."""
    degree = (graph.rowptr[1:] - graph.rowptr[:-1]).long()
    order = torch.randperm(graph.num_nodes, device=degree.device)
    order = torch.cat([degree.argmax()[None], order[order != degree.argmax()]])
    count = max(int((degree[order].cumsum(0) <= edges).sum()), 1)
    dst = order[:count].sort().values
    rowptr = torch.cat([degree.new_zeros(1), degree[dst].cumsum(0)])
    place = torch.arange(int(rowptr[-1]), device=degree.device)
    first = torch.repeat_interleave(graph.rowptr[dst].long() - rowptr[:-1], degree[dst])
    src, col = torch.unique(graph.col[first + place], return_inverse=True)
    return Sample(dst, src.long(), Adjacency.from_csr(rowptr, col, (count, src.numel())))


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.device)
    adj = graph.adjacency().prepare()
    checked = sample(graph, CHECKED)
    for key, dtype in run.grid("cases", "dtypes"):
        case = CASES[key]
        inputs = case.inputs(graph.num_nodes, DTYPES[dtype], run.device)
        for algorithm, direction in itertools.product(run.options.algorithms, ("forward", "backward")):
            cell = {**graph.facts(), "case": key, "dtype": dtype, "direction": direction}
            cell |= {"implementation": f"fastsparse {algorithm}", "stored": case.stored.get(direction)}
            measure = _forward if direction == "forward" else _backward
            yield cell, partial(measure, run, case, adj, inputs, algorithm, checked, dtype)


def _forward(
    run: Run, case: Case, adj: Adjacency, inputs: list[Tensor], algorithm: str, checked: Sample, dtype: str
) -> Cell:
    def call() -> list[Tensor]:
        return [case.call(adj, inputs, algorithm)]

    expected = case.exact(checked.adj, _double(case, inputs, checked))
    poison([adj.num_dst, case.heads * case.width], DTYPES[dtype], adj.device)
    (found,) = call()
    error = math.inf if found.isnan().any() else relative_error(found[checked.dst], expected)
    del found, expected
    return _judge(run, call, error, TOLERANCE[dtype])


def _backward(
    run: Run, case: Case, adj: Adjacency, inputs: list[Tensor], algorithm: str, checked: Sample, dtype: str
) -> Cell:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = case.call(adj, leaves, algorithm)
    dense = torch.randn(result.shape, device=adj.device).to(result.dtype)

    def gradients(upstream: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(result, leaves, upstream, retain_graph=True))

    exact = [tensor.requires_grad_() for tensor in _double(case, inputs, checked)]
    upstream = dense[checked.dst].double()
    expected = torch.autograd.grad(case.exact(checked.adj, exact), exact, upstream)
    masked = torch.zeros_like(dense).index_copy_(0, checked.dst, dense[checked.dst])
    for leaf in leaves:
        poison(list(leaf.shape), leaf.dtype, adj.device)
    error = max(
        _gradient_error(found, checked.rows(end), wanted)
        for found, end, wanted in zip(gradients(masked), case.ends(), expected, strict=True)
    )
    del masked, exact, upstream, expected
    return _judge(run, lambda: gradients(dense), error, GRADIENT_ROUNDINGS * TOLERANCE[dtype])


def _double(case: Case, inputs: list[Tensor], checked: Sample) -> list[Tensor]:
    """The operands of the sampled rows, in float64."""
    places = [checked.rows(end) for end in case.ends()]
    return [
        (tensor if rows is None else tensor[rows]).double()
        for tensor, rows in zip(inputs, places, strict=True)
    ]


def _gradient_error(found: Tensor, rows: Tensor | None, expected: Tensor) -> float:
    """Relative error of the rows that the sampled edges reach; infinite if another row is not zero."""
    if rows is None:
        return relative_error(found, expected)
    if found.index_fill(0, rows, 0).count_nonzero():
        return math.inf
    return relative_error(found[rows], expected)


def _judge(run: Run, call: Callable[[], list[Tensor]], error: float, tolerance: float) -> Cell:
    """Time and memory of a call if its result is right, otherwise what is wrong with it."""
    check(error, tolerance)
    return {"error": error, **_memory(call, run.device), **run.time(call)}


def _memory(call: Callable[[], list[Tensor]], device: torch.device) -> Cell:
    """Bytes of the results, and peak memory of the call above the memory in use before it."""
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    results = call()
    return {
        "result_bytes": sum(tensor.numel() * tensor.element_size() for tensor in results),
        "extra_bytes": torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None,
    }


BENCHMARK = Benchmark(
    "attention",
    cells,
    graphs=suite.PEER_GRAPHS,
    budget_ms=40.0,
    options={
        "cases": option(choices=tuple(CASES)),
        "dtypes": option(["float16"], choices=tuple(DTYPES)),
        "algorithms": option(["fused3s"], choices=("fused3s", "csr", "unfused")),
    },
    notes=(
        f"errors are against float64, on the row with most edges and random ones, {CHECKED} edges in all;"
        " of the gradients the worst counts",
        "forward is the call without gradients; backward is the gradient of all operands, from what the"
        " forward pass saved; structures are converted beforehand",
        "extra memory is the allocator's peak during a call above what was there before, with results",
    ),
)
