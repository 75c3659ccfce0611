"""Drop-in layers."""

from fastsparse_dgl.nn.gin_conv import FastGINConv
from fastsparse_dgl.nn.graph_conv import FastGCNConv, FastGraphConv
from fastsparse_dgl.nn.sage_conv import FastSAGEConv

__all__ = ["FastGCNConv", "FastGINConv", "FastGraphConv", "FastSAGEConv"]
