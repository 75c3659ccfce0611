"""Core of FastSparse: sparse structures and the operators on them, over torch-free CUDA and C++ kernels."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Adjacency", "__version__", "algorithms", "sddmm", "spmm"]

try:
    from fastsparse_core.adjacency import Adjacency
    from fastsparse_core.choose import algorithms
    from fastsparse_core.ops.sddmm import sddmm
    from fastsparse_core.ops.spmm import spmm
except (ImportError, OSError) as error:
    # Torch or the extension is missing or broken: `python -m fastsparse_core.doctor` must still start and say
    # so.
    _reason = error

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"fastsparse_core cannot be loaded ({_reason}); run `python -m fastsparse_core.doctor`"
        ) from _reason
