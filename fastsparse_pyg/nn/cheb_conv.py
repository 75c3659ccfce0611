"""Chebyshev polynomials of the Laplacian."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import ChebConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import OptTensor

from fastsparse_core import Adjacency, sddmm, spmm
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.propagation import PropagatingConv


class _Laplacian(NamedTuple):
    """The scaled Laplacian. Its product with x is c * (diagonal * x - A x) - x.

    Attributes:
        adj: structure of A, without self loops.
        value: values of A before scaling, one per edge; None: all are 1.
        scale_dst: constant factors of A's rows, (N,), or None.
        scale_src: constant factors of A's columns, (N,), or None.
        diagonal: diagonal of the Laplacian, a number or (num_nodes, 1).
        factor: the factor c: a number, or a tensor with a single number or one number per node.
        at_source: whether a tensor ``factor`` scales the columns. If False, it scales the rows.
    """

    adj: Adjacency
    value: Tensor | None
    scale_dst: Tensor | None
    scale_src: Tensor | None
    diagonal: float | Tensor
    factor: Any
    at_source: bool

    def times(self, x: Tensor, scale: float, minus: Tensor | None = None) -> Tensor:
        """Computes ``scale`` times the product with x, minus another tensor."""
        c = self.factor
        of_number = not isinstance(c, Tensor)
        scale_dst = self.scale_dst
        if scale_dst is None:
            dtype = accumulation_dtype(x.dtype)
            scale_dst = torch.ones(self.adj.num_dst, dtype=dtype, device=x.device)
        scaled = x if of_number or not self.at_source else c * x
        scale_dst = scale_dst * (-scale * c if of_number else -scale)
        out = spmm(self.adj, scaled, self.value, scale_dst=scale_dst, scale_src=self.scale_src)
        if not of_number and not self.at_source:
            out = c * out
        rest = scale * (c * self.diagonal - 1.0)
        if isinstance(rest, Tensor) or rest:
            out = out + rest * x
        return out if minus is None else out - minus


class FastChebConv(PropagatingConv, ChebConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.ChebConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \sum_{k=1}^{K} \mathbf{Z}^{(k)} \mathbf{\Theta}^{(k)}, \quad
        \mathbf{Z}^{(1)} = \mathbf{X}, \quad \mathbf{Z}^{(2)} = \mathbf{\hat{L}} \mathbf{X}, \quad
        \mathbf{Z}^{(k)} = 2 \mathbf{\hat{L}} \mathbf{Z}^{(k-1)} - \mathbf{Z}^{(k-2)}, \quad
        \mathbf{\hat{L}} = \frac{2 \mathbf{L}}{\lambda_{\max}} - \mathbf{I}

    From "Convolutional Neural Networks on Graphs with Fast Localized Spectral Filtering"
    (https://arxiv.org/abs/1606.09375). Without edge weights, nothing is stored per edge: the kernel scales
    rows to normalise the Laplacian, and its diagonal is one number per node.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastChebConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastChebConv(8, 4, K=3)(x, edge_index).shape
        torch.Size([3, 4])
    """

    _aggregations = (SumAggregation,)
    _features = "matrix"
    _takes_matrices = False
    _takes_sparse_features = False

    def forward(
        self,
        x: Tensor,
        edge_index: EdgesLike,
        edge_weight: OptTensor = None,
        batch: OptTensor = None,
        lambda_max: Any = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), float64, float32, float16 or bfloat16.
            edge_index: edges, or an Adjacency whose rows are the destinations.
            edge_weight: edge weights, floating (E,).
            batch: graph of each node, int64 (N,), if ``lambda_max`` differs between graphs.
            lambda_max: largest eigenvalue of the Laplacian: a number, or a tensor with one number per graph;
                None: PyG's default.

        Returns:
            Node features (N, F_out).
        """
        adj = self._structure((x, x), edge_index)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, edge_weight, batch, lambda_max)
        out = self.lins[0](x)
        if len(self.lins) > 1:
            weight = self._value(adj, x, edge_index, edge_weight)
            laplacian = self._laplacian(adj.without_self_loops(), x, weight, batch, lambda_max)
            before, last = x, laplacian.times(x, 1.0)
            out = out + self.lins[1](last)
            for lin in list(self.lins)[2:]:
                before, last = last, laplacian.times(last, 2.0, before)
                out = out + lin(last)
        return out if self.bias is None else out + self.bias

    def _laplacian(
        self, adj: Adjacency, x: Tensor, weight: Tensor | None, batch: Tensor | None, lambda_max: Any
    ) -> _Laplacian:
        dtype = accumulation_dtype(x.dtype)
        # For both flows, PyG counts degrees in the first row of `edge_index`.
        at_source = self.flow == "source_to_target"
        kind = self.normalization
        largest: Any = 1.0
        if weight is None:
            scale = (
                (adj.inv_sqrt_out_degree if at_source else adj.inv_sqrt_degree)
                if kind == "sym"
                else (adj.inv_out_degree if at_source else adj.inv_degree)
            )(dtype)
            value = None
            if kind is None:
                degree = (adj.out_degree() if at_source else adj.in_degree()).to(dtype)[:, None]
                largest = degree.max()
        else:
            with torch.autocast(x.device.type, enabled=False):
                ones = torch.ones(adj.num_dst, 1, dtype=dtype, device=x.device)
                degree = spmm(adj.t() if at_source else adj, ones, weight)
                scale = degree.pow(-0.5 if kind == "sym" else -1.0)
                scale = scale.masked_fill(scale == float("inf"), 0)
                dst = scale if kind == "sym" or (kind == "rw" and not at_source) else ones
                src = scale if kind == "sym" or (kind == "rw" and at_source) else ones
                value = weight * sddmm(adj, dst, src).to(weight.dtype)  # values of dropped loops become 0
                bound = degree.max() if kind is None else degree.new_ones(())
                largest = torch.maximum((-value).max().to(bound.dtype), bound) if len(value) else bound
            scale = None
        if lambda_max is None:
            lambda_max = 2.0 * largest
        elif isinstance(lambda_max, Tensor) and lambda_max.numel() > 1 and batch is not None:
            lambda_max = lambda_max[batch][:, None]
        factor = 2.0 / lambda_max
        if isinstance(factor, Tensor):
            factor = factor.to(x.dtype)
        diagonal = degree.to(x.dtype) if kind is None else 1.0
        rows = scale if kind == "sym" or (kind == "rw" and not at_source) else None
        columns = scale if kind == "sym" or (kind == "rw" and at_source) else None
        return _Laplacian(adj, value, rows, columns, diagonal, factor, at_source)
