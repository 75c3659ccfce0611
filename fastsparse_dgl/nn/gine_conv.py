"""Graph isomorphism network with edge features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency, gine_aggregate
from fastsparse_core.fused.edge_messages import can_pass_messages, gine_layer
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import AggregationMixin


class FastGINEConv(AggregationMixin, dgl.nn.pytorch.GINEConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GINEConv`.

    From Hu et al., `Strategies for Pre-training Graph Neural Networks <https://arxiv.org/abs/1905.12265>`_:

    .. math::
        \mathbf{h}_i' = f_\Theta\Big((1 + \epsilon)\, \mathbf{h}_i + \sum_{j \in \mathcal{N}(i)}
        \mathrm{ReLU}(\mathbf{h}_j + \mathbf{e}_{ji})\Big)

    Parameters, defaults, state_dict and repr are the same as DGL's. One operator,
    :func:`fastsparse_core.gine_aggregate`, computes messages and sum. Unlike in DGL, ``graph`` may be an
    :class:`fastsparse_core.Adjacency` and features may be on a GPU while the graph is on the CPU.

    Args:
        apply_func: :math:`f_\Theta`, applied to the sum; None: identity.
        init_eps: initial :math:`\epsilon`.
        learn_eps: whether :math:`\epsilon` is a parameter.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastGINEConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastGINEConv(torch.nn.Linear(8, 4))(graph, torch.randn(3, 8), torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    _kernel = "gine_aggregate"

    def forward(
        self, graph: GraphLike, node_feat: Tensor | tuple[Tensor, Tensor], edge_feat: Tensor
    ) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            node_feat: (N, ...), float64, float32, float16 or bfloat16, or a pair of source and
                destination features of one width.
            edge_feat: (E, ...), in the dtype of ``node_feat``, in the order of the edge ids, broadcastable
                against one node's features.

        Returns:
            (number of destinations, ...), after ``apply_func``.

        Raises:
            DGLError: sizes or devices do not fit.
        """
        adjacency, source, given = self._structure(graph, node_feat, "node_feat")
        destination = self._destination(graph, adjacency, source, given)
        eps = self._buffers.get("eps")
        if (
            destination is source
            and type(edge_feat) is Tensor
            and edge_feat.shape[1:] == source.shape[1:]
            and is_plain_eager(source)
            and can_pass_messages(adjacency, source, edge_feat, self.eps)
        ):
            out = gine_layer(adjacency, source, edge_feat, None, None, eps)
            if eps is None:  # then `eps` is a parameter, not a buffer
                out = torch.addcmul(out, 1 + self.eps, source)
        else:
            out = torch.addcmul(_sum_of_messages(adjacency, source, edge_feat), 1 + self.eps, destination)
        return out if self.apply_func is None else self.apply_func(out)


def _sum_of_messages(adjacency: Adjacency, source: Tensor, edge_feat: Any) -> Tensor:
    """Computes GINE's sum of messages, (num_dst, ...); node and edge features broadcast as in DGL."""
    if not isinstance(edge_feat, Tensor):
        raise DGLError(f"edge_feat: expected a tensor, got {type(edge_feat).__name__}")
    if edge_feat.dim() == 0 or edge_feat.size(0) != adjacency.num_values:
        raise DGLError(
            f"edge_feat: expected one row per edge ({adjacency.num_values} rows), "
            f"got shape {tuple(edge_feat.shape)}"
        )
    if edge_feat.device != source.device:
        raise DGLError(
            f"edge_feat: expected device {source.device} like the features, got {edge_feat.device}"
        )
    # If the numbers of dimensions differ, DGL's sum would broadcast edges against features.
    if edge_feat.dim() != source.dim():
        raise DGLError(
            f"edge_feat: expected {source.dim()} dimensions like the node features, "
            f"got shape {tuple(edge_feat.shape)}"
        )
    try:
        shape = torch.broadcast_shapes(source.shape[1:], edge_feat.shape[1:])
    except RuntimeError as error:
        raise DGLError(
            f"edge_feat: expected a shape that broadcasts against features of shape {tuple(source.shape)}, "
            f"got {tuple(edge_feat.shape)}"
        ) from error
    dtype = torch.promote_types(source.dtype, edge_feat.dtype)
    x = source.to(dtype).expand(-1, *shape).reshape(source.size(0), shape.numel())
    edges = edge_feat.to(dtype).expand(-1, *shape).reshape(edge_feat.size(0), shape.numel())
    return gine_aggregate(adjacency, x, edges).reshape(adjacency.num_dst, *shape)
