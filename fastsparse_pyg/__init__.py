"""Drop-in PyG layers on FastSparse kernels: the same parameters, options and numbers, less time and memory.

from fastsparse_pyg import FastGCNConv          # was: from torch_geometric.nn import GCNConv
"""

try:
    import torch_geometric as _torch_geometric  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fastsparse_pyg needs PyG, which is not installed: pip install 'fastsparse-gnn[pyg]'"
    ) from error

from fastsparse_core import CBSR, Adjacency, MaxK, __version__, capture
from fastsparse_pyg import captured_batches as _captured_batches  # noqa: F401  (registers PyG's objects)
from fastsparse_pyg.caching import cache_info, clear_cache
from fastsparse_pyg.layer_swap import accelerate, restore
from fastsparse_pyg.loader import LinkNeighborLoader, NeighborLoader
from fastsparse_pyg.nn import (
    FastAGNNConv,
    FastAPPNP,
    FastARMAConv,
    FastChebConv,
    FastClusterGCNConv,
    FastFastRGCNConv,
    FastGATConv,
    FastGatedGraphConv,
    FastGATv2Conv,
    FastGCN2Conv,
    FastGCNConv,
    FastGINConv,
    FastGINEConv,
    FastGraphConv,
    FastHGTConv,
    FastHypergraphConv,
    FastLabelPropagation,
    FastLGConv,
    FastLightGCN,
    FastMaxKGCNConv,
    FastMaxKSAGEConv,
    FastMFConv,
    FastMixHopConv,
    FastPNAConv,
    FastResGatedGraphConv,
    FastRGATConv,
    FastRGCNConv,
    FastSAGEConv,
    FastSGConv,
    FastSSGConv,
    FastTAGConv,
    FastTransformerConv,
    GraphTransformerLayer,
)
from fastsparse_pyg.preparation import prepare
from fastsparse_pyg.verification import VerificationError

__all__ = [
    "CBSR",
    "Adjacency",
    "FastAGNNConv",
    "FastAPPNP",
    "FastARMAConv",
    "FastChebConv",
    "FastClusterGCNConv",
    "FastFastRGCNConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCN2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastGINEConv",
    "FastGatedGraphConv",
    "FastGraphConv",
    "FastHGTConv",
    "FastHypergraphConv",
    "FastLGConv",
    "FastLabelPropagation",
    "FastLightGCN",
    "FastMFConv",
    "FastMaxKGCNConv",
    "FastMaxKSAGEConv",
    "FastMixHopConv",
    "FastPNAConv",
    "FastRGATConv",
    "FastRGCNConv",
    "FastResGatedGraphConv",
    "FastSAGEConv",
    "FastSGConv",
    "FastSSGConv",
    "FastTAGConv",
    "FastTransformerConv",
    "GraphTransformerLayer",
    "LinkNeighborLoader",
    "MaxK",
    "NeighborLoader",
    "VerificationError",
    "__version__",
    "accelerate",
    "cache_info",
    "capture",
    "clear_cache",
    "prepare",
    "restore",
]
