"""Graph attention network with dynamic attention."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core import Adjacency, gatv2_attention, gatv2_attention_weights
from fastsparse_core.fused.attention_layer import GATV2, attention_layer
from fastsparse_core.fused.joint_linear import joint_linear
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.nn.base import AggregationMixin, destination_features, dropout_p, source_features


class FastGATv2Conv(AggregationMixin, dgl.nn.pytorch.GATv2Conv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GATv2Conv`.

    From Brody et al., `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_,
    equation 7, for each head:

    .. math::
        \mathbf{h}_i' = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} \mathbf{W}_\text{src} \mathbf{h}_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\mathbf{a}^\top \mathrm{LeakyReLU}(\mathbf{W}_\text{src}
        \mathbf{h}_j + \mathbf{W}_\text{dst} \mathbf{h}_i)\big)

    Parameters, defaults, state_dict, repr and errors are the original's. Scores, softmax, dropout and sum are
    one operator, :func:`fastsparse_core.gatv2_attention`, which stores nothing per edge, where the original
    stores ``num_heads * out_feats`` numbers; ``get_attention`` computes the attention of every edge. Beyond
    the original, ``graph`` may be an :class:`fastsparse_core.Adjacency`, features may lie on a GPU while the
    graph lies on the CPU, and features may have more dimensions, as in GATConv.

    Args:
        in_feats: width of the input, or a pair of widths (source, destination).
        out_feats: width of each head's output.
        num_heads: number of heads.
        feat_drop: dropout of the input.
        attn_drop: dropout of the attention.
        negative_slope: of the LeakyReLU.
        residual: whether the input is added to the result, through a linear layer where widths differ.
        activation: applied to the result.
        allow_zero_in_degree: whether nodes without incoming edges are accepted; their attention sums to 0.
        bias: whether the linear layers have biases.
        share_weights: whether one matrix serves sources and destinations.
    """

    def forward(
        self, graph: GraphLike, feat: Tensor | tuple[Tensor, Tensor], get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the GATv2 layer.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, ..., in_feats), or a pair of source and destination features.
            get_attention: whether to return the attention too.

        Returns:
            (number of destinations, ..., num_heads, out_feats); with ``get_attention`` a pair of that and the
            attention (E, ..., num_heads, 1) in the order of the edge ids, after dropout.

        Raises:
            DGLError: sizes do not fit, or a node has no incoming edge.
        """
        source, given = source_features(feat), destination_features(feat)
        adjacency = self._adjacency(graph, source)
        if not self._allow_zero_in_degree:
            self._check_in_degree(adjacency)

        heads = (self._num_heads, self._out_feats)
        source = self.feat_drop(source)
        destination = self._destination(
            graph, adjacency, source, None if given is None else self.feat_drop(given)
        )
        p = dropout_p(self.attn_drop)
        if destination is source and not get_attention and p < 1 and self.res_fc is None:
            out = self._as_one_node(adjacency, source, p)
            if out is not None:
                return self.activation(out) if self.activation else out
        if given is None and self.share_weights:
            x_src = self.fc_src(source)
            x_dst = self._destination(graph, adjacency, x_src, None)
        elif destination is source:
            x_src, x_dst = joint_linear(source, (self.fc_src, self.fc_dst))
        else:
            x_src, x_dst = self.fc_src(source), self.fc_dst(destination)
        x_src, x_dst = x_src.unflatten(-1, heads), x_dst.unflatten(-1, heads)
        slope = self.leaky_relu.negative_slope

        operands = (adjacency, x_dst.flatten(1, -2), x_src.flatten(1, -2), self._head_vectors(x_src), slope)
        weight = None
        if get_attention or p == 1:
            weight = gatv2_attention_weights(*operands)
            weight = self.attn_drop(weight.reshape(adjacency.num_values, *x_src.shape[1:-1], 1))
        if weight is not None and p:
            out = self._aggregate(adjacency, x_src, weight)  # by the very weights that are returned
        else:
            out = gatv2_attention(*operands, dropout_p=p).reshape(adjacency.num_dst, *x_src.shape[1:])

        if self.res_fc is not None:
            out = out + self.res_fc(destination).unflatten(-1, heads)
        if self.activation:
            out = self.activation(out)
        return (out, weight.to(source.dtype)) if weight is not None and get_attention else out

    def _as_one_node(self, adjacency: Adjacency, source: Tensor, p: float) -> Tensor | None:
        """The layer as one node of autograd's graph; None: operator by operator."""
        maps = (self.fc_src,) if self.share_weights else (self.fc_src, self.fc_dst)
        options = {"heads": self._num_heads, "scale": self.leaky_relu.negative_slope, "dropout_p": p}
        out = attention_layer(GATV2, adjacency, source, maps, (self.attn,), None, **options)
        return None if out is None else out.view(-1, self._num_heads, self._out_feats)

    def _head_vectors(self, x_src: Tensor) -> Tensor:
        """The attention vector of every head, (H, D); once per middle index for features (N, ..., H, D)."""
        return self.attn.expand(x_src.shape[1:-2].numel(), -1, -1).flatten(0, 1)
