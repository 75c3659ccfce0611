"""Switches all of PyG to FastSparse and back: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from types import FunctionType

from fastsparse_core import call_report, replacement, sparse_products
from fastsparse_core.locks import ForkSafeLock
from fastsparse_pyg.first_calls import FIRST_CALLS
from fastsparse_pyg.hooks import table
from fastsparse_pyg.loader.base import Script
from fastsparse_run import watch

__all__ = ["disable", "enable", "is_enabled"]

#: The parts that can be enabled.
PARTS = tuple(part for part in replacement.PARTS if part != "dgl")

#: Packages for which `fastsparse_pyg.compat` has modules of the same name, in case they are not installed.
_MISSING = ("torch_scatter", "torch_sparse")

_lock = ForkSafeLock()
_installed: list[replacement.Change] = []
_enabled: set[str] = set()


def enable(parts: str | Iterable[str] | None = None, *, report: bool | str = False) -> None:
    """Runs PyG and products of ``torch.sparse`` matrices on FastSparse.

    - ``"layers"``: each `MessagePassing` layer is replaced when it is first called, as with
      :func:`~fastsparse_pyg.accelerate`. A replaced layer is pickled and copied as the original layer. After
      :func:`~fastsparse_pyg.restore`, a layer is not replaced again.
    - ``"scatter"``: ``scatter``, ``softmax``, ``segment``, ``degree`` and ``spmm`` of
      ``torch_geometric.utils``.
    - ``"pool"``: ``scatter``, ``softmax`` and ``segment`` where PyG's aggregations, global pools and
      normalisations call them.
    - ``"loaders"``: ``NeighborLoader``, ``LinkNeighborLoader`` and ``DataLoader``. Batches are on the GPU if
      the script has used the GPU before the epoch begins, or if ``device`` says so.
    - ``"sparse_mm"``: ``torch.sparse.mm``, ``A @ x``, ``torch.mm`` and ``torch.addmm`` of COO, CSR and CSC
      matrices.
    - ``"shims"``: FastSparse's modules ``torch_scatter`` and ``torch_sparse``, if the script imports them and
      the packages are not installed.

    Call this function early: names that other modules imported before are replaced too, but functions stored
    in a list, in an attribute of an object or as a default argument are not. Another call adds parts.
    :func:`disable` undoes all calls. Spawned processes must call it themselves; forked processes inherit the
    replacements.

    Args:
        parts: names of parts, or one name; None: all. Parts in the environment variable
            ``FASTSPARSE_DISABLE`` (separated by commas) stay off.
        report: whether to record which calls ran on FastSparse, for :func:`fastsparse_core.report`.
            ``"time"`` also measures how long calls take, if nothing is enabled yet.

    Raises:
        ValueError: there is no such part, or no such report.
        RuntimeError: FastSparse does not support the installed version of PyG. The message names the
            difference, and nothing was changed.

    Example:
        >>> import fastsparse_pyg
        >>> fastsparse_pyg.enable()
        >>> fastsparse_pyg.disable()
    """
    wanted = PARTS if parts is None else (parts,) if isinstance(parts, str) else tuple(parts)
    for part in wanted:
        if part not in PARTS:
            raise ValueError(f"parts: expected some of {', '.join(PARTS)}, got {part!r}")
    if report not in (False, True, "time"):
        raise ValueError(f"report: expected True, False or 'time', got {report!r}")
    with _lock:
        new = [part for part in replacement.enabled_parts(wanted) if part not in _enabled]
        hooks = [hook for part in new for hook in table.HOOKS.get(part, ())]
        if found := replacement.problems(hooks):
            raise RuntimeError(
                f"fastsparse_pyg.enable() does not support this PyG: {'; '.join(found)}. Nothing was "
                "changed. Pass the `parts` that you need, or use the drop-in layers"
            )
        if report:
            call_report.start_recording(times=report == "time")
        timed = [
            dataclasses.replace(hook, function=call_report.timed(hook.function))
            if isinstance(hook.function, FunctionType)
            else hook
            for hook in hooks
        ]
        _installed.extend(replacement.install(timed))
        Script.decides |= "loaders" in new
        if "sparse_mm" in new:
            sparse_products.enable()
        if "shims" in new:
            for package in _MISSING:
                watch.in_place_of(package, _stand_in)
        _enabled.update(new)


def disable() -> None:
    """Restores PyG's and PyTorch's own code: the inverse of :func:`enable`.

    Layers that became drop-ins when they were called become PyG's again. Layers that
    :func:`~fastsparse_pyg.accelerate` replaced stay drop-ins.

    Example:
        >>> import fastsparse_pyg
        >>> fastsparse_pyg.enable()
        >>> fastsparse_pyg.disable()
        >>> fastsparse_pyg.is_enabled()
        False
    """
    with _lock:
        replacement.remove(_installed)
        FIRST_CALLS.restore()
        Script.decides = False
        if "sparse_mm" in _enabled:
            sparse_products.disable()
        if "shims" in _enabled:
            for package in _MISSING:
                watch.forget(package)
            if "fastsparse_pyg.compat" in sys.modules:
                from fastsparse_pyg import compat

                compat.uninstall()
        _enabled.clear()
        call_report.stop_recording()


def _stand_in() -> None:
    from fastsparse_pyg import compat  # imported here, because the import is slow and few scripts need it

    compat.install()


def is_enabled() -> bool:
    """True if :func:`enable` is active.

    Returns:
        True between :func:`enable` and :func:`disable`.

    Example:
        >>> import fastsparse_pyg
        >>> fastsparse_pyg.enable()
        >>> fastsparse_pyg.disable()
        >>> fastsparse_pyg.is_enabled()
        False
    """
    return bool(_enabled)
