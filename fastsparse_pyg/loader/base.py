"""Code shared by the sampling loaders: choice of the device, and prefetching of batches on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from fastsparse_core import _C
from fastsparse_core.call_report import record
from fastsparse_core.device import script_uses_gpu, usable_device
from fastsparse_core.graph_store import drawn_batches
from fastsparse_core.log import info_once, warn_once
from fastsparse_core.sampling import prefetched
from fastsparse_pyg.caching import logger
from fastsparse_pyg.loader.batches import keep_rows
from fastsparse_pyg.loader.sampler import GraphSampler, why_not

#: Options of PyTorch's loader for worker processes. A GPU samples in this process, so they are ignored.
OF_WORKERS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
    "in_order",
)


class Script:
    """State of the running script, for `enable()`.

    Attributes:
        decides: whether loaders without a `device` stay on the CPU until the script uses the GPU. If False, a
            script that trains on the CPU on a machine with a GPU gets batches on the GPU.
    """

    decides = False


def follows_script(device: torch.device | str | int | None) -> bool:
    """True if a loader with this `device` argument may move to the GPU when an epoch begins."""
    return device is None and Script.decides


def choose_device(data: Any, device: torch.device | str | int | None) -> torch.device:
    """Returns the device that samples: `device` if given, else the data's GPU, the current GPU or the CPU."""
    if device is not None:
        return usable_device(device)
    if isinstance(data, (Data, HeteroData)):
        tensors = [item for store in data.stores for item in store.values() if isinstance(item, Tensor)]
        on_gpu = next((item.device for item in tensors if item.is_cuda), None)
        if on_gpu is not None:
            return on_gpu
    has_gpu = torch.cuda.is_available() and _C.build_info()["cuda"]
    if has_gpu and (script_uses_gpu() or not Script.decides):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_sampler(
    data: Any,
    num_neighbors: Any,
    device: torch.device,
    *,
    loader: str,
    given: Any,
    time_attr: str | None,
    directed: bool,
    subgraph_type: Any,
    **options: Any,
) -> Any:
    """Makes the sampler of a loader. Warns and returns None if PyG has to make its own sampler."""
    message = "the loader falls back to PyG's sampler"
    if given is not None:
        info_once(logger, "the loader samples with the given `neighbor_sampler`, not with FastSparse")
        record(loader, "PyG", "`neighbor_sampler` was given")
        return given
    reason = why_not(data)
    if time_attr is not None:
        reason = "FastSparse does not support `time_attr`. To sample with FastSparse, leave `time_attr` out"
    if reason:
        record(loader, "PyG", reason)
        warn_once(f"{message}, which needs pyg-lib and samples on the CPU: {reason}")
        return None
    if not directed:
        subgraph_type = "induced"
    return GraphSampler(data, num_neighbors, device=device, subgraph_type=subgraph_type, **options)


class LoaderMixin:
    """Methods of both sampling loaders. They override PyG's methods if the sampler is FastSparse's."""

    batch_size: Any
    batch_sampler: Any
    sampler: Any
    dataset: Any
    transform: Any
    data: Any

    num_workers: int
    pin_memory: bool
    filter_per_worker: Any
    node_sampler: Any

    _sampler: Any
    _device: torch.device
    _stream: torch.cuda.Stream | None = None
    _on_gpu: Callable[[torch.device], Any] | None = None

    def _prepare(self, sampler: Any, device: torch.device, filter_per_worker: Any, kwargs: Any) -> None:
        """Sets sampler and device; on a GPU, removes the arguments for worker processes from ``kwargs``."""
        self._sampler = sampler if isinstance(sampler, GraphSampler) else None
        self._device = device
        if self._sampler is None or device.type == "cpu":
            return
        ignored = [name for name in OF_WORKERS if kwargs.pop(name, None)]
        if filter_per_worker is not None:
            ignored.append("filter_per_worker")
        if ignored:
            info_once(
                logger,
                f"{', '.join(ignored)}: ignored, because batches are sampled on {device}, without worker "
                "processes",
            )

    def _keep_rows(self, count: int) -> None:
        """Copies the features of the most sampled nodes to the GPU; see ``gpu_cache`` of the loaders."""
        if not (isinstance(count, Integral) and count >= 0):  # `Integral` includes NumPy's integers
            raise ValueError(f"gpu_cache: expected a number of nodes, got {count!r}")
        if not count or self._sampler is None or self._device.type == "cpu":
            return
        if isinstance(self.data, (Data, HeteroData)):
            keep_rows(self.data, self._sampler.core.most_drawn(count), self._device)

    def _begin(self, index: Any) -> Any:
        raise NotImplementedError

    def _end(self, begun: Any) -> Any:
        raise NotImplementedError

    def __call__(self, index: Any) -> Any:
        """Makes the batch for the seeds at these positions."""
        if self._sampler is None:
            return super().__call__(index)  # type: ignore[misc]
        return self._end(self._begin(index))

    def _go_to(self, sampler: GraphSampler, device: torch.device) -> None:
        """Uses this sampler and device from now on."""
        self.node_sampler = self._sampler = sampler
        self._device, self._on_gpu = device, None
        self.num_workers, self.pin_memory, self.filter_per_worker = 0, False, False

    def __iter__(self) -> Iterator[Any]:
        if self._on_gpu is not None and script_uses_gpu():
            device = choose_device(self.data, None)
            self._go_to(self._on_gpu(device), device)
        if self._sampler is not None:
            record(_base_of(type(self)).__name__, "FastSparse")
        return super().__iter__()  # type: ignore[misc]

    def _get_iterator(self) -> Iterator[Any]:
        is_own = type(self).collate_fn is not _base_of(type(self)).collate_fn  # type: ignore[attr-defined]
        if self._sampler is None or self._device.type == "cpu" or self.batch_sampler is None or is_own:
            return super()._get_iterator()  # type: ignore[misc]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        indices = drawn_batches(self.batch_sampler, self._device)
        reads_rows = self.transform is not None
        return prefetched(indices, self._begin, self._end, self._stream, reads_rows=reads_rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: item for name, item in self.__dict__.items() if name not in ("_stream", "_on_gpu")}


def _base_of(kind: type) -> Any:
    """Returns the PyG class from which a loader class is derived."""
    return kind.__mro__[kind.__mro__.index(LoaderMixin) + 1]


def as_index(index: Any, device: torch.device) -> Tensor:
    """Converts positions to a tensor on the device."""
    if not isinstance(index, Tensor):
        index = torch.tensor(index, dtype=torch.int64)
    return index.to(device, non_blocking=True)
