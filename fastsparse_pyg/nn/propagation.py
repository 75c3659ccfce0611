"""Propagation by a fixed matrix: what GCN and the layers that multiply by its matrix share."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from fastsparse_core import Adjacency, sddmm, spmm
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_pyg.graph import (
    Graph,
    caller_edges,
    gcn_factors,
    is_sparse_matrix,
    num_caller_values,
    resolve,
    to_edge_index,
)
from fastsparse_pyg.nn.base import FastConv, raise_features


class Propagation(NamedTuple):
    r"""The matrix that GCN multiplies by, :math:`\mathrm{diag}(s) \, V \, \mathrm{diag}(t)`.

    Attributes:
        adj: structure of V.
        value: its values in the structure's value order; None: all 1.
        scale_dst: s, a constant (num_nodes,); None: all 1.
        scale_src: t, like s, of which it differs where nothing is gathered.
    """

    adj: Adjacency
    value: Tensor | None
    scale_dst: Tensor | None = None
    scale_src: Tensor | None = None

    def edge_weight(self, dtype: torch.dtype) -> Tensor:
        """The matrix' values, the scales multiplied in, in the order of ``caller_edges(adj)``.

        Args:
            adj: structure.
            dtype: of the weights where the matrix has no values of its own.
        """
        adj = self.adj
        dst, src = caller_edges(adj)
        if self.value is None:
            weight = torch.ones(adj.num_edges, dtype=dtype, device=adj.device)
        elif adj.edge_id is None:
            weight = self.value
        else:
            weight = self.value[adj.edge_id.sort().values.long()]
        if self.scale_dst is None or self.scale_src is None:
            return weight
        return (self.scale_src[src] * weight * self.scale_dst[dst]).to(weight.dtype)

    def to(self, device: torch.device) -> Propagation:
        """The same on another device."""
        return Propagation(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]


class _Held(NamedTuple):
    """What a layer with `cached=True` keeps.

    Attributes:
        propagation: the matrix.
        as_matrix: whether PyG would keep it as a sparse matrix.
        dtype: of the features, which is that of PyG's weights where edges have none.
    """

    propagation: Propagation
    as_matrix: bool
    dtype: torch.dtype

    def fits(self, x: Tensor) -> bool:
        """Whether there are as many nodes as when the matrix was made."""
        adj = self.propagation.adj
        return adj.is_partitioned or adj.num_src == x.size(-2)


class Cached:
    """Stands in for one of the private caches that GCNConv has for `cached=True`.

    The layer keeps a :class:`_Held`. PyG's own form is made when PyG's code (or a user) reads the attribute,
    so that explain mode and message hooks work on a cached layer without holding its edges twice. Whatever is
    assigned to the attribute, None or PyG's form, replaces what was kept.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot = "_held" + name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        held = layer.__dict__.get(self.slot)
        if not isinstance(held, _Held):
            return held
        adj, weight = held.propagation.adj, held.propagation.edge_weight(held.dtype)
        if not held.as_matrix:
            return to_edge_index(adj, layer.flow), weight
        dst, src = caller_edges(adj)
        if self.slot == _ADJ_T_SLOT:
            return SparseTensor(row=dst, col=src, value=weight, sparse_sizes=adj.shape)
        return torch.sparse_coo_tensor(
            torch.stack([dst, src]), weight, adj.shape
        ).coalesce().to_sparse_csr(), None

    def __set__(self, layer: Any, value: Any) -> None:
        layer.__dict__[self.slot] = value

    def __delete__(self, layer: Any) -> None:
        layer.__dict__.pop(self.slot, None)


_EDGE_INDEX_SLOT = "_held_cached_edge_index"
_ADJ_T_SLOT = "_held_cached_adj_t"


class PropagatingConv(FastConv):
    """Base of the layers whose messages are the sources' features, weighted by the edges or not at all."""

    _bipartite: ClassVar[bool] = False
    _any_reduction: ClassVar[bool] = True

    def _why_original_propagating(self, x: Tensor, edge_index: object) -> str:
        if not isinstance(x, Tensor):
            raise_features(x)
        dim = x.dim()
        if dim < 2 or self.node_dim % dim != dim - 2:
            return f"features of {dim} dimensions with node_dim={self.node_dim}"
        return self._why_original(x, edge_index)

    def _original_propagating(
        self, reason: str, x: Tensor, edge_index: Any, edge_weight: Tensor | None, *args: Any
    ) -> Tensor:
        """PyG's forward of edges with weights."""
        edge_weight = self._written_for_original(x, edge_index, edge_weight)
        return self._original_forward(reason, x, edge_index, edge_weight, *args)

    def _own_propagation(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Propagation:
        """:meth:`_propagation` as the options of GCN say that layers share."""
        return self._propagation(
            x,
            edge_index,
            edge_weight,
            normalize=self.normalize,
            add_self_loops=self.add_self_loops,
            improved=getattr(self, "improved", False),
            cached=self.cached,
        )

    def _propagation(
        self,
        x: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None,
        *,
        normalize: bool = True,
        add_self_loops: bool = False,
        improved: bool = False,
        cached: bool = False,
    ) -> Propagation:
        """The matrix to multiply by, from the layer's own cache if that is filled.

        Args:
            x: node features.
            edge_index: edges, sparse matrix or Adjacency.
            edge_weight: one weight per edge, or None.
            normalize: whether by the roots of the degrees, as PyG's `gcn_norm`; else the rest is unused.
            add_self_loops: whether to add those that are missing.
            improved: whether they count 2.
            cached: whether the layer keeps the matrix, in the attributes for which it has :class:`Cached`.
        """
        if not normalize:
            num_src = x.size(-2)
            graph = resolve(edge_index, num_src, None, x.device, flow=self.flow)
            return Propagation(graph.adj, self._value(graph, x, edge_index, edge_weight))
        slot = _ADJ_T_SLOT if isinstance(edge_index, SparseTensor) else _EDGE_INDEX_SLOT
        held = self.__dict__.get(slot)
        if isinstance(held, _Held) and not held.fits(x):
            # Nodes that came later have no edges in PyG's cache either.
            edges, weight = getattr(self, slot.removeprefix("_held")), None
            if not isinstance(edges, SparseTensor):
                edges, weight = edges
            graph = resolve(edges, x.size(-2), x.size(-2), x.device, flow=self.flow)
            value = graph.value if weight is None else weight
            held = self.__dict__[slot] = held._replace(propagation=Propagation(graph.adj, value))
        if held is None:
            fill_value = 2.0 if improved else 1.0
            propagation = self._normalised(x, edge_index, edge_weight, add_self_loops, fill_value)
            if cached:
                self.__dict__[slot] = _Held(propagation, is_sparse_matrix(edge_index), x.dtype)
            return propagation
        if not isinstance(held, _Held):  # PyG's own code ran first and filled the cache
            edges, weight = (held, None) if slot == _ADJ_T_SLOT else held
            graph = resolve(edges, x.size(-2), x.size(-2), x.device, flow=self.flow)
            return Propagation(graph.adj, graph.value if weight is None else weight)
        if held.propagation.adj.device != x.device:
            held = self.__dict__[slot] = held._replace(propagation=held.propagation.to(x.device))
        return held.propagation

    def _known_propagation(self, x: Any, edge_index: Any) -> tuple[Any, ...] | None:
        """:meth:`_propagation` by the layer's own attributes for plain edges; None: look closer."""
        state = self.__dict__
        if not state["normalize"]:
            adj = self._plain_graph(x, edge_index)
            return None if adj is None else (adj, None, None, None)
        if state["cached"]:
            held = state.get(_EDGE_INDEX_SLOT)
            if type(held) is not _Held or not self._is_plain(x, edge_index):
                return None
            propagation: Propagation = held.propagation
            return propagation if propagation.adj.device == x.device and held.fits(x) else None
        adj = self._plain_graph(x, edge_index, state["add_self_loops"])
        if adj is None:
            return None
        scale, _ = gcn_factors(adj, x.dtype)
        return adj, None, scale, scale

    def _normalised(
        self,
        x: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None,
        add_self_loops: bool,
        fill_value: float,
    ) -> Propagation:
        if isinstance(edge_index, Tensor) and edge_index.layout is torch.sparse_csc:
            raise NotImplementedError(
                "edge_index: expected a sparse matrix of layout CSR or COO under normalisation, got CSC; "
                "convert it with .to_sparse_csr()"
            )
        num_nodes = x.size(-2)
        graph = resolve(
            edge_index, num_nodes, num_nodes, x.device, flow=self.flow, add_self_loops=add_self_loops
        )
        adj = graph.adj
        value = self._value(graph, x, edge_index, edge_weight, fill_value)
        if value is None:
            scale = adj.inv_sqrt_degree(accumulation_dtype(x.dtype))
            return Propagation(adj, None, scale, scale)
        # Degrees are sums of many terms: never in 16 bits, whatever autocast says.
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
            degree = spmm(adj, torch.ones(num_nodes, 1, dtype=dtype, device=x.device), value)
            scale = degree.pow(-0.5)
            scale = scale.masked_fill(scale == float("inf"), 0)
            if not scale.requires_grad:
                scale = scale.squeeze(1)
                # Weights below 0 may add up to a degree whose root is NaN, which must not meet a node's empty
                # sum: without an outgoing edge its gradient is 0.
                return Propagation(adj, value, scale, scale.masked_fill(_has_no_outgoing(adj), 0))
            # The product s_i s_j of every edge, differentiable in s.
            return Propagation(adj, value * sddmm(adj, scale, scale).to(value.dtype))

    def _value(
        self,
        graph: Graph,
        x: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None,
        fill_value: float = 1.0,
    ) -> Tensor | None:
        """Values of the structure, those of its self loops included; None: all 1."""
        value = graph.value if is_sparse_matrix(edge_index) else edge_weight
        if value is None:
            # PyG 2.8 doubles the loops of `improved` only where edges have values; matrices always have.
            if not (fill_value != 1.0 and graph.loops_have_value and graph.adj.has_inserted_loops):
                return None
            value = torch.ones(num_caller_values(graph.adj), dtype=x.dtype, device=x.device)
        elif value is edge_weight:
            value = _check_weight(value, num_caller_values(graph.adj), x)
        if not value.is_floating_point():
            value = value.to(x.dtype)
        if not graph.adj.has_inserted_loops:
            return value
        return graph.adj.extend_value(value, fill_value, keep_existing=graph.keep_existing)

    def _written_for_original(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Tensor | None:
        """Edge weights as an Adjacency is written back for PyG: in that order, with inserted loops."""
        if not isinstance(edge_index, Adjacency) or edge_weight is None:
            return edge_weight
        graph = resolve(edge_index, edge_index.num_src, edge_index.num_dst, edge_index.device)
        return Propagation(edge_index, self._value(graph, x, edge_index, edge_weight)).edge_weight(x.dtype)

    def _multiply(self, propagation: Propagation, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The matrix times the features, in PyG's dtype."""
        adj, value, *scales = propagation
        if value is not None:
            dtype = message_dtype(x, value)
            if dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
                x = x.to(dtype)
        return self._aggregate_neighbours(adj, x, value, scales=scales, bias=bias)

    def _is_linear(self) -> bool:
        """Whether the aggregation may change places with a linear layer."""
        return self._reduce() in ("sum", "mean")


def _has_no_outgoing(adj: Adjacency) -> Tensor:
    return adj.derived("fastsparse_pyg.has_no_outgoing", lambda: adj.out_degree() == 0)


def _check_weight(edge_weight: Any, num_edges: int, x: Tensor) -> Tensor:
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"edge_weight: expected a tensor or None, got {type(edge_weight).__name__}")
    if edge_weight.shape not in ((num_edges,), (num_edges, 1)):
        raise ValueError(
            f"edge_weight: expected one weight per edge, shape ({num_edges},), got {tuple(edge_weight.shape)}"
        )
    if edge_weight.device != x.device:
        raise ValueError(
            f"edge_weight: expected device {x.device} like x, got {edge_weight.device}; move it with "
            f".to('{x.device}')"
        )
    return edge_weight.reshape(-1)


def message_dtype(x: Tensor, value: Tensor) -> torch.dtype:
    """PyG's product of messages and weights promotes: float16 times float32 is float32."""
    return x.dtype if torch.is_autocast_enabled(x.device.type) else torch.promote_types(x.dtype, value.dtype)
