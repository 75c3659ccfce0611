"""Functions of whole layers, each one node of autograd's graph, shared by both plugins."""
