"""Structures of sparse graphs, and the data derived from them."""
