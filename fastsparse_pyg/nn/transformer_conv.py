"""Graph transformer operator."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptTensor, PairTensor

from fastsparse_core import Adjacency, attention, attention_weights, sddmm, spmm
from fastsparse_core.fused.attention_layer import DOT_PRODUCT, attention_layer
from fastsparse_core.fused.joint_linear import joint_linear
from fastsparse_core.ops._attention_checks import default_scale
from fastsparse_core.structure.incidence import incidence
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import checked_pair, is_plain_linear, project


class FastTransformerConv(AttentionConv, TransformerConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.TransformerConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \alpha_{i,j} \left(
        \mathbf{W}_2 \mathbf{x}_{j} + \mathbf{W}_6 \mathbf{e}_{ij} \right), \qquad \alpha_{i,j} =
        \mathrm{softmax}_j \left( \frac{(\mathbf{W}_3\mathbf{x}_i)^{\top} (\mathbf{W}_4\mathbf{x}_j +
        \mathbf{W}_6 \mathbf{e}_{ij})}{\sqrt{d}} \right)

    after "Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification"
    (https://arxiv.org/abs/2009.03509), section 3.1. Arguments, parameters, ``state_dict`` and results are the
    original's. Scores, softmax, dropout and sum are one operator (:func:`fastsparse_core.attention`) that
    stores nothing of the size of the edges. Edge features join keys and values without a projected row for
    any edge: :math:`\mathbf{W}_6` moves to the queries and behind the sum. The dropped attention weights are
    other random ones than the original's. Under autocast the attention runs in the autocast dtype.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, float64, float32, float16
          or bfloat16; edges :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or
          :class:`~fastsparse_core.Adjacency`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})` or :math:`(|\mathcal{V}_t|, H *
          F_{out})`, with ``return_attention_weights`` a pair of that and
          :math:`((2, |\mathcal{E}|), (|\mathcal{E}|, H))`
    """

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: EdgesLike,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Computes the layer.

        Args:
            x: node features, or (source features, destination features).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            edge_attr: features of the edges, for edges and Adjacency; required with ``edge_dim``.
            return_attention_weights: True or False: also returns the edges and their attention weights before
                dropout.

        Raises:
            ValueError: sizes, dtypes, devices or the dropout probability do not fit.
            IndexError: an index points to no node.
        """
        pair = (x, x) if isinstance(x, Tensor) else checked_pair(x)
        with_weights = isinstance(return_attention_weights, bool)
        adj = None
        if not with_weights and (edge_attr is None) == (self.lin_edge is None):
            adj = self._known_attention(x, edge_index, False, edge_attr)
        if adj is None:
            reason = self._why_original_transformer(pair, edge_index, edge_attr, with_weights)
            if reason:
                return self._original_attention(reason, x, edge_index, edge_attr, return_attention_weights)
            adj = self._graph(pair, edge_index, None).adj
        features = None if edge_attr is None else self._edge_features(adj, edge_attr)
        if not with_weights:
            out = self._as_one_node(x, adj, features)
            if out is not None:
                return out
        heads = (-1, self.heads, self.out_channels)
        of_dst = (self.lin_query, self.lin_skip) if self.root_weight else (self.lin_query,)
        of_src = (self.lin_key, self.lin_value)
        if pair[0] is pair[1]:
            key, value, query, *skips = joint_linear(pair[0], (*of_src, *of_dst), Linear)
        else:
            key, value = project(pair[0], *of_src)
            query, *skips = project(pair[1], *of_dst)
        weight = edges = None
        if features is not None:
            if is_plain_linear(self.lin_edge):
                weight = self.lin_edge.weight
            else:
                self._warn_unfused("the fused kernel takes a plain Linear without hooks. Remove its hooks")
                edges = self.lin_edge(features).view(heads)
        of_edges: Any = {} if weight is None else {"edge_attr": features, "edge_weight": weight}

        def weights(query: Tensor, key: Tensor) -> Tensor:
            bias = None
            if edges is not None:
                bias = sddmm(incidence(adj), query.view(heads), edges)
                bias = bias * default_scale(self.out_channels)
            return attention_weights(adj, query, key, bias=bias, heads=self.heads, **of_edges)

        dropout = self.dropout if self.training else 0.0
        alpha = None
        if with_weights:
            ends = query, key
            if is_plain_linear(self.lin_query) and is_plain_linear(self.lin_key):
                # Products of their own: a gradient of the weights alone does not reach values and skip.
                # Layers with hooks have made them already, and run once.
                ends = self.lin_query(pair[1]), self.lin_key(pair[0])
            alpha = weights(*ends)
        if edges is None and not (alpha is not None and dropout):
            out = attention(adj, query, key, value, None, None, dropout, heads=self.heads, **of_edges)
        else:
            # Where weights are dropped, by the very ones that are returned.
            used = F.dropout(alpha if alpha is not None and dropout else weights(query, key), dropout)
            out = spmm(adj, value, used)
            if features is not None:
                edges = self.lin_edge(features).view(heads) if edges is None else edges
                out = out + spmm(incidence(adj), edges.flatten(1), used)

        if not self.concat:
            out = out.view(heads).mean(dim=1)
        if self.root_weight:
            (skip,) = skips
            if self.lin_beta is None:
                out = out + skip
            else:
                beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = beta * skip + (1 - beta) * out
        if alpha is None or not with_weights:
            return out
        return out, self._attention_edges(edge_index, adj, alpha.to(self.lin_key.weight.dtype))

    def _as_one_node(self, x: Any, adj: Adjacency, features: Tensor | None) -> Tensor | None:
        """The layer as one node of autograd's graph; None: operator by operator."""
        state = self.__dict__
        modules = state["_modules"]
        adds = state["root_weight"]
        if not state["concat"] or (adds and modules.get("lin_beta") is not None) or type(x) is not Tensor:
            return None
        maps = (modules["lin_key"], modules["lin_value"], modules["lin_query"])
        return attention_layer(
            DOT_PRODUCT,
            adj,
            x,
            (*maps, modules["lin_skip"]) if adds else maps,
            (),
            None,
            heads=state["heads"],
            scale=1 / sqrt(state["out_channels"]),  # `default_scale` without a call
            dropout_p=state["dropout"] if state["training"] else 0.0,
            kind=Linear,
            edges=None if features is None else (features, modules["lin_edge"]),
        )

    def _why_original_transformer(
        self, x: tuple[Any, Any], edge_index: object, edge_attr: object, return_attention_weights: bool
    ) -> str:
        if x[1] is None:
            return "no features of destinations"
        if (edge_attr is None) != (self.lin_edge is None):
            return "edge features without edge_dim, or edge_dim without edge features"
        if isinstance(edge_attr, Tensor) and edge_attr.dim() != 2:
            return "edge features that are not a matrix"
        return self._why_original_attention(x, edge_index, edge_attr, return_attention_weights)
