"""Graph isomorphism network."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsparse_core.fused.aggregate_transform import aggregate_and_self
from fastsparse_core.fused.joint_linear import may_be_cast
from fastsparse_core.ops._eager import may_be_one_node
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import GraphLike
from fastsparse_dgl.nn.base import AggregationMixin


class FastGINConv(AggregationMixin, dgl.nn.pytorch.GINConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GINConv`.

    From Xu et al., `How Powerful are Graph Neural Networks? <https://arxiv.org/abs/1810.00826>`_:

    .. math::
        \mathbf{h}_i' = f_\Theta\big((1 + \epsilon)\, \mathbf{h}_i + \text{aggregate}_{j \in \mathcal{N}(i)}
        (e_{ji} \mathbf{h}_j)\big)

    Parameters, defaults, state_dict and repr are the same as DGL's. Unlike in DGL, ``graph`` may be an
    :class:`fastsparse_core.Adjacency` and features may be on a GPU while the graph is on the CPU.

    Args:
        apply_func: :math:`f_\Theta`, applied to the sum; None: identity.
        aggregator_type: ``"sum"``, ``"max"`` or ``"mean"``.
        init_eps: initial :math:`\epsilon`.
        learn_eps: whether :math:`\epsilon` is a parameter.
        activation: applied to the result.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastGINConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastGINConv(torch.nn.Linear(8, 4))(graph, torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    def forward(
        self,
        graph: GraphLike,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, ...), float64, float32, float16 or bfloat16, or a pair of source and destination
                features of one width.
            edge_weight: numbers (E,) or (E, 1), or broadcastable against one node's features, in the order of
                the edge ids.

        Returns:
            (number of destinations, ...), after ``apply_func``.

        Raises:
            DGLError: sizes or devices do not fit.
        """
        adjacency, source, given = self._structure(graph, feat)
        destination = self._destination(graph, adjacency, source, given)
        out = None
        if (
            destination is source
            and edge_weight is None
            and self._aggregator_type == "sum"
            and may_be_one_node(source)
            and may_be_cast(self.apply_func)
        ):
            out = aggregate_and_self(adjacency, source, self.eps)
        if out is None:
            neighbour = self._aggregate(adjacency, source, edge_weight, self._aggregator_type)
            out = torch.addcmul(neighbour, destination, 1 + self.eps)
        if self.apply_func is not None:
            out = self.apply_func(out)
        return out if self.activation is None else self.activation(out)
