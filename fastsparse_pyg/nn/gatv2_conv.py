"""Graph attention with dynamic scores."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATv2Conv
from torch_geometric.typing import OptTensor, PairTensor, SparseTensor

from fastsparse_core import Adjacency, edge_softmax, gatv2_attention, gatv2_attention_weights, spmm
from fastsparse_core.fused.attention_layer import GATV2
from fastsparse_core.fused.bias import add_bias
from fastsparse_core.structure.incidence import edge_ends
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import checked_pair, is_plain_linear, project


class FastGATv2Conv(AttentionConv, GATv2Conv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GATv2Conv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_{s}
        \mathbf{x}_{j}, \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathbf{a}^{\top} \mathrm{LeakyReLU}
        \left( \mathbf{\Theta}_{s} \mathbf{x}_j + \mathbf{\Theta}_{t} \mathbf{x}_i + \mathbf{\Theta}_{e}
        \mathbf{e}_{i,j} \right) \right)

    after "How Attentive are Graph Attention Networks?" (https://arxiv.org/abs/2105.14491), section 3.
    Arguments, parameters, ``state_dict`` and results are the original's. Scores, softmax, dropout and sum are
    one operator (:func:`fastsparse_core.gatv2_attention`) that stores nothing of the size of the edges. Edge
    features stand inside the non-linearity: up to 32 of them are projected inside the operator, more run the
    unfused operators. The dropped attention weights are other random ones than the original's. Under autocast
    the result has the autocast dtype.

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
        """Computes the layer; arguments and errors as in :meth:`FastGATConv.forward`, without `size`."""
        pair = (x, x) if isinstance(x, Tensor) else checked_pair(x)
        adj = None
        asks_more = return_attention_weights or (edge_attr is None) != (self.lin_edge is None)
        if not asks_more and (edge_attr is None or not self._fill_needs_original(edge_index, edge_attr)):
            adj = self._known_attention(x, edge_index, self.add_self_loops, edge_attr)
        if adj is None:
            reason = self._why_original_gatv2(pair, edge_index, edge_attr, bool(return_attention_weights))
            if reason:
                return self._original_attention(reason, x, edge_index, edge_attr, return_attention_weights)
            adj = self._graph(pair, edge_index, None, add_self_loops=self.add_self_loops).adj
        features = None if edge_attr is None else self._edge_features(adj, edge_attr)
        if not return_attention_weights:
            out = self._as_one_node(x, adj, features)
            if out is not None:
                return out
        residual = None if self.res is None else self.res(pair[1])
        if pair[0] is not pair[1]:
            x_src, x_dst = self.lin_l(pair[0]), self.lin_r(pair[1])
        elif self.share_weights:
            x_src = x_dst = self.lin_l(pair[0])
        else:
            x_src, x_dst = project(pair[0], self.lin_l, self.lin_r)
        att = self.att.view(self.heads, self.out_channels)

        dropout = self.dropout if self.training else 0.0
        alpha = None
        weight = self.lin_edge.weight if features is not None and is_plain_linear(self.lin_edge) else None
        operands = (adj, x_dst, x_src, att, self.negative_slope)
        stores_rows = features is not None and weight is None
        if features is not None and stores_rows:
            self._warn_unfused("the fused kernel takes a plain Linear without hooks. Remove its hooks")
            alpha = self._weights_with_edges(adj, x_dst, x_src, features)
        elif return_attention_weights:
            alpha = gatv2_attention_weights(*operands, edge_attr=features, edge_weight=weight)
        if alpha is not None:
            alpha = F.dropout(alpha.to(self.att.dtype), dropout)
        if alpha is not None and (dropout or stores_rows):
            out = spmm(adj, x_src, alpha)  # by the very weights that are returned
        else:
            out = gatv2_attention(*operands, dropout, edge_attr=features, edge_weight=weight)

        if not self.concat:
            out = out.view(-1, self.heads, self.out_channels).mean(dim=1)
        if residual is not None:
            out = out + residual
        if self.bias is not None:
            out = add_bias(out, self.bias)
        if alpha is None or not return_attention_weights:
            return out
        num_loops = min(adj.shape) if self.add_self_loops else None
        return out, self._attention_edges(edge_index, adj, alpha, num_loops)

    def _as_one_node(self, x: Any, adj: Adjacency, features: Tensor | None) -> Tensor | None:
        """The layer as one node of autograd's graph; None: operator by operator."""
        state = self.__dict__
        modules = state["_modules"]
        if modules.get("res") is not None or type(x) is not Tensor:
            return None
        source = modules["lin_l"]
        maps = (source,) if state["share_weights"] else (source, modules["lin_r"])
        edges = None if features is None else (features, modules["lin_edge"])
        return self._attention_layer(GATV2, adj, x, maps, ("att",), state["negative_slope"], edges)

    def _why_original_gatv2(
        self, x: tuple[Any, Any], edge_index: object, edge_attr: object, return_attention_weights: bool
    ) -> str:
        if x[1] is None:
            return "no features of destinations"
        if edge_attr is not None and self.lin_edge is None:
            return "edge features in a layer without edge_dim"
        if isinstance(edge_index, SparseTensor) and self.lin_edge is not None:
            return "a SparseTensor in a layer with edge_dim"
        if self._fill_needs_original(edge_index, edge_attr):
            return f"edge features with fill_value={self.fill_value!r}"
        return self._why_original_attention(x, edge_index, edge_attr, return_attention_weights)

    def _weights_with_edges(self, adj: Adjacency, x_dst: Tensor, x_src: Tensor, features: Tensor) -> Tensor:
        """Attention weights (num_values, heads) with edge features (num_values, D) in the scores."""
        src, dst = edge_ends(adj)
        total = x_dst.index_select(0, dst) + x_src.index_select(0, src) + self.lin_edge(features)
        hidden = F.leaky_relu(total, self.negative_slope).view(-1, self.heads, self.out_channels)
        score = (hidden * self.att).sum(dim=-1)
        return edge_softmax(adj, score)
