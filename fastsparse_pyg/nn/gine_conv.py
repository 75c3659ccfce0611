"""Graph isomorphism network with edge features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GINEConv
from torch_geometric.typing import OptPairTensor, OptTensor, Size

from fastsparse_core import Adjacency, gine_aggregate
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.edge_messages import can_pass_messages, gine_layer
from fastsparse_core.fused.joint_linear import first_linear
from fastsparse_core.ops._autocast import autocast_dtype, is_any_autocast_enabled
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._edge_messages_launch import MOST_FEATURES
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import is_plain_linear, size_for_pyg


class FastGINEConv(AttentionConv, GINEConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GINEConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot \mathbf{x}_i + \sum_{j \in
        \mathcal{N}(i)} \mathrm{ReLU} ( \mathbf{x}_j + \mathbf{e}_{j,i} ) \right)

    From "Strategies for Pre-training Graph Neural Networks" (https://arxiv.org/abs/1905.12265). Arguments,
    parameters, ``state_dict`` and results are the same as PyG's. One operator
    (:func:`fastsparse_core.gine_aggregate`) computes messages and sum. With ``edge_dim`` up to 32, the
    operator includes the linear map of the edge features, so neither the forward nor the backward pass stores
    a row of :math:`F_{in}` numbers per edge.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{in}), (|\mathcal{V_t}|, F_{in}))` if bipartite, float64, float32,
          float16 or bfloat16; edges :math:`(2, |\mathcal{E}|)`, EdgeIndex or
          :class:`~fastsparse_core.Adjacency`; edge features :math:`(|\mathcal{E}|, D)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGINEConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGINEConv(torch.nn.Linear(8, 4), edge_dim=5)(x, edge_index, torch.randn(3, 5)).shape
        torch.Size([3, 4])
    """

    _kernel = "gine_aggregate"

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: EdgesLike,
        edge_attr: OptTensor = None,
        size: Size = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), or (source features (N_src, F_in), destination features (N_dst, F_in)
                or None).
            edge_index: edges, or an Adjacency whose rows are the destinations.
            edge_attr: features of the edges (E, edge_dim), or (E, F_in) in a layer without ``edge_dim``.
            size: (number of sources, number of destinations).

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair; F_out is the width of the
            result of ``nn``.

        Raises:
            ValueError: sizes, dtypes or devices do not fit.
            IndexError: an index refers to a node that does not exist.
        """
        adj = self._structure(x, edge_index, size, False, edge_attr)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, edge_attr, size_for_pyg(edge_index, size))
        assert isinstance(edge_attr, Tensor)
        if isinstance(x, Tensor):
            out = self._combined(adj, x, edge_attr)
            if out is not None:
                return out
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        if not self._fits_operator(x_src, edge_attr):
            size = size_for_pyg(edge_index, size)
            return self._original_forward(fallback.TWO_DTYPES, x, edge_index, edge_attr, size)
        features = self._edge_features(adj, edge_attr)
        lin: Any = self.lin
        weight = bias = None
        if lin is not None and is_plain_linear(lin) and features.size(1) <= MOST_FEATURES:
            weight, bias = lin.weight, lin.bias
        elif lin is not None:
            self._warn_unfused(
                f"the fused kernel needs a plain Linear without hooks and up to {MOST_FEATURES} features. "
                "Remove the hooks, or project the features to fewer first"
            )
            features = lin(features)
        features = features.to(x_src.dtype)
        eps = None
        is_constant = not self.eps.requires_grad and self.eps.dtype == x_src.dtype
        if x_dst is x_src and is_constant and not (adj.is_partitioned or is_any_autocast_enabled()):
            eps, x_dst = self.eps, None
        out = gine_aggregate(adj, x_src, features, edge_weight=weight, edge_bias=bias, eps=eps)
        if x_dst is not None:
            out = torch.addcmul(out, 1 + self.eps, x_dst)
        return self.nn(out)

    def _combined(self, adj: Adjacency, x: Tensor, edge_attr: Tensor) -> Tensor | None:
        """Computes the layer as one autograd node; None if the caller has to make more checks first."""
        state = self.__dict__
        lin, eps = state["_modules"].get("lin"), state["_buffers"].get("eps")
        learned = self._own_parameters("eps")[0] if eps is None else None
        if type(edge_attr) is not Tensor or (eps is not None and eps.numel() != 1) or not is_plain_eager(x):
            return None
        weight = bias = None
        width, num_features = x.shape[1], edge_attr.shape[1]
        if lin is not None:
            if not is_plain_linear(lin):
                return None
            weight, bias = lin._parameters["weight"], lin._parameters["bias"]
            if weight.shape != (width, num_features) or num_features > MOST_FEATURES:
                return None
        elif num_features != width:
            return None
        network = state["_modules"].get("nn") or self.nn  # avoids the slow nn.Module.__getattr__
        first, rest = first_linear(network) if learned is None else (None, ())
        after = after_bias = None
        if first is not None:
            after, after_bias = first._parameters["weight"], first._parameters["bias"]
            if after.shape[1] != width:
                return None
        under = autocast_dtype(x) if is_any_autocast_enabled() else None
        if under is not None and lin is None and x.dtype.itemsize == 2 and edge_attr.dtype is torch.float32:
            x = x.float()  # PyG's messages promote 16-bit features of an earlier layer to float32
        if under is not None and (
            # In these cases PyG sums in float32, or adds features of two dtypes.
            (first is None and x.dtype is not torch.float32)
            or (lin is None and edge_attr.dtype is not x.dtype)
        ):
            return None
        others = (weight, bias, learned if eps is None else eps, after, after_bias)
        if not can_pass_messages(adj, x, edge_attr, *others, under=under):
            return None
        out = gine_layer(adj, x, edge_attr, weight, bias, eps, after, after_bias, under)
        if learned is not None:
            out = torch.addcmul(out, 1 + learned, x)
        if first is None:
            out = network(out)
        for module in rest:
            out = module(out)
        return out

    def _reason(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_attr: Any = None, *of_call: Any
    ) -> Reason | None:
        if not isinstance(edge_attr, Tensor) or edge_attr.dim() != 2:
            return fallback.EDGES_NOT_A_MATRIX
        reason = super()._reason(x_src, x_dst, edge_index, edge_attr)
        if reason is not None:
            return reason
        lin = self.__dict__["_modules"].get("lin")
        if lin is None:
            if edge_attr.size(1) != x_src.size(1):
                return Reason("edge features of another width than the nodes'", fallback.EDGE_DIM)
            return None
        weight = lin._parameters.get("weight")  # lin.weight goes through the slow nn.Module.__getattr__
        if (lin.weight if weight is None else weight).size(0) != x_src.size(1):
            return Reason("a linear map of the edges to another width than the nodes'", fallback.EDGE_DIM)
        return None

    def _name_argument(self, error: Exception, x: Any, edge_index: Any, *args: Any) -> None:
        if args and args[0] is None:
            raise type(error)(
                "edge_attr: expected features of shape (num_edges, num_features), got None; pass them, or "
                "use FastGINConv, which takes none"
            ) from error
        super()._name_argument(error, x, edge_index, *args)

    def _fits_operator(self, x: Tensor, edge_attr: Tensor) -> bool:
        """True if the operator adds features in the same dtype as PyG's layer."""
        lin, dtype = self.__dict__["_modules"].get("lin"), x.dtype
        if lin is None:
            return edge_attr.dtype is dtype
        if is_any_autocast_enabled() and autocast_dtype(x) is not None:
            # PyG adds edge features in the autocast dtype to node features. The sum has the wider dtype.
            return dtype in (torch.float32, autocast_dtype(x))
        return bool(dtype == edge_attr.dtype == lin.weight.dtype)
