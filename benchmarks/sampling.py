"""Neighbour sampling: edges per second against plain PyTorch, and an epoch of GraphSAGE from the loader."""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from fastsparse_core import Adjacency, capture
from fastsparse_core.capturing import graphs
from fastsparse_core.sampling import FeatureTable, NeighborSampler
from fastsparse_core.sampling import features as feature_tables
from fastsparse_pyg import FastSAGEConv, NeighborLoader

from . import blocks, large, suite
from .common import add_common, attempt, progress, recorder, release
from .timing import wall_times

PRECISIONS = {"float32": None, "bf16-amp": torch.bfloat16}
#: Batches that are not timed where an epoch is long: steps are recorded meanwhile.
_WARM_UP = 64
#: Sets of seeds that are drawn before drawing is timed, and taken in turn.
_SEEDS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, graphs=["ogbn-products"])
    parser.add_argument("--seeds", type=int, default=1024, help="seed nodes per batch")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5], help="neighbours per hop")
    parser.add_argument("--train-nodes", type=int, default=196_615, help="seeds of an epoch")
    parser.add_argument("--features", type=int, default=100, help="width of the features")
    parser.add_argument("--width", type=int, default=256, help="width of the layers")
    parser.add_argument("--epochs", type=int, default=5, help="epochs that are timed, after one that is not")
    parser.add_argument("--parts", nargs="+", choices=["draw", "epoch", "papers"], default=["draw", "epoch"])
    parser.add_argument("--scale", type=float, default=1.0, help="share of papers' nodes and entries")
    parser.add_argument(
        "--cached", type=float, default=0.1, help="share of papers' nodes whose features the GPU keeps, once"
    )
    parser.add_argument("--batches", type=int, help="batches of papers that are timed (default: an epoch)")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record."""
    device = torch.device(options.device)
    out = recorder("sampling", options, variant="papers" if options.parts == ["papers"] else "")
    out.note(
        "draw: a batch by the clock, from seeds on the device to its structure, node and edge ids there, and"
        " sizes on the host; 'blocks' draws anew for all nodes in every hop, as the plain sampler does, and"
        " 'once' once for every node, as PyG does"
    )
    out.note(
        "epoch: sampling, gathering features and labels, GraphSAGE forward and backward, and Adam, by the"
        " clock from a finished device to a finished device; 'captured' runs the step as one CUDA graph, and"
        " where 'the step gathers' it does what the loader does else; '16 bits': from features in bfloat16"
    )
    if "papers" in options.parts:
        out.note(
            "papers: the same epoch on a graph with the nodes, entries and training nodes of ogbn-papers100M,"
            " features in bfloat16 on the GPU or in page-locked memory of the host, labels on the GPU;"
            " autocast to bfloat16; 'cached' is the loader's gpu_cache, a number of nodes. Sources are drawn"
            " by degree from all nodes, so batches share fewer than citations would let them"
        )
        _papers(out, options)
    if set(options.parts) == {"papers"}:
        return out.path
    for name in progress(options.graphs, "sampling"):
        graph = suite.load(name, device)
        if "draw" in options.parts:
            _draw(out, name, graph, options)
            if device.type == "cuda":
                on_cpu = suite.Graph(graph.name, graph.rowptr.cpu(), graph.col.cpu())
                _draw(out, name, on_cpu, options)
                del on_cpu
        if "epoch" in options.parts:
            _epochs(out, name, graph, options)
    return out.path


def _draw(out: Any, name: str, graph: suite.Graph, options: argparse.Namespace) -> None:
    """Adds the cells of drawing batches where the graph lies."""
    device = graph.col.device
    generator = torch.Generator(device=device).manual_seed(0)
    adjacency = Adjacency.from_csr(graph.rowptr, graph.col, (graph.num_nodes, graph.num_nodes))
    samplers = {
        "NeighborSampler, blocks": NeighborSampler(adjacency, options.fanouts, blocks=True),
        "NeighborSampler, once": NeighborSampler(adjacency, options.fanouts),
    }

    drawn = [
        torch.randint(graph.num_nodes, (options.seeds,), device=device, generator=generator).unique()
        for _ in range(_SEEDS)
    ]
    turns = {key: itertools.cycle(drawn) for key in [*samplers, "plain PyTorch, blocks"]}
    calls: dict[str, Callable[[], Any]] = {
        key: lambda key=key, sampler=sampler: sampler.sample(next(turns[key]))
        for key, sampler in samplers.items()
    }
    calls["plain PyTorch, blocks"] = lambda: blocks.sample(
        graph, next(turns["plain PyTorch, blocks"]), options.fanouts, generator
    )
    times = wall_times(calls, device, budget_ms=1500, most=100)
    for key, timing in times.items():
        result = calls[key]()
        if key.startswith("plain"):
            edges = sum(block.edge_index.size(1) for block in result[0])
        else:
            edges = sum(sum(item.counts) for item in result.blocks or [result.edges])
        cell = timing.as_cell()
        cell["edges_per_s"] = round(edges / (cell["median_ms"] / 1e3))
        where = "cpu" if device.type == "cpu" else "cuda"
        out.add(graph=name, part="draw", where=where, implementation=key, status="ok", edges=edges, **cell)


class Sage(nn.Module):
    """GraphSAGE on the hops of a batch: every layer reads only the nodes that the next one needs."""

    def __init__(self, features: int, width: int, classes: int, depth: int) -> None:
        super().__init__()
        sizes = [features, *[width] * (depth - 1), classes]
        self.convs = nn.ModuleList(FastSAGEConv(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, structures: Sequence[Adjacency], x: Tensor) -> Tensor:
        for place, (conv, structure) in enumerate(zip(self.convs, structures, strict=True)):
            x = x.relu() if place else x
            x = conv((x, x[: structure.num_dst]), structure)
        return x


def hops_of(batch: Any) -> list[tuple[Tensor, Tensor, tuple[int, int]]]:
    """Edges of every layer, the first layer's first: what `Adjacency.from_coo` takes."""
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    source, destination = batch.edge_index
    layers = []
    for hops in range(len(edges), 0, -1):
        count = sum(edges[:hops])
        layers.append((destination[:count], source[:count], (sum(nodes[:hops]), sum(nodes[: hops + 1]))))
    return layers


def _epochs(out: Any, name: str, graph: suite.Graph, options: argparse.Namespace) -> None:
    """Adds the cells of epochs."""
    device, classes = graph.col.device, 47
    generator = torch.Generator(device=device).manual_seed(0)
    data = Data(
        x=torch.randn(graph.num_nodes, options.features, device=device, generator=generator),
        y=torch.randint(classes, (graph.num_nodes,), device=device, generator=generator),
        edge_index=graph.edge_index(),
    )
    count = min(options.train_nodes, graph.num_nodes)
    train = torch.randperm(graph.num_nodes, device=device, generator=generator)[:count]
    tables = {
        dtype: FeatureTable(data.x.to(dtype), device, aligned=True)
        for dtype in (torch.float32, torch.bfloat16)
    }
    steps: dict[str, tuple[bool, torch.dtype | None]] = {"loop": (False, None)}
    if graphs.CudaGraphs.supports(device):
        steps["captured"] = (True, None)
        steps["captured, the step gathers"] = (True, torch.float32)
        steps["captured, the step gathers 16 bits"] = (True, torch.bfloat16)
    for (precision, amp), (name_of_step, (captured, gathers)) in itertools.product(
        PRECISIONS.items(), steps.items()
    ):
        if gathers is torch.bfloat16 and amp is None:
            continue
        given = data
        if gathers is not None:
            given = Data(y=data.y, edge_index=data.edge_index, num_nodes=graph.num_nodes)
        loader = NeighborLoader(
            given, options.fanouts, train, batch_size=options.seeds, shuffle=True, device=device
        )

        def measure(
            loader: Any = loader,
            amp: torch.dtype | None = amp,
            captured: bool = captured,
            table: FeatureTable | None = None if gathers is None else tables[gathers],
        ) -> dict[str, Any]:
            torch.manual_seed(0)
            model = Sage(options.features, options.width, classes, len(options.fanouts)).to(device)
            sizes = [len(loader)] * (options.epochs + 1)
            passes = _train(model, loader, amp, captured, sizes, table=table)
            seconds = [round(item["seconds"], 4) for item in passes[1:]]
            return {"epoch_s": statistics.median(seconds), "epochs_s": seconds, "loss": passes[-1]["loss"]}

        out.add(
            graph=name,
            part="epoch",
            where=device.type,
            implementation=name_of_step,
            precision=precision,
            nodes=count,
            **attempt(measure),
        )


def _papers(out: Any, options: argparse.Namespace) -> None:
    """Adds the cells of a graph of billions of entries."""
    device, spec = torch.device(options.device), large.scaled(options.scale)
    begin = time.perf_counter()
    adjacency = large.draw(spec, device)
    generator = torch.Generator(device=device).manual_seed(0)
    y = torch.randint(large.CLASSES, (spec.nodes,), device=device, generator=generator)
    train = torch.randperm(spec.nodes, device=device, generator=generator)
    train = train[: max(int(large.TRAIN_NODES * options.scale), 1)].clone()
    graph_s = round(time.perf_counter() - begin, 1)
    on_gpu = device.type == "cuda"
    for place in ("GPU", "host") if on_gpu else ("host",):
        release()
        begin = time.perf_counter()
        x = large.features(spec.nodes, device, on_host=place == "host")
        features_s = round(time.perf_counter() - begin, 1)
        data = Data(x=x, y=y, edge_index=adjacency)
        del x
        for cached in (0, int(options.cached * spec.nodes)) if on_gpu and place == "host" else (0,):
            loader = NeighborLoader(
                data,
                options.fanouts,
                train,
                batch_size=options.seeds,
                shuffle=True,
                device=device,
                gpu_cache=cached,
            )
            for captured in (False, True) if graphs.CudaGraphs.supports(device) else (False,):
                out.add(
                    graph="ogbn-papers100M",
                    part="papers",
                    where=device.type,
                    features_on=place,
                    cached=cached,
                    implementation="captured" if captured else "loop",
                    precision="bf16-amp",
                    num_nodes=spec.nodes,
                    entries=adjacency.num_edges,
                    nodes=train.numel(),
                    graph_s=graph_s,
                    features_s=features_s,
                    **attempt(functools.partial(_long_epoch, loader, captured, options)),
                )
            del loader
        del data


def _long_epoch(loader: Any, captured: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per batch of an epoch, or of its first batches, after some that are not timed."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = Sage(large.FEATURES, options.width, large.CLASSES, len(options.fanouts)).to(device)
    passes = [min(count, len(loader)) for count in (_WARM_UP, options.batches or len(loader))]
    name = f"papers, {'captured' if captured else 'loop'}"
    # Where there is room for them, the loader would copy the features to the GPU.
    with mock.patch.object(feature_tables, "_SHARE_OF_FREE", 0.0):
        _, timed = _train(model, loader, torch.bfloat16, captured, passes, name)
    seconds, batches = timed["seconds"], timed["batches"]
    cell = {
        "ms_per_batch": round(seconds / batches * 1e3, 4),
        "batches": batches,
        "nodes_per_batch": timed["nodes"] // batches,
        "loss": timed["loss"],
    }
    return {**cell, "epoch_s": round(seconds, 3)} if batches == len(loader) else cell


def _train(
    model: Sage,
    loader: Any,
    amp: torch.dtype | None,
    captured: bool,
    passes: Sequence[int],
    description: str = "",
    table: FeatureTable | None = None,
) -> list[dict[str, Any]]:
    """Seconds, batches, nodes and mean loss of passes over so many batches each.

    Args:
        model: trained with Adam.
        loader: of batches.
        amp: dtype of autocast; None: off.
        captured: whether the step is to become a CUDA graph.
        passes: numbers of batches.
        description: of a progress bar; "": none.
        table: of features that the step gathers; None: those of the batch.

    Raises:
        RuntimeError: the step was to be captured, and runs as it is.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=device.type == "cuda")

    def step(batch: Any) -> Tensor:
        y = batch.y[: batch.batch_size]
        optimizer.zero_grad()
        with torch.autocast(device.type, amp, enabled=amp is not None):
            structures = [Adjacency.from_coo(*edges) for edges in hops_of(batch)]
            x = batch.x if table is None else table[batch.n_id]
            loss = F.cross_entropy(model(structures, x)[: y.size(0)].float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = capture(step) if captured else step
    done: list[dict[str, Any]] = []
    for count in passes:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin, nodes = time.perf_counter(), 0
        total = torch.zeros((), device=device)
        batches = itertools.islice(loader, count)
        for batch in progress(batches, description, count) if description else batches:
            nodes += batch.n_id.numel()
            total += run(batch)
        mean = float(total) / count  # waits for the device
        done.append({"seconds": time.perf_counter() - begin, "batches": count, "nodes": nodes, "loss": mean})
    if captured and not run.captured.is_recorded:
        raise RuntimeError("not recorded: " + "; ".join(form.refusal for form in run.captured.forms))
    return done
