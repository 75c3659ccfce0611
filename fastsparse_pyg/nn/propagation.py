"""Propagation by a fixed matrix: code shared by GCN and other layers that multiply by GCN's matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.typing import SparseTensor

from fastsparse_core import Adjacency, spmm
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.propagation import propagate, symmetric_weights
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.traced import TracedAdjacency
from fastsparse_pyg.graph import (
    caller_edges,
    gcn_factors,
    is_sparse_matrix,
    resolve,
    to_edge_index,
    values_of,
)
from fastsparse_pyg.nn.base import ANY_REDUCTION, REDUCE, FastConv

_NOTHING_CACHED = Reason(
    "cached=True under torch.compile, with an empty cache", "Call the layer once before `torch.compile`"
)


class Propagation(NamedTuple):
    r"""The matrix that GCN multiplies by, :math:`\mathrm{diag}(s) \, V \, \mathrm{diag}(t)`.

    Attributes:
        adj: structure of V.
        value: values of V, (num_values,), in the structure's value order; None: all are 1.
        scale_dst: s, a constant (num_nodes,); None: all 1.
        scale_src: t, like s. It may differ from s for nodes without outgoing edges.
        adds_loops: whether the kernel has to add a loop to every node, because V has no loops.
    """

    adj: Adjacency
    value: Tensor | None
    scale_dst: Tensor | None = None
    scale_src: Tensor | None = None
    adds_loops: bool = False

    def edge_weight(self, dtype: torch.dtype) -> Tensor:
        """Values of the whole matrix, including the scales, in the order of ``caller_edges(adj)``.

        Args:
            dtype: dtype of the result if ``value`` is None.
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
        """Returns the matrix on another device."""
        moved = (None if part is None else part.to(device) for part in self[:4])
        return Propagation(*moved)  # type: ignore[arg-type]


class _Held(NamedTuple):
    """The cached matrix of a layer with `cached=True`.

    Attributes:
        propagation: the matrix.
        as_matrix: whether PyG would store a sparse matrix, not edges and weights.
        dtype: dtype of the features. PyG's cached weights get this dtype if the edges have no weights.
    """

    propagation: Propagation
    as_matrix: bool
    dtype: torch.dtype

    def fits(self, x: Tensor) -> bool:
        """True if the number of nodes is the same as when the matrix was made."""
        adj = self.propagation.adj
        return adj.is_partitioned or adj.num_src == x.size(-2)


class Cached:
    """Descriptor for one of the private attributes in which GCNConv caches with `cached=True`.

    The layer stores a :class:`_Held`. When PyG's code (or a user) reads the attribute, the stored matrix is
    converted to PyG's form. So explain mode and message hooks work on a cached layer, and its edges are not
    stored twice. An assigned value (None, or a matrix in PyG's form) replaces the stored matrix.
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
    """Base of the layers whose messages are the sources' features, with or without edge weights."""

    _bipartite: ClassVar[bool] = False
    _features: ClassVar[Literal["any", "rows", "matrix"]] = "rows"
    _takes_sparse_features: ClassVar[bool] = True
    _matrix_loops: ClassVar[str] = "append"
    _aggregations: ClassVar[tuple[type[Module], ...]] = ANY_REDUCTION

    #: True if the layer has the option `cached`, with :class:`Cached` attributes for the matrix.
    _caches_matrix: ClassVar[bool] = False

    def _original_forward(self, reason: Reason, x: Any, edge_index: Any, *args: Any) -> Tensor:
        """Does the same as :meth:`FastConv._original_forward`; the first further argument is edge weights."""
        if args:
            args = self._written_for_original(x, edge_index, args[0]), *args[1:]
        return super()._original_forward(reason, x, edge_index, *args)

    def _propagation(
        self,
        x: Any,
        edge_index: Any,
        edge_weight: Tensor | None,
        normalize: bool | None = None,
    ) -> Propagation | Reason:
        """Returns the matrix to multiply by, or why PyG's code has to run.

        The matrix depends on the layer's options `add_self_loops`, `improved` and `cached`, if the layer has
        them.

        Args:
            x: node features.
            edge_index: edges, sparse matrix or Adjacency.
            edge_weight: one weight per edge, or None.
            normalize: whether to normalise like PyG's `gcn_norm`. If False, no self loops are added either.
                None: the layer's option `normalize`, or True if the layer does not have this option.
        """
        state = self.__dict__
        if not (state.get("normalize", True) if normalize is None else normalize):
            adj = self._structure((x, None), edge_index)
            if isinstance(adj, Reason):
                return adj
            return Propagation(adj, self._value(adj, x, edge_index, edge_weight))
        slot = _ADJ_T_SLOT if isinstance(edge_index, SparseTensor) else _EDGE_INDEX_SLOT
        held, loops = state.get(slot), state.get("add_self_loops", False)
        keeps = self._caches_matrix and state["cached"]
        if held is not None:
            return self._reason(x, x, edge_index) or self._held(slot, held, x)
        adj = self._structure((x, x), edge_index, None, loops)
        if keeps and isinstance(adj, TracedAdjacency):
            return _NOTHING_CACHED
        if isinstance(adj, Reason):
            return adj
        fill_value = 2.0 if state.get("improved") else 1.0
        found = self._normalised(adj, x, edge_index, edge_weight, fill_value)
        if keeps:
            state[slot] = _Held(found, is_sparse_matrix(edge_index), x.dtype)
        return found

    def _held(self, slot: str, held: Any, x: Tensor) -> Propagation:
        """Returns the cached matrix, adapted to the current number of nodes and device."""
        if not isinstance(held, _Held):  # PyG's own code ran first and filled the cache
            return self._as_pyg_cached(held, x)
        if not held.fits(x):
            # As in PyG, nodes that were added later have no edges in the cache.
            found = self._as_pyg_cached(getattr(self, slot.removeprefix("_held")), x)
            held = self.__dict__[slot] = held._replace(propagation=found)
        if held.propagation.adj.device != x.device:
            held = self.__dict__[slot] = held._replace(propagation=held.propagation.to(x.device))
        return held.propagation

    def _as_pyg_cached(self, held: Any, x: Tensor) -> Propagation:
        """Converts the matrix from PyG's cache: a SparseTensor, or edges or a sparse matrix with weights."""
        edges, weight = (held, None) if isinstance(held, SparseTensor) else held
        adj = resolve(edges, x.size(-2), x.size(-2), x.device, flow=self.flow)
        return Propagation(adj, values_of(edges) if weight is None else weight)

    def _normalised(
        self, adj: Adjacency, x: Tensor, edge_index: Any, edge_weight: Tensor | None, fill_value: float = 1.0
    ) -> Propagation:
        """Computes GCN's matrix for a structure that already contains the self loops."""
        if isinstance(edge_index, Tensor) and edge_index.layout is torch.sparse_csc:
            raise NotImplementedError(
                "edge_index: expected a sparse matrix of layout CSR or COO under normalisation, got CSC; "
                "convert it with .to_sparse_csr()"
            )
        value = self._value(adj, x, edge_index, edge_weight, fill_value)
        if value is None:
            scale, _ = gcn_factors(adj, x.dtype)
            return Propagation(adj, None, scale, scale)
        if value.requires_grad and torch.is_grad_enabled():
            return Propagation(adj, symmetric_weights(adj, value))
        # Degrees are sums of many terms, and 16 bits are too few for them, so autocast is off here.
        with torch.autocast(x.device.type, enabled=False):
            dtype = accumulation_dtype(value.dtype)
            degree = spmm(adj, torch.ones(adj.num_src, 1, dtype=dtype, device=x.device), value)
            scale = degree.pow(-0.5).squeeze(1)
            scale = scale.masked_fill(scale == float("inf"), 0)
            # With negative weights, the root of a degree may be NaN. For a node without outgoing edges it is
            # replaced by 0, because the gradient of this node is 0, and 0 times NaN would be NaN.
            return Propagation(adj, value, scale, scale.masked_fill(_has_no_outgoing(adj), 0))

    def _value(
        self,
        adj: Adjacency,
        x: Tensor,
        edge_index: Any,
        edge_weight: Tensor | None,
        fill_value: float = 1.0,
    ) -> Tensor | None:
        """Returns the values of the structure, including its self loops; None if all are 1."""
        is_matrix = type(edge_index) is not Tensor or edge_index.layout is not torch.strided
        is_matrix = is_matrix and is_sparse_matrix(edge_index)
        value = values_of(edge_index) if is_matrix else edge_weight
        has_loops = adj.has_inserted_loops
        num_given = adj.num_values - min(adj.shape) if has_loops else adj.num_values
        if value is None:
            # In PyG 2.8, `improved` gives self loops the value 2 only if the edges have values, as the edges
            # of a matrix always have.
            if not (fill_value != 1.0 and is_matrix and has_loops):
                return None
            value = torch.ones(num_given, dtype=x.dtype, device=x.device)
        elif value is edge_weight:
            value = _check_weight(value, num_given, x)
        if not value.is_floating_point():
            value = value.to(x.dtype)
        if not has_loops:
            return value
        # Existing loops keep their values, but the diagonal of a SparseTensor is overwritten.
        return adj.extend_value(value, fill_value, keep_existing=not isinstance(edge_index, SparseTensor))

    def _written_for_original(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Tensor | None:
        """Returns edge weights for PyG's code, including inserted loops, in the order of `to_edge_index`."""
        if not isinstance(edge_index, Adjacency) or edge_weight is None:
            return edge_weight
        return Propagation(edge_index, self._value(edge_index, x, edge_index, edge_weight)).edge_weight(
            x.dtype
        )

    def _multiply(self, propagation: Propagation, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies the matrix by the features; the result has the same dtype as in PyG."""
        adj, value, *scales, _ = propagation
        if value is not None:
            dtype = message_dtype(x, value)
            if dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
                x = x.to(dtype)
        return self._aggregate_neighbours(adj, x, value, scales=scales, bias=bias)

    def _steps(
        self,
        matrix: Propagation,
        x: Tensor,
        count: int,
        terms: Sequence[Tensor] = (),
        alpha: float | None = None,
    ) -> Sequence[Tensor]:
        """Returns the features after each of several products. Arguments are the same as in `propagate`."""
        adj, value, scale_dst, scale_src, _ = matrix
        reduce = REDUCE[type(self._modules["aggr_module"])]
        if reduce == "sum" and self.__dict__["node_dim"] in (-2, 0) and not isinstance(alpha, Tensor):
            found = propagate(adj, x, count, value, scale_dst, scale_src, terms, alpha)
            if found is not None:
                return found
        steps = []
        for step in range(count):
            x = self._multiply(matrix, x)
            if terms:
                x = x + terms[step] if alpha is None else mixed(x, terms[step], alpha)
            steps.append(x)
        return steps

    def _is_linear(self) -> bool:
        """True if a linear layer may be applied before or after the aggregation."""
        return self._reduce() in ("sum", "mean")


def mixed(out: Tensor, x: Tensor, alpha: Any) -> Tensor:
    """Returns (1 - alpha) * out + alpha * x."""
    if isinstance(alpha, Tensor):
        return out * (1 - alpha) + alpha * x
    return torch.lerp(out, x.to(out.dtype), alpha)


def _has_no_outgoing(adj: Adjacency) -> Tensor:
    return adj.derived("fastsparse_pyg.has_no_outgoing", lambda: adj.out_degree() == 0)


def _check_weight(edge_weight: Any, num_edges: int, x: Tensor) -> Tensor:
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"edge_weight: expected a tensor or None, got {type(edge_weight).__name__}")
    # torch.compile evaluates `shape in (...)` wrongly if a size is symbolic.
    if not (edge_weight.dim() in (1, 2) and edge_weight.size(0) == num_edges == edge_weight.numel()):
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
    """Returns the dtype of PyG's product of features and weights: float16 times float32 is float32."""
    return x.dtype if torch.is_autocast_enabled(x.device.type) else torch.promote_types(x.dtype, value.dtype)
