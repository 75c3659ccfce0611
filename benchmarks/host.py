"""Host time of one layer on a tiny cached graph, forward and backward, in units of `torch.nn.Linear`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .common import add_common, recorder

NODES, EDGES, WIDTH = 64, 256, 32
#: What the first calls of a turn find in the processor's caches is another layer's.
WARM_UP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--calls", type=int, default=50, help="calls per round")
    parser.add_argument("--rounds", type=int, default=25, help="rounds")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("host", options)
    out.note(
        f"{NODES} nodes, {EDGES} edges, {WIDTH} features; medians over {options.rounds} rounds in turn of"
        f" {options.calls} calls that nothing waits for, by the clock; ratios are to nn.Linear"
        + ("" if device.type == "cuda" else "; on the CPU this includes the arithmetic of one thread")
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
    finally:
        torch.set_num_threads(threads)
    return out.path


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


def _layers(device: torch.device) -> dict[str, tuple[nn.Module, Callable[..., Any]]]:
    """Name -> a layer and its call with features: those of the plugins that are there, and the originals."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=generator).to(device)
    linear = nn.Linear(WIDTH, WIDTH)
    layers: dict[str, tuple[nn.Module, Callable[..., Any]]] = {"nn.Linear": (linear, linear)}

    def add(name: str, layer: nn.Module, call: Callable[[Tensor], Any]) -> None:
        layers[name] = (layer, call)

    heads = {"heads": 4}
    try:
        import torch_geometric.nn as pyg

        import fastsparse_pyg as fast
    except ImportError:
        pass
    else:
        kinds: dict[str, Callable[[Any, str], nn.Module]] = {
            "GCNConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH),
            "GCNConv, cached": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH, cached=True),
            "SAGEConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH),
            "GINConv": lambda of, kind: getattr(of, kind)(nn.Linear(WIDTH, WIDTH)),
            "GATConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH // 4, **heads),
            "GATv2Conv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH // 4, **heads),
            "TransformerConv": lambda of, kind: getattr(of, kind)(WIDTH, WIDTH // 4, **heads),
        }
        for name, make in kinds.items():
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
