"""Core of FastSparse: sparse structures and operators on CUDA and C++ kernels that do not link to PyTorch."""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "CBSR",
    "Adjacency",
    "MaxK",
    "NeighborSampler",
    "SlowPathWarning",
    "__version__",
    "additive_attention",
    "additive_attention_weights",
    "algorithms",
    "attention",
    "attention_weights",
    "capture",
    "edge_softmax",
    "gated_aggregate",
    "gated_edges",
    "gather_csr",
    "gatv2_attention",
    "gatv2_attention_weights",
    "gine_aggregate",
    "maxk",
    "multi_aggregate",
    "report",
    "scatter",
    "scatter_softmax",
    "sddmm",
    "segment_reduce",
    "segment_softmax",
    "spmm",
    "ssd",
]

try:
    from fastsparse_core import openmp as _openmp  # noqa: F401  # isort: skip  (before the extension)
    from fastsparse_core import dgl_import as _dgl_import  # noqa: F401  (lets `import dgl` work from here on)
    from fastsparse_core import traced as _traced  # noqa: F401  (operators of compiled and exported programs)
    from fastsparse_core.call_report import report
    from fastsparse_core.device import unusable_gpu as _unusable_gpu
    from fastsparse_core.formats import CBSR
    from fastsparse_core.lazy import lazy_name as _lazy_name
    from fastsparse_core.log import SlowPathWarning
    from fastsparse_core.log import warn_once as _warn_once
    from fastsparse_core.maxk_activation import MaxK
    from fastsparse_core.ops import (
        additive_attention,
        additive_attention_weights,
        attention,
        attention_weights,
        edge_softmax,
        gated_aggregate,
        gated_edges,
        gatv2_attention,
        gatv2_attention_weights,
        gine_aggregate,
        maxk,
        multi_aggregate,
        sddmm,
        spmm,
        ssd,
    )
    from fastsparse_core.policy import algorithms
    from fastsparse_core.segment import (
        gather_csr,
        scatter,
        scatter_softmax,
        segment_reduce,
        segment_softmax,
    )
    from fastsparse_core.structure.adjacency import Adjacency
except (ImportError, OSError) as error:
    # If PyTorch or the extension is missing or broken, `python -m fastsparse_core.doctor` must still start
    # and report the problem.
    _reason = error

    if not TYPE_CHECKING:  # otherwise a type checker would accept every misspelt name

        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise ImportError(
                f"fastsparse_core cannot be loaded ({_reason}); run `python -m fastsparse_core.doctor`"
            ) from _reason
else:
    if _unusable_gpu():
        _warn_once(_unusable_gpu())

    #: Name -> module that is imported when the name is first used.
    _LAZY = {
        "NeighborSampler": "fastsparse_core.sampling",
        "capture": "fastsparse_core.capturing",
        "capturing": "fastsparse_core.capturing",
        "sampling": "fastsparse_core.sampling",
    }
    #: Old name -> (``module:attribute`` that it returns, new name, version that drops the old name). The
    #: rules for such names are in CONTRIBUTING.md.
    _RENAMED = {"CapturedStep": ("fastsparse_core.capturing.decorator:captured_step", "capture", "0.4")}

    if TYPE_CHECKING:  # with a module-level __getattr__, type checkers accept every misspelt name
        from fastsparse_core.capturing import capture
        from fastsparse_core.sampling import NeighborSampler
    else:

        def __getattr__(name: str) -> Any:
            if name in _LAZY:
                return _lazy_name(__name__, _LAZY, name)
            if name not in _RENAMED:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            import importlib
            import warnings

            given, new, last = _RENAMED[name]
            module, _, attribute = given.partition(":")
            message = f"{__name__}.{name} is now {__name__}.{new}; version {last} drops the old name"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(module), attribute)

        def __dir__() -> list[str]:
            return sorted({*globals(), *_LAZY})
