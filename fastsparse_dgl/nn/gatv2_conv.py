"""Graph attention network with dynamic attention."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.fused import attention_recipes as recipes
from fastsparse_core.fused.attention_layer import GATV2, attention_layer
from fastsparse_core.fused.joint_linear import joint_linear
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.nn.base import AggregationMixin, dropout_p


class FastGATv2Conv(AggregationMixin, dgl.nn.pytorch.GATv2Conv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GATv2Conv`.

    From Brody et al., `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_,
    equation 7, for each head:

    .. math::
        \mathbf{h}_i' = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} \mathbf{W}_\text{src} \mathbf{h}_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\mathbf{a}^\top \mathrm{LeakyReLU}(\mathbf{W}_\text{src}
        \mathbf{h}_j + \mathbf{W}_\text{dst} \mathbf{h}_i)\big)

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. One operator,
    :func:`fastsparse_core.gatv2_attention`, computes scores, softmax, dropout and sum. It stores nothing per
    edge, where DGL stores ``num_heads * out_feats`` numbers. With ``get_attention``, the attention of every
    edge is computed and stored. Unlike in DGL, ``graph`` may be an :class:`fastsparse_core.Adjacency`,
    features may be on a GPU while the graph is on the CPU, and features may have more dimensions, as in
    GATConv.

    Args:
        in_feats: width of the input, or a pair of widths (source, destination).
        out_feats: width of each head's output.
        num_heads: number of heads.
        feat_drop: dropout of the input.
        attn_drop: dropout of the attention.
        negative_slope: slope of the LeakyReLU for negative numbers.
        residual: whether the input is added to the result, through a linear layer if the widths differ.
        activation: applied to the result.
        allow_zero_in_degree: whether nodes without incoming edges are accepted; their attention sums to 0.
        bias: whether the linear layers have biases.
        share_weights: whether sources and destinations share one matrix.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastGATv2Conv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastGATv2Conv(8, 4, num_heads=2)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 2, 4])
    """

    _kernel = "fused attention"

    def forward(
        self, graph: GraphLike, feat: Tensor | tuple[Tensor, Tensor], get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, ..., in_feats), float64, float32, float16 or bfloat16, or a pair of source
                and destination features.
            get_attention: whether to return the attention too.

        Returns:
            (number of destinations, ..., num_heads, out_feats); with ``get_attention`` a pair of that and the
            attention (E, ..., num_heads, 1) in the order of the edge ids, after dropout.

        Raises:
            DGLError: sizes do not fit, or a node has no incoming edge and
                ``allow_zero_in_degree`` is False.
        """
        adjacency, source, given = self._structure(graph, feat)

        heads = (self._num_heads, self._out_feats)
        source = self.feat_drop(source)
        destination = self._destination(
            graph, adjacency, source, None if given is None else self.feat_drop(given)
        )
        p = dropout_p(self.attn_drop)
        out = weight = None
        if destination is source and not get_attention and p < 1:
            out = self._as_one_node(adjacency, source, p)
        if out is None:
            if given is None and self.share_weights:
                x_src = self.fc_src(source)
                x_dst = self._destination(graph, adjacency, x_src, None)
            elif destination is source:
                x_src, x_dst = joint_linear(source, (self.fc_src, self.fc_dst))
            else:
                x_src, x_dst = self.fc_src(source), self.fc_dst(destination)
            # The recipe counts dimensions between the nodes and the heads as more heads.
            between = x_src.shape[1:-1]
            out, weight = recipes.gatv2(
                adjacency,
                x_dst.flatten(1),
                x_src.flatten(1),
                self.attn.expand(between.numel(), -1, -1).flatten(0, 1),
                self.leaky_relu.negative_slope,
                p=p,
                drop=self.attn_drop,
                wants_weights=get_attention,
            )
            out = out.reshape(adjacency.num_dst, *between, *heads)
        if self.res_fc is not None:
            out = out + self.res_fc(destination).unflatten(-1, heads)
        if self.activation:
            out = self.activation(out)
        if weight is None or not get_attention:
            return out
        return out, weight.to(source.dtype).reshape(adjacency.num_values, *between, heads[0], 1)

    def _as_one_node(self, adjacency: Adjacency, source: Tensor, p: float) -> Tensor | None:
        """Computes the layer as one autograd node; None if several operators have to compute the layer."""
        maps = (self.fc_src,) if self.share_weights else (self.fc_src, self.fc_dst)
        options = {"heads": self._num_heads, "scale": self.leaky_relu.negative_slope, "dropout_p": p}
        out = attention_layer(GATV2, adjacency, source, maps, (self.attn,), None, **options)
        return None if out is None else out.view(-1, self._num_heads, self._out_feats)
