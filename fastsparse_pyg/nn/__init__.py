"""The layers."""

from fastsparse_pyg.nn.gcn_conv import FastGCNConv
from fastsparse_pyg.nn.gin_conv import FastGINConv
from fastsparse_pyg.nn.sage_conv import FastSAGEConv

__all__ = ["FastGCNConv", "FastGINConv", "FastSAGEConv"]
