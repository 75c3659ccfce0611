"""Graph attention with dynamic scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import GATv2Conv
from torch_geometric.typing import OptTensor, PairTensor

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused import attention_recipes as recipes
from fastsparse_core.fused.attention_layer import GATV2
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import project


class FastGATv2Conv(AttentionConv, GATv2Conv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GATv2Conv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_{s}
        \mathbf{x}_{j}, \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathbf{a}^{\top} \mathrm{LeakyReLU}
        \left( \mathbf{\Theta}_{s} \mathbf{x}_j + \mathbf{\Theta}_{t} \mathbf{x}_i + \mathbf{\Theta}_{e}
        \mathbf{e}_{i,j} \right) \right)

    From "How Attentive are Graph Attention Networks?" (https://arxiv.org/abs/2105.14491), section 3.
    Arguments, parameters, ``state_dict`` and results are the same as PyG's. One operator
    (:func:`fastsparse_core.gatv2_attention`) computes scores, softmax, dropout and sum, and stores nothing
    per edge. It also applies :math:`\mathbf{\Theta}_{e}` to up to 32 features per edge (on the CPU, to any
    number). With more features per edge, or with ``return_attention_weights``, unfused operators run.
    Attention dropout draws a different mask than PyG's layer. Under autocast the result has the autocast
    dtype.

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
        >>> from fastsparse_pyg import FastGATv2Conv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGATv2Conv(8, 4, heads=2)(x, edge_index).shape
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

        Arguments, result and errors are the same as in :meth:`FastGATConv.forward`, but there is no ``size``.
        """
        wants_weights = bool(return_attention_weights)
        adj = self._structure(x, edge_index, None, self.add_self_loops, edge_attr, wants_weights)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, edge_attr, return_attention_weights)
        features = None if edge_attr is None else self._edge_features(adj, edge_attr)
        modules = self.__dict__["_modules"]
        if not wants_weights:
            maps = (modules["lin_l"],) if self.share_weights else (modules["lin_l"], modules["lin_r"])
            edges = None if features is None else (features, modules["lin_edge"])
            out = self._attention_layer(GATV2, adj, x, maps, ("att",), edges)
            if out is not None:
                return out
        pair = (x, x) if isinstance(x, Tensor) else x
        residual = None if self.res is None else self.res(pair[1])
        if pair[0] is not pair[1]:
            x_src, x_dst = self.lin_l(pair[0]), self.lin_r(pair[1])
        elif self.share_weights:
            x_src = x_dst = self.lin_l(pair[0])
        else:
            x_src, x_dst = project(pair[0], self.lin_l, self.lin_r)
        att = self.att.view(self.heads, self.out_channels)
        out, alpha = recipes.gatv2(
            adj,
            x_dst,
            x_src,
            att,
            self.negative_slope,
            **self._operands_of_edges(features),
            p=self.dropout if self.training else 0.0,
            wants_weights=wants_weights,
            dtype=att.dtype,
        )
        out = self._finished(out, residual)
        if alpha is None or not wants_weights:
            return out
        num_loops = min(adj.shape) if self.add_self_loops else None
        return out, self._attention_edges(edge_index, adj, alpha, num_loops)

    def _reason(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_attr: Any = None, *of_call: Any
    ) -> Reason | None:
        if edge_attr is not None and self.__dict__["_modules"].get("lin_edge") is None:
            return Reason("edge features in a layer without edge_dim", fallback.EDGE_FEATURES_OR_NOT.cure)
        return super()._reason(x_src, x_dst, edge_index, edge_attr, *of_call)
