"""Graph attention with edge features: DGL's EdgeGATConv and EGATConv."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import Adjacency, attention, edge_softmax, scatter, spmm
from fastsparse_core.fused.attention_layer import ADDITIVE, attention_layer
from fastsparse_core.fused.bias import add_bias
from fastsparse_core.fused.edge_states import attend_by_edges
from fastsparse_core.fused.head_scores import edge_scores, head_scores, map_to_scores
from fastsparse_core.message_plans.ends import EdgeEnd, gather
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._eager import is_plain_linear
from fastsparse_core.ops._edge_rows import lift
from fastsparse_core.structure.incidence import edge_ends
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import (
    AggregationMixin,
    check_edges,
    dropout_p,
    edge_factor,
)


def _on_edges(adjacency: Adjacency, x_src: Tensor, x_dst: Tensor) -> Tensor:
    """Computes ``x_src_j + x_dst_i`` for every edge, (E, D), in the order of the edge ids."""
    edges = edge_ends(adjacency)
    ends = EdgeEnd(adjacency, edges, 0, False), EdgeEnd(adjacency, edges, 1, True)
    if x_src.requires_grad == x_dst.requires_grad:
        of_src, of_dst = lift((x_src, x_dst), ends)
    else:
        of_src, of_dst = gather(x_src, ends[0]), gather(x_dst, ends[1])
    return of_src + of_dst


class FastEdgeGATConv(AggregationMixin, dgl.nn.pytorch.EdgeGATConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.EdgeGATConv`.

    From Monninger et al., `SCENE <https://arxiv.org/abs/2301.03512>`_, for each head:

    .. math::
        \mathbf{v}_i' = \mathbf{\Theta}_s \mathbf{v}_i + \sum_{j \in \mathcal{N}(i)} \alpha_{ij}
        (\mathbf{\Theta}_n \mathbf{v}_j + \mathbf{\Theta}_e \mathbf{e}_{ij}), \qquad
        \alpha_{ij} = \mathrm{softmax}_j\big(\mathrm{LeakyReLU}(\mathbf{a}^\top [\mathbf{\Theta}_n
        \mathbf{v}_i \Vert \mathbf{\Theta}_n \mathbf{v}_j \Vert \mathbf{\Theta}_e \mathbf{e}_{ij}])\big)

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. The layer stores one number per
    edge and head, the score, and no row of ``num_heads * out_feats`` numbers per edge. One operator,
    :func:`fastsparse_core.attention`, computes softmax, dropout and both sums. With ``get_attention``, the
    layer stores the attention of every edge and the projected edge features, as DGL does. Unlike in DGL,
    ``graph`` may be an :class:`fastsparse_core.Adjacency` and features may be on a GPU while the graph is on
    the CPU. Features must be matrices. (DGL supports more dimensions only with edge features of the same
    dimensions.)

    Args:
        in_feats: width of the input, or a pair of widths (source, destination).
        edge_feats: width of the edges' features.
        out_feats: width of each head's output.
        num_heads: number of heads.
        feat_drop: dropout of the input.
        attn_drop: dropout of the attention.
        negative_slope: slope of the LeakyReLU for negative numbers.
        residual: whether the input is added to the result, through a linear layer.
        activation: applied to the result.
        allow_zero_in_degree: whether nodes without incoming edges are accepted; their attention sums to 0.
        bias: whether the layer has a bias.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastEdgeGATConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastEdgeGATConv(8, 5, 4, num_heads=2)(graph, torch.randn(3, 8), torch.randn(3, 5)).shape
        torch.Size([3, 2, 4])
    """

    _kernel = "fused attention"

    def forward(
        self,
        graph: GraphLike,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_feat: Tensor,
        get_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, in_feats), float64, float32, float16 or bfloat16, or a pair of source and
                destination features.
            edge_feat: (E, edge_feats), in the dtype of ``feat``, in the order of the edge ids.
            get_attention: whether to return the attention too.

        Returns:
            (number of destinations, num_heads, out_feats); with ``get_attention`` a pair of that and the
            attention (E, num_heads, 1) in the order of the edge ids, after dropout.

        Raises:
            DGLError: sizes or devices do not fit, or a node has no incoming edge and
                ``allow_zero_in_degree`` is False.
        """
        adjacency, source, given = self._structure(graph, feat)
        if source.dim() != 2:
            raise DGLError(f"feat: expected a matrix, (N, in_feats), got shape {tuple(source.shape)}")
        edge_feat = check_edges("edge_feat", edge_feat, adjacency, self._edge_feats)

        heads = (self._num_heads, self._out_feats)
        source = self.feat_drop(source)
        p = dropout_p(self.attn_drop)
        if given is None:
            destination = self._destination(graph, adjacency, source, None)
            if destination is source and not get_attention and p < 1:
                whole = self._as_one_node(adjacency, source, edge_feat, p)
                if whole is not None:
                    return self._finished(whole, destination)
            x_src = self.fc(source)
            score_src, score_dst = head_scores(x_src, self.attn_l, self.attn_r)
            score_dst = self._destination(graph, adjacency, score_dst, None)
        else:
            destination = self._destination(graph, adjacency, source, self.feat_drop(given))
            fc_src, fc_dst = (self.fc_src, self.fc_dst) if hasattr(self, "fc_src") else (self.fc, self.fc)
            x_src = fc_src(source)
            (score_src,) = head_scores(x_src, self.attn_l)
            (score_dst,) = head_scores(fc_dst(destination), self.attn_r)
        weight = self.fc_edge.weight
        score_edge = edge_scores(edge_feat, weight, self.attn_edge)
        score = F.leaky_relu(
            _on_edges(adjacency, score_src, score_dst) + score_edge, self.leaky_relu.negative_slope
        )

        alpha = None
        if get_attention or p == 1:
            alpha = self.attn_drop(edge_softmax(adjacency, score))
            _, target = edge_ends(adjacency)
            messages = self.fc_edge(edge_feat).unflatten(1, heads) * alpha[:, :, None]
            total = scatter(messages.flatten(1).to(x_src.dtype), target, adjacency.num_dst)
            out = spmm(adjacency, x_src, alpha) + total
        else:
            # With queries of 0, the scores are only the bias.
            query = x_src.new_zeros(adjacency.num_dst, x_src.size(1))
            edges: Any = {"edge_attr": edge_feat, "edge_weight": weight}
            out = attention(adjacency, query, x_src, x_src, 1.0, score, p, heads=heads[0], **edges)
        out = out.unflatten(1, heads)

        if self.bias is not None:
            out = add_bias(out, self.bias.view(heads))
        out = self._finished(out, destination)
        return (out, alpha[:, :, None].to(source.dtype)) if get_attention and alpha is not None else out

    def _finished(self, out: Tensor, destination: Tensor) -> Tensor:
        """Adds the residual and applies the activation."""
        if self.res_fc is not None:
            out = out + self.res_fc(destination).unflatten(1, (self._num_heads, self._out_feats))
        return self.activation(out) if self.activation else out

    def _as_one_node(
        self, adjacency: Adjacency, source: Tensor, edge_feat: Tensor, p: float
    ) -> Tensor | None:
        """Computes the layer as one autograd node; None if several operators have to compute the layer."""
        lin = self.fc_edge
        if edge_feat.is_cuda or is_any_autocast_enabled() or not is_plain_linear(lin):
            return None
        edges = (edge_feat, lin, map_to_scores(lin.weight, self.attn_edge))
        vectors, heads = (self.attn_l, self.attn_r), self._num_heads
        options = {"heads": heads, "scale": self.leaky_relu.negative_slope, "dropout_p": p, "edges": edges}
        out = attention_layer(ADDITIVE, adjacency, source, (self.fc,), vectors, self.bias, **options)
        return None if out is None else out.view(-1, heads, self._out_feats)


class FastEGATConv(AggregationMixin, dgl.nn.pytorch.EGATConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.EGATConv`.

    From Kamiński et al., `Rossmann-Toolbox <https://doi.org/10.1093/bib/bbab371>`_, for each head:

    .. math::
        \mathbf{f}_{ij}' = \mathrm{LeakyReLU}\big(\mathbf{A} [\mathbf{h}_j \Vert \mathbf{f}_{ij} \Vert
        \mathbf{h}_i]\big), \qquad \mathbf{h}_i' = \sum_{j \in \mathcal{N}(i)} \mathrm{softmax}_j(
        \mathbf{a}^\top \mathbf{f}_{ij}') \, \mathbf{W} \mathbf{h}_j

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. The new edge features
    :math:`\mathbf{f}'` are stored, because they are a result. Softmax and sum, by
    :func:`fastsparse_core.edge_softmax` and :func:`fastsparse_core.spmm`, store one number per edge and head.
    On the CPU, everything after the linear maps is one node of autograd's graph.
    Unlike in DGL, ``graph`` may be an :class:`fastsparse_core.Adjacency` or a block with one feature tensor,
    and features may be on a GPU while the graph is on the CPU.

    Args:
        in_node_feats: width of the nodes' features, or a pair of widths (source, destination).
        in_edge_feats: width of the edges' features.
        out_node_feats: width of each head's result for nodes.
        out_edge_feats: width of each head's result for edges.
        num_heads: number of heads.
        bias: whether new edge features have a bias.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastEGATConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> nodes, edges = FastEGATConv(8, 5, 4, 6, num_heads=2)(graph, torch.randn(3, 8), torch.randn(3, 5))
        >>> nodes.shape, edges.shape
        (torch.Size([3, 2, 4]), torch.Size([3, 2, 6]))
    """

    _kernel = "fused attention"

    def forward(
        self,
        graph: GraphLike,
        nfeats: Tensor | tuple[Tensor, Tensor],
        efeats: Tensor,
        edge_weight: Tensor | None = None,
        get_attention: bool = False,
    ) -> tuple[Tensor, ...]:
        """Computes the new node and edge features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            nfeats: (N, in_node_feats), float64, float32, float16 or bfloat16, or a pair of source and
                destination features.
            efeats: (E, in_edge_feats), in the dtype of ``nfeats``, in the order of the edge ids.
            edge_weight: (E,), in the order of the edge ids, or one number for all; multiplies the attention.
            get_attention: whether to return the attention too.

        Returns:
            Nodes (number of destinations, num_heads, out_node_feats), edges (E, num_heads, out_edge_feats),
            and with ``get_attention`` the attention (E, num_heads, 1), after ``edge_weight``.

        Raises:
            DGLError: sizes or devices do not fit, or a node has no incoming edge.
        """
        adjacency, source, given = self._structure(graph, nfeats, "nfeats")
        efeats = check_edges("efeats", efeats, adjacency, self.fc_fij.in_features)
        self._check_in_degree(adjacency)
        destination = self._destination(graph, adjacency, source, given)

        of_src, of_dst, of_edge = self.fc_ni(source), self.fc_nj(destination), self.fc_fij(efeats)
        if self.bias is not None:
            of_edge = of_edge + self.bias
        values, heads = self.fc_node_src(source), self._num_heads
        if edge_weight is None and not get_attention:
            whole = attend_by_edges(adjacency, of_src, of_dst, of_edge, self.attn, values)
            if whole is not None:
                return whole[1].unflatten(1, (heads, self._out_node_feats)), whole[0]
        total = _on_edges(adjacency, of_src, of_dst) + of_edge
        edges = F.leaky_relu(total).unflatten(1, (heads, self._out_edge_feats))
        alpha = edge_softmax(adjacency, (edges * self.attn).sum(-1))
        if edge_weight is not None:
            alpha = alpha * edge_factor(adjacency, alpha, edge_weight)
        nodes = spmm(adjacency, values, alpha).unflatten(1, (heads, self._out_node_feats))
        return (nodes, edges, alpha[:, :, None]) if get_attention else (nodes, edges)
