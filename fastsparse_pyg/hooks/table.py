"""Table of the names in PyG that each part of `enable` replaces."""

from __future__ import annotations

# The modules whose names are replaced must be imported first.
import torch_geometric.loader
import torch_geometric.nn.aggr
import torch_geometric.nn.norm
import torch_geometric.nn.pool  # noqa: F401

from fastsparse_core.replacement import Hook
from fastsparse_pyg import loader
from fastsparse_pyg.first_calls import FIRST_CALLS
from fastsparse_pyg.hooks import functions

_POOLING = tuple(f"torch_geometric.nn.{name}" for name in ("aggr", "norm", "pool"))


def _is_pooling(module: str) -> bool:
    return module.startswith(_POOLING)


def _is_foreign(module: str) -> bool:
    return not module.startswith("fastsparse_")


def _is_elsewhere(module: str) -> bool:
    return _is_foreign(module) and not _is_pooling(module)


_SCATTER = "src, index, dim, dim_size, reduce"
_SOFTMAX = "src, index, ptr, num_nodes, dim"
_LAYER = "torch_geometric.nn.conv:MessagePassing"

HOOKS: dict[str, tuple[Hook, ...]] = {
    "layers": (
        Hook(_LAYER, "__call__", None, FIRST_CALLS.call),
        Hook(_LAYER, "__reduce_ex__", None, FIRST_CALLS.reduce_ex, wraps=True),
    ),
    "scatter": (
        Hook("torch_geometric.utils", "scatter", _SCATTER, functions.scatter, True, _is_elsewhere),
        Hook("torch_geometric.utils", "softmax", _SOFTMAX, functions.softmax, True, _is_elsewhere),
        Hook("torch_geometric.utils", "segment", "src, ptr, reduce", functions.segment, True, _is_elsewhere),
        Hook("torch_geometric.utils", "spmm", "src, other, reduce", functions.spmm, True, _is_foreign),
        Hook(
            "torch_geometric.utils", "degree", "index, num_nodes, dtype", functions.degree, True, _is_foreign
        ),
    ),
    "pool": (
        Hook("torch_geometric.utils", "scatter", _SCATTER, functions.scatter, True, _is_pooling),
        Hook("torch_geometric.utils", "softmax", _SOFTMAX, functions.softmax, True, _is_pooling),
        Hook("torch_geometric.utils", "segment", "src, ptr, reduce", functions.segment, True, _is_pooling),
    ),
    "loaders": tuple(
        Hook("torch_geometric.loader", name, None, getattr(loader, name), False, _is_foreign)
        for name in loader.__all__
    ),
}
