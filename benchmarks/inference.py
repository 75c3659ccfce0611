"""Exact inference over all nodes of a graph of billions of entries: time and peak memory."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fastsparse_core import Adjacency
from fastsparse_pyg import FastGATConv, FastGCNConv, FastSAGEConv, inference

from . import large
from .runner import Benchmark, Cell, Job, Run, option, peak_bytes, release, synchronise

LAYERS: dict[str, Any] = {"GCN": FastGCNConv, "SAGE": FastSAGEConv, "GAT": FastGATConv}


def cells(run: Run, place: str) -> Iterator[Job]:
    """All cells with features in one place.

    Args:
        run: the run.
        place: "GPU" or "host": of features and graph.
    """
    options, device, spec = run.options, run.device, large.scaled(run.options.scale)
    adj = large.draw(spec, device)
    x = large.features(spec.nodes, device, on_host=False)
    limit = None
    if place == "host":
        # Copies that are not page-locked, like data that was read from a file.
        x, adj = x.cpu(), adj.cpu()
        limit = int(options.memory_gb * options.scale * 1e9)
        release()
    for name in options.layers:
        cell = {"model": f"{name} 3 x {options.width}", "features_on": place, "where": device.type}
        cell |= {"num_nodes": spec.nodes, "entries": adj.num_edges, "memory_gb": limit and limit / 1e9}
        yield cell, partial(_infer, LAYERS[name], adj, x, limit, options)


def _infer(layer: Any, adj: Adjacency, x: Tensor, limit: int | None, options: argparse.Namespace) -> Cell:
    """Seconds and peak memory of a pass over all nodes, after a pass over few nodes to warm up."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    widths = (large.FEATURES, *(options.width,) * 3)
    model: list[Any] = []
    for sizes in itertools.pairwise(widths):
        model += [layer(*sizes).to(device, torch.bfloat16).eval(), torch.relu]
    data = Data(x=x, edge_index=adj)
    release()
    inference(model, data, rows=torch.arange(16), memory=limit)
    seconds: list[float] = []
    found: list[Tensor] = []

    def step() -> None:
        begin = time.perf_counter()
        found[:] = [inference(model, data, memory=limit)]
        synchronise(device)
        seconds.append(time.perf_counter() - begin)

    peak = peak_bytes(step, device)
    if peak is None:
        step()
    # The same results for some nodes, computed only from what these nodes depend on.
    rows = torch.randint(adj.num_dst, (64,), generator=torch.Generator().manual_seed(0))
    some = inference(model, data, rows=rows, memory=limit).float()
    error = (found[0][rows.to(found[0].device)].to(device).float() - some).norm() / some.norm()
    cell = {"seconds": round(seconds[0], 3), "error": float(error)}
    cell |= {"result_on": "GPU" if found[0].is_cuda else "host"}
    return cell | ({} if peak is None else {"peak_gb": round(peak / 1e9, 2)})


BENCHMARK = Benchmark(
    "inference",
    cells,
    "features",
    options={
        "features": option(choices=["GPU", "host"]),
        "layers": option(choices=list(LAYERS)),
        "scale": option(1.0, "share of the nodes and entries, and of the memory"),
        "width": option(256, "width of the layers"),
        "memory_gb": option(16.0, "limit of the GPU's memory with features on the host, at scale 1"),
    },
    notes=(
        "seconds: one exact pass of three layers over all nodes of a random graph, in bfloat16; 'host':"
        " features and graph are in pageable host memory; error: against a pass for 64 nodes; peak: of all"
        " memory that PyTorch took of the GPU, graph and features included",
    ),
)
