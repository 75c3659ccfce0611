"""`prepare`: converts a graph before the first layer needs it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from fastsparse_core import Adjacency
from fastsparse_core.content import check_content
from fastsparse_pyg.graph import resolve


def prepare(
    graph: Any,
    num_nodes: int | tuple[int, int] | None = None,
    *,
    add_self_loops: bool = False,
    flow: str = "source_to_target",
    backward: bool = True,
) -> Adjacency:
    """Converts a graph now, and builds everything that later training steps would build on first use.

    Layers convert their graph at their first call and cache the result. Call this function to convert the
    graph earlier, to pass the result to layers in place of `edge_index`, or to store the result with the
    data. A `Data` or `Batch` also gets the result as its attribute `adjacency`, which moves with
    `data.to(device)` and is pickled with the data. After a change of the edges, call `prepare` again. Prepare
    a batch, not its items.

    Args:
        graph: `Data` or `Batch` (its `edge_index`, else its `adj_t`), (2, E) int32/int64 tensor, EdgeIndex,
            torch.sparse matrix or SparseTensor (rows = destinations), or an Adjacency.
        num_nodes: number of nodes, or (number of sources, number of destinations) like PyG's `size`; None:
            taken from the data or the matrix, else the largest index + 1.
        add_self_loops: whether to add the self loops that layers with ``add_self_loops=True`` need, such as
            FastGCNConv, FastSGConv and FastGATConv. These layers also accept a structure without loops: they
            add them once and cache the result, except under `torch.compile`. Other layers use the structure
            unchanged.
        flow: flow of the layers, for edge lists.
        backward: whether to also build the data for the backward pass.

    Returns:
        The structure, rows = destinations.

    Raises:
        TypeError: `graph` is a HeteroData; prepare each edge type separately.
        ValueError: the graph's type, dtype, shape or size does not fit, or `data.adjacency` is something
            else.
        IndexError: an index is negative or not smaller than the number of nodes.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import prepare
        >>> prepare(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3).shape
        (3, 3)
    """
    if isinstance(graph, HeteroData):
        raise TypeError(
            "graph: expected a graph of one edge type, got HeteroData; prepare each edge type: "
            "prepare(data[edge_type].edge_index, (num_src, num_dst))"
        )
    if flow not in ("source_to_target", "target_to_source"):
        raise ValueError(f"flow: expected 'source_to_target' or 'target_to_source', got {flow!r}")
    if isinstance(graph, Data):
        return _prepare_data(graph, num_nodes, add_self_loops=add_self_loops, flow=flow, backward=backward)
    if type(graph) is not EdgeIndex and isinstance(graph, Tensor) and graph.layout is torch.strided:
        check_content("edge_index", graph)
    num_src, num_dst = _sizes(graph, num_nodes, flow)
    adj = resolve(graph, num_src, num_dst, _device(graph), flow=flow, add_self_loops=add_self_loops)
    with torch.inference_mode(False):
        return adj.prepare(backward=backward)


def _prepare_data(data: Data, num_nodes: int | tuple[int, int] | None, **options: Any) -> Adjacency:
    previous = data.get("adjacency")
    if previous is not None and not isinstance(previous, Adjacency):
        raise ValueError(
            f"data.adjacency: expected no such attribute or an Adjacency, got {type(previous).__name__}; "
            "rename it, or call prepare(data.edge_index, data.num_nodes) and keep the result elsewhere"
        )
    edges = data.get("edge_index")
    if edges is None:
        edges = data.get("adj_t")
    if edges is None:
        raise ValueError("data: expected an attribute edge_index or adj_t, got neither")
    if num_nodes is None and not is_torch_sparse_tensor(edges) and not isinstance(edges, SparseTensor):
        num_nodes = data.num_nodes
    data.adjacency = prepare(edges, num_nodes, **options)
    return data.adjacency


def _sizes(graph: Any, num_nodes: int | tuple[int, int] | None, flow: str) -> tuple[int, int]:
    """Returns (number of sources, number of destinations)."""
    if num_nodes is not None:
        sizes = num_nodes if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
        if len(sizes) != 2 or not all(hasattr(size, "__index__") and size >= 0 for size in sizes):
            raise ValueError(
                "num_nodes: expected a number of nodes of at least 0, or (sources, destinations), got "
                f"{num_nodes!r}; None: as many as the edges need"
            )
        num_src, num_dst = map(operator.index, sizes)
        return num_src, num_dst
    if isinstance(graph, Adjacency):
        return graph.num_src, graph.num_dst
    if isinstance(graph, SparseTensor) or is_torch_sparse_tensor(graph):
        return graph.size(1), graph.size(0)
    if isinstance(graph, EdgeIndex) and None not in graph.sparse_size():
        rows, cols = graph.sparse_size()
        return (rows, cols) if flow == "source_to_target" else (cols, rows)
    if isinstance(graph, Tensor):
        num = int(graph.max()) + 1 if graph.numel() else 0
        return num, num
    return 0, 0  # not a graph: `resolve` raises the error


def _device(graph: Any) -> torch.device:
    if isinstance(graph, SparseTensor):
        return graph.device()
    return graph.device if isinstance(graph, (Tensor, Adjacency)) else torch.device("cpu")
