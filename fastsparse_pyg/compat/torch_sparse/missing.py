"""Names of torch_sparse that FastSparse does not provide. Their use raises an error with the alternative."""

from __future__ import annotations

from typing import NoReturn

#: Names that exist both as methods of SparseTensor and as functions of torch_sparse.
METHODS = (
    "partition",
    "random_walk",
    "reverse_cuthill_mckee",
    "saint_subgraph",
    "sample",
    "sample_adj",
)
#: Functions that exist only under ``torch.ops.torch_sparse``.
OPERATORS = (
    "ego_k_hop_sample_adj",
    "hetero_neighbor_sample",
    "hetero_temporal_neighbor_sample",
    "hgt_sample",
    "neighbor_sample",
    "temporal_neighbor_sample",
)
_SAMPLERS = "install pyg-lib, which NeighborLoader and ClusterData use instead, or install torch-sparse"
#: Function that exists only in a submodule of torch_sparse -> advice, which ends the error message.
_SUBSTITUTES = {
    "cat.cat_first": "use torch_sparse.cat(tensors, dim=0)",
    "cat.cat_second": "use torch_sparse.cat(tensors, dim=1)",
    **{
        f"matmul.{product}_{reduce}": f"use torch_sparse.matmul(src, other, reduce={reduce!r})"
        for product, reduces in (("spmm", "sum add mean min max"), ("spspmm", "sum add"))
        for reduce in reduces.split()
    },
    "metis.weight2metis": _SAMPLERS,
    "narrow.__narrow_diag__": "use torch_sparse.narrow, one dimension after the other",
    "storage.get_layout": "pass layout='coo', 'csr' or 'csc'",
    **{
        f"tensor.{method}": f"use the method SparseTensor.{method}"
        for method in ["cpu", "cuda", "from_scipy", "is_shared", "share_memory_", "to", "to_scipy"]
    },
    "utils.index_sort": "use torch_geometric.utils.index_sort",
    "utils.is_scalar": "use isinstance(value, (int, float))",
}
_BY_NAME = {full.partition(".")[2]: full for full in _SUBSTITUTES}


def refuse(name: str) -> NoReturn:
    """Raises an ImportError that names the alternative."""
    use = _SUBSTITUTES.get(name, _SAMPLERS)
    raise ImportError(f"torch_sparse.{name}: fastsparse_pyg.compat does not provide it; {use}")


def __getattr__(name: str) -> NoReturn:
    if name in (*METHODS, *OPERATORS, *_BY_NAME):
        refuse(_BY_NAME.get(name, name))
    raise AttributeError(f"module 'torch_sparse' has no attribute {name!r}")
