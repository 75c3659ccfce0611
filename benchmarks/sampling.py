"""Neighbour sampling: edges per second against plain PyTorch, and an epoch of GraphSAGE from the loader."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from .runner import Benchmark, Cell, Job, Run, option, progress, release, synchronise
from .timing import wall_times

PRECISIONS = {"float32": None, "bf16-amp": torch.bfloat16}
#: Untimed batches before a long epoch, in which steps are recorded.
_WARM_UP = 64
#: Number of sets of random seeds. They are made before sampling is timed, and reused in a cycle.
_SEEDS = 32


def cells(run: Run, name: str | None) -> Iterator[Job | Cell]:
    """All cells of one graph. None: those of papers, if the command line asks for them."""
    if name is None:
        yield from _papers(run)
        return
    graph = suite.load(name, run.device)
    if "draw" in run.options.parts:
        yield from _draw(graph, run.options)
        if run.device.type == "cuda":
            yield from _draw(suite.Graph(graph.name, graph.rowptr.cpu(), graph.col.cpu()), run.options)
    if "epoch" in run.options.parts:
        yield from _epochs(graph, run.options)


def _draw(graph: suite.Graph, options: argparse.Namespace) -> Iterator[Cell]:
    """The cells of drawing batches on the graph's device."""
    device = graph.col.device
    generator = torch.Generator(device=device).manual_seed(0)
    adjacency = graph.adjacency()
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
    times = wall_times(calls, device, budget_ms=1500, max_calls=100)
    for key, timing in times.items():
        result = calls[key]()
        if key.startswith("plain"):
            edges = sum(block.edge_index.size(1) for block in result[0])
        else:
            edges = sum(sum(item.counts) for item in result.blocks or [result.edges])
        cell = timing.as_cell()
        cell["edges_per_s"] = round(edges / (cell["median_ms"] / 1e3))
        where = "cpu" if device.type == "cpu" else "cuda"
        facts = {"graph": graph.name, "part": "draw", "where": where, "implementation": key}
        yield {**facts, "status": "ok", "edges": edges, **cell}


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


def _epochs(graph: suite.Graph, options: argparse.Namespace) -> Iterator[Job]:
    """The cells of epochs."""
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
            passes = train_batches(model, loader, amp, captured, sizes, table=table)
            seconds = [round(item["seconds"], 4) for item in passes[1:]]
            return {"epoch_s": statistics.median(seconds), "epochs_s": seconds, "loss": passes[-1]["loss"]}

        cell = {"graph": graph.name, "part": "epoch", "where": device.type, "implementation": name_of_step}
        yield {**cell, "precision": precision, "nodes": count}, measure


def _papers(run: Run) -> Iterator[Job]:
    """The cells of a graph of billions of entries."""
    options, device, spec = run.options, run.device, large.scaled(run.options.scale)
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
            sizes = {"batch_size": options.seeds, "shuffle": True, "device": device, "gpu_cache": cached}
            loader = NeighborLoader(data, options.fanouts, train, **sizes)
            for captured in (False, True) if graphs.CudaGraphs.supports(device) else (False,):
                cell = {"graph": "ogbn-papers100M", "part": "papers", "where": device.type}
                cell |= {"features_on": place, "cached": cached}
                cell |= {"implementation": "captured" if captured else "loop", "precision": "bf16-amp"}
                cell |= {"num_nodes": spec.nodes, "entries": adjacency.num_edges, "nodes": train.numel()}
                cell |= {"graph_s": graph_s, "features_s": features_s}
                yield cell, partial(_long_epoch, loader, captured, options)
            del loader
        del data


def _long_epoch(loader: Any, captured: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per batch of an epoch, or of its first batches, after some that are not timed."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = Sage(large.FEATURES, options.width, large.CLASSES, len(options.fanouts)).to(device)
    passes = [min(count, len(loader)) for count in (_WARM_UP, options.batches or len(loader))]
    name = f"papers, {'captured' if captured else 'loop'}"
    # Prevents the loader from copying the features to the GPU, even if they fit.
    with mock.patch.object(feature_tables, "_SHARE_OF_FREE", 0.0):
        _, timed = train_batches(model, loader, torch.bfloat16, captured, passes, name)
    seconds, batches = timed["seconds"], timed["batches"]
    cell = {
        "ms_per_batch": round(seconds / batches * 1e3, 4),
        "batches": batches,
        "nodes_per_batch": timed["nodes"] // batches,
        "loss": timed["loss"],
    }
    return {**cell, "epoch_s": round(seconds, 3)} if batches == len(loader) else cell


def train_batches(
    model: Sage,
    loader: Any,
    amp: torch.dtype | None,
    captured: bool,
    passes: Sequence[int],
    description: str = "",
    table: FeatureTable | None = None,
    reduce: Callable[[nn.Module], None] | None = None,
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
        reduce: what processes do with the gradients of the model before the optimiser's step, which is not
            captured then; None: there is one process.

    Raises:
        RuntimeError: the step was to be captured, and runs as it is.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=device.type == "cuda")

    def step(batch: Any) -> Tensor:
        y = batch.y[: batch.batch_size]
        if reduce is None:
            optimizer.zero_grad()
        with torch.autocast(device.type, amp, enabled=amp is not None):
            structures = [Adjacency.from_coo(*edges) for edges in hops_of(batch)]
            x = batch.x if table is None else table[batch.n_id]
            loss = F.cross_entropy(model(structures, x)[: y.size(0)].float(), y)
        loss.backward()
        if reduce is None:
            optimizer.step()
        return loss.detach()

    recorded: Any = capture(step) if captured else step

    def run(batch: Any) -> Tensor:
        if reduce is None:
            return recorded(batch)
        optimizer.zero_grad()
        loss = recorded(batch)
        reduce(model)
        optimizer.step()
        return loss

    done: list[dict[str, Any]] = []
    for count in passes:
        synchronise(device)
        begin, nodes = time.perf_counter(), 0
        total = torch.zeros((), device=device)
        batches = itertools.islice(loader, count)
        for batch in progress(batches, description, count) if description else batches:
            nodes += batch.n_id.numel()
            total += run(batch)
        mean = float(total) / count  # waits for the device
        done.append({"seconds": time.perf_counter() - begin, "batches": count, "nodes": nodes, "loss": mean})
    if captured and not recorded.captured.is_recorded:
        raise RuntimeError("not recorded: " + "; ".join(form.refusal for form in recorded.captured.forms))
    return done


def _cases(options: argparse.Namespace) -> list[str | None]:
    return [None] * ("papers" in options.parts) + options.graphs * (set(options.parts) != {"papers"})


def _notes(options: argparse.Namespace) -> Iterator[str]:
    yield (
        "draw: a batch by the clock, from seeds on the device to its structure, node and edge ids there, and"
        " sizes on the host; 'blocks' draws anew for all nodes in every hop, as the plain sampler does, and"
        " 'once' once for every node, as PyG does"
    )
    yield (
        "epoch: sampling, gathering features and labels, GraphSAGE forward and backward, and Adam, by the"
        " clock from a finished device to a finished device; 'captured' runs the step as one CUDA graph, and"
        " where 'the step gathers' it does what the loader does else; '16 bits': from features in bfloat16"
    )
    if "papers" in options.parts:
        yield (
            "papers: the same epoch on a graph with the nodes, entries and training nodes of ogbn-papers100M,"
            " features in bfloat16 on the GPU or in page-locked memory of the host, labels on the GPU;"
            " autocast to bfloat16; 'cached' is the loader's gpu_cache, a number of nodes. Sources are drawn"
            " by degree from all nodes, so batches share fewer than citations would let them"
        )


BENCHMARK = Benchmark(
    "sampling",
    cells,
    _cases,
    graphs=["ogbn-products"],
    options={
        "seeds": option(1024, "seed nodes per batch"),
        "fanouts": option([15, 10, 5], "neighbours per hop"),
        "train_nodes": option(196_615, "seeds of an epoch"),
        "features": option(100, "width of the features"),
        "width": option(256, "width of the layers"),
        "epochs": option(5, "epochs that are timed, after one that is not"),
        "parts": option(["draw", "epoch"], choices=["draw", "epoch", "papers"]),
        "scale": option(1.0, "share of papers' nodes and entries"),
        "cached": option(0.1, "share of papers' nodes whose features the GPU keeps, once"),
        "batches": option(None, "batches of papers that are timed (default: an epoch)", type=int),
    },
    notes=_notes,
    variant=lambda options: "papers" if options.parts == ["papers"] else "",
)
