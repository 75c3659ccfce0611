"""Imports DGL, even if a plain import would fail on a newer PyTorch (:mod:`fastsparse_core.dgl_import`).

Every other module of the package imports DGL from here: ``from fastsparse_dgl.compat import dgl``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import fastsparse_core.dgl_import  # noqa: F401  (lets `import dgl` find a placeholder of dgl.graphbolt)


def import_dgl() -> ModuleType:
    """Imports DGL.

    Raises:
        ImportError: DGL is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module("dgl")
    except ModuleNotFoundError as error:
        if error.name != "dgl":
            raise
        cure = 'install it with `pip install "dgl==2.1.0" pandas packaging`'
        if sys.version_info >= (3, 13):
            cure = "DGL publishes no wheel for Python 3.13 or newer, so use Python 3.10 to 3.12 and " + cure
        raise ImportError(f"fastsparse_dgl needs DGL, which is not installed: {cure}", name="dgl") from error


#: The imported package; typed as Any, so that its classes can be subclassed.
dgl: Any = import_dgl()

# If an earlier import of DGL failed, its submodules are still in `sys.modules`, so this import did not set
# them as attributes of their package.
for _name, _module in list(sys.modules.items()):
    _parent, _, _child = _name.rpartition(".")
    if _name.startswith("dgl.") and _parent in sys.modules and not hasattr(sys.modules[_parent], _child):
        setattr(sys.modules[_parent], _child, _module)
