"""Graph transformer."""

from __future__ import annotations

from torch import Tensor

from fastsparse_core.fused.graph_transformer import NORMS, GraphTransformer
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import AggregationMixin


class GraphTransformerLayer(AggregationMixin, GraphTransformer):
    r"""Transformer layer whose attention follows the edges of a graph.

    From Dwivedi and Bresson, `A Generalization of Transformer Networks to Graphs
    <https://arxiv.org/abs/2012.09699>`_, section 2.2, equations 4 to 8:

    .. math::
        \hat{\mathbf{h}}_i &= \mathrm{Norm}\Big(\mathbf{h}_i + \mathbf{O} \Vert_k \sum_{j \in
        \mathcal{N}(i)} \mathrm{softmax}_j\Big(\frac{\mathbf{Q}^k \mathbf{h}_i \cdot \mathbf{K}^k
        \mathbf{h}_j}{\sqrt{d_k}}\Big) \mathbf{V}^k \mathbf{h}_j\Big) \\
        \mathbf{h}_i' &= \mathrm{Norm}\big(\hat{\mathbf{h}}_i + \mathbf{W}_2\, \mathrm{ReLU}(\mathbf{W}_1
        \hat{\mathbf{h}}_i)\big)

    Scores, softmax, dropout and sum are one operator, :func:`fastsparse_core.attention`. The authors' code
    clamps the scores against overflow. This layer does not, because its softmax subtracts the maximum of each
    row. Nodes without incoming edges are accepted; their attention is 0.

    Args:
        in_feats: width of the input; equal to ``out_feats`` with ``residual``.
        out_feats: width of the output, a multiple of ``num_heads``.
        num_heads: number of heads, of width ``out_feats / num_heads`` each.
        dropout: dropout probability of the attention's result, and inside the feed-forward part.
        attn_drop: dropout of the attention.
        norm: ``"batch"``, ``"layer"`` or None.
        residual: whether each of the two parts adds its input.
        bias: whether queries, keys and values have biases.
        edge_feats: number of features per edge; None: edges have no features. A linear map of the features,
            without a bias, is added to keys and values, as in PyG's TransformerConv.

    Raises:
        DGLError: widths or options do not fit.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import GraphTransformerLayer
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> GraphTransformerLayer(8, 8, 2)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    _kernel = "fused attention"

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        num_heads: int,
        dropout: float = 0.0,
        attn_drop: float = 0.0,
        norm: str | None = "batch",
        residual: bool = True,
        bias: bool = False,
        edge_feats: int | None = None,
    ) -> None:
        if num_heads < 1 or out_feats % num_heads:
            raise DGLError(
                f"out_feats: expected a multiple of num_heads={num_heads}, which must be at least 1, "
                f"got {out_feats}"
            )
        if residual and in_feats != out_feats:
            raise DGLError(
                f"in_feats: expected {out_feats} like out_feats, got {in_feats}; "
                "residual=False allows other widths"
            )
        if not 0 <= attn_drop < 1:
            raise DGLError(f"attn_drop: expected a probability in [0, 1), got {attn_drop}")
        if norm not in NORMS:
            raise DGLError(f'norm: expected "batch", "layer" or None, got {norm!r}')
        options = (dropout, attn_drop, norm, residual, bias, edge_feats)
        super().__init__(in_feats, out_feats, num_heads, *options)

    def forward(
        self, graph: GraphLike, feat: Tensor | tuple[Tensor, Tensor], edge_feat: Tensor | None = None
    ) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type (homogeneous, block, bipartite or batched), or Adjacency.
            feat: (N, in_feats), float64, float32, float16 or bfloat16, or a pair of source and
                destination features.
            edge_feat: (E, edge_feats), in the dtype of ``feat``, in the order of the edge ids; required with
                ``edge_feats``.

        Returns:
            (number of destinations, out_feats).

        Raises:
            DGLError: sizes do not fit.
        """
        if (edge_feat is None) != (self.edge is None):
            raise DGLError(
                f"edge_feat: expected {'None' if self.edge is None else 'a tensor (E, edge_feats)'}, because "
                f"the layer was made with{'out' if self.edge is None else ''} edge_feats, got "
                f"{type(edge_feat).__name__}"
            )
        adjacency, source, given = self._structure(graph, feat)
        destination = self._destination(graph, adjacency, source, given)
        return self.transform(adjacency, destination, source, edge_feat)
