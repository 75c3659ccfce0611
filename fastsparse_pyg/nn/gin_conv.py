"""Graph isomorphism network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import GINConv
from torch_geometric.typing import OptPairTensor, Size

from fastsparse_core import spmm
from fastsparse_core.fused.aggregate_transform import aggregate_and_self
from fastsparse_core.fused.joint_linear import may_be_cast
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.base import FastConv, checked_pair


class FastGINConv(FastConv, GINConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GINConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot \mathbf{x}_i + \sum_{j \in
        \mathcal{N}(i)} \mathbf{x}_j \right)

    after "How Powerful are Graph Neural Networks?" (https://arxiv.org/abs/1810.00826). Arguments, parameters,
    ``state_dict`` and results are the original's. Kernels serve ``aggr`` sum, add, mean, max and min;
    anything else runs PyG's own code on the same parameters.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{in}), (|\mathcal{V_t}|, F_{in}))` if bipartite; edges :math:`(2,
          |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or :class:`~fastsparse_core.Adjacency`;
          float64, float32, float16, bfloat16
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`
    """

    _any_reduction = True

    def forward(self, x: Tensor | OptPairTensor, edge_index: EdgesLike, size: Size = None) -> Tensor:
        """Computes the layer; arguments and errors as in :meth:`FastSAGEConv.forward`."""
        if size is None:
            adj = self._plain_graph(x, edge_index)
            if adj is not None:
                state = self.__dict__
                modules, reduce = state["_modules"], self._reduce()
                # Not self.eps and self.nn, which go through nn.Module.__getattr__.
                eps, network = state["_buffers"].get("eps"), modules.get("nn")
                eps, network = self.eps if eps is None else eps, self.nn if network is None else network
                whole = None
                if reduce == "sum" and may_be_cast(network):
                    whole = aggregate_and_self(adj, x, eps)
                if whole is None:
                    whole = torch.addcmul(spmm(adj, x, None, reduce), 1 + eps, x)
                return network(whole)
        pair = (x, x) if isinstance(x, Tensor) else checked_pair(x)
        reason = self._why_original_pair_or_trace(pair, edge_index, size)
        if reason:
            return self._original_forward_pair(reason, x, edge_index, size)
        x_src, x_dst = pair
        graph, value = self._resolve_or_trace(pair, edge_index, size)
        out = self._aggregate_neighbours(graph, x_src, value)
        if x_dst is not None:
            out = torch.addcmul(out, 1 + self.eps, x_dst)
        return self.nn(out)
