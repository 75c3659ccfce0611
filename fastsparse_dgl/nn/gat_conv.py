"""Graph attention network."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.fused import attention_recipes as recipes
from fastsparse_core.fused.attention_layer import ADDITIVE, attention_layer
from fastsparse_core.fused.bias import add_bias
from fastsparse_core.fused.head_scores import head_scores
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.nn.base import (
    AggregationMixin,
    dropout_p,
    edge_factor,
)


class FastGATConv(AggregationMixin, dgl.nn.pytorch.GATConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GATConv`.

    From Veličković et al., `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_, section 2.1, for
    each head:

    .. math::
        \mathbf{h}_i' = \sum_{j \in \mathcal{N}(i)} \alpha_{ij} \mathbf{W} \mathbf{h}_j, \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\mathrm{LeakyReLU}(\mathbf{a}_l^\top \mathbf{W} \mathbf{h}_j +
        \mathbf{a}_r^\top \mathbf{W} \mathbf{h}_i)\big)

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. One operator,
    :func:`fastsparse_core.additive_attention`, computes scores, softmax, dropout and sum, and stores nothing
    per edge. With ``edge_weight`` or ``get_attention``, the attention of every edge is computed and stored.
    Unlike in DGL, ``graph`` may be an :class:`fastsparse_core.Adjacency` and features may be on a GPU while
    the graph is on the CPU.

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
        bias: whether the layer has a bias.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastGATConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastGATConv(8, 4, num_heads=2)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 2, 4])
    """

    _kernel = "fused attention"

    def forward(
        self,
        graph: GraphLike,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, ..., in_feats), float64, float32, float16 or bfloat16, or a pair of source
                and destination features.
            edge_weight: (E,), in the order of the edge ids, or one number for all; multiplies the attention
                after dropout.
            get_attention: whether to return the attention too.

        Returns:
            (number of destinations, ..., num_heads, out_feats); with ``get_attention`` a pair of that and the
            attention (E, ..., num_heads, 1) in the order of the edge ids, as the sum used it: after dropout
            and ``edge_weight``.

        Raises:
            DGLError: sizes or devices do not fit, or a node has no incoming edge and
                ``allow_zero_in_degree`` is False.
        """
        adjacency, source, given = self._structure(graph, feat)

        heads = (self._num_heads, self._out_feats)
        source = self.feat_drop(source)
        p = dropout_p(self.attn_drop)
        destination = self._destination(
            graph, adjacency, source, None if given is None else self.feat_drop(given)
        )
        out = weight = None
        is_plain = given is None and destination is source  # pairs may have two linear layers
        if is_plain and not get_attention and edge_weight is None and p < 1:
            out = self._as_one_node(adjacency, source, p)
        if out is None:
            if given is None:
                x_src = self.fc(source)
                score_src, score_dst = head_scores(x_src, self.attn_l, self.attn_r)
                score_dst = self._destination(graph, adjacency, score_dst, None)
            else:
                fc_src, fc_dst = (self.fc_src, self.fc_dst) if hasattr(self, "fc_src") else (self.fc, self.fc)
                x_src = fc_src(source)
                (score_src,) = head_scores(x_src, self.attn_l)
                (score_dst,) = head_scores(fc_dst(destination), self.attn_r)
            # The recipe counts dimensions between the nodes and the heads as more heads.
            out, weight = recipes.gat(
                adjacency,
                score_dst.flatten(1),
                score_src.flatten(1),
                x_src.flatten(1),
                self.leaky_relu.negative_slope,
                p=p,
                drop=self.attn_drop,
                factor=None if edge_weight is None else edge_factor(adjacency, x_src, edge_weight),
                wants_weights=get_attention,
            )
            out = out.reshape(adjacency.num_dst, *x_src.shape[1:-1], *heads)
            out = out if self.bias is None else add_bias(out, self.bias.view(heads))
        if self.res_fc is not None:
            out = out + self.res_fc(destination).unflatten(-1, heads)
        if self.activation:
            out = self.activation(out)
        if weight is None or not get_attention:
            return out
        return out, weight.to(source.dtype).reshape(adjacency.num_values, *score_src.shape[1:], 1)

    def _as_one_node(self, adjacency: Adjacency, source: Tensor, p: float) -> Tensor | None:
        """Computes the layer as one autograd node; None if several operators have to compute the layer."""
        vectors, heads = (self.attn_l, self.attn_r), self._num_heads
        options = {"heads": heads, "scale": self.leaky_relu.negative_slope, "dropout_p": p}
        out = attention_layer(ADDITIVE, adjacency, source, (self.fc,), vectors, self.bias, **options)
        return None if out is None else out.view(-1, heads, self._out_feats)
