"""torch_sparse's SparseTensor and functions on FastSparse's kernels and PyTorch's operators.

Samplers and partitioners (``sample_adj``, ``partition``, ``random_walk``, ``saint_subgraph``) are missing.
"""

from fastsparse_pyg.compat.torch_sparse.diagonal import fill_diag, get_diag, remove_diag, set_diag
from fastsparse_pyg.compat.torch_sparse.elementwise import (
    add,
    add_,
    add_nnz,
    add_nnz_,
    max,
    mean,
    min,
    mul,
    mul_,
    mul_nnz,
    mul_nnz_,
    sum,
)
from fastsparse_pyg.compat.torch_sparse.functions import (
    cat,
    cat_diag,
    coalesce,
    eye,
    from_scipy,
    from_torch_sparse,
    spadd,
    spmm,
    spspmm,
    t,
    to_scipy,
    to_torch_sparse,
    transpose,
)
from fastsparse_pyg.compat.torch_sparse.missing import __getattr__
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
    "__getattr__",
    "__version__",
    "add",
    "add_",
    "add_nnz",
    "add_nnz_",
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
    "mul_",
    "mul_nnz",
    "mul_nnz_",
    "narrow",
    "permute",
    "remove_diag",
    "select",
    "set_diag",
    "spadd",
    "spmm",
    "spspmm",
    "sum",
    "t",
    "to_scipy",
    "to_torch_sparse",
    "transpose",
]
