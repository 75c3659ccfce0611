"""Switches all of DGL to FastSparse and back: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import torch

from fastsparse_core import call_report, replacement
from fastsparse_core.locks import ForkSafeLock
from fastsparse_dgl import device_graph
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dataloading import GraphDataLoader
from fastsparse_dgl.first_calls import FIRST_CALLS
from fastsparse_dgl.hooks import table
from fastsparse_dgl.hooks.recording import recorded

_lock = ForkSafeLock()
_installed: list[replacement.Change] = []


def enable(*, report: bool = False, _devices: tuple[str, ...] | None = None) -> None:
    """Runs DGL's operators on FastSparse, and lets DGLGraphs move to the GPU without a CUDA build of DGL.

    After the call, ``update_all``, ``apply_edges``, ``edge_softmax``, the readouts and every layer of
    ``dgl.nn`` run on FastSparse's operators, on the CPU and on CUDA. A layer with a drop-in becomes the
    drop-in when it is first called, as with :func:`~fastsparse_dgl.accelerate`. A replaced layer is pickled
    and copied as the original layer. After :func:`~fastsparse_dgl.restore`, a layer is not replaced again.

    ``graph.to("cuda")`` also works with DGL's wheels from PyPI, built without CUDA: the structure stays on
    the host for DGL's functions, and the operators use a copy on the GPU. Node and edge data are on the GPU.
    If DGL has CUDA, only the operators, layers and loaders are replaced.

    ``DataLoader``, ``GraphDataLoader``, ``NeighborSampler`` and ``MultiLayerFullNeighborSampler`` of
    ``dgl.dataloading`` are replaced by those of this package, also in modules that imported them before.

    A second call changes nothing, except that ``report=True`` drops earlier records and starts recording.
    :func:`disable` undoes all calls. The environment variable
    ``FASTSPARSE_DISABLE=dgl`` turns this function off, ``FASTSPARSE_DISABLE=loaders`` keeps DGL's loaders,
    and ``FASTSPARSE_DISABLE=layers`` keeps DGL's layers. Spawned processes must call this function
    themselves; forked processes inherit the replacements.

    Args:
        report: whether to record which calls ran on FastSparse, for :func:`fastsparse_core.report`.

    Raises:
        DGLError: FastSparse does not support the installed version of DGL. The message names the difference,
            and nothing was changed.

    Examples:
        >>> import fastsparse_dgl
        >>> fastsparse_dgl.enable()
        >>> fastsparse_dgl.disable()
    """
    with _lock:
        if report:
            call_report.start_recording()
            replacement.remove(_installed)  # the hooks are installed again below, wrapped for recording
        if _installed or not replacement.enabled_parts(["dgl"]):
            return
        if _devices is None:
            _devices = () if _dgl_has_cuda() else ("cuda",)
        loaders = table.LOADERS if replacement.enabled_parts(["loaders"]) else ()
        layers = table.LAYERS if replacement.enabled_parts(["layers"]) else ()
        hooks = table.OPERATORS + (table.DEVICES if _devices else ()) + loaders + layers
        table.check(hooks, dgl.__version__)
        _installed.extend(replacement.install(map(recorded, hooks)))
        device_graph.serve(_devices)
        GraphDataLoader._follows_script = bool(loaders)


def disable() -> None:
    """Restores DGL's own operators and layers: the inverse of :func:`enable`.

    Layers that :func:`~fastsparse_dgl.accelerate` replaced stay drop-ins. Graphs that :func:`enable` moved to
    the GPU raise an error whenever they are used, until :func:`enable` is called again.

    Example:
        >>> import fastsparse_dgl
        >>> fastsparse_dgl.enable()
        >>> fastsparse_dgl.disable()
        >>> fastsparse_dgl.is_enabled()
        False
    """
    with _lock:
        replacement.remove(_installed)
        FIRST_CALLS.restore()
        call_report.stop_recording()
        device_graph.serve(())
        GraphDataLoader._follows_script = False


def is_enabled() -> bool:
    """True if :func:`enable` is active.

    Returns:
        True between :func:`enable` and :func:`disable`.

    Example:
        >>> import fastsparse_dgl
        >>> fastsparse_dgl.enable()
        >>> fastsparse_dgl.disable()
        >>> fastsparse_dgl.is_enabled()
        False
    """
    return bool(_installed)


def _dgl_has_cuda() -> bool:
    """True if the installed DGL was compiled with CUDA."""
    if not torch.cuda.is_available():
        return False
    try:
        dgl.ndarray.empty((1,), ctx=dgl.ndarray.gpu(0))
    except dgl.DGLError:
        return False
    return True
