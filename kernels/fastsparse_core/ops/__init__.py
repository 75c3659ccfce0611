"""Operators on an Adjacency, one module each."""

from fastsparse_core.ops.sddmm import sddmm
from fastsparse_core.ops.spmm import spmm

__all__ = ["sddmm", "spmm"]
