"""The layers."""

from fastsparse_pyg.nn.agnn_conv import FastAGNNConv
from fastsparse_pyg.nn.cheb_conv import FastChebConv
from fastsparse_pyg.nn.gat_conv import FastGATConv
from fastsparse_pyg.nn.gatv2_conv import FastGATv2Conv
from fastsparse_pyg.nn.gcn_conv import FastGCNConv
from fastsparse_pyg.nn.gin_conv import FastGINConv
from fastsparse_pyg.nn.graph_transformer import GraphTransformerLayer
from fastsparse_pyg.nn.hypergraph_conv import FastHypergraphConv
from fastsparse_pyg.nn.maxk import FastMaxKGCNConv, FastMaxKSAGEConv
from fastsparse_pyg.nn.propagation_models import FastLabelPropagation, FastLightGCN
from fastsparse_pyg.nn.sage_conv import FastSAGEConv
from fastsparse_pyg.nn.spmm_convs import (
    FastAPPNP,
    FastARMAConv,
    FastClusterGCNConv,
    FastGatedGraphConv,
    FastGCN2Conv,
    FastGraphConv,
    FastLGConv,
    FastSGConv,
    FastSSGConv,
    FastTAGConv,
)
from fastsparse_pyg.nn.transformer_conv import FastTransformerConv

#: PyG's layer -> the drop-in that can take its place in a model.
DROP_INS = {
    drop_in.__bases__[-1]: drop_in
    for drop_in in (
        FastAGNNConv,
        FastAPPNP,
        FastARMAConv,
        FastChebConv,
        FastClusterGCNConv,
        FastGATConv,
        FastGATv2Conv,
        FastGCN2Conv,
        FastGCNConv,
        FastGINConv,
        FastGatedGraphConv,
        FastGraphConv,
        FastHypergraphConv,
        FastLGConv,
        FastLabelPropagation,
        FastSAGEConv,
        FastSGConv,
        FastSSGConv,
        FastTAGConv,
        FastTransformerConv,
    )
}

__all__ = [
    "DROP_INS",
    "FastAGNNConv",
    "FastAPPNP",
    "FastARMAConv",
    "FastChebConv",
    "FastClusterGCNConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCN2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastGatedGraphConv",
    "FastGraphConv",
    "FastHypergraphConv",
    "FastLGConv",
    "FastLabelPropagation",
    "FastLightGCN",
    "FastMaxKGCNConv",
    "FastMaxKSAGEConv",
    "FastSAGEConv",
    "FastSGConv",
    "FastSSGConv",
    "FastTAGConv",
    "FastTransformerConv",
    "GraphTransformerLayer",
]
