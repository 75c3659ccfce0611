"""Gated graph convolution that updates node features and edge features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastsparse_core import gated_edges
from fastsparse_core.fused.joint_linear import joint_linear
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import AggregationMixin, check_edges


class _Missing(nn.Module):
    """Stands in for GatedGCNConv in versions of DGL that do not have it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"FastGatedGCNConv: expected DGL 2.0 or newer, which has GatedGCNConv, got {dgl.__version__}; "
            "install DGL 2.1.0"
        )


_GatedGCNConv: Any = getattr(dgl.nn.pytorch, "GatedGCNConv", _Missing)


class FastGatedGCNConv(AggregationMixin, _GatedGCNConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GatedGCNConv`, which exists since DGL 2.0.

    From Dwivedi et al., `Benchmarking Graph Neural Networks <https://arxiv.org/abs/2003.00982>`_:

    .. math::
        \mathbf{e}_{ij}' = \mathbf{E} \mathbf{h}_i + \mathbf{D} \mathbf{h}_j + \mathbf{C} \mathbf{e}_{ij},
        \qquad \mathbf{h}_i' = \mathbf{A} \mathbf{h}_i + \frac{\sum_{j \in \mathcal{N}(i)}
        \sigma(\mathbf{e}_{ij}') \odot \mathbf{B} \mathbf{h}_j}{\sum_{j \in \mathcal{N}(i)}
        \sigma(\mathbf{e}_{ij}') + \varepsilon}

    with :math:`\varepsilon = 10^{-6}`. Batch normalisation, activation, residual connection and dropout
    follow, for nodes and for edges. Parameters, defaults, state_dict, repr and results are the same as DGL's.
    The new edge features are stored, because they are a result; gates and messages are not
    (:func:`fastsparse_core.gated_edges`). Unlike in DGL, ``graph`` may be an
    :class:`fastsparse_core.Adjacency`, and features may be on a GPU while the graph is on the CPU.

    Args:
        input_feats: width of the nodes' features.
        edge_feats: width of the edges' features.
        output_feats: width of both results.
        dropout: dropout probability of both results.
        batch_norm: whether both are normalised over the batch.
        residual: whether to add the input, if all three widths are equal.
        activation: applied to both results; None: no activation.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastGatedGCNConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> nodes, edges = FastGatedGCNConv(8, 5, 4)(graph, torch.randn(3, 8), torch.randn(3, 5))
        >>> nodes.shape, edges.shape
        (torch.Size([3, 4]), torch.Size([3, 4]))
    """

    _kernel = "gated_edges"

    def forward(self, graph: GraphLike, feat: Tensor, edge_feat: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the new node and edge features.

        Args:
            graph: DGLGraph with one node and edge type, or a square Adjacency.
            feat: (N, input_feats), float64, float32, float16 or bfloat16.
            edge_feat: (E, edge_feats), in the dtype of ``feat``, in the order of the edge ids.

        Returns:
            Nodes (N, output_feats) and edges (E, output_feats).

        Raises:
            DGLError: sizes or devices do not fit.
        """
        adjacency, source, given = self._structure(graph, feat)
        if given is not None or source.dim() != 2:
            raise DGLError(
                f"feat: expected one tensor of shape (N, {self.A.in_features}), "
                f"got {'a pair' if given is not None else f'shape {tuple(source.shape)}'}"
            )
        if adjacency.num_src != adjacency.num_dst:
            raise DGLError(
                f"graph: expected one set of nodes, got {adjacency.num_src} sources and "
                f"{adjacency.num_dst} destinations"
            )
        edge_feat = check_edges("edge_feat", edge_feat, adjacency, self.C.in_features)

        own, value, query, key = joint_linear(source, (self.A, self.B, self.D, self.E))
        total, gates, edges = gated_edges(adjacency, key, query, value, self.C(edge_feat))
        nodes = own + total / (gates + 1e-6)

        if self.batch_norm:
            nodes, edges = self.bn_node(nodes), self.bn_edge(edges)
        if self.activation:
            nodes, edges = self.activation(nodes), self.activation(edges)
        if self.residual:
            nodes, edges = source + nodes, edge_feat + edges
        return self.dropout(nodes), self.dropout(edges)
