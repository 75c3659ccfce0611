"""Drop-in PyG layers on FastSparse kernels, with the same parameters and options as PyG's.

from fastsparse_pyg import FastGCNConv          # was: from torch_geometric.nn import GCNConv
"""

from typing import TYPE_CHECKING

try:
    import torch_geometric as _torch_geometric
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fastsparse_pyg needs PyG, which is not installed: pip install 'fastsparse-gnn[pyg]'"
    ) from error

from fastsparse_core import CBSR, Adjacency, MaxK, __version__
from fastsparse_core.layer_swap import no_such_name as _no_such_name
from fastsparse_core.lazy import extend as _extend
from fastsparse_core.lazy import lazy_name as _lazy_name
from fastsparse_pyg.caching import cache_info, clear_cache
from fastsparse_pyg.hooks import disable, enable, is_enabled
from fastsparse_pyg.loader import DataLoader, LinkNeighborLoader, NeighborLoader
from fastsparse_pyg.preparation import prepare

__all__ = [
    "CBSR",
    "Adjacency",
    "DataLoader",
    "Explanation",
    "Explanations",
    "LinkNeighborLoader",
    "MaxK",
    "NeighborLoader",
    "VerificationError",
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
    "tiled",
    "why",
]
#: The names that `fastsparse_pyg.nn` exports. They are repeated here, so that `nn` is imported only on use.
_LAYERS = [
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
]
__all__ += _LAYERS

#: Name -> module that is imported when the name is first used.
_LAZY = dict.fromkeys(_LAYERS, "fastsparse_pyg.nn") | {
    "Explanation": "fastsparse_pyg.explanation",
    "Explanations": "fastsparse_pyg.explanation",
    "VerificationError": "fastsparse_pyg.verification",
    "accelerate": "fastsparse_pyg.layer_swap",
    "capture": "fastsparse_core.capturing",
    "inference": "fastsparse_pyg.exact_inference",
    "nn": "fastsparse_pyg.nn",
    "restore": "fastsparse_pyg.layer_swap",
    "tiled": "fastsparse_pyg.tiling",
    "why": "fastsparse_pyg.explanation",
}
_extend("fastsparse_core.capturing", "fastsparse_pyg.captured_batches")  # lets `capture` handle PyG's batches

if TYPE_CHECKING:  # with a module-level __getattr__, type checkers accept every misspelt name
    from fastsparse_core.capturing import capture
    from fastsparse_pyg.exact_inference import inference
    from fastsparse_pyg.explanation import Explanation, Explanations, why
    from fastsparse_pyg.layer_swap import accelerate, restore
    from fastsparse_pyg.nn import *  # noqa: F403
    from fastsparse_pyg.tiling import tiled
    from fastsparse_pyg.verification import VerificationError
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return _lazy_name(__name__, _LAZY, name)
        raise _no_such_name(
            __name__, name, _torch_geometric.nn, "accelerate(model) and enable() speed up PyG's"
        )

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
