"""Relational graph attention operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import RGATConv
from torch_geometric.typing import OptTensor, SparseTensor

from fastsparse_core import additive_attention, scatter, scatter_softmax, spmm
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.fused.relational_attention import relational_attention
from fastsparse_core.grouped_product import grouped_product
from fastsparse_core.relations import Relations
from fastsparse_core.segment import rows_of
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import FEW_ON_GPU, are_few_on_gpu, known, raise_features
from fastsparse_pyg.relations import options_of, reason_against_relations, relations_of

#: On a GPU, all nodes are multiplied by all matrices at once, up to these numbers of nodes times relations
#: and of nodes times output features. Relation by relation, six products per relation would be needed, and
#: launching them would take longer than the additional work on the GPU. On an H200, a step on a hundredth of
#: AM (46 relations) takes 1.5 ms, and 10.5 ms relation by relation. On a hundredth of MAG (4 relations), it
#: takes 2.3 ms and 5.0 ms.
_FEW_PAIRS, _FEW_FEATURES = 1 << 20, 1 << 21
#: On the CPU, all nodes are multiplied by all matrices up to this number of nodes times elements of the
#: matrices. In one thread, a step on 1,000 nodes, 3,000 edges and 4 relations with 16 features takes 1.4 ms,
#: and 1.9 ms relation by relation.
_FEW_PRODUCTS = 1 << 20


class FastRGATConv(AttentionConv, RGATConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.RGATConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{r \in \mathcal{R}} \sum_{j \in \mathcal{N}_r(i)} \alpha^{(r)}_{i,j}
        \mathbf{W}_r \mathbf{x}_j

    Scores are additive or multiplicative, and normalised within or across relations. From "Relational Graph
    Attention Networks" (https://arxiv.org/abs/1904.05811), section 2. Arguments, parameters, ``state_dict``
    and results are the same as PyG's. :math:`\mathbf{W}_r \mathbf{x}_j` is computed once for each pair of a
    source and a relation, and the destinations' part of the scores once for each pair of a destination and a
    relation, not once per edge. Except on small graphs, only pairs with edges are computed. Additive scores
    without ``mod`` use a fused attention kernel, unless attention weights are returned. Attention dropout
    draws a different mask than PyG's layer. PyG's implementation runs under autocast and ``torch.compile``,
    and for up to 32,768 edges on a GPU, where it is faster (except in captured steps and under
    ``torch.use_deterministic_algorithms(True)``).

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`; edges :math:`(2, |\mathcal{E}|)`; types
          :math:`(|\mathcal{E}|)`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})`, with :math:`F_{out}` columns if
          ``concat=False``; ``dim`` times as many columns if scores are multiplicative

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastRGATConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastRGATConv(8, 4, num_relations=2)(x, edge_index, torch.tensor([0, 1, 0])).shape
        torch.Size([3, 4])
    """

    def forward(
        self,
        x: Tensor,
        edge_index: EdgesLike,
        edge_type: OptTensor = None,
        edge_attr: OptTensor = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Computes the new node features.

        Args:
            x: node features (N, F_in), float64, float32, float16 or bfloat16. For a pair (source features,
                destination features), PyG's implementation runs.
            edge_index: edges, int64 (2, E). With a sparse matrix or an Adjacency, PyG's implementation runs.
            edge_type: relation of every edge, int64 (E,), in the order of the edges.
            edge_attr: features of the edges (E, edge_dim), in the dtype of ``x``; required with ``edge_dim``.
            size: (number of sources, number of destinations). Unless it is None, PyG's implementation runs.
            return_attention_weights: True or False: also returns the edges and their attention weights before
                dropout.

        Returns:
            Node features (N, H * F_out) for H heads, or (N, F_out) if ``concat=False``; ``dim`` times as wide
            if scores are multiplicative. With attention weights, a pair of these features and
            (``edge_index``, attention weights (E, H * dim)).

        Raises:
            ValueError: sizes, dtypes, devices or the dropout probability do not fit.
            IndexError: an index refers to a node, or a type to a relation, that does not exist.
        """
        with_weights = isinstance(return_attention_weights, bool)
        reason = self._reason(x, x, edge_index, edge_attr, with_weights, edge_type, size)
        if reason is not None:
            return self._original_forward(
                reason, x, edge_index, edge_type, edge_attr, size, return_attention_weights
            )
        assert isinstance(edge_index, Tensor)  # for type checkers; `_reason` has checked the type
        num_nodes = x.size(0)
        given = (num_nodes, num_nodes), self.num_relations, self.flow
        relations = known(edge_index, options_of(*given), edge_type)
        relations = relations or relations_of(edge_index, edge_type, *given)
        weight = self._weight()
        takes_every_pair = self._takes_every_pair(x, weight)
        relations = relations.with_every_pair if takes_every_pair else relations
        additive = self.attention_mode == "additive-self-attention"
        is_fused = additive and self.mod is None and not with_weights
        across = self.attention_mechanism == "across-relation"
        if takes_every_pair and is_fused and across and edge_attr is None:
            dropout = self.dropout if self.training else 0.0
            options = (self.q, self.k, self.negative_slope, dropout)
            out = relational_attention(relations.from_pairs, relations.dst_pairs, x, weight, *options)
            if out is not None:
                return self.update(out if self.concat else out.view(-1, self.heads, self.out_channels))
        sources, destinations = relations.src_pairs, relations.dst_pairs
        # `weight @ q` is computed first, because the product is narrower than the features. Blocks of weights
        # do not allow this.
        if takes_every_pair:
            by_feature = weight.transpose(0, 1).contiguous()
            maps = by_feature, by_feature @ self.k, by_feature @ self.q
            rows, key, of_dst = (
                linear_before_sum(x, each.flatten(1).t(), None, *each.shape[1:]).view(-1, each.size(2))
                for each in maps
            )
        else:
            rows = grouped_product(rows_of(x, sources.node), weight, sources.starts)
            key = rows @ self.k
            x_dst = rows_of(x, destinations.node)
            if self.num_blocks is None:
                of_dst = grouped_product(x_dst, weight @ self.q, destinations.starts)
            else:
                of_dst = grouped_product(x_dst, weight, destinations.starts) @ self.q
        of_edge = None if edge_attr is None else self._edge_scores(edge_attr)
        if is_fused:
            return self.update(self._fused(relations, rows, key, of_dst, of_edge))
        score = rows_of(of_dst, destinations.of_edge)
        other = rows_of(key, sources.of_edge)
        if additive:
            score = score + other if of_edge is None else score + other + of_edge
            score = F.leaky_relu(score, self.negative_slope)
        else:
            score = score * other if of_edge is None else score * other * of_edge
        index, groups = (relations.dst, num_nodes) if across else (destinations.of_edge, len(destinations))
        alpha = scatter_softmax(score, index, groups)
        out = self.update(self._weighted(relations, rows, alpha))
        return (out, (edge_index, alpha)) if with_weights else out

    def _takes_every_pair(self, x: Tensor, weight: Tensor) -> bool:
        """True if all nodes should be multiplied by the matrices of all relations."""
        if weight.dim() != 3:
            return False
        if not x.is_cuda:
            return x.size(0) * weight.numel() <= _FEW_PRODUCTS
        return x.size(0) * self.num_relations <= _FEW_PAIRS and x.size(0) * weight.size(2) <= _FEW_FEATURES

    def _weight(self) -> Tensor:
        """Returns the relations' matrices: (R, in, H * out) or (R, blocks, in / blocks, H * out / blocks)."""
        if self.num_bases is None:
            return self.weight
        weight = self.att @ self.basis.view(self.num_bases, -1)
        return weight.view(self.num_relations, self.in_channels, self.heads * self.out_channels)

    def _edge_scores(self, edge_attr: Tensor) -> Tensor:
        """Computes the edge features' part of the scores, (E, H * dim): a summand or a factor."""
        scores: Tensor = self.lin_edge(edge_attr if edge_attr.dim() == 2 else edge_attr[:, None]) @ self.e
        return scores

    def _fused(
        self, relations: Relations, rows: Tensor, key: Tensor, of_dst: Tensor, of_edge: Tensor | None
    ) -> Tensor:
        """Computes additive attention without storing features per edge; returns (N, H, out)."""
        values = rows.view(-1, self.heads, self.out_channels)
        dropout = self.dropout if self.training else 0.0
        if self.attention_mechanism == "within-relation":
            out = additive_attention(
                relations.between_pairs, of_dst, key, values, self.negative_slope, of_edge, dropout
            )
            return scatter(out, relations.dst_pairs.node, relations.shape[0])
        # The score of a destination depends on the relation, so it is added per edge.
        bias = rows_of(of_dst, relations.dst_pairs.of_edge)
        bias = bias if of_edge is None else bias + of_edge
        none = of_dst.new_zeros(relations.shape[0], self.heads)
        return additive_attention(relations.from_pairs, none, key, values, self.negative_slope, bias, dropout)

    def _weighted(self, relations: Relations, rows: Tensor, alpha: Tensor) -> Tensor:
        """Sums the neighbours with these attention weights, which the option `mod` modifies first."""
        adj, heads = relations.from_pairs, (-1, self.heads, self.out_channels)
        degree = adj.in_degree().to(alpha.dtype)[:, None]
        plus: Tensor | None = None
        if self.mod == "additive":
            plus = spmm(adj, rows).view(heads) * self.w
        elif self.mod == "f-additive":
            alpha = torch.where(alpha > 0, alpha + 1, alpha)
        elif self.mod == "f-scaled":
            alpha = alpha * rows_of(degree, relations.dst)
        elif self.mod is None and self.training and self.dropout > 0:
            alpha = F.dropout(alpha, self.dropout)

        def weighted(alpha: Tensor) -> Tensor:
            out = spmm(adj, rows, alpha).view(heads)
            return out if plus is None else out + plus

        if self.attention_mode == "additive-self-attention":
            out = weighted(alpha)
        else:
            by_dim = alpha.view(-1, self.heads, self.dim)
            out = torch.stack([weighted(by_dim[:, :, at].contiguous()) for at in range(self.dim)], 2)
        if self.mod == "scaled":
            factor = self.activation(degree @ self.l1 + self.b1) @ self.l2 + self.b2
            out = out * factor.view(-1, *[1] * (out.dim() - 2), self.out_channels)
        return out

    def _reason(
        self,
        x_src: Any,
        x_dst: Any,
        edge_index: Any,
        edge_attr: Any = None,
        wants_weights: bool = False,
        edge_type: Any = None,
        size: Any = None,
        *of_call: Any,
    ) -> Reason | None:
        if are_few_on_gpu(edge_index):
            return FEW_ON_GPU
        if isinstance(edge_index, SparseTensor):  # whose values are edge features, and not types as in RGCN
            return fallback.SPARSE_MATRIX
        reason = reason_against_relations(edge_index, edge_type)
        if reason is not None:
            return reason
        if type(edge_index) is not Tensor:
            return Reason("edges that are not one plain tensor", fallback.PLAIN_EDGES)
        if size is not None:
            return Reason("size is given", "Do not pass `size`")
        if edge_index.size(1) == 0:
            return Reason("no edges", "", "PyG")
        if (edge_attr is None) != (self.lin_edge is None):
            return fallback.EDGE_FEATURES_OR_NOT
        if isinstance(edge_attr, Tensor) and edge_attr.size(0) != edge_index.size(1):
            return Reason("edge features that are not one row per edge", fallback.EDGE_ROWS)
        if isinstance(x_src, (tuple, list)):
            return fallback.PAIR_OF_FEATURES
        if not isinstance(x_src, Tensor):
            raise_features(x_src)
        if x_src.dtype != self.k.dtype:
            return Reason("features of another dtype than the weights", "Convert them to that dtype")
        if torch.is_autocast_enabled(x_src.device.type):
            return Reason("autocast", "Call this layer outside of torch.autocast")
        return super()._reason(x_src, x_dst, edge_index, edge_attr, wants_weights)
