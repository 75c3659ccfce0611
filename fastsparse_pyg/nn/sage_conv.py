"""GraphSAGE."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptPairTensor, Size

from fastsparse_core import Adjacency
from fastsparse_core.fused.aggregate_linear import aggregate_linear, can_aggregate_linear
from fastsparse_core.fused.joint_linear import is_plain_linear
from fastsparse_pyg.nn.base import REDUCE, WITHOUT_ADJACENCY, FastConv


class FastSAGEConv(FastConv, SAGEConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.SAGEConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot \mathrm{aggr}_{j \in
        \mathcal{N}(i)} \mathbf{x}_j

    after "Inductive Representation Learning on Large Graphs" (https://arxiv.org/abs/1706.02216). Arguments,
    parameters, ``state_dict`` and results are the original's. Kernels serve ``aggr`` sum, add, mean, max and
    min; anything else (lists, LSTM, custom modules, message hooks, explain mode) runs PyG's own code on the
    same parameters. Where several neighbours share the maximum, its gradient goes to the first of them.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite; edges :math:`(2,
          |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or :class:`~fastsparse_core.Adjacency`;
          float64, float32, float16, bfloat16
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`
    """

    _any_reduction = True

    def forward(self, x: Tensor | OptPairTensor, edge_index: Tensor | Adjacency, size: Size = None) -> Tensor:
        """Computes the layer.

        Args:
            x: node features, or (source features, destination features or None).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            size: (sources, destinations), for edge lists.

        Raises:
            ValueError: sizes, dtypes or devices do not fit together.
            IndexError: an index points to no node.
        """
        if size is None:
            out = self._repeated(x, edge_index)
            if out is not None:
                return out
        pair = (x, x) if isinstance(x, Tensor) else x
        reason = self._why_original_pair(pair, edge_index)
        if reason and not (
            reason == WITHOUT_ADJACENCY and self._traced_edges(pair, edge_index, size) is not None
        ):
            return self._original_forward_pair(reason, x, edge_index, size)
        x_src, x_dst = pair
        adj, value = self._resolve_or_trace(pair, edge_index, size)
        if self.project and hasattr(self, "lin"):
            x_src = self.lin(x_src).relu()

        out = self._neighbours_and_root(
            adj, x_src, x_dst, value, self.lin_l, self.lin_r if self.root_weight else None
        )
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _repeated(self, x: Any, edge_index: Any) -> Tensor | None:
        """The layer of a graph that was there in the call before; None: as elsewhere."""
        state = self.__dict__
        modules = state["_modules"]
        reduce = REDUCE.get(type(modules["aggr_module"]))
        if not state["root_weight"] or state["project"] or (reduce != "sum" and reduce != "mean"):
            return None
        adj = self._known(x, edge_index)
        if adj is None:
            return None
        lin, root = modules["lin_l"], modules["lin_r"]
        if x.shape[1] > state["out_channels"] or not (
            is_plain_linear(lin, Linear) and is_plain_linear(root, Linear)
        ):
            return None
        parameters, root_parameters = lin._parameters, root._parameters
        if root_parameters["bias"] is not None:
            return None
        weights = (parameters["weight"], parameters["bias"], root_parameters["weight"])
        if not can_aggregate_linear(adj, x, x, *weights):
            return None
        out = aggregate_linear(adj, x, *weights, reduce)
        return F.normalize(out, p=2.0, dim=-1) if state["normalize"] else out
