"""torch_scatter and torch_sparse on FastSparse's kernels, for code that imports them without their wheels.

.. code-block:: python

    import fastsparse_pyg.compat

    fastsparse_pyg.compat.install()
    from torch_scatter import scatter_mean
    from torch_sparse import SparseTensor
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

import torch_geometric.typing as pyg_typing

from fastsparse_core import replacement
from fastsparse_pyg.compat import operators, torch_scatter, torch_sparse
from fastsparse_run.watch import is_installed

__all__ = ["install", "uninstall"]

_logger = logging.getLogger("fastsparse_pyg")
_MODULES: dict[str, ModuleType] = {"torch_scatter": torch_scatter, "torch_sparse": torch_sparse}
#: Replaced attributes, and names of added modules. :func:`uninstall` undoes both.
_changes: list[replacement.Change] = []
_added: list[str] = []
#: Package -> {FastSparse's module: names of the package's submodules that the module provides}.
_PARTS = {
    "torch_scatter": {
        "composite": "composite composite.logsumexp composite.softmax composite.std",
        "layout": "utils",
        "reductions": "scatter segment_coo segment_csr",
    },
    "torch_sparse": {
        "diagonal": "diag",
        "elementwise": "add mul reduce",
        "functions": "cat coalesce convert eye spadd spmm spspmm transpose",
        "missing": "bandwidth metis rw saint sample utils",
        "products": "matmul",
        "selection": "index_select masked_select narrow permute select",
        "storage": "storage",
        "tensor": "tensor",
    },
}
#: Packages whose modules may have imported PyG's flags. Other modules may have a flag of their own.
_FLAGGED = ("torch_geometric", "fastsparse_pyg")


def install() -> dict[str, bool]:
    """Provides the modules ``torch_scatter`` and ``torch_sparse`` if these packages are not installed.

    ``import torch_scatter`` and ``import torch_sparse`` then work, and PyG uses the modules. PyG checks at
    its own import which packages are missing, so this function also sets PyG's flags
    (``torch_geometric.typing.WITH_TORCH_SPARSE`` and ``WITH_TORCH_SCATTER``) and replaces the placeholder for
    ``SparseTensor`` in all loaded modules. In other modules than PyG's, copies of the flags do not change.
    ``torch.jit.script`` cannot compile the classes of these modules, so script PyG's layers in a process that
    did not call this function. An installed package is never replaced, even if it is broken. A second call
    changes nothing.

    Returns:
        For each of the two names, whether FastSparse provides the module.

    Example:
        >>> from fastsparse_pyg import compat
        >>> sorted(compat.install())
        ['torch_scatter', 'torch_sparse']
        >>> import torch, torch_scatter
        >>> torch_scatter.scatter(torch.ones(3), torch.tensor([0, 0, 1]))
        tensor([2., 1.])
        >>> compat.uninstall()
    """
    return {name: _install(name, module) for name, module in _MODULES.items()}


def uninstall() -> None:
    """Removes the modules that :func:`install` added, and restores PyG's flags and placeholders."""
    replacement.remove(_changes)
    for name in _added:
        sys.modules.pop(name, None)
    _added.clear()


def _install(name: str, module: ModuleType) -> bool:
    if sys.modules.get(name) is module:
        return True
    if name in sys.modules or is_installed(name):
        _logger.info("%s is installed, so fastsparse_pyg.compat does not replace it", name)
        return False
    sys.modules[name] = module
    _added.append(name)
    for part, theirs in _PARTS[name].items():
        for their in theirs.split():
            sys.modules[f"{name}.{their}"] = ours = importlib.import_module(f"{module.__name__}.{part}")
            _added.append(f"{name}.{their}")
            if name == "torch_sparse":
                vars(ours).setdefault("__getattr__", torch_sparse.__getattr__)
    if name == "torch_sparse":
        operators.provide()
    replaced = _tell_pyg(name, module)
    _logger.info(
        "%s is not installed: fastsparse_pyg.compat provides it, also for %d loaded modules",
        name,
        replaced,
    )
    return True


def _tell_pyg(name: str, module: ModuleType) -> int:
    """Replaces PyG's placeholders for a missing package; returns the number of modules that had one."""
    flag = f"WITH_{name.upper()}"
    stand_ins: dict[str, tuple[Any, Any]] = {name: (getattr(pyg_typing, name), module)}
    if name == "torch_sparse":
        for kind in ("SparseTensor", "SparseStorage"):
            stand_ins[kind] = (getattr(pyg_typing, kind), getattr(module, kind))
    replaced = 0
    for title, holder in list(sys.modules.items()):  # by key, because some modules have no `__name__`
        if not isinstance(holder, ModuleType) or holder is sys.modules[__name__]:
            continue
        held = vars(holder)
        names = [key for key, (old, _) in stand_ins.items() if held.get(key) is old]
        for key in names:
            _changes.append(replacement.replace(holder, key, stand_ins[key][1]))
        is_flagged = flag in held and title.partition(".")[0] in _FLAGGED
        if is_flagged:
            _changes.append(replacement.replace(holder, flag, True))
        replaced += bool(names) or is_flagged
    return replaced
