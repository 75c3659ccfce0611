"""Code shared by the attention layers: self loops with edge features, and attention weights per edge."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.attention_layer import Score, attention_layer
from fastsparse_core.fused.bias import add_bias
from fastsparse_core.fused.propagation import sum_of_edges
from fastsparse_core.log import warn_once
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import is_sparse_matrix, to_edge_index
from fastsparse_pyg.nn.base import FastConv, is_plain_linear

#: Values of `fill_value` for which a sparse matrix product computes the features of the self loops.
_LINEAR_FILLS = ("mean", "add", "sum")
_WEIGHTS_OF_LOOPS = Reason(
    "the attention weights of added self loops under torch.compile",
    "Add the self loops to `edge_index`, and create the layer with add_self_loops=False",
)
_USUAL_FILLS = "Use fill_value='mean', 'add' or a number"


class AttentionConv(FastConv):
    """Base of the attention layers; like :class:`FastConv`, it comes before PyG's layer among the bases."""

    _fusible: ClassVar[bool] = False
    _features: ClassVar[Literal["any", "rows", "matrix"]] = "matrix"
    _kernel: ClassVar[str] = "fused attention"

    #: True if the layer needs features of the destinations.
    _needs_destinations: ClassVar[bool] = False

    def _reason(
        self,
        x_src: Any,
        x_dst: Any,
        edge_index: Any,
        edge_attr: Any = None,
        wants_weights: bool = False,
        *of_call: Any,
    ) -> Reason | None:
        """Does the same as :meth:`FastConv._reason`; also checks edge features and attention weights."""
        state = self.__dict__
        if x_dst is not x_src:
            if x_dst is None:
                if self._needs_destinations:
                    return fallback.NO_DESTINATIONS
            elif not isinstance(x_dst, Tensor) or x_dst.dim() != 2:
                return fallback.NOT_MATRICES
            if state["flow"] == "target_to_source":
                return fallback.TURNED_BIPARTITE
        if wants_weights and state.get("add_self_loops") and torch.compiler.is_compiling():
            return _WEIGHTS_OF_LOOPS
        dropout = state.get("dropout", 0.0)
        if not 0.0 <= dropout < 1.0:
            return Reason(f"dropout={dropout}", "Use 0 <= dropout < 1")
        if (type(edge_index) is not Tensor or edge_index.layout is not torch.strided) and is_sparse_matrix(
            edge_index
        ):
            if isinstance(edge_index, SparseTensor) and state["_modules"].get("lin_edge") is not None:
                return Reason("a SparseTensor in a layer with edge_dim", fallback.PLAIN_EDGES)
            if edge_attr is not None:
                return fallback.EDGE_FEATURES_BESIDE
            if _carries_features(edge_index):
                return fallback.EDGE_FEATURES_WITHIN
            if wants_weights:
                return Reason("the attention weights of a sparse matrix", fallback.PLAIN_EDGES)
        if edge_attr is not None:
            if not isinstance(edge_attr, Tensor) or edge_attr.dim() not in (1, 2):
                return Reason("edge features that are not one vector per edge", fallback.EDGE_ROWS)
            fill = state.get("fill_value")
            fills = type(fill) is str and fill not in _LINEAR_FILLS and state["add_self_loops"]
            if fills and not (isinstance(edge_index, Adjacency) and edge_index.has_inserted_loops):
                return Reason(f"edge features with fill_value={fill!r}", _USUAL_FILLS)
        return super()._reason(x_src, x_dst, edge_index)

    def _original_forward(self, reason: Reason, x: Any, edge_index: Any, *args: Any) -> Any:
        """Does the same as :meth:`FastConv._original_forward`; adds the features of inserted self loops."""
        if isinstance(edge_index, Adjacency) and edge_index.has_inserted_loops and args:
            edge_attr, *rest = args
            if edge_attr is not None:
                args = self._edge_features(edge_index, edge_attr)[_value_order(edge_index)], *rest
        return super()._original_forward(reason, x, edge_index, *args)

    def _attention_layer(
        self,
        score: type[Score],
        adj: Adjacency,
        x: Any,
        maps: tuple[Any, ...],
        vectors: tuple[str, ...],
        edges: tuple[Tensor, Any] | None = None,
    ) -> Tensor | None:
        """Computes GAT or GATv2 as one autograd node; None if several operators have to compute the layer."""
        state = self.__dict__
        if type(x) is not Tensor:
            return None
        bias, *parameters = self._own_parameters("bias", *vectors)
        residual = state["_modules"].get("res")
        out = attention_layer(
            score,
            adj,
            x,
            maps,
            tuple(parameters),
            bias,
            heads=state["heads"],
            scale=state["negative_slope"],
            dropout_p=state["dropout"] if state["training"] else 0.0,
            mean=not state["concat"],
            kind=Linear,
            edges=edges,
        )
        return out if out is None or residual is None else out + residual(x)

    def _finished(self, out: Tensor, residual: Tensor | None) -> Tensor:
        """Applies the last steps of GAT and GATv2: mean over the heads, residual and bias."""
        if not self.concat:
            out = out.view(-1, self.heads, self.out_channels).mean(dim=1)
        if residual is not None:
            out = out + residual
        return out if self.bias is None else add_bias(out, self.bias)

    # ---------------------------------------------------------------- edge features

    def _edge_features(self, adj: Adjacency, edge_attr: Tensor) -> Tensor:
        """Returns features (num_values, D) of all edges. Inserted self loops get features as in PyG.

        Raises:
            ValueError: the number of rows is not the number of edges, or the graph is on another device.
        """
        adds_loops = adj.has_inserted_loops
        expected = adj.num_values - min(adj.shape) if adds_loops else adj.num_values
        if edge_attr.size(0) != expected:
            raise ValueError(
                f"edge_attr: expected one row per edge ({expected} rows), got shape {tuple(edge_attr.shape)}"
            )
        if edge_attr.device != adj.col.device:
            raise ValueError(
                f"edge_attr: expected device {adj.device} like the graph, got {edge_attr.device}; move it "
                f"with .to('{adj.device}')"
            )
        features = edge_attr if edge_attr.dim() == 2 else edge_attr[:, None]
        if not adds_loops:
            return features
        loops = self._loop_features(adj, features)
        if not features.is_floating_point():
            features = features.to(loops.dtype)  # PyG's torch.cat promotes; means of integers are floating
        return adj.extend_value(features, loops, keep_existing=False)

    def _loop_features(self, adj: Adjacency, edge_attr: Tensor) -> Tensor:
        """Computes features (min(shape), D) of the inserted self loops from the edges' by `fill_value`."""
        count = min(adj.shape)
        if not hasattr(self, "fill_value"):
            raise ValueError(
                "edge_index: expected an Adjacency without inserted self loops, because this layer gives "
                "the loops no edge features, got one with loops; prepare it with add_self_loops=False"
            )
        fill_value = self.fill_value
        if not isinstance(fill_value, str):
            return compute_loop_attr(None, edge_attr, count, False, fill_value).view(count, edge_attr.size(1))
        if fill_value not in _LINEAR_FILLS:
            raise ValueError(
                "fill_value: expected 'mean', 'add', 'sum', a number or a tensor for an Adjacency with self "
                f"loops inserted, got {fill_value!r}; pass edge_index instead"
            )
        # PyG aggregates over the second row of edge_index: the destinations unless the flow is reversed.
        by_row = adj if self.flow == "source_to_target" else adj.t()
        with torch.autocast(edge_attr.device.type, enabled=False):
            values = edge_attr if edge_attr.is_floating_point() else edge_attr.double()
            total = sum_of_edges(by_row, adj.extend_value(values, 0.0, keep_existing=False))[:count]
            if values is not edge_attr:
                total = total.long().to(edge_attr.dtype)  # like PyG's sum; for bools, this is a logical or
            if fill_value != "mean":
                return total
            key, dtype = ("fastsparse_pyg.edges_of_loops", total.dtype), total.dtype
            if torch.compiler.is_compiling():  # `derived` would make the trace depend on cached values
                degree = (by_row.rowptr.diff() - 1).clamp(min=1).to(dtype)[:, None]
            else:
                degree = by_row.derived(key, lambda: (by_row.in_degree() - 1).clamp(min=1).to(dtype)[:, None])
            return total / degree[:count]

    def _operands_of_edges(self, features: Tensor | None) -> dict[str, Any]:
        """Returns the arguments of recipes that describe edge features and the layer's ``lin_edge``."""
        if features is None:
            return {}
        if is_plain_linear(self.lin_edge):
            return {"edges": (features, self.lin_edge.weight)}
        self._warn_unfused("the fused kernel needs a plain Linear without hooks. Remove the hooks")
        return {"edge_rows": self.lin_edge(features)}

    def _warn_unfused(self, reason: str) -> None:
        warn_once(
            f"{type(self).__name__} stores a row of projected features for every edge, which takes time and "
            f"memory: {reason}"
        )

    # ---------------------------------------------------------------- results

    def _attention_edges(
        self, edge_index: Any, adj: Adjacency, alpha: Tensor, num_loops: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the edges and their weights for ``return_attention_weights``, in PyG's form.

        Args:
            edge_index: the caller's edges or Adjacency.
            adj: structure used for the computation.
            alpha: weights (num_values, heads).
            num_loops: number of self loops that the layer added; None: it adds none.
        """
        alpha = alpha[_value_order(adj)]
        if isinstance(edge_index, Adjacency):
            return to_edge_index(adj, self.flow), alpha
        if num_loops is not None:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=num_loops)
        return edge_index, alpha


def _value_order(adj: Adjacency) -> slice | Tensor:
    """Returns positions of the values of stored entries. Edges that self loops replace have no entry."""
    if adj.num_values == adj.num_edges or adj.edge_id is None:
        return slice(None)
    return adj.edge_id.long().sort().values


def _carries_features(matrix: Any) -> bool:
    """True if the values of a sparse matrix are vectors, which PyG uses as edge features."""
    if isinstance(matrix, Tensor):
        return matrix.dense_dim() > 0
    value = matrix.storage.value()
    return value is not None and value.dim() > 1
