"""DGL's operators on FastSparse, forward and backward, against FastSparse's own operators, PyG and DGL.

DGL's own run on the CPU alone, as pip's DGL does. On CUDA only GATConv is timed on the CPU too, with two
threads.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency, edge_softmax, spmm

from . import suite
from .runner import Benchmark, Cell, Job, Run, attempt, check, option, peak_bytes, relative_error, release
from .timing import summarise, wall_times

#: Stand-ins whose messages (nearly) fit into a CPU's cache, and the graph for GPUs.
SMALL = ("pubmed", "peptides-batch", "github")
LARGE = ("ogbn-arxiv",)
HEADS = 8
TOLERANCE = 1e-4
#: Number of calls of GATConv on two CPU cores, if everything else runs on CUDA. Each takes seconds.
CPU_CALLS = 2

#: A function and the leaves that it is called with.
Step = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def graphs(options: argparse.Namespace) -> list[str]:
    """The graphs that the command line names, otherwise the device's defaults; the record stores them."""
    usual = LARGE if torch.device(options.device).type == "cuda" else SMALL
    options.graphs = options.graphs or list(usual)
    return options.graphs


def cells(run: Run, name: str) -> Iterator[Job | Cell]:
    """All cells of one graph."""
    import fastsparse_dgl

    graph, options, device = suite.load(name, run.device), run.options, run.device
    dgl = fastsparse_dgl.compat.dgl
    host = dgl.graph((graph.col.long().cpu(), graph.row().long().cpu()), num_nodes=graph.num_nodes)
    draws = Draws(graph, options.width, device)
    with enabled():
        moved = host.to(device)
    steps = {
        "enabled": dgl_steps(dgl, moved, draws),
        "ours": our_steps(graph, draws),
        "PyG": pyg_steps(graph, draws),
    }
    if device.type == "cpu":
        steps["DGL"] = dgl_steps(dgl, host, draws)
    by_operator: dict[str, dict[str, Step]] = {}
    for implementation, made in steps.items():
        for operator, step in made:
            by_operator.setdefault(operator, {})[implementation] = step
    facts = {**graph.facts(), "width": options.width}
    for operator, found in by_operator.items():
        if options.operators and operator not in options.operators:
            continue
        for implementation, cell in _measure_all(run, found, operator).items():
            yield {**facts, "operator": operator, "implementation": implementation, **cell}
        release()
    if device.type != "cpu" and (not options.operators or "GATConv" in options.operators):
        what = {"operator": "GATConv", "implementation": "DGL, two CPU cores"}
        yield {**facts, **what}, lambda: _on_two_cores(dgl, host, graph, options.width)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Context in which DGL runs on FastSparse."""
    import fastsparse_dgl

    fastsparse_dgl.enable()
    try:
        yield
    finally:
        fastsparse_dgl.disable()


#: Context for the calls of an implementation.
AROUND = {"enabled": enabled}


def _on_two_cores(dgl: Any, host: Any, graph: suite.Graph, width: int) -> Cell:
    """GATConv of DGL itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        draws = Draws(graph, width, torch.device("cpu"))
        function, leaves = dict(dgl_steps(dgl, host, draws))["GATConv"]
        times = []
        for _ in range(CPU_CALLS):
            begin = time.perf_counter()
            out = function(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            times.append((time.perf_counter() - begin) * 1e3)
        return summarise(times, "wall clock").as_cell()
    finally:
        torch.set_num_threads(threads)


class Draws:
    """The inputs, the same for every implementation.

    Args:
        graph: of the suite.
        width: of node features.
        device: of the features.
    """

    def __init__(self, graph: suite.Graph, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device).requires_grad_()

        n, e = graph.num_nodes, graph.num_edges
        self.x, self.y = draw(n, width), draw(n, width)
        self.heads = draw(n, HEADS, width // HEADS)
        self.edge, self.edge_heads = draw(e), draw(e, HEADS, 1)
        self.message = draw(e, 16)
        self.width = width


def dgl_steps(dgl: Any, g: Any, draws: Draws) -> Iterator[tuple[str, Step]]:
    """DGL's operators, on DGL or on FastSparse."""
    ops, x, y = dgl.ops, draws.x, draws.y

    def update_all(*leaves: Tensor) -> Tensor:
        with g.local_scope():
            g.srcdata["h"] = leaves[0]
            message = dgl.function.copy_u("h", "m")
            if len(leaves) > 1:
                g.edata["w"] = leaves[1]
                message = dgl.function.u_mul_e("h", "w", "m")
            g.update_all(message, dgl.function.sum("m", "o"))
            return g.dstdata["o"]

    yield "copy_u sum", (update_all, (x,))
    yield "u_mul_e sum", (update_all, (x, draws.edge))
    yield "u_mul_e sum, heads", (partial(ops.u_mul_e_sum, g), (draws.heads, draws.edge_heads))
    yield "copy_u mean", (partial(ops.copy_u_mean, g), (x,))
    yield "copy_u max", (partial(ops.copy_u_max, g), (x,))
    yield "u_mul_e max", (partial(ops.u_mul_e_max, g), (draws.heads, draws.edge_heads))
    yield "u_add_e sum", (partial(ops.u_add_e_sum, g), (draws.heads, draws.edge_heads))
    yield "u_add_e max", (partial(ops.u_add_e_max, g), (draws.heads, draws.edge_heads))
    yield "copy_e sum", (partial(ops.copy_e_sum, g), (draws.message,))
    yield "copy_e max", (partial(ops.copy_e_max, g), (draws.message,))
    yield "u_add_v", (partial(ops.u_add_v, g), (x, y))
    yield "u_mul_v", (partial(ops.u_mul_v, g), (x, y))
    yield "u_dot_v", (partial(ops.u_dot_v, g), (x, y))
    yield "edge_softmax", (partial(ops.edge_softmax, g), (draws.edge_heads,))
    torch.manual_seed(0)
    layer = dgl.nn.pytorch.GATConv(draws.width, draws.width // HEADS, HEADS, allow_zero_in_degree=True)
    layer = layer.to(x.device)
    yield "GATConv", (lambda feat, *_: layer(g, feat), (x, *layer.parameters()))


def our_steps(graph: suite.Graph, draws: Draws) -> Iterator[tuple[str, Step]]:
    """Our own operators on a structure that was prepared."""
    shape = (graph.num_nodes, graph.num_nodes)
    adj = Adjacency.from_coo(graph.row().long(), graph.col.long(), shape)
    yield "copy_u sum", (partial(spmm, adj), (draws.x,))
    yield "u_mul_e sum", (partial(spmm, adj), (draws.x, draws.edge))
    yield "edge_softmax", (lambda score: edge_softmax(adj, score.squeeze(-1))[..., None], (draws.edge_heads,))


def pyg_steps(graph: suite.Graph, draws: Draws) -> Iterator[tuple[str, Step]]:
    """The same messages by PyG's gather and scatter."""
    from torch_geometric.utils import scatter, softmax

    src, dst, n = graph.col.long(), graph.row().long(), graph.num_nodes
    x, y = draws.x, draws.y

    def reduce(message: Tensor, kind: str) -> Tensor:
        return scatter(message, dst, 0, n, kind)

    def take(nodes: Tensor, index: Tensor) -> Tensor:
        return nodes.index_select(0, index)

    yield "copy_u sum", (lambda x: reduce(take(x, src), "sum"), (x,))
    yield "u_mul_e sum", (lambda x, e: reduce(take(x, src) * e[:, None], "sum"), (x, draws.edge))
    heads = draws.heads, draws.edge_heads
    yield "u_mul_e sum, heads", (lambda x, e: reduce(take(x, src) * e, "sum"), heads)
    yield "copy_u mean", (lambda x: reduce(take(x, src), "mean"), (x,))
    yield "copy_u max", (lambda x: reduce(take(x, src), "max"), (x,))
    yield "u_mul_e max", (lambda x, e: reduce(take(x, src) * e, "max"), heads)
    yield "u_add_e sum", (lambda x, e: reduce(take(x, src) + e, "sum"), heads)
    yield "u_add_e max", (lambda x, e: reduce(take(x, src) + e, "max"), heads)
    yield "copy_e sum", (lambda e: reduce(e, "sum"), (draws.message,))
    yield "copy_e max", (lambda e: reduce(e, "max"), (draws.message,))
    yield "u_add_v", (lambda x, y: take(x, src) + take(y, dst), (x, y))
    yield "u_mul_v", (lambda x, y: take(x, src) * take(y, dst), (x, y))
    yield "u_dot_v", (lambda x, y: (take(x, src) * take(y, dst)).sum(-1, keepdim=True), (x, y))
    yield "edge_softmax", (lambda e: softmax(e, dst, num_nodes=n), (draws.edge_heads,))


def _measure_all(run: Run, steps: dict[str, Step], name: str) -> dict[str, Cell]:
    """Time and peak memory of an operator by implementation; on the CPU they are timed alternately."""
    cells: dict[str, Cell] = {}
    calls: dict[str, Call] = {}
    expected: list[Tensor] = []
    for implementation, step in steps.items():
        both = calls[implementation] = Call(*step)
        with AROUND.get(implementation, contextlib.nullcontext)():
            cell = attempt(partial(_checked, both, expected, name, run.device))
            if run.device.type != "cpu" and cell["status"] == "ok":
                cell |= run.time(both)
        cells[implementation] = cell
    if run.device.type == "cpu":
        sound = {key: call for key, call in calls.items() if cells[key]["status"] == "ok"}
        timings = wall_times(sound, run.device, budget_ms=run.options.budget_ms, around=AROUND)
        for implementation, timing in timings.items():
            cells[implementation] |= timing.as_cell()
    return cells


class Call:
    """Result and gradients of a step, for a gradient of the result that is drawn once."""

    def __init__(self, function: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> None:
        self.function, self.leaves = function, leaves
        self.upstream: Tensor | None = None

    def __call__(self) -> list[Tensor]:
        out = self.function(*self.leaves)
        if self.upstream is None:
            self.upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
        return [out, *torch.autograd.grad(out, self.leaves, self.upstream)]


def _checked(both: Call, expected: list[Tensor], name: str, device: torch.device) -> Cell:
    """Error against the first implementation, whose results `expected` holds from then on, and memory."""
    found = [tensor.detach() for tensor in both()]
    expected.extend(found if not expected else [])
    error = max(relative_error(a.flatten(), b.flatten()) for a, b in zip(found, expected, strict=True))
    del found
    # DGL gives infinity in empty rows of extrema, PyG 0.
    if "max" not in name:
        check(error, TOLERANCE)
    peak = peak_bytes(both, device, above=True)
    return {"error": error if error < 1e300 else None, "peak_bytes": peak}


BENCHMARK = Benchmark(
    "dgl_operators",
    cells,
    graphs,
    budget_ms=150.0,
    options={
        "graphs": option(None, f"{suite.NAMES}; default: small ones on the CPU", nargs="+"),
        "width": option(128, "features of a node"),
        "operators": option(None, "some of them; default: all", nargs="+"),
    },
    notes=lambda options: [
        f"float32, {options.width} features a node, {HEADS} heads; forward and all gradients"
    ],
)
