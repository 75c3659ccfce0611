"""GraphSAGE."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.typing import OptPairTensor, Size

from fastsparse_core.fallback import Reason
from fastsparse_core.tiling import NeighbourSum
from fastsparse_pyg.graph import EdgesLike, values_of
from fastsparse_pyg.nn.base import ANY_REDUCTION, FastConv, raise_untiled, size_for_pyg, sum_and_root


class FastSAGEConv(FastConv, SAGEConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.SAGEConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot \mathrm{aggr}_{j \in
        \mathcal{N}(i)} \mathbf{x}_j

    From "Inductive Representation Learning on Large Graphs" (https://arxiv.org/abs/1706.02216). Arguments,
    parameters, ``state_dict`` and results are the same as PyG's. Kernels support ``aggr`` sum, add, mean, max
    and min. In other cases (lists, LSTM, custom modules, message hooks, explain mode), PyG's own code runs on
    the same parameters. If several neighbours have the maximum or minimum, the first of them gets the
    gradient.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite; edges :math:`(2,
          |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or :class:`~fastsparse_core.Adjacency`;
          float64, float32, float16, bfloat16
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastSAGEConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastSAGEConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _aggregations = ANY_REDUCTION

    def forward(self, x: Tensor | OptPairTensor, edge_index: EdgesLike, size: Size = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), or (source features (N_src, F_src), destination features
                (N_dst, F_dst) or None); float64, float32, float16 or bfloat16.
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            size: (number of sources, number of destinations), for edge lists.

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair.

        Raises:
            ValueError: sizes, dtypes or devices do not fit together.
            IndexError: an index refers to a node that does not exist.
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
        if state["project"] and "lin" in modules:
            x_src = modules["lin"](x_src).relu()
        lin_root = modules["lin_r"] if state["root_weight"] else None
        out = self._neighbours_and_root(adj, x_src, x_dst, value, modules["lin_l"], lin_root)
        return F.normalize(out, p=2.0, dim=-1) if state["normalize"] else out

    def _neighbour_sum(self, x: Tensor, edges: Any) -> NeighbourSum:
        """Computes the sum over neighbours for one tile of :func:`fastsparse_pyg.tiled`."""
        if self.project and hasattr(self, "lin"):
            raise_untiled(self, "project=True")
        return self._plain_sum(x, edges)._replace(reads_own=self.root_weight)

    def _after_sum(self, sums: Tensor, x: Tensor) -> Tensor:
        """Computes the layer's result from the sums of a tile of :func:`fastsparse_pyg.tiled`."""
        out = sum_and_root(sums, x, self.lin_l, self.lin_r if self.root_weight else None)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
