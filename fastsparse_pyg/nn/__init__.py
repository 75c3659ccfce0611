"""The layers."""

from fastsparse_pyg.nn.agnn_conv import FastAGNNConv
from fastsparse_pyg.nn.base import DROP_INS as DROP_INS
from fastsparse_pyg.nn.base import FastConv
from fastsparse_pyg.nn.cheb_conv import FastChebConv
from fastsparse_pyg.nn.gat_conv import FastGATConv
from fastsparse_pyg.nn.gatv2_conv import FastGATv2Conv
from fastsparse_pyg.nn.gcn_conv import FastGCNConv
from fastsparse_pyg.nn.gin_conv import FastGINConv
from fastsparse_pyg.nn.gine_conv import FastGINEConv
from fastsparse_pyg.nn.graph_transformer import GraphTransformerLayer
from fastsparse_pyg.nn.hgt_conv import FastHGTConv
from fastsparse_pyg.nn.hypergraph_conv import FastHypergraphConv
from fastsparse_pyg.nn.maxk import FastMaxKGCNConv, FastMaxKSAGEConv
from fastsparse_pyg.nn.mf_conv import FastMFConv
from fastsparse_pyg.nn.pna_conv import FastPNAConv
from fastsparse_pyg.nn.propagation_models import FastLabelPropagation, FastLightGCN
from fastsparse_pyg.nn.res_gated_graph_conv import FastResGatedGraphConv
from fastsparse_pyg.nn.rgat_conv import FastRGATConv
from fastsparse_pyg.nn.rgcn_conv import FastFastRGCNConv, FastRGCNConv
from fastsparse_pyg.nn.sage_conv import FastSAGEConv
from fastsparse_pyg.nn.spmm_convs import (
    FastAPPNP,
    FastARMAConv,
    FastClusterGCNConv,
    FastGatedGraphConv,
    FastGCN2Conv,
    FastGraphConv,
    FastLGConv,
    FastMixHopConv,
    FastSGConv,
    FastSSGConv,
    FastTAGConv,
)
from fastsparse_pyg.nn.transformer_conv import FastTransformerConv

__all__ = [
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

# The last base of each drop-in is PyG's layer; the other bases are ours.
_classes = [globals()[name] for name in __all__]
DROP_INS |= {
    drop_in.__bases__[-1]: drop_in
    for drop_in in _classes
    if issubclass(drop_in, FastConv) and not issubclass(drop_in.__bases__[-1], FastConv)
}
