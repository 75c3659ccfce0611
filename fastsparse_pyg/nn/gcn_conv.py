"""Graph convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptTensor

from fastsparse_core import Adjacency, recorded
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.aggregate_transform import graph_convolution, one
from fastsparse_core.fused.bias import linear
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import is_plain_linear, may_be_one_node
from fastsparse_core.ops._registration import fits_one_operator
from fastsparse_core.tiling import NeighbourSum, is_free_of_loops
from fastsparse_pyg.graph import BY_KERNEL, EdgesLike, edges_for_loops, gcn_factors, resolve
from fastsparse_pyg.nn.base import known, raise_untiled
from fastsparse_pyg.nn.propagation import Cached, PropagatingConv, Propagation, message_dtype

#: Methods of an Adjacency that return the factors of destinations and sources.
_NORMS = ("inv_sqrt_degree", "inv_sqrt_degree")


class FastGCNConv(PropagatingConv, GCNConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GCNConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2} \mathbf{X}
        \mathbf{\Theta}

    From "Semi-Supervised Classification with Graph Convolutional Networks"
    (https://arxiv.org/abs/1609.02907). Arguments, parameters, ``state_dict`` and results are the same as
    PyG's. Without edge weights, the kernel normalises by scaling rows, so no value per edge is stored. The
    weight matrix is applied before or after the aggregation, so that the narrower features are gathered. Both
    orders give the same result up to rounding. Under autocast, the aggregation and its result use the
    autocast dtype. With message hooks, in explain mode and for aggregations other than the sum, PyG's own
    code runs.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or :math:`(B, |\mathcal{V}|, F_{in})`,
          float64, float32, float16 or bfloat16; edges :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed
          sparse matrix :math:`(|\mathcal{V}|, |\mathcal{V}|)` or :class:`~fastsparse_core.Adjacency`; edge
          weights :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(B, |\mathcal{V}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGCNConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGCNConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _aggregations = (SumAggregation,)
    _caches_matrix = True
    _cached_edge_index = Cached()
    _cached_adj_t = Cached()

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in) or (B, N, F_in), float64, float32, float16 or bfloat16.
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations. The option
                ``add_self_loops`` adds self loops to all of them, except to an Adjacency that was built with
                self loops.
            edge_weight: floating (E,), for edges and Adjacency. A sparse matrix has its own values.

        Returns:
            Node features (N, F_out) or (B, N, F_out).

        Raises:
            ValueError: sizes, dtypes or devices do not fit together, or `x` is a tuple.
            IndexError: an index refers to a node that does not exist.
            NotImplementedError: a sparse matrix in CSC layout with ``normalize=True``.
        """
        if isinstance(x, (tuple, list)):
            raise ValueError(
                f"x: expected one tensor of node features, got a {type(x).__name__}: "
                f"'{type(self).__name__}' does not support bipartite graphs; use for example FastSAGEConv"
            )
        found: Propagation | Reason | None = None
        if edge_weight is None and (type(edge_index) is Tensor or isinstance(edge_index, Adjacency)):
            found = self._with_loops_by_kernel(x, edge_index)
        if found is None:
            found = self._propagation(x, edge_index, edge_weight)
        if isinstance(found, Reason):
            return self._original_forward(found, x, edge_index, edge_weight)
        adj, value, scale_dst, scale_src, adds_loops = found

        state = self.__dict__
        lin, parameters = state["_modules"]["lin"], state["_parameters"]
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 (asked only then)
        out_channels, width = state["out_channels"], x.shape[-1]
        # Gather the narrower features. If both are equally wide, aggregate first if `x` needs no gradient:
        # the backward pass then needs no aggregation.
        aggregate_first = width < out_channels or (width == out_channels and not x.requires_grad)
        plain = is_plain_linear(lin, Linear) and lin._parameters["bias"] is None
        if plain and value is None and may_be_one_node(x):
            weight = lin._parameters.get("weight")
            out = graph_convolution(
                adj,
                x,
                weight,
                bias,
                True,
                aggregate_first,
                scale_dst,
                scale_src,
                add_loops=adds_loops,
                norms=("", "") if scale_dst is None and not adds_loops else _NORMS,
            )
            if out is not None:
                return out
        if adds_loops and not isinstance(edge_index, Adjacency):  # only `graph_convolution` can add loops
            with_loops = self._structure((x, x), edge_index, None, True)
            assert isinstance(with_loops, Adjacency)
            adj, value, scale_dst, scale_src, adds_loops = self._normalised(with_loops, x, edge_index, None)
        scales = (scale_dst, scale_src)
        dtype = x.dtype if value is None or value.dtype is x.dtype else message_dtype(x, value)
        if aggregate_first and plain and x.layout is torch.strided and dtype == x.dtype:
            out = self._aggregate_neighbours(adj, x, value, scales=scales)
            return F.linear(_plus_own(out, x, *scales) if adds_loops else out, lin.weight, bias)
        x = lin(x)
        if value is not None and dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            x = x.to(dtype)
        out = self._aggregate_neighbours(adj, x, value, scales=scales, bias=bias)
        return _plus_own(out, x, *scales) if adds_loops else out

    def _neighbour_sum(self, x: Tensor, edges: Any) -> NeighbourSum:
        """Computes the sum over neighbours for one tile of :func:`fastsparse_pyg.tiled`."""
        state = self.__dict__
        found: Propagation | Reason | None = None
        part: Any = edges if isinstance(edges, Adjacency) and edges.is_partitioned else None
        if part is None and type(edges) in (Tensor, Adjacency):
            found = self._with_loops_by_kernel(x, edges)
        elif part is not None and state["normalize"] and state["add_self_loops"] and is_free_of_loops(part):
            scale, adds = gcn_factors(part.rows, x.dtype, True)
            found = self._reason(x, x, part) or Propagation(part, None, scale, scale, adds)
        if found is None:
            found = self._propagation(x, edges, None)
        if isinstance(found, Reason) or found.value is not None:
            raise_untiled(self, found.message if isinstance(found, Reason) else "weights of edges")
        loop = one(x.device, accumulation_dtype(x.dtype)) if found.adds_loops else None
        return NeighbourSum(found.adj, found.scale_dst, found.scale_src, loop, reads_own=False)

    def _after_sum(self, sums: Tensor, x: Tensor) -> Tensor:
        """Computes the layer's result from the sums of a tile of :func:`fastsparse_pyg.tiled`."""
        if is_plain_linear(self.lin, Linear):
            return linear(sums, self.lin.weight, self.bias)
        out: Tensor = self.lin(sums)
        return out if self.bias is None else out + self.bias

    def _with_loops_by_kernel(self, x: Any, edge_index: Tensor | Adjacency) -> Propagation | Reason | None:
        """Returns GCN's matrix without self loops if the kernel can add them; otherwise None."""
        state = self.__dict__
        if not (state["normalize"] and state["add_self_loops"]) or state["cached"]:
            return None
        reason = self._reason(x, x, edge_index)
        if reason is not None:
            return reason
        is_traced = torch.compiler.is_compiling()
        if is_traced and (isinstance(edge_index, Adjacency) or not fits_one_operator(x)):
            return None
        if isinstance(edge_index, Adjacency):
            return self._of_adjacency(x, edge_index)
        if (
            x.dim() != 2
            or not (x.layout is edge_index.layout is torch.strided)
            or edge_index.device != x.device
        ):
            return None
        if is_traced:
            traced = self._structure((x, x), edge_index, None, BY_KERNEL)
            return traced if isinstance(traced, Reason) else Propagation(traced, None, adds_loops=True)
        num_nodes, flow = x.shape[0], state["flow"]
        adj = known(edge_index, (num_nodes, num_nodes, flow, BY_KERNEL))
        if adj is None:  # `prepare` or another layer may have converted the edges with their loops
            adj = known(edge_index, (num_nodes, num_nodes, flow, True))
        if adj is None:
            if recorded.current() is not None:  # the host does not know if a padded batch has self loops
                return None
            adj = edges_for_loops(edge_index, num_nodes, flow)
        scale, adds = gcn_factors(adj, x.dtype, True)
        return Propagation(adj, None, scale, scale, adds)

    def _of_adjacency(self, x: Tensor, adj: Adjacency) -> Propagation | None:
        """Does the same as `_with_loops_by_kernel` for an Adjacency; None if it contains self loops."""
        if adj.is_partitioned or adj.is_padded or x.dim() != 2 or x.layout is not torch.strided:
            return None
        if adj.has_inserted_loops or not adj.is_free_of_loops():
            return None
        resolve(adj, x.shape[0], x.shape[0], x.device)
        scale, adds = gcn_factors(adj, x.dtype, True)
        return Propagation(adj, None, scale, scale, adds)


def _plus_own(out: Tensor, x: Tensor, scale_dst: Tensor | None, scale_src: Tensor | None) -> Tensor:
    """Adds the terms of the self loops, because a second structure with the loops would double the memory."""
    assert scale_dst is not None
    assert scale_src is not None
    return torch.addcmul(out, x.to(out.dtype), (scale_dst * scale_src).to(out.dtype).unsqueeze(1))
