"""Drop-ins for PyG's loaders, which make mini-batches of sampled neighbours or of whole graphs."""

from fastsparse_pyg.loader.data_loader import DataLoader
from fastsparse_pyg.loader.link_neighbor_loader import LinkNeighborLoader
from fastsparse_pyg.loader.neighbor_loader import NeighborLoader

__all__ = ["DataLoader", "LinkNeighborLoader", "NeighborLoader"]
