"""DGL layers on FastSparse: the same parameters and numbers as the originals, less time and memory.

>>> from fastsparse_dgl import FastGraphConv  # was: from dgl.nn import GraphConv

Importing this package imports DGL, and makes that possible for DGL 2.x on newer PyTorch versions too
(:mod:`fastsparse_dgl.compat`).
"""

from fastsparse_core import CBSR, Adjacency, MaxK, __version__, capture
from fastsparse_dgl import captured_graphs as _captured_graphs  # noqa: F401  (registers DGL's objects)
from fastsparse_dgl.caching import cache_info, clear_cache, prepare
from fastsparse_dgl.dataloading import DataLoader, NeighborSampler
from fastsparse_dgl.hooks import disable, enable, is_enabled
from fastsparse_dgl.layer_swap import accelerate, restore
from fastsparse_dgl.nn import (
    FastAGNNConv,
    FastDotGatConv,
    FastEdgeGATConv,
    FastEGATConv,
    FastGATConv,
    FastGatedGCNConv,
    FastGATv2Conv,
    FastGCNConv,
    FastGINConv,
    FastGINEConv,
    FastGraphConv,
    FastHeteroGraphConv,
    FastMaxKGraphConv,
    FastMaxKSAGEConv,
    FastPNAConv,
    FastSAGEConv,
    GraphTransformerLayer,
)
from fastsparse_dgl.sampled_block import SampledBlock

__all__ = [
    "CBSR",
    "Adjacency",
    "DataLoader",
    "FastAGNNConv",
    "FastDotGatConv",
    "FastEGATConv",
    "FastEdgeGATConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastGINEConv",
    "FastGatedGCNConv",
    "FastGraphConv",
    "FastHeteroGraphConv",
    "FastMaxKGraphConv",
    "FastMaxKSAGEConv",
    "FastPNAConv",
    "FastSAGEConv",
    "GraphTransformerLayer",
    "MaxK",
    "NeighborSampler",
    "SampledBlock",
    "__version__",
    "accelerate",
    "cache_info",
    "capture",
    "clear_cache",
    "disable",
    "enable",
    "is_enabled",
    "prepare",
    "restore",
]
