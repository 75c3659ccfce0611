"""LinkNeighborLoader: batches of edges with sampled neighbours of their ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric.loader
from torch import Tensor

from fastsparse_pyg.caching import outside_inference_mode
from fastsparse_pyg.loader.arguments import checked_links
from fastsparse_pyg.loader.base import LoaderMixin, choose_device, follows_script, make_sampler
from fastsparse_pyg.loader.batches import make_batch


class LinkNeighborLoader(LoaderMixin, torch_geometric.loader.LinkNeighborLoader):
    r"""Drop-in replacement of :class:`torch_geometric.loader.LinkNeighborLoader` that needs no pyg-lib.

    It samples neighbours like :class:`NeighborLoader`, for both ends of the links ``edge_label_index`` and of
    negative samples. As in PyG, the ends and negative samples of a batch are prepared on the CPU.

    Args:
        data: Data, HeteroData or (FeatureStore, GraphStore).
        num_neighbors: number of neighbours per hop, -1 for all; or a dict of such lists by edge type.
        device: see :class:`NeighborLoader`.
        gpu_cache: see :class:`NeighborLoader`.
        others: as in PyG.

    Raises:
        TypeError: ``num_neighbors`` or ``edge_label_index`` has another type.
        ValueError: an argument does not fit the data.
        ImportError: the arguments need PyG's own sampler, and pyg-lib is not installed.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> from fastsparse_pyg import LinkNeighborLoader
        >>> edge_index = torch.stack([torch.arange(6), torch.arange(6).roll(1)])
        >>> data = Data(x=torch.randn(6, 8), edge_index=edge_index)
        >>> loader = LinkNeighborLoader(data, [2], edge_label_index=edge_index, batch_size=4, device="cpu")
        >>> [batch.edge_label_index.size(1) for batch in loader]
        [4, 2]
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
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
            make_sampler, data, num_neighbors, loader="LinkNeighborLoader", given=neighbor_sampler, **options
        )
        sampler = make(device=target)
        self._prepare(sampler, target, filter_per_worker, kwargs)
        if self._sampler is not None:
            edge_label_index = checked_links(edge_label_index, data, sampler.num_nodes)
            links = edge_label_index if isinstance(edge_label_index, Tensor) else edge_label_index[1]
            if links is not None and edge_label is not None and edge_label.size(0) != links.size(1):
                raise ValueError(
                    f"edge_label: expected a label for each of {links.size(1)} links, got shape "
                    f"{tuple(edge_label.shape)}"
                )
        super().__init__(
            data,
            num_neighbors,
            edge_label_index=edge_label_index,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            temporal_strategy=temporal_strategy,
            neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio,
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

    @outside_inference_mode
    def _begin(self, index: Any) -> Any:
        return index.cpu() if isinstance(index, Tensor) else index

    @outside_inference_mode
    def _end(self, begun: Any) -> Any:
        out = self._sampler.sample_from_edges(self.input_data[begun], neg_sampling=self.neg_sampling)
        return self.filter_fn(out)

    def filter_fn(self, out: Any) -> Any:
        """Adds features and links to a sampled batch.

        Args:
            out: the sampled nodes and edges.
        """
        if self._sampler is None:
            return super().filter_fn(out)
        if self.transform_sampler_output:
            out = self.transform_sampler_output(out)
        batch = make_batch(self.data, out, self._device, self.custom_cls)
        input_type = self.input_data.input_type
        is_hetero = input_type is not None
        input_id, *rest = [None if item is None else item.to(self._device) for item in out.metadata]
        link = batch[input_type] if is_hetero else batch
        link.input_id = input_id
        if self.neg_sampling is None or self.neg_sampling.is_binary():
            link.edge_label_index, link.edge_label, link.edge_label_time = rest
        else:
            source = batch[input_type[0]] if is_hetero else batch
            destination = batch[input_type[-1]] if is_hetero else batch
            source.src_index, destination.dst_pos_index, destination.dst_neg_index, seed_time = rest
            source.seed_time = destination.seed_time = seed_time
            # PyG's triplet batches do not have them, but the data may have attributes of these names.
            if not is_hetero or input_type in batch.edge_types:
                del link.edge_label_index
                del link.edge_label_time
        return batch if self.transform is None else self.transform(batch)
