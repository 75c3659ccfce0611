"""The operators on an Adjacency, one module per operator."""

from fastsparse_core.ops.attention import (
    additive_attention,
    additive_attention_weights,
    attention,
    attention_weights,
    gatv2_attention,
    gatv2_attention_weights,
)
from fastsparse_core.ops.edge_messages import gated_aggregate, gated_edges, gine_aggregate
from fastsparse_core.ops.edge_softmax import edge_softmax
from fastsparse_core.ops.maxk import maxk
from fastsparse_core.ops.multi_aggregate import multi_aggregate
from fastsparse_core.ops.sddmm import sddmm
from fastsparse_core.ops.spmm import spmm
from fastsparse_core.ops.ssd import ssd

__all__ = [
    "additive_attention",
    "additive_attention_weights",
    "attention",
    "attention_weights",
    "edge_softmax",
    "gated_aggregate",
    "gated_edges",
    "gatv2_attention",
    "gatv2_attention_weights",
    "gine_aggregate",
    "maxk",
    "multi_aggregate",
    "sddmm",
    "spmm",
    "ssd",
]
