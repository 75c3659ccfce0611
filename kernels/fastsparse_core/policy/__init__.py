"""Rules: which kernel computes a call, how its work is divided, and when a structure is converted.

Every rule is a function of numbers: the `Facts` of the structure and its use, a `GpuProfile`, and the
options of the call. `algorithm_context` defines the names of the algorithms. The measurements behind the
numbers are in docs/dev/choosing.md.
"""

from fastsparse_core.policy.aggregate_linear import (
    casts_first,
    columns_of_products,
    gathers_and_transforms,
    transforms_on_tensor_cores,
)
from fastsparse_core.policy.algorithm_context import (
    ALGORITHMS,
    ATTENTION_ALGORITHMS,
    SDDMM_ALGORITHMS,
    SPMM_ALGORITHMS,
    SSD_ALGORITHMS,
    algorithms,
    allows_tf32,
    check_algorithm,
    eager_requests,
    requested,
)
from fastsparse_core.policy.attention import attention_algorithm, dot_product_algorithm
from fastsparse_core.policy.conversion import (
    MOST_PER_SUM,
    REUSE,
    SCATTERS,
    UNSORTED_USES_OF_FEW,
    counts_sources,
    is_reused,
    scatters,
    sorts_slices,
)
from fastsparse_core.policy.facts import MOST_HEADS, Choice, Facts
from fastsparse_core.policy.row_panels import panel_layout
from fastsparse_core.policy.sddmm import sddmm_algorithm, sddmm_by_entry
from fastsparse_core.policy.spmm import spmm_algorithm, spmm_resident
from fastsparse_core.policy.ssd import (
    long_edge_groups,
    packs_ssd_rows,
    ssd_algorithm,
    ssd_backward_algorithm,
)
from fastsparse_core.policy.tiles import blocks_per_step, csr_tile, features_per_lane

__all__ = [
    "ALGORITHMS",
    "ATTENTION_ALGORITHMS",
    "MOST_HEADS",
    "MOST_PER_SUM",
    "REUSE",
    "SCATTERS",
    "SDDMM_ALGORITHMS",
    "SPMM_ALGORITHMS",
    "SSD_ALGORITHMS",
    "UNSORTED_USES_OF_FEW",
    "Choice",
    "Facts",
    "algorithms",
    "allows_tf32",
    "attention_algorithm",
    "blocks_per_step",
    "casts_first",
    "check_algorithm",
    "columns_of_products",
    "counts_sources",
    "csr_tile",
    "dot_product_algorithm",
    "eager_requests",
    "features_per_lane",
    "gathers_and_transforms",
    "is_reused",
    "long_edge_groups",
    "packs_ssd_rows",
    "panel_layout",
    "requested",
    "scatters",
    "sddmm_algorithm",
    "sddmm_by_entry",
    "sorts_slices",
    "spmm_algorithm",
    "spmm_resident",
    "ssd_algorithm",
    "ssd_backward_algorithm",
    "transforms_on_tensor_cores",
]
