"""A block on a GPU for a DGL that was built without CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.sampling import Edges

#: (source node type, name, destination node type)
EdgeType = tuple[str, str, str]


class SampledBlock:
    """Message flow graph of one layer, with the part of DGL's block that models and these layers use.

    pip's DGL cannot make a graph on a GPU. This stands in for one: drop-in layers and
    :class:`fastsparse_dgl.FastHeteroGraphConv` take it as a graph, DGL's own layers do not.

    Args:
        edges: sampled edges by edge type.
        num_src: number of sources by node type.
        num_dst: number of destinations by node type; they are the first sources.
        device: where it lies.

    Attributes:
        canonical_etypes: edge types.
        srctypes: node types of sources.
        dsttypes: node types of destinations.
        srcnodes: ``srcnodes[type].data``, tensors of the sources by name.
        dstnodes: the same of destinations.
        edges: ``edges[type].data``, the same of edges; ``edges(type)`` returns sources and destinations.
    """

    is_block = True
    is_unibipartite = True

    def __init__(
        self,
        edges: Mapping[EdgeType, Edges],
        num_src: Mapping[str, int],
        num_dst: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.device = device
        self.canonical_etypes = list(edges)
        self.srctypes, self.dsttypes = list(num_src), list(num_dst)
        self.srcnodes = {name: SimpleNamespace(data={}) for name in num_src}
        self.dstnodes = {name: SimpleNamespace(data={}) for name in num_dst}
        self.edges = _EdgeViews(edges)
        self._num_src, self._num_dst = dict(num_src), dict(num_dst)
        self._parts: dict[EdgeType, SampledBlock] = {}

    @property
    def etypes(self) -> list[str]:
        """Names of the edge types."""
        return [name for _, name, _ in self.canonical_etypes]

    @property
    def srcdata(self) -> Any:
        """Tensors of the sources by name; of several types, dicts of them by type."""
        return _merged(self.srcnodes)

    @property
    def dstdata(self) -> Any:
        """Tensors of the destinations by name; of several types, dicts of them by type."""
        return _merged(self.dstnodes)

    @property
    def edata(self) -> Any:
        """Tensors of the edges by name; of several types, dicts of them by type."""
        return _merged(self.edges.views)

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Number of sources, of one type or of all."""
        return sum(self._num_src.values()) if ntype is None else self._num_src[ntype]

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Number of destinations, of one type or of all."""
        return sum(self._num_dst.values()) if ntype is None else self._num_dst[ntype]

    number_of_src_nodes = num_src_nodes
    number_of_dst_nodes = num_dst_nodes

    def num_edges(self, etype: Any = None) -> int:
        """Number of edges, of one type or of all."""
        if etype is None:
            return sum(edges.col.numel() for edges in self.edges.sampled.values())
        return self.edges.of(etype).col.numel()

    number_of_edges = num_edges

    def __getitem__(self, etype: Any) -> SampledBlock:
        """The block of one edge type, which shares the tensors of its nodes and edges."""
        name = self.edges.canonical(etype)
        if len(self.canonical_etypes) == 1:
            return self
        part = self._parts.get(name)
        if part is None:
            source, _, destination = name
            part = SampledBlock(
                {name: self.edges.sampled[name]},
                {source: self._num_src[source]},
                {destination: self._num_dst[destination]},
                self.device,
            )
            part.srcnodes[source] = self.srcnodes[source]
            part.dstnodes[destination] = self.dstnodes[destination]
            part.edges.views[name] = self.edges.views[name]
            self._parts[name] = part
        return part

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """Data that is added or replaced in this context is gone after it."""
        views = [*self.srcnodes.values(), *self.dstnodes.values(), *self.edges.views.values()]
        kept = [view.data for view in views]
        for view in views:
            view.data = dict(view.data)
        try:
            yield
        finally:
            for view, data in zip(views, kept, strict=True):
                view.data = data

    @property
    def adjacency(self) -> Adjacency:
        """The structure of the only edge type.

        Raises:
            ValueError: there are several.
        """
        if len(self.canonical_etypes) != 1:
            raise ValueError(
                f"graph: expected a block of one edge type, got {len(self.canonical_etypes)}; "
                "take block[etype]"
            )
        return self.edges.sampled[self.canonical_etypes[0]].adjacency

    def __repr__(self) -> str:
        return (
            f"SampledBlock(num_src_nodes={self._num_src}, num_dst_nodes={self._num_dst}, "
            f"num_edges={self.num_edges()}, device={str(self.device)!r})"
        )


class _EdgeViews:
    """Edges by type: their tensors, and by calling, their ends."""

    def __init__(self, edges: Mapping[EdgeType, Edges]) -> None:
        self.sampled = dict(edges)
        self.views = {name: SimpleNamespace(data={}) for name in edges}

    def canonical(self, etype: Any) -> EdgeType:
        """The edge type of a name or of a triplet, or the only one.

        Raises:
            KeyError: there is none, or several have the name.
        """
        found = [name for name in self.sampled if etype in (name, name[1], None)]
        if len(found) != 1:
            raise KeyError(f"etype: expected one of {list(self.sampled)}, got {etype!r}")
        return found[0]

    def of(self, etype: Any) -> Edges:
        return self.sampled[self.canonical(etype)]

    def __getitem__(self, etype: Any) -> SimpleNamespace:
        return self.views[self.canonical(etype)]

    def __iter__(self) -> Iterator[EdgeType]:
        return iter(self.views)

    def __call__(self, etype: Any = None) -> tuple[Tensor, Tensor]:
        source, destination = self.of(etype).edge_index
        return source, destination


def _merged(views: Mapping[Any, SimpleNamespace]) -> Any:
    if len(views) == 1:
        return next(iter(views.values())).data
    merged: dict[str, dict[Any, Tensor]] = {}
    for name, view in views.items():
        for key, value in view.data.items():
            merged.setdefault(key, {})[name] = value
    return merged
