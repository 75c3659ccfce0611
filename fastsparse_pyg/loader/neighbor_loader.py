"""NeighborLoader: batches of nodes with sampled neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from fastsparse_pyg.caching import outside_inference_mode
from fastsparse_pyg.loader.arguments import checked_input_nodes
from fastsparse_pyg.loader.base import LoaderMixin, as_index, choose_device, follows_script, make_sampler
from fastsparse_pyg.loader.batches import make_batch


class NeighborLoader(LoaderMixin, torch_geometric.loader.NeighborLoader):
    r"""Drop-in replacement of :class:`torch_geometric.loader.NeighborLoader` that needs no pyg-lib.

    Hamilton et al., `Inductive Representation Learning on Large Graphs <https://arxiv.org/abs/1706.02216>`_,
    section 3.1. Batches have the same fields as PyG's (``x``, ``y``, ``edge_index``, ``n_id``, ``e_id``,
    ``batch_size``, ``input_id``, ``num_sampled_nodes``, ``num_sampled_edges``, ...). Their edges are sorted
    by destination, and drop-in layers reuse the sampler's structure.

    If ``device`` is a GPU, which is the default if there is one, the loader samples and gathers on the GPU,
    on a separate stream, two batches ahead, and the batches are on the GPU. Features that take more than half
    of the free GPU memory stay on the host, and only the rows of a batch are copied to the GPU.
    ``num_workers`` and related arguments are ignored. On the CPU, the loader samples in C++ threads, or in
    worker processes if ``num_workers`` is given.

    With ``time_attr``, and for graphs stored as ``adj_t``, PyG's own sampler runs, which needs pyg-lib or
    torch-sparse. If you pass a ``neighbor_sampler``, it samples.

    Args:
        data: Data, HeteroData or (FeatureStore, GraphStore). Its ``edge_index`` may be an
            :class:`fastsparse_core.Adjacency`, which takes 4 bytes per edge instead of 16.
        num_neighbors: number of neighbours per hop, -1 for all; or a dict of such lists by edge type.
        input_nodes: indices or mask of the seeds; for heterogeneous graphs ``(node type, indices)``. None:
            all nodes.
        device: device that samples, and device of the batches. None: the GPU that the data is on; otherwise
            the current GPU if there is one, or the CPU.
        gpu_cache: number of nodes of each type whose features are also kept on the GPU, if the features stay
            on the host. The nodes with the most outgoing edges are chosen.
        others: as in PyG.

    Raises:
        TypeError: ``num_neighbors`` or ``input_nodes`` has another type.
        ValueError: an argument does not fit the data.
        ImportError: the arguments need PyG's own sampler, and pyg-lib is not installed.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from fastsparse_pyg import NeighborLoader
        >>> edge_index = torch.stack([torch.arange(6), torch.arange(6).roll(1)])
        >>> data = Data(x=torch.randn(6, 8), edge_index=edge_index)
        >>> loader = NeighborLoader(data, num_neighbors=[2], batch_size=4, device="cpu")
        >>> [batch.batch_size for batch in loader]
        [4, 2]
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[..., Any] | None = None,
        transform_sampler_output: Callable[..., Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        device: torch.device | str | int | None = None,
        gpu_cache: int = 0,
        **kwargs: Any,
    ) -> None:
        target = choose_device(data, device)
        options = {
            "replace": replace,
            "subgraph_type": subgraph_type,
            "disjoint": disjoint,
            "time_attr": time_attr,
            "weight_attr": weight_attr,
            "directed": directed,
        }
        make = partial(
            make_sampler, data, num_neighbors, loader="NeighborLoader", given=neighbor_sampler, **options
        )
        sampler = make(device=target)
        self._prepare(sampler, target, filter_per_worker, kwargs)
        if self._sampler is not None:
            is_data = isinstance(data, (Data, HeteroData))
            input_nodes = checked_input_nodes(input_nodes, sampler.num_nodes, is_data)
        super().__init__(
            data,
            num_neighbors,
            input_nodes=input_nodes,
            input_time=input_time,
            temporal_strategy=temporal_strategy,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            is_sorted=is_sorted,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=sampler,
            **options,
            **kwargs,
        )
        self._keep_rows(gpu_cache)
        if self._sampler is not None and target.type == "cpu" and follows_script(device):
            self._on_gpu = lambda device: make(device=device)
        if self._sampler is not None:
            given: NodeSamplerInput = self.input_data
            self._seeds = given.node.to(target)
            self._input_id = None if given.input_id is None else given.input_id.to(target)

    def _go_to(self, sampler: Any, device: torch.device) -> None:
        super()._go_to(sampler, device)
        self._seeds = self._seeds.to(device)
        self._input_id = None if self._input_id is None else self._input_id.to(device)

    @outside_inference_mode
    def _begin(self, index: Any) -> Any:
        index = as_index(index, self._device)
        seeds = self._seeds[index]
        node_type = self.input_data.input_type
        draw = self._sampler.core.start(seeds if node_type is None else {node_type: seeds})
        return draw, index if self._input_id is None else self._input_id[index]

    @outside_inference_mode
    def _end(self, begun: Any) -> Any:
        draw, input_id = begun
        out = self._sampler.output(draw.finish())
        out.metadata = (input_id, None)
        return self.filter_fn(out)

    def filter_fn(self, out: Any) -> Any:
        """Adds features to a sampled batch.

        Args:
            out: the sampled nodes and edges.
        """
        if self._sampler is None:
            return super().filter_fn(out)
        if self.transform_sampler_output:
            out = self.transform_sampler_output(out)
        batch = make_batch(self.data, out, self._device, self.custom_cls)
        input_type = self.input_data.input_type
        store = batch if input_type is None else batch[input_type]
        store.input_id, store.seed_time = out.metadata
        store.batch_size = out.metadata[0].size(0)
        return batch if self.transform is None else self.transform(batch)
