"""GINE and residual gated layers, forward and backward, PyG's and the drop-ins: a part of `edges`.

Layers are 128 wide. One layer on the stand-in of ogbn-arxiv, its structure known; and a model of five on a
batch of 512 molecule-like graphs, whose edges are new to the layers in every step, as a loader brings them.
All gradients are computed, those of the edges too. Errors are against PyG's layer in float32: its 16-bit sums
of rows
with many entries lose most digits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import suite
from .runner import DTYPES, Job, Run, release
from .timing import kernel_time, step_time

WIDTH, RAW = 128, 8
GRAPHS = ("ogbn-arxiv", "molecules")
#: (layer, number of edge features): no features, as many as the layer's width, or raw features.
LAYERS = (("GINEConv", RAW), ("GINEConv", WIDTH), ("ResGatedGraphConv", 0), ("ResGatedGraphConv", RAW))
MOLECULES, DEPTH = 512, 5
#: Accepted relative difference from the result of PyG's layer in float32.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


class Edges(NamedTuple):
    """A graph as PyG takes it, and how many layers a step has."""

    name: str
    num_nodes: int
    edge_index: Tensor
    depth: int


def draw_molecules(device: torch.device) -> Edges:
    """Trees of 10 to 41 nodes with a few rings, both directions of a bond side by side, in one batch."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(10, 42, (MOLECULES,), generator=generator)
    first = sizes.cumsum(0) - sizes
    node = torch.arange(int(sizes.sum()))
    start = first.repeat_interleave(sizes)
    # Every node except a molecule's first has a bond to one of the three before it, a tenth of them one more
    # bond.
    back = torch.randint(1, 4, node.shape, generator=generator)
    parent = torch.maximum(node - back, start)
    more = torch.rand(node.shape, generator=generator) < 0.1
    ring = torch.maximum(node - 5, start)
    pairs = [
        torch.stack([node, parent])[:, node > start],
        torch.stack([node, ring])[:, more & (node > start + 5)],
    ]
    bond = torch.cat(pairs, dim=1)
    edge_index = torch.stack([bond, bond.flip(0)], dim=2).flatten(1)
    return Edges("molecules", node.numel(), edge_index.to(device), DEPTH)


def draw_graph(name: str, device: torch.device) -> Edges:
    """One of `GRAPHS`."""
    if name == "molecules":
        return draw_molecules(device)
    graph = suite.load(name, device)
    return Edges(name, graph.num_nodes, graph.edge_index(), 1)


class Model(nn.Module):
    """Some layers of one kind with ReLU between them."""

    def __init__(self, package: Any, prefix: str, layer: str, features: int, depth: int) -> None:
        super().__init__()
        kind = getattr(package, prefix + layer)
        edge_dim = features if features == RAW else None

        def make() -> nn.Module:
            if layer == "GINEConv":
                return kind(nn.Linear(WIDTH, WIDTH), edge_dim=edge_dim)
            return kind(WIDTH, WIDTH, edge_dim=edge_dim)

        self.layers = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: tuple[Tensor, ...]) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.relu() if number else x, edge_index, *edge_attr)
        return x


def cells(run: Run, name: str) -> Iterator[Job]:
    """All cells of one graph."""
    graph = draw_graph(name, run.device)
    timer = kernel_time if graph.depth == 1 else step_time
    for (layer, features), dtype in itertools.product(LAYERS, run.options.dtypes):
        steps, expected = message_steps(graph, layer, features, DTYPES[dtype], run.device)
        for implementation, step in steps.items():
            if implementation in run.options.implementations:
                tolerance = TOLERANCE[dtype] * graph.depth if implementation == "fastsparse" else None
                cell = {
                    "graph": name,
                    "edges": graph.edge_index.size(1),
                    "layer": layer,
                    "features": features,
                }
                cell |= {"dtype": dtype, "part": "messages", "implementation": implementation}
                yield cell, run.compared(step, [expected], tolerance, timer)
        release()


def message_steps(
    graph: Edges, layer: str, features: int, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[[], Tensor]], Tensor]:
    """Forward and backward by implementation, on the same parameters and inputs, and PyG's float32 result."""
    import torch_geometric.nn as original

    import fastsparse_pyg

    torch.manual_seed(0)
    reference = Model(original, "", layer, features, graph.depth).to(device, dtype)
    fast = Model(fastsparse_pyg, "Fast", layer, features, graph.depth).to(device, dtype)
    fast.load_state_dict(reference.state_dict())
    x = torch.randn(graph.num_nodes, WIDTH, device=device).to(dtype).requires_grad_()
    edge_attr: tuple[Tensor, ...] = ()
    if features:
        edge_attr = (
            torch.randn(graph.edge_index.size(1), features, device=device).to(dtype).requires_grad_(),
        )
    upstream = torch.randn(graph.num_nodes, WIDTH, device=device).to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(reference).float()
        expected = exact(x.float(), graph.edge_index, tuple(each.float() for each in edge_attr))

    def step(module: nn.Module) -> Tensor:
        # Edges of a batch are a new tensor in every step, so that no cached structure is found.
        edge_index = graph.edge_index if graph.depth == 1 else graph.edge_index.clone()
        out: Tensor = module(x, edge_index, edge_attr)
        out.backward(upstream)
        for leaf in (x, *edge_attr):
            leaf.grad = None
        module.zero_grad()
        return out

    return {"pyg": partial(step, reference), "fastsparse": partial(step, fast)}, expected
