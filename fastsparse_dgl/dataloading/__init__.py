"""Drop-ins for DGL's loaders, which make blocks of sampled neighbours or batches of whole graphs."""

from fastsparse_dgl.dataloading.dataloader import DataLoader
from fastsparse_dgl.dataloading.graph_data_loader import GraphDataLoader
from fastsparse_dgl.dataloading.neighbor_sampler import MultiLayerFullNeighborSampler, NeighborSampler

__all__ = ["DataLoader", "GraphDataLoader", "MultiLayerFullNeighborSampler", "NeighborSampler"]
