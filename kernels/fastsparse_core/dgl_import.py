"""Makes ``import dgl`` work with PyTorch versions that are newer than DGL's release.

In DGL 2.x, ``import dgl`` imports ``dgl.graphbolt``. This package needs a library that was compiled for the
installed PyTorch version (``libgraphbolt_pytorch_<version>.so``), and ``torchdata.datapipes``, which newer
versions of torchdata do not have. Only parts of ``dgl.distributed`` use ``dgl.graphbolt``. With an empty
placeholder in its place, graphs, message passing, layers, samplers and data loaders of DGL 2.1.0 work with
current PyTorch versions.

After an import of FastSparse, ``import dgl`` finds the placeholder if ``dgl.graphbolt`` cannot be imported.
If ``import dgl`` comes before the import of FastSparse, it fails in DGL's own code; repeat it after the
import of FastSparse. Spawned worker processes import the main script again, so import FastSparse at the top
of the script.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fastsparse_core.log import info_once

_logger = logging.getLogger("fastsparse_core")

_STUB_NAME = "dgl.graphbolt"


class GraphboltStub(ModuleType):
    """Placeholder for ``dgl.graphbolt``. Every use raises an AttributeError with the reason.

    Args:
        reason: why the real package cannot be imported.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(_STUB_NAME, doc="Placeholder for dgl.graphbolt; see fastsparse_core.dgl_import.")
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect, pickle and the import system look for such names
            raise AttributeError(f"module {_STUB_NAME!r} has no attribute {name!r}")
        raise AttributeError(
            f"dgl.graphbolt.{name} is not available: {self._reason}. FastSparse replaced it by "
            "a placeholder so that the rest of DGL works; to use GraphBolt, install the torch and torchdata "
            "versions that your DGL release was built for"
        )


class _Finder(MetaPathFinder, Loader):
    """Finds the placeholder if ``dgl.graphbolt`` cannot be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STUB_NAME or graphbolt_problem() is None:
            return None
        return ModuleSpec(_STUB_NAME, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        reason = graphbolt_problem()
        assert reason is not None
        info_once(_logger, f"{reason}; dgl.graphbolt is replaced by a placeholder")
        return GraphboltStub(reason)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because the placeholder has no code."""


def graphbolt_problem() -> str | None:
    """Finds the reason why ``import dgl`` would fail in ``dgl.graphbolt``, without importing it.

    Returns:
        The reason. None if the import would succeed, DGL is not installed, or its version is not 2.x.
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
        return f"DGL {version} has no GraphBolt library for torch {release}"
    torchdata = importlib.util.find_spec("torchdata")
    locations = torchdata.submodule_search_locations if torchdata is not None else None
    if not _exists_below(locations or (), "datapipes", ("__init__.py",)):
        return f"DGL {version} needs torchdata.datapipes, which the installed torchdata does not have"
    return None


def _exists_below(locations: Iterable[str], folder: str, names: Iterable[str]) -> bool:
    return any(os.path.exists(os.path.join(base, folder, name)) for base in locations for name in names)


sys.meta_path.insert(0, _Finder())
