"""Exact inference over large graphs, layer by layer, for both plugins."""

from fastsparse_core.exact_inference.call import infer
from fastsparse_core.exact_inference.model import Framework, small_graph
from fastsparse_core.exact_inference.tiles import Stage, Tile

__all__ = ["Framework", "Stage", "Tile", "infer", "small_graph"]
