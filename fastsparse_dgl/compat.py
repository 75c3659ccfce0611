"""Imports DGL, also where its own import fails on a newer PyTorch.

DGL 2.x imports ``dgl.graphbolt`` on every ``import dgl``, and that package needs a library compiled for the
very PyTorch version at hand (``libgraphbolt_pytorch_<version>.so``) as well as ``torchdata.datapipes``, which
newer torchdata releases no longer have. Apart from parts of ``dgl.distributed`` nothing in DGL uses it: with
an empty ``dgl.graphbolt`` in its place, graphs, message passing, layers, samplers and data loaders of DGL
2.1.0 work on current PyTorch.

Importing this module puts such a stub in place, but only where DGL could not be imported otherwise, and
imports DGL. Every other module of the package takes DGL from here: ``from fastsparse_dgl.compat import dgl``.
Code that imports DGL itself (``ogb`` does) must be imported after ``fastsparse_dgl``. Worker processes that
are spawned, not forked, import the main script again: import ``fastsparse_dgl`` at its top.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fastsparse_core.log import info_once

_logger = logging.getLogger(__name__)

_STUB_NAME = "dgl.graphbolt"


class GraphboltStub(ModuleType):
    """Stands in for ``dgl.graphbolt``: importable, and any use of it is an AttributeError with the reason.

    Args:
        reason: why the real package cannot be imported.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(_STUB_NAME, doc="Placeholder for dgl.graphbolt; see fastsparse_dgl.compat.")
        self._reason = reason
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(_STUB_NAME, loader=None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # probes of inspect, pickle and the import system
            raise AttributeError(f"module {_STUB_NAME!r} has no attribute {name!r}")
        raise AttributeError(
            f"dgl.graphbolt.{name} is not available: {self._reason}. fastsparse_dgl replaced it by "
            "a placeholder so that the rest of DGL works; to use GraphBolt, install the torch and torchdata "
            "versions that your DGL release was built for"
        )


def graphbolt_problem() -> str | None:
    """Why ``import dgl`` would fail in ``dgl.graphbolt``; None where it would not or that cannot be told.

    Nothing is imported to find out.
    """
    try:
        version = importlib.metadata.version("dgl")
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("dgl")
    if not version.startswith("2.") or spec is None or not spec.submodule_search_locations:
        return None
    release = torch.__version__.split("+", maxsplit=1)[0]
    stem = f"graphbolt_pytorch_{release}"
    names = (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll")
    if not _exists_below(spec.submodule_search_locations, "graphbolt", names):
        return f"DGL {version} brings no GraphBolt library for torch {release}"
    torchdata = importlib.util.find_spec("torchdata")
    locations = torchdata.submodule_search_locations if torchdata is not None else None
    if not _exists_below(locations or (), "datapipes", ("__init__.py",)):
        return f"DGL {version} needs torchdata.datapipes, which the installed torchdata does not have"
    return None


def _exists_below(locations: Iterable[str], folder: str, names: Iterable[str]) -> bool:
    return any(os.path.exists(os.path.join(base, folder, name)) for base in locations for name in names)


def install_graphbolt_stub() -> bool:
    """Puts the stub in place if DGL needs it and neither DGL nor ``dgl.graphbolt`` has been imported.

    A failed ``import dgl`` leaves neither behind, so calling this afterwards and importing again works.

    Returns:
        Whether the stub was installed by this call.
    """
    if "dgl" in sys.modules or _STUB_NAME in sys.modules:
        return False
    reason = graphbolt_problem()
    if reason is None:
        return False
    sys.modules[_STUB_NAME] = GraphboltStub(reason)
    info_once(_logger, f"{reason}; dgl.graphbolt is replaced by a placeholder")
    return True


def import_dgl() -> ModuleType:
    """Imports DGL with the stub where it needs it.

    Raises:
        ImportError: DGL is not installed; the message says how to install it.
    """
    install_graphbolt_stub()
    try:
        module = importlib.import_module("dgl")
    except ModuleNotFoundError as error:
        if error.name != "dgl":
            raise
        cure = 'install it with `pip install "dgl==2.1.0" pandas packaging`'
        if sys.version_info >= (3, 13):
            cure = (
                "DGL publishes no wheel for Python 3.13 or newer, so use Python 3.10 to 3.12 there and "
                + cure
            )
        raise ImportError(f"fastsparse_dgl needs DGL, which is not installed: {cure}", name="dgl") from error
    stub = sys.modules.get(_STUB_NAME)
    if isinstance(stub, GraphboltStub):
        module.graphbolt = stub  # type: ignore[attr-defined]  # as the import system does for a real submodule
    return module


#: The imported package; untyped, so that its classes can be subclassed.
dgl: Any = import_dgl()

# After an import that failed, the next one finds submodules done but not as attributes of their package.
for _name, _module in list(sys.modules.items()):
    _parent, _, _child = _name.rpartition(".")
    if _name.startswith("dgl.") and _parent in sys.modules and not hasattr(sys.modules[_parent], _child):
        setattr(sys.modules[_parent], _child, _module)
