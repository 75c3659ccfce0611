"""DGLGraphs on a GPU that DGL itself cannot use: structure on the host, data on the device.

A DGLGraph is Python code around one handle of DGL's C++ library, ``graph._graph``. If such a graph is moved
to a GPU, its handle is a :class:`DeviceIndex`: another handle of the structure on the host, which also stores
the GPU as its device. The rest of DGL is unchanged and treats the graph as a graph on the GPU, because three
hooks cover all calls of the C++ library:

- :func:`to_library` copies tensors on the GPU to the host before the library reads them;
- :func:`call` marks the results of calls that got a DeviceIndex, or a tensor from the GPU, with that device
  (graph indices become DeviceIndex);
- :func:`from_library` copies the library's arrays to the device that they are marked with.

The operators, which take most of the time, do not call the library: they look up their Adjacency by the
DeviceIndex.
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

#: Name of the attribute with the device of an array, function or object of the C++ library.
_MARK = "_fastsparse_device"
#: Name of the attribute of output arrays with a pair: the tensor on the host, and its target on the device.
_TARGET = "_fastsparse_target"

#: Types of devices whose graphs have a DeviceIndex. Empty while `enable()` is not active, and if DGL itself
#: supports the GPU.
device_types: tuple[str, ...] = ()

#: True once a graph or an array on such a device was made. Until then, calls need no inspection.
_in_use = False


def serves(device: torch.device) -> bool:
    """True if graphs on this device have a DeviceIndex."""
    return device.type in device_types


class DeviceIndex(_IndexClass):
    """The ``HeteroGraphIndex`` of a DGLGraph on the GPU: another handle of the same structure.

    :func:`place` makes it.

    Attributes:
        host: DGL's index of the structure, on the CPU.
        device: device of all tensors and graphs that are derived from it.
    """

    host: Any
    device: torch.device
    _kept: dict[Any, Any]

    @property
    def ctx(self) -> Any:
        """The device as DGL's context object."""
        return dgl.utils.to_dgl_context(self.device)

    def copy_to(self, ctx: Any) -> Any:
        """Returns the index on another device; for the CPU, DGL's own index."""
        return place(self.host, dgl.backend.to_backend_ctx(ctx))

    def get_relation_graph(self, etype: int) -> Any:
        """The index of one edge type; every call returns the same object."""
        if is_one_relation(self):
            return self
        return self._keep(int(etype), lambda: place(self.host.get_relation_graph(etype), self.device))

    def edges(self, etype: int, order: str | None = None) -> Any:
        """Sources, destinations and ids of all edges."""

        def move() -> tuple[Tensor, ...]:
            return tuple(tensor.to(self.device) for tensor in self.host.edges(etype, order))

        return self._keep(("edges", int(etype), order), move)

    def flatten_relations(self, etypes: Any) -> Any:
        """Merges several edge types into one. `_OnDevice` moves the result's attributes to the device."""
        return _OnDevice(super().flatten_relations(etypes), self.device)

    def _keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def pin_memory_(self) -> None:
        """Does nothing, because kernels read the structure on the device."""

    def unpin_memory_(self) -> None:
        """Does nothing, because nothing was pinned."""

    def pin_memory(self) -> Any:
        """Returns itself, because kernels read the structure on the device."""
        return self

    def is_pinned(self) -> bool:
        """Returns False, because the structure on the host is never pinned."""
        return False

    def record_stream(self, stream: Any) -> None:
        """Does nothing, because the structure's tensors on the device are kept as long as the graph."""

    def shared_memory(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a copy in shared memory on the CPU, as DGL's own index."""
        return self.host.shared_memory(*args, **kwargs)

    def __reduce__(self) -> Any:
        return place, (self.host, self.device)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # it is immutable, like DGL's index

    def __repr__(self) -> str:
        return f"DeviceIndex({self.host!r}, device={str(self.device)!r})"


class _OnDevice:
    """An object of the C++ library whose attributes belong to a device."""

    def __init__(self, item: Any, device: torch.device) -> None:
        self._item, self._device = item, device

    def __getattr__(self, name: str) -> Any:
        return _marked(getattr(self._item, name), self._device)


def is_one_relation(index: Any) -> bool:
    """True if a graph has one edge type and only the node types of its ends, so it equals its relation."""
    if index.number_of_etypes() != 1:
        return False
    source, target = index.metagraph.find_edge(0)
    return (source, target) == (0, index.number_of_ntypes() - 1) and index.number_of_ntypes() <= 2


class StrandedIndex(_IndexClass):
    """Class of a DeviceIndex after :func:`fastsparse_dgl.disable`; every access raises an error."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in ("host", "device", "_kept", "_cache"):
            return super().__getattribute__(name)
        raise DGLError(
            f"this graph is on {self.device}, where only FastSparse can use it, but "
            "fastsparse_dgl.disable() was called. Call fastsparse_dgl.enable() again, and move the graph "
            "with graph.cpu() before the next disable()"
        )

    def __reduce__(self) -> Any:
        return place, (self.host, self.device)


#: All DeviceIndex objects that are alive, by ``id``.
_living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def serve(types: tuple[str, ...]) -> None:
    """Sets the types of devices whose graphs have a DeviceIndex. Indices on other devices stop working."""
    global device_types
    device_types = types
    for index in list(_living.values()):
        index.__class__ = DeviceIndex if serves(index.device) else StrandedIndex


def place(host: Any, device: torch.device) -> Any:
    """Returns the index of a structure on a device: DGL's own index for the CPU, otherwise a DeviceIndex.

    Raises:
        DGLError: FastSparse is not enabled for the device, for example when a pickled graph is loaded in
            another process; or the process is forked or a loader's worker, where CUDA does not work.
    """
    global _in_use
    if serves(device):
        _in_use = True
        if torch.cuda._is_in_bad_fork() or torch.utils.data.get_worker_info() is not None:
            raise DGLError(
                f"graphs on {device} cannot be used in a forked process or in a loader's worker, because "
                "CUDA does not work there. Give the loader graphs on the CPU and move its batches with "
                "batch.to(device), or use num_workers=0"
            )
        # A second Python handle of the same C++ object, which DGL counts as a reference.
        index = dgl._ffi.object_generic.convert_to_object([host])[0]
        index.__class__ = DeviceIndex
        index.host, index.device, index._kept = host, device, {}
        _living[id(index)] = index
        return index
    if device.type == "cpu":
        return host
    raise DGLError(
        f"cannot put this graph on {device}: it comes from a process that had called "
        "fastsparse_dgl.enable(). Call fastsparse_dgl.enable() in this process too"
    )


def copy_to(original: Any, index: Any, ctx: Any) -> Any:
    """Replaces ``HeteroGraphIndex.copy_to``, which ``graph.to`` calls."""
    device = dgl.backend.to_backend_ctx(ctx)
    return place(index, device) if serves(device) else original(index, ctx)


def call(original: Any, function: Any, *args: Any) -> Any:
    """Replaces calls of DGL's C++ library: marks the result with the device of the arguments."""
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
    """Makes the replacement of DGL's calls.

    Until a graph is on such a device, a call costs only one more Python frame, because making a block takes a
    hundred calls.
    """

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
    """The pairs (tensor on the host, its target on the device) of the arrays that a call wrote."""
    for arg in args:
        if isinstance(arg, _NDArray):
            if _TARGET in vars(arg):
                yield vars(arg)[_TARGET]
        elif isinstance(arg, (list, tuple)):
            yield from _written(arg)


def _marked(result: Any, device: torch.device) -> Any:
    if isinstance(result, _MetaClass):
        return result  # the results are only names and types, which have no device
    if isinstance(result, _IndexClass):
        return place(result, device)
    if isinstance(result, _NDArray):
        return _array_on(result, device)
    if isinstance(result, (_ObjectBase, _Function)):
        setattr(result, _MARK, device)
    return result


class _DeviceArray(_NDArray):
    """An array on the host that DGL's Python code treats as an array on the device."""

    @property
    def ctx(self) -> Any:
        """The device as DGL's context object."""
        return dgl.utils.to_dgl_context(vars(self)[_MARK])


def _array_on(array: Any, device: torch.device) -> Any:
    global _in_use
    _in_use = True
    array.__class__ = _DeviceArray
    setattr(array, _MARK, device)
    return array


def empty(original: Any, shape: Any, dtype: str = "float32", ctx: Any = _CPU) -> Any:
    """Replaces ``dgl.ndarray.empty``: arrays for the device are made on the host."""
    device = dgl.backend.to_backend_ctx(ctx)
    return _array_on(original(shape, dtype), device) if serves(device) else original(shape, dtype, ctx)


def to_library(original: Any, data: Tensor) -> Any:
    """Replaces ``zerocopy_to_dgl_ndarray``, which passes a tensor to the C++ library."""
    if not serves(data.device):
        return original(data)
    return _array_on(original(data.detach().cpu()), data.device)


def to_library_for_write(original: Any, data: Tensor) -> Any:
    """Replaces ``zerocopy_to_dgl_ndarray_for_write``: :func:`call` copies the written array back."""
    if not serves(data.device):
        return original(data)
    host = data.detach().cpu()
    array = _array_on(original(host), data.device)
    setattr(array, _TARGET, (host, data.detach()))
    return array


def from_library(original: Any, array: Any) -> Tensor:
    """Replaces ``zerocopy_from_dgl_ndarray``, which makes a tensor of an array of the C++ library."""
    device = vars(array).get(_MARK)
    tensor: Tensor = original(array)
    return tensor if device is None else tensor.to(device)


def on_host(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a CPU-only function of DGL: moves its arguments to the CPU, and its results to the device."""
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
    """Replaces ``HeteroGraphIndex.pin_memory_``: raises an error with a workaround."""
    raise DGLError(
        "pinning a graph (graph.pin_memory_(), DataLoader(use_uva=True)) needs a DGL with CUDA. Leave "
        "use_uva out: batches are then sampled on the CPU and moved to the GPU. Or pass graph.to('cuda')"
    )


class Filter:
    """``dgl.utils.Filter`` for a DGL without CUDA: finds the ids of a tensor that are in a given set.

    Args:
        ids: the ids to look for, on the device.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def find_included_indices(self, test: Tensor) -> Tensor:
        """Positions in ``test`` of ids that are in the set, in the dtype of the set's ids."""
        return torch.isin(test, self.ids).nonzero().flatten().to(self.ids.dtype)

    def find_excluded_indices(self, test: Tensor) -> Tensor:
        """Positions in ``test`` of ids that are not in the set, in the dtype of the set's ids."""
        return torch.isin(test, self.ids, invert=True).nonzero().flatten().to(self.ids.dtype)


def make_filter(original: Any, ids: Tensor) -> Any:
    """Replaces ``dgl.utils.Filter``."""
    return Filter(ids) if serves(ids.device) else original(ids)
