"""Training steps that the host launches more slowly than the GPU runs them: PyG's, ours, ours captured.

A step is that of a plain loop: `zero_grad`, forward, loss, backward, Adam. Graphs:

- cora, pubmed, coauthor: whole graphs of those sizes (2,708, 19,717 and 18,000 nodes), the training nodes by
  a mask; two layers, 64 wide.
- molecules-64, molecules-512: PyG batches of so many trees with rings, other ones in every step; five layers,
  128 wide, with batch normalisation, mean over atoms. GIN has perceptrons of two layers.
- blocks: neighbours of 1,024 seeds, 15, 10 and 5 of them, in a graph of 169,343 nodes; three layers, 128
  wide.

Batches lie on the device, and every call gets `edge_index` in a tensor that nobody has seen. Captured steps
are timed after they are recorded.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import fastsparse_pyg as fast
from fastsparse_core import capture
from fastsparse_core.capture.captured import BATCHES, CALLS

from .common import add_common, attempt, progress, recorder, release
from .timing import step_time

GRAPHS = ("cora", "pubmed", "coauthor", "molecules-64", "molecules-512", "blocks")
LAYERS = ("GCN", "SAGE", "GIN", "GAT", "GATv2", "Transformer")
DTYPES = ("float32", "bf16-amp")
IMPLEMENTATIONS = ("PyG", "FastSparse", "captured")
#: Nodes, edges, features, classes.
WHOLE = {
    "cora": (2_708, 10_556, 1_433, 7),
    "pubmed": (19_717, 88_648, 500, 3),
    "coauthor": (18_000, 163_788, 128, 15),
}
#: Different batches, in turn.
_BATCHES = 16
#: Steps whose losses are compared.
_COMPARED = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--kinds", nargs="+", choices=GRAPHS, default=list(GRAPHS), help="graphs and batches")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="layers")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="precisions")
    parser.add_argument("--budget-ms", type=float, default=100.0, help="about how long to time a step")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("small", options)
    out.note(
        "one step of a plain loop with Adam; records is how many forms were recorded, 0: the step runs as it"
        " is; difference is that of results and gradients with padding from those without, relative, before"
        f" the record; loss_difference is the greatest of the first {_COMPARED} losses from those of our"
        " layers as they are, in float32, and perturbed the same for weights that were multiplied by"
        " 1 + 1e-7 r, r normal, before the first step: what rounding alone does to these losses"
    )
    for kind in options.kinds:
        inputs = draw(kind, device)
        cells = list(itertools.product(options.layers, options.dtypes))
        for layer, dtype in progress(cells, kind):
            losses: dict[str, Tensor] = {}
            for name in IMPLEMENTATIONS:
                cell = partial(_measure, kind, inputs, layer, dtype, name, device, options.budget_ms, losses)
                out.add(graph=kind, layer=layer, dtype=dtype, implementation=name, **attempt(cell))
        del inputs
        fast.clear_cache()
        release()
    return out.path


def draw(kind: str, device: torch.device) -> list[Data]:
    """The inputs of the steps, in turn."""
    generator = torch.Generator().manual_seed(0)
    if kind in WHOLE:
        return [_whole(*WHOLE[kind], generator).to(device)]
    if kind == "blocks":
        data = _whole(169_343, 2_315_598, 128, 40, generator)
        torch.manual_seed(0)
        loader = fast.NeighborLoader(
            data, [15, 10, 5], batch_size=1_024, shuffle=True, drop_last=True, device=device
        )
        return list(itertools.islice(loader, _BATCHES))
    graphs = [_molecule(generator) for _ in range(1_024)]
    size = int(kind.split("-")[1])
    places = (torch.randint(len(graphs), (size,), generator=generator).tolist() for _ in range(_BATCHES))
    return [Batch.from_data_list([graphs[place] for place in of_batch]).to(device) for of_batch in places]


def _whole(nodes: int, edges: int, features: int, classes: int, generator: torch.Generator) -> Data:
    half = torch.randint(nodes, (2, edges // 2), generator=generator)
    return Data(
        x=torch.randn(nodes, features, generator=generator),
        edge_index=torch.cat([half, half.flip(0)], dim=1),
        y=torch.randint(classes, (nodes,), generator=generator),
        train_mask=torch.rand(nodes, generator=generator) < 0.1,
    )


def _molecule(generator: torch.Generator) -> Data:
    nodes = int(torch.randint(10, 42, (), generator=generator))
    node = torch.arange(1, nodes)
    parent = (node - torch.randint(1, 4, node.shape, generator=generator)).clamp(min=0)
    rings = torch.randint(nodes, (2, nodes // 8), generator=generator)
    bonds = torch.cat([torch.stack([node, parent]), rings[:, rings[0] != rings[1]]], dim=1)
    x = torch.randn(nodes, 64, generator=generator)
    y = torch.randn(1, 1, generator=generator)
    return Data(x=x, edge_index=torch.cat([bonds, bonds.flip(0)], dim=1), y=y)


class Model(nn.Module):
    """Some layers of one kind, and what follows them for that kind of input."""

    def __init__(self, kind: str, layer: str, features: int, outputs: int, *, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        is_molecules = kind.startswith("molecules")
        depth, width = (2, 64) if kind in WHOLE else (5 if is_molecules else 3, 128)
        sizes = [features] + [width] * depth
        make = getattr(fast if ours else pyg, f"{'Fast' if ours else ''}{layer}Conv")
        self.convs = nn.ModuleList(_layer(layer, make, *pair) for pair in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth if is_molecules else 0))
        self.out = nn.Linear(width, outputs)

    def forward(self, data: Data) -> Tensor:
        """Outputs of the graphs, of the seeds, or of all nodes."""
        x = data.x
        for nth, conv in enumerate(self.convs):
            x = conv(x, data.edge_index)
            x = F.relu(self.norms[nth](x) if self.norms else x)
        if self.norms:
            x = pyg.global_mean_pool(x, data.batch)
        elif self.kind == "blocks":
            x = x[: data.batch_size]
        return self.out(x)

    def loss(self, data: Data) -> Tensor:
        """What the step makes smaller."""
        out = self(data)
        if self.norms:
            return F.mse_loss(out, data.y)
        if self.kind == "blocks":
            return F.cross_entropy(out, data.y[: data.batch_size])
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def _layer(layer: str, make: Callable[..., nn.Module], size_in: int, size_out: int) -> nn.Module:
    if layer == "GIN":
        wide = nn.Linear(size_in, 2 * size_out)
        return make(
            nn.Sequential(wide, nn.BatchNorm1d(2 * size_out), nn.ReLU(), nn.Linear(2 * size_out, size_out))
        )
    heads = {"heads": 4} if layer in ("GAT", "GATv2", "Transformer") else {}
    return make(size_in, size_out // heads.get("heads", 1), **heads)


def _measure(
    kind: str,
    inputs: list[Data],
    layer: str,
    dtype: str,
    name: str,
    device: torch.device,
    budget_ms: float,
    losses: dict[str, Tensor],
) -> dict[str, Any]:
    cell: dict[str, Any] = {}
    make = partial(_loop, kind, inputs, layer, dtype, name, device)
    call, train = make()
    if dtype == "float32" and name != "PyG":
        losses[name] = torch.stack([call() for _ in range(_COMPARED)])
    if name == "captured":
        for _ in range(0 if dtype == "float32" else max(CALLS, BATCHES) + 8):
            call()
        forms = train.captured.forms
        cell["records"] = sum(len(form.records) for form in forms)
        cell["difference"] = max(form.difference for form in forms)
        if "FastSparse" in losses:
            perturbed, _ = make(1e-7)
            cell["loss_difference"] = _difference(losses["FastSparse"], losses[name])
            found = torch.stack([perturbed() for _ in range(_COMPARED)])
            cell["perturbed"] = _difference(losses["FastSparse"], found)
    timing = step_time(call, device, budget_ms=budget_ms)
    return {**timing.as_cell(), **cell, "nodes": inputs[0].num_nodes, "edges": inputs[0].num_edges}


def _difference(expected: Tensor, found: Tensor) -> float:
    return float(((found - expected) / expected).abs().max())


def _loop(
    kind: str,
    inputs: list[Data],
    layer: str,
    dtype: str,
    name: str,
    device: torch.device,
    perturbation: float = 0.0,
) -> tuple[Callable[[], Tensor], Any]:
    """A step on the next input, and the function that it calls."""
    first = inputs[0]
    outputs = 1 if kind.startswith("molecules") else int(first.y.max()) + 1
    model = Model(kind, layer, first.x.size(1), outputs, ours=name != "PyG").to(device)
    for parameter in model.parameters() if perturbation else ():
        parameter.data.mul_(1 + perturbation * torch.randn_like(parameter))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(data: Data) -> Tensor:
        optimizer.zero_grad()
        with nullcontext() if dtype == "float32" else torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(data)
        loss.backward()
        optimizer.step()
        return loss

    train = capture(step) if name == "captured" and not perturbation else step
    turns = itertools.cycle(inputs)

    def call() -> Tensor:
        data = next(turns)
        if kind not in WHOLE:
            data = copy.copy(data)
            data.edge_index = data.edge_index.clone()
        return train(data).detach()

    return call, train
