"""Layers that multiply by the graph's matrix once or several times, with PyG's attributes and results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import OptPairTensor, OptTensor, Size

from fastsparse_core import Adjacency, sddmm
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.aggregate_transform import weighted_linear
from fastsparse_core.fused.joint_linear import add_linear
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.ops._autocast import is_any_autocast_enabled
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._eager import is_plain_linear as is_plain_linear_of
from fastsparse_core.tiling import NeighbourSum
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike, for_pyg, is_sparse_matrix
from fastsparse_pyg.nn.base import is_plain_linear, size_for_pyg, sum_and_root
from fastsparse_pyg.nn.propagation import Cached, PropagatingConv, Propagation, message_dtype, mixed


class FastGraphConv(PropagatingConv, pyg.GraphConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GraphConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \sum_{j \in \mathcal{N}(i)} e_{j,i}
        \mathbf{x}_j

    From "Weisfeiler and Leman Go Neural" (https://arxiv.org/abs/1810.02244). Kernels support ``aggr`` sum,
    add, mean, max and min; for other aggregations, PyG's own code runs.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGraphConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGraphConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _bipartite = True

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: EdgesLike,
        edge_weight: OptTensor = None,
        size: Size = None,
    ) -> Tensor:
        """Computes the new node features; errors as in :meth:`FastSAGEConv.forward`.

        Args:
            x: node features (N, F_in), float64, float32, float16 or bfloat16, or (source features,
                destination features or None).
            edge_index: edges, or a sparse matrix or Adjacency whose rows are the destinations.
            edge_weight: floating (E,), for edges and Adjacency. A sparse matrix has its own values.
            size: (number of sources, number of destinations), for edge lists.

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair.
        """
        adj = self._structure(x, edge_index, size)
        if not isinstance(adj, Adjacency):
            size = size_for_pyg(edge_index, size)
            return self._original_forward(adj, x, edge_index, edge_weight, size)
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        modules, value = self.__dict__["_modules"], edge_weight
        both = modules["lin_rel"], modules["lin_root"]
        if edge_weight is not None and x_src is x_dst and _is_plain_weight(edge_weight, x_src, adj):
            out = self._weighted(adj, x_src, edge_weight, *both)
            if out is not None:
                return out
        if (
            edge_weight is not None
            or type(edge_index) is not Tensor
            or edge_index.layout is not torch.strided
        ):
            value = self._value(adj, x_src, edge_index, edge_weight)
        if value is not None and not torch.is_autocast_enabled(x_src.device.type):
            x_src = x_src.to(message_dtype(x_src, value))
        return self._neighbours_and_root(adj, x_src, x_dst, value, *both)

    def _neighbour_sum(self, x: Tensor, edges: Any) -> NeighbourSum:
        """Computes the sum over neighbours for one tile of :func:`fastsparse_pyg.tiled`."""
        return self._plain_sum(x, edges)

    def _after_sum(self, sums: Tensor, x: Tensor) -> Tensor:
        """Computes the layer's result from the sums of a tile of :func:`fastsparse_pyg.tiled`."""
        return sum_and_root(sums, x, self.lin_rel, self.lin_root)

    def _weighted(self, adj: Adjacency, x: Tensor, value: Tensor, lin: Any, lin_root: Any) -> Tensor | None:
        """Computes the layer as one autograd node; None if several operators have to compute the layer."""
        reduce = self._reduce()
        if (
            reduce not in ("sum", "mean")
            or not (is_plain_linear(lin) and is_plain_linear(lin_root))
            or lin_root._parameters["bias"] is not None
        ):
            return None
        of, of_root = lin._parameters, lin_root._parameters
        return weighted_linear(
            adj,
            x,
            value,
            of["weight"],
            of["bias"],
            of_root["weight"],
            reduce,
            transform_first=x.shape[1] > self.out_channels,
        )


def _is_plain_weight(weight: Any, x: Tensor, adj: Adjacency) -> bool:
    """True if edge weights can be used in a product without conversion."""
    return (
        type(weight) is Tensor
        and x.dim() == 2
        and is_plain_eager(x)
        and not adj.has_inserted_loops
        and weight.dtype is x.dtype
        and weight.shape == (adj.num_values,)
        and weight.device == x.device
    )


class _Powers(PropagatingConv):
    """Base of SG and SSG: a linear layer and a polynomial of the matrix, in the order that gathers less."""

    def _powers(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None, *, narrow: bool) -> Tensor:
        """Computes the new node features; ``narrow`` allows the linear layer to be applied first."""
        matrix = self._propagation(x, edge_index, edge_weight)
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        lin = self.lin
        if not (narrow and x.size(-1) > self.out_channels and self._is_linear() and is_plain_linear(lin)):
            return lin(self._kept(matrix, x) if self.cached else self._polynomial(matrix, x))
        out = self._polynomial(matrix, linear_before_sum(x, lin.weight))
        return out if lin.bias is None else out + lin.bias.to(out.dtype)

    def _polynomial(self, matrix: Propagation, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _kept(self, matrix: Propagation, x: Tensor) -> Tensor:
        """Returns the cached polynomial. It is computed without autocast, so all later calls can use it."""
        with torch.autocast(x.device.type, enabled=False):
            return self._polynomial(matrix, x)


class FastSGConv(_Powers, pyg.SGConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.SGConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \left( \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}
        \right)^K \mathbf{X} \mathbf{\Theta}

    From "Simplifying Graph Convolutional Networks" (https://arxiv.org/abs/1902.07153). If nothing is cached
    and the output is narrower than the input, the linear layer comes first.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastSGConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastSGConv(8, 4, K=2)(x, edge_index).shape
        torch.Size([3, 4])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        if self._cached_x is not None:
            return self.lin(self._cached_x.detach())
        return self._powers(x, edge_index, edge_weight, narrow=not self.cached)

    def _polynomial(self, matrix: Propagation, x: Tensor) -> Tensor:
        *_, x = x, *self._steps(matrix, x, self.K)
        if self.cached and self.K:
            self._cached_x = x
        return x


class FastSSGConv(_Powers, pyg.SSGConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.SSGConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \left( \alpha \mathbf{X} + \frac{1 - \alpha}{K} \sum_{k=1}^K \left(
        \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2} \right)^k \mathbf{X} \right)
        \mathbf{\Theta}

    From "Simple Spectral Graph Convolution" (https://openreview.net/forum?id=CYO5T-YjWZV).

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastSSGConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastSSGConv(8, 4, alpha=0.1, K=2)(x, edge_index).shape
        torch.Size([3, 4])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        if self._cached_h is not None:
            return self.lin(self._cached_h.detach())
        return self._powers(x, edge_index, edge_weight, narrow=not self.cached)

    def _polynomial(self, matrix: Propagation, x: Tensor) -> Tensor:
        out = x * self.alpha
        for power in self._steps(matrix, x, self.K):
            out = torch.add(out, power, alpha=(1 - self.alpha) / self.K)
        if self.cached:
            self._cached_h = out
        return out


class FastAPPNP(PropagatingConv, pyg.APPNP):
    r"""PyG's :class:`~torch_geometric.nn.conv.APPNP` on FastSparse kernels.

    .. math::
        \mathbf{X}^{(k)} = (1 - \alpha) \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}
        \mathbf{X}^{(k-1)} + \alpha \mathbf{X}^{(0)}

    From "Predict then Propagate" (https://arxiv.org/abs/1810.05997). Dropout of edges draws a different mask
    than PyG's layer.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastAPPNP
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastAPPNP(K=10, alpha=0.1)(x, edge_index).shape
        torch.Size([3, 8])
    """

    _caches_matrix = True
    _cached_edge_index = Cached()
    _cached_adj_t = Cached()

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, F_in).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        matrix = self._propagation(x, edge_index, edge_weight)
        drops = self.dropout > 0 and self.training
        if drops and not self.normalize and (edge_weight is None or is_sparse_matrix(edge_index)):
            matrix = Reason(
                "dropout of edges without a weight", "Pass `edge_weight`, such as ones, or normalize=True"
            )
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        out, value = x, matrix.value
        if not drops and not is_any_autocast_enabled():
            *_, out = out, *self._steps(matrix, out, self.K, [x] * self.K, self.alpha)
            return out
        # Under autocast, products have the autocast dtype. The result has the same dtype as in PyG, where
        # autocast does not cast it.
        dtype = x.dtype if value is None else torch.promote_types(x.dtype, value.dtype)
        for step in range(self.K):
            if drops:
                value = F.dropout(_values_of(matrix, x.dtype), p=self.dropout)
                matrix = Propagation(matrix.adj, value)
            out = self._multiply(matrix, out)
            out = mixed(out if step < self.K - 1 else out.to(dtype), x, self.alpha)
        return out


class FastTAGConv(PropagatingConv, pyg.TAGConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.TAGConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \sum_{k=0}^K \left( \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} \right)^k
        \mathbf{X} \mathbf{W}_{k}

    From "Topology Adaptive Graph Convolutional Networks" (https://arxiv.org/abs/1710.10370). If the output
    is narrower than the input, the sum is computed by Horner's rule at the output's width.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastTAGConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastTAGConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        matrix = self._propagation(x, edge_index, edge_weight)
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        width = self.out_channels
        if x.size(-1) > width and self._is_linear() and all(map(is_plain_linear, self.lins)):
            joint = torch.cat([lin.weight for lin in self.lins])
            *terms, out = linear_before_sum(x, joint, None, len(self.lins), width).split(width, dim=-1)
            *_, out = out, *self._steps(matrix, out, len(terms), terms[::-1])
        else:
            first, *others = self.lins
            out, powers = first(x), self._steps(matrix, x, len(others))
            if is_plain_linear(first):
                out = add_linear(out, powers, others, Linear)
            else:
                for lin, power in zip(others, powers, strict=True):
                    out = out + lin(power)
        return out if self.bias is None else out + self.bias


class FastMixHopConv(PropagatingConv, pyg.MixHopConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.MixHopConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \Vert_{p \in P} \left( \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}}
        \mathbf{\hat{D}}^{-1/2} \right)^p \mathbf{X} \mathbf{\Theta}_p

    From "MixHop" (https://arxiv.org/abs/1905.00067).

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastMixHopConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastMixHopConv(8, 4, powers=[0, 1, 2])(x, edge_index).shape
        torch.Size([3, 12])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, len(powers) * F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        matrix = self._propagation(x, edge_index, edge_weight)
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        first, *others = self.lins
        parts = [first(x)]
        for lin, power in zip(others, self._steps(matrix, x, len(others)), strict=True):
            parts.append(lin(power))
        out = torch.cat([parts[power] for power in self.powers], dim=-1)
        return out if self.bias is None else out + self.bias


class FastGCN2Conv(PropagatingConv, pyg.GCN2Conv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GCN2Conv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \left( (1 - \alpha) \mathbf{\hat{P}} \mathbf{X} + \alpha \mathbf{X}^{(0)}
        \right) \left( (1 - \beta) \mathbf{I} + \beta \mathbf{\Theta} \right), \quad \mathbf{\hat{P}} =
        \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}

    From "Simple and Deep Graph Convolutional Networks" (https://arxiv.org/abs/2007.02133).

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGCN2Conv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGCN2Conv(8, alpha=0.1)(x, x, edge_index).shape
        torch.Size([3, 8])
    """

    _caches_matrix = True
    _cached_edge_index = Cached()
    _cached_adj_t = Cached()

    def forward(self, x: Tensor, x_0: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, channels), float64, float32, float16 or bfloat16.
            x_0: features of the first layer, like ``x``.
            edge_index: as in :meth:`FastGCNConv.forward`.
            edge_weight: as in :meth:`FastGCNConv.forward`.

        Returns:
            Node features (N, channels).
        """
        matrix = self._propagation(x, edge_index, edge_weight)
        if isinstance(matrix, Reason):
            edge_weight = self._written_for_original(x, edge_index, edge_weight)
            edges = self._written_back(edge_index) if isinstance(edge_index, Adjacency) else edge_index
            return super()._original_forward(matrix, x, x_0, for_pyg(edges), edge_weight)
        out, x_0 = self._multiply(matrix, x), x_0[: x.size(0)]
        factors = {"beta": 1.0 - self.beta, "alpha": self.beta}
        if self.weight2 is None:
            out = mixed(out, x_0, self.alpha)
            return torch.addmm(out, out, self.weight1, **factors)
        out, x_0 = out * (1 - self.alpha), x_0 * self.alpha
        out = torch.addmm(out, out, self.weight1, **factors)
        return out + torch.addmm(x_0, x_0, self.weight2, **factors)


class FastLGConv(PropagatingConv, pyg.LGConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.LGConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i)} \frac{e_{j,i}}{\sqrt{\deg(i)} \sqrt{\deg(j)}}
        \mathbf{x}_j

    From "LightGCN" (https://arxiv.org/abs/2002.02126). Under autocast the result has the autocast dtype.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastLGConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastLGConv()(x, edge_index).shape
        torch.Size([3, 8])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, F_in).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.

        For a pair of features, which is allowed without ``normalize``, PyG's implementation runs.
        """
        if isinstance(x, (tuple, list)):
            return self._original_forward(fallback.PAIR_OF_FEATURES, x, edge_index, edge_weight)
        matrix = self._propagation(x, edge_index, edge_weight)
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        return self._multiply(matrix, x)


class FastARMAConv(PropagatingConv, pyg.ARMAConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.ARMAConv` on FastSparse kernels.

    .. math::
        \mathbf{X}_k^{(t+1)} = \sigma \left( \mathbf{\hat{L}} \mathbf{X}_k^{(t)} \mathbf{W} +
        \mathbf{X}^{(0)} \mathbf{V} \right), \quad \mathbf{X}^{\prime} = \frac{1}{K} \sum_{k=1}^K
        \mathbf{X}_k^{(T)}

    From "Graph Neural Networks with Convolutional ARMA Filters" (https://arxiv.org/abs/1901.01343).

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastARMAConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastARMAConv(8, 4, num_stacks=2)(x, edge_index).shape
        torch.Size([3, 4])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (..., N, F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        matrix = self._propagation(x, edge_index, edge_weight)
        if self.node_dim != -2:
            matrix = Reason(f"node_dim={self.node_dim}", "Use node_dim=-2")
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        x = x.unsqueeze(-3)
        out = x @ self.init_weight
        for layer in range(self.num_layers):
            if layer:
                out = out @ self.weight[0 if self.shared_weights else layer - 1]
            root = F.dropout(x, p=self.dropout, training=self.training)
            shared = 0 if self.shared_weights else layer
            out = self._multiply(matrix, out) + root @ self.root_weight[shared]
            if self.bias is not None:
                out = out + self.bias[shared]
            if self.act is not None:
                out = self.act(out)
        return out.mean(dim=-3)


class FastClusterGCNConv(PropagatingConv, pyg.ClusterGCNConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.ClusterGCNConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \left( \mathbf{\hat{A}} + \lambda \, \mathrm{diag}(\mathbf{\hat{A}}) \right)
        \mathbf{X} \mathbf{W}_1 + \mathbf{X} \mathbf{W}_2, \quad \mathbf{\hat{A}} = (\mathbf{D} +
        \mathbf{I})^{-1} (\mathbf{A} + \mathbf{I})

    From "Cluster-GCN" (https://arxiv.org/abs/1905.07953). For sparse matrices, PyG's own code runs.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastClusterGCNConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastClusterGCNConv(8, 4)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _aggregations = (SumAggregation,)
    _takes_matrices = False

    def forward(self, x: Tensor, edge_index: EdgesLike) -> Tensor:
        """Computes the new node features (..., N, F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`, but there are no edge weights.
        """
        adj = self._structure((x, x), edge_index, None, self.add_self_loops)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index)
        num_nodes = x.size(-2)
        scale = adj.inv_degree(accumulation_dtype(x.dtype))
        out = self._aggregate_neighbours(adj, x, None, scales=(scale, None))
        if self.diag_lambda:
            loops = adj.derived("fastsparse_pyg.loops", lambda: adj.row()[adj.row() == adj.col].long())
            weight = torch.bincount(loops, minlength=num_nodes) * scale * self.diag_lambda
            out = torch.addcmul(out, weight.to(x.dtype)[:, None], x)
        return self.lin_out(out) + self.lin_root(x)

    def _reason(self, x_src: Any, x_dst: Any, edge_index: Any, *of_call: Any) -> Reason | None:
        if self.flow != "source_to_target":
            return Reason(f"flow={self.flow!r}", fallback.USUAL_FLOW)
        return (
            fallback.SPARSE_MATRIX
            if is_sparse_matrix(edge_index)
            else super()._reason(x_src, x_dst, edge_index)
        )


class FastGatedGraphConv(PropagatingConv, pyg.GatedGraphConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.GatedGraphConv` on FastSparse kernels.

    .. math::
        \mathbf{m}_i^{(l+1)} = \sum_{j \in \mathcal{N}(i)} e_{j,i} \mathbf{\Theta} \mathbf{h}_j^{(l)}, \quad
        \mathbf{h}_i^{(l+1)} = \mathrm{GRU}(\mathbf{m}_i^{(l+1)}, \mathbf{h}_i^{(l)})

    From "Gated Graph Sequence Neural Networks" (https://arxiv.org/abs/1511.05493).

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastGatedGraphConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastGatedGraphConv(8, num_layers=2)(x, edge_index).shape
        torch.Size([3, 8])
    """

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_weight: OptTensor = None) -> Tensor:
        """Computes the new node features (N, F_out).

        Arguments and errors are the same as in :meth:`FastGCNConv.forward`.
        """
        matrix = self._propagation(x, edge_index, edge_weight, normalize=False)
        if isinstance(x, Tensor) and (x.dim() != 2 or x.size(-1) > self.out_channels):
            matrix = Reason("features wider than out_channels, or not 2-D", fallback.PLAIN_FEATURES)
        if isinstance(matrix, Reason):
            return self._original_forward(matrix, x, edge_index, edge_weight)
        if x.size(-1) < self.out_channels:
            x = F.pad(x, (0, self.out_channels - x.size(-1)))
        # PyTorch's compiler cannot trace the fused cell that CUDA has.
        is_traced = torch.compiler.is_compiling() and is_plain_linear_of(
            self.rnn, torch.nn.GRUCell, "weight_ih"
        )
        for weight in self.weight:
            message = self._multiply(matrix, x @ weight)
            x = _gru(self.rnn, message, x) if is_traced else self.rnn(message, x)
        return x


def _gru(cell: torch.nn.GRUCell, x: Tensor, hidden: Tensor) -> Tensor:
    """Computes a GRU cell with operators that can be traced on all devices."""
    reset, update, new = F.linear(x, cell.weight_ih, cell.bias_ih).chunk(3, dim=1)
    of_hidden = F.linear(hidden, cell.weight_hh, cell.bias_hh).chunk(3, dim=1)
    new = torch.tanh(new + torch.sigmoid(reset + of_hidden[0]) * of_hidden[2])
    if hidden.is_cuda:
        hidden = hidden.to(new.dtype)  # autocast on CUDA does the same in PyTorch's cell
    return new + torch.sigmoid(update + of_hidden[1]) * (hidden - new)


def _values_of(matrix: Propagation, dtype: torch.dtype) -> Tensor:
    """Returns the values of the whole matrix, including the scales, in the structure's value order."""
    if matrix.scale_dst is None or matrix.scale_src is None:
        assert matrix.value is not None
        return matrix.value
    scales = sddmm(matrix.adj, matrix.scale_dst[:, None], matrix.scale_src[:, None])
    return scales.to(dtype) if matrix.value is None else (matrix.value * scales).to(matrix.value.dtype)
