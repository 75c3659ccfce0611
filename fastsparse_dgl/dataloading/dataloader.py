"""DataLoader: a GPU prepares the next batches during the training step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

import torch

from fastsparse_core.call_report import is_recording, record
from fastsparse_core.device import usable_device
from fastsparse_core.log import info_once
from fastsparse_core.sampling import Draw, FeatureTable, prefetched
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.dataloading.neighbor_sampler import NeighborSampler, is_held_on_gpu, tell_fallback
from fastsparse_dgl.graph import GraphLike

_logger = logging.getLogger("fastsparse_dgl")

#: Options for DGL's transfers to a GPU and for worker processes; ignored if the GPU samples.
_IGNORED = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "worker_init_fn",
    "multiprocessing_context",
    "timeout",
    "pin_memory",
    "use_uva",
    "use_prefetch_thread",
    "use_alternate_streams",
    "pin_prefetcher",
)


class DataLoader(dgl.dataloading.DataLoader):
    """Drop-in replacement of :class:`dgl.dataloading.DataLoader`, also on GPUs with a CPU build of DGL.

    With :class:`fastsparse_dgl.NeighborSampler` and ``device`` a GPU, neighbours are sampled on that GPU, on
    a separate stream, two batches ahead. The graph may be on the CPU, or on the GPU after
    :func:`fastsparse_dgl.enable`. A batch is ``(input_nodes, output_nodes, blocks)``. ``srcdata``,
    ``dstdata`` and ``edata`` of the blocks contain all data of the graph. The sampler's
    ``prefetch_node_feats``, ``prefetch_labels`` and ``prefetch_edge_feats`` are gathered with the batch;
    other data are gathered when they are first read. Features that take more than half of the GPU's free
    memory stay on the host, and only the rows of a batch are copied to the GPU. With
    ``gpu_cache={"node": {"feat": count}}``, the GPU also stores the features of the ``count`` nodes with the
    most outgoing edges. If DGL was built without CUDA, blocks are :class:`fastsparse_dgl.SampledBlock`, which
    drop-in layers accept.

    With another sampler, or if ``device`` is not a GPU, DGL's loader runs.

    Args:
        graph: DGLGraph.
        indices: ids of the seeds; a dict from node types to ids if the graph has several node types.
        graph_sampler: sampler of neighbours.
        device: device of the batches; None: as in DGL, the graph's device, or the GPU with ``use_uva``.
        others: as in DGL. On a GPU, arguments about worker processes and DGL's own transfers are ignored.

    Raises:
        ValueError: as for the sampler, or a value in ``gpu_cache`` is not a number of nodes.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import DataLoader, NeighborSampler
        >>> graph = dgl.graph((torch.arange(6), torch.arange(6).roll(1)))
        >>> loader = DataLoader(graph, torch.arange(6), NeighborSampler([2]), device="cpu", batch_size=4)
        >>> [len(outputs) for inputs, outputs, blocks in loader]
        [4, 2]
    """

    def __init__(
        self,
        graph: GraphLike,
        indices: Any,
        graph_sampler: Any,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> None:
        is_on_gpu = isinstance(graph, dgl.DGLGraph) and is_held_on_gpu(graph)
        if device is None and (is_on_gpu or kwargs.get("use_uva")):  # as in DGL
            device = graph.device if is_on_gpu else "cuda"
        target = None if device is None else usable_device(device)
        self._target: torch.device | None = None
        if target is not None and target.type == "cuda":
            reason = _why_not(graph, indices, graph_sampler)
            if reason:
                tell_fallback("DataLoader falls back to DGL's loader", reason)
            else:
                self._target = target
        if self._target is None:
            super().__init__(graph, indices, graph_sampler, device=device, **kwargs)
            if not self.num_workers:
                # Without this, DGL warns in every epoch about the affinity of worker processes, even if
                # there are none.
                self.cpu_affinity_enabled = True
            if isinstance(graph_sampler, NeighborSampler) and not graph_sampler.why_not(graph):
                # Prepare the structure here, so that forked worker processes share its memory.
                graph_sampler.prepare(graph, torch.device("cpu"))
            return
        # If the graph is on the GPU, DGL rejects these options itself.
        ignored = [] if is_on_gpu else [name for name in _IGNORED if kwargs.pop(name, None)]
        gpu_cache = kwargs.pop("gpu_cache", None) or {}
        of_nodes = _rows_to_keep(gpu_cache)
        if "edge" in gpu_cache:
            ignored.append("gpu_cache of edges")
        if ignored:
            info_once(
                _logger,
                f"{', '.join(ignored)}: ignored, because batches are sampled on {target}",
            )
        if not is_on_gpu:
            indices = _on_cpu(indices)
        super().__init__(graph, indices, graph_sampler, device="cpu", **kwargs)
        self.device = self._target
        core = graph_sampler.prepare(graph, self._target)
        self._stream = torch.cuda.Stream(self._target)
        for name, count in of_nodes.items():
            for of_type, nodes in core.most_drawn(count).items():
                data = graph.nodes[of_type].data
                if name in data:
                    FeatureTable(data[name], self._target).keep(nodes)

    def __iter__(self) -> Iterator[Any]:
        if is_recording():
            reason = "" if self._target is not None else _why_not_sampled(self.graph, self.graph_sampler)
            record("DataLoader", "DGL" if reason else "FastSparse", reason)
        if self._target is None:
            return super().__iter__()
        if self.shuffle:
            self.dataset.shuffle()
        return prefetched(iter(self.dataset), self._begin, self._end, self._stream, reads_rows=False)

    def _begin(self, seeds: Any) -> tuple[Draw, Any]:
        return self.graph_sampler.start(self.graph, seeds, self._target), seeds

    def _end(self, begun: tuple[Draw, Any]) -> tuple[Any, Any, list[Any]]:
        sampler, graph = self.graph_sampler, self.graph
        inputs, outputs, blocks = sampler.finish(graph, *begun)
        _read("prefetch_node_feats", sampler.prefetch_node_feats, graph.ntypes, blocks[0].srcnodes)
        _read("prefetch_labels", sampler.prefetch_labels, graph.ntypes, blocks[-1].dstnodes)
        for block in blocks:
            _read("prefetch_edge_feats", sampler.prefetch_edge_feats, graph.canonical_etypes, block.edges)
        return inputs, outputs, blocks


def _why_not_sampled(graph: GraphLike, sampler: Any) -> str:
    """Returns why DGL's sampler has to run; "" if FastSparse can sample."""
    kind = type(sampler)
    if not isinstance(sampler, NeighborSampler):
        return (
            f"FastSparse samples only for fastsparse_dgl.NeighborSampler, not for {kind.__name__}. A fanout "
            "of -1 takes all neighbors"
        )
    for name in ("sample", "sample_blocks", "assign_lazy_features"):
        if getattr(kind, name) is not getattr(NeighborSampler, name):
            return f"{kind.__name__} overrides {name}. Change the batches that the loader yields instead"
    return sampler.why_not(graph)


def _why_not(graph: GraphLike, indices: Any, sampler: Any) -> str:
    """Returns why DGL's loader has to make the batches; "" if FastSparse's loader can."""
    for item in indices.values() if isinstance(indices, Mapping) else [indices]:
        try:
            torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError):
            return f"indices is a {type(item).__name__}. Pass a tensor of ids, or a dict of ids by node type"
    return _why_not_sampled(graph, sampler)


def _read(argument: str, names: Any, types: list[Any], views: Any) -> None:
    """Gathers the node or edge data that the sampler's argument ``argument`` names."""
    if not isinstance(names, Mapping):
        if names and len(types) > 1:
            raise ValueError(
                f"{argument}: expected a dict of names by type, such as {{{types[0]!r}: {names!r}}}, for a "
                f"graph of several types, got {names!r}"
            )
        names = {types[0]: names} if names else {}
    for of_type, wanted in names.items():
        data = views[of_type].data
        for name in wanted:
            if name not in data:
                raise KeyError(f"{argument}: expected names among {sorted(data)}, got {name!r}")
            data[name]


def _rows_to_keep(gpu_cache: Any) -> Mapping[str, int]:
    """Checks ``gpu_cache`` and returns its number of nodes for each feature name."""
    of_nodes = gpu_cache.get("node", {}) if isinstance(gpu_cache, Mapping) else None
    if not isinstance(of_nodes, Mapping) or not all(
        isinstance(count, Integral) and int(count) >= 0 for count in of_nodes.values()
    ):
        raise ValueError(
            f'gpu_cache: expected numbers of nodes, such as {{"node": {{"feat": 1000}}}}, got {gpu_cache!r}'
        )
    return of_nodes


def _on_cpu(indices: Any) -> Any:
    if isinstance(indices, Mapping):
        return {name: torch.as_tensor(item).cpu() for name, item in indices.items()}
    return torch.as_tensor(indices).cpu()
