"""Attention-based graph neural network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import AGNNConv

from fastsparse_core import Adjacency, attention
from fastsparse_core.fused.cosine_attention import beta_by_row, cosine_attention
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv


class FastAGNNConv(AttentionConv, AGNNConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.AGNNConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \mathrm{softmax}_j \left( \beta \cos(
        \mathbf{x}_i, \mathbf{x}_j) \right) \mathbf{x}_j

    From "Attention-based Graph Neural Network for Semi-Supervised Learning"
    (https://arxiv.org/abs/1803.03735). Arguments, parameters, ``state_dict`` and results are the
    same as PyG's. The layer is computed as dot-product attention (:func:`fastsparse_core.attention`) on
    normalised features, and nothing is stored per edge. Under autocast the result has the autocast dtype.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F)`, float64, float32, float16 or bfloat16; edges
          :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or
          :class:`~fastsparse_core.Adjacency`
        - **output:** node features :math:`(|\mathcal{V}|, F)`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastAGNNConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastAGNNConv()(x, edge_index).shape
        torch.Size([3, 8])
    """

    _bipartite = False

    def forward(self, x: Tensor, edge_index: EdgesLike) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations. The layer adds
                self loops to all of them, except to an Adjacency that was built with self loops.

        Returns:
            Node features (N, F).

        Raises:
            ValueError: sizes, dtypes or devices do not fit together.
            IndexError: an index refers to a node that does not exist.
        """
        adj = self._structure((x, x), edge_index, None, self.add_self_loops)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index)
        out = cosine_attention(adj, x, self.beta)
        if out is not None:
            return out
        if not torch.is_autocast_enabled(x.device.type):
            # The dtype of PyG's product of messages and weights: float16 features with a float32 beta give
            # float32.
            x = x.to(torch.promote_types(x.dtype, self.beta.dtype))
        key = F.normalize(x, p=2.0, dim=-1)
        return attention(adj, key * beta_by_row(adj, self.beta), key, x, scale=1.0)
