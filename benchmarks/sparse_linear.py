"""SparseLinear over density: where a dense product with zeros is faster, and what auto picks."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsparse_core import SparseLinear

from .common import DTYPES, add_common, attempt, progress, recorder
from .timing import step_time, wall_times

#: (outputs, inputs) of a transformer's and of a large language model's layers.
SHAPES = ("2048x512", "512x2048", "4096x4096")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="outputs x inputs")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.005, 0.02, 0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 256, 2048], help="rows of x")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=["float32", "float16"])
    parser.add_argument("--budget-ms", type=float, default=10.0, help="time to spend on each timing")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("sparse_linear", options)
    out.note("dense writes the matrix with its zeros in every forward pass; structures are prepared")
    device = torch.device(options.device)
    grid = list(itertools.product(options.shapes, options.densities))
    for shape, density in progress(grid, "sparse_linear"):
        rows, cols = map(int, shape.split("x"))
        generator = torch.Generator(device=device).manual_seed(0)
        mask = torch.rand(rows, cols, device=device, generator=generator) < density
        for dtype, batch, mode in itertools.product(options.dtypes, options.batches, ("forward", "training")):
            job = partial(_measure, mask, dtype, batch, mode == "training", options.budget_ms)
            shared = {"shape": shape, "density": density, "dtype": dtype, "batch": batch, "mode": mode}
            out.add(**shared, **attempt(job))
    return out.path


def _measure(mask: torch.Tensor, dtype: str, batch: int, training: bool, budget_ms: float) -> dict[str, Any]:
    layer = SparseLinear(mask.size(1), mask.size(0), mask, dtype=DTYPES[dtype])
    layer.adjacency.prepare()
    x = torch.randn(batch, mask.size(1), device=mask.device).to(DTYPES[dtype]).requires_grad_(training)
    gradient = torch.ones(batch, mask.size(0), device=mask.device, dtype=x.dtype)

    def step(algorithm: str) -> None:
        layer.algorithm = algorithm
        out = layer(x)
        if training:
            torch.autograd.grad(out, (x, *layer.parameters()), gradient)

    calls = {algorithm: partial(step, algorithm) for algorithm in ("sparse", "dense")}
    with torch.set_grad_enabled(training):
        if mask.device.type == "cuda":
            timings = {key: step_time(call, mask.device, budget_ms=budget_ms) for key, call in calls.items()}
        else:
            timings = wall_times(calls, mask.device, least=5, most=5)
    layer.algorithm = "auto"
    pick = layer._algorithm(x.dtype, batch)
    times = {key: timing.median_ms for key, timing in timings.items()}
    return {
        **{f"{key}_ms": round(time, 6) for key, time in times.items()},
        "pick": pick,
        "regret": round(times[pick] / min(times.values()), 4),
    }
