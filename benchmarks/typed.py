"""Layers of typed edges, forward and backward, against PyG: RGCN, RGAT and HGT.

Graphs are drawn from seeds with the sizes of AM (46 relations, whose frequencies fall like 1 / rank) and of
ogbn-mag (four relations between papers, authors, institutions and fields). RGAT's original stores a matrix
for every edge, so it is also measured on a hundredth of the edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runner import Benchmark, Job, Run, option, release

WIDTH = 64
HEADS = 4
AM = (1_666_764, 5_988_321, 46)
MAG_NODES = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
MAG_EDGES = {
    ("author", "affiliated", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has", "field"): 7_505_078,
}
TOLERANCE = 1e-3


class Case(NamedTuple):
    """A layer on a graph.

    Attributes:
        layer: PyG's name of it.
        graph: the stand-in.
        scale: share of the nodes and edges.
        options: further arguments of the layer.
    """

    layer: str
    graph: str
    scale: float
    options: dict[str, Any]


CASES = (
    Case("RGCNConv", "am", 1.0, {}),
    Case("RGCNConv", "am", 1.0, {"num_bases": 30}),
    Case("RGCNConv", "am", 1.0, {"num_blocks": 8}),
    Case("RGCNConv", "mag", 1.0, {}),
    Case("RGATConv", "am", 1.0, {}),
    Case("RGATConv", "am", 0.01, {}),
    Case("RGATConv", "mag", 0.01, {}),
    Case("HGTConv", "mag", 1.0, {}),
)


def cells(run: Run, case: Case) -> Iterator[Job]:
    torch.manual_seed(0)
    scale = case.scale * run.options.scale
    hetero = case.layer == "HGTConv"
    inputs, edges = draw_mag(scale, run.device) if hetero else draw(case.graph, scale, run.device)
    layers = make_layers(case, run.device)
    expected: list[Tensor] = []
    for implementation in run.options.implementations:
        step = _step(layers[implementation], inputs)
        named = " ".join(f"{key}={value}" for key, value in case.options.items())
        cell = {"layer": case.layer, "options": named, "graph": case.graph, "edges": edges}
        cell["implementation"] = implementation
        yield cell, run.compared(step, expected, TOLERANCE, above=True)
        release()


def draw(graph: str, scale: float, device: torch.device) -> tuple[tuple[Any, ...], int]:
    """Features, edges and types of one node type, and the number of edges."""
    generator = torch.Generator(device=device).manual_seed(0)
    if graph == "mag":
        _, edge_index, kind = _homogeneous_mag(scale, device, generator)
        num_nodes = sum(_count(size, scale) for size in MAG_NODES.values())
    else:
        num_nodes, num_edges, num_relations = _count(AM[0], scale), _count(AM[1], scale), AM[2]
        edge_index = torch.randint(0, num_nodes, (2, num_edges), device=device, generator=generator)
        share = 1.0 / torch.arange(1, num_relations + 1, device=device)
        kind = torch.multinomial(share, num_edges, replacement=True, generator=generator)
    x = torch.randn(num_nodes, WIDTH, device=device, generator=generator).requires_grad_()
    return (x, edge_index, kind), edge_index.size(1)


def draw_mag(scale: float, device: torch.device) -> tuple[tuple[Any, ...], int]:
    """Features and edges by type, and the number of edges."""
    generator = torch.Generator(device=device).manual_seed(0)
    edges, edge_index, _ = _homogeneous_mag(scale, device, generator)
    x = {
        name: torch.randn(_count(size, scale), WIDTH, device=device, generator=generator).requires_grad_()
        for name, size in MAG_NODES.items()
    }
    return (x, edges), edge_index.size(1)


def _homogeneous_mag(
    scale: float, device: torch.device, generator: torch.Generator
) -> tuple[dict[tuple[str, str, str], Tensor], Tensor, Tensor]:
    """Edges by type, and all of them with nodes counted through, and their types."""
    sizes = {name: _count(size, scale) for name, size in MAG_NODES.items()}
    first = dict(zip(sizes, torch.tensor([0, *sizes.values()]).cumsum(0).tolist(), strict=False))
    by_type, joined, kinds = {}, [], []
    for at, (key, count) in enumerate(MAG_EDGES.items()):
        ends = [
            torch.randint(0, sizes[key[side]], (_count(count, scale),), device=device, generator=generator)
            for side in (0, 2)
        ]
        by_type[key] = torch.stack(ends)
        joined.append(torch.stack([ends[0] + first[key[0]], ends[1] + first[key[2]]]))
        kinds.append(torch.full_like(ends[0], at))
    return by_type, torch.cat(joined, 1), torch.cat(kinds)


def _count(size: int, scale: float) -> int:
    return max(int(size * scale), 4)


def make_layers(case: Case, device: torch.device) -> dict[str, torch.nn.Module]:
    """The original and the drop-in with the same parameters."""
    from .pyg_layers import original_and_drop_in

    kinds = (list(MAG_NODES), list(MAG_EDGES)) if case.layer == "HGTConv" else AM[2]
    if case.layer != "HGTConv" and case.graph == "mag":
        kinds = len(MAG_EDGES)
    width = WIDTH // HEADS if case.layer == "RGATConv" else WIDTH
    options = case.options | ({} if case.layer == "RGCNConv" else {"heads": HEADS})
    return original_and_drop_in(case.layer, WIDTH, width, kinds, device=device, **options)


def _step(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Tensor]:
    """Forward and backward with all gradients."""
    leaves = list(inputs[0].values()) if isinstance(inputs[0], dict) else [inputs[0]]

    def step() -> Tensor:
        out = layer(*inputs)
        result: Tensor = torch.cat(list(out.values())) if isinstance(out, dict) else out
        result.square().mean().backward()
        for leaf in leaves:
            leaf.grad = None
        layer.zero_grad()
        return result.detach()

    return step


BENCHMARK = Benchmark(
    "typed",
    cells,
    lambda options: [case for case in CASES if case.layer in options.layers],
    budget_ms=200.0,
    options={
        "layers": option(["RGCNConv", "RGATConv", "HGTConv"]),
        "implementations": option(["pyg", "fastsparse"]),
        "scale": option(1.0, "share of every graph's nodes and edges"),
    },
    notes=(
        f"layers are {WIDTH} wide with {HEADS} heads where they have some; a step is forward and backward",
        "peak memory is that of a step beyond what lay on the device before it: features and parameters",
    ),
)
