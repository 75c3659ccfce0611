"""A stand-in of ogbn-papers100M, drawn as compressed rows: its edges as pairs would not fit on a GPU.

Degrees fall as a power of their rank, and both ends of an entry are drawn in proportion to them. Sampling
reads only rows and their columns, so this graph lacks three properties of the graphs in `suite`: rows and
columns are
drawn apart (the structure is not symmetric, though its degrees are), columns may repeat and are not sorted,
and there are no communities, which would let batches share nodes. Full-graph training needs a symmetric
structure, whose entries come in pairs, (i, j) and (j, i) (`draw_symmetric`).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsparse_core import Adjacency
from fastsparse_core.formats.compress import expand_rows, row_pieces
from fastsparse_pyg import FastGCNConv, FastSAGEConv, tiled

from . import suite
from .runner import Benchmark, Cell, Job, Run, option, peak_bytes, progress, release, synchronise
from .train import Stack

#: Nodes and entries of ogbn-papers100M with every citation in both directions.
PAPERS = suite.Spec("powerlaw", 111_059_956, 3_231_371_744, 250_000, 0, 0.0, 15)
#: Features, classes and (rounded) training nodes of ogbn-papers100M.
FEATURES, CLASSES, TRAIN_NODES = 128, 172, 1_200_000

#: Entries of the symmetric graph, and its largest degree: every degree is a round of `draw_symmetric`.
_ENTRIES, _MOST_DEGREE = 3_110_000_000, 5_000
#: Entries, or numbers of features, that are drawn at a time: 0.5 GB of random numbers.
_CHUNK = 2**26


def scaled(scale: float) -> suite.Spec:
    """`PAPERS` with a share of its nodes and entries."""
    nodes = int(PAPERS.nodes * scale)
    most = min(PAPERS.max_degree, nodes)
    return dataclasses.replace(PAPERS, nodes=nodes, edges=int(PAPERS.edges * scale), max_degree=most)


def symmetric(scale: float) -> suite.Spec:
    """The symmetric graph, with a share of its nodes and entries."""
    return dataclasses.replace(scaled(scale), edges=int(_ENTRIES * scale), max_degree=_MOST_DEGREE)


def draw(spec: suite.Spec, device: torch.device) -> Adjacency:
    """The structure of a power-law graph, about `spec.edges` entries.

    Args:
        spec: nodes, entries, largest expected degree, seed.
        device: of the graph. Making it takes 4 bytes per entry, and 40 per node for a short time.
    """
    generator = torch.Generator(device=device).manual_seed(spec.seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device, dtype=torch.float64)

    n = spec.nodes
    degree = suite.expected_degrees(spec, device)[torch.randperm(n, generator=generator, device=device)]
    upto = degree.cumsum(0)
    rowptr = torch.zeros(n + 1, dtype=torch.int64, device=device)
    torch.cumsum(degree.add_(uniform(n)).long(), 0, out=rowptr[1:])  # rounded up or down by chance
    col = torch.empty(int(rowptr[-1]), dtype=torch.int32, device=device)
    for part in progress(col.split(_CHUNK), "drawing entries"):
        position = uniform(part.numel()).mul_(upto[-1])
        part.copy_(torch.searchsorted(upto, position, out_int32=True).clamp_(max=n - 1))
    return Adjacency.from_csr(rowptr, col, (n, n), copy=False)


def draw_symmetric(spec: suite.Spec, device: torch.device) -> Adjacency:
    """A symmetric power-law graph of about `spec.edges` entries, without loops.

    Nodes are paired at random in rounds: a node of degree d is in the first d rounds. So a pair's two entries
    are written at once, and only rows are sorted.

    Args:
        spec: nodes, entries, largest degree, seed.
        device: of the graph. Making it takes 4 bytes per entry, and 70 per node for a short time.
    """
    generator = torch.Generator(device=device).manual_seed(spec.seed)
    n = spec.nodes
    degree = suite.expected_degrees(spec, device)
    degree.add_(torch.rand(n, generator=generator, device=device, dtype=torch.float64))
    degree = degree.long().sort(descending=True).values
    # Nodes of every round; if their number is odd, one is left out.
    rounds = torch.arange(int(degree[0]), device=device)
    sizes = n - torch.searchsorted(degree.flip(0), rounds, right=True)
    odd = sizes[sizes % 2 == 1] - 1
    degree.index_add_(0, odd, torch.full_like(odd, -1))
    label = torch.randperm(n, generator=generator, device=device)
    rowptr = torch.zeros(n + 1, dtype=torch.int64, device=device)
    rowptr[1:][label] = degree
    del degree
    torch.cumsum(rowptr, 0, out=rowptr)
    begin = rowptr[label]
    label = label.int()
    col = torch.empty(int(rowptr[-1]), dtype=torch.int32, device=device)
    for nth, size in enumerate(progress((sizes // 2).tolist(), "drawing pairs")):
        one, other = torch.randperm(2 * size, generator=generator, device=device).view(2, size)
        col[begin[one] + nth] = label[other]
        col[begin[other] + nth] = label[one]
    del begin, label
    for first, last, part in row_pieces(rowptr, col):  # symmetry is detected only if columns are sorted
        row = expand_rows(rowptr[first : last + 1] - rowptr[first], part.numel()).long()
        part.copy_(row.mul_(n).add_(part).sort().values.remainder_(n))
    return Adjacency.from_csr(rowptr, col, (n, n), copy=False)


def features(nodes: int, device: torch.device, *, on_host: bool, out: Tensor | None = None) -> Tensor:
    """Normally distributed bfloat16 (nodes, FEATURES), drawn on the device.

    Args:
        nodes: number of rows.
        device: where they are drawn.
        on_host: whether they are stored on the host, in page-locked memory if the device is a GPU.
        out: tensor to write them to instead.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    x = out
    if x is None:
        x = torch.empty(nodes, FEATURES, dtype=torch.bfloat16, device="cpu" if on_host else device)
    if (
        on_host and out is None and device.type == "cuda"
    ):  # `pin_memory` would round the size up to a power of two
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0)))
        weakref.finalize(x, torch.cuda.cudart().cudaHostUnregister, x.data_ptr())
    for part in progress(x.split(_CHUNK // FEATURES), f"drawing features, {x.device.type}"):
        part.copy_(torch.randn(part.shape, dtype=part.dtype, device=device, generator=generator))
    return x


# ---------------------------------------------------------------- training on all nodes

LAYERS = {"GCN": FastGCNConv, "SAGE": FastSAGEConv}


def cells(run: Run, kind: str) -> Iterator[Job]:
    """All cells of one kind of layer."""
    options, device = run.options, run.device
    spec = symmetric(options.scale)
    adj = draw_symmetric(spec, device)
    generator = torch.Generator(device=device).manual_seed(0)
    train = torch.randperm(spec.nodes, device=device, generator=generator)
    train = train[: max(int(TRAIN_NODES * options.scale), 1)].clone()
    y = torch.randint(CLASSES, train.shape, device=device, generator=generator)
    for place in options.activations:
        release()
        x = features(spec.nodes, device, on_host=place == "host")
        cell = {"model": f"{kind} 3 x {options.width}", "activations": place, "where": device.type}
        cell |= {"num_nodes": spec.nodes, "entries": adj.num_edges, "train_nodes": train.numel()}
        sizes = {"offload": place == "host", "width": options.width, "steps": options.steps}
        yield cell, partial(train_steps, LAYERS[kind], adj, x, y, train, **sizes)
        del x


def train_steps(
    layer: type,
    adj: Adjacency,
    x: Tensor,
    y: Tensor,
    train: Tensor,
    *,
    offload: bool,
    width: int,
    steps: int,
    reduce: Callable[[nn.Module], None] | None = None,
) -> Cell:
    """Seconds and memory of training steps of three layers.

    Args:
        layer: their class.
        adj: the graph, or this process's part of it.
        x: (num_nodes, FEATURES).
        y: (num_train,), classes.
        train: int64 (num_train,), the nodes that have them.
        offload: see `tiled`.
        width: of the layers.
        steps: that are timed, after one that is not.
        reduce: what processes do with the gradients of the model; None: there is one process.
    """
    torch.manual_seed(0)
    widths = (FEATURES, width, width, CLASSES)
    model = Stack([layer(*pair) for pair in itertools.pairwise(widths)]).to(adj.device, x.dtype)
    net = tiled(model, offload=offload)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, adj, rows=train).float(), y)
        loss.backward()
        if reduce is not None:
            reduce(model)
        optimizer.step()
        return loss.detach()

    first = float(step())
    seconds = []
    for _ in range(steps):
        synchronise(adj.device)
        begin = time.perf_counter()
        last = step()
        synchronise(adj.device)
        seconds.append(time.perf_counter() - begin)
    peak = peak_bytes(step, adj.device)
    cell = {
        "step_s": round(statistics.median(seconds), 3),
        "steps_s": seconds,
        "losses": [first, float(last)],
    }
    return cell | ({} if peak is None else {"peak_gb": round(peak / 1e9, 1)})


BENCHMARK = Benchmark(
    "large",
    cells,
    "layers",
    options={
        "layers": option(choices=list(LAYERS)),
        "activations": option(choices=["GPU", "host"]),
        "scale": option(1.0, "share of the nodes, entries and training nodes"),
        "width": option(128, "width of the layers"),
        "steps": option(3, "steps that are timed, after one that is not"),
    },
    notes=(
        "full: forward pass, backward pass and Adam of three layers in bfloat16 under `tiled`, of a symmetric"
        " random graph, with the loss of the training nodes; 'host': features and sums in page-locked memory;"
        " peak: of all memory of the GPU that PyTorch gave, graph and features included",
    ),
)
