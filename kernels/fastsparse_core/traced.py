"""Structures in code that `torch.compile` or `torch.export` traces.

Tracing records tensors and sizes, but not cached structures of tensors. During tracing, `TracedAdjacency`
represents the structure of an edge list. When the compiled code runs, the operator ``fastsparse::structure``
looks up the structure and returns its handle. The other operators accept this handle in place of an
`Adjacency`. The handle is a number, so CUDA graphs of ``mode="reduce-overhead"`` are recorded once per
structure.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fastsparse_core.cache import AdjacencyCache
from fastsparse_core.gpu import GpuProfile, profile_of
from fastsparse_core.ops._eager import below_autograd
from fastsparse_core.ops._handles import EdgesOfHandle
from fastsparse_core.ops._registration import library, tell_inspect
from fastsparse_core.structure.adjacency import Adjacency, from_handle
from fastsparse_core.structure.construction import SelfLoops

Loops = SelfLoops | Literal["remove"]
_PLACE = "Tensor edges, SymInt num_dst, SymInt num_src, bool reverse, str self_loops, str site"
# CUDA graphs cannot record operators that read the cache. PyTorch 2.8 and newer does not put operators with
# this tag into CUDA graphs.
_tag = getattr(torch.Tag, "cudagraph_unsafe", None)
_tags = () if _tag is None else (_tag,)
library.define(f"structure({_PLACE}) -> SymInt", tags=_tags)
library.define(f"structure_backward(Tensor grad, {_PLACE}) -> SymInt", tags=_tags)
library.define("structure_num_edges(Tensor edges, SymInt adjacency) -> SymInt", tags=_tags)
library.define(
    "structure_part(Tensor edges, SymInt adjacency, str name, SymInt size, ScalarType dtype) -> Tensor",
    tags=_tags,
)


class TracedAdjacency(Adjacency):
    """The structure of edges in traced code. Its attributes are results of operators.

    Args:
        edges: sources, then destinations, int32 or int64 (2, num_edges).
        num_dst: number of destinations.
        num_src: number of sources.
        reverse: if True, the first row of ``edges`` has the destinations, and the second row the sources.
        self_loops: as in :meth:`Adjacency.from_coo`, or ``"remove"``.
        site: name of the edges in the trace, from :func:`site_of`.
    """

    is_padded = True  # the number of entries is known only when the compiled code runs

    def __init__(
        self,
        edges: Tensor,
        num_dst: int,
        num_src: int,
        reverse: bool = False,
        self_loops: Loops = "keep",
        site: str = "input",
    ) -> None:
        self.edges, self.reverse, self.self_loops = edges, reverse, self_loops
        self.num_dst, self.num_src = num_dst, num_src
        self.shape = (num_dst, num_src)
        self._num_given: int = edges.size(1)
        self._inserts = self_loops not in ("keep", "remove")
        self.num_values = self._num_given + min(num_dst, num_src) if self._inserts else self._num_given
        self._num_entries: int | None = self._num_given if self_loops == "keep" else None
        self._merge = None
        self.group_rows = "auto"
        self.plans = {}
        self.site = site
        self.handle: int = torch.ops.fastsparse.structure.default(
            edges, num_dst, num_src, reverse, self_loops, site
        )

    @property
    def device(self) -> torch.device:
        """Device of the structure."""
        return self.edges.device

    @property
    def gpu(self) -> GpuProfile:
        """Profile of the structure's GPU."""
        return profile_of(self.edges.device)

    @property
    def num_edges(self) -> int:
        """Number of entries; if loops are inserted or removed, a symbolic size of its own."""
        if self._num_entries is None:
            found = torch.ops.fastsparse.structure_num_edges.default(self.edges, self.handle)
            torch._check(found >= 0)
            self._num_entries = found
        return self._num_entries

    @property
    def has_inserted_loops(self) -> bool:
        """True if self loops are inserted."""
        return self._inserts

    @property
    def rowptr(self) -> Tensor:  # type: ignore[override]
        """Range of entries of every row, int64 (num_dst + 1,)."""
        return self._part("rowptr", self.num_dst + 1, torch.int64)

    @property
    def col(self) -> Tensor:  # type: ignore[override]
        """Source of every entry, int32 (num_edges,)."""
        return self._part("col", self.num_edges, torch.int32)

    @property
    def edge_id(self) -> Tensor:
        """Position of every entry in the caller's edge order, int64 (num_edges,)."""
        return self._part("edge_id", self.num_edges, torch.int64)

    @property
    def _loop_edge(self) -> Tensor | None:  # type: ignore[override]
        return self._part("loop_edge", min(self.shape), torch.int64) if self.has_inserted_loops else None

    def row(self) -> Tensor:
        """Destination of every entry, int32 (num_edges,)."""
        return self._part("row", self.num_edges, torch.int32)

    def t(self, *, valued: bool = True) -> TracedAdjacency:
        """The transposed structure, for the same edge values."""
        shape = self.num_src, self.num_dst
        return TracedAdjacency(self.edges, *shape, not self.reverse, self.self_loops, self.site)

    def without_self_loops(self) -> TracedAdjacency:
        """The structure without its self loops; edge values keep their order and number."""
        return TracedAdjacency(self.edges, *self.shape, self.reverse, "remove", self.site)

    def derived(self, key: Any, build: Callable[[], Any]) -> Any:
        """Returns ``build()``; nothing is cached, because the result belongs to the traced code."""
        return build()

    def in_degree(self) -> Tensor:
        """Number of entries per row, int64 (num_dst,)."""
        return self._part("in_degree", self.num_dst, torch.int64)

    def out_degree(self) -> Tensor:
        """Number of entries per column, int64 (num_src,)."""
        return self._part("out_degree", self.num_src, torch.int64)

    def is_empty_row(self) -> Tensor:
        """Mask of the destinations without edges, bool (num_dst,)."""
        return self.in_degree() == 0

    def inv_sqrt_degree(self, dtype: torch.dtype = torch.float32, *, loops: int = 0) -> Tensor:
        """Like :meth:`Adjacency.inv_sqrt_degree`."""
        if loops:
            return (self.in_degree() + loops).to(dtype).rsqrt()
        return self._part("inv_sqrt_degree", self.num_dst, dtype)

    def inv_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Like :meth:`Adjacency.inv_degree`."""
        return self._part("inv_degree", self.num_dst, dtype)

    def inv_sqrt_out_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Like :meth:`Adjacency.inv_sqrt_out_degree`."""
        return self._part("inv_sqrt_out_degree", self.num_src, dtype)

    def inv_out_degree(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Like :meth:`Adjacency.inv_out_degree`."""
        return self._part("inv_out_degree", self.num_src, dtype)

    def _part(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        found: Tensor = torch.ops.fastsparse.structure_part.default(
            self.edges, self.handle, name, size, dtype
        )
        return found

    def __repr__(self) -> str:
        return f"TracedAdjacency(shape={self.shape}, self_loops={self.self_loops!r})"


# ---------------------------------------------------------------- when the traced code runs

_cache = AdjacencyCache("fastsparse_core.traced")


def _find(edges: Tensor, num_dst: int, num_src: int, reverse: bool, self_loops: SelfLoops) -> Adjacency:
    """The structure of edges, from this module's cache if possible."""
    dst, src = (0, 1) if reverse else (1, 0)

    def build() -> Adjacency:
        if edges.dim() != 2 or edges.size(0) != 2:
            raise ValueError(f"edges: expected shape (2, num_edges), got {tuple(edges.shape)}")
        ends = edges.unbind(0)
        return Adjacency.from_coo(ends[dst], ends[src], (num_dst, num_src), self_loops=self_loops)

    if edges.is_inference():  # inference tensors have no version counter
        return build()
    stamp = (edges.data_ptr(), edges.stride(), edges._version, edges.shape, edges.dtype)
    return _cache.lookup(edges, stamp, (num_dst, num_src, reverse, self_loops), build)


class _Structures(dict[tuple[bool, str, str], Adjacency]):
    """The last structure of every site, by (reverse, self_loops, site).

    Compiled code frees edges early, so a cache with weak references would lose the structures.
    """


class _Held(threading.local):
    """The structures of each thread, because backward passes on GPUs run in autograd's own threads."""

    of_threads: ClassVar[weakref.WeakValueDictionary[int, _Structures]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.structures = self.of_threads[threading.get_ident()] = _Structures()


_held = _Held()


def clear() -> None:
    """Frees the structures of this module."""
    _cache.clear()
    for structures in list(_Held.of_threads.values()):
        structures.clear()


#: Function that finds the structure of edges. A plugin replaces it, so that traced code and the plugin share
#: the plugin's cache.
find: Callable[[Tensor, int, int, bool, SelfLoops], Adjacency] = _find


def _structure(edges: Tensor, *place: Any) -> int:
    """Handle of the structure of edges.

    Raises:
        RuntimeError: a CUDA graph is captured.
    """
    if edges.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "edge_index: expected an Adjacency in a captured CUDA graph (mode='reduce-overhead' of PyTorch "
            "before 2.8), because a replay would use the old edges; pass fastsparse_pyg.prepare(edge_index)"
        )
    num_dst, num_src, reverse, self_loops, site = place
    with torch.no_grad():
        adj = find(edges, num_dst, num_src, reverse, "keep" if self_loops == "remove" else self_loops)
        adj = adj.without_self_loops() if self_loops == "remove" else adj
    _held.structures[reverse, self_loops, site] = adj
    return adj.handle


def _structure_backward(grad: Tensor, edges: Tensor, *place: Any) -> int:
    """Handle for a backward pass. As an argument, the edges stay alive, and so does their structure."""
    return _structure(edges, *place)


def _structure_num_edges(edges: Tensor, adjacency: int) -> int:
    return from_handle(adjacency).num_edges


def _structure_part(edges: Tensor, adjacency: int, name: str, size: int, dtype: torch.dtype) -> Tensor:
    adj = from_handle(adjacency)
    with torch.no_grad():
        if name.startswith("inv_"):
            found = getattr(adj, name)(dtype)
        elif name == "loop_edge":
            known = adj._loop_edge
            found = known if isinstance(known, Tensor) else edges.new_full((size,), -1, dtype=dtype)
        elif name == "edge_id":
            found = torch.arange(size, device=edges.device) if adj.edge_id is None else adj.edge_id
        else:
            found = getattr(adj, name)
            found = found if isinstance(found, Tensor) else found()
        return found.to(dtype, copy=True)  # compiled code may write into it


def _number(edges: Tensor) -> torch.SymInt:
    """Makes a new symbolic integer in the trace of ``edges``."""
    return cast("Any", edges).fake_mode.shape_env.create_unbacked_symint()


def _traced(edges: Tensor, *place: Any) -> Any:
    """Calls ``fastsparse::structure``, and stores the edges in a symbolic handle, for the backward pass."""
    with below_autograd():
        handle = torch.ops.fastsparse.structure.default(edges, *place)
    if isinstance(handle, torch.SymInt):
        handle.node.edges_of_handle = EdgesOfHandle(edges, place, edges._version)
    return handle


for _key in ("CPU", "CUDA"):
    library.impl("structure", _structure, _key)
    library.impl("structure_backward", _structure_backward, _key)
    library.impl("structure_num_edges", _structure_num_edges, _key)
    library.impl("structure_part", _structure_part, _key)
library.impl("structure", _traced, "Autograd")
tell_inspect(__name__)
torch.library.register_fake("fastsparse::structure", lambda edges, *place: _number(edges), lib=library)
torch.library.register_fake("fastsparse::structure_num_edges", lambda edges, _: _number(edges), lib=library)
torch.library.register_fake(
    "fastsparse::structure_backward", lambda grad, edges, *place: _number(edges), lib=library
)
torch.library.register_fake(
    "fastsparse::structure_part",
    lambda edges, adjacency, name, size, dtype: edges.new_empty(size, dtype=dtype),
    lib=library,
)


# ---------------------------------------------------------------- which edges have cached structures


class _Seen:
    site = ""


_seen = _Seen()


def site_of(edges: Tensor) -> str:
    """Name of edges that are an input of the traced code; "" for edges that the code makes or changes.

    Structures of edges that the code makes are not cached. The cache identifies edges by tensor and version,
    but Inductor reuses the memory and the tensor object of intermediate edges without a new version, and
    ``torch.export`` makes new tensors in every run.
    """
    if not torch.compiler.is_dynamo_compiling():
        return "input"
    from torch._dynamo.comptime import comptime

    comptime(_look)
    return _take()


def _look(trace: Any) -> None:
    """Called by the compiler while it traces :func:`site_of`."""
    try:
        edges = trace.get_local("edges")
        source = edges._i_will_not_complain_if_bc_breaks_VariableTracker().source
        is_unchanged = source is not None and edges.as_fake()._version == 0
        _seen.site = str(edges.as_proxy().node.name) if is_unchanged else ""
    except Exception:  # another version of PyTorch, whose compiler has other attributes
        _seen.site = ""


def _take() -> str:
    found, _seen.site = _seen.site, ""
    return found


# torch.compiler.assume_constant_result sets this attribute too, but imports the compiler, which takes a
# second.
_take._dynamo_marked_constant = True  # type: ignore[attr-defined]
