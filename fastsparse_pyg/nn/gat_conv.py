"""Graph attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv
from torch_geometric.typing import OptPairTensor, OptTensor, Size

from fastsparse_core import Adjacency, additive_attention_weights
from fastsparse_core.fused import attention_recipes as recipes
from fastsparse_core.fused.attention_layer import ADDITIVE
from fastsparse_core.fused.head_scores import edge_scores, head_scores, map_to_scores
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import is_plain_linear, size_for_pyg


class FastGATConv(AttentionConv, GATConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GATConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}
        \mathbf{x}_{j}, \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathrm{LeakyReLU} \left(
        \mathbf{a}^{\top}_{s} \mathbf{\Theta} \mathbf{x}_j + \mathbf{a}^{\top}_{t} \mathbf{\Theta}
        \mathbf{x}_i + \mathbf{a}^{\top}_{e} \mathbf{\Theta}_{e} \mathbf{e}_{i,j} \right) \right)

    From "Graph Attention Networks" (https://arxiv.org/abs/1710.10903), section 2.1. Arguments, parameters,
    ``state_dict`` and results are the same as PyG's. One operator
    (:func:`fastsparse_core.additive_attention`) computes scores, softmax, dropout and sum. It stores nothing
    per edge, except one number per edge and head with ``edge_dim`` or ``return_attention_weights``. Attention
    dropout draws a different mask than PyG's layer; the forward and the backward pass use the same mask.
    Under autocast the result has the autocast dtype.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, float64, float32, float16
          or bfloat16; edges :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or
          :class:`~fastsparse_core.Adjacency`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})` or :math:`(|\mathcal{V}_t|, H *
          F_{out})`, with :math:`F_{out}` columns if ``concat=False``. With ``return_attention_weights``, a
          pair of these features and :math:`((2, |\mathcal{E}|), (|\mathcal{E}|, H))`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGATConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGATConv(8, 4, heads=2)(x, edge_index).shape
        torch.Size([3, 8])
    """

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: EdgesLike,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), or (source features (N_src, F_src), destination features
                (N_dst, F_dst) or None).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations. The option
                ``add_self_loops`` adds self loops to all of them, except to an Adjacency that was built with
                self loops.
            edge_attr: features of the edges (E, edge_dim), for edges and Adjacency; ignored without
                ``edge_dim``.
            size: (number of sources, number of destinations), for edge lists.
            return_attention_weights: whether to also return the edges, including self loops, and their
                attention weights after dropout.

        Returns:
            Node features (N, H * F_out) for H heads, or (N, F_out) if ``concat=False``; for a pair, a row per
            destination. With attention weights, a pair of these features and a pair of the edges (2, E') and
            their weights (E', H). E' includes the self loops that the layer adds.

        Raises:
            ValueError: sizes, dtypes, devices or the dropout probability do not fit.
            IndexError: an index refers to a node that does not exist.
        """
        if self.lin_edge is None:
            edge_attr = None
        wants_weights = bool(return_attention_weights)
        adj = self._structure(x, edge_index, size, self.add_self_loops, edge_attr, wants_weights)
        if not isinstance(adj, Adjacency):
            size = size_for_pyg(edge_index, size)
            return self._original_forward(adj, x, edge_index, edge_attr, size, return_attention_weights)
        state = self.__dict__
        dropout = state["dropout"] if state["training"] else 0.0
        lin, whole = state["_modules"].get("lin"), None
        features = None if edge_attr is None else self._edge_features(adj, edge_attr)
        if lin is not None and not (wants_weights and (dropout or features is not None)):
            edges = None if features is None else self._edges_for_scores(features)
            if features is None or edges is not None:
                whole = self._attention_layer(ADDITIVE, adj, x, (lin,), ("att_src", "att_dst"), edges)
            if whole is not None and not wants_weights:
                return whole
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        value, score_dst, score_src = self._values_and_scores(x_src, x_dst)
        if score_dst is None:
            score_dst = score_src.new_zeros(adj.num_dst, self.heads)
        if whole is not None:
            out = whole
            weights = additive_attention_weights(adj, score_dst, score_src, self.negative_slope)
            alpha: Tensor | None = weights.to(self.att_src.dtype)
        else:
            residual = None if self.res is None or x_dst is None else self.res(x_dst)
            of_edges = None if features is None else self._edge_scores(features)
            operands = (adj, score_dst, score_src, value, self.negative_slope, of_edges)
            dtype = self.att_src.dtype
            out, alpha = recipes.gat(*operands, p=dropout, wants_weights=wants_weights, dtype=dtype)
            out = self._finished(out, residual)
        if alpha is None or not wants_weights:
            return out
        num_loops = min(adj.shape) if self.add_self_loops else None
        return out, self._attention_edges(edge_index, adj, alpha, num_loops)

    def _values_and_scores(self, x_src: Tensor, x_dst: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns values (N, H * F_out), scores of the destinations (N, H), and scores of the sources."""
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        value = lin_src(x_src)
        if x_dst is x_src and lin_dst is lin_src:
            score_src, score_dst = head_scores(value, self.att_src, self.att_dst)
            return value, score_dst, score_src
        (score_src,) = head_scores(value, self.att_src)
        if x_dst is None:
            return value, None, score_src
        (score_dst,) = head_scores(lin_dst(x_dst), self.att_dst)
        return value, score_dst, score_src

    def _edges_for_scores(self, features: Tensor) -> tuple[Any, ...] | None:
        """Returns edge features in the form for `attention_layer`; None if separate operators have to run."""
        lin, att = self.__dict__["_modules"]["lin_edge"], self._own_parameters("att_edge")[0]
        if features.is_cuda or is_any_autocast_enabled() or not is_plain_linear(lin):
            return None
        return features, None, map_to_scores(lin._parameters["weight"], att)

    def _edge_scores(self, features: Tensor) -> Tensor:
        """Computes scores (num_values, heads) from edge features (num_values, D)."""
        lin = self.lin_edge
        if not is_plain_linear(lin):
            projected = lin(features).view(-1, self.heads, self.out_channels)
            return (projected * self.att_edge).sum(dim=-1)
        autocast = torch.is_autocast_enabled(features.device.type)
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(lin.weight.dtype) if autocast else features
            return edge_scores(features, lin.weight, self.att_edge)
