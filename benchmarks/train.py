"""Training step and inference of small models with our layers and with PyG's own.

All models have 128 input features and 40 classes, ReLU between layers, cross entropy over all nodes and Adam
(on CUDA PyTorch's fused form of it):

- gcn3-128: GCNConv 128-128-40.
- sage3-128: SAGEConv of the same widths.
- gat3-4x32: GATConv with 4 heads of 32, twice, then one head of 40.
- gatv2-3-4x32, gt3-4x32: the same with GATv2Conv and with TransformerConv.
- agnn2-32: a linear map to width 32, two AGNNConv, a linear map.
- maxk-sage3-256, maxk-gcn3-256: a linear map to width 256, three convolutions of that width with ReLU or MaxK
  (MaxK-GNN, arXiv:2312.08656) before each, a linear map. All layers are ours: the gain is MaxK's alone. With
  "recompute" the backward pass aggregates the kept entries again, for less memory.

Peak memory is the allocator's, above edge list and features (so what our layer caches counts).

Steps of GCN and GraphSAGE with our layers are timed once more with ``capture``, one CUDA graph of the
whole step, optimiser included: the time of the device without host overhead.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, GCNConv, SAGEConv, TransformerConv

from fastsparse_core import capture, policy
from fastsparse_core.capturing.captured import CALLS
from fastsparse_pyg import (
    FastAGNNConv,
    FastGATConv,
    FastGATv2Conv,
    FastGCNConv,
    FastMaxKGCNConv,
    FastMaxKSAGEConv,
    FastSAGEConv,
    FastTransformerConv,
    clear_cache,
)

from . import suite
from .runner import Benchmark, Cell, Job, Run, option, release
from .timing import step_time

GRAPHS = ("pubmed", "ogbn-arxiv", "yelp", "reddit", "ogbn-proteins", "ogbn-products")
IN_CHANNELS, CLASSES = 128, 40
DTYPES = ("float32", "bf16-amp")

#: PyG's attention layers keep 1.3 to 5 GB per million edges (35 to 72 GB on yelp's 14 million with 4 heads).
#: With as many edges as reddit they exceed 140 GB, and running out of memory takes time.
REFERENCE_EDGES = 50_000_000


class Stack(nn.Module):
    """Convolutions with ReLU between them, with a linear map before and after them if asked for."""

    def __init__(
        self, convs: list[nn.Module], before: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        if self.before is not None:
            x = F.relu(self.before(x))
        for conv in self.convs[:-1]:
            x = conv(x, graph)
            # No activation between propagations that have no weights.
            x = x if self.after is not None else F.relu(x)
        x = self.convs[-1](x, graph)
        return x if self.after is None else self.after(x)


Layer = Callable[..., nn.Module]


def three_layers(layer: Layer, **options: Any) -> nn.Module:
    widths = (IN_CHANNELS, 128, 128, CLASSES)
    return Stack([layer(wide, narrow, **options) for wide, narrow in itertools.pairwise(widths)])


def heads_4x32(layer: Layer) -> nn.Module:
    return Stack([layer(IN_CHANNELS, 32, heads=4), layer(4 * 32, 32, heads=4), layer(4 * 32, CLASSES)])


def agnn(layer: Layer) -> nn.Module:
    return Stack([layer(), layer()], nn.Linear(IN_CHANNELS, 32), nn.Linear(32, CLASSES))


class Activated(nn.Module):
    """Convolutions of one width with an activation before each, between two linear maps.

    Args:
        layer: a convolution; with options one that begins with MaxK itself.
        options: kept entries of a row, and whether to recompute; none: ReLU.
    """

    def __init__(self, layer: Layer, **options: Any) -> None:
        super().__init__()
        width = 256
        self.before, self.after = nn.Linear(IN_CHANNELS, width), nn.Linear(width, CLASSES)
        self.convs = nn.ModuleList([layer(width, width, **options) for _ in range(3)])
        self.rectified = not options

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        x = self.before(x)
        for conv in self.convs:
            x = conv(F.relu(x) if self.rectified else x, graph)
        return self.after(x)


@dataclass(frozen=True)
class Implementation:
    """A layer to build a model with.

    Attributes:
        layer: Its class.
        options: Arguments of the class in addition to the widths.
        form: Form of the graph.
        most_edges: It is left out of graphs with more edges unless asked for; None: no limit.
        warm_up: Training steps before the timed ones.
        captured: Whether the step is also timed as a CUDA graph.
    """

    layer: type[nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    form: str = "edge_index"
    most_edges: int | None = None
    warm_up: int = 2
    captured: bool = False


#: Number of steps after which every structure is converted, because each step has at least one product. The
#: conversion must not fall into the timed steps.
CONVERTED = policy.REUSE + 2


def _pair(ours: type[nn.Module], original: type[nn.Module]) -> dict[str, Implementation]:
    return {
        ours.__name__: Implementation(ours, warm_up=CONVERTED),
        "PyG edge_index": Implementation(original, most_edges=REFERENCE_EDGES),
    }


#: Kept entries of a row in the models with MaxK.
KEPT = (16, 32, 64)


def _activations(layer: type[nn.Module], sparse: type[nn.Module]) -> dict[str, Implementation]:
    named = {layer.__name__ + ", ReLU": Implementation(layer, warm_up=CONVERTED)}
    for extra, recompute in (("", False), (", recompute", True)):
        for k in KEPT:
            options = {"k": k, "recompute": recompute}
            named[f"{sparse.__name__}, k = {k}{extra}"] = Implementation(sparse, options, warm_up=CONVERTED)
    return named


#: model -> how to build it, and with which layers, ours first
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Implementation]]] = {
    "gcn3-128": (
        three_layers,
        {
            "FastGCNConv": Implementation(FastGCNConv, warm_up=CONVERTED, captured=True),
            "PyG edge_index": Implementation(GCNConv),
            "PyG edge_index, cached": Implementation(GCNConv, {"cached": True}),
            "PyG sparse_csr": Implementation(GCNConv, form="sparse_csr"),
        },
    ),
    "sage3-128": (
        three_layers,
        {
            "FastSAGEConv": Implementation(FastSAGEConv, warm_up=CONVERTED, captured=True),
            "PyG edge_index": Implementation(SAGEConv),
            "PyG sparse_csr": Implementation(SAGEConv, form="sparse_csr"),
        },
    ),
    "gat3-4x32": (heads_4x32, _pair(FastGATConv, GATConv)),
    "gatv2-3-4x32": (heads_4x32, _pair(FastGATv2Conv, GATv2Conv)),
    "gt3-4x32": (heads_4x32, _pair(FastTransformerConv, TransformerConv)),
    "agnn2-32": (agnn, _pair(FastAGNNConv, AGNNConv)),
    "maxk-sage3-256": (Activated, _activations(FastSAGEConv, FastMaxKSAGEConv)),
    "maxk-gcn3-256": (Activated, _activations(FastGCNConv, FastMaxKGCNConv)),
}
#: Models that compare FastSparse's own layers; they run only if `--models` names them.
OWN = ("maxk-sage3-256", "maxk-gcn3-256")
RIVALLED = tuple(model for model in MODELS if model not in OWN)


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = suite.load(name, run.options.device)
    # Only one form of the graph is on the device at a time, so that the other does not count as peak memory.
    graph = suite.Graph(name, graph.rowptr.cpu(), graph.col.cpu())
    for form in ("edge_index", "sparse_csr"):
        yield from _cells_of_form(run, graph, form)
        release()


def _cells_of_form(run: Run, graph: suite.Graph, form: str) -> Iterator[Job]:
    """All cells of one graph in one form; what they hold on the device ends with them."""
    options, facts = run.options, graph.facts()
    jobs = [
        (model, name)
        for model in options.models
        for name, implementation in MODELS[model][1].items()
        if name in options.implementations
        and implementation.form == form
        and (options.reference_all or graph.num_edges <= (implementation.most_edges or graph.num_edges))
    ]
    if not jobs:
        return
    graph = suite.Graph(graph.name, graph.rowptr.to(run.device), graph.col.to(run.device))
    structure = graph.edge_index() if form == "edge_index" else graph.sparse_csr()
    del graph
    x, y = random_task(facts["nodes"], run.device)
    for (model, implementation), dtype in itertools.product(jobs, options.dtypes):
        clear_cache()
        release()
        build, layers = MODELS[model]
        chosen = layers[implementation]
        make = partial(make_steps, partial(build, chosen.layer, **chosen.options), structure, x, y, dtype)
        cell = {**facts, "model": model, "dtype": dtype, "implementation": implementation}
        yield cell, partial(measure, make, run.device, options.budget_ms, chosen)


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[None]:
    """The autocast context for a forward pass in one of `DTYPES`."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bf16-amp" else contextlib.nullcontext()


def random_task(nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and classes of every node."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(nodes, IN_CHANNELS, generator=generator, device=device)
    return x, torch.randint(CLASSES, (nodes,), generator=generator, device=device)


def make_steps(
    make_model: Callable[[], nn.Module],
    structure: Tensor,
    x: Tensor,
    y: Tensor,
    dtype: str,
) -> tuple[nn.Module, Callable[[], None], Callable[[], None]]:
    """A new model, a training step of it, and an inference step."""
    device = x.device
    amp = autocast(device, dtype)
    torch.manual_seed(0)
    model = make_model().to(device)
    # The fused optimizer has the fewest launches, and launch overhead decides the time of small models.
    optimiser = torch.optim.Adam(model.parameters(), fused=device.type == "cuda")

    def train() -> None:
        optimiser.zero_grad()
        with amp:
            loss = F.cross_entropy(model(x, structure), y)
        loss.backward()
        optimiser.step()

    def infer() -> None:
        with torch.no_grad(), amp:
            model(x, structure)

    return model, train, infer


def measure(
    make: Callable[[], tuple[nn.Module, Callable[[], None], Callable[[], None]]],
    device: torch.device,
    budget_ms: float,
    chosen: Implementation,
) -> Cell:
    """Times training steps and inference of one model; the graph is cached after the first call."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    model, train, infer = make()
    training = step_time(train, device, budget_ms=budget_ms, warm_up=chosen.warm_up, min_calls=3)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 1e9 if cuda else None
    model.eval()
    inference = step_time(infer, device, budget_ms=budget_ms / 2, warm_up=1, min_calls=3)
    cell = {**training.as_cell(), **inference.as_cell("infer_"), "peak_gb": peak}
    if chosen.captured and cuda:
        replay = capture(make()[1])
        captured = step_time(replay, device, budget_ms=budget_ms, warm_up=CALLS + 5, min_calls=3)
        cell |= captured.as_cell("captured_") if replay.captured.is_recorded else {}
    return cell


def _notes(options: Any) -> Iterator[str]:
    yield "the optimiser is Adam, for every implementation, on CUDA with fused=True"
    if not options.reference_all:
        yield (
            f"PyG's attention layers were not tried on graphs of over {REFERENCE_EDGES / 1e6:.0f} million"
            " edges, on which they are known to exceed 140 GB (but agnn2-32 in bf16 on reddit, which just"
            " fits); --reference-all tries them"
        )


BENCHMARK = Benchmark(
    "train",
    cells,
    graphs=GRAPHS,
    budget_ms=150.0,
    options={
        "models": option(RIVALLED, choices=tuple(MODELS)),
        "dtypes": option(choices=DTYPES),
        "implementations": option(
            choices=tuple(dict.fromkeys(it for _, them in MODELS.values() for it in them))
        ),
        "reference_all": option(
            False,
            f"PyG's attention layers on graphs of more than {REFERENCE_EDGES / 1e6:.0f} million edges too",
        ),
    },
    notes=_notes,
    variant=lambda options: "" if options.models == list(RIVALLED) else "_".join(options.models),
)
