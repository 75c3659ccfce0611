"""Graph attention with dot products."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core.fused import attention_recipes as recipes
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.nn.base import AggregationMixin


class FastDotGatConv(AggregationMixin, dgl.nn.pytorch.DotGatConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.DotGatConv`.

    The graph attention layer of Veličković et al., `Graph Attention Networks
    <https://arxiv.org/abs/1710.10903>`_, with the scaled dot products of Vaswani et al., `Attention Is All
    You Need <https://arxiv.org/abs/1706.03762>`_, as scores; for each head of width :math:`D`:

    .. math::
        \mathbf{h}_i' = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} \mathbf{W}_\text{src} \mathbf{h}_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\Big(\frac{(\mathbf{W}_\text{dst} \mathbf{h}_i)^\top
        (\mathbf{W}_\text{src} \mathbf{h}_j)}{\sqrt{D}}\Big)

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. One operator,
    :func:`fastsparse_core.attention`, computes scores, softmax and sum, and stores nothing per edge. With
    ``get_attention``, the attention of every edge is computed and stored. Unlike in DGL, ``graph`` may be an
    :class:`fastsparse_core.Adjacency`, features may be on a GPU while the graph is on the CPU, and features
    may have more dimensions, as in GATConv. If ``feat`` is a pair and the graph's sources are its
    destinations, DGL uses only the second tensor, transformed by ``fc_dst``. This layer does the same, except
    with an Adjacency, which does not show whether sources and destinations are the same nodes.

    Args:
        in_feats: width of the input, or a pair of widths (source, destination).
        out_feats: width of each head's output.
        num_heads: number of heads.
        allow_zero_in_degree: whether nodes without incoming edges are accepted; their result is 0.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastDotGatConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastDotGatConv(8, 4, num_heads=2)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 2, 4])
    """

    _kernel = "fused attention"

    def forward(
        self, graph: GraphLike, feat: Tensor | tuple[Tensor, Tensor], get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, ..., in_feats), float64, float32, float16 or bfloat16; a pair of source and destination
                features for a layer made with a pair of widths.
            get_attention: whether to return the attention too.

        Returns:
            (number of destinations, ..., num_heads, out_feats); with ``get_attention`` a pair of that and the
            attention (E, ..., num_heads, 1) in the order of the edge ids.

        Raises:
            DGLError: sizes do not fit, or a node has no incoming edge and
                ``allow_zero_in_degree`` is False.
        """
        adjacency, source, given = self._structure(graph, feat)

        heads = (self._num_heads, self._out_feats)
        if given is None:
            x_src = self.fc(source).unflatten(-1, heads)
            x_dst = self._destination(graph, adjacency, x_src, None)
        else:
            x_dst = self.fc_dst(self._destination(graph, adjacency, source, given)).unflatten(-1, heads)
            x_src = x_dst if self._has_one_frame(graph) else self.fc_src(source).unflatten(-1, heads)

        query, key = x_dst.flatten(1), x_src.flatten(1)
        num_heads = x_src.shape[1:-1].numel()
        ends = (query, key) if get_attention else None
        out, weight = recipes.transformer(adjacency, query, key, key, num_heads, ends=ends)
        out = out.reshape(adjacency.num_dst, *x_src.shape[1:])
        if weight is None:
            return out
        return out, weight.reshape(adjacency.num_values, *x_src.shape[1:-1], 1).to(source.dtype)
