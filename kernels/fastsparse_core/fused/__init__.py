"""Functions that compute whole layers, each with one node in autograd's graph. Both plugins use them."""
