"""Host time of layers on tiny inputs, forward and backward, in units of `torch.nn.Linear`.

One layer on a tiny graph, by the clock of its calls. On a GPU also three layers with ReLU on a graph of
pubmed's size, 128 wide, by the clock of whole steps, with edges that were seen before and with new ones in
every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import suite
from .runner import Benchmark, Cell, Run, option, synchronise

NODES, EDGES, WIDTH = 64, 256, 32
#: The graph of three layers, and their width.
STACK, STACK_WIDTH = "pubmed", 128
#: Edges of three layers: the same tensor in every step, or another one.
STRUCTURES = ("same", "new")
#: Calls before the timed ones: at first, the processor's caches have data of another layer.
WARM_UP = 10


def cases(options: argparse.Namespace) -> list[bool | str]:
    """One layer without and with a gradient of its features, and three layers by their edges."""
    on_gpu = torch.device(options.device).type == "cuda"
    return [False, True, *((STRUCTURES if on_gpu else ()) if options.stacks is None else options.stacks)]


def cells(run: Run, case: bool | str) -> Iterator[Cell]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _stacks(run, case) if isinstance(case, str) else _steps(run, case)
    finally:
        torch.set_num_threads(threads)


def _steps(run: Run, needs_grad: bool) -> Iterator[Cell]:
    """Times one layer of each kind, alternating."""
    steps = {name: _Step(*layer, run.device, needs_grad) for name, layer in _layers(run.device).items()}
    for _ in range(run.options.rounds):
        for step in steps.values():
            step.turn(run.options.calls)
    unit = steps["nn.Linear"].medians()
    for name, step in steps.items():
        forward, whole = step.medians()
        cell = {"layer": name, "features": "with gradient" if needs_grad else "constant"}
        cell |= {"forward_us": forward, "step_us": whole}
        yield cell | {"forward_ratio": forward / unit[0], "step_ratio": whole / unit[1]}


def _stacks(run: Run, structure: str) -> Iterator[Cell]:
    """Times three layers of each kind, alternating."""
    edges = suite.load(STACK, run.device).edge_index()
    x = torch.randn(int(edges.max()) + 1, STACK_WIDTH, device=run.device)
    linear = nn.Linear(STACK_WIDTH, STACK_WIDTH)
    steps = {"nn.Linear": _Stack([linear for _ in range(3)], x, lambda layer, h, _: layer(h))}
    for name, make in _pyg_layers(STACK_WIDTH).items():
        if structure == "same" or "cached" not in name:
            steps[name] = _Stack([make() for _ in range(3)], x, lambda layer, h, given: layer(h, given))
    if len(steps) == 1:
        return
    for _ in range(run.options.rounds):
        for step in steps.values():
            step.turn(run.options.calls, edges, structure)
    unit = steps["nn.Linear"].median()
    for name, step in steps.items():
        us = step.median()
        yield {"layer": name, "structure": structure, "step_us": us, "step_ratio": us / unit}


class _Stack:
    """Three layers with ReLU, forward and backward, timed as a whole."""

    def __init__(self, layers: list[nn.Module], x: Tensor, call: Callable[..., Tensor]) -> None:
        self.layers = nn.ModuleList(layers).to(x.device)
        self.x, self.call = x, call
        self.parameters = list(self.layers.parameters())
        self.us: list[float] = []

    def turn(self, calls: int, edges: Tensor, structure: str) -> None:
        """Runs one round."""
        for nth in range(3 + calls):
            if nth == 3:
                synchronise(self.x.device)
                begin = time.perf_counter()
            given = edges if structure == "same" else edges.clone()
            h = self.x
            for layer in self.layers:
                h = F.relu(self.call(layer, h, given))
            h.backward(h.detach())
            for parameter in self.parameters:
                parameter.grad = None
        synchronise(self.x.device)
        self.us.append((time.perf_counter() - begin) / calls * 1e6)

    def median(self) -> float:
        """Microseconds of a step."""
        return statistics.median(self.us)


class _Step:
    """Forward and backward of one layer, timed."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], device: torch.device, grad: bool) -> None:
        self.module, self.call = module, call
        self.module.to(device)
        self.x = torch.randn(NODES, WIDTH, device=device, requires_grad=grad)
        with torch.no_grad():
            self.grad = torch.randn_like(self.call(self.x))
        self.leaves: list[Tensor] = [*self.module.parameters(), self.x]
        self.forward: list[float] = []
        self.whole: list[float] = []

    def turn(self, calls: int) -> None:
        """Runs one round."""
        synchronise(self.x.device)
        for nth in range(WARM_UP + calls):
            begin = time.perf_counter()
            result = self.call(self.x)
            middle = time.perf_counter()
            result.backward(self.grad)
            for leaf in self.leaves:
                leaf.grad = None
            del result
            if nth >= WARM_UP:
                self.forward.append((middle - begin) * 1e6)
                self.whole.append((time.perf_counter() - begin) * 1e6)

    def medians(self) -> tuple[float, float]:
        """Microseconds of the forward pass and of both."""
        return statistics.median(self.forward), statistics.median(self.whole)


def _pyg_layers(width: int) -> dict[str, Callable[[], nn.Module]]:
    """Name -> constructor of a layer, the drop-in before PyG's; empty if PyG or the plugin is missing."""
    try:
        import torch_geometric.nn as pyg

        import fastsparse_pyg as fast
    except ImportError:
        return {}
    kinds: dict[str, Callable[[Any], nn.Module]] = {
        "GCNConv": lambda make: make(width, width),
        "GCNConv, cached": lambda make: make(width, width, cached=True),
        "SAGEConv": lambda make: make(width, width),
        "GINConv": lambda make: make(nn.Linear(width, width)),
        **{
            f"{it}Conv": lambda make: make(width, width // 4, heads=4)
            for it in ("GAT", "GATv2", "Transformer")
        },
    }
    return {
        f"{title}{name}": lambda module=module, kind=kind, make=make: make(getattr(module, kind))
        for name, make in kinds.items()
        for title, module, kind in (
            ("Fast", fast, f"Fast{name.split(',')[0]}"),
            ("PyG ", pyg, name.split(",")[0]),
        )
    }


def _layers(device: torch.device) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """Name -> a layer and its call with features: those of the plugins that are there, and the originals."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=generator).to(device)
    linear = nn.Linear(WIDTH, WIDTH)
    layers: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"nn.Linear": (linear, linear)}
    for name, make in _pyg_layers(WIDTH).items():
        layer = make()
        layers[name] = (layer, lambda x, layer=layer: layer(x, edges))
    try:
        import dgl
        import dgl.nn as dgl_nn

        import fastsparse_dgl as fast_dgl
    except ImportError:
        return layers
    graph = dgl.add_self_loop(dgl.graph((edges[0].cpu(), edges[1].cpu()), num_nodes=NODES))
    kinds: dict[str, Callable[[Any], nn.Module]] = {
        "GraphConv": lambda make: make(WIDTH, WIDTH),
        "SAGEConv": lambda make: make(WIDTH, WIDTH, "mean"),
        "GINConv": lambda make: make(nn.Linear(WIDTH, WIDTH), "sum"),
        "GATConv": lambda make: make(WIDTH, WIDTH // 4, 4),
        "GATv2Conv": lambda make: make(WIDTH, WIDTH // 4, 4),
    }
    for kind, make in kinds.items():
        made = {f"Fast{kind} (DGL)": make(getattr(fast_dgl, f"Fast{kind}"))}
        if device.type == "cpu":
            made[f"DGL {kind}"] = make(getattr(dgl_nn, kind))
        for name, layer in made.items():
            layers[name] = (layer, lambda x, layer=layer: layer(graph, x))
    return layers


BENCHMARK = Benchmark(
    "host",
    cells,
    cases,
    options={
        "calls": option(50, "calls per round"),
        "rounds": option(25, "rounds"),
        "stacks": {
            "choices": STRUCTURES,
            "nargs": "*",
            "help": "edges of three layers (on a GPU: both, else none)",
        },
    },
    notes=lambda options: (
        f"{NODES} nodes, {EDGES} edges, {WIDTH} features; medians over {options.rounds} rounds in turn of"
        f" {options.calls} calls that nothing waits for, by the clock; ratios are to nn.Linear"
        + (
            ""
            if torch.device(options.device).type == "cuda"
            else "; on the CPU this includes the arithmetic of one thread"
        ),
        f"three layers: the size of {STACK}, {STACK_WIDTH} features, float32; whole steps, the device's work"
        " included; a new structure: the tensor of edges is copied before each step",
    ),
)
