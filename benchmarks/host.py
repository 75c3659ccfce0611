"""Host time of layers where the device has little to do, both ways, in units of `torch.nn.Linear`.

One layer on a tiny graph, by the clock of its calls. On a GPU also three layers with ReLU on a graph of
pubmed's size, 128 wide, by the clock of whole steps, with edges that were seen before and with new ones in
every step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import suite
from .common import add_common, recorder
from .record import Recorder

NODES, EDGES, WIDTH = 64, 256, 32
#: The graph of three layers, and their width.
STACK, STACK_WIDTH = "pubmed", 128
#: Edges of three layers: the same tensor in every step, or another one.
STRUCTURES = ("same", "new")
#: What the first calls of a turn find in the processor's caches is another layer's.
WARM_UP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--calls", type=int, default=50, help="calls per round")
    parser.add_argument("--rounds", type=int, default=25, help="rounds")
    parser.add_argument(
        "--stacks", choices=STRUCTURES, nargs="*", help="edges of three layers (on a GPU: both, else none)"
    )


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("host", options)
    out.note(
        f"{NODES} nodes, {EDGES} edges, {WIDTH} features; medians over {options.rounds} rounds in turn of"
        f" {options.calls} calls that nothing waits for, by the clock; ratios are to nn.Linear"
        + ("" if device.type == "cuda" else "; on the CPU this includes the arithmetic of one thread")
    )
    stacks = (STRUCTURES if device.type == "cuda" else ()) if options.stacks is None else options.stacks
    out.note(
        f"three layers: the size of {STACK}, {STACK_WIDTH} features, float32; whole steps, the device's work"
        " included; a new structure: the tensor of edges is copied before each step"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for needs_grad in (False, True):
            steps = {name: _Step(layer, device, needs_grad) for name, layer in _layers(device).items()}
            for _ in range(options.rounds):
                for step in steps.values():
                    step.turn(options.calls)
            unit = steps["nn.Linear"].medians()
            for name, step in steps.items():
                forward, whole = step.medians()
                out.add(
                    layer=name,
                    features="with gradient" if needs_grad else "constant",
                    forward_us=forward,
                    step_us=whole,
                    forward_ratio=forward / unit[0],
                    step_ratio=whole / unit[1],
                )
        for structure in stacks:
            _stacks(out, structure, device, options)
    finally:
        torch.set_num_threads(threads)
    return out.path


def _stacks(out: Recorder, structure: str, device: torch.device, options: argparse.Namespace) -> None:
    """Three layers of each kind in turn; cells of the record."""
    try:
        import torch_geometric.nn as pyg

        import fastsparse_pyg as fast
    except ImportError:
        return
    edges = suite.load(STACK, device).edge_index()
    x = torch.randn(int(edges.max()) + 1, STACK_WIDTH, device=device)
    linear = nn.Linear(STACK_WIDTH, STACK_WIDTH)
    steps = {"nn.Linear": _Stack([linear for _ in range(3)], x, lambda layer, h, _: layer(h))}
    for name, make in _pyg_kinds(STACK_WIDTH).items():
        if structure == "new" and "cached" in name:
            continue
        kind = name.split(",")[0]
        for label, of in (
            (f"Fast{name}", partial(make, fast, f"Fast{kind}")),
            (f"PyG {name}", partial(make, pyg, kind)),
        ):
            steps[label] = _Stack([of() for _ in range(3)], x, lambda layer, h, given: layer(h, given))
    for _ in range(options.rounds):
        for step in steps.values():
            step.turn(options.calls, edges, structure)
    unit = steps["nn.Linear"].median()
    for label, step in steps.items():
        us = step.median()
        out.add(layer=label, structure=structure, step_us=us, step_ratio=us / unit)


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
                self._wait()
                begin = time.perf_counter()
            given = edges if structure == "same" else edges.clone()
            h = self.x
            for layer in self.layers:
                h = F.relu(self.call(layer, h, given))
            h.backward(h.detach())
            for parameter in self.parameters:
                parameter.grad = None
        self._wait()
        self.us.append((time.perf_counter() - begin) / calls * 1e6)

    def _wait(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize()

    def median(self) -> float:
        """Microseconds of a step."""
        return statistics.median(self.us)


class _Step:
    """Forward and backward of one layer, timed."""

    def __init__(self, layer: tuple[nn.Module, Callable[..., Any]], device: torch.device, grad: bool) -> None:
        self.module, self.call = layer
        self.module.to(device)
        self.x = torch.randn(NODES, WIDTH, device=device, requires_grad=grad)
        with torch.no_grad():
            self.grad = torch.randn_like(self.call(self.x))
        self.leaves: list[Tensor] = [*self.module.parameters(), self.x]
        self.forward: list[float] = []
        self.whole: list[float] = []

    def turn(self, calls: int) -> None:
        """Runs one round."""
        if self.x.is_cuda:
            torch.cuda.synchronize()
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


def _pyg_kinds(width: int) -> dict[str, Callable[[Any, str], nn.Module]]:
    """Name -> what makes a layer of a module by its name in it."""
    heads = {"heads": 4}
    return {
        "GCNConv": lambda of, kind: getattr(of, kind)(width, width),
        "GCNConv, cached": lambda of, kind: getattr(of, kind)(width, width, cached=True),
        "SAGEConv": lambda of, kind: getattr(of, kind)(width, width),
        "GINConv": lambda of, kind: getattr(of, kind)(nn.Linear(width, width)),
        "GATConv": lambda of, kind: getattr(of, kind)(width, width // 4, **heads),
        "GATv2Conv": lambda of, kind: getattr(of, kind)(width, width // 4, **heads),
        "TransformerConv": lambda of, kind: getattr(of, kind)(width, width // 4, **heads),
    }


def _layers(device: torch.device) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """Name -> a layer and its call with features: those of the plugins that are there, and the originals."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=generator).to(device)
    linear = nn.Linear(WIDTH, WIDTH)
    layers: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"nn.Linear": (linear, linear)}

    def add(name: str, layer: nn.Module, call: Callable[[Tensor], Any]) -> None:
        layers[name] = (layer, call)

    try:
        import torch_geometric.nn as pyg

        import fastsparse_pyg as fast
    except ImportError:
        pass
    else:
        for name, make in _pyg_kinds(WIDTH).items():
            kind = name.split(",")[0]
            for label, layer in (
                (f"Fast{name}", make(fast, f"Fast{kind}")),
                (f"PyG {name}", make(pyg, kind)),
            ):
                add(label, layer, lambda x, layer=layer: layer(x, edges))
    try:
        import dgl
        import dgl.nn as dgl_nn

        import fastsparse_dgl as fast_dgl
    except ImportError:
        return layers
    graph = dgl.add_self_loop(dgl.graph((edges[0].cpu(), edges[1].cpu()), num_nodes=NODES))
    dgl_kinds: dict[str, Callable[[Any, str], nn.Module]] = {
        "GraphConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH),
        "SAGEConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH, "mean"),
        "GINConv": lambda of, kind: getattr(of, kind)(nn.Linear(WIDTH, WIDTH), "sum"),
        "GATConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH // 4, 4),
        "GATv2Conv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH // 4, 4),
    }
    for kind, make in dgl_kinds.items():
        fast_layer = make(fast_dgl, f"Fast{kind}")
        add(f"Fast{kind} (DGL)", fast_layer, lambda x, layer=fast_layer: layer(graph, x))
        if device.type == "cpu":
            original = make(dgl_nn, kind)
            add(f"DGL {kind}", original, lambda x, layer=original: layer(graph, x))
    return layers
