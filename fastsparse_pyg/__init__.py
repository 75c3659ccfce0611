"""Drop-in PyG layers on FastSparse kernels: the same parameters, options and numbers, less time and memory.

from fastsparse_pyg import FastGCNConv          # was: from torch_geometric.nn import GCNConv
"""

try:
    import torch_geometric as _torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fastsparse_pyg needs PyG, which is not installed: pip install 'fastsparse-gnn[pyg]'"
    ) from error

from fastsparse_core import CBSR, Adjacency, MaxK, __version__
from fastsparse_pyg.acceleration import accelerate, restore
from fastsparse_pyg.caching import cache_info, clear_cache
from fastsparse_pyg.nn import (
    FastAGNNConv,
    FastGATConv,
    FastGATv2Conv,
    FastGCNConv,
    FastGINConv,
    FastHGTConv,
    FastMaxKGCNConv,
    FastMaxKSAGEConv,
    FastRGATConv,
    FastRGCNConv,
    FastSAGEConv,
    FastTransformerConv,
    GraphTransformerLayer,
)
from fastsparse_pyg.preparation import prepare

__all__ = [
    "CBSR",
    "Adjacency",
    "FastAGNNConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastHGTConv",
    "FastMaxKGCNConv",
    "FastMaxKSAGEConv",
    "FastRGATConv",
    "FastRGCNConv",
    "FastSAGEConv",
    "FastTransformerConv",
    "GraphTransformerLayer",
    "MaxK",
    "__version__",
    "accelerate",
    "cache_info",
    "clear_cache",
    "prepare",
    "restore",
]
