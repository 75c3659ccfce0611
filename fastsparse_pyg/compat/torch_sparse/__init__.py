"""torch_sparse's SparseTensor and functions on FastSparse's kernels and PyTorch's operators.

Samplers and partitioners (``sample_adj``, ``partition``, ``random_walk``, ``saint_subgraph``) are not there.
"""

from typing import Any

from fastsparse_pyg.compat.torch_sparse.diagonal import fill_diag, get_diag, remove_diag, set_diag
from fastsparse_pyg.compat.torch_sparse.elementwise import add, add_nnz, max, mean, min, mul, mul_nnz, sum
from fastsparse_pyg.compat.torch_sparse.functions import (
    cat,
    cat_diag,
    coalesce,
    eye,
    from_scipy,
    from_torch_sparse,
    spmm,
    spspmm,
    t,
    to_scipy,
    to_torch_sparse,
    transpose,
)
from fastsparse_pyg.compat.torch_sparse.products import matmul
from fastsparse_pyg.compat.torch_sparse.selection import (
    index_select,
    index_select_nnz,
    masked_select,
    masked_select_nnz,
    narrow,
    permute,
    select,
)
from fastsparse_pyg.compat.torch_sparse.storage import SparseStorage
from fastsparse_pyg.compat.torch_sparse.tensor import SparseTensor

__version__ = "0.6.18+fastsparse"
__all__ = [
    "SparseStorage",
    "SparseTensor",
    "__version__",
    "add",
    "add_nnz",
    "cat",
    "cat_diag",
    "coalesce",
    "eye",
    "fill_diag",
    "from_scipy",
    "from_torch_sparse",
    "get_diag",
    "index_select",
    "index_select_nnz",
    "masked_select",
    "masked_select_nnz",
    "matmul",
    "max",
    "mean",
    "min",
    "mul",
    "mul_nnz",
    "narrow",
    "permute",
    "remove_diag",
    "select",
    "set_diag",
    "spmm",
    "spspmm",
    "sum",
    "t",
    "to_scipy",
    "to_torch_sparse",
    "transpose",
]

_MISSING = (
    "hgt_sample",
    "partition",
    "random_walk",
    "reverse_cuthill_mckee",
    "saint_subgraph",
    "sample",
    "sample_adj",
)


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise ImportError(
            f"torch_sparse.{name}: fastsparse_pyg.compat does not provide it; sampling and partitioning need "
            "torch-sparse itself, or pyg-lib with PyG's loaders"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
