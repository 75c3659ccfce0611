"""Attention-based graph neural network."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fastsparse_core import attention
from fastsparse_core.fused.cosine_attention import beta_by_row, cosine_attention
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import AggregationMixin


class FastAGNNConv(AggregationMixin, dgl.nn.pytorch.AGNNConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.AGNNConv`.

    From Thekumparampil et al., `Attention-based Graph Neural Network for Semi-Supervised Learning
    <https://arxiv.org/abs/1803.03735>`_:

    .. math::
        \mathbf{h}_i' = \sum_{j \in \mathcal{N}(i)} p_{ij} \mathbf{h}_j, \qquad
        p_{ij} = \mathrm{softmax}_j\big(\beta \cos(\mathbf{h}_i, \mathbf{h}_j)\big)

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. One operator,
    :func:`fastsparse_core.attention`, computes scores, softmax and sum from normalised queries and keys.
    Unlike in DGL, ``graph`` may be an :class:`fastsparse_core.Adjacency`, and features may be on a GPU while
    the graph is on the CPU. If ``feat`` is a pair and the graph's sources are its destinations, DGL computes
    the scores from the second tensor alone. This layer does the same, except with an Adjacency, which does
    not show whether sources and destinations are the same nodes.

    Args:
        init_beta: initial :math:`\beta`.
        learn_beta: whether :math:`\beta` is a parameter.
        allow_zero_in_degree: whether nodes without incoming edges are accepted; their result is 0.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastAGNNConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastAGNNConv()(graph, torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    _kernel = "fused attention"

    def forward(self, graph: GraphLike, feat: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: node features (N, ..., F), float64, float32, float16 or bfloat16, or a pair of source and
                destination features whose shapes differ only in the number of rows. Dimensions between the
                nodes and the width F count as heads.

        Returns:
            Node features (number of destinations, ..., F).

        Raises:
            DGLError: sizes do not fit, or a node has no incoming edge and
                ``allow_zero_in_degree`` is False.
        """
        adjacency, source, given = self._structure(graph, feat)
        destination = self._destination(graph, adjacency, source, given)
        if destination.shape[1:] != source.shape[1:]:
            raise DGLError(
                "feat: expected source and destination features whose shapes differ only in the rows, "
                f"got {tuple(source.shape)} and {tuple(destination.shape)}"
            )
        if destination is source and source.dim() == 2:
            whole = cosine_attention(adjacency, source, self.beta)
            if whole is not None:
                return whole
        query = key = F.normalize(destination, dim=-1)
        if destination is not source and not self._has_one_frame(graph):
            key = F.normalize(source, dim=-1)
        # Beta is multiplied into the queries and not passed as `scale`: it may need a gradient, and its dtype
        # may be wider than that of the features.
        beta = beta_by_row(adjacency, self.beta).view(-1, *[1] * (query.dim() - 1))
        query = (beta * query).to(key.dtype)
        # Dimensions between the nodes and the width count as heads; features without a width have width 1.
        query, key, value = (x.reshape(x.size(0), source.shape[1:].numel()) for x in (query, key, source))
        out = attention(adjacency, query, key, value, scale=1.0, heads=source.shape[1:-1].numel())
        return out.reshape(adjacency.num_dst, *source.shape[1:])
