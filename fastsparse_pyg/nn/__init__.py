"""The layers."""

from fastsparse_pyg.nn.agnn_conv import FastAGNNConv
from fastsparse_pyg.nn.gat_conv import FastGATConv
from fastsparse_pyg.nn.gatv2_conv import FastGATv2Conv
from fastsparse_pyg.nn.gcn_conv import FastGCNConv
from fastsparse_pyg.nn.gin_conv import FastGINConv
from fastsparse_pyg.nn.graph_transformer import GraphTransformerLayer
from fastsparse_pyg.nn.hgt_conv import FastHGTConv
from fastsparse_pyg.nn.maxk import FastMaxKGCNConv, FastMaxKSAGEConv
from fastsparse_pyg.nn.rgat_conv import FastRGATConv
from fastsparse_pyg.nn.rgcn_conv import FastRGCNConv
from fastsparse_pyg.nn.sage_conv import FastSAGEConv
from fastsparse_pyg.nn.transformer_conv import FastTransformerConv

#: PyG's layer -> the drop-in that can take its place in a model.
DROP_INS = {
    drop_in.__bases__[-1]: drop_in
    for drop_in in (
        FastAGNNConv,
        FastGATConv,
        FastGATv2Conv,
        FastGCNConv,
        FastGINConv,
        FastHGTConv,
        FastRGATConv,
        FastRGCNConv,
        FastSAGEConv,
        FastTransformerConv,
    )
}

__all__ = [
    "DROP_INS",
    "FastAGNNConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastHGTConv",
    "FastMaxKGCNConv",
    "FastMaxKSAGEConv",
    "FastRGATConv",
    "FastRGCNConv",
    "FastSAGEConv",
    "FastTransformerConv",
    "GraphTransformerLayer",
]
