"""A block on a GPU for a DGL that was built without CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.sampling import Edges
from fastsparse_dgl.block_data import DataView, Frame, Frames, set_frames
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dgl_blocks import dgl_block, dgl_can_hold
from fastsparse_dgl.graph import DGLError

#: (source node type, name, destination node type)
EdgeType = tuple[str, str, str]
#: The type ``int`` under another name, because the block has a method ``int``.
Count = int


class MissingError(DGLError, AttributeError):
    """Raised for a method that a block lacks because DGL does not support graphs on its device."""


class SampledBlock:
    """Sampled block on a GPU, with the part of the interface of DGL's blocks that models use.

    DGL's wheels from PyPI cannot create a graph on a GPU. Drop-in layers and
    :class:`fastsparse_dgl.FastHeteroGraphConv` accept this object as a graph. Message passing and layers
    without a drop-in need :func:`fastsparse_dgl.enable`: for all other methods of DGL's blocks, a DGL block
    that shares the data is then created on demand. ``to("cpu")`` returns a DGL block.

    As in DGL, a block of a sampler has all data of the graph; a feature is gathered when it is first read.

    Args:
        edges: sampled edges by edge type.
        num_src: number of sources by node type.
        num_dst: number of destinations by node type; destinations are also the first sources.
        device: device of the block.
        idtype: dtype of ids.
        frames: data by ``("src" or "dst", node type)`` and ``("edge", edge type)``; None: no data yet.

    Attributes:
        device: device of the block.
        idtype: dtype of ids.
        canonical_etypes: edge types.
        srctypes: node types of sources.
        dsttypes: node types of destinations.
        srcnodes: ``srcnodes[type].data`` has the tensors of the sources by name; ``srcnodes(type)`` returns
            their ids in the block.
        dstnodes: like ``srcnodes``, for destinations.
        edges: ``edges[type].data`` has the tensors of the edges by name; ``edges(etype=type)`` returns
            sources and destinations.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_core import Adjacency
        >>> from fastsparse_core import NeighborSampler as Sampler
        >>> from fastsparse_dgl import SampledBlock
        >>> ring = Adjacency.from_coo(torch.arange(6), torch.arange(6).roll(1), (6, 6))
        >>> (edges,) = Sampler(ring, [2], blocks=True).sample(torch.tensor([3])).blocks
        >>> name = ("_N", "_E", "_N")
        >>> block = SampledBlock({name: edges}, {"_N": 2}, {"_N": 1}, torch.device("cpu"))
        >>> block.num_edges()
        1
    """

    is_block = True
    is_unibipartite = True
    #: The block stores its structure as :attr:`adjacency`, so no structure has to be converted or cached.
    keeps_structure = True

    def __init__(
        self,
        edges: Mapping[EdgeType, Edges],
        num_src: Mapping[str, Count],
        num_dst: Mapping[str, Count],
        device: torch.device,
        idtype: torch.dtype = torch.int64,
        frames: Frames | None = None,
    ) -> None:
        self.device, self.idtype = device, idtype
        self.canonical_etypes = list(edges)
        self.srctypes, self.dsttypes = list(num_src), list(num_dst)
        if frames is None:
            frames = {("src", name): Frame(num_rows=count) for name, count in num_src.items()}
            frames |= {("dst", name): Frame(num_rows=count) for name, count in num_dst.items()}
            frames |= {("edge", name): Frame(num_rows=item.col.numel()) for name, item in edges.items()}
        #: Views refer to this dict instead of the block. Without a reference cycle, the memory of a dropped
        #: block is freed at once.
        self.frames = frames
        self.srcnodes = _NodeViews("src", num_src, frames, device, idtype)
        self.dstnodes = _NodeViews("dst", num_dst, frames, device, idtype)
        self.edges = _EdgeViews(edges, frames, idtype)
        self._whole: SampledBlock | None = None
        self._dgls: Any = None

    @property
    def ntypes(self) -> list[str]:
        """Node types of sources, then of destinations."""
        return self.srctypes + self.dsttypes

    @property
    def etypes(self) -> list[str]:
        """Names of the edge types."""
        return [name for _, name, _ in self.canonical_etypes]

    @property
    def srcdata(self) -> MutableMapping[str, Any]:
        """Tensors of the sources by name; with several types, dicts by type."""
        return _of_all_types(self.srcnodes)

    @property
    def dstdata(self) -> MutableMapping[str, Any]:
        """Tensors of the destinations by name; with several types, dicts by type."""
        return _of_all_types(self.dstnodes)

    @property
    def edata(self) -> MutableMapping[str, Any]:
        """Tensors of the edges by name; with several types, dicts by type."""
        return _of_all_types(self.edges.views)

    def num_src_nodes(self, ntype: str | None = None) -> Count:
        """Number of sources, of one type or of all.

        Args:
            ntype: node type; None: all.
        """
        return self.srcnodes.number(ntype)

    def num_dst_nodes(self, ntype: str | None = None) -> Count:
        """Number of destinations, of one type or of all.

        Args:
            ntype: node type; None: all.
        """
        return self.dstnodes.number(ntype)

    number_of_src_nodes = num_src_nodes
    number_of_dst_nodes = num_dst_nodes

    def num_edges(self, etype: Any = None) -> Count:
        """Number of edges, of one type or of all.

        Args:
            etype: edge type; None: all.
        """
        if etype is None:
            return sum(edges.col.numel() for edges in self.edges.sampled.values())
        return self.edges.of(etype).col.numel()

    number_of_edges = num_edges

    def in_degrees(self, v: Any = None, etype: Any = None) -> Tensor:
        """Number of edges of each destination in ``v``; None or ``"__ALL__"``: of all destinations.

        Args:
            v: ids, int64 (num_nodes,).
            etype: edge type; None: the only one.
        """
        return self._chosen(self._one(etype).adjacency.in_degree(), v)

    def out_degrees(self, u: Any = None, etype: Any = None) -> Tensor:
        """Number of edges of each source in ``u``; None or ``"__ALL__"``: of all sources.

        Args:
            u: ids, int64 (num_nodes,).
            etype: edge type; None: the only one.
        """
        return self._chosen(self._one(etype).adjacency.out_degree(), u)

    def _chosen(self, degrees: Tensor, nodes: Any) -> Tensor:
        if nodes is not None and not isinstance(nodes, str):
            degrees = degrees[nodes.long() if isinstance(nodes, Tensor) else nodes]
        return degrees.to(self.idtype)

    def _one(self, etype: Any) -> Edges:
        """Returns the edges of a type; None means the only type."""
        (only,) = self.canonical_etypes if etype is None else (etype,)
        return self.edges.of(only)

    @contextlib.contextmanager
    def local_scope(self) -> Iterator[None]:
        """In this context, tensors may be added and removed. At its end, the block has its old tensors."""
        before = dict(self.frames)
        clones = {id(frame): frame.clone() for frame in before.values()}
        self._set_frames({space: clones[id(frame)] for space, frame in before.items()})
        try:
            yield
        finally:
            self._set_frames(before)

    def _set_frames(self, frames: Frames) -> None:
        self.frames.update(frames)
        if self._dgls is not None:
            set_frames(self._dgls, frames)

    def to(self, device: torch.device | str | Count, non_blocking: bool = False) -> Any:
        """Moves the block with its data; returns itself if it is on that device, and a DGL block on the CPU.

        Args:
            device: the target.
            non_blocking: as in :meth:`torch.Tensor.to`.
        """
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        edges = {name: item.to(target, non_blocking) for name, item in self.edges.sampled.items()}
        frames = {space: frame.to(target, non_blocking=non_blocking) for space, frame in self.frames.items()}
        make = dgl_block if dgl_can_hold(target) else SampledBlock
        return make(edges, self.srcnodes.counts, self.dstnodes.counts, target, self.idtype, frames)

    def cpu(self) -> Any:
        """Returns DGL's block on the CPU, with the data."""
        return self.to("cpu")

    def int(self) -> SampledBlock:
        """Returns the block with int32 ids."""
        return self._with_ids(torch.int32)

    def long(self) -> SampledBlock:
        """Returns the block with int64 ids."""
        return self._with_ids(torch.int64)

    def _with_ids(self, idtype: torch.dtype) -> SampledBlock:
        if idtype == self.idtype:
            return self
        counts = self.srcnodes.counts, self.dstnodes.counts
        frames = {space: frame.clone() for space, frame in self.frames.items()}
        return SampledBlock(self.edges.sampled, *counts, self.device, idtype, frames)

    def __getitem__(self, etype: Any) -> SampledBlock:
        """The block of one edge type, which shares the data of its nodes and edges."""
        name = self.edges.canonical(etype)
        if len(self.canonical_etypes) == 1:
            return self
        source, _, destination = name
        counts = {source: self.srcnodes.counts[source]}, {destination: self.dstnodes.counts[destination]}
        spaces = ("src", source), ("dst", destination), ("edge", name)
        frames = {space: self.frames[space] for space in spaces}
        part = SampledBlock({name: self.edges.sampled[name]}, *counts, self.device, self.idtype, frames)
        part._whole = self
        return part

    @property
    def adjacency(self) -> Adjacency:
        """The structure of the only edge type.

        Raises:
            ValueError: the block has several edge types.
        """
        if len(self.canonical_etypes) != 1:
            raise ValueError(
                f"graph: expected a block with one edge type, got {len(self.canonical_etypes)}; "
                "pass block[etype]"
            )
        return self.edges.sampled[self.canonical_etypes[0]].adjacency

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that only DGL's block has.

        Raises:
            AttributeError: DGL's block has no such attribute.
            MissingError: DGL does not support blocks on this device.
        """
        if name != "_graph" and (name.startswith("_") or not hasattr(dgl.DGLGraph, name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not dgl_can_hold(self.device):
            raise MissingError(
                f"block.{name} needs a DGL block, but this DGL supports none on {self.device}: call "
                "fastsparse_dgl.enable() first, or use block.to('cpu')"
            )
        return getattr(self._of_dgls(), name)

    def _of_dgls(self) -> Any:
        """DGL's block of the same edges, which shares this block's data."""
        if self._dgls is None:
            if self._whole is not None:
                self._dgls = self._whole._of_dgls()[self.canonical_etypes[0]]
                set_frames(self._dgls, self.frames)  # `local_scope` may have replaced the frames
            else:
                counts = self.srcnodes.counts, self.dstnodes.counts
                self._dgls = dgl_block(self.edges.sampled, *counts, self.device, self.idtype, self.frames)
        return self._dgls

    def __reduce__(self) -> Any:
        counts = self.srcnodes.counts, self.dstnodes.counts
        return SampledBlock, (self.edges.sampled, *counts, self.device, self.idtype, self.frames)

    def __repr__(self) -> str:
        return (
            f"SampledBlock(num_src_nodes={self.srcnodes.counts}, num_dst_nodes={self.dstnodes.counts}, "
            f"num_edges={self.num_edges()}, device={str(self.device)!r})"
        )


class _NodeViews(dict[str, DataView]):
    """Nodes by type: indexing returns their tensors, calling returns their ids in the block."""

    def __init__(
        self,
        side: str,
        counts: Mapping[str, int],
        frames: Frames,
        device: torch.device,
        idtype: torch.dtype,
    ) -> None:
        super().__init__((name, DataView(frames, (side, name))) for name in counts)
        self.counts, self._device, self._idtype = dict(counts), device, idtype

    def number(self, ntype: str | None) -> int:
        """Number of nodes, of one type or of all."""
        return sum(self.counts.values()) if ntype is None else self.counts[ntype]

    def __call__(self, ntype: str | None = None) -> Tensor:
        (only,) = self.counts if ntype is None else (ntype,)
        return torch.arange(self.counts[only], dtype=self._idtype, device=self._device)


class _EdgeViews:
    """Edges by type: indexing returns their tensors, calling returns their sources and destinations."""

    def __init__(self, edges: Mapping[EdgeType, Edges], frames: Frames, idtype: torch.dtype) -> None:
        self.sampled = dict(edges)
        self.views = {name: DataView(frames, ("edge", name)) for name in edges}
        self._idtype = idtype

    def canonical(self, etype: Any) -> EdgeType:
        """Returns the edge type with a name or triplet; for None, the only edge type.

        Raises:
            KeyError: no edge type matches, or several do.
        """
        found = [name for name in self.sampled if etype in (name, name[1], None)]
        if len(found) != 1:
            raise KeyError(f"etype: expected one of {list(self.sampled)}, got {etype!r}")
        return found[0]

    def of(self, etype: Any) -> Edges:
        return self.sampled[self.canonical(etype)]

    def __getitem__(self, etype: Any) -> DataView:
        return self.views[self.canonical(etype)]

    def __iter__(self) -> Iterator[EdgeType]:
        return iter(self.views)

    def __call__(self, form: str = "uv", order: str | None = "eid", etype: Any = None) -> Any:
        (only,) = self.sampled if etype is None else (etype,)
        source, destination = ends = self.of(only).edge_index.to(self._idtype)
        numbers = torch.arange(source.numel(), dtype=self._idtype, device=source.device)
        if order == "srcdst":
            # The edges are sorted by destination already.
            numbers = source.argsort(stable=True)
            source, destination = ends[:, numbers]
        found = {"uv": (source, destination), "eid": numbers, "all": (source, destination, numbers)}
        return found[form]


class _OfAllTypes(MutableMapping[str, Any]):
    """Tensors of several types of nodes or edges. As in DGL, every name has a dict of tensors by type."""

    def __init__(self, views: Mapping[Any, DataView]) -> None:
        self._views = views

    def __getitem__(self, name: str) -> dict[Any, Tensor]:
        found = {kind: view.data[name] for kind, view in self._views.items() if name in view.data}
        if not found:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, tensors: Mapping[Any, Tensor]) -> None:
        for kind, tensor in tensors.items():
            self._views[kind].data[name] = tensor

    def __delitem__(self, name: str) -> None:
        for kind in self[name]:
            del self._views[kind].data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for view in self._views.values() for name in view.data))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _of_all_types(views: Mapping[Any, DataView]) -> MutableMapping[str, Any]:
    if len(views) == 1:
        data: MutableMapping[str, Any] = next(iter(views.values())).data
        return data
    return _OfAllTypes(views)
