"""Implements PyG's sampler interface with the core's sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, remote_backend_utils
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import DataType, NumNeighbors, SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from fastsparse_core import Adjacency
from fastsparse_core.sampling import Edges, NeighborSampler, Sample
from fastsparse_pyg.caching import lookup
from fastsparse_pyg.graph import build_from_edge_list, plain_edges, raise_graph
from fastsparse_pyg.loader.arguments import checked_num_neighbors, checked_num_nodes


class GraphSampler(BaseSampler):
    """Samples neighbours of PyG's data objects, on a GPU or in C++ threads.

    Edge ids are positions in the data's `edge_index`, so PyG needs no permutation.

    Args:
        data: Data, HeteroData or (FeatureStore, GraphStore); `edge_index` may be an `Adjacency`.
        num_neighbors: number of neighbours per hop; or a dict of such lists by edge type.
        device: device that samples.
        replace: whether to draw with replacement.
        subgraph_type: `"directional"`, `"bidirectional"` or `"induced"`.
        disjoint: whether every seed has its own subgraph.
        weight_attr: name of the attribute with the edges' weights.

    Attributes:
        num_nodes: number of nodes of the graph; a dict by node type if the graph is heterogeneous.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        *,
        device: torch.device,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        weight_attr: str | None = None,
    ) -> None:
        self.subgraph_type = SubgraphType(subgraph_type)
        self.disjoint = disjoint
        data_type = DataType.from_data(data)
        weight: Any = None
        if data_type == DataType.homogeneous:
            count = checked_num_nodes(data.num_nodes, "data.num_nodes")
            graph: Any = _adjacency(data.edge_index, (count, count), device, "data.edge_index")
            self.num_nodes: Any = count
            if weight_attr is not None:
                if weight_attr not in data:
                    raise KeyError(f"weight_attr: expected an attribute of the edges, got {weight_attr!r}")
                weight = data[weight_attr].flatten()
        elif data_type == DataType.heterogeneous:
            if not data.edge_types:
                raise ValueError(
                    "data: expected a HeteroData with edge types to sample from, got one without"
                )
            self.num_nodes = {
                name: checked_num_nodes(data[name].num_nodes, f"data[{name!r}].num_nodes")
                for name in data.node_types
            }
            graph = {}
            for name in data.edge_types:
                shape = (self.num_nodes[name[2]], self.num_nodes[name[0]])
                edges = data[name].get("edge_index")
                graph[name] = _adjacency(edges, shape, device, f"data[{name}].edge_index")
            if weight_attr is not None:
                weight = {name: item.flatten() for name, item in data.collect(weight_attr).items()}
        else:
            if weight_attr is not None:
                raise NotImplementedError(
                    "weight_attr: expected None for a (FeatureStore, GraphStore) pair, as in PyG"
                )
            graph, self.num_nodes = _from_stores(data[0], data[1], device)
        self.is_hetero = isinstance(graph, dict)
        fanouts = checked_num_neighbors(num_neighbors, list(graph) if self.is_hetero else None)
        is_made = isinstance(num_neighbors, NumNeighbors)
        self.num_neighbors = num_neighbors if is_made else NumNeighbors(num_neighbors)
        self.core = NeighborSampler(
            graph,
            fanouts,
            replace=replace,
            weight=weight,
            disjoint=disjoint,
            induced=self.subgraph_type == SubgraphType.induced,
            num_nodes=self.num_nodes if self.is_hetero else None,
        )

    @property
    def edge_permutation(self) -> None:
        """None, because edge ids are positions in the caller's `edge_index`."""
        return None

    def sample_from_nodes(self, inputs: NodeSamplerInput) -> SamplerOutput | HeteroSamplerOutput:
        """Samples neighbours of nodes."""
        return self._directed(node_sample(inputs, self._sample))

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Samples neighbours for both ends of the given edges and of the negative samples."""
        out = edge_sample(inputs, self._sample, self.num_nodes, self.disjoint, None, neg_sampling)
        return self._directed(out)

    def output(self, sample: Sample) -> SamplerOutput | HeteroSamplerOutput:
        """Converts a sample of the core to PyG's class."""
        return self._directed(self._output(sample))

    def _sample(self, seed: Any, seed_time: Any = None) -> SamplerOutput | HeteroSamplerOutput:
        assert seed_time is None, "FastSparse's sampler does not support temporal sampling"
        return self._output(self.core.sample(seed))

    def _directed(self, out: Any) -> Any:
        if self.subgraph_type == SubgraphType.bidirectional:
            return out.to_bidirectional()
        return out

    def _output(self, sample: Sample) -> SamplerOutput | HeteroSamplerOutput:
        induced = self.subgraph_type == SubgraphType.induced

        def each(item: Any, convert: Callable[[Any], Any]) -> Any:
            if item is None:
                return None
            return {k: convert(v) for k, v in item.items()} if self.is_hetero else convert(item)

        kind = HeteroSamplerOutput if self.is_hetero else SamplerOutput
        out = kind(
            node=sample.nodes,
            row=each(sample.edges, lambda edges: edges.edge_index[0]),
            col=each(sample.edges, lambda edges: edges.edge_index[1]),
            edge=each(sample.edges, lambda edges: edges.edge_id),
            batch=each(sample.seed_of, Tensor.long),
            num_sampled_nodes=sample.num_nodes,
            num_sampled_edges=None if induced else each(sample.edges, lambda edges: edges.counts),
        )
        out.edges = sample.edges  # for `edges_of`
        return out


def edges_of(out: Any, name: Any = None) -> Edges | None:
    """The core's edges of a sampler output; None if its rows or columns were replaced."""
    edges = getattr(out, "edges", None)
    row, col = out.row, out.col
    if name is not None:
        edges, row, col = (edges or {}).get(name), row.get(name), col.get(name)
    if edges is None or row is None or col is None:
        return None
    pairs = ((row, edges.edge_index[0]), (col, edges.edge_index[1]))
    is_same = all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)
    return edges if is_same else None


def _adjacency(
    edge_index: Tensor | Adjacency | None, shape: tuple[int, int], device: torch.device, name: str
) -> Adjacency:
    """The structure of a graph on the device, from the cache that loaders and layers share.

    Args:
        edge_index: edges of the data; None: no edges.
        shape: (number of destinations, number of sources).
        device: device that samples.
        name: the user's expression for the edges, such as ``data.edge_index``, for messages.

    Raises:
        ValueError: `edge_index` has another type, or is an `Adjacency` of another shape.
        IndexError: an edge refers to a node that does not exist.
    """
    if isinstance(edge_index, Adjacency):
        if edge_index.shape != shape:
            raise ValueError(
                f"{name}: expected an Adjacency of shape {shape}, as many rows and columns as there are "
                f"nodes, got {edge_index.shape}"
            )
        return edge_index.to(device)
    if edge_index is None:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Adjacency.from_coo(none, none, shape)
    if not isinstance(edge_index, Tensor):
        raise_graph(edge_index, name)
    as_layers = (*shape, "source_to_target", False)
    options: Any = as_layers if edge_index.device == device else (*as_layers, device)

    def build() -> Adjacency:
        return build_from_edge_list(plain_edges(edge_index).to(device), *as_layers, name=name)

    return lookup(edge_index, (edge_index,), options, build)


def _from_stores(feature_store: Any, graph_store: Any, device: torch.device) -> tuple[Any, Any]:
    """Structures and numbers of nodes of a pair of stores; dicts by type if the stores have types."""
    attributes = graph_store.get_all_edge_attrs()
    edge_types = list(dict.fromkeys(attribute.edge_type for attribute in attributes))
    if edge_types == [None]:
        size = attributes[0].size
        if size is None:
            raise ValueError(
                f"data: expected a graph store whose edges have a size, got {type(graph_store).__name__} "
                "without sizes; call put_edge_index(edge_index, layout='coo', size=(num_nodes, num_nodes)), "
                "or pass one Data in place of the pair"
            )
        if isinstance(feature_store, Data) and feature_store.get_all_tensor_attrs():
            raise ValueError(
                "data: expected a feature store whose tensors have group names, got Data, which has none; "
                "pass one Data in place of the pair, or use HeteroData in the pair"
            )
        num_nodes = max(size)
        row, colptr, perm = graph_store.csc()
        return _from_csc(row, colptr, perm, (num_nodes, num_nodes), device), num_nodes
    names = list(dict.fromkeys(name for edge_type in edge_types for name in (edge_type[0], edge_type[2])))
    sizes = {name: remote_backend_utils.num_nodes(feature_store, graph_store, name) for name in names}
    rows, colptrs, perms = graph_store.csc()
    graph = {
        name: _from_csc(rows[name], colptrs[name], perms.get(name), (sizes[name[2]], sizes[name[0]]), device)
        for name in edge_types
    }
    return graph, sizes


def _from_csc(
    row: Tensor, colptr: Tensor, perm: Tensor | None, shape: tuple[int, int], device: torch.device
) -> Adjacency:
    colptr = colptr.to(device)
    if colptr.numel() <= shape[0]:  # the store's pointers may end at the last node that has an edge
        colptr = torch.cat([colptr, colptr[-1:].expand(shape[0] + 1 - colptr.numel())])
    return Adjacency.from_csr(
        colptr, row.to(device), shape, edge_id=None if perm is None else perm.to(device)
    )


def why_not(data: Any) -> str:
    """Returns why this data needs PyG's own sampler; "" if it does not."""
    if isinstance(data, Data):
        stores = [data._store]
    elif isinstance(data, HeteroData):
        stores = data.edge_stores
    else:
        return ""
    if any("edge_index" not in store and ("adj_t" in store or "adj" in store) for store in stores):
        return "the graph is stored as `adj_t`. Store it as `edge_index`"
    return ""
