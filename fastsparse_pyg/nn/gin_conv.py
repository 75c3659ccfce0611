"""Graph isomorphism network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GINConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import OptPairTensor, Size

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.aggregate_transform import aggregate_and_self
from fastsparse_core.fused.joint_linear import may_be_cast
from fastsparse_core.ops._eager import may_be_one_node
from fastsparse_core.tiling import NeighbourSum
from fastsparse_pyg.graph import EdgesLike, values_of
from fastsparse_pyg.nn.base import ANY_REDUCTION, FastConv, size_for_pyg


class FastGINConv(FastConv, GINConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GINConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot \mathbf{x}_i + \sum_{j \in
        \mathcal{N}(i)} \mathbf{x}_j \right)

    From "How Powerful are Graph Neural Networks?" (https://arxiv.org/abs/1810.00826). Arguments, parameters,
    ``state_dict`` and results are the same as PyG's. Kernels support ``aggr`` sum, add, mean, max and min.
    For other aggregations, PyG's own code runs on the same parameters.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{in}), (|\mathcal{V_t}|, F_{in}))` if bipartite; edges :math:`(2,
          |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or :class:`~fastsparse_core.Adjacency`;
          float64, float32, float16, bfloat16
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGINConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGINConv(torch.nn.Linear(8, 4))(x, edge_index).shape
        torch.Size([3, 4])
    """

    _aggregations = ANY_REDUCTION

    def forward(self, x: Tensor | OptPairTensor, edge_index: EdgesLike, size: Size = None) -> Tensor:
        """Computes the new node features (N, F_out), or (number of destinations, F_out) for a pair.

        Arguments and errors are the same as in :meth:`FastSAGEConv.forward`.
        """
        adj = self._structure(x, edge_index, size)
        if isinstance(adj, Reason):
            return self._original_forward(adj, x, edge_index, size_for_pyg(edge_index, size))
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        # PyG multiplies by the values of a torch.sparse matrix, but ignores the values of a SparseTensor.
        value = (
            None if getattr(edge_index, "layout", torch.strided) is torch.strided else values_of(edge_index)
        )
        state = self.__dict__
        modules = state["_modules"]
        # Attribute access (self.eps, self.nn) would call the slow nn.Module.__getattr__.
        eps, network = state["_buffers"].get("eps"), modules.get("nn")
        eps, network = self.eps if eps is None else eps, self.nn if network is None else network
        if (
            x_dst is x_src
            and value is None
            and x_src.dim() == 2
            and state["node_dim"] in (-2, 0)
            and isinstance(adj, Adjacency)
            and type(modules["aggr_module"]) is SumAggregation
            and may_be_cast(network)
            and may_be_one_node(x_src)
        ):
            whole = aggregate_and_self(adj, x_src, eps)
            if whole is not None:
                return network(whole)
        out = self._aggregate_neighbours(adj, x_src, value)
        if x_dst is not None:
            out = torch.addcmul(out, 1 + eps, x_dst)
        return network(out)

    def _neighbour_sum(self, x: Tensor, edges: Any) -> NeighbourSum:
        """Computes the sum over neighbours for one tile of :func:`fastsparse_pyg.tiled`."""
        return self._plain_sum(x, edges)

    def _after_sum(self, sums: Tensor, x: Tensor) -> Tensor:
        """Computes the layer's result from the sums of a tile of :func:`fastsparse_pyg.tiled`."""
        out: Tensor = self.nn(torch.addcmul(sums, 1 + self.eps, x))
        return out
