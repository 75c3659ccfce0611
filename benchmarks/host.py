"""Host time of one FastGCNConv forward on a tiny cached graph, above the layer's matrix product."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

from fastsparse_pyg import FastGCNConv

from .common import add_common, recorder
from .timing import host_us

NODES, EDGES, WIDTH = 64, 256, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--calls", type=int, default=200, help="calls per round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("host", options)
    out.note(
        f"{NODES} nodes, {EDGES} edges, width {WIDTH}; host clock over {options.calls} calls that nothing"
        f" waits for; 'above GEMM' subtracts the time of the layer's own matrix product, F.linear with bias"
        + ("" if device.type == "cuda" else "; on the CPU this includes the arithmetic")
    )
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES), generator=generator).to(device)
    x = torch.randn(NODES, WIDTH, generator=generator).to(device)
    fast = FastGCNConv(WIDTH, WIDTH).to(device)
    original = GCNConv(WIDTH, WIDTH).to(device)
    cached = GCNConv(WIDTH, WIDTH, cached=True).to(device)
    weight, bias = fast.lin.weight, fast.bias
    calls: dict[str, Callable[[], object]] = {
        "F.linear": lambda: F.linear(x, weight, bias),
        "FastGCNConv": lambda: fast(x, edge_index),
        "PyG GCNConv": lambda: original(x, edge_index),
        "PyG GCNConv, cached": lambda: cached(x, edge_index),
    }
    for mode, grad in (("inference", False), ("training forward", True)):
        gemm = 0.0
        for implementation, fn in calls.items():
            with torch.set_grad_enabled(grad):
                median, p20, p80 = host_us(fn, device, calls=options.calls, rounds=options.rounds)
            if implementation == "F.linear":
                gemm = median
            out.add(
                mode=mode,
                implementation=implementation,
                median_us=median,
                p20_us=p20,
                p80_us=p80,
                above_gemm_us=median - gemm,
            )
    return out.path
