"""Epochs on batches of molecules with the loader inside the clock, against PyG's loader and layers.

An epoch draws all batches from the loader, moves them to the device, and makes a plain training step on each:
`zero_grad`, forward, loss, backward, Adam. Molecules have the structures of ogbg-molhiv if $FASTSPARSE_DATA
has molhiv.npz, else they are trees with rings; they have 64 random features. GCN is four layers, 128 wide.
GIN is the same with perceptrons of two layers and batch normalisation. The mean over atoms follows.

Without a model, the loader alone: ms per batch until the last one is there, and the host's share of it.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as PygDataLoader
from torch_geometric.nn import GCNConv, GINConv, global_mean_pool

import fastsparse_pyg
from fastsparse_core import capture
from fastsparse_core.capturing import graphs
from fastsparse_pyg import FastGCNConv, FastGINConv

from .runner import Benchmark, Cell, Job, Run, attempt, end_workers, option, progress, release, synchronise
from .small import _molecule
from .timing import in_turn

FEATURES, WIDTH, DEPTH = 64, 128, 4
LAYERS: dict[str, dict[str, Callable[..., nn.Module]]] = {
    "GCN": {"PyG": GCNConv, "FastSparse": FastGCNConv},
    "GIN": {"PyG": GINConv, "FastSparse": FastGINConv},
}


class Variant(NamedTuple):
    """The layers and the loader of an epoch.

    Attributes:
        layers: implementation of the layers.
        loader: implementation of the loader.
        workers: processes of PyG's loader.
        captures: whether the step is captured.
    """

    layers: str
    loader: str
    workers: int
    captures: bool

    @property
    def name(self) -> str:
        """As the record has it."""
        loader = f"PyG's loader, {self.workers} workers" if self.loader == "PyG" else "our loader"
        return f"{self.layers}{', captured' if self.captures else ''}, {loader}"


def variants(workers: Iterable[int], captures: bool) -> list[Variant]:
    """All variants, the baseline first."""
    steps = [("PyG", False), ("FastSparse", False)] + [("FastSparse", True)] * captures
    found = [Variant(layers, "PyG", count, is_captured) for layers, is_captured in steps for count in workers]
    return found + [Variant(layers, "FastSparse", 0, is_captured) for layers, is_captured in steps]


def cells(run: Run, data: list[Data]) -> Iterator[Job | Cell]:
    """All cells: of the loaders alone, then of the layers, by batch size."""
    options, captures = run.options, graphs.CudaGraphs.supports(run.device)
    for size in options.batches:
        for workers in [*options.workers, None]:
            loader = make_loader(data, size, workers, run.device)
            name = "our loader" if workers is None else f"PyG's loader, {workers} workers"
            cell = {"batch": size, "layer": "none", "implementation": name}
            yield cell, partial(_alone, loader, options.epochs, run.device)
            del loader
        for layer in progress(options.layers, f"batches of {size}"):
            known = variants(options.workers, captures)
            epochs = {item.name: Epoch(item, layer, data, size, run.device) for item in known}
            found = attempt(lambda epochs=epochs: {"epochs": _in_turn(epochs, options.epochs)})
            cells = found.pop("epochs", {})
            for name in epochs:
                yield {"batch": size, "layer": layer, "implementation": name, **found, **cells.get(name, {})}
            del epochs
            fastsparse_pyg.clear_cache()
            release()


def molecules(count: int) -> list[Data]:
    """The dataset, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    file = Path(os.environ.get("FASTSPARSE_DATA", "")) / "molhiv.npz"
    if not file.is_file():
        return [_molecule(generator) for _ in range(count)]
    found = np.load(file)
    pointer = torch.from_numpy(found["graph_ptr"])[: count + 1]
    edges = torch.from_numpy(found["edge_index"]).long()
    edges = edges[:, edges[1] < pointer[-1]]
    graph = torch.bucketize(edges[1], pointer, right=True) - 1
    edges = edges[:, graph.argsort(stable=True)] - pointer[graph.sort().values]
    parts = edges.split(torch.bincount(graph, minlength=pointer.numel() - 1).tolist(), dim=1)
    return [
        Data(
            x=torch.randn(int(nodes), FEATURES, generator=generator),
            edge_index=part.contiguous(),
            y=torch.randn(1, 1, generator=generator),
        )
        for nodes, part in zip(pointer.diff(), parts, strict=True)
    ]


def make_loader(data: list[Data], size: int, workers: int | None, device: torch.device) -> Iterable[Any]:
    """PyG's loader with its best settings; None: ours."""
    options: dict[str, Any] = {"batch_size": size, "shuffle": True, "drop_last": True}
    options["generator"] = torch.Generator().manual_seed(0)
    if workers is None:
        return fastsparse_pyg.DataLoader(data, device=device, **options)
    options |= {
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
    }
    return PygDataLoader(data, **options)


def _alone(loader: Iterable[Any], rounds: int, device: torch.device) -> dict[str, Any]:
    whole, host = [], []
    for nth in range(rounds + 1):
        synchronise(device)
        start, count = time.perf_counter(), 0
        for batch in loader:
            batch.to(device, non_blocking=True)
            count += 1
        enqueued = time.perf_counter()
        synchronise(device)
        if nth:
            whole.append((time.perf_counter() - start) / count * 1e3)
            host.append((enqueued - start) / count * 1e3)
    end_workers()
    return {"median_ms": statistics.median(whole), "host_ms": statistics.median(host)}


def _in_turn(epochs: dict[str, Epoch], rounds: int) -> dict[str, dict[str, Any]]:
    for epoch in epochs.values():
        epoch.warm_up()
    found = {
        name: {"median_ms": statistics.median(ms for ms, _ in timings), "loss": timings[-1][1]}
        for name, timings in in_turn(epochs, rounds).items()
    }
    end_workers()
    return found


class Model(nn.Module):
    """Four layers, the mean over atoms, one number for each molecule."""

    def __init__(self, layer: str, whose: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = LAYERS[layer][whose]
        sizes = [FEATURES] + [WIDTH] * DEPTH
        self.convs = nn.ModuleList(
            make(_perceptron(*pair)) if layer == "GIN" else make(*pair) for pair in itertools.pairwise(sizes)
        )
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for conv in self.convs:
            x = F.relu(conv(x, batch.edge_index))
        return self.out(global_mean_pool(x, batch.batch, batch.num_graphs))


def _perceptron(size_in: int, size_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(size_in, size_out), nn.BatchNorm1d(size_out), nn.ReLU(), nn.Linear(size_out, size_out)
    )


class Epoch:
    """One pass over the molecules."""

    def __init__(
        self, variant: Variant, layer: str, data: list[Data], size: int, device: torch.device
    ) -> None:
        workers = variant.workers if variant.loader == "PyG" else None
        self._loader, self._device = make_loader(data, size, workers, device), device
        model = Model(layer, variant.layers).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            return loss

        self._step: Callable[..., Tensor] = capture(step) if variant.captures else step
        self._captured = self._step.captured if variant.captures else None

    def warm_up(self) -> None:
        """Runs until the step is recorded, if it is captured.

        Raises:
            RuntimeError: it was not.
        """
        for _ in range(3):
            self()
        if self._captured is not None and not self._captured.is_recorded:
            raise RuntimeError("the step was not recorded")

    def __call__(self) -> tuple[float, float]:
        """Ms per batch, and the mean loss."""
        synchronise(self._device)
        start, losses = time.perf_counter(), []
        for batch in self._loader:
            losses.append(self._step(batch.to(self._device, non_blocking=True)).detach().clone())
        synchronise(self._device)
        return (time.perf_counter() - start) / len(losses) * 1e3, float(torch.stack(losses).mean())


BENCHMARK = Benchmark(
    "epochs",
    cells,
    lambda options: [molecules(options.molecules)],
    options={
        "layers": option(None, "layers", choices=LAYERS),
        "batches": option([512, 64], "molecules in a batch"),
        "molecules": option(20_480, "molecules in an epoch"),
        "workers": option([0, 8], "processes of PyG's loader"),
        "epochs": option(5, "epochs that are timed, after the first ones"),
    },
    notes=lambda options: [
        f"{options.molecules} molecules an epoch; the loader and the copy to the device are inside the clock;"
        f" medians of {options.epochs} epochs, the variants in turn, after the epochs that record steps"
    ],
)
