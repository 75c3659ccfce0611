"""Samplers and partitioners of torch_sparse, which are not there: they say so when they are asked for."""

from __future__ import annotations

from typing import NoReturn

#: Methods of SparseTensor, which are functions of torch_sparse too.
METHODS = (
    "partition",
    "random_walk",
    "reverse_cuthill_mckee",
    "saint_subgraph",
    "sample",
    "sample_adj",
)
#: What there is only under ``torch.ops.torch_sparse``.
OPERATORS = (
    "ego_k_hop_sample_adj",
    "hetero_neighbor_sample",
    "hetero_temporal_neighbor_sample",
    "hgt_sample",
    "neighbor_sample",
    "temporal_neighbor_sample",
)


def refuse(name: str) -> NoReturn:
    """Raises ImportError: samplers and partitioners have to come from another package."""
    raise ImportError(
        f"torch_sparse.{name}: fastsparse_pyg.compat does not provide it; install pyg-lib, whose samplers "
        "and partitioners PyG takes before torch-sparse's, or torch-sparse itself"
    )


def __getattr__(name: str) -> NoReturn:
    if name in (*METHODS, *OPERATORS):
        refuse(name)
    raise AttributeError(f"module 'torch_sparse' has no attribute {name!r}")
