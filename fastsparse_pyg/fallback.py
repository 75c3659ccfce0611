"""Reasons for which several layers fall back to PyG's implementation, and how they are reported."""

from __future__ import annotations

import functools
from typing import TypeGuard

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from fastsparse_core import fallback
from fastsparse_core.fallback import Reason
from fastsparse_core.traced import site_of
from fastsparse_pyg.caching import logger

#: Reports once that PyG's implementation ran: ``tell(class name, reason)``.
tell = functools.partial(fallback.tell, logger, "PyG")
#: Calls PyG's implementation and reports it: ``run(class name, reason, call, *args)``.
run = functools.partial(fallback.run, tell)

#: On the CPU, PyG's code runs for fewer edges, because the overhead of a call exceeds the work for the edges.
FEW_EDGES = 4096
#: Number of edges up to which, on a GPU, a layer of several FastSparse kernels takes longer than PyG's code,
#: because the kernels are launched from Python. Measured on a batch of 512 molecules, and on a citation
#: network with a third of its edges.
FEW_EDGES_ON_GPU = 32_768

# Advice that reasons refer to.
PLAIN_EDGES = "Pass `edge_index` as one int64 tensor of shape (2, num_edges)"
USUAL_FLOW = "Use flow='source_to_target', with the rows of `edge_index` swapped"
PLAIN_FEATURES = "Pass `x` with shape (num_nodes, num_features)"
EDGE_ROWS = "Pass `edge_attr` with shape (num_edges, num_features)"
EDGE_DIM = "Construct the layer with edge_dim=edge_attr.size(1)"
ONE_DTYPE = "Convert them to one dtype"
NOT_COMPILED = "Keep this layer out of torch.compile, for instance with `torch.compiler.disable`"

EXPLAIN_MODE = Reason("explain mode", "")
MESSAGE_HOOK = Reason("a hook on message passing", "")
HOOKED_AGGREGATION = Reason("an aggregation with a hook or a replaced forward()", "")
HOOKED_LINEAR = Reason("a linear layer that was replaced or has hooks", "")
TRACED_BY_JIT = Reason("torch.jit.trace", "")
DECOMPOSED = Reason("decomposed_layers > 1", "Use decomposed_layers=1")
COMPILED = Reason("torch.compile", NOT_COMPILED)
COMPILED_MESSAGES = Reason(
    "torch.compile with pre_layers > 1, or with pre_nns that were replaced or have hooks", NOT_COMPILED
)
SPARSE_MATRIX = Reason("a sparse matrix", PLAIN_EDGES)
EDGE_FEATURES_BESIDE = Reason("a sparse matrix together with edge features", PLAIN_EDGES)
EDGE_FEATURES_WITHIN = Reason("a sparse matrix that carries edge features", PLAIN_EDGES)
TURNED_BIPARTITE = Reason("a bipartite graph with flow='target_to_source'", USUAL_FLOW)
NO_DESTINATIONS = Reason("no features of destinations", "Pass `x` as a pair (sources, destinations)")
PAIR_OF_FEATURES = Reason("a pair of features", PLAIN_FEATURES)
NOT_MATRICES = Reason("features that are not one matrix per side", PLAIN_FEATURES)
EDGES_NOT_A_MATRIX = Reason("edge features that are not a matrix", EDGE_ROWS)
EDGE_FEATURES_OR_NOT = Reason(
    "edge features without edge_dim, or edge_dim without edge features",
    "Pass `edge_attr` if and only if the layer has `edge_dim`",
)
EDGES_MADE_IN_TRACE = Reason(
    "torch.compile of a model that makes or changes its edges",
    "Make the edges outside of the compiled function",
)
TWO_DTYPES = Reason("node features, edge features or weights of different dtypes", ONE_DTYPE)


def wrong_dimensions(dim: int, node_dim: int) -> Reason:
    """Returns the reason for features whose nodes are in another dimension than the kernels expect."""
    return Reason(f"features of {dim} dimensions with node_dim={node_dim}", PLAIN_FEATURES)


def is_edge_list(edges: object) -> TypeGuard[Tensor]:
    """True if edges are a dense tensor; `torch.export` uses another class for them."""
    return isinstance(edges, Tensor) and not isinstance(edges, EdgeIndex) and edges.layout is torch.strided


def of_traced_edges(edges: object) -> Reason | None:
    """Returns why the kernels do not support edges of this kind under ``torch.compile``; None if they do."""
    if not is_edge_list(edges):
        return Reason("torch.compile with a sparse matrix or an EdgeIndex", PLAIN_EDGES)
    if edges.dim() != 2 or edges.size(0) != 2 or edges.is_floating_point():
        return Reason("torch.compile with edges that are not integers of shape (2, num_edges)", PLAIN_EDGES)
    return None if site_of(edges) else EDGES_MADE_IN_TRACE


def watched(why: str) -> Reason | None:
    """Converts the text of `why_watched` to a reason without advice; None if the text is empty."""
    return Reason(why, "") if why else None
