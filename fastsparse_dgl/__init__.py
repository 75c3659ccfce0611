"""Drop-in DGL layers on FastSparse kernels, with the same parameters and options as DGL's.

>>> from fastsparse_dgl import FastGraphConv  # was: from dgl.nn import GraphConv

Importing this package imports DGL, and also makes DGL 2.x importable with newer PyTorch versions.
"""

from typing import TYPE_CHECKING

from fastsparse_core import CBSR, Adjacency, MaxK, __version__
from fastsparse_core.layer_swap import no_such_name as _no_such_name
from fastsparse_core.lazy import extend as _extend
from fastsparse_core.lazy import lazy_name as _lazy_name
from fastsparse_dgl.caching import cache_info, clear_cache, prepare
from fastsparse_dgl.compat import dgl as _dgl
from fastsparse_dgl.dataloading import (
    DataLoader,
    GraphDataLoader,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
)
from fastsparse_dgl.hooks import disable, enable, is_enabled
from fastsparse_dgl.sampled_block import SampledBlock

__all__ = [
    "CBSR",
    "Adjacency",
    "DataLoader",
    "Explanation",
    "Explanations",
    "GraphDataLoader",
    "MaxK",
    "MultiLayerFullNeighborSampler",
    "NeighborSampler",
    "SampledBlock",
    "__version__",
    "accelerate",
    "cache_info",
    "capture",
    "clear_cache",
    "disable",
    "enable",
    "inference",
    "is_enabled",
    "prepare",
    "restore",
    "why",
]
#: The names that `fastsparse_dgl.nn` exports. They are repeated here, so that `nn` is imported only on use.
_LAYERS = [
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
]
__all__ += _LAYERS

#: Name -> module that is imported when the name is first used.
_LAZY = dict.fromkeys(_LAYERS, "fastsparse_dgl.nn") | {
    "Explanation": "fastsparse_dgl.explanation",
    "Explanations": "fastsparse_dgl.explanation",
    "accelerate": "fastsparse_dgl.layer_swap",
    "capture": "fastsparse_core.capturing",
    "inference": "fastsparse_dgl.exact_inference",
    "nn": "fastsparse_dgl.nn",
    "restore": "fastsparse_dgl.layer_swap",
    "why": "fastsparse_dgl.explanation",
}
_extend("fastsparse_core.capturing", "fastsparse_dgl.captured_graphs")  # lets `capture` handle DGL's graphs

if TYPE_CHECKING:  # with a module-level __getattr__, type checkers accept every misspelt name
    from fastsparse_core.capturing import capture
    from fastsparse_dgl.exact_inference import inference
    from fastsparse_dgl.explanation import Explanation, Explanations, why
    from fastsparse_dgl.layer_swap import accelerate, restore
    from fastsparse_dgl.nn import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return _lazy_name(__name__, _LAZY, name)
        raise _no_such_name(__name__, name, _dgl.nn, "after enable(), FastSparse's operators run DGL's")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
