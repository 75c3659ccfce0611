"""Converts a DGLGraph to an Adjacency."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_dgl.compat import dgl

#: What the layers accept as a graph. DGL's own class is untyped.
GraphLike = Any

DGLError = dgl.DGLError


def check_graph(graph: GraphLike) -> None:
    """Raises a DGLError unless ``graph`` is a DGLGraph (blocks included)."""
    if not isinstance(graph, dgl.DGLGraph):
        raise DGLError(
            f"graph: expected a DGLGraph or a fastsparse_core.Adjacency, got {type(graph).__name__}"
        )


def other_device(features: torch.device, graph: torch.device) -> Exception:
    """Makes the DGLError for features on another device than the graph, from where they cannot be used."""
    cure = f"move the features with .to({str(graph)!r})"
    if features.type in ("cpu", "cuda"):
        cure += f", or the graph with .to({str(features)!r})"
    return DGLError(f"features: expected a tensor on {graph} like the graph, got one on {features}; {cure}")


def adjacency_from_graph(graph: GraphLike, device: torch.device) -> Adjacency:
    """Builds the Adjacency of a graph: row = destination, values in the order of DGL's edge ids.

    Args:
        graph: DGLGraph (homogeneous, block, bipartite or batched).
        device: device of the result.

    Raises:
        DGLError: the graph has several edge types, or ``device`` is neither the graph's nor one that graphs
            are copied to (CPU and CUDA).
    """
    graph.get_etype_id(None)
    if device != graph.device and device.type not in ("cpu", "cuda"):
        raise other_device(device, graph.device)
    return adjacency_from_index(graph._graph, device)


def adjacency_from_index(index: Any, device: torch.device) -> Adjacency:
    """Builds the Adjacency of a ``HeteroGraphIndex``, DGL's structure of a graph, with one edge type.

    It uses DGL's tensors, in DGL's ``idtype``. If they are on another device, they are moved to ``device``
    first. So layers run on a GPU even if DGL was built without CUDA.

    Args:
        index: ``graph._graph``.
        device: device of the result.

    Raises:
        ValueError: edges start or end at nodes that the graph does not have.
    """
    source_type, target_type = index.metagraph.find_edge(0)
    shape = (index.num_nodes(target_type), index.num_nodes(source_type))
    # DGL creates any format on demand and stores it, unless the graph is restricted to some formats
    # (``graph.formats(["coo"])``). Using an existing format saves the time and memory for another one.
    formats = index.formats()
    layout = next(
        name
        for state in ("created", "not created")
        for name in ("csc", "coo", "csr")
        if name in formats[state]
    )
    stored = index.adjacency_matrix_tensors(0, layout == "csc", "coo" if layout == "coo" else "csr")
    tensors = [tensor.to(device) for tensor in stored[2:]]
    try:
        if layout == "coo":
            src, dst = tensors
            return Adjacency.from_coo(dst, src, shape)
        pointer, neighbour, edge_id = tensors
        make = Adjacency.from_csr if layout == "csc" else Adjacency.from_csc
        # If the edge ids are 0, 1, 2, ..., DGL leaves them out (length 0).
        return make(pointer, neighbour, shape, edge_id=edge_id if edge_id.numel() else None)
    except ValueError as error:
        # DGL checks the ids of graphs that users make, so only DGL's own functions can make invalid ids.
        raise ValueError(
            f"graph: expected edges between its {shape[1]} sources and {shape[0]} destinations ({error}). "
            "This happens if dgl.to_block gets `dst_nodes` without all nodes at which edges end: add the "
            "missing nodes. It also happens with DGL's samplers and edge_dir='out': use "
            "dgl.reverse(graph, copy_edata=True) and edge_dir='in' instead"
        ) from error


def inv_degree_with_self(adjacency: Adjacency, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns 1 / (in-degree + 1), (num_dst,), the cached factor of a mean over a node and its neighbours."""
    return adjacency.derived(
        ("fastsparse_dgl.inv_degree_with_self", dtype),
        lambda: (adjacency.in_degree() + 1).to(dtype).reciprocal_(),
    )
