"""Graphs with several types of edges (relations): structures over pairs of a node and a relation.

Every node has a pair for each relation of its edges. Pairs are sorted by relation, so the pairs of a relation
are consecutive rows, which can be multiplied by the relation's matrix. Both plugins use this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastsparse_core import recorded
from fastsparse_core.ops._segment import find_segments
from fastsparse_core.structure.adjacency import Adjacency
from fastsparse_core.structure.build_once import BuiltOnce, built_results
from fastsparse_core.structure.segments import Segments


@dataclass(frozen=True)
class Pairs:
    """Pairs of a node and a relation, for the sources or the destinations of the edges.

    Attributes:
        node: node of every pair, int64 (P,), sorted within every relation.
        of_edge: position of the pair of every edge, in the caller's edge order, int32 (num_edges,).
        starts: position of the first pair of every relation, then P; empty if every node has a pair with
            every relation.
    """

    node: Tensor
    of_edge: Tensor
    starts: tuple[int, ...]
    _memo: BuiltOnce = field(default_factory=built_results, compare=False)

    def __len__(self) -> int:
        return self.node.numel()

    @property
    def index(self) -> Tensor:
        """:attr:`of_edge` in int64, for gathers."""
        found: Tensor | None = self._memo.results.get("index")  # read here, which saves the call of `get`
        return self._memo.get("index", self.of_edge.long) if found is None else found

    def find(self, *_: object) -> Segments:
        """Returns the edges grouped by pair. The arguments are those of `find_segments`, and are ignored."""
        found: Segments | None = self._memo.results.get("segments")
        if found is None:
            found = find_segments(self.index, None, len(self), self.of_edge.numel())
            if recorded.current() is None:  # else, the segments are valid only in this run of a captured step
                self._memo.results["segments"] = found
        return found


class Relations:
    """Edges that each have a relation. Derived structures are built on first use and cached.

    Args:
        dst: destinations, integers (num_edges,), in range; copied.
        src: sources, like ``dst``.
        kind: relations, like ``dst``.
        shape: (num_dst, num_src).
        num_relations: number of relations.
    """

    def __init__(
        self, dst: Tensor, src: Tensor, kind: Tensor, shape: tuple[int, int], num_relations: int
    ) -> None:
        # Copies, because views would keep the caller's tensor alive, but caches drop their entry when this
        # tensor is freed.
        self.dst, self.src, self.kind = (it.to(torch.int32, copy=True) for it in (dst, src, kind))
        self.shape = shape
        self.num_relations = num_relations
        self._memo = built_results()

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.dst.numel()

    @property
    def dst_pairs(self) -> Pairs:
        """Pairs of a destination and a relation."""
        return self._memo.results.get("dst_pairs") or self._memo.get(
            "dst_pairs", lambda: self._pairs(self.dst, self.shape[0])
        )

    @property
    def src_pairs(self) -> Pairs:
        """Pairs of a source and a relation."""
        return self._memo.get("src_pairs", lambda: self._pairs(self.src, self.shape[1]))

    def _pairs(self, node: Tensor, num_nodes: int) -> Pairs:
        if recorded.current() is not None:  # the number of pairs cannot be read: every pair gets a row
            every = torch.arange(num_nodes, device=node.device).repeat(self.num_relations)
            firsts = tuple(num_nodes * relation for relation in range(self.num_relations + 1))
            return Pairs(every, self.kind * num_nodes + node, firsts)
        key, of_edge = torch.unique(self.kind.long() * num_nodes + node, return_inverse=True)
        bounds = torch.arange(self.num_relations + 1, device=key.device) * num_nodes
        starts = torch.searchsorted(key, bounds).tolist()
        return Pairs(key % max(num_nodes, 1), of_edge.int(), tuple(starts))

    @property
    def into_pairs(self) -> Adjacency:
        """Structure (pairs of destinations, sources)."""
        return self._memo.get("into_pairs", lambda: self._between(self.dst_pairs, self.src, self.shape[1]))

    @property
    def with_every_pair(self) -> Relations:
        """The same edges with pairs of all nodes and relations; the pairs of a node are adjacent."""
        return self._memo.results.get("with_every_pair") or self._memo.get(
            "with_every_pair", lambda: _WithEveryPair(self)
        )

    @property
    def from_pairs(self) -> Adjacency:
        """Structure (destinations, pairs of sources)."""

        def build() -> Adjacency:
            pairs = self.src_pairs
            return Adjacency.from_coo(self.dst, pairs.of_edge, (self.shape[0], len(pairs)))

        return self._memo.results.get("from_pairs") or self._memo.get("from_pairs", build)

    @property
    def between_pairs(self) -> Adjacency:
        """Structure (pairs of destinations, pairs of sources)."""
        pairs = self.src_pairs
        return self._memo.get(
            "between_pairs", lambda: self._between(self.dst_pairs, pairs.of_edge, len(pairs))
        )

    @property
    def from_rows(self) -> Adjacency:
        """Structure (pairs of destinations, rows of the relations' stacked weights)."""

        def build() -> Adjacency:
            column = self.kind.long() * self.shape[1] + self.src
            return self._between(self.dst_pairs, column, self.num_relations * self.shape[1])

        return self._memo.get("from_rows", build)

    def _between(self, pairs: Pairs, column: Tensor, num_columns: int) -> Adjacency:
        return Adjacency.from_coo(pairs.of_edge, column, (len(pairs), num_columns))

    def share(self, dtype: torch.dtype) -> Tensor:
        """For every edge, 1 / the number of edges with the same destination and relation, (num_edges,)."""

        def build() -> Tensor:
            pair = self.dst_pairs.of_edge
            count = torch.zeros(len(self.dst_pairs), dtype=torch.int64, device=pair.device)
            count.scatter_add_(0, pair.long(), torch.ones_like(pair, dtype=torch.int64))
            return count.to(dtype).reciprocal().index_select(0, pair)

        return self._memo.get(("share", dtype), build)

    def transforms_first(self, width: int, out_width: int) -> bool:
        """Returns True if fewer numbers are read and written with the linear map before the sum than after.

        Args:
            width: number of features before the linear map.
            out_width: number of features after the linear map.
        """
        pairs, sources = len(self.dst_pairs), len(self.src_pairs)
        sums_first = self.num_edges * width + 2 * pairs * (width + out_width)
        return sources * (3 * width + out_width) + self.num_edges * out_width < sums_first

    def memory_usage(self) -> dict[str, int]:
        """Bytes of the stored tensors, by name."""
        usage = {name: getattr(self, name).nbytes for name in ("dst", "src", "kind")}
        for name, it in self._memo.results.items():
            if isinstance(it, Adjacency):
                usage |= {f"{name}.{part}": size for part, size in it.memory_usage().items()}
            elif isinstance(it, Relations):
                shared = ("dst", "src", "kind")
                usage |= {
                    f"{name}.{part}": size for part, size in it.memory_usage().items() if part not in shared
                }
            elif isinstance(it, Pairs):
                usage[str(name)] = it.node.nbytes + it.of_edge.nbytes
                for held in it._memo.results.values():
                    sizes = (held.nbytes,) if isinstance(held, Tensor) else held.memory_usage().values()
                    usage[str(name)] += sum(sizes)
            elif isinstance(it, Tensor):
                usage[str(name)] = it.nbytes
        return usage


class _WithEveryPair(Relations):
    """Result of :attr:`Relations.with_every_pair`."""

    def __init__(self, relations: Relations) -> None:
        self.dst, self.src, self.kind = relations.dst, relations.src, relations.kind
        self.shape, self.num_relations = relations.shape, relations.num_relations
        self._memo = built_results()

    def _pairs(self, node: Tensor, num_nodes: int) -> Pairs:
        every = torch.arange(num_nodes, device=node.device).repeat_interleave(self.num_relations)
        return Pairs(every, node * self.num_relations + self.kind, ())
