"""Choice of algorithm and tuning parameters, from structure statistics and crossovers measured on an H200.

`algorithm_context` says what a call asks for; a module per operator says which kernel serves it; `slices` and
`tiles` say how that kernel cuts its work, and `conversion` when another form of the structure is worth
building. The measurements behind the numbers are in docs/dev/choosing.md.
"""

from fastsparse_core.policy.aggregate_linear import (
    casts_first,
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
    check_algorithm,
    requested,
)
from fastsparse_core.policy.attention import attention_algorithm
from fastsparse_core.policy.conversion import (
    MOST_PER_SUM,
    REUSE,
    SCATTERS,
    UNSORTED_USES,
    counts_sources,
    scatters,
)
from fastsparse_core.policy.gpu import MOST_HEADS
from fastsparse_core.policy.row_panels import panel_layout
from fastsparse_core.policy.sddmm import sddmm_algorithm, sddmm_by_entry
from fastsparse_core.policy.slices import (
    run_blocks,
    sddmm_run_blocks,
    sddmm_slice_blocks,
    slice_blocks,
    slice_length,
)
from fastsparse_core.policy.spmm import spmm_algorithm, spmm_resident
from fastsparse_core.policy.ssd import (
    SHORT_EDGE_GROUP,
    edge_group_length,
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
    "SHORT_EDGE_GROUP",
    "SPMM_ALGORITHMS",
    "SSD_ALGORITHMS",
    "UNSORTED_USES",
    "algorithms",
    "attention_algorithm",
    "blocks_per_step",
    "casts_first",
    "check_algorithm",
    "counts_sources",
    "csr_tile",
    "edge_group_length",
    "features_per_lane",
    "gathers_and_transforms",
    "long_edge_groups",
    "packs_ssd_rows",
    "panel_layout",
    "requested",
    "run_blocks",
    "scatters",
    "sddmm_algorithm",
    "sddmm_by_entry",
    "sddmm_run_blocks",
    "sddmm_slice_blocks",
    "slice_blocks",
    "slice_length",
    "spmm_algorithm",
    "spmm_resident",
    "ssd_algorithm",
    "ssd_backward_algorithm",
    "transforms_on_tensor_cores",
]
