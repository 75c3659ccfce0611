"""Drop-in layers."""

from fastsparse_dgl.nn.agnn_conv import FastAGNNConv
from fastsparse_dgl.nn.dotgat_conv import FastDotGatConv
from fastsparse_dgl.nn.gat_conv import FastGATConv
from fastsparse_dgl.nn.gatv2_conv import FastGATv2Conv
from fastsparse_dgl.nn.gin_conv import FastGINConv
from fastsparse_dgl.nn.graph_conv import FastGCNConv, FastGraphConv
from fastsparse_dgl.nn.graph_transformer import GraphTransformerLayer
from fastsparse_dgl.nn.maxk import FastMaxKGraphConv, FastMaxKSAGEConv
from fastsparse_dgl.nn.sage_conv import FastSAGEConv

__all__ = [
    "FastAGNNConv",
    "FastDotGatConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastGraphConv",
    "FastMaxKGraphConv",
    "FastMaxKSAGEConv",
    "FastSAGEConv",
    "GraphTransformerLayer",
]
