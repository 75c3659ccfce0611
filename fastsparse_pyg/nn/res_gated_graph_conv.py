"""Residual gated graph convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import ResGatedGraphConv
from torch_geometric.typing import OptTensor, PairTensor

from fastsparse_core import Adjacency, gated_aggregate
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.bias import add_bias
from fastsparse_core.fused.edge_messages import can_pass_messages, gated_layer
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.ops._autocast import autocast_dtype, is_any_autocast_enabled
from fastsparse_core.ops._eager import has_plain_call, is_plain_eager
from fastsparse_core.ops._edge_messages_launch import MOST_FEATURES
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import is_plain_linear, project


class FastResGatedGraphConv(AttentionConv, ResGatedGraphConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.ResGatedGraphConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \eta_{i,j} \odot
        \mathbf{W}_2 \mathbf{x}_j, \qquad \eta_{i,j} = \sigma(\mathbf{W}_3 \mathbf{x}_i + \mathbf{W}_4
        \mathbf{x}_j)

    From "Residual Gated Graph ConvNets" (https://arxiv.org/abs/1711.07553). Arguments, parameters,
    ``state_dict`` and results are the same as PyG's. One operator (:func:`fastsparse_core.gated_aggregate`)
    computes gates, messages and sum, and stores nothing per edge. With ``edge_dim`` up to 32, the linear maps
    are split into parts for nodes and for edges, so no row per edge is stored. PyG's own code
    runs on the same parameters if ``edge_dim`` is larger, or if ``act`` is not the sigmoid.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, float64, float32, float16
          or bfloat16; edges :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or
          :class:`~fastsparse_core.Adjacency`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastResGatedGraphConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastResGatedGraphConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _kernel = "gated_aggregate"
    _needs_destinations = True

    def forward(self, x: Tensor | PairTensor, edge_index: EdgesLike, edge_attr: OptTensor = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), or (source features (N_src, F_src), destination features
                (N_dst, F_dst)).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            edge_attr: features of the edges (E, edge_dim), for edges and Adjacency; required with
                ``edge_dim``.

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair.

        Raises:
            ValueError: sizes, dtypes or devices do not fit.
            IndexError: an index refers to a node that does not exist.
        """
        adj = self._structure(x, edge_index, None, False, edge_attr)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, edge_attr)
        if isinstance(x, Tensor):
            out = self._joined(adj, x, edge_attr)
            if out is not None:
                return out
        pair = (x, x) if isinstance(x, Tensor) else x
        if edge_attr is not None and edge_attr.dtype != pair[0].dtype:
            return self._original_forward(fallback.TWO_DTYPES, x, edge_index, edge_attr)
        if edge_attr is None:
            key, query, value = self._projected(pair)
            out = gated_aggregate(adj, key, query, value)
        else:
            features = self._edge_features(adj, edge_attr)
            key, query, value, of_gate, of_value = self._taken_apart(pair, features.size(1))
            edges = {"gate_weight": of_gate, "value_weight": of_value}
            out = gated_aggregate(adj, key, query, value, edge_attr=features.to(key.dtype), **edges)
        if self.root_weight:
            out = out + self.lin_skip(pair[1])
        if self.bias is None:
            return out
        return add_bias(out, self.bias) if out.dtype == self.bias.dtype else out + self.bias

    def _joined(self, adj: Adjacency, x: Tensor, edge_attr: Tensor | None) -> Tensor | None:
        """Computes the layer as one autograd node; None if the caller has to make more checks first."""
        state = self.__dict__
        modules, features = state["_modules"], 0 if edge_attr is None else edge_attr.shape[1]
        if not is_plain_eager(x) or (edge_attr is not None and type(edge_attr) is not Tensor):
            return None
        weights: Any = ()
        biases: Any = ()
        shape = (state["out_channels"], x.shape[1] + features)
        for name in ("lin_query", "lin_value", "lin_key"):
            lin = modules[name]
            if edge_attr is None and not is_plain_linear(lin):  # `_reason` checks this with edge features
                return None
            weight, bias = lin._parameters["weight"], lin._parameters["bias"]
            if bias is None or weight.shape != shape:
                return None
            weights, biases = (*weights, weight), (*biases, bias)
        root, (bias,) = None, self._own_parameters("bias")
        if state["root_weight"]:
            lin = modules["lin_skip"]
            if not is_plain_linear(lin) or lin._parameters["bias"] is not None:
                return None
            root = lin._parameters["weight"]
        under = autocast_dtype(x) if is_any_autocast_enabled() else None
        if not can_pass_messages(adj, x, edge_attr, *weights, *biases, root, bias, under=under):
            return None
        return gated_layer(adj, x, edge_attr, weights, biases, root, bias, under)

    def _projected(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the keys of the destinations, and the queries and values of the sources."""
        if x[0] is x[1]:
            query, value, key = project(x[0], self.lin_query, self.lin_value, self.lin_key)
        else:
            query, value = project(x[0], self.lin_query, self.lin_value)
            key = self.lin_key(x[1])
        return key, query, value

    def _taken_apart(self, x: tuple[Tensor, Tensor], edge_width: int) -> tuple[Tensor, ...]:
        """Splits the linear maps: returns keys, queries and values of the nodes, and two matrices for edges.

        The matrices are the columns of the maps for edge features: one for the gates, one for the values.
        """
        maps = (self.lin_query, self.lin_value, self.lin_key)
        of_nodes, of_edges = [], []
        for lin in maps:
            nodes, edges = lin.weight.split([lin.weight.size(1) - edge_width, edge_width], dim=1)
            of_nodes.append(nodes)
            of_edges.append(edges)

        def product(x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
            bias = torch.cat([lin.bias for lin in maps[first:last]])
            out = linear_before_sum(x, torch.cat(of_nodes[first:last]), bias, last - first, self.out_channels)
            return out.split(self.out_channels, dim=-1)

        if x[0] is x[1]:
            query, value, key = product(x[0], 0, 3)
        else:
            query, value = product(x[0], 0, 2)
            key = linear_before_sum(x[1], of_nodes[2], self.lin_key.bias)
        # The maps of both ends of an edge apply to its features, so the gate uses the sum of the matrices.
        return key, query, value, of_edges[0] + of_edges[2], of_edges[1]

    def _reason(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_attr: Any = None, *of_call: Any
    ) -> Reason | None:
        state = self.__dict__
        modules, edge_dim = state["_modules"], state["edge_dim"]
        act = modules.get("act", state.get("act"))
        if not _is_sigmoid(act):
            return Reason(f"act={act!r} has no kernel", "Use act=torch.nn.Sigmoid()")
        if (edge_attr is None) != (edge_dim is None):
            return fallback.EDGE_FEATURES_OR_NOT
        if edge_attr is not None:
            if not isinstance(edge_attr, Tensor) or edge_attr.dim() != 2:
                return fallback.EDGES_NOT_A_MATRIX
            if edge_attr.size(1) > MOST_FEATURES:
                return Reason(
                    f"{edge_attr.size(1)} features of an edge, more than {MOST_FEATURES}",
                    f"Map them to {MOST_FEATURES} before the layer",
                )
            if not (
                is_plain_linear(modules["lin_key"])
                and is_plain_linear(modules["lin_query"])
                and is_plain_linear(modules["lin_value"])
            ):
                return Reason(
                    "edge features with linear maps that were replaced or have hooks",
                    "Keep the linear maps that ResGatedGraphConv makes, without hooks",
                )
            if edge_attr.size(1) != edge_dim:
                return Reason("edge features of another width than edge_dim", fallback.EDGE_DIM)
        return super()._reason(x_src, x_dst, edge_index, edge_attr)


def _is_sigmoid(act: Any) -> bool:
    """True if a gating function is the sigmoid."""
    if type(act) is torch.nn.Sigmoid:
        return has_plain_call(act)
    return act in (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.special.expit)
