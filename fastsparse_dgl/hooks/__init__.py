"""All of DGL on FastSparse: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import torch

from fastsparse_core import call_report, replacement
from fastsparse_core.locks import ForkSafeLock
from fastsparse_dgl import device_graph
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dataloading import GraphDataLoader
from fastsparse_dgl.hooks import table
from fastsparse_dgl.layer_swap import FIRST_CALLS

_lock = ForkSafeLock()
_installed: list[replacement.Change] = []


def enable(*, report: bool = False, _devices: tuple[str, ...] | None = None) -> None:
    """Runs DGL's operators on FastSparse, and puts DGLGraphs on the GPU where DGL itself cannot.

    From here on ``update_all``, ``apply_edges``, ``edge_softmax``, the readouts and every layer of ``dgl.nn``
    run on FastSparse's operators, on the CPU and on CUDA. A layer that has a drop-in becomes it when it is
    first called, as :func:`~fastsparse_dgl.accelerate` would make it. It stays as it is after
    :func:`~fastsparse_dgl.restore`. It is pickled and copied as its original.

    With pip's DGL, which has no CUDA, ``graph.to("cuda")`` works, too. The structure stays on the host for
    DGL's functions, and a copy is on the GPU for the operators. Node and edge data are on the GPU. If DGL has
    CUDA, only the operators, layers and loaders are replaced.

    ``DataLoader``, ``GraphDataLoader``, ``NeighborSampler`` and ``MultiLayerFullNeighborSampler`` of
    ``dgl.dataloading`` are those of this package, also where they were imported before.

    Calling it again changes nothing. :func:`disable` undoes it. The environment variable
    ``FASTSPARSE_DISABLE=dgl`` keeps it from doing anything, ``FASTSPARSE_DISABLE=loaders`` keeps DGL's
    loaders, and ``FASTSPARSE_DISABLE=layers`` its layers. Processes that are spawned have to call it
    themselves; forked ones inherit it.

    Args:
        report: whether to record which calls ran on FastSparse, for :func:`fastsparse_core.report`.

    Raises:
        DGLError: the internals of the installed DGL are not those of a version that FastSparse knows;
            the message says which, and nothing was changed.

    Examples:
        >>> import fastsparse_dgl
        >>> fastsparse_dgl.enable()
        >>> fastsparse_dgl.disable()
    """
    with _lock:
        if report:
            call_report.start_recording()
        if _installed or not replacement.enabled_parts(["dgl"]):
            return
        if _devices is None:
            _devices = () if _dgl_has_cuda() else ("cuda",)
        loaders = table.LOADERS if replacement.enabled_parts(["loaders"]) else ()
        layers = table.LAYERS if replacement.enabled_parts(["layers"]) else ()
        hooks = table.OPERATORS + (table.DEVICES if _devices else ()) + loaders + layers
        table.check(hooks, dgl.__version__)
        _installed.extend(replacement.install(hooks))
        device_graph.serve(_devices)
        GraphDataLoader._follows_script = bool(loaders)


def disable() -> None:
    """Restores DGL's own operators and layers: the inverse of :func:`enable`.

    Layers of :func:`~fastsparse_dgl.accelerate` stay drop-ins. Graphs that are on the GPU by FastSparse alone
    cannot be used until it is enabled again; every use says so.

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
    """Whether DGL runs on FastSparse now.

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
    """Whether the installed DGL was compiled with CUDA."""
    if not torch.cuda.is_available():
        return False
    try:
        dgl.ndarray.empty((1,), ctx=dgl.ndarray.gpu(0))
    except dgl.DGLError:
        return False
    return True
