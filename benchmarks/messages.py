"""Messages written by hand under `accelerate`, against PyG, compiled PyG, and the drop-in layer.

A step is forward and backward of one layer 128 wide with 16 features per edge, which need no gradient. On
molecules it has five layers, and the edges of the batch are a new tensor in every step. Large graphs have
their edges in random order. bfloat16 is autocast's. Errors are against PyG in float32.

The step of a force field on the graph "atoms" is energy, forces, and the gradients of a loss of both.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

from fastsparse_core.layer_swap import Row
from fastsparse_pyg import (
    FastGATConv,
    FastResGatedGraphConv,
    FastTransformerConv,
    accelerate,
    clear_cache,
)

from . import any_layer, edge_messages
from .edge_messages import Edges
from .runner import Benchmark, Cell, Job, Run, attempt, check, option, peak_bytes, relative_error, release
from .timing import step_time

WIDTH, FEATURES = 128, 16
GRAPHS = ("ogbn-arxiv", "molecules", "cora", "yelp", "atoms")
#: Atoms, neighbors of each, Gaussians of a distance.
ATOMS, NEIGHBORS, GAUSSIANS = 20_000, 40, 20
#: The graphs that `--quick` measures.
QUICK = ("ogbn-arxiv", "molecules")
IMPLEMENTATIONS = ("pyg", "fastsparse", "named", "compiled")
#: Graphs on which PyG's layer is also compiled, which takes ten seconds for each layer and dtype.
COMPILED = ("ogbn-arxiv",)
#: Accepted relative error of outputs and gradients, in addition to twice PyG's own error in that dtype. In
#: float32, sums of up to 13,161 terms have another order.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class Gat(MessagePassing):
    """GAT's attention (Velickovic et al., 2018, equation 3) with one vector for both ends."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin, self.att = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.randn(2 * WIDTH) / 16)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int | None) -> Tensor:
        score = F.leaky_relu((torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1), 0.2)
        return softmax(score, index, num_nodes=size_i).unsqueeze(-1) * x_j


class Attention(MessagePassing):
    """Dot-product attention, keys and values with the edges' features (Shi et al., 2021)."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.width = WIDTH
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.of_edge = nn.Linear(FEATURES, WIDTH, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, q=self.q(x), k=self.k(x), v=self.v(x), edge_attr=edge_attr)
        return out

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int | None
    ) -> Tensor:
        edge = self.of_edge(edge_attr)
        score = (q_i * (k_j + edge)).sum(dim=-1) / math.sqrt(self.width)
        return softmax(score, index, num_nodes=size_i).unsqueeze(-1) * (v_j + edge)


class Gated(MessagePassing):
    """Sum of the sources' values behind gates of both ends and the edge (Bresson and Laurent, 2017)."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.a, self.b, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.of_edge = nn.Linear(FEATURES, WIDTH, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, a=self.a(x), b=self.b(x), v=self.v(x), edge_attr=edge_attr)
        return out

    def message(self, a_i: Tensor, b_j: Tensor, v_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.sigmoid(a_i + b_j + self.of_edge(edge_attr)) * v_j


class EdgeMlp(MessagePassing):
    """Two maps of both ends and the edge."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.mlp = _mlp(2 * WIDTH + FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.mlp(torch.cat([x_i, x_j, edge_attr], dim=-1))
        return out


class Filter(MessagePassing):
    """A weight per edge and feature; SchNet's comes from two maps (Schütt et al., 2017)."""

    def __init__(self, weight: nn.Module) -> None:
        super().__init__(aggr="sum")
        self.lin, self.weight = nn.Linear(WIDTH, WIDTH, bias=False), weight

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)
        return out

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = x_j * self.weight(edge_attr)
        return out


class Painn(MessagePassing):
    """Message block of PaiNN (Schütt et al., 2021, equations 7 and 8): scalars, and vectors of three rows."""

    def __init__(self) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.width = WIDTH
        self.phi = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        self.filter = nn.Linear(GAUSSIANS, 3 * WIDTH)

    def forward(self, h: Tensor, edge_index: Tensor, basis: Tensor, direction: Tensor) -> Tensor:
        x, v = h[:, 0], h[:, 1:]
        out: Tensor = self.propagate(edge_index, phi=self.phi(x), v=v, basis=basis, direction=direction)
        return h + out

    def message(self, phi_j: Tensor, v_j: Tensor, basis: Tensor, direction: Tensor) -> Tensor:
        first, second, third = (phi_j * self.filter(basis)).split(self.width, -1)
        vectors = v_j * second.unsqueeze(1) + third.unsqueeze(1) * direction.unsqueeze(-1)
        return torch.cat([first.unsqueeze(1), vectors], 1)


class ForceField(nn.Module):
    """Energies of atoms by two blocks of SchNet or one of PaiNN, from the distances of neighbors."""

    def __init__(self, make: Callable[[], nn.Module], rows: int) -> None:
        super().__init__()
        self.rows, self.blocks = rows, nn.ModuleList(make() for _ in range(2 if rows == 1 else 1))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, edge_index: Tensor, place: Tensor) -> Tensor:
        direction = place[edge_index[0]] - place[edge_index[1]]
        distance = direction.norm(dim=-1, keepdim=True)
        basis = torch.exp(-((distance - torch.linspace(0, 2, GAUSSIANS, device=x.device)) ** 2))
        if self.rows == 1:
            for block in self.blocks:
                x = x + block(x, edge_index, basis)
        else:
            h = F.pad(x.unsqueeze(1), (0, 0, 0, self.rows - 1))
            for block in self.blocks:
                h = block(h, edge_index, basis, direction / distance)
            x = h[:, 0] + (h[:, 1:] ** 2).sum(1)
        out: Tensor = self.last(x)
        return out


class WithoutEdges(nn.Module):
    """A layer that takes no features of edges, called as the others are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.layer(x, edge_index)
        return out


def _mlp(width: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(width, WIDTH), activation(), nn.Linear(WIDTH, WIDTH))


def _one_map() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())


def _edge_conv(mlp: nn.Module, aggr: str) -> nn.Module:
    return WithoutEdges(pyg.EdgeConv(mlp, aggr=aggr))


class Message(NamedTuple):
    """A layer, and the drop-in of PyG's layer that computes the same or more."""

    make: Callable[[], nn.Module]
    make_named: Callable[[], nn.Module] | None = None
    #: Whether the message belongs to a force field.
    has_forces: bool = False


MESSAGES = {
    "GAT": Message(Gat, lambda: WithoutEdges(FastGATConv(WIDTH, WIDTH, add_self_loops=False))),
    "attention": Message(
        Attention, lambda: FastTransformerConv(WIDTH, WIDTH, edge_dim=FEATURES, root_weight=False)
    ),
    "gated": Message(
        Gated, lambda: FastResGatedGraphConv(WIDTH, WIDTH, edge_dim=FEATURES, root_weight=False)
    ),
    "edge_mlp": Message(EdgeMlp),
    "filter": Message(lambda: Filter(nn.Linear(FEATURES, WIDTH))),
    "SchNet": Message(lambda: Filter(_mlp(FEATURES, nn.Softplus))),
    "CGConv": Message(lambda: pyg.CGConv(WIDTH, dim=FEATURES)),
    "GENConv": Message(lambda: pyg.GENConv(WIDTH, WIDTH, edge_dim=FEATURES)),
    "EdgeConv_sum": Message(lambda: _edge_conv(_mlp(2 * WIDTH), "sum")),
    "EdgeConv_max": Message(lambda: _edge_conv(_one_map(), "max")),
    "EdgeConv_max_mlp": Message(lambda: _edge_conv(_mlp(2 * WIDTH), "max")),
    "SchNet_forces": Message(
        lambda: ForceField(lambda: Filter(_mlp(GAUSSIANS, nn.Softplus)), 1), has_forces=True
    ),
    "PaiNN_forces": Message(lambda: ForceField(Painn, 4), has_forces=True),
}


class Model(nn.Module):
    """Some layers of one kind."""

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            # A smooth activation: rounding cannot flip a gradient, so that results can be compared.
            x = layer(F.silu(x) if number else x, edge_index, edge_attr)
        return x


@lru_cache(maxsize=1)
def draw_graph(name: str, device: torch.device) -> Edges:
    """One of `GRAPHS`."""
    if name == "atoms":
        dst = torch.arange(ATOMS, device=device).repeat_interleave(NEIGHBORS)
        near = torch.randint(1, 2 * NEIGHBORS, dst.shape, generator=torch.Generator().manual_seed(0))
        return Edges(name, ATOMS, torch.stack([(dst + near.to(device)) % ATOMS, dst]), 1)
    if name == "cora":
        edge_index, num_nodes = any_layer.draw_graph(name, device)
        return Edges(name, num_nodes, edge_index, 1)
    graph = edge_messages.draw_graph(name, device)
    if name == "molecules":
        return graph
    order = torch.randperm(graph.edge_index.size(1), generator=torch.Generator().manual_seed(0))
    return graph._replace(edge_index=graph.edge_index[:, order.to(device)])


class Case(NamedTuple):
    """Messages on a graph, in a dtype; PyG's layer compiled, or everything else."""

    graph: str
    dtype: str
    message: str
    is_compiled: bool


def cases(options: Any) -> list[Case]:
    """Cases without compilation first, then compiled ones until the time limit."""
    graphs = options.drawn or (QUICK if options.quick else GRAPHS)
    all_of = [
        Case(*each, is_compiled)
        for is_compiled in (False, True)
        for each in itertools.product(graphs, options.dtypes, options.messages)
        if MESSAGES[each[2]].has_forces == (each[0] == "atoms") and each[:2] != ("atoms", "bfloat16")
    ]
    has_plain = set(options.implementations) != {"compiled"}
    compiles = "compiled" in options.implementations and not options.quick
    return [
        case
        for case in all_of
        if (compiles and case.graph in options.compiled if case.is_compiled else has_plain)
    ]


def cells(run: Run, case: Case) -> Iterator[Job | Cell]:
    """The cells of one case; short steps are timed again, alternating."""
    graph = draw_graph(case.graph, run.device)
    what = {
        "graph": case.graph,
        "edges": graph.edge_index.size(1),
        "dtype": case.dtype,
        "message": case.message,
    }
    names = ("compiled",) if case.is_compiled else IMPLEMENTATIONS[:-1]
    made: dict[str, Cell] = {}
    steps: dict[str, Callable[[], Any]] = {}
    expected = None
    torch.manual_seed(0)
    message = MESSAGES[case.message]
    original = Model(message.make, graph.depth).to(run.device)
    inputs = _inputs(graph, run.device)
    for name in names:
        if name not in run.options.implementations or (name == "named" and message.make_named is None):
            continue
        if run.is_late:
            made[name] = {"status": "skipped: --limit-s had passed"}
            continue
        module, row = copy.deepcopy(original), Row((), "", "", "")
        if name == "fastsparse":
            row = accelerate(module, show=False).rows[0]
        elif name == "named":
            module = Model(message.make_named, graph.depth).to(run.device)  # type: ignore[arg-type]
        elif name == "compiled":
            module.compile()
        if expected is None and "pyg" in run.options.implementations and name == "pyg":
            expected = attempt(lambda: {"results": _results(original, graph, inputs, "float32")}).get(
                "results"
            )
        steps[name] = partial(_step, module, graph, inputs, case.dtype)
        results = None if name == "named" else partial(_results, module, graph, inputs, case.dtype)
        limit = TOLERANCE[case.dtype] + 2 * (made.get("pyg", {}).get("error") or 0.0)
        limit = math.inf if name == "pyg" else limit
        cell = attempt(partial(_measure, run, steps[name], results, expected, limit))
        plans = [each._shown() for each in module.modules() if hasattr(each, "_shown")]
        made[name] = {"by": plans[0] if plans else row.kernel or row.reason, **cell}
    any_layer.time_in_turn(run, {name: made[name] for name in steps}, steps)
    for name, cell in made.items():
        yield {**what, "implementation": name, **cell}
    if case.is_compiled:
        torch._dynamo.reset()
    clear_cache()
    release()


class Inputs(NamedTuple):
    """Features of nodes and edges, or places of atoms, and the gradient of the output."""

    x: Tensor
    edge_attr: Tensor
    upstream: Tensor | None


def _inputs(graph: Edges, device: torch.device) -> Inputs:
    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, device=device)

    x = normal(graph.num_nodes, WIDTH).requires_grad_()
    if graph.name == "atoms":
        return Inputs(x, normal(graph.num_nodes, 3).requires_grad_(), None)
    return Inputs(x, normal(graph.edge_index.size(1), FEATURES), normal(graph.num_nodes, WIDTH))


def _forward(module: nn.Module, graph: Edges, inputs: Inputs, dtype: str) -> Tensor:
    # Edges of a batch are a new tensor in every step, so that no cached structure is found.
    edge_index = graph.edge_index if graph.depth == 1 else graph.edge_index.clone()
    device = graph.edge_index.device.type
    is_mixed = dtype != "float32"
    with torch.autocast(device, torch.bfloat16) if is_mixed else contextlib.nullcontext():
        out: Tensor = module(inputs.x, edge_index, inputs.edge_attr)
    return out


def _loss(module: nn.Module, graph: Edges, inputs: Inputs, dtype: str) -> Tensor:
    """The output, or the training loss of a force field."""
    out = _forward(module, graph, inputs, dtype)
    if inputs.upstream is not None:
        return out
    (forces,) = torch.autograd.grad(out.sum(), inputs.edge_attr, create_graph=True)
    return forces.square().sum() + out.sum()


def _step(module: nn.Module, graph: Edges, inputs: Inputs, dtype: str) -> Tensor:
    """Forward and backward."""
    out = _loss(module, graph, inputs, dtype)
    out.backward(None if inputs.upstream is None else inputs.upstream.to(out.dtype))
    inputs.x.grad = inputs.edge_attr.grad = None
    module.zero_grad()
    return out.detach()


def _results(module: nn.Module, graph: Edges, inputs: Inputs, dtype: str) -> list[Tensor]:
    """Output and gradients."""
    out = _loss(module, graph, inputs, dtype)
    wanted = [inputs.x, *module.parameters()]
    upstream = None if inputs.upstream is None else inputs.upstream.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative error; for a gradient that is zero up to rounding, the absolute error."""
    return min(relative_error(found, expected), (found - expected).abs().max().item())


def _measure(
    run: Run,
    step: Callable[[], Tensor],
    results: Callable[[], list[Tensor]] | None,
    expected: list[Tensor] | None,
    limit: float,
) -> Cell:
    """Error, seconds of the first call, peak memory and time of a step."""
    begin = time.perf_counter()
    found = (results or step)()
    cell: Cell = {"error": None, "first_s": round(time.perf_counter() - begin, 3)}
    if results is not None and expected is not None:
        cell["error"] = max(itertools.starmap(_error, zip(found, expected, strict=True)))
        check(cell["error"], limit)
    del found
    cell["peak_bytes"] = peak_bytes(step, run.device, above=True)
    budget_ms = run.options.budget_ms / (4 if run.options.quick else 1)
    return {**cell, **step_time(step, run.device, budget_ms=budget_ms, warm_up=2, min_calls=3).as_cell()}


BENCHMARK = Benchmark(
    "messages",
    cells,
    cases,
    budget_ms=60.0,
    options={
        "graphs": option(choices=GRAPHS, dest="drawn", default=()),
        "messages": option(choices=tuple(MESSAGES)),
        "dtypes": option(list(TOLERANCE), choices=tuple(TOLERANCE)),
        "implementations": option(
            list(IMPLEMENTATIONS[:-1]), '"compiled" takes ten minutes', choices=IMPLEMENTATIONS
        ),
        "compiled": option(list(COMPILED), "graphs on which PyG's layer is compiled, too", choices=GRAPHS),
        "quick": option(False, f"{' and '.join(QUICK)} only, short timings"),
        "limit_s": option(250.0, "no cell begins after this time"),
    },
    notes=(
        f"a step is forward and backward of one layer, {WIDTH} wide, {FEATURES} features per edge without a"
        " gradient; on molecules of five layers, with new edges in every step; bfloat16: autocast",
        "named: the drop-in of PyG's layer that computes the same (the gated one also maps edges to values)",
        "filter: one linear map of an edge's features; SchNet: two; EdgeConv_max: one map and tanh; the other"
        " EdgeConv: two maps",
        f"forces: {ATOMS} atoms with {NEIGHBORS} neighbors, two blocks of SchNet or one of PaiNN; energy,"
        " forces, and the gradients of a loss of both",
        "peak memory is that of a step beyond what lay on the device before it",
    ),
)
