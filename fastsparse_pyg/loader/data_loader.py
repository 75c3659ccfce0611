"""Drop-in for PyG's DataLoader; it stores all graphs once, as contiguous tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from torch_geometric.data import Dataset, InMemoryDataset
from torch_geometric.data.data import BaseData
from torch_geometric.loader import DataLoader as PygDataLoader

from fastsparse_core.call_report import record
from fastsparse_core.device import script_uses_gpu
from fastsparse_core.graph_store import NothingToStore, NotStored, Outline, StoredBatches, same_outline
from fastsparse_core.log import info_once, warn_once
from fastsparse_pyg.caching import logger, outside_inference_mode
from fastsparse_pyg.loader.base import OF_WORKERS, choose_device, follows_script
from fastsparse_pyg.loader.stored_graphs import StoredGraphs


class _Fields(NamedTuple):
    """The loader's arguments `follow_batch` and `exclude_keys`."""

    follow: list[str] | None
    exclude: list[str] | None


class DataLoader(PygDataLoader):
    """:class:`torch_geometric.loader.DataLoader` without a loop over the graphs of a batch.

    The graphs are stored once, as contiguous tensors with pointers, and one kernel gathers a batch. The batch
    has the fields, values and slices of `Batch.from_data_list`, so ``batch.to_data_list()`` and ``batch[i]``
    work as in PyG. With the same seed, samples have the same order as in PyG's loader. Layers of this package
    reuse the stored structure of ``batch.edge_index``, so they need no sort.

    These datasets are stored:

    - a list or tuple of `Data` or `HeteroData`,
    - an `InMemoryDataset`, and subsets ``dataset[index]`` of it,
    - a `Subset` or `ConcatDataset` of these.

    If the dataset has a ``transform``, is of another kind, or its graphs differ in their attributes, PyG's
    code makes the batches, and a ``SlowPathWarning`` tells why. If only a single attribute cannot be stored,
    such as a sparse matrix or tensors of different dtypes, PyG's code collates this attribute.

    Storing takes as much memory as the graphs, except for an `InMemoryDataset` on the CPU, whose storage is
    read in place, also from a mapped file. If a copy would take more than half of the free host memory, PyG's
    code makes the batches.

    At the beginning of every epoch the loader checks the dataset, and stores changed graphs again. It always
    detects a replaced graph or attribute. To find in-place writes, it checks up to 1,024 tensors, and more
    for at most 2 % of the time since the last epoch began. The next epoch continues with the next tensors. In
    a larger dataset, the loader may therefore detect a write some epochs later.

    Args:
        dataset: as in PyG.
        batch_size: as in PyG.
        shuffle: as in PyG.
        follow_batch: as in PyG.
        exclude_keys: as in PyG.
        device: device of the batches. None: the GPU that the data is on; otherwise the current GPU if there
            is one, or the CPU, as in :class:`NeighborLoader`. A later ``batch.to(device)`` copies nothing.
            For a GPU, the graphs are stored in its memory if they take at most half of the free memory,
            otherwise in page-locked host memory.
        kwargs: as in PyTorch's loader. Stored graphs need no worker processes, so ``num_workers`` and related
            arguments are ignored.

    Attributes:
        device: device of the batches.

    Raises:
        TypeError: ``dataset`` is a single graph.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import DataLoader
        >>> from torch_geometric.data import Data
        >>> graph = Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]))
        >>> loader = DataLoader([graph] * 10, batch_size=4, device="cpu")
        >>> [batch.num_graphs for batch in loader]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: list[str] | None = None,
        exclude_keys: list[str] | None = None,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, BaseData):
            raise TypeError(
                f"dataset: expected a dataset or a list of graphs, got one {type(dataset).__name__}. "
                "Pass [data], or use NeighborLoader to sample batches from one graph"
            )
        self._fields = _Fields(follow_batch, exclude_keys)
        self._source: _Source | None = None
        self._graphs: StoredGraphs | None = None
        self.device = choose_device(None, device)
        self._follows = follows_script(device)
        self._moves = device is not None or (self.device.type != "cpu" and not self._follows)
        try:
            if batch_size is None and kwargs.get("batch_sampler") is None:
                raise NotStored("batch_size is None")
            self._source = _Source(dataset)
            self.device = choose_device(self._source.example(), device)
            self._graphs = self._source.store(self.device, self._fields)
        except NotStored as reason:
            _warn_original(reason)
        self._is_stored = self._graphs is not None
        if self._is_stored:
            pins = self.device.type == "cpu"
            names = [name for name in OF_WORKERS if not (pins and name.startswith("pin_memory"))]
            ignored = [name for name in names if kwargs.pop(name, None)]
            if ignored:
                info_once(
                    logger, f"{', '.join(ignored)}: ignored, because stored graphs need no worker processes"
                )
        super().__init__(dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs)
        self._collation = _collation_of(self)

    def _get_iterator(self) -> Any:
        current = self._current()
        if current is None:
            return super()._get_iterator()
        record("DataLoader", "FastSparse")
        graphs, graph_at = current
        return StoredBatches(self, outside_inference_mode(lambda index: graphs.batch(index, graph_at)))

    def __iter__(self) -> Iterator[Any]:
        if self._follows and self._source is not None and self.device.type == "cpu" and script_uses_gpu():
            self.device = choose_device(self._source.example(), None)
            self._graphs = None
            if self._is_stored:
                self.pin_memory = False
        batches = super().__iter__()
        if isinstance(batches, StoredBatches) or not self._moves:
            return batches
        return _moved(batches, self.device)

    @outside_inference_mode
    def _current(self) -> tuple[StoredGraphs, Tensor | None] | None:
        """The stored graphs, stored again if the dataset changed, and `_Source.graph_at`.

        None if PyG's loader makes the batches.
        """
        if not self._is_stored:
            return None
        try:
            if _collation_of(self) != self._collation:
                raise NotStored("collate_fn was assigned or changed after the loader was made")
            source, graphs = _Source(self.dataset), self._graphs
            if self._source is not None and source.is_like(self._source):
                source = self._source
            if graphs is None or source is not self._source or not graphs.is_current():
                graphs, self._source = source.store(self.device, self._fields), source
                self._graphs = graphs
        except NotStored as reason:
            _warn_original(reason)
            return None
        return graphs, source.graph_at

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_graphs"] = state["_source"] = None  # stored again in the other process
        return state


def _collation_of(loader: PygDataLoader) -> tuple[Any, ...]:
    """Returns the `collate_fn` of a loader in a form that can be compared."""
    collate = loader.collate_fn
    options = (getattr(collate, name, None) for name in ("follow_batch", "exclude_keys"))
    return (collate, *(tuple(names or ()) for names in options))


def _warn_original(reason: NotStored) -> None:
    if isinstance(reason, NothingToStore):
        return
    cure = (
        "A kernel makes the batches if batch_size is a number, collate_fn is unchanged, and the graphs have "
        "the same attributes and are in a list, or in an InMemoryDataset without transform"
    )
    record("DataLoader", "PyG", str(reason), cure)
    message = "fastsparse_pyg.DataLoader: PyG's DataLoader makes the batches, graph by graph, because"
    warn_once(f"{message} {reason}. {cure}")


def _moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield batch.to(device, non_blocking=True) if isinstance(batch, BaseData) else batch


class _Source:
    """The dataset that stores a loader's graphs, and the graphs that the loader selects from it.

    Args:
        dataset: the loader's dataset.

    Raises:
        NotStored: the dataset is not in memory, or changes graphs when they are read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._outline = _outline(dataset)

    def is_like(self, other: _Source) -> bool:
        """True if both datasets consist of the same objects and positions."""
        return same_outline(self._outline, other._outline)

    @cached_property
    def _parts(self) -> _Parts:
        return _parts_of(self._dataset)

    @cached_property
    def graph_at(self) -> Tensor | None:
        """Index of the stored graph for every position of the dataset, int64; None if they are the same."""
        root, indices = self._parts[0]
        if len(self._parts) > 1 or indices is None or not isinstance(root, InMemoryDataset):
            return None
        return torch.tensor(indices, dtype=torch.int64, device="cpu")

    def example(self) -> Any:
        """Returns a graph, or all graphs collated, to find the data's device; None for an empty dataset."""
        for root, _ in self._parts:
            if isinstance(root, InMemoryDataset):
                return root._data
            if len(root):
                return root[0]
        return None

    def store(self, device: torch.device, fields: _Fields) -> StoredGraphs:
        """The graphs as contiguous tensors.

        Raises:
            NotStored: the graphs cannot be stored together; the message tells why.
        """
        root, indices = self._parts[0]
        if len(self._parts) == 1 and isinstance(root, InMemoryDataset):
            return StoredGraphs(_InMemory(root), device, fields.follow, fields.exclude, _collated(root))
        graphs: list[Any] = []
        for root, indices in self._parts:
            items = _InMemory(root) if isinstance(root, InMemoryDataset) else root
            graphs += items if indices is None else [items[nth] for nth in indices]
        return StoredGraphs(graphs, device, fields.follow, fields.exclude)


class _InMemory(Sequence[Any]):
    """All graphs of an in-memory dataset; each graph is made when it is accessed."""

    def __init__(self, dataset: InMemoryDataset) -> None:
        self._dataset, self._length = dataset, dataset.len()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, nth: Any) -> Any:
        if not 0 <= nth < self._length:
            raise IndexError(nth)
        return self._dataset.get(nth)


#: Pairs of a dataset in memory and the selected positions (None: all positions).
_Parts = list[tuple[Any, list[int] | None]]


def _outline(dataset: Any) -> Outline:
    """The objects of a dataset, and the selected positions.

    Raises:
        NotStored: the dataset is not in memory, or changes graphs when they are read.
    """
    kind = type(dataset)
    if kind in (list, tuple):
        return [dataset, *dataset], []
    if kind is Subset:
        objects, positions = _outline(dataset.dataset)
        return objects, [*positions, _as_list(dataset.indices)]
    if kind is ConcatDataset:
        outlines = [_outline(item) for item in dataset.datasets]
        return [x for objects, _ in outlines for x in objects], [x for _, some in outlines for x in some]
    if getattr(dataset, "transform", None) is not None:
        raise NotStored("the dataset has a transform, which may give another graph every time")
    if not isinstance(dataset, InMemoryDataset):
        raise NotStored(f"FastSparse cannot tell whether a {kind.__name__} keeps its graphs in memory")
    for name, base in _READING:
        if getattr(kind, name) is not getattr(base, name):
            raise NotStored(f"{kind.__name__} overrides the method {name}")
    objects = [dataset, dataset._data, dataset.slices, *(getattr(dataset, "_data_list", None) or ())]
    return objects, [] if dataset._indices is None else [_as_list(dataset._indices)]


#: Methods by which PyG reads in-memory datasets. Datasets that override one of them are not stored.
_READING = (
    ("get", InMemoryDataset),
    ("len", InMemoryDataset),
    ("__getitem__", Dataset),
    ("__len__", Dataset),
    ("indices", Dataset),
)


def _parts_of(dataset: Any) -> _Parts:
    """Returns the parts of a dataset for which `_outline` raised no error."""
    if type(dataset) is Subset:
        return _chosen(_parts_of(dataset.dataset), _as_list(dataset.indices))
    if type(dataset) is ConcatDataset:
        return [part for item in dataset.datasets for part in _parts_of(item)]
    if isinstance(dataset, InMemoryDataset) and dataset._indices is not None:
        return _chosen([(dataset, None)], _as_list(dataset._indices))
    return [(dataset, None)]


def _as_list(indices: Any) -> list[int]:
    return indices.tolist() if hasattr(indices, "tolist") else list(indices)


def _chosen(parts: _Parts, positions: list[int]) -> _Parts:
    """The parts of a dataset after selecting positions."""
    if len(parts) > 1:
        flat = [(root, nth) for root, indices in parts for nth in indices or range(_length(root))]
        return [(root, [nth]) for root, nth in (flat[position] for position in positions)]
    root, indices = parts[0]
    within = range(_length(root)) if indices is None else indices
    return [(root, [within[position] for position in positions])]


def _length(root: Any) -> int:
    return int(root.len()) if isinstance(root, InMemoryDataset) else len(root)


def _collated(dataset: InMemoryDataset) -> tuple[Any, Any] | None:
    """PyG's collated storage of a dataset; None if the dataset's graphs may differ from it."""
    if dataset.slices is None or dataset.len() == 1:
        return None
    cached = getattr(dataset, "_data_list", None) or ()
    return (dataset._data, dataset.slices) if all(_is_of(item, dataset) for item in cached) else None


def _is_of(graph: Any, dataset: InMemoryDataset) -> bool:
    """True if a graph in the dataset's `_data_list` is a view of the dataset's collated storage."""
    if graph is None:
        return True
    if len(graph.stores) != len(dataset._data.stores):
        return False
    for mine, whole in zip(graph.stores, dataset._data.stores, strict=True):
        for name, value in mine.items():
            stored = whole.get(name)
            if isinstance(value, Tensor) and isinstance(stored, Tensor):
                if value.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
                    return False
            elif name != "num_nodes" and not (isinstance(stored, list) and value in stored):
                return False
    return True
