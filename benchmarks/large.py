"""A stand-in of ogbn-papers100M, drawn as compressed rows: its edges as pairs would not fit on a GPU.

Degrees fall as a power of their rank, and both ends of an entry are drawn in proportion to them. Sampling
reads rows and where their columns lie, no more, so three things of `suite` are left out: rows and columns are
drawn apart (the structure is not symmetric, though its degrees are), columns may repeat and are not sorted,
and there are no communities, which would let batches share nodes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fastsparse_core import Adjacency

from . import suite
from .runner import progress

#: Nodes and entries of ogbn-papers100M with every citation in both directions.
PAPERS = suite.Spec("powerlaw", 111_059_956, 3_231_371_744, 250_000, 0, 0.0, 15)
#: Width of its features, its classes, and its training nodes, rounded.
FEATURES, CLASSES, TRAIN_NODES = 128, 172, 1_200_000

#: Entries, or numbers of features, that are drawn at a time: 0.5 GB of random numbers.
_CHUNK = 2**26


def scaled(scale: float) -> suite.Spec:
    """`PAPERS` with a share of its nodes and entries."""
    nodes = int(PAPERS.nodes * scale)
    most = min(PAPERS.max_degree, nodes)
    return dataclasses.replace(PAPERS, nodes=nodes, edges=int(PAPERS.edges * scale), max_degree=most)


def draw(spec: suite.Spec, device: torch.device) -> Adjacency:
    """The structure of a power-law graph, about `spec.edges` entries.

    Args:
        spec: nodes, entries, largest expected degree, seed.
        device: where it is drawn; takes 4 bytes an entry and, for a moment, 40 a node.
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


def features(nodes: int, device: torch.device, *, on_host: bool) -> Tensor:
    """Normally distributed bfloat16 (nodes, FEATURES), drawn on the device.

    Args:
        nodes: number of rows.
        device: where they are drawn.
        on_host: whether they come to lie on the host; then in page-locked memory where the device is a GPU.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    place, pinned = torch.device("cpu") if on_host else device, on_host and device.type == "cuda"
    x = torch.empty(nodes, FEATURES, dtype=torch.bfloat16, device=place, pin_memory=pinned)
    for part in progress(x.split(_CHUNK // FEATURES), f"drawing features, {x.device.type}"):
        part.copy_(torch.randn(part.shape, dtype=part.dtype, device=device, generator=generator))
    return x
