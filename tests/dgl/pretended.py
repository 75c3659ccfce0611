"""A simulated GPU: tensors that report to be on `the device`, computed on the CPU.

As on a GPU, an operator cannot mix tensors of the device and of the CPU, so that a tensor that was left on
the wrong side is found on a machine without one. Kernels of FastSparse get the tensors underneath.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dgl_cases import dgl, fastsparse_dgl
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fastsparse_core import Adjacency
from fastsparse_core.structure.adjacency import from_handle
from fastsparse_core.structure.row_formats import RowFormats
from fastsparse_dgl import caching, graph
from fastsparse_dgl.hooks import joint

backend_registration._setup_privateuseone_for_python_backend("pretended")
# From here on, PyTorch also calls these functions of the device, in every test of the process.
torch.pretended.get_rng_state = lambda *_: torch.empty(0, dtype=torch.uint8)  # type: ignore[attr-defined]
torch.pretended.set_rng_state = lambda *_: None  # type: ignore[attr-defined]
torch.pretended.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]

DEVICE = torch.device("pretended:0")
aten = torch.ops.aten
_real_joint = joint._build
_build, _transpose, _row = graph.adjacency_from_index, Adjacency._transpose, RowFormats.row

#: Operators that copy between the pretended device and the CPU.
_COPIES = (aten.copy_.default, aten._to_copy.default)
#: Operators whose indices may be on the CPU.
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class Pretended(Tensor):
    """A tensor on the simulated device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert the device device type tensor to numpy")

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"Pretended({self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Pretended, (self.inner,)


class Pretend(TorchDispatchMode):
    """Mode in which functions that make tensors can make them on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors: list[Tensor] = []
    tree_map(lambda it: tensors.append(it) if isinstance(it, Tensor) else None, (args, kwargs))
    on_device = [it for it in tensors if isinstance(it, Pretended)]
    wraps = bool(on_device)
    if "device" in kwargs and kwargs["device"] is not None:
        wraps = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is aten._to_copy.default:
            pass
    elif func is aten.copy_.default:
        wraps = isinstance(args[0], Pretended)
    if func not in _COPIES and func not in _INDEXED:
        others = [it for it in tensors if not isinstance(it, Pretended) and it.dim()]
        if on_device and others:
            raise RuntimeError(
                f"Expected all tensors on the same device, but found cpu and the device: {func}"
            )
    if func.namespace == "fastsparse" and on_device:
        names = [argument.name for argument in func._schema.arguments]
        if "adjacency" in names:
            place = names.index("adjacency")
            args = (*args[:place], _cpu_copy(from_handle(args[place])).handle, *args[place + 1 :])
    args, kwargs = tree_map(lambda it: it.inner if isinstance(it, Pretended) else it, (args, kwargs))
    out = func(*args, **kwargs)
    if func._schema.name.endswith("_") and isinstance(on_device[0] if on_device else None, Pretended):
        return on_device[0]
    if "out" in kwargs and on_device:
        return next(it for it in on_device if it.inner is kwargs["out"])
    if not wraps:
        return out
    return tree_map(lambda it: Pretended(it) if isinstance(it, Tensor) else it, out)


def _cpu_copy(adj: Adjacency) -> Adjacency:
    """The same structure on the CPU, where kernels can read it."""
    if not isinstance(adj.rowptr, Pretended):
        return adj
    if not hasattr(adj, "cpu_copy"):
        state = {
            name: item.inner if isinstance(item, Pretended) else item
            for name, item in adj.__getstate__().items()
        }
        cpu_copy = Adjacency.__new__(Adjacency)
        cpu_copy.__setstate__(state)
        adj.cpu_copy = cpu_copy  # type: ignore[attr-defined]
    return adj.cpu_copy  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def pretended_device() -> Iterator[str]:
    """Context in which the device is available, and FastSparse is enabled for graphs on it."""
    with pytest.MonkeyPatch.context() as patch, Pretend():
        patch.setitem(dgl.ndarray.DGLContext.STR2MASK, DEVICE.type, 2)
        for module in (dgl.backend, sys.modules["dgl.backend.pytorch.tensor"]):
            patch.setattr(module, "to_backend_ctx", _to_backend_ctx)
        patch.setattr(dgl.backend, "copy_to", lambda input, ctx, **_: input.to(ctx))
        patch.setattr(sys.modules["dgl.storages.pytorch_tensor"].PyTorchTensorStorage, "fetch", _fetch)
        patch.setattr(torch, "tensor", _tensor)
        patch.setattr(caching, "adjacency_from_index", _build_and_move)
        patch.setattr(graph, "adjacency_from_index", _build_and_move)
        patch.setattr(joint, "_build", _build_joint)
        patch.setattr(Adjacency, "_transpose", _transpose_on_cpu)
        patch.setattr(RowFormats, "row", _row_on_cpu)
        fastsparse_dgl.enable(_devices=(DEVICE.type,))
        try:
            yield str(DEVICE)
        finally:
            fastsparse_dgl.disable()


_real_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """Replaces `torch.tensor`, whose new tensor no mode sees: makes it on the CPU, then moves it."""
    made = _real_tensor(data, **kwargs)
    return made if device is None else made.to(device)


def _fetch(storage: Any, indices: Tensor, device: Any, **_: Any) -> Tensor:
    """Rows of node data, which DGL's loaders read by the name of the device's type."""
    return storage.storage[indices.to(storage.storage.device)].to(device)  # type: ignore[no-any-return]


def _to_backend_ctx(context: Any) -> torch.device:
    return DEVICE if context.device_type == 2 else torch.device("cpu")


def _build_and_move(index: Any, device: torch.device) -> Adjacency:
    return _build(index, torch.device("cpu")).to(device)


def _build_joint(index: Any, device: torch.device) -> Adjacency:
    return _real_joint(getattr(index, "host", index), torch.device("cpu")).to(device)


def _row_on_cpu(adj: RowFormats) -> Tensor:
    if not isinstance(adj.rowptr, Pretended):
        return _row(adj)
    return _cpu_copy(adj).row().to(DEVICE)  # type: ignore[arg-type]


def _transpose_on_cpu(adj: Adjacency, valued: bool) -> Adjacency:
    if not isinstance(adj.rowptr, Pretended):
        return _transpose(adj, valued)
    moved = _transpose(_cpu_copy(adj), valued).to(DEVICE)
    moved._parent = weakref.ref(adj)
    return moved
