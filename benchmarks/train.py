"""Training step and inference of a three-layer GCN with FastGCNConv and with PyG's GCNConv.

The model is gcn3-128: 128 input features, GCNConv 128-128-40 with ReLU between, cross entropy over all nodes,
Adam. Peak memory is the allocator's, above edge list and features (so what our layer caches counts).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from fastsparse_pyg import FastGCNConv, clear_cache

from . import suite
from .common import add_common, attempt, progress, recorder, release
from .record import Recorder
from .timing import step_time

GRAPHS = ("pubmed", "ogbn-arxiv", "yelp", "reddit", "ogbn-products")
WIDTHS = (128, 128, 128, 40)
DTYPES = ("float32", "bf16-amp")

#: implementation -> (layer, options of the layer, form of the graph)
IMPLEMENTATIONS: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "FastGCNConv": (FastGCNConv, {}, "edge_index"),
    "PyG edge_index": (GCNConv, {}, "edge_index"),
    "PyG edge_index, cached": (GCNConv, {"cached": True}, "edge_index"),
    "PyG sparse_csr": (GCNConv, {}, "sparse_csr"),
}


class GCN(nn.Module):
    def __init__(self, layer: type[nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        pairs = itertools.pairwise(WIDTHS)
        self.convs = nn.ModuleList(layer(wide, narrow, **options) for wide, narrow in pairs)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.relu(conv(x, graph))
        return self.convs[-1](x, graph)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), help=suite.NAMES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    names = tuple(IMPLEMENTATIONS)
    parser.add_argument("--implementations", nargs="+", choices=names, default=list(names))
    parser.add_argument("--budget-ms", type=float, default=1000.0, help="time to spend on each timing")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    out = recorder("train", options)
    for name in progress(options.graphs, "train"):
        # One form of the graph at a time: peak memory must not depend on the other's presence.
        for form in ("edge_index", "sparse_csr"):
            _run_form(name, form, options, out)
            release()
    return out.path


def _run_form(name: str, form: str, options: argparse.Namespace, out: Recorder) -> None:
    """All cells of one graph in one form; what they hold on the device ends with the call."""
    device = torch.device(options.device)
    names = [key for key in options.implementations if IMPLEMENTATIONS[key][2] == form]
    if not names:
        return
    graph = suite.load(name, device)
    nodes, edges = graph.num_nodes, graph.num_edges
    structure = graph.edge_index() if form == "edge_index" else graph.sparse_csr()
    del graph
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(nodes, WIDTHS[0], generator=generator, device=device)
    y = torch.randint(WIDTHS[-1], (nodes,), generator=generator, device=device)
    for dtype, implementation in itertools.product(options.dtypes, names):
        clear_cache()
        release()
        layer, layer_options, _ = IMPLEMENTATIONS[implementation]
        job = partial(measure, layer, layer_options, structure, x, y, dtype, options.budget_ms)
        out.add(
            graph=name,
            nodes=nodes,
            edges=edges,
            model="gcn3-128",
            dtype=dtype,
            implementation=implementation,
            **attempt(job),
        )


def measure(
    layer: type[nn.Module],
    layer_options: dict[str, Any],
    structure: Tensor,
    x: Tensor,
    y: Tensor,
    dtype: str,
    budget_ms: float,
) -> dict[str, Any]:
    """Times training steps and inference of one model; the graph is cached after the first call."""
    device = x.device
    cuda = device.type == "cuda"
    amp = torch.autocast(device.type, torch.bfloat16) if dtype == "bf16-amp" else contextlib.nullcontext()
    before = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    model = GCN(layer, layer_options).to(device)
    optimiser = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimiser.zero_grad()
        with amp:
            loss = F.cross_entropy(model(x, structure), y)
        loss.backward()
        optimiser.step()

    def infer() -> None:
        with torch.no_grad(), amp:
            model(x, structure)

    model.train()
    train = step_time(step, device, budget_ms=budget_ms)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 1e9 if cuda else None
    model.eval()
    inference = step_time(infer, device, budget_ms=budget_ms / 2)
    return {**train.as_cell(), **inference.as_cell("infer_"), "peak_gb": peak}
