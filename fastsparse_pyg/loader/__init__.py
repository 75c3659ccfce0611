"""PyG's loaders of sampled mini-batches on FastSparse's sampler."""

from fastsparse_pyg.loader.link_neighbor_loader import LinkNeighborLoader
from fastsparse_pyg.loader.neighbor_loader import NeighborLoader

__all__ = ["LinkNeighborLoader", "NeighborLoader"]
