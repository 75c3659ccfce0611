"""Training steps under `torch.compile`, with edges as plain tensors: our layers and PyG's.

Three layers with ReLU, 128 wide, forward and backward with all gradients. The graphs have the sizes of pubmed
and ogbn-arxiv. Batches have 64 molecules, and every step gets a batch of another size.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import suite
from .runner import Benchmark, Job, Run, check, option, relative_error
from .timing import step_time

WIDTH, HEADS = 128, 4
GRAPHS = ("pubmed", "ogbn-arxiv", "molecules")
LAYERS = ("GCN", "SAGE", "GIN", "GINE", "Transformer", "GATv2", "GAT")
#: Implementation -> the plugin, and the mode of `torch.compile` (None if it is not compiled).
IMPLEMENTATIONS: dict[str, tuple[str, str | None]] = {
    "FastSparse": ("fast", None),
    "FastSparse, compiled": ("fast", "default"),
    "FastSparse, reduce-overhead": ("fast", "reduce-overhead"),
    "PyG": ("pyg", None),
    "PyG, compiled": ("pyg", "default"),
}
#: Features of an edge, for the layers that need some.
FEATURES = 8
MOLECULES, BATCHES = 64, 8
TOLERANCE = 1e-3


def cases(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Compiled PyG runs last, with GAT at the end, because its assertions on a GPU may end the process."""
    found = [
        case
        for case in itertools.product(options.implementations, options.drawn, options.layers)
        if case[:2] != ("FastSparse, reduce-overhead", "molecules")  # would record every batch
    ]
    return sorted(found, key=lambda case: (case[0] == "PyG, compiled") * (1 + (case[2] == "GAT")))


def cells(run: Run, case: tuple[str, str, str]) -> Iterator[Job]:
    implementation, graph, layer = case
    plugin, mode = IMPLEMENTATIONS[implementation]
    model = Model(layer, plugin).to(run.device)
    inputs = draw(graph, run.device)
    cell = {"graph": graph, "layer": layer, "implementation": implementation, "edges": inputs[0][1].size(1)}

    def measure() -> dict[str, Any]:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        with torch.no_grad():
            expected = [Model(layer, "pyg").to(run.device)(*given) for given in inputs]
        call: Callable[..., Tensor] = model if mode is None else torch.compile(model, mode=mode)
        error = 0.0
        for given, exact in zip(inputs, expected, strict=True):
            for _ in range(2):
                result = call(*given)
                error = max(error, relative_error(result, exact.double()))
                result.sum().backward()
                model.zero_grad()  # the next replay overwrites these gradients
        check(error, TOLERANCE)
        turns = itertools.cycle(inputs)

        def step() -> None:
            x, edges, features = next(turns)
            given = edges.clone() if graph == "molecules" else edges
            call(x, given, features).sum().backward()
            model.zero_grad()

        found = run.time(step, step_time)
        return {**found, "error": error, "compilations": counters["stats"].get("unique_graphs", 0)}

    yield cell, measure
    torch._dynamo.reset()


def draw(graph: str, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Node features, edges and edge features of each input."""
    from .pna import draw_edges

    torch.manual_seed(0)
    sizes = [MOLECULES + nth for nth in range(BATCHES)] if graph == "molecules" else [0]
    found = []
    for size in sizes:
        if graph == "molecules":
            nodes, edges = draw_edges(graph, device, size)
        else:
            edges = suite.load(graph, device).edge_index()
            nodes = int(edges.max()) + 1
        x, features = (
            torch.randn(nodes, WIDTH, device=device),
            torch.randn(edges.size(1), FEATURES, device=device),
        )
        found.append((x, edges, features))
    return found


class Model(nn.Module):
    """Three layers of a kind."""

    def __init__(self, layer: str, plugin: str) -> None:
        super().__init__()
        import torch_geometric.nn as pyg

        import fastsparse_pyg as fast

        torch.manual_seed(0)
        make = getattr(fast, f"Fast{layer}Conv") if plugin == "fast" else getattr(pyg, f"{layer}Conv")
        self.has_features = layer == "GINE"
        self.convs = nn.ModuleList(self._layer(make, layer) for _ in range(3))

    @staticmethod
    def _layer(make: Callable[..., nn.Module], layer: str) -> nn.Module:
        if layer == "GIN":
            return make(nn.Linear(WIDTH, WIDTH))
        if layer == "GINE":
            return make(nn.Linear(WIDTH, WIDTH), edge_dim=FEATURES)
        return make(WIDTH, WIDTH // HEADS, heads=HEADS) if layer[:2] in ("GA", "Tr") else make(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        """Features of the nodes after three layers."""
        for conv in self.convs:
            x = F.relu(conv(x, edges, features) if self.has_features else conv(x, edges))
        return x


BENCHMARK = Benchmark(
    "compile",
    cells,
    cases,
    budget_ms=300.0,
    options={
        "graphs": option(choices=GRAPHS, dest="drawn"),
        "layers": option(choices=LAYERS),
        "implementations": option(choices=tuple(IMPLEMENTATIONS)),
    },
    notes=(
        f"a step is forward and backward of three layers, {WIDTH} wide, float32, edges as a plain tensor",
        f"molecules: {MOLECULES} or a few more in a batch, in a new tensor of edges every step",
    ),
)
