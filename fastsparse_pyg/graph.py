"""Converts everything that PyG's layers accept as `edge_index` to an Adjacency (rows = destinations)."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor

from fastsparse_core import Adjacency, traced
from fastsparse_core.graph_store import BatchEdges
from fastsparse_core.log import range_text, warn_once
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.sampling import Edges
from fastsparse_core.structure.construction import SelfLoops
from fastsparse_pyg.caching import has_unit_values, known_edges, lookup, recognise

#: Types of `edge_index` that layers accept. PyG's EdgeIndex and torch's sparse matrices are tensors.
EdgesLike = Tensor | SparseTensor | Adjacency
_SPARSE_LAYOUTS = (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc)


def num_caller_values(adj: Adjacency) -> int:
    """Returns the number of edge values that the caller has to pass. Inserted self loops do not count."""
    return adj.num_values - (min(adj.shape) if adj.has_inserted_loops else 0)


def is_sparse_matrix(edge_index: object) -> bool:
    """True if the graph is a (transposed) sparse matrix of `torch.sparse` or torch_sparse."""
    if isinstance(edge_index, Tensor):
        return edge_index.layout in _SPARSE_LAYOUTS
    return isinstance(edge_index, SparseTensor)


def resolve(
    edge_index: object,
    num_src: int,
    num_dst: int | None,
    device: torch.device,
    *,
    flow: str = "source_to_target",
    add_self_loops: bool = False,
    matrix_loops: str = "append",
) -> Adjacency:
    """Returns the structure of a layer's `edge_index`. Builds the structure if it is not in the cache.

    Args:
        edge_index: (2, E) int32/int64 tensor, EdgeIndex, transposed adjacency matrix (torch.sparse CSR, COO
            or CSC; torch_sparse.SparseTensor) or Adjacency.
        num_src: number of rows of the source features.
        num_dst: number of destinations; None: the number of rows of a matrix, else `num_src`.
        device: device of the features.
        flow: `"source_to_target"` or `"target_to_source"`, for edge lists.
        add_self_loops: whether to add self loops as PyG's layers do. Edge lists and SparseTensors end up with
            one loop per node. For torch.sparse matrices, see `matrix_loops`. An Adjacency that was built with
            loops is not changed.
        matrix_loops: `"append"`: torch.sparse matrices get one additional loop per node, as in PyG's GCN;
            `"replace"`: their own loops are dropped first, as in PyG's attention layers.

    Raises:
        ValueError: the graph's type, dtype, shape, size or device does not fit.
        IndexError: an index is negative or not smaller than the number of nodes.
    """
    if isinstance(edge_index, Adjacency):
        adj = _from_adjacency(edge_index, add_self_loops)
    elif isinstance(edge_index, Tensor):
        if edge_index.layout is torch.strided:
            if edge_index.device != device:
                _raise_device(edge_index.device, device)
            if isinstance(edge_index, EdgeIndex):
                num_dst = _declared_sizes(edge_index, num_src, num_dst, flow, add_self_loops)
            if num_dst is None:
                num_dst = num_src
            return _from_edge_list(edge_index, num_dst, num_src, flow, add_self_loops)
        _check_flow(flow)
        adj = _from_torch_sparse(edge_index, matrix_loops if add_self_loops else "keep")
    elif isinstance(edge_index, SparseTensor):
        _check_flow(flow)
        adj = _from_sparse_tensor(edge_index, add_self_loops)
    else:
        raise_graph(edge_index)
    if adj.device != device:
        _raise_device(adj.device, device)
    if adj.num_src != num_src or (num_dst is not None and adj.num_dst != num_dst):
        rows = (
            str(num_src)
            if num_dst is None or num_dst == num_src
            else f"{num_src} source and {num_dst} destination"
        )
        raise ValueError(
            f"x: expected {adj.num_src} source and {adj.num_dst} destination rows for a graph of shape "
            f"{adj.shape} (destinations, sources), got {rows} rows; pass the features of this graph"
        )
    return adj


def values_of(edge_index: object) -> Tensor | None:
    """Returns the values of a sparse matrix; None if all are 1, or if the graph is not a sparse matrix."""
    if isinstance(edge_index, SparseTensor):
        value: Tensor | None = edge_index.csr()[2]
        return value
    if not isinstance(edge_index, Tensor) or edge_index.layout is torch.strided:
        return None
    matrix = _coalesced(edge_index)
    value = matrix.values()
    if not value.requires_grad and has_unit_values(matrix, value):
        return None
    # A copy, because PyG's layers raise the version counter of a COO matrix. Autograd would then report an
    # in-place edit of the tensor that it saved for our backward pass.
    return value.clone() if matrix.layout is torch.sparse_coo else value


def raise_graph(edge_index: object, name: str = "edge_index") -> NoReturn:
    """Raises the error for edges of an unsupported type.

    Args:
        edge_index: the unsupported object.
        name: name of the caller's argument.

    Raises:
        ValueError: always.
    """
    got = type(edge_index).__name__
    cure = "pass the edges of your graph"
    if isinstance(edge_index, (list, tuple)) and any(isinstance(each, Tensor) for each in edge_index):
        cure = f"convert it with torch.stack({name})"
    elif isinstance(edge_index, (np.ndarray, list, tuple)):
        cure = "convert it with torch.as_tensor"
    elif isinstance(edge_index, BaseData):
        cure = "pass its edge_index"
    elif got == "SparseTensor":  # our own class, which PyG knows only after `install`
        cure = "call fastsparse_pyg.compat.install() first"
    raise ValueError(
        f"{name}: expected an integer tensor of shape (2, num_edges), an EdgeIndex, a sparse matrix "
        f"(torch.sparse or torch_sparse.SparseTensor) or an Adjacency, got {got}; {cure}"
    )


def _raise_device(got: torch.device, expected: torch.device) -> None:
    raise ValueError(
        f"edge_index: expected device {expected} like x, got {got}; move the graph with .to('{expected}')"
    )


def _check_flow(flow: str) -> None:
    if flow == "target_to_source":
        raise ValueError(
            'flow: expected "source_to_target" for a sparse matrix (its rows are the destinations), got '
            '"target_to_source"; pass the transposed matrix instead, for example adj_t.t()'
        )


# ---------------------------------------------------------------- edge lists


def _from_edge_list(
    edge_index: Tensor, num_dst: int, num_src: int, flow: str, add_self_loops: bool
) -> Adjacency:
    options = (num_dst, num_src, flow, add_self_loops)
    return lookup(edge_index, (edge_index,), options, lambda: build_from_edge_list(edge_index, *options))


#: Value of `add_self_loops`: if no edge is a self loop, the structure gets none, and the kernel adds them.
BY_KERNEL = "by the kernel"
#: Option `add_self_loops` of a layer -> option `self_loops` of a structure.
SELF_LOOPS: dict[bool | str, SelfLoops] = {False: "keep", True: "replace", BY_KERNEL: "replace_if_some"}


def edges_for_loops(edge_index: Tensor, num_nodes: int, flow: str) -> Adjacency:
    """The structure of an edge list for a kernel that can add a loop to every node by itself.

    If some edge is a loop already, the structure contains all loops (`has_inserted_loops`), as from
    :func:`resolve`. Otherwise it has only the given edges, and sorted edges need no sort.
    """
    options = (num_nodes, num_nodes, flow, BY_KERNEL)
    return lookup(edge_index, (edge_index,), options, lambda: build_from_edge_list(edge_index, *options))


def gcn_factors(adj: Adjacency, dtype: torch.dtype, loops: bool = False) -> tuple[Tensor, bool]:
    """Inverse square roots of the degrees, by which GCN multiplies rows and columns.

    Args:
        adj: structure.
        dtype: dtype of the features.
        loops: whether every node gets a self loop. The kernel adds the loops if the structure has none.

    Returns:
        The factors, and whether the kernel has to add the loops.
    """
    is_traced = torch.compiler.is_compiling()  # reading `plans` would make the trace depend on their content
    found: tuple[Tensor, bool] | None = None if is_traced else adj.plans.get(("GCN", dtype, loops))
    if found is None:
        adds = loops and not adj.has_inserted_loops
        found = adj.inv_sqrt_degree(accumulation_dtype(dtype), loops=int(adds)), adds
        if not is_traced:
            adj.plans["GCN", dtype, loops] = found
    return found


def _for_trace(edges: Tensor, num_dst: int, num_src: int, reverse: bool, self_loops: SelfLoops) -> Adjacency:
    """Finds structures for compiled code (see `traced.find`), in the cache of eager layers."""
    flow = "target_to_source" if reverse else "source_to_target"
    add = next(added for added, kind in SELF_LOOPS.items() if kind == self_loops)
    return _from_edge_list(edges, num_dst, num_src, flow, add)  # type: ignore[arg-type]


traced.find = _for_trace


def edges_made_anew(edges: Tensor, options: tuple[int, int, str, bool]) -> Adjacency:
    """Returns the structure of an edge list whose tensor is not in the cache, found by the list's content.

    Layers that add self loops by PyG's code make a new tensor with the same edges in every call. Therefore
    edge lists of one size that occur repeatedly are cached and compared by content.

    Args:
        edges: edge list, (2, num_edges).
        options: (number of destinations, number of sources, flow, whether to add self loops).
    """
    return recognise(edges, options, lambda: build_from_edge_list(edges, *options))


def plain_edges(edge_index: Tensor) -> Tensor:
    """Returns the tensor that an EdgeIndex wraps; returns other tensors unchanged."""
    return edge_index._data if isinstance(edge_index, EdgeIndex) else edge_index


def _cure_of_shape(edges: Tensor) -> str:
    if edges.dim() == 2 and edges.size(1) == 2:
        return "; transpose it with .t()"
    if edges.dim() == 2 and edges.size(0) == edges.size(1):
        return "; if it is a dense adjacency matrix, convert it with torch_geometric.utils.dense_to_sparse"
    return ""


def build_from_edge_list(
    edge_index: Tensor,
    num_dst: int,
    num_src: int,
    flow: str,
    add_self_loops: bool | str,
    *,
    name: str = "edge_index",
) -> Adjacency:
    """Builds the structure of edges without looking into the cache.

    Args:
        edge_index: edges, (2, num_edges); a tensor or an EdgeIndex.
        num_dst: number of destinations.
        num_src: number of sources.
        flow: ``"source_to_target"`` or ``"target_to_source"``.
        add_self_loops: a key of :data:`SELF_LOOPS`.
        name: name of the caller's argument.

    Raises:
        ValueError: the shape is not (2, num_edges), or the dtype is not an integer type.
        IndexError: an edge refers to a node that does not exist.
    """
    edges = plain_edges(edge_index)
    if edges.dim() != 2 or edges.size(0) != 2:
        raise ValueError(
            f"{name}: expected shape (2, num_edges), got {tuple(edges.shape)}{_cure_of_shape(edges)}"
        )
    if edges.dtype not in (torch.int64, torch.int32):
        # PyG accepts narrower integers if it appends loops (in int64), and rejects them otherwise.
        if edges.is_floating_point() or edges.is_complex() or not add_self_loops:
            raise ValueError(
                f"{name}: expected integers, int64 or int32, got {edges.dtype}; convert it with .long()"
            )
        edges = edges.long()
    dst, src = (1, 0) if flow == "source_to_target" else (0, 1)
    known = known_edges(edge_index)
    fits = known is not None and dst == 1 and known.shape == (num_dst, num_src)
    if known is not None and fits and known.has_structure and _needs_no_loops(known, add_self_loops):
        return known.adjacency
    ends = edges.unbind(0)
    try:
        return Adjacency.from_coo(
            ends[dst], ends[src], (num_dst, num_src), self_loops=SELF_LOOPS[add_self_loops]
        )
    except ValueError as error:
        _raise_index_error(edges, {src: num_src, dst: num_dst}, error, name)
        raise


def _needs_no_loops(known: Edges | BatchEdges, add_self_loops: bool | str) -> bool:
    """True if a loader's structure, which has no added self loops, can be used for this option."""
    return not add_self_loops or (add_self_loops == BY_KERNEL and known.has_loops is False)


def cure_of_ids(low: int) -> str:
    """Advice for the error about ids of nodes that do not exist; `low` is the lowest id."""
    if low < 0:
        return "ids must not be negative: keep edge_index[:, (edge_index >= 0).all(0)]"
    return "check that x has a row for every node"


def _raise_index_error(edges: Tensor, sizes: dict[int, int], cause: ValueError, name: str) -> None:
    """Raises IndexError, as PyG does, if an index refers to a node that does not exist."""
    for row, size in sizes.items():
        if edges.size(1):
            low, high = (int(end) for end in torch.aminmax(edges[row]))
            if low < 0 or high >= size:
                expected = f"indices from 0 to {size - 1}" if size else "no edges"
                raise IndexError(
                    f"{name}: expected {expected} in row {row} for {size} nodes, {range_text(low, high)}; "
                    f"{cure_of_ids(low)}"
                ) from cause


def _declared_sizes(
    edge_index: EdgeIndex, num_src: int, num_dst: int | None, flow: str, add_self_loops: bool
) -> int | None:
    """Checks that an EdgeIndex has the same sizes as the features; returns the number of destinations."""
    declared = (edge_index.num_rows, edge_index.num_cols)
    if flow == "target_to_source":
        declared = (declared[1], declared[0])
    if num_dst is None:
        num_dst = declared[1]
    for name, size, got in (("source", declared[0], num_src), ("destination", declared[1], num_dst)):
        # PyG's self loops enlarge an EdgeIndex with fewer rows or columns to the number of nodes.
        if size is not None and size != got and not (add_self_loops and got is not None and size < got):
            raise ValueError(
                f"x: expected {size} {name} rows, as the EdgeIndex says (sparse_size="
                f"{tuple(edge_index.sparse_size())}), got {got}; pass the features of this graph"
            )
    return num_dst


# ---------------------------------------------------------------- sparse matrices


def _coalesced(matrix: Tensor) -> Tensor:
    if matrix.layout is not torch.sparse_coo or matrix.is_coalesced():
        return matrix
    warn_once(
        "the sparse matrix is coalesced and converted in every forward pass, which is slow. Call "
        "`adj_t = adj_t.coalesce()` once before"
    )
    return matrix.coalesce()


def _from_torch_sparse(matrix: Tensor, self_loops: str) -> Adjacency:
    if matrix.layout not in _SPARSE_LAYOUTS:
        raise ValueError(
            f"edge_index: expected a sparse matrix of layout CSR, COO or CSC, got {matrix.layout}; "
            "convert it with .to_sparse_csr()"
        )
    if matrix.dim() != 2 or (matrix.layout is torch.sparse_coo and matrix.sparse_dim() != 2):
        raise ValueError(
            f"edge_index: expected a two-dimensional sparse matrix, got shape {tuple(matrix.shape)}"
        )
    matrix = _coalesced(matrix)
    shape = (matrix.size(0), matrix.size(1))
    layout = matrix.layout
    if layout is torch.sparse_coo:
        first, second = matrix.indices()
    elif layout is torch.sparse_csr:
        first, second = matrix.crow_indices(), matrix.col_indices()
    else:
        first, second = matrix.ccol_indices(), matrix.row_indices()

    def build() -> Adjacency:
        if layout is torch.sparse_coo:
            return Adjacency.from_coo(first, second, shape, self_loops=self_loops)  # type: ignore[arg-type]
        from_compressed = Adjacency.from_csr if layout is torch.sparse_csr else Adjacency.from_csc
        adj = from_compressed(first, second, shape)
        return adj if self_loops == "keep" else with_self_loops(adj, self_loops)

    return lookup(matrix, (first, second), self_loops, build)


def _from_sparse_tensor(matrix: SparseTensor, add_self_loops: bool) -> Adjacency:
    rowptr, col, _ = matrix.csr()
    shape = (matrix.size(0), matrix.size(1))

    def build() -> Adjacency:
        adj = Adjacency.from_csr(rowptr, col, shape)
        return with_self_loops(adj, "replace") if add_self_loops else adj

    return lookup(matrix.storage, (rowptr, col), (shape, add_self_loops), build)


# ---------------------------------------------------------------- Adjacency


def _from_adjacency(adj: Adjacency, add_self_loops: bool) -> Adjacency:
    if add_self_loops and not adj.has_inserted_loops:
        if torch.compiler.is_compiling():
            raise ValueError(
                "edge_index: expected an Adjacency with self loops under torch.compile, got one without; "
                "make it with fastsparse_pyg.prepare(edge_index, num_nodes, add_self_loops=True)"
            )
        return lookup(adj, (), "self_loops", lambda: with_self_loops(adj, "replace"))
    return adj


def caller_edges(adj: Adjacency) -> tuple[Tensor, Tensor]:
    """Returns the destinations and the sources of all stored entries, int64, in the order of edge values."""
    row, col = adj.row().long(), adj.col.long()
    if adj.edge_id is None:
        return row, col
    order = adj.edge_id.argsort()
    return row[order], col[order]


def with_self_loops(adj: Adjacency, kind: str) -> Adjacency:
    """The structure with a self loop on every node; the order of the edge values does not change."""
    if adj.is_partitioned:
        return adj.with_self_loops(kind)  # type: ignore[attr-defined]
    row, col = caller_edges(adj)
    return Adjacency.from_coo(row, col, adj.shape, self_loops=kind)  # type: ignore[arg-type]


def for_pyg(edge_index: Any) -> Any:
    """Edges for PyG's code: int32 is converted to int64.

    On the CPU, ``gather`` of PyTorch 2.13 reads wrong rows if its index is an expanded int32 tensor, so the
    gradients of PyG's messages would be wrong.
    """
    if isinstance(edge_index, Tensor) and edge_index.dtype is torch.int32:
        return edge_index.long()
    return edge_index


def to_edge_index(adj: Adjacency, flow: str) -> Tensor:
    """The edges as PyG writes them, int64 (2, num_edges), in the order of the edge values."""
    dst, src = caller_edges(adj)
    return torch.stack([src, dst] if flow == "source_to_target" else [dst, src])
