"""What the attention layers share: PyG's self loops and edge features, and the attention weights of edges."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr

from fastsparse_core import Adjacency, spmm
from fastsparse_core.fused.attention_layer import Score, attention_layer
from fastsparse_core.log import warn_once
from fastsparse_pyg.graph import is_sparse_matrix, num_caller_values, to_edge_index
from fastsparse_pyg.nn.base import FastConv, raise_features

#: Reductions over edge features, for those of self loops, that are a product with the structure.
_LINEAR_FILLS = ("mean", "add", "sum")


class AttentionConv(FastConv):
    """Base of the attention layers, to be named before the PyG layer as :class:`FastConv`."""

    _fusible: ClassVar[bool] = False
    _kernel: ClassVar[str] = "fused attention"

    #: Whether edge features run the unfused operators, on structures that torch.compile cannot build.
    _stores_edges: ClassVar[bool] = True

    def _why_original_attention(
        self,
        x: tuple[Any, Any],
        edge_index: object,
        edge_attr: object = None,
        return_attention_weights: bool = False,
    ) -> str:
        """Why PyG's own code must run, "" if the operators can."""
        x_src, x_dst = x
        if not isinstance(x_src, Tensor):
            raise_features(x_src)
        for side in (x_src,) if x_dst is None or x_dst is x_src else (x_src, x_dst):
            if not isinstance(side, Tensor) or side.dim() != 2:
                return "features that are not one matrix per side"
        dropout = getattr(self, "dropout", 0.0)
        if not 0.0 <= dropout < 1.0:
            return f"dropout={dropout}"
        if type(self._modules.get("aggr_module")) is not SumAggregation:
            return f"aggr={self.aggr!r}"
        if self.flow == "target_to_source" and x_dst is not x_src:
            return "a bipartite graph with flow='target_to_source'"
        if is_sparse_matrix(edge_index):
            if edge_attr is not None:
                return "a sparse matrix with edge features beside it"
            if _carries_features(edge_index):
                return "a sparse matrix that carries edge features"
            if return_attention_weights:
                return "the attention weights of a sparse matrix"
        if edge_attr is not None and self._stores_edges and torch.compiler.is_compiling():
            return "torch.compile with edge features"
        if edge_attr is not None and (not isinstance(edge_attr, Tensor) or edge_attr.dim() not in (1, 2)):
            return "edge features that are not one vector per edge"
        return self._why_original_pair(x, edge_index)

    def _original_attention(
        self, reason: str, x: Any, edge_index: Any, edge_attr: Tensor | None, *args: Any
    ) -> Any:
        """PyG's forward; an Adjacency is written back as an edge list, features of its loops included."""
        if isinstance(edge_index, Adjacency) and edge_index.has_inserted_loops and edge_attr is not None:
            edge_attr = self._edge_features(edge_index, edge_attr)[_value_order(edge_index)]
        return self._original_forward(reason, x, edge_index, edge_attr, *args)

    def _attention_layer(
        self,
        score: type[Score],
        adj: Adjacency,
        x: Tensor,
        maps: tuple[Any, ...],
        vectors: tuple[str, ...],
        scale: float,
        edges: tuple[Tensor, Any] | None = None,
    ) -> Tensor | None:
        """The layer as one node of autograd's graph; None: operator by operator."""
        state = self.__dict__
        bias, *parameters = self._own_parameters("bias", *vectors)
        return attention_layer(
            score,
            adj,
            x,
            maps,
            tuple(parameters),
            bias,
            heads=state["heads"],
            scale=scale,
            dropout_p=state["dropout"] if state["training"] else 0.0,
            mean=not state["concat"],
            kind=Linear,
            edges=edges,
        )

    # ---------------------------------------------------------------- edge features

    def _edge_features(self, adj: Adjacency, edge_attr: Tensor) -> Tensor:
        """Features (num_values, D) of every edge, those of inserted self loops filled as PyG fills them.

        Raises:
            ValueError: not one row per edge, or another device than the graph's.
        """
        expected = num_caller_values(adj)
        if edge_attr.size(0) != expected:
            raise ValueError(
                f"edge_attr: expected one row per edge, {expected}, got shape {tuple(edge_attr.shape)}"
            )
        if edge_attr.device != adj.device:
            raise ValueError(
                f"edge_attr: expected device {adj.device} like the graph, got {edge_attr.device}; move it "
                f"with .to('{adj.device}')"
            )
        features = edge_attr if edge_attr.dim() == 2 else edge_attr[:, None]
        if not adj.has_inserted_loops:
            return features
        loops = self._loop_features(adj, features)
        if not features.is_floating_point():
            features = features.to(loops.dtype)  # as torch.cat in PyG's code; means of integers are floating
        return adj.extend_value(features, loops, keep_existing=False)

    def _loop_features(self, adj: Adjacency, edge_attr: Tensor) -> Tensor:
        """Features (min(shape), D) of the inserted self loops, by `fill_value`, from those of the edges."""
        count = min(adj.shape)
        if not hasattr(self, "fill_value"):
            raise ValueError(
                "edge_index: expected an Adjacency without inserted self loops where edges have features, "
                "since this layer has none for them; prepare it with add_self_loops=False"
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
        with torch.autocast(adj.device.type, enabled=False):
            values = edge_attr if edge_attr.is_floating_point() else edge_attr.double()
            ones = values.new_ones(by_row.num_src, values.size(1))
            total = spmm(by_row, ones, adj.extend_value(values, 0.0, keep_existing=False))[:count]
            if values is not edge_attr:
                total = total.long().to(edge_attr.dtype)  # in which PyG adds: of bool that is "any"
            if fill_value != "mean":
                return total
            others = (by_row.in_degree()[:count] - 1).clamp(min=1)
            return total / others[:, None].to(total.dtype)

    def _fill_needs_original(self, edge_index: object, edge_attr: object) -> bool:
        """Whether features of self loops must be filled by a reduction that only PyG's code has."""
        return (
            edge_attr is not None
            and self.add_self_loops
            and isinstance(self.fill_value, str)
            and self.fill_value not in _LINEAR_FILLS
            and not (isinstance(edge_index, Adjacency) and edge_index.has_inserted_loops)
        )

    def _warn_unfused(self, reason: str) -> None:
        warn_once(
            f"{type(self).__name__} stores a row of projected features for every edge, which takes time and "
            f"memory: {reason}"
        )

    # ---------------------------------------------------------------- results

    def _attention_edges(
        self, edge_index: Any, adj: Adjacency, alpha: Tensor, num_loops: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The edges of the attention weights and the weights, both as PyG returns them.

        Args:
            edge_index: what the caller gave: edges or an Adjacency.
            adj: structure that was computed with.
            alpha: weights (num_values, heads).
            num_loops: self loops that the layer added; None: it adds none.
        """
        alpha = alpha[_value_order(adj)]
        if isinstance(edge_index, Adjacency):
            return to_edge_index(adj, self.flow), alpha
        if num_loops is not None:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=num_loops)
        return edge_index, alpha


def _value_order(adj: Adjacency) -> slice | Tensor:
    """Positions of the stored entries' values, ascending: leaves out edges that self loops replaced."""
    if adj.num_values == adj.num_edges or adj.edge_id is None:
        return slice(None)
    return adj.edge_id.long().sort().values


def _carries_features(matrix: Any) -> bool:
    """Whether the values of a sparse matrix are vectors, which PyG takes for edge features."""
    if isinstance(matrix, Tensor):
        return matrix.dense_dim() > 0
    value = matrix.storage.value()
    return value is not None and value.dim() > 1
