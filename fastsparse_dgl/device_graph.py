"""DGLGraphs on a GPU that DGL itself cannot use: structure on the host, data on the device.

A DGLGraph is Python over one handle of DGL's C++ library, ``graph._graph``. That of a graph which was moved
to a GPU is a :class:`DeviceIndex`: another handle of the structure on the host, which knows the device on
which all that comes of it has to appear. Everything else of DGL stays as it is and believes that the graph
is there, since all its ways to the C++ library go through three hooks:

- tensors on their way in (:func:`to_library`) are copied to the host if they are on the device;
- calls (:func:`call`) mark what comes of a DeviceIndex, or of a tensor from the device, with that device:
  graph indices become DeviceIndex;
- arrays on their way out (:func:`from_library`) are copied to the device that they are marked with.

The operators, in which the time is spent, never go there: they find their Adjacency by the DeviceIndex.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import DGLError

_IndexClass: Any = dgl.heterograph_index.HeteroGraphIndex
_Function: Any = dgl._ffi.function.Function
_ObjectBase: Any = dgl._ffi.object.ObjectBase
_NDArray: Any = dgl.ndarray.NDArray
_MetaClass: Any = dgl.graph_index.GraphIndex

_CPU: Any = dgl.ndarray.cpu()

#: Attribute of arrays, functions and objects of the C++ library: the device that they belong to.
_MARK = "_fastsparse_device"
#: Attribute of output arrays: the tensor on the host, and the one on the device.
_TARGET = "_fastsparse_target"

#: Devices whose graphs are DeviceIndex; empty while nothing is enabled, or where DGL can use the GPU itself.
device_types: tuple[str, ...] = ()

#: Whether anything was on such a device yet; if not, calls need no inspection.
_in_use = False


def serves(device: torch.device) -> bool:
    """Whether graphs on this device are ours."""
    return device.type in device_types


class DeviceIndex(_IndexClass):
    """The ``HeteroGraphIndex`` of a DGLGraph on the GPU: another handle of the same structure.

    Made by :func:`place`.

    Attributes:
        host: DGL's index of the structure, on the CPU.
        device: where everything that comes from it appears.
    """

    host: Any
    device: torch.device
    _kept: dict[Any, Any]

    @property
    def ctx(self) -> Any:
        """DGL's name of the device."""
        return dgl.utils.to_dgl_context(self.device)

    def copy_to(self, ctx: Any) -> Any:
        """The index on another device, or DGL's own for the CPU."""
        return place(self.host, dgl.backend.to_backend_ctx(ctx))

    def get_relation_graph(self, etype: int) -> Any:
        """The index of one edge type, the same every time."""
        if is_one_relation(self):
            return self
        return self._keep(int(etype), lambda: place(self.host.get_relation_graph(etype), self.device))

    def edges(self, etype: int, order: str | None = None) -> Any:
        """Sources, destinations and ids of all edges."""

        def move() -> tuple[Tensor, ...]:
            return tuple(tensor.to(self.device) for tensor in self.host.edges(etype, order))

        return self._keep(("edges", int(etype), order), move)

    def flatten_relations(self, etypes: Any) -> Any:
        """Several edge types as one; its parts are read as attributes, which no hook sees."""
        return _OnDevice(super().flatten_relations(etypes), self.device)

    def _keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def pin_memory_(self) -> None:
        """Nothing: kernels read the structure on the device."""

    def unpin_memory_(self) -> None:
        """Nothing, likewise."""

    def pin_memory(self) -> Any:
        """Itself."""
        return self

    def is_pinned(self) -> bool:
        """False: no kernel reads it on the host."""
        return False

    def record_stream(self, stream: Any) -> None:
        """Nothing: the structure's tensors on the device are kept as long as the graph."""

    def shared_memory(self, *args: Any, **kwargs: Any) -> Any:
        """A copy in shared memory, on the CPU: DGL's own."""
        return self.host.shared_memory(*args, **kwargs)

    def __reduce__(self) -> Any:
        return place, (self.host, self.device)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # as immutable as DGL's

    def __repr__(self) -> str:
        return f"DeviceIndex({self.host!r}, device={str(self.device)!r})"


class _OnDevice:
    """An object of the C++ library whose attributes belong to a device."""

    def __init__(self, item: Any, device: torch.device) -> None:
        self._item, self._device = item, device

    def __getattr__(self, name: str) -> Any:
        return _marked(getattr(self._item, name), self._device)


def is_one_relation(index: Any) -> bool:
    """Whether an index is that of its only edge type."""
    if index.number_of_etypes() != 1:
        return False
    source, target = index.metagraph.find_edge(0)
    return (source, target) == (0, index.number_of_ntypes() - 1) and index.number_of_ntypes() <= 2


class StrandedIndex(_IndexClass):
    """A DeviceIndex after :func:`fastsparse_dgl.disable`: whatever it is asked, it says how to go on."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in ("host", "device", "_kept", "_cache"):
            return super().__getattribute__(name)
        raise DGLError(
            f"this graph is on {self.device}, where fastsparse_dgl alone can use it, and "
            "fastsparse_dgl.disable() was called: call fastsparse_dgl.enable() again, and take graph.cpu() "
            "before the next disable()"
        )

    def __reduce__(self) -> Any:
        return place, (self.host, self.device)


#: Every living DeviceIndex, by its identity.
_living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def serve(types: tuple[str, ...]) -> None:
    """Says which devices' graphs are ours from now on; those of others are stranded."""
    global device_types
    device_types = types
    for index in list(_living.values()):
        index.__class__ = DeviceIndex if serves(index.device) else StrandedIndex


def place(host: Any, device: torch.device) -> Any:
    """The index of a structure on a device: DGL's own on the CPU, else a DeviceIndex.

    Raises:
        DGLError: the device is not ours, which a pickled graph meets where FastSparse is not enabled, or
            cannot be used, which graphs meet in forked processes and in workers of loaders.
    """
    global _in_use
    if serves(device):
        _in_use = True
        if torch.cuda._is_in_bad_fork() or torch.utils.data.get_worker_info() is not None:
            raise DGLError(
                f"graphs on {device} cannot be used in a forked process or in a loader's worker, because "
                "CUDA does not work there. Give the loader graphs on the CPU and move its batches with "
                "batch.to(device), or leave num_workers out"
            )
        index = dgl._ffi.object_generic.convert_to_object([host])[0]  # another reference, counted by DGL
        index.__class__ = DeviceIndex
        index.host, index.device, index._kept = host, device, {}
        _living[id(index)] = index
        return index
    if device.type == "cpu":
        return host
    raise DGLError(
        f"cannot put this graph on {device}: it came from a process in which fastsparse_dgl kept it there; "
        "call fastsparse_dgl.enable() in this one too"
    )


def copy_to(original: Any, index: Any, ctx: Any) -> Any:
    """``HeteroGraphIndex.copy_to``: what ``graph.to`` calls."""
    device = dgl.backend.to_backend_ctx(ctx)
    return place(index, device) if serves(device) else original(index, ctx)


def call(original: Any, function: Any, *args: Any) -> Any:
    """A call of DGL's C++ library: marks what comes of something on a device."""
    device = vars(function).get(_MARK)
    if device is None:
        device = _device_of(args)
    result = original(function, *args)
    if device is None:
        return result
    for host, target in _written(args):
        target.copy_(host)
    return _marked(result, device)


def _bind_call(call: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """What replaces the calls, one frame more until a graph is on a device: a block takes a hundred calls."""

    @functools.wraps(original)
    def replaced(function: Any, *args: Any) -> Any:
        return call(original, function, *args) if _in_use else original(function, *args)

    return replaced


call.bind = _bind_call  # type: ignore[attr-defined]


def _device_of(args: Any) -> torch.device | None:
    for arg in args:
        if type(arg) is DeviceIndex:
            return arg.device
        if isinstance(arg, (_NDArray, _ObjectBase)):
            device = vars(arg).get(_MARK)
        elif isinstance(arg, (list, tuple)):
            device = _device_of(arg)
        elif isinstance(arg, dict):
            device = _device_of(arg.values())
        else:
            continue
        if device is not None:
            return device
    return None


def _written(args: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that a call wrote: on the host, and on the device."""
    for arg in args:
        if isinstance(arg, _NDArray):
            if _TARGET in vars(arg):
                yield vars(arg)[_TARGET]
        elif isinstance(arg, (list, tuple)):
            yield from _written(arg)


def _marked(result: Any, device: torch.device) -> Any:
    if isinstance(result, _MetaClass):
        return result  # names and types: the same everywhere
    if isinstance(result, _IndexClass):
        return place(result, device)
    if isinstance(result, _NDArray):
        return _array_on(result, device)
    if isinstance(result, (_ObjectBase, _Function)):
        setattr(result, _MARK, device)
    return result


class _DeviceArray(_NDArray):
    """An array on the host that stands for one on the device."""

    @property
    def ctx(self) -> Any:
        """DGL's name of the device."""
        return dgl.utils.to_dgl_context(vars(self)[_MARK])


def _array_on(array: Any, device: torch.device) -> Any:
    global _in_use
    _in_use = True
    array.__class__ = _DeviceArray
    setattr(array, _MARK, device)
    return array


def empty(original: Any, shape: Any, dtype: str = "float32", ctx: Any = _CPU) -> Any:
    """``dgl.ndarray.empty``: arrays for the device are made on the host."""
    device = dgl.backend.to_backend_ctx(ctx)
    return _array_on(original(shape, dtype), device) if serves(device) else original(shape, dtype, ctx)


def to_library(original: Any, data: Tensor) -> Any:
    """``zerocopy_to_dgl_ndarray``: a tensor on its way into the C++ library."""
    if not serves(data.device):
        return original(data)
    return _array_on(original(data.detach().cpu()), data.device)


def to_library_for_write(original: Any, data: Tensor) -> Any:
    """``zerocopy_to_dgl_ndarray_for_write``: one that it writes, which :func:`call` copies back."""
    if not serves(data.device):
        return original(data)
    host = data.detach().cpu()
    array = _array_on(original(host), data.device)
    setattr(array, _TARGET, (host, data.detach()))
    return array


def from_library(original: Any, array: Any) -> Tensor:
    """``zerocopy_from_dgl_ndarray``: an array on its way out."""
    device = vars(array).get(_MARK)
    tensor: Tensor = original(array)
    return tensor if device is None else tensor.to(device)


def on_host(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of DGL that works on the CPU alone: arguments go there, and results come back."""
    device = next(filter(None, (_lies_on(arg) for arg in (*args, *kwargs.values()))), None)
    if device is None:
        return original(*args, **kwargs)
    cpu = torch.device("cpu")
    kwargs = {name: _moved(arg, cpu) for name, arg in kwargs.items()}
    return _moved(original(*(_moved(arg, cpu) for arg in args), **kwargs), device)


def _lies_on(item: Any) -> torch.device | None:
    if isinstance(item, dgl.DGLGraph) and type(item._graph) is DeviceIndex:
        return item._graph.device
    return item.device if isinstance(item, Tensor) and serves(item.device) else None


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, (dgl.DGLGraph, Tensor)):
        return item.to(device)
    if isinstance(item, dict):
        return {key: _moved(part, device) for key, part in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(_moved(part, device) for part in item)
    return item


def pin_memory_(original: Any, index: Any) -> Any:
    """``HeteroGraphIndex.pin_memory_``: what a DGL without CUDA cannot do, with the way around."""
    raise DGLError(
        "pinning a graph (graph.pin_memory_(), DataLoader(use_uva=True)) needs a DGL with CUDA: leave"
        " use_uva out, so that batches are sampled on the CPU and moved to the GPU, or pass graph.to('cuda')"
    )


class Filter:
    """``dgl.utils.Filter`` without DGL's CUDA: which ids of a tensor are among some.

    Args:
        ids: those that are looked for, on the device.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def find_included_indices(self, test: Tensor) -> Tensor:
        """Positions of the ids that are among them, in the ids' dtype."""
        return torch.isin(test, self.ids).nonzero().flatten().to(self.ids.dtype)

    def find_excluded_indices(self, test: Tensor) -> Tensor:
        """Positions of the others."""
        return torch.isin(test, self.ids, invert=True).nonzero().flatten().to(self.ids.dtype)


def make_filter(original: Any, ids: Tensor) -> Any:
    """``dgl.utils.Filter``."""
    return Filter(ids) if serves(ids.device) else original(ids)
