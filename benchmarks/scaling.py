"""Several GPUs of one machine: full-graph training with divided rows, and mini-batches with DDP.

One command starts a process per GPU. All graphs are drawn once, by the first process, and sent to the others.

- ``full``: gcn3-256, GCNConv 100-256-256-47, cross entropy over all nodes, Adam; one GPU has an Adjacency,
  more have a PartitionedAdjacency. The time of a step is that of the slowest process. Logits and gradients
  of the first step are compared with one GPU's. Variants: ``overlap`` (exchange during the local product),
  ``in turn`` (exchange, then one product over all columns), ``16-bit halo`` (of float32 features); the first
  and the last also with a given number of tiles of columns in place of the chosen one, or with ``cached
  inputs``, whose halo travels in the first step only.
- ``ddp``: sage3-256 on batches of 1024 and of 8192 nodes for each GPU with 15, 10 and 5 neighbours, drawn on
  the GPU by PyTorch's operators, with replacement; throughput with sampling, which is a batch ahead of
  training, and of batches that were drawn before.
- ``papers``: an epoch of sage3-256 from the loader on the graph of `benchmarks/large.py`, with captured
  steps; every GPU has all features, or its share of them and reads those of the others.
- ``large``: training steps on all nodes of the symmetric graph of `benchmarks/large.py`.

Where NVLink multicast must stay off, say so in the command:
``NCCL_NVLS_ENABLE=0 python -m benchmarks scaling``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from fastsparse_core import Adjacency, policy
from fastsparse_core.capturing import graphs
from fastsparse_core.distributed import PartitionedAdjacency, all_reduce_gradients, exchange_group, partition
from fastsparse_core.distributed.exchange import HaloFeatures
from fastsparse_core.sampling import FeatureTable
from fastsparse_pyg import FastGCNConv, NeighborLoader

from . import large, suite
from .record import Recorder
from .runner import add_common, recorder, release
from .sampling import Sage, train_batches
from .timing import summarise
from .train import DTYPES, Stack, autocast

GRAPHS = ("ogbn-products", "amazonproducts")
DDP_GRAPH = "ogbn-products"
PARTS = ("full", "ddp", "papers", "large")
#: Options of the PartitionedAdjacency for each variant of full-graph training.
VARIANTS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "in turn": {"overlap": False},
    "16-bit halo": {"halo_dtype": torch.bfloat16},
    "cached inputs": {"cache_inputs": True},
    "16-bit halo, cached inputs": {"halo_dtype": torch.bfloat16, "cache_inputs": True},
}
DEFAULT_VARIANTS = tuple(VARIANTS)
VARIANTS |= {
    f"{name}, {tiles}": VARIANTS[name] | {"tiles": count}
    for name in ("overlap", "16-bit halo")
    for tiles, count in (("1 tile", 1), ("2 tiles", 2), ("4 tiles", 4))
}

#: Features and classes of ogbn-products.
IN_CHANNELS, HIDDEN, CLASSES = 100, 256, 47
FANOUTS = (15, 10, 5)

#: Number of times that mini-batches are timed; each time is the mean over several steps.
ROUNDS = 5

#: Steps after which every structure is converted for its kernels.
WARM_UP = policy.REUSE + 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    here = torch.cuda.device_count()
    default = [count for count in (1, 2, 4, 8) if count <= here] or [1, 2]
    parser.add_argument("--gpus", nargs="+", type=int, default=default, help="numbers of GPUs, or processes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:2]))
    parser.add_argument("--scale", type=float, default=1.0, help="share of papers' nodes, and of large's")
    parser.add_argument(
        "--activations", nargs="+", choices=["GPU", "host"], default=["GPU"], help="where large keeps them"
    )
    parser.add_argument(
        "--layers", nargs="+", choices=large.LAYERS, default=list(large.LAYERS), help="of large"
    )
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), help="of full-graph training")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(DEFAULT_VARIANTS),
        help="the first alone on further graphs",
    )
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[1024, 8192], help="nodes of a mini-batch, for each GPU"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed training steps")


def run(options: argparse.Namespace) -> Path:
    """Runs the benchmark; returns the path of its record.

    Raises:
        ValueError: There are fewer GPUs than asked for.
    """
    counts = sorted({1, *options.gpus})
    if torch.device(options.device).type == "cuda" and counts[-1] > torch.cuda.device_count():
        raise ValueError(f"--gpus {counts[-1]}: this machine has {torch.cuda.device_count()}")
    names = {*options.graphs, DDP_GRAPH} & set(suite.SUITE)
    specs = {name: suite.SUITE[name] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (counts, folder, options, specs)
        torch.multiprocessing.spawn(_process, arguments, nprocs=counts[-1])
        return Path(Path(folder, "record").read_text())


@dataclass
class Team:
    """The processes of one measurement.

    Attributes:
        rank: Of this process.
        size: Number of processes that take part; they have the lowest ranks.
        device: Of this process.
        group: Their group.
    """

    rank: int
    size: int
    device: torch.device
    group: Any

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of every number over the processes."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of every number over the processes."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def step_ms(self, step: Callable[[], None], count: int) -> list[float]:
        """Milliseconds of each of some steps back to back, of the slowest process."""
        self.barrier()
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(count):
                step()
                marks.append(time.perf_counter())
            return self.largest([(end - start) * 1e3 for start, end in itertools.pairwise(marks)])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize(self.device)
        return self.largest([start.elapsed_time(end) for start, end in itertools.pairwise(events)])

    def mean_ms(self, step: Callable[[], None], count: int) -> float:
        """Milliseconds per step, from the total time of consecutive steps in the slowest process.

        Throughput counts from this: processes wait for each other in every step, and a different process is
        the slowest each time, so the sum of the slowest times exceeds the elapsed time.
        """
        self.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        (passed,) = self.largest([time.perf_counter() - begin])
        return passed * 1e3 / count

    def barrier(self) -> None:
        """Waits for the others, and for all that the device has to do."""
        dist.barrier(group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _process(
    rank: int, counts: list[int], folder: str, options: argparse.Namespace, specs: dict[str, suite.Spec]
) -> None:
    """One process. It takes part in all measurements with enough processes."""
    suite.SUITE.update(specs)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(Path(folder, "meeting")), counts[-1])
    patience = timedelta(minutes=10)
    dist.init_process_group(backend, store=store, rank=rank, world_size=counts[-1], timeout=patience)
    teams = [Team(rank, size, device, exchange_group(list(range(size)))) for size in counts]
    variant = "" if {"full", "ddp"} & set(options.parts) else "large"
    out = recorder("scaling", options, device=device, variant=variant) if rank == 0 else None
    if out is not None:
        Path(folder, "record").write_text(str(out.path))
        _explain(out)
        out.write()
    for name in options.graphs if "full" in options.parts else ():
        _full(name, teams, options, out)
        release()
    if "ddp" in options.parts:
        _ddp(teams, options, out)
    if "papers" in options.parts:
        _papers(teams, options, out, folder)
    for kind in options.layers if "large" in options.parts else ():
        _large(kind, teams, options, out)
        release()
    dist.barrier()
    dist.destroy_process_group()


def _explain(out: Recorder) -> None:
    out.note(
        "times are those of the slowest process, medians over steps back to back; one GPU computes with an"
        " Adjacency, several with a PartitionedAdjacency of consecutive nodes with about as many edges each"
    )
    out.note(
        "the stand-ins draw most edges across the whole graph, so that nearly every row is halo for every"
        " rank: 'cut' is the share of edges between ranks, 'halo' that of the rows that arrive, of all that"
        " could; exchange: features of width 256 to the halo and nothing else, and its bytes into a GPU"
    )
    out.note(
        "papers: an epoch of all training nodes of a random graph, by the clock, of the slowest process;"
        " large: forward, backward and Adam in bfloat16 under `tiled`"
    )
    out.note("error: relative Frobenius distance to one GPU, the larger of logits and gradients' of a step")


def _summary(milliseconds: Sequence[float]) -> dict[str, Any]:
    """Median, spread and number of measurements; scaling names no method."""
    found = asdict(summarise(milliseconds, ""))
    del found["method"]
    return found


def _add(out: Recorder | None, **cell: Any) -> None:
    """Keeps and shows a cell, on the process that has the record."""
    if out is None:
        return
    out.add(**cell)
    names = (cell[key] for key in ("kind", "graph", "dtype", "variant"))
    print(*names, f"on {cell['gpus']}: {cell['median_ms']:.1f} ms", file=sys.stderr)


def _shared_graph(name: str, team: Team) -> suite.Graph:
    """The graph, drawn by the first process and sent to the others, whose rounding may differ."""
    sizes = torch.zeros(2, dtype=torch.int64, device=team.device)
    graph = None
    if team.rank == 0:
        graph = suite.load(name, team.device)
        sizes = torch.tensor([graph.num_nodes, graph.num_edges], device=team.device)
    dist.broadcast(sizes, 0)
    nodes, edges = sizes.tolist()
    if graph is None:
        lengths = (nodes + 1, edges)
        graph = suite.Graph(name, *(torch.empty(n, dtype=torch.int32, device=team.device) for n in lengths))
    for part in (graph.rowptr, graph.col):
        dist.broadcast(part, 0)
    return graph


# ---------------------------------------------------------------- the whole graph


@dataclass
class FirstStep:
    """The results of one GPU, as a reference: logits, and the parameters' gradients."""

    logits: Tensor
    gradients: list[Tensor]


def _full(name: str, teams: Sequence[Team], options: argparse.Namespace, out: Recorder | None) -> None:
    """All cells of full-graph training on one graph."""
    graph = _shared_graph(name, teams[-1])
    facts = {"kind": "full", "graph": name, "nodes": graph.num_nodes, "edges": graph.num_edges}
    for dtype in options.dtypes:
        first: FirstStep | None = None
        for team in teams:
            variants = options.variants if name == options.graphs[0] else options.variants[:1]
            variants = [v for v in variants if "halo_dtype" not in VARIANTS[v] or dtype == "float32"]
            for variant in variants if team.size > 1 else ["one GPU"]:
                if team.rank < team.size:
                    cell, found = _train_full(graph, team, dtype, variant, first, options.steps)
                    if team.size == 1:
                        first = found
                    _add(out, **facts, dtype=dtype, gpus=team.size, variant=variant, **cell)
                release()
                dist.barrier()
            if team.size == 1:
                first = _sent(first, graph.num_nodes, teams[-1])


def _sent(first: FirstStep | None, nodes: int, team: Team) -> FirstStep:
    """The results of the first process, sent to all."""
    if first is None:
        logits = torch.empty(nodes, CLASSES, device=team.device)
        first = FirstStep(logits, [torch.empty_like(p) for p in _gcn().to(team.device).parameters()])
    for tensor in (first.logits, *first.gradients):
        dist.broadcast(tensor, 0)
    return first


def _gcn() -> nn.Module:
    widths = (IN_CHANNELS, HIDDEN, HIDDEN, CLASSES)
    return Stack([FastGCNConv(wide, narrow) for wide, narrow in itertools.pairwise(widths)])


def _train_full(
    graph: suite.Graph, team: Team, dtype: str, variant: str, first: FirstStep | None, steps: int
) -> tuple[dict[str, Any], FirstStep]:
    """Time, memory and error of training steps on one team, and the results of the first step."""
    device, cuda = team.device, team.device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    shape = (graph.num_nodes, graph.num_nodes)
    adj: Adjacency
    if team.size == 1:
        adj = Adjacency.from_coo(graph.row(), graph.col, shape, self_loops="append")
    else:
        parts = partition(Adjacency(graph.rowptr.long(), graph.col, shape), team.size, "contiguous")
        adj = PartitionedAdjacency.from_csr(
            graph.rowptr,
            graph.col,
            parts,
            group=team.group,
            self_loops="append",
            **VARIANTS[variant],
        )
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    (build_ms,) = team.largest([(time.perf_counter() - begin) * 1e3])
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(graph.num_nodes, IN_CHANNELS, generator=generator, device=device)
    y = torch.randint(CLASSES, (graph.num_nodes,), generator=generator, device=device)
    if isinstance(adj, PartitionedAdjacency):
        x, y = adj.scatter(x).clone(), adj.scatter(y).clone()
    torch.manual_seed(0)
    model = _gcn().to(device)
    optimiser = torch.optim.Adam(model.parameters())

    def forward() -> Tensor:
        with autocast(device, dtype):
            return model(x, adj)

    def backward(logits: Tensor) -> None:
        optimiser.zero_grad()
        (F.cross_entropy(logits.float(), y, reduction="sum") / graph.num_nodes).backward()
        if team.size > 1:
            all_reduce_gradients(model, team.group)

    def step() -> None:
        backward(forward())
        optimiser.step()

    logits = forward()
    backward(logits)
    found = FirstStep(
        logits.detach().float(), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    )
    cell: dict[str, Any] = {"build_ms": build_ms, "error": 0.0}
    if first is not None and isinstance(adj, PartitionedAdjacency):
        cell["error"] = _error(found, first, adj, team)
    del logits
    for _ in range(WARM_UP):
        step()
    cell |= _summary(team.step_ms(step, steps))
    if cuda:
        peak = torch.cuda.max_memory_allocated(device) - before
        (cell["peak_gb"],) = team.largest([peak / 1e9])
    if isinstance(adj, PartitionedAdjacency):
        cell |= _exchange(adj, team, dtype)
    return cell, found


def _error(found: FirstStep, first: FirstStep, adj: PartitionedAdjacency, team: Team) -> float:
    """Difference from one GPU's results: the larger of the logits' and the gradients'."""
    logits = adj.scatter(first.logits)
    squares = team.total(
        [(found.logits.double() - logits).square().sum().item(), logits.double().square().sum().item()]
    )
    errors = [(squares[0] / squares[1]) ** 0.5]
    for ours, theirs in zip(found.gradients, first.gradients, strict=True):
        errors.append(((ours.double() - theirs).norm() / theirs.double().norm().clamp(min=1e-300)).item())
    return max(errors)


def _exchange(adj: PartitionedAdjacency, team: Team, dtype: str) -> dict[str, Any]:
    """Statistics of the division, and an exchange of the hidden width alone."""
    features = torch.bfloat16 if dtype == "bf16-amp" else torch.float32
    x = torch.randn(adj.num_dst, HIDDEN, device=team.device, dtype=features)
    sent = adj.halo_dtype or features
    tiles = adj.num_tiles(HIDDEN, features)

    def exchange() -> None:
        for _ in HaloFeatures(adj.exchange, x, adj.halo_dtype, tiles).tiles():
            pass

    exchange()
    times = team.step_ms(exchange, 5)
    facts = adj.statistics
    return {
        "edge_cut": facts.edge_cut,
        "halo_share": facts.halo_share,
        "balance": facts.balance,
        "halo_mb": max(facts.halo_rows) * HIDDEN * sent.itemsize / 1e6,
        "tiles": tiles,
        "exchange_ms": statistics.median(times),
    }


# ---------------------------------------------------------------- mini-batches


@dataclass
class Batch:
    """Nodes to train on with drawn neighbours.

    Attributes:
        nodes: int64, whose features the first layer takes; the seeds come first.
        layers: Per layer the structure, whose destinations are the first of its sources.
        y: Classes of the seeds.
    """

    nodes: Tensor
    layers: list[Adjacency]
    y: Tensor


class Sampler:
    """Draws neighbours on the device, with replacement.

    As in GraphSAGE (Hamilton et al., 2017, section 3.1), each node once however many reach it.
    """

    def __init__(self, graph: suite.Graph, y: Tensor) -> None:
        self.rowptr, self.col, self.y = graph.rowptr.long(), graph.col, y
        self.place = torch.full((graph.num_nodes,), -1, device=y.device)

    def draw(self, seeds: Tensor) -> Batch:
        """The seeds, their neighbours, and the structures between them."""
        device, place = seeds.device, self.place
        nodes = frontier = seeds
        place[seeds] = torch.arange(seeds.numel(), device=device)
        rows, cols, sizes, edges = [], [], [seeds.numel()], []
        for fanout in FANOUTS:
            begin = self.rowptr[frontier]
            degree = self.rowptr[frontier + 1] - begin
            drawn = (torch.rand(frontier.numel(), fanout, device=device) * degree[:, None]).long()
            drawn = torch.minimum(drawn, degree[:, None] - 1)
            kept = (degree > 0)[:, None].expand_as(drawn)
            source = self.col[(begin[:, None] + drawn)[kept]].long()
            rows.append(place[frontier][:, None].expand_as(drawn)[kept])
            frontier = torch.unique(source[place[source] < 0])
            place[frontier] = torch.arange(nodes.numel(), nodes.numel() + frontier.numel(), device=device)
            nodes = torch.cat([nodes, frontier])
            cols.append(place[source])
            sizes.append(nodes.numel())
            edges.append(sum(part.numel() for part in rows))
        place[nodes] = -1
        row, col = torch.cat(rows), torch.cat(cols)
        # Edges are in the order of hops, so the edges of a layer are the first ones of all edges.
        layers = [
            Adjacency.from_coo(row[: edges[hop]], col[: edges[hop]], (sizes[hop], sizes[hop + 1]))
            for hop in reversed(range(len(FANOUTS)))
        ]
        return Batch(nodes, layers, self.y[seeds])


class Prefetch:
    """Trains on a batch while the next one is drawn, on CUDA in a stream of its own.

    Drawing waits for its stream several times, for the sizes of what was found. In the stream of the training
    that would be a wait for the gradients' all-reduce too, and so, every step, for the slowest process.
    """

    def __init__(
        self, draw: Callable[[], Batch], train: Callable[[Batch], None], device: torch.device
    ) -> None:
        self.draw, self.train = draw, train
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # High priority: sampling kernels are short, and the host waits for each of them.
            self.stream = torch.cuda.Stream(device, priority=-1)
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self.trained = torch.cuda.current_stream(device).record_event()
        self.next = self._drawn()

    def step(self) -> None:
        """Launches the training on the batch that is ready, and draws another."""
        batch = self.next
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.train(batch)
        self.next = self._drawn()
        # `batch` is kept until here, so that the next batch cannot get its memory.

    def _drawn(self) -> Batch:
        if self.stream is None:
            return self.draw()
        # The new batch may get the memory of the batch before the current one, which was made on this stream
        # too. So it waits for the training step on that batch.
        before, self.trained = self.trained, torch.cuda.current_stream().record_event()
        self.stream.wait_event(before)
        with torch.cuda.stream(self.stream):
            return self.draw()


def _ddp(teams: Sequence[Team], options: argparse.Namespace, out: Recorder | None) -> None:
    """All cells of mini-batch training."""
    graph = _shared_graph(DDP_GRAPH, teams[-1])
    device = teams[-1].device
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(graph.num_nodes, IN_CHANNELS, generator=generator, device=device)
    y = torch.randint(CLASSES, (graph.num_nodes,), generator=generator, device=device)
    sampler = Sampler(graph, y)
    facts = {"kind": "ddp", "graph": DDP_GRAPH, "nodes": graph.num_nodes, "edges": graph.num_edges}
    for batch, dtype, team in itertools.product(options.batches, options.dtypes, teams):
        if team.rank < team.size:
            cell = _train_batches(sampler, x, team, dtype, batch, options.steps)
            _add(
                out,
                **facts,
                dtype=dtype,
                gpus=team.size,
                variant=f"mini-batches of {batch}",
                batch=batch,
                **cell,
            )
        release()
        dist.barrier()


def _train_batches(
    sampler: Sampler, x: Tensor, team: Team, dtype: str, batch: int, steps: int
) -> dict[str, Any]:
    """Throughput of training on batches, sampling included and not."""
    device = team.device
    torch.manual_seed(0)
    model: nn.Module = Sage(IN_CHANNELS, HIDDEN, CLASSES, len(FANOUTS)).to(device)
    if team.size > 1:
        ids = [device.index] if device.type == "cuda" else None
        # Gradients are views of the reduced buckets, which saves a copy.
        model = DistributedDataParallel(
            model, device_ids=ids, process_group=team.group, gradient_as_bucket_view=True
        )
    optimiser = torch.optim.Adam(model.parameters())
    generator = torch.Generator(device).manual_seed(1 + team.rank)
    batch = min(batch, x.size(0) // 4)

    def draw() -> Batch:
        # Distinct seeds without a permutation of all nodes: a selection of the distinct ones among random
        # nodes.
        found = torch.unique(torch.randint(x.size(0), (2 * batch,), generator=generator, device=device))
        chosen = torch.randperm(found.numel(), generator=generator, device=device)[:batch]
        return sampler.draw(found[chosen])

    def train(drawn: Batch) -> None:
        optimiser.zero_grad()
        with autocast(device, dtype):
            logits = model(drawn.layers, x[drawn.nodes])
        F.cross_entropy(logits.float(), drawn.y).backward()
        optimiser.step()

    ahead = Prefetch(draw, train, device)
    for _ in range(3):
        ahead.step()
    with_sampling = [team.mean_ms(ahead.step, steps) for _ in range(ROUNDS)]
    del ahead
    # Each batch is used once: a structure that is used again would be converted for the tensor cores.
    ready = iter([draw() for _ in range(ROUNDS * steps + 2)])
    for _ in range(2):
        train(next(ready))
    without = [team.mean_ms(lambda: train(next(ready)), steps) for _ in range(ROUNDS)]
    cell, train_ms = _summary(with_sampling), statistics.median(without)
    return cell | {
        "train_ms": train_ms,
        "seeds_per_s": team.size * batch / cell["median_ms"] * 1e3,
        "seeds_per_s_without_sampling": team.size * batch / train_ms * 1e3,
    }


# ---------------------------------------------------------------- a graph of billions of entries


def _papers(teams: Sequence[Team], options: argparse.Namespace, out: Recorder | None, folder: str) -> None:
    """Epochs with the features on every GPU, and on several with the features divided over all of them."""
    device, spec = teams[-1].device, large.scaled(options.scale)
    adj = large.draw(spec, device)
    generator = torch.Generator(device).manual_seed(0)
    y = torch.randint(large.CLASSES, (spec.nodes,), device=device, generator=generator)
    train = torch.randperm(spec.nodes, device=device, generator=generator)
    train = train[: max(int(large.TRAIN_NODES * options.scale), 1)].clone()
    size = spec.nodes * large.FEATURES
    file = torch.from_file(str(Path(folder, "features")), shared=True, size=size, dtype=torch.bfloat16)
    x = file.view(spec.nodes, large.FEATURES)
    if teams[-1].rank == 0:
        large.features(spec.nodes, device, on_host=True, out=x)
    dist.barrier()
    facts = {"kind": "papers", "graph": "ogbn-papers100M", "nodes": spec.nodes, "edges": adj.num_edges}
    for batch, team in itertools.product(options.batches, teams):
        for divided in (False, True)[: 1 + (team is teams[-1] and team.size > 1)]:
            if team.rank < team.size:
                name = "features divided" if divided else "features on every GPU"
                seconds = _epoch(adj, x.view_as(x), y, train, team, batch, divided=divided)
                cell = {"median_ms": statistics.median(seconds) * 1e3, "epochs_s": seconds}
                cell |= {"variant": name, "batch": batch, "dtype": "bf16-amp", "seeds": train.numel()}
                _add(out, **facts, gpus=team.size, **cell)
            release()
            dist.barrier()


def _epoch(
    adj: Adjacency, x: Tensor, y: Tensor, train: Tensor, team: Team, batch: int, *, divided: bool
) -> list[float]:
    """Seconds of epochs, of the slowest process."""
    device = team.device
    if divided:
        FeatureTable(x, device, shared=True)
    data = Data(x=x, y=y, edge_index=adj)
    share = train[team.rank :: team.size][: train.numel() // team.size]
    loader = NeighborLoader(data, list(FANOUTS), share, batch_size=batch, shuffle=True, device=device)
    torch.manual_seed(0)
    model = Sage(large.FEATURES, HIDDEN, large.CLASSES, len(FANOUTS)).to(device)

    def reduce(model: nn.Module) -> None:
        all_reduce_gradients(model, team.group)

    passes = train_batches(
        model,
        loader,
        torch.bfloat16,
        graphs.CudaGraphs.supports(device),
        [len(loader)] * 3,
        reduce=reduce if team.size > 1 else None,
    )
    return team.largest([each["seconds"] for each in passes[1:]])


def _large(kind: str, teams: Sequence[Team], options: argparse.Namespace, out: Recorder | None) -> None:
    """Training steps on all nodes, divided over several processes; one alone is `benchmarks/large.py`'s."""
    device, spec = teams[-1].device, large.symmetric(options.scale)
    facts = {"kind": "large", "graph": "ogbn-papers100M", "nodes": spec.nodes, "dtype": "bfloat16"}
    for place, team in itertools.product(options.activations, teams[1:]):
        if team.rank < team.size:
            whole = large.draw_symmetric(spec, device)
            parts = partition(whole, team.size, "contiguous")
            adj = PartitionedAdjacency.from_csr(whole.rowptr, whole.col, parts, group=team.group)
            del whole
            release()
            generator = torch.Generator(device).manual_seed(team.rank)
            train = torch.randperm(adj.num_dst, device=device, generator=generator)
            train = train[: max(int(large.TRAIN_NODES * options.scale / team.size), 1)].clone()
            y = torch.randint(large.CLASSES, train.shape, device=device, generator=generator)
            x = large.features(adj.num_dst, device, on_host=place == "host")
            sizes = {"offload": place == "host", "width": 128, "steps": 3}
            reduce = partial(all_reduce_gradients, group=team.group)
            found = large.train_steps(large.LAYERS[kind], adj, x, y, train, reduce=reduce, **sizes)
            seconds = team.largest(found["steps_s"])
            cell = {"median_ms": statistics.median(seconds) * 1e3, "edges": adj.num_edges}
            if "peak_gb" in found:
                (cell["peak_gb"],) = team.largest([found["peak_gb"]])
            _add(out, **facts, gpus=team.size, variant=f"{kind}, activations: {place}", **cell)
            del adj, x, y, train
        release()
        dist.barrier()
