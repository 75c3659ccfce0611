"""Drop-in for DGL's GraphDataLoader; it stores all graphs once, as contiguous tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset

from fastsparse_core.call_report import record
from fastsparse_core.device import script_uses_gpu, usable_device
from fastsparse_core.graph_store import NothingToStore, NotStored, Outline, StoredBatches, same_outline
from fastsparse_core.log import info_once, warn_once
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dataloading.stored_graphs import StoredGraphs
from fastsparse_dgl.dgl_blocks import dgl_can_hold

_logger = logging.getLogger("fastsparse_dgl")

#: Options of PyTorch's loader for worker processes; ignored if the graphs are stored.
_OF_WORKERS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
    "in_order",
)


class GraphDataLoader(dgl.dataloading.GraphDataLoader):
    """:class:`dgl.dataloading.GraphDataLoader` without a loop over the graphs of a batch.

    The graphs and labels are stored once, as contiguous tensors with pointers, and gathered for every batch.
    A batch equals the result of `dgl.batch` for the same graphs: structure, edge ids, data,
    `batch_num_nodes` and `batch_num_edges`. Labels and containers are collated as in DGL. With the same seed,
    samples have the same order as in DGL's loader. Layers of this package reuse the structure of a batch.

    These datasets are stored:

    - a list or tuple of items: graphs, or tuples or dictionaries of graphs, tensors, numbers and strings,
    - DGL's own datasets in memory without a ``transform``,
    - subsets of these.

    For other datasets DGL's loader makes the batches, and a ``SlowPathWarning`` tells why. To have your own
    dataset stored, pass ``[dataset[i] for i in range(len(dataset))]``.

    At the beginning of every epoch the loader checks the dataset, and stores changed graphs again. In a long
    list, it checks only some tensors for in-place writes: up to 1,024, and more for at most 2 % of the time
    since the last epoch began. The next epoch checks the next tensors, so a write may be detected later.

    Args:
        dataset: as in DGL.
        collate_fn: as in DGL. If it is given, DGL's loader makes the batches.
        use_ddp: as in DGL.
        ddp_seed: as in DGL.
        device: device of the batches; None: the CPU, as in DGL. Batches on a GPU need a DGL with CUDA, or
            :func:`fastsparse_dgl.enable`. After ``enable()``, None means the GPU for epochs that begin after
            the script has used the GPU.
        kwargs: as in PyTorch's loader. Stored graphs need no worker processes, so ``num_workers`` and related
            arguments are ignored.

    Attributes:
        device: device of the batches.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import GraphDataLoader
        >>> graphs = [dgl.rand_graph(4, 9) for _ in range(6)]
        >>> loader = GraphDataLoader(list(zip(graphs, torch.arange(6))), batch_size=4, device="cpu")
        >>> [batch.batch_size for batch, labels in loader]
        [4, 2]
    """

    #: True if loaders without a `device` yield batches on the GPU once the script has used it. `enable()`
    #: sets it.
    _follows_script = False

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> None:
        self.device = usable_device("cpu" if device is None else device)
        self._follows_script = device is None and self._follows_script
        self._graphs: StoredGraphs | None = None
        self._outline: Outline = ([], [])
        try:
            if collate_fn is not None:
                raise NotStored("a collate_fn was given")
            if kwargs.get("batch_size", 1) is None and kwargs.get("batch_sampler") is None:
                raise NotStored("batch_size is None")
            self._outline = _outline(dataset)
            self._graphs = self._store(dataset)
        except NotStored as reason:
            _warn_original(reason)
        self._is_stored = self._graphs is not None
        if self._is_stored:
            ignored = [name for name in _OF_WORKERS if kwargs.pop(name, None)]
            if ignored:
                info_once(
                    _logger, f"{', '.join(ignored)}: ignored, because stored graphs need no worker processes"
                )
        super().__init__(dataset, collate_fn, use_ddp, ddp_seed, **kwargs)
        self._collate = self.collate_fn

    def _get_iterator(self) -> Any:
        if self._is_stored and self._follows_script and self.device.type == "cpu" and script_uses_gpu():
            device = torch.device("cuda", torch.cuda.current_device())
            if dgl_can_hold(device):
                self.device, self._graphs, self.pin_memory = device, None, False
        graphs = self._current()
        if graphs is None:
            return super()._get_iterator()
        record("GraphDataLoader", "FastSparse")
        return StoredBatches(self, graphs.batch)

    def _current(self) -> StoredGraphs | None:
        """Returns the stored graphs, after storing changed ones again; None if DGL's loader has to run."""
        if not self._is_stored:
            return None
        try:
            if self.collate_fn != self._collate:
                raise NotStored("collate_fn was assigned after the loader was made")
            outline = _outline(self.dataset)
            is_known = same_outline(outline, self._outline)
            if self._graphs is None or not is_known or not self._graphs.is_current():
                self._outline, self._graphs = outline, self._store(self.dataset)
        except NotStored as reason:
            _warn_original(reason)
            return None
        return self._graphs

    def _store(self, dataset: Any) -> StoredGraphs:
        items = [dataset[nth] for nth in range(len(dataset))]
        return StoredGraphs(items, self.device, dgl.dataloading.GraphCollator().collate)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_graphs"], state["_outline"] = None, ([], [])  # stored again in the other process
        return state


def _outline(dataset: Any) -> Outline:
    """The objects of a dataset, and the selected positions.

    Raises:
        NotStored: the dataset may not be in memory, or may return other items every time.
    """
    kind = type(dataset)
    if kind in (list, tuple):
        return [dataset, *dataset], []
    if kind in (Subset, dgl.data.utils.Subset):
        objects, positions = _outline(dataset.dataset)
        indices = dataset.indices
        return objects, [*positions, indices.tolist() if hasattr(indices, "tolist") else list(indices)]
    if getattr(dataset, "_transform", None) is not None:
        raise NotStored("the dataset has a transform, which may give another graph every time")
    if not isinstance(dataset, dgl.data.DGLDataset) or not kind.__module__.startswith("dgl.data"):
        raise NotStored(f"FastSparse cannot tell whether a {kind.__name__} keeps its graphs in memory")
    return [dataset], []


def _warn_original(reason: NotStored) -> None:
    if isinstance(reason, NothingToStore):
        return
    cure = (
        "A kernel makes the batches if batch_size is a number, there is no collate_fn, and the graphs have "
        "the same kinds of data and are in a list: GraphDataLoader([dataset[i] for i in range(len(dataset))])"
    )
    record("GraphDataLoader", "DGL", str(reason), cure)
    message = (
        "fastsparse_dgl.GraphDataLoader: DGL's GraphDataLoader makes the batches, graph by graph, because"
    )
    warn_once(f"{message} {reason}. {cure}")
