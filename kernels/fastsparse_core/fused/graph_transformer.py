"""The graph transformer layer, without the checks of arguments and the graphs of the plugins."""

from __future__ import annotations

from torch import Tensor, nn

from fastsparse_core.fused.joint_linear import joint_linear
from fastsparse_core.ops.attention import attention
from fastsparse_core.structure.adjacency import Adjacency

#: Name of a normalisation -> its module.
NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, None: nn.Identity}


class GraphTransformer(nn.Module):
    """Attention over the edges and a feed-forward network, each with residual and normalisation.

    Dwivedi and Bresson, "A Generalization of Transformer Networks to Graphs" (arXiv:2012.09699), section 2.2,
    equations 4 to 8. The plugins' layers check and document the arguments.
    """

    def __init__(
        self,
        in_width: int,
        out_width: int,
        heads: int,
        dropout: float,
        attention_dropout: float,
        norm: str | None,
        residual: bool,
        bias: bool,
        edge_width: int | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = attention_dropout
        self.residual = residual
        self.query = nn.Linear(in_width, out_width, bias=bias)
        self.key = nn.Linear(in_width, out_width, bias=bias)
        self.value = nn.Linear(in_width, out_width, bias=bias)
        self.out = nn.Linear(out_width, out_width)
        self.dropout = nn.Dropout(dropout)
        self.norm1 = NORMS[norm](out_width)
        self.feed_forward = nn.Sequential(
            nn.Linear(out_width, 2 * out_width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * out_width, out_width),
        )
        self.norm2 = NORMS[norm](out_width)
        self.edge = None if edge_width is None else nn.Linear(edge_width, out_width, bias=False)

    def reset_parameters(self) -> None:
        """Initializes all parameters again."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.BatchNorm1d, nn.LayerNorm)):
                module.reset_parameters()

    def transform(
        self, adj: Adjacency, x_dst: Tensor, x_src: Tensor, edge_attr: Tensor | None = None
    ) -> Tensor:
        """Computes the new features of the destinations of a structure.

        Args:
            adj: structure (num_dst, num_src).
            x_dst: (num_dst, in_width), float64, float32, float16 or bfloat16.
            x_src: (num_src, in_width), in the dtype of ``x_dst``.
            edge_attr: (num_values, edge_width), in the dtype of ``x_dst``, if the layer has an
                ``edge_width``. A linear map of it is added to keys and values.

        Returns:
            (num_dst, out_width).
        """
        if x_src is x_dst:
            key, value, query = joint_linear(x_src, (self.key, self.value, self.query))
        else:
            (key, value), query = joint_linear(x_src, (self.key, self.value)), self.query(x_dst)
        dropout = self.attention_dropout if self.training else 0.0
        weight = None if self.edge is None or edge_attr is None else self.edge.weight
        out = attention(
            adj,
            query,
            key,
            value,
            dropout_p=dropout,
            heads=self.heads,
            edge_attr=None if weight is None else edge_attr,
            edge_weight=weight,
        )
        out = self.out(self.dropout(out))
        out = self.norm1(x_dst + out if self.residual else out)
        forward = self.feed_forward(out)
        return self.norm2(out + forward if self.residual else forward)
