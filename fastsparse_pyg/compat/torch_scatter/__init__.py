"""torch_scatter's functions on FastSparse's segments: the same names, arguments and results.

Reductions use no atomics, so repeated calls give the same bits. If several elements are the minimum or
maximum, the first of them is chosen.
"""

from fastsparse_pyg.compat.torch_scatter.composite import (
    scatter_log_softmax,
    scatter_logsumexp,
    scatter_softmax,
    scatter_std,
)
from fastsparse_pyg.compat.torch_scatter.reductions import (
    gather_coo,
    gather_csr,
    scatter,
    scatter_add,
    scatter_max,
    scatter_mean,
    scatter_min,
    scatter_mul,
    scatter_sum,
    segment_add_coo,
    segment_add_csr,
    segment_coo,
    segment_csr,
    segment_max_coo,
    segment_max_csr,
    segment_mean_coo,
    segment_mean_csr,
    segment_min_coo,
    segment_min_csr,
    segment_sum_coo,
    segment_sum_csr,
)

__version__ = "2.1.2+fastsparse"
__all__ = [
    "__version__",
    "gather_coo",
    "gather_csr",
    "scatter",
    "scatter_add",
    "scatter_log_softmax",
    "scatter_logsumexp",
    "scatter_max",
    "scatter_mean",
    "scatter_min",
    "scatter_mul",
    "scatter_softmax",
    "scatter_std",
    "scatter_sum",
    "segment_add_coo",
    "segment_add_csr",
    "segment_coo",
    "segment_csr",
    "segment_max_coo",
    "segment_max_csr",
    "segment_mean_coo",
    "segment_mean_csr",
    "segment_min_coo",
    "segment_min_csr",
    "segment_sum_coo",
    "segment_sum_csr",
]
