"""DGL's sampler and loader of mini-batches on FastSparse's sampler."""

from fastsparse_dgl.dataloading.dataloader import DataLoader
from fastsparse_dgl.dataloading.neighbor_sampler import NeighborSampler

__all__ = ["DataLoader", "NeighborSampler"]
