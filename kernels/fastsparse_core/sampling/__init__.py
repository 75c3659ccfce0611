"""Neighbour sampling on the GPU and the CPU, and building blocks of mini-batch loaders."""

from fastsparse_core.sampling.features import FeatureTable
from fastsparse_core.sampling.negative_edges import negative_edges
from fastsparse_core.sampling.neighbor_sampler import Draw, NeighborSampler
from fastsparse_core.sampling.prefetch import prefetched
from fastsparse_core.sampling.sample import Edges, Sample

__all__ = ["Draw", "Edges", "FeatureTable", "NeighborSampler", "Sample", "negative_edges", "prefetched"]
