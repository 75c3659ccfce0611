"""Hypergraph convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HypergraphConv
from torch_geometric.typing import OptTensor

from fastsparse_core import Adjacency, edge_softmax, spmm
from fastsparse_core.fallback import Reason
from fastsparse_core.message_plans.ends import EdgeEnd, gather
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.traced import TracedAdjacency, site_of
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import is_sparse_matrix, raise_graph, resolve
from fastsparse_pyg.nn.base import FastConv

_UNKNOWN_NUMBER = Reason("torch.compile without num_edges", "Pass `num_edges`, the number of hyperedges")


class FastHypergraphConv(FastConv, HypergraphConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.HypergraphConv` on FastSparse kernels.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{D}^{-1} \mathbf{H} \mathbf{W} \mathbf{B}^{-1} \mathbf{H}^{\top}
        \mathbf{X} \mathbf{\Theta}

    From "Hypergraph Convolution and Hypergraph Attention" (https://arxiv.org/abs/1901.08150). Both products
    use one structure and its transpose. An attention score is the sum of two numbers per head: one of the
    node and one of the hyperedge.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastHypergraphConv
        >>> hyperedge_index = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 1]])  # nodes, hyperedges
        >>> FastHypergraphConv(8, 4)(torch.randn(3, 8), hyperedge_index).shape
        torch.Size([3, 4])
    """

    _features = "matrix"

    def forward(
        self,
        x: Tensor,
        hyperedge_index: Tensor,
        hyperedge_weight: OptTensor = None,
        hyperedge_attr: OptTensor = None,
        num_edges: int | None = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), float64, float32, float16 or bfloat16.
            hyperedge_index: node and hyperedge of every entry of the incidence matrix, (2, num_entries),
                int64.
            hyperedge_weight: weights of the hyperedges, floating (num_edges,).
            hyperedge_attr: features of the hyperedges (num_edges, F_in), in the dtype of ``x``, for
                attention.
            num_edges: number of hyperedges; None: the largest index + 1, for which the host waits for the
                device. Under ``torch.compile``, PyG's code runs if it is None, and with attention.

        Returns:
            Node features (N, H * F_out) for H heads of attention, or (N, F_out) without attention or if
            ``concat=False``.
        """
        reason = self._reason(x, x, hyperedge_index)
        is_traced = torch.compiler.is_compiling()
        if reason is None and is_traced and (num_edges is None or self.use_attention):
            reason = fallback.COMPILED if self.use_attention else _UNKNOWN_NUMBER
        if reason is not None:
            return self._original_forward(
                reason, x, hyperedge_index, hyperedge_weight, hyperedge_attr, num_edges
            )
        if num_edges is None:
            num_edges = int(hyperedge_index[1].max()) + 1 if hyperedge_index.numel() else 0
        if is_traced:
            to_edges: Adjacency = TracedAdjacency(
                hyperedge_index, num_edges, x.size(0), site=site_of(hyperedge_index)
            )
        else:
            to_edges = resolve(hyperedge_index, x.size(0), num_edges, x.device)
        to_nodes = to_edges.t()
        x = self.lin(x)
        alpha = None
        if self.use_attention:
            assert hyperedge_attr is not None
            attr = _rows_of_hyperedges("hyperedge_attr", hyperedge_attr, num_edges, hyperedge_index)
            alpha = self._attention(to_edges, x, self.lin(attr), hyperedge_index)
        dtype = accumulation_dtype(x.dtype)
        out = spmm(to_edges, x, alpha, scale_dst=to_edges.inv_degree(dtype))
        if hyperedge_weight is None:
            out = spmm(to_nodes, out, alpha, scale_dst=to_nodes.inv_degree(dtype))
        else:
            weight = _rows_of_hyperedges("hyperedge_weight", hyperedge_weight, num_edges, hyperedge_index)
            degree = spmm(to_nodes, weight.to(dtype)[:, None])
            inverse = degree.reciprocal()
            inverse = inverse.masked_fill(inverse == float("inf"), 0).to(x.dtype)
            out = spmm(to_nodes, out, alpha) * inverse
        if not self.concat:
            out = out.view(-1, self.heads, self.out_channels).mean(dim=1)
        return out if self.bias is None else out + self.bias

    def _reason(self, x_src: Any, x_dst: Any, edge_index: Any, *of_call: Any) -> Reason | None:
        reason = super()._reason(x_src, x_dst, edge_index)
        if reason is not None:
            return reason
        is_list = type(edge_index) is Tensor and edge_index.layout is torch.strided
        if not is_list and (is_sparse_matrix(edge_index) or isinstance(edge_index, Adjacency)):
            return Reason("a sparse `hyperedge_index`", "Pass `hyperedge_index` as a (2, num_entries) tensor")
        if not isinstance(edge_index, Tensor):
            raise_graph(edge_index, "hyperedge_index")
        if self.flow != "source_to_target":
            return Reason(f"flow={self.flow!r}", "Use flow='source_to_target'")
        return None

    def _attention(self, to_edges: Adjacency, x: Tensor, attr: Tensor, index: Tensor) -> Tensor:
        """Computes attention weights (num_entries, heads), the softmax of the scores."""
        of_nodes, of_edges = self.att.split(self.out_channels, dim=-1)
        score_nodes = (x.view(-1, self.heads, self.out_channels) * of_nodes).sum(dim=-1)
        score_edges = (attr.view(-1, self.heads, self.out_channels) * of_edges).sum(dim=-1)
        score = gather(score_nodes, EdgeEnd(to_edges, index, 0, False))
        score = F.leaky_relu(
            score + gather(score_edges, EdgeEnd(to_edges, index, 1, True)), self.negative_slope
        )
        alpha = edge_softmax(to_edges if self.attention_mode == "node" else to_edges.t(), score)
        return F.dropout(alpha, p=self.dropout, training=self.training)


def _rows_of_hyperedges(name: str, given: Tensor, num_edges: int, index: Tensor) -> Tensor:
    """Returns one row per hyperedge: cuts additional rows, and adds zeros for empty hyperedges at the end.

    Raises:
        IndexError: a hyperedge with nodes has no row.
    """
    missing = num_edges - given.size(0)
    if missing <= 0:
        return given[:num_edges]
    needed = int(index[1].max()) + 1 if index.numel() else 0
    if needed > given.size(0):
        raise IndexError(
            f"{name}: expected {needed} rows or more, one for each hyperedge in hyperedge_index, got shape "
            f"{tuple(given.shape)}"
        )
    return torch.cat([given, given.new_zeros(missing, *given.shape[1:])])
