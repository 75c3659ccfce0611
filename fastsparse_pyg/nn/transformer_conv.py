"""Graph transformer operator."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import TransformerConv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptTensor, PairTensor

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused import attention_recipes as recipes
from fastsparse_core.fused.attention_layer import DOT_PRODUCT, attention_layer
from fastsparse_core.fused.joint_linear import joint_linear
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import is_plain_linear, project


class FastTransformerConv(AttentionConv, TransformerConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.TransformerConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \alpha_{i,j} \left(
        \mathbf{W}_2 \mathbf{x}_{j} + \mathbf{W}_6 \mathbf{e}_{ij} \right), \qquad \alpha_{i,j} =
        \mathrm{softmax}_j \left( \frac{(\mathbf{W}_3\mathbf{x}_i)^{\top} (\mathbf{W}_4\mathbf{x}_j +
        \mathbf{W}_6 \mathbf{e}_{ij})}{\sqrt{d}} \right)

    From "Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification"
    (https://arxiv.org/abs/2009.03509), section 3.1. Arguments, parameters, ``state_dict`` and results are the
    same as PyG's. One operator (:func:`fastsparse_core.attention`) computes scores, softmax, dropout and sum,
    and stores nothing per edge. Edge features (on a GPU, up to 512 per edge) are not projected per edge:
    :math:`\mathbf{W}_6` is applied to the queries and to the weighted sum of edge features instead. Attention
    dropout draws a different mask than PyG's layer. Under autocast the attention runs in the autocast dtype.

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
        >>> from fastsparse_pyg import FastTransformerConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastTransformerConv(8, 4, heads=2)(x, edge_index).shape
        torch.Size([3, 8])
    """

    _needs_destinations = True

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: EdgesLike,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), or (source features (N_src, F_src), destination features
                (N_dst, F_dst)).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            edge_attr: features of the edges (E, edge_dim), for edges and Adjacency; required with
                ``edge_dim``.
            return_attention_weights: with True or False, as in PyG, the edges and their attention weights
                before dropout are returned too; None: only the features are.

        Returns:
            Node features (N, H * F_out) for H heads, or (N, F_out) if ``concat=False``; for a pair, a row per
            destination. With attention weights, a pair of these features and a pair of the edges (2, E) and
            their weights (E, H).

        Raises:
            ValueError: sizes, dtypes, devices or the dropout probability do not fit.
            IndexError: an index refers to a node that does not exist.
        """
        with_weights = isinstance(return_attention_weights, bool)
        adj = self._structure(x, edge_index, None, False, edge_attr, with_weights)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, edge_attr, return_attention_weights)
        features = None if edge_attr is None else self._edge_features(adj, edge_attr)
        state = self.__dict__
        modules, adds = state["_modules"], state["root_weight"]
        dropout = state["dropout"] if state["training"] else 0.0
        lins: tuple[Any, ...] = (modules["lin_key"], modules["lin_value"], modules["lin_query"])
        lins = (*lins, modules["lin_skip"]) if adds else lins
        is_weighted = adds and modules.get("lin_beta") is not None
        if not with_weights and state["concat"] and not is_weighted and type(x) is Tensor:
            whole = attention_layer(
                DOT_PRODUCT,
                adj,
                x,
                lins,
                (),
                None,
                heads=state["heads"],
                scale=1 / sqrt(state["out_channels"]),  # `default_scale`, inlined
                dropout_p=dropout,
                kind=Linear,
                edges=None if features is None else (features, modules["lin_edge"]),
            )
            if whole is not None:
                return whole
        pair = (x, x) if isinstance(x, Tensor) else x
        if pair[0] is pair[1]:
            key, value, query, *skips = joint_linear(pair[0], lins, Linear)
        else:
            key, value = project(pair[0], *lins[:2])
            query, *skips = project(pair[1], *lins[2:])
        ends = (query, key) if with_weights else None
        if with_weights and is_plain_linear(self.lin_query) and is_plain_linear(self.lin_key):
            # Separate products, so that a gradient of the attention weights alone does not flow into values
            # and skip. Layers with hooks ran above and must not run again.
            ends = self.lin_query(pair[1]), self.lin_key(pair[0])
        of_edges = self._operands_of_edges(features)
        out, alpha = recipes.transformer(adj, query, key, value, self.heads, **of_edges, p=dropout, ends=ends)

        if not self.concat:
            out = out.view(-1, self.heads, self.out_channels).mean(dim=1)
        if adds:
            (skip,) = skips
            if self.lin_beta is None:
                out = out + skip
            else:
                beta = self.lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
                out = beta * skip + (1 - beta) * out
        if alpha is None:
            return out
        return out, self._attention_edges(edge_index, adj, alpha.to(self.lin_key.weight.dtype))

    def _reason(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_attr: Any = None, *of_call: Any
    ) -> Reason | None:
        if (edge_attr is None) != (self.__dict__["_modules"].get("lin_edge") is None):
            return fallback.EDGE_FEATURES_OR_NOT
        if isinstance(edge_attr, Tensor) and edge_attr.dim() != 2:
            return fallback.EDGES_NOT_A_MATRIX
        return super()._reason(x_src, x_dst, edge_index, edge_attr, *of_call)
