"""The graphs that are measured: seeded stand-ins for published benchmark graphs, and real graphs from files.

The published graphs are large downloads, so each stand-in reproduces the properties on which the time of a
sparse kernel depends: the numbers of nodes and edges, the mean and the largest degree, and the number of
non-zero 8x1
row vectors per edge. A stand-in is drawn on one device from a fixed seed; the same seed gives another graph
on another kind of device. Baseline times in ``peers.json`` were taken on exactly the graphs that CUDA devices
draw here, so the order of random calls must not change.

Every graph is symmetric, without self loops or duplicate edges, with the columns of each row sorted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsparse_core import Adjacency

#: Prefix of names that mean a file ``$FASTSPARSE_DATA/<name>.npz`` instead of a stand-in.
REAL = "real:"

#: The description of graph names in help texts.
NAMES = "names of the suite, or real:<name>"


@dataclass(frozen=True)
class Spec:
    """How a stand-in is drawn.

    Attributes:
        kind: ``powerlaw`` or ``batched`` (many small graphs one after another).
        nodes: Number of nodes.
        edges: Directed edges to aim at.
        max_degree: Largest expected degree.
        community: Nodes per community (consecutive ids), or per small graph; 0 for none.
        p_local: Share of edges that stay inside a community.
        seed: Seed of everything drawn.
    """

    kind: str
    nodes: int
    edges: int
    max_degree: int
    community: int
    p_local: float
    seed: int


SUITE: dict[str, Spec] = {
    "pubmed": Spec("powerlaw", 19_717, 88_648, 171, 256, 0.3, 1),
    "ogbn-arxiv": Spec("powerlaw", 169_343, 2_315_598, 13_161, 512, 0.3, 2),
    "github": Spec("powerlaw", 37_700, 578_006, 9_458, 256, 0.2, 3),
    "ppi": Spec("powerlaw", 56_944, 1_587_264, 721, 256, 0.4, 4),
    "yelp": Spec("powerlaw", 716_847, 13_954_819, 4_886, 256, 0.2, 5),
    "reddit": Spec("powerlaw", 232_965, 114_615_892, 21_657, 2_048, 0.60, 6),
    "ogbn-proteins": Spec("powerlaw", 132_534, 79_122_504, 7_750, 2_048, 0.6, 7),
    "ogbn-products": Spec("powerlaw", 2_449_029, 123_718_152, 17_481, 128, 0.45, 8),
    "amazonproducts": Spec("powerlaw", 1_569_960, 264_339_468, 60_000, 512, 0.35, 9),
    "igb-small": Spec("powerlaw", 1_000_000, 13_068_130, 60, 0, 0.0, 10),
    "igb-medium": Spec("powerlaw", 10_000_000, 129_994_908, 60, 64, 0.25, 11),
    "dd": Spec("batched", 334_925, 1_686_092, 19, 280, 1.0, 12),
    "yeast": Spec("batched", 1_710_902, 3_636_546, 6, 22, 1.0, 13),
    "peptides-batch": Spec("batched", 153_600, 313_000, 5, 150, 1.0, 14),
}

#: The graphs that stored baseline times cover, small ones first.
PEER_GRAPHS = (
    "pubmed",
    "github",
    "ppi",
    "ogbn-arxiv",
    "dd",
    "peptides-batch",
    "yeast",
    "igb-small",
    "yelp",
    "ogbn-proteins",
    "reddit",
    "ogbn-products",
)


@dataclass(frozen=True)
class Graph:
    """A square structure in CSR; rows are destinations.

    Attributes:
        name: Its name in the suite.
        rowptr: int32 (num_nodes + 1,).
        col: int32 (num_edges,).
    """

    name: str
    rowptr: Tensor
    col: Tensor

    @property
    def num_nodes(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.col.numel()

    def facts(self) -> dict[str, Any]:
        """The fields about this graph in every cell of a record."""
        return {"graph": self.name, "nodes": self.num_nodes, "edges": self.num_edges}

    def row(self) -> Tensor:
        """int32 (num_edges,): the destination of every edge."""
        nodes = torch.arange(self.num_nodes, device=self.col.device, dtype=torch.int32)
        return torch.repeat_interleave(nodes, (self.rowptr[1:] - self.rowptr[:-1]).long())

    def edge_index(self) -> Tensor:
        """int64 (2, num_edges): sources, destinations."""
        return torch.stack([self.col, self.row()]).long()

    def adjacency(self) -> Adjacency:
        """The structure as the operators take it."""
        return Adjacency.from_csr(self.rowptr, self.col, (self.num_nodes, self.num_nodes))

    def sparse_csr(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The structure as a ``torch.sparse_csr`` matrix of ones with int32 indices."""
        ones = torch.ones(self.num_edges, dtype=dtype, device=self.col.device)
        shape = (self.num_nodes, self.num_nodes)
        return torch.sparse_csr_tensor(self.rowptr, self.col, ones, shape, check_invariants=False)


def at_hand(names: Iterable[str]) -> list[str]:
    """The real graphs among these whose files exist, as names for `load`."""
    folder = os.environ.get("FASTSPARSE_DATA")
    return [REAL + name for name in names if folder and Path(folder, f"{name}.npz").is_file()]


def check(names: Iterable[str]) -> None:
    """Refuses names that `load` would refuse, before any work is done.

    Raises:
        ValueError: There is no such stand-in.
        FileNotFoundError: There is no such file.
    """
    for name in names:
        if name.startswith(REAL):
            _path(name)
        elif name not in SUITE:
            raise ValueError(
                f"graph {name!r} is not in the suite: expected one of {', '.join(SUITE)},"
                f" or {REAL}<name> for a file in FASTSPARSE_DATA"
            )


def load(name: str, device: torch.device | str, **override: Any) -> Graph:
    """A stand-in by name, or ``real:<name>`` from the folder that FASTSPARSE_DATA names.

    Args:
        name: One of `SUITE`, or ``real:`` and the stem of an ``.npz`` file.
        device: Where to draw or put the graph.
        **override: Fields of the stand-in's `Spec` to replace, for small tests.

    Raises:
        ValueError: There is no such stand-in.
        FileNotFoundError: There is no such file.
    """
    check([name])
    if name.startswith(REAL):
        return _from_file(name, device)
    spec = dataclasses.replace(SUITE[name], **override)
    generator = torch.Generator(device=device).manual_seed(spec.seed)
    draw = _powerlaw if spec.kind == "powerlaw" else _batched
    return _from_keys(name, draw(spec, device, generator), spec.nodes)


def _from_keys(name: str, key: Tensor, num_nodes: int) -> Graph:
    """CSR from sorted keys row * num_nodes + column."""
    row = key // num_nodes
    col = (key - row * num_nodes).int()
    rowptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=key.device)
    rowptr[1:] = torch.cumsum(torch.bincount(row, minlength=num_nodes), 0)
    return Graph(name, rowptr.int(), col)


def _both_directions(u: Tensor, v: Tensor, num_nodes: int) -> Tensor:
    return torch.unique(torch.cat([u * num_nodes + v, v * num_nodes + u]))


def _path(name: str) -> Path:
    folder = os.environ.get("FASTSPARSE_DATA")
    path = Path(folder or ".", name.removeprefix(REAL) + ".npz")
    if folder is None or not path.is_file():
        raise FileNotFoundError(
            f"{name} needs {path.name} in the folder that the environment variable FASTSPARSE_DATA names"
            f" (now {folder or 'unset'})"
        )
    return path


def _from_file(name: str, device: torch.device | str) -> Graph:
    with np.load(_path(name), allow_pickle=False) as archive:
        num_nodes = int(archive["num_nodes"])
        if "edge_index" in archive:
            row, col = archive["edge_index"].astype(np.int64)
        else:
            row = np.repeat(np.arange(num_nodes), np.diff(archive["rowptr"]))
            col = archive["col"].astype(np.int64)
    u, v = (torch.from_numpy(end).to(device) for end in (row, col))
    keep = u != v
    return _from_keys(name, _both_directions(u[keep], v[keep], num_nodes), num_nodes)


def expected_degrees(spec: Spec, device: torch.device | str) -> Tensor:
    """Falls with the rank as a power whose exponent, found by bisection, gives the wanted mean."""
    mean = spec.edges / spec.nodes
    rank = torch.arange(1, spec.nodes + 1, device=device, dtype=torch.float64)
    low, high = 0.0, 4.0
    degree = rank
    for _ in range(60):
        exponent = (low + high) / 2
        degree = torch.clamp(spec.max_degree * rank.pow(-exponent), min=min(1.0, mean / 2))
        if degree.mean() > mean:
            low = exponent
        else:
            high = exponent
    return degree


def _powerlaw(spec: Spec, device: torch.device | str, generator: torch.Generator) -> Tensor:
    """Links drawn with both ends proportional to the expected degree, a share of them inside communities."""
    n = spec.nodes
    degree = expected_degrees(spec, device)[torch.randperm(n, generator=generator, device=device)]
    upto = torch.cumsum(degree, 0)

    def uniform(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.rand(count, generator=generator, device=device, dtype=dtype)

    def node_at(position: Tensor) -> Tensor:
        return torch.searchsorted(upto, position).clamp_(max=n - 1)

    links = torch.empty(0, dtype=torch.int64, device=device)
    wanted = int(spec.edges / 2 * 1.03)
    for _ in range(12):  # each round replaces the duplicates and self loops of the round before
        count = max(wanted - links.numel(), 0)
        if count < spec.edges * 0.002:
            break
        u = node_at(uniform(count) * upto[-1])
        v = node_at(uniform(count) * upto[-1])
        if spec.p_local:
            local = uniform(count, torch.float32) < spec.p_local
            first = u[local] // spec.community * spec.community
            last = torch.clamp(first + spec.community, max=n) - 1
            low = torch.where(first > 0, upto[(first - 1).clamp(min=0)], torch.zeros_like(upto[:1]))
            inside = node_at(low + uniform(first.numel()) * (upto[last] - low))
            v[local] = torch.minimum(torch.maximum(inside, first), last)
        keep = u != v
        u, v = u[keep], v[keep]
        links = torch.unique(torch.cat([links, torch.minimum(u, v) * n + torch.maximum(u, v)]))
        wanted = int(spec.edges / 2)
    return _both_directions(links // n, links % n, n)


def _batched(spec: Spec, device: torch.device | str, generator: torch.Generator) -> Tensor:
    """Small graphs laid out one after another: a path and short chords inside each."""
    n, size = spec.nodes, spec.community
    node = torch.arange(n - 1, device=device)
    path = node[(node + 1) % size != 0]
    chords = int(max(spec.edges // 2 - path.numel(), 0) * 1.25) + 1
    u = torch.randint(0, n, (chords,), generator=generator, device=device)
    v = u + torch.randint(2, max(spec.max_degree, 3) + 2, u.shape, generator=generator, device=device)
    keep = (v < n) & (u // size == v // size)
    links = torch.unique(torch.cat([path * n + path + 1, u[keep] * n + v[keep]]))
    return _both_directions(links // n, links % n, n)
