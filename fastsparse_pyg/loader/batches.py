"""Makes a batch with features from a sampler's output, on the device of the sampler.

The fields are those of PyG's loaders (`torch_geometric.loader.utils`). PyG moves the ids to the device of the
features; here the gathered features are moved to the device of the batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import filter_custom_hetero_store, filter_custom_store, index_select
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.typing import TensorFrame

from fastsparse_core.sampling import Edges, FeatureTable
from fastsparse_pyg.caching import remember_sampled
from fastsparse_pyg.loader.sampler import edges_of


def make_batch(
    data: Any, out: SamplerOutput | HeteroSamplerOutput, device: torch.device, custom_cls: Any
) -> Data | HeteroData:
    """Makes the batch of sampled nodes and edges, with all features, `n_id`, `e_id` and numbers per hop.

    Args:
        data: Data, HeteroData or (FeatureStore, GraphStore).
        out: the sampled nodes and edges.
        device: device of the batch.
        custom_cls: class of batches from stores, in place of Data or HeteroData.

    Raises:
        TypeError: `out` is no sampler's output.
    """
    if isinstance(out, SamplerOutput):
        batch = _homogeneous(data, out, device, custom_cls)
    elif isinstance(out, HeteroSamplerOutput):
        batch = _heterogeneous(data, out, device, custom_cls)
    else:
        raise TypeError(f"expected a SamplerOutput or a HeteroSamplerOutput, got {type(out).__name__}")
    return batch


def _homogeneous(data: Any, out: SamplerOutput, device: torch.device, custom_cls: Any) -> Data:
    if isinstance(data, Data):
        batch = copy.copy(data)
        _take_nodes(data._store, batch._store, out.node, device)
        _take_edges(data._store, batch._store, out.row, out.col, out.edge, edges_of(out), device)
    else:
        node = out.node.cpu()
        batch = filter_custom_store(*data, node, out.row, out.col, out.edge, custom_cls).to(device)
        batch.edge_index = _edge_index(out.row, out.col, edges_of(out))
    if "n_id" not in batch:
        batch.n_id = out.node
    if out.edge is not None and "e_id" not in batch:
        batch.e_id = out.edge
    batch.batch = out.batch
    batch.num_sampled_nodes = out.num_sampled_nodes
    batch.num_sampled_edges = out.num_sampled_edges
    return batch


def _heterogeneous(data: Any, out: HeteroSamplerOutput, device: torch.device, custom_cls: Any) -> HeteroData:
    if isinstance(data, HeteroData):
        batch = copy.copy(data)
        for name in batch.node_types:
            _take_nodes(data[name], batch[name], out.node[name], device)
        for name in batch.edge_types:
            edge = (out.edge or {}).get(name)
            _take_edges(
                data[name], batch[name], out.row[name], out.col[name], edge, edges_of(out, name), device
            )
    else:
        node = {name: ids.cpu() for name, ids in out.node.items()}
        batch = filter_custom_hetero_store(*data, node, out.row, out.col, out.edge, custom_cls).to(device)
        for name in out.row:
            batch[name].edge_index = _edge_index(out.row[name], out.col[name], edges_of(out, name))
    for name, ids in out.node.items():
        if "n_id" not in batch[name]:
            batch[name].n_id = ids
    for name, edge in (out.edge or {}).items():
        if edge is not None and "e_id" not in batch[name]:
            batch[name].e_id = edge
    batch.set_value_dict("batch", out.batch)
    batch.set_value_dict("num_sampled_nodes", out.num_sampled_nodes)
    batch.set_value_dict("num_sampled_edges", out.num_sampled_edges)
    return batch


def keep_rows(data: Data | HeteroData, nodes: dict[str, Tensor], device: torch.device) -> None:
    """Copies rows of all node data to a GPU, for data that is too large to be copied as a whole.

    Args:
        data: the graph.
        nodes: ids of the nodes whose rows are copied, by node type; for `Data` the node type is "".
        device: the GPU.
    """
    for name, rows in nodes.items():
        store = data[name] if name else data._store
        for key, value in store.items():
            if store.is_node_attr(key) and _is_table(value, data.__cat_dim__(key, value, store)):
                FeatureTable(value, device).keep(rows)


def _is_table(value: Any, dim: int) -> bool:
    return type(value) is Tensor and dim == 0


def _take_nodes(store: Any, into: Any, index: Tensor, device: torch.device) -> None:
    for key, value in store.items():
        if key == "num_nodes":
            into.num_nodes = index.numel()
        elif store.is_node_attr(key):
            into[key] = _take(value, index, store._parent().__cat_dim__(key, value, store), device)
        elif isinstance(value, Tensor) and key not in ("edge_index", "adj_t") and not store.is_edge_attr(key):
            into[key] = value.to(device)


def _take_edges(
    store: Any,
    into: Any,
    row: Tensor,
    col: Tensor,
    index: Tensor | None,
    edges: Edges | None,
    device: torch.device,
) -> None:
    for key, value in store.items():
        if key == "edge_index":
            into.edge_index = _edge_index(row, col, edges)
        elif store.is_edge_attr(key):
            dim = store._parent().__cat_dim__(key, value, store)
            into[key] = None if index is None else _take(value, index, dim, device)


def _edge_index(row: Tensor, col: Tensor, edges: Edges | None) -> Tensor:
    return torch.stack([row, col]) if edges is None else remember_sampled(edges)


def _take(value: Any, index: Tensor, dim: int, device: torch.device) -> Any:
    """Selects rows of an attribute of nodes or edges, and moves them to the device."""
    if device.type == "cuda" and _is_table(value, dim):
        return FeatureTable(value, device)[index]
    if isinstance(value, (Tensor, TensorFrame)):
        taken = index_select(value, index.to(value.device), dim)
    elif hasattr(value, "__array__"):
        taken = index_select(value, index.cpu(), dim)
    else:
        return value
    return taken.to(device)
