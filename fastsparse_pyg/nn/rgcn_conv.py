"""Relational GCN operator."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric import backend
from torch_geometric.nn import RGCNConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.typing import OptTensor

from fastsparse_core import Adjacency, scatter, spmm
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.aggregate_transform import relational_linear
from fastsparse_core.grouped_product import grouped_product
from fastsparse_core.ops._eager import is_plain_eager
from fastsparse_core.ops._operands import written_out
from fastsparse_core.relations import Relations
from fastsparse_core.segment import rows_of
from fastsparse_pyg import fallback
from fastsparse_pyg.graph import EdgesLike
from fastsparse_pyg.nn.base import ANY_REDUCTION, FastConv, raise_features
from fastsparse_pyg.relations import reason_against_relations, relations_of

_NEITHER = Reason(
    "features that are neither one matrix nor one vector of indices per side", fallback.PLAIN_FEATURES
)
_INT32_MAX = 2**31 - 1
#: Up to this number of destinations times relations, one product for all pairs is faster. The product also
#: computes rows of pairs without edges, but takes less time on the host.
FEW_PAIRS = 65_536


class _RelationalConv(FastConv):
    """Base of both forms of RGCN.

    Neither form can be a subclass of the other, because PyG caches templates by class and their messages
    differ.
    """

    _aggregations = ANY_REDUCTION
    _fusible: ClassVar[bool] = False
    #: True if PyG adds the relations' results to zeros of the default dtype.
    _onto_zeros: ClassVar[bool] = True

    def forward(self, x: Any, edge_index: EdgesLike, edge_type: OptTensor = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in); or indices of trainable features, int64 (N,) (None: all nodes); or a
                pair of these (sources, destinations).
            edge_index: edges, or a SparseTensor or Adjacency whose rows are the destinations.
            edge_type: relation of every edge, int64 (E,), in the order of the edges; a SparseTensor has the
                relations as its values.

        Returns:
            Node features (N, F_out), or (number of destinations, F_out) for a pair.

        Raises:
            ValueError: sizes or devices do not fit.
            IndexError: an index refers to a node, or a type to a relation, that does not exist. With
                ``num_blocks``, :class:`FastRGCNConv` ignores edges of other types, as PyG does.
        """
        x_l = x[0] if isinstance(x, tuple) else x
        all_nodes = x_l is None
        if x_l is None:
            x_l = torch.arange(self.in_channels_l, device=self.weight.device)
        x_r = x[1] if isinstance(x, tuple) else x_l
        reason = self._reason(x_l, x_r, edge_index, edge_type)
        if reason is not None:
            return self._original_forward(reason, x, edge_index, edge_type)
        shape = (x_r.size(0), x_l.size(0))
        index = None if all_nodes or x_l.is_floating_point() else (x_l, self.in_channels_l)
        relations = relations_of(
            edge_index,
            edge_type,
            shape,
            self.num_relations,
            self.flow,
            index,
            drops_unknown=self._drops_unknown(),
        )
        weight = self.weight
        if self.num_bases is not None:
            weight = (self.comp @ weight.view(self.num_bases, -1)).view(
                self.num_relations, self.in_channels_l, self.out_channels
            )
        if x_r is x_l and self._are_few(relations, x_l, weight):
            whole = relational_linear(
                relations.with_every_pair.into_pairs, x_l, weight, self.root, self.bias, self._reduce()
            )
            if whole is not None:
                whole = self._as_original(whole)
                bias = self.bias
                if bias is None or whole.dtype == bias.dtype:
                    return whole
                # Autocast does not change the dtype of PyG's sum with the bias.
                return whole.to(torch.promote_types(whole.dtype, bias.dtype))
        if x_l.is_floating_point():
            out = self._of_features(relations, written_out(x_l), weight)
        else:
            rows = spmm(relations.from_rows, weight.reshape(-1, self.out_channels), reduce=self._reduce())
            out = scatter(rows, relations.dst_pairs.node, relations.shape[0])
        out = self._as_original(out)
        if self.root is not None:
            out = out + (x_r @ self.root if x_r.is_floating_point() else self.root[x_r])
        return out if self.bias is None else out + self.bias

    def _drops_unknown(self) -> bool:
        """True if edges of unknown types are ignored, as in PyG's RGCNConv without `segment_matmul`."""
        return self.num_blocks is not None or backend.use_segment_matmul is False

    def _as_original(self, out: Tensor) -> Tensor:
        """Converts the result to the dtype of PyG's result."""
        if self._onto_zeros:
            return out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))
        if out.is_cuda and self._reduce() == "mean" and torch.is_autocast_enabled("cuda"):
            # PyG divides by counts with a reciprocal, which autocast on CUDA computes in float32.
            return out.to(torch.promote_types(out.dtype, torch.float32))
        return out

    def _are_few(self, relations: Relations, x: Tensor, weight: Tensor) -> bool:
        """True if one product computes all relations, including rows for pairs without edges."""
        return (
            relations.shape[0] * self.num_relations <= FEW_PAIRS
            and weight.dim() == 3
            and x.is_floating_point()
            and self._reduce() in ("sum", "mean")
            and is_plain_eager(x)
        )

    def _of_features(self, relations: Relations, x: Tensor, weight: Tensor) -> Tensor:
        reduce = self._reduce()
        if reduce in ("sum", "mean") and relations.transforms_first(x.size(1), self.out_channels):
            pairs = relations.src_pairs
            rows = grouped_product(rows_of(x, pairs.node), weight, pairs.starts)
            share = relations.share(torch.promote_types(rows.dtype, torch.float32))
            return spmm(relations.from_pairs, rows, share if reduce == "mean" else None)
        pairs = relations.dst_pairs
        rows = spmm(relations.into_pairs, x, reduce=reduce)
        rows = grouped_product(rows, weight, pairs.starts)
        return scatter(rows, pairs.node, relations.shape[0])

    def _reason(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_type: Any = None, *of_call: Any
    ) -> Reason | None:
        if not isinstance(x_src, Tensor):
            raise_features(x_src)
        reason = reason_against_relations(edge_index, edge_type)
        if reason is not None:
            return reason
        is_floating = x_src.is_floating_point()
        if is_floating != x_dst.is_floating_point() or x_src.dim() != (2 if is_floating else 1):
            return _NEITHER
        if is_floating:
            if x_src.dtype != self.weight.dtype and not torch.is_autocast_enabled(x_src.device.type):
                return Reason("features of another dtype than the weights", "Convert them to that dtype")
        elif self.num_blocks is not None:
            return Reason("indices with num_blocks", "Pass features, or use `num_bases`")
        elif self.num_relations * self.in_channels_l > _INT32_MAX:
            return Reason("indices with too many relations", "Pass features in place of indices")
        if self.flow == "target_to_source" and isinstance(edge_index, Adjacency):
            return Reason("an Adjacency with flow='target_to_source'", fallback.PLAIN_EDGES)
        features = x_src if is_floating else self.weight
        return super()._reason(features, features, edge_index)  # relations handle both directions of a pair


class FastRGCNConv(_RelationalConv, RGCNConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.RGCNConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}_{\textrm{root}} \cdot \mathbf{x}_i + \sum_{r \in \mathcal{R}}
        \sum_{j \in \mathcal{N}_r(i)} \frac{1}{|\mathcal{N}_r(i)|} \mathbf{\Theta}_r \cdot \mathbf{x}_j

    From "Modeling Relational Data with Graph Convolutional Networks" (https://arxiv.org/abs/1703.06103),
    sections 2.1 and 2.2. Arguments, parameters, ``state_dict`` and results are the same as PyG's. (The
    drop-in of PyG's ``FastRGCNConv`` is :class:`FastFastRGCNConv`.) All relations are aggregated at once,
    with one row for each (destination, relation) pair that has edges; only small graphs have rows for all
    pairs. Rows are sorted by relation, so the matrix of each relation multiplies consecutive rows. If it
    moves fewer numbers, the matrices are applied to the sources before the aggregation instead. The structure
    is built once for each pair of ``edge_index`` and ``edge_type``. An unknown edge type raises an
    IndexError. With ``num_blocks``, and in captured steps, edges of unknown types are ignored. Under
    ``torch.compile``, PyG's code runs.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, indices :math:`(|\mathcal{V}|)`, None, or
          a pair of them; edges :math:`(2, |\mathcal{E}|)`, SparseTensor or
          :class:`~fastsparse_core.Adjacency`; types :math:`(|\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}_t|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastRGCNConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastRGCNConv(8, 4, num_relations=2)(x, edge_index, torch.tensor([0, 1, 0])).shape
        torch.Size([3, 4])
    """

    def __prepare_scriptable__(self) -> pyg.MessagePassing:
        """PyG's layer, with an attribute that its `forward` sets and that TorchScript requires before."""
        layer = super().__prepare_scriptable__()
        layer._use_segment_matmul_heuristic_output = False
        return layer


class FastFastRGCNConv(_RelationalConv, pyg.FastRGCNConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.FastRGCNConv` on FastSparse kernels.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}_{\textrm{root}} \cdot \mathbf{x}_i + \sum_{r \in \mathcal{R}}
        \sum_{j \in \mathcal{N}_r(i)} \frac{1}{|\mathcal{N}_r(i)|} \mathbf{\Theta}_r \cdot \mathbf{x}_j

    From "Modeling Relational Data with Graph Convolutional Networks" (https://arxiv.org/abs/1703.06103). For
    sums and means it gives the same results as :class:`FastRGCNConv`, with the same parameters.

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastFastRGCNConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastFastRGCNConv(8, 4, num_relations=2)(x, edge_index, torch.tensor([0, 1, 0])).shape
        torch.Size([3, 4])
    """

    _aggregations: ClassVar[tuple[type[torch.nn.Module], ...]] = (SumAggregation, MeanAggregation)
    _onto_zeros: ClassVar[bool] = False

    def _drops_unknown(self) -> bool:
        return False

    def _reason(
        self, x_src: Any, x_dst: Any, edge_index: Any, edge_type: Any = None, *of_call: Any
    ) -> Reason | None:
        if isinstance(x_src, Tensor) and not x_src.is_floating_point():
            return Reason(
                "features that are indices", "Use RGCNConv"
            )  # PyG's layer ignores these indices, and uses the nodes' numbers instead
        return super()._reason(x_src, x_dst, edge_index, edge_type)
