"""Graph transformer layer."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.fused.graph_transformer import NORMS, GraphTransformer
from fastsparse_core.traced import TracedAdjacency, site_of
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike, resolve

# Sparse matrices are converted outside of the compiled code, with a graph break.
_resolve_uncompiled = torch.compiler.disable(resolve)


class GraphTransformerLayer(GraphTransformer):
    r"""Transformer layer whose attention follows the edges of a graph.

    .. math::
        \hat{\mathbf{h}}_i &= \mathrm{Norm}\Big(\mathbf{h}_i + \mathbf{O} \Vert_k \sum_{j \in
        \mathcal{N}(i)} \mathrm{softmax}_j\Big(\frac{\mathbf{Q}^k \mathbf{h}_i \cdot \mathbf{K}^k
        \mathbf{h}_j}{\sqrt{d_k}}\Big) \mathbf{V}^k \mathbf{h}_j\Big) \\
        \mathbf{h}_i' &= \mathrm{Norm}\big(\hat{\mathbf{h}}_i + \mathbf{W}_2\, \mathrm{ReLU}(\mathbf{W}_1
        \hat{\mathbf{h}}_i)\big)

    From Dwivedi and Bresson, "A Generalization of Transformer Networks to Graphs"
    (https://arxiv.org/abs/2012.09699), section 2.2, equations 4 to 8. One operator
    (:func:`fastsparse_core.attention`) computes scores, softmax, dropout and sum, and stores nothing per
    edge. The authors' code clamps the scores against overflow. This layer does not need to, because its
    softmax subtracts the maximum of each row. No self loops are added; nodes without incoming edges get an
    attention of 0. Parameters have the names of ``fastsparse_dgl.GraphTransformerLayer``.

    Args:
        in_channels: width of the input; equal to `out_channels` with `residual`.
        out_channels: width of the output, a multiple of `heads`.
        heads: number of heads, of width ``out_channels / heads`` each.
        dropout: dropout probability after the attention and inside the feed-forward part.
        attention_dropout: dropout probability of the attention weights.
        norm: ``"batch"``, ``"layer"`` or None.
        residual: whether each of the two parts adds its input.
        bias: whether queries, keys and values have biases.
        flow: ``"source_to_target"`` or ``"target_to_source"``, for edge lists.
        edge_dim: number of features per edge; None: edges have no features. A linear map of the features,
            without a bias, is added to keys and values, as in PyG's TransformerConv.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or :math:`((|\mathcal{V_s}|, F_{in}),
          (|\mathcal{V_t}|, F_{in}))` if bipartite, float64, float32, float16 or bfloat16; edges :math:`(2,
          |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or :class:`~fastsparse_core.Adjacency`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`

    Raises:
        ValueError: widths or options do not fit.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import GraphTransformerLayer
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> GraphTransformerLayer(8, 8, heads=2)(x, edge_index).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        norm: str | None = "batch",
        residual: bool = True,
        bias: bool = False,
        flow: str = "source_to_target",
        edge_dim: int | None = None,
    ) -> None:
        if heads < 1 or out_channels % heads:
            raise ValueError(
                f"out_channels: expected a multiple of heads={heads}, which must be at least 1, "
                f"got {out_channels}"
            )
        if residual and in_channels != out_channels:
            raise ValueError(
                f"in_channels: expected {out_channels} like out_channels, got {in_channels}; "
                "residual=False allows other widths"
            )
        if not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout: expected a probability in [0, 1), got {attention_dropout}")
        if norm not in NORMS:
            raise ValueError(f'norm: expected "batch", "layer" or None, got {norm!r}')
        if flow not in ("source_to_target", "target_to_source"):
            raise ValueError(f"flow: expected 'source_to_target' or 'target_to_source', got {flow!r}")
        options = (dropout, attention_dropout, norm, residual, bias, edge_dim)
        super().__init__(in_channels, out_channels, heads, *options)
        self.flow = flow

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: EdgesLike,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), or (source features (N_src, F_in), destination features
                (N_dst, F_in)).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            edge_attr: features of the edges (number of edges, edge_dim), in the order of the edges, or of the
                values of an Adjacency; required with ``edge_dim``.

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair.

        Raises:
            ValueError: sizes, dtypes or devices do not fit together.
            IndexError: an index refers to a node that does not exist.
        """
        if (edge_attr is None) != (self.edge is None):
            raise ValueError(
                f"edge_attr: expected {'None' if self.edge is None else 'a tensor (E, edge_dim)'}, because "
                f"the layer was made with{'out' if self.edge is None else ''} edge_dim, got "
                f"{type(edge_attr).__name__}"
            )
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        num_src, num_dst = x_src.size(0), x_dst.size(0)
        if torch.compiler.is_compiling() and fallback.of_traced_edges(edge_index) is None:
            reverse, site = self.flow == "target_to_source", site_of(edge_index)
            adj: Adjacency = TracedAdjacency(edge_index, num_dst, num_src, reverse, site=site)
        else:
            to_structure = resolve if isinstance(edge_index, Adjacency) else _resolve_uncompiled
            adj = to_structure(edge_index, num_src, num_dst, x_src.device, flow=self.flow)
        return self.transform(adj, x_dst, x_src, edge_attr)
