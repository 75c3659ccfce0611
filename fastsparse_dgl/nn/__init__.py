"""Drop-in layers for DGL."""

from fastsparse_dgl.nn.agnn_conv import FastAGNNConv
from fastsparse_dgl.nn.dotgat_conv import FastDotGatConv
from fastsparse_dgl.nn.edge_attention import FastEdgeGATConv, FastEGATConv
from fastsparse_dgl.nn.gat_conv import FastGATConv
from fastsparse_dgl.nn.gated_gcn_conv import FastGatedGCNConv
from fastsparse_dgl.nn.gatv2_conv import FastGATv2Conv
from fastsparse_dgl.nn.gin_conv import FastGINConv
from fastsparse_dgl.nn.gine_conv import FastGINEConv
from fastsparse_dgl.nn.graph_conv import FastGCNConv, FastGraphConv
from fastsparse_dgl.nn.graph_transformer import GraphTransformerLayer
from fastsparse_dgl.nn.hetero_graph_conv import FastHeteroGraphConv
from fastsparse_dgl.nn.maxk import FastMaxKGraphConv, FastMaxKSAGEConv
from fastsparse_dgl.nn.pna_conv import FastPNAConv
from fastsparse_dgl.nn.sage_conv import FastSAGEConv

__all__ = [
    "FastAGNNConv",
    "FastDotGatConv",
    "FastEGATConv",
    "FastEdgeGATConv",
    "FastGATConv",
    "FastGATv2Conv",
    "FastGCNConv",
    "FastGINConv",
    "FastGINEConv",
    "FastGatedGCNConv",
    "FastGraphConv",
    "FastHeteroGraphConv",
    "FastMaxKGraphConv",
    "FastMaxKSAGEConv",
    "FastPNAConv",
    "FastSAGEConv",
    "GraphTransformerLayer",
]

_classes = [globals()[name] for name in __all__]
#: DGL's layer -> the drop-in that can replace it in a model. The last base of such a drop-in is DGL's layer.
#: For the other classes, DGL or the installed version of DGL has no original.
DROP_INS = {
    drop_in.__bases__[-1]: drop_in
    for drop_in in _classes
    if drop_in.__bases__[-1].__module__.startswith("dgl.")
}
