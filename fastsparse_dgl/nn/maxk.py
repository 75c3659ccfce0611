"""Layers on sparse activations: MaxK before the aggregation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastsparse_core import CBSR, Adjacency, MaxK, ssd
from fastsparse_core.fused.maxk_linear import (
    aggregate_cbsr,
    can_maxk_linear,
    densifies,
    maxk_linear,
)
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import is_plain_linear
from fastsparse_dgl.graph import DGLError, GraphLike, inv_degree_with_self
from fastsparse_dgl.nn.graph_conv import FastGraphConv
from fastsparse_dgl.nn.sage_conv import FastSAGEConv


def _activation(k: int, in_feats: int | tuple[int, int]) -> MaxK:
    activation = MaxK(k)
    for width in (in_feats,) if isinstance(in_feats, int) else in_feats:
        if k > width:
            raise DGLError(f"k: expected at most {width}, the width of the input, got {k}")
    return activation


def _dense(feat: Any, activation: MaxK) -> Any:
    """Returns MaxK of the features as a dense tensor. CBSR features are only converted to a dense tensor."""
    if isinstance(feat, tuple):
        return tuple(_dense(part, activation) for part in feat)
    if isinstance(feat, CBSR):
        return feat.to_dense()
    return activation(feat) if isinstance(feat, Tensor) else feat


def _compressed(feat: Any, activation: MaxK) -> CBSR | None:
    """Returns MaxK of the source features as CBSR; None if they are no matrix, or dense rows are faster."""
    source = feat[0] if isinstance(feat, tuple) and len(feat) == 2 else feat
    if isinstance(source, CBSR):
        return None if densifies(source.values, source.values.size(1), source.width) else source
    if not isinstance(source, Tensor) or source.dim() != 2 or densifies(source, activation.k, source.size(1)):
        return None
    return activation.compress(source)


def _one_value(edge_weight: Tensor | None, adjacency: Adjacency) -> bool:
    """True if there is at most one weight per edge."""
    return edge_weight is None or (
        isinstance(edge_weight, Tensor)
        and edge_weight.dim() in (1, 2)
        and edge_weight.numel() == edge_weight.size(0) == adjacency.num_values
        and edge_weight.device == adjacency.device
    )


class FastMaxKGraphConv(FastGraphConv):
    r"""Graph convolution on MaxK's sparse activations.

    .. math::
        \mathbf{h}_i' = \sigma\Big(\mathbf{b} + \sum_{j \in \mathcal{N}(i)} \frac{e_{ji}}{c_{ji}}\,
        \mathrm{MaxK}(\mathbf{h}_j) \mathbf{W}\Big)

    After `MaxK-GNN <https://arxiv.org/abs/2312.08656>`_, section 3: ``FastMaxKGraphConv(F, G, k)`` gives the
    result of ``GraphConv(F, G)`` for ``MaxK(k)(feat)``. In a stack of layers MaxK replaces the activation;
    put a linear layer in front of the stack. Only the k kept entries of each row are gathered
    (:func:`fastsparse_core.ssd`). The exception is a large k on a GPU (more than a quarter of the features,
    or an eighth in 16 bits), for which dense rows are faster. Parameters and state_dict are those of
    :class:`dgl.nn.pytorch.GraphConv`.

    Args:
        in_feats: width of the input.
        out_feats: width of the output.
        k: kept entries of each row, from 1 to ``in_feats``.
        recompute: whether the backward pass aggregates the kept entries a second time, for the gradient of
            the weight. Then only the kept entries are stored; otherwise their dense sums are stored too.
        kwargs: further arguments of GraphConv.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastMaxKGraphConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastMaxKGraphConv(8, 4, k=2)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self, in_feats: int, out_feats: int, k: int, *, recompute: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(in_feats, out_feats, **kwargs)
        self.maxk = _activation(k, in_feats)
        self.recompute = recompute

    def forward(
        self,
        graph: GraphLike,
        feat: Any,
        weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: as in :meth:`FastGraphConv.forward`, or :class:`fastsparse_core.CBSR`, to which MaxK is not
                applied again.
            weight: (in_feats, out_feats), in the dtype of ``feat``, for a layer without its own.
            edge_weight: as in :meth:`FastGraphConv.forward`; with more than one weight per edge the dense
                MaxK features are aggregated.

        Returns:
            (number of destinations, ..., out_feats).
        """
        cbsr = _compressed(feat, self.maxk)
        if cbsr is None:
            return super().forward(graph, _dense(feat, self.maxk), weight, edge_weight)
        adjacency, _, _ = self._structure(graph, cbsr.values)
        matrix = self.weight if weight is None else weight
        if (
            matrix is None
            or (weight is not None and self.weight is not None)
            or not _one_value(edge_weight, adjacency)
        ):
            return super().forward(graph, cbsr.to_dense(), weight, edge_weight)

        value = None if edge_weight is None else edge_weight.reshape(-1)
        scales = self._scales(adjacency, cbsr.values)
        if can_maxk_linear(adjacency, cbsr, matrix, self.bias, out_by_in=False):
            out = maxk_linear(
                adjacency,
                cbsr,
                matrix,
                self.bias,
                value=value,
                out_by_in=False,
                recompute=self.recompute,
                **scales,
            )
        else:
            out = ssd(adjacency, cbsr, value, **scales)
            out = torch.matmul(out, matrix) if self.bias is None else torch.addmm(self.bias, out, matrix)
        return out if self._activation is None else self._activation(out)


class FastMaxKSAGEConv(FastSAGEConv):
    r"""GraphSAGE on MaxK's sparse activations.

    .. math::
        \mathbf{h}_i' = \sigma\big(\mathbf{W}_\text{self} \mathrm{MaxK}(\mathbf{h}_i) + \mathbf{b} +
        \mathbf{W}_\text{neigh} \, \text{aggregate}_{j \in \mathcal{N}(i)} (e_{ji}
        \mathrm{MaxK}(\mathbf{h}_j))\big)

    After `MaxK-GNN <https://arxiv.org/abs/2312.08656>`_, section 3: ``FastMaxKSAGEConv(F, G, "mean", k)``
    gives the result of ``SAGEConv(F, G, "mean")`` for ``MaxK(k)(feat)``; see :class:`FastMaxKGraphConv`. With
    ``"mean"`` and ``"gcn"`` the sparse rows are aggregated, unless k is large. With ``"pool"`` and
    ``"lstm"``, the dense MaxK features are.

    Args:
        in_feats: width of the input, or a pair of widths (source, destination).
        out_feats: width of the output.
        aggregator_type: ``"mean"``, ``"gcn"``, ``"pool"`` or ``"lstm"``.
        k: kept entries of each row, from 1 to the width of the input.
        recompute: as for :class:`FastMaxKGraphConv`.
        kwargs: further arguments of SAGEConv.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastMaxKSAGEConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastMaxKSAGEConv(8, 4, "mean", k=2)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        aggregator_type: str,
        k: int,
        *,
        recompute: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_feats, out_feats, aggregator_type, **kwargs)
        self.maxk = _activation(k, in_feats)
        self.recompute = recompute

    def forward(self, graph: GraphLike, feat: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: as in :meth:`FastSAGEConv.forward`, or :class:`fastsparse_core.CBSR`, to which MaxK is not
                applied again, or a pair of either.
            edge_weight: as in :meth:`FastSAGEConv.forward`; with more than one weight per edge the dense MaxK
                features are aggregated.

        Returns:
            (number of destinations, out_feats).
        """
        aggregates = self._aggre_type in ("mean", "gcn")
        cbsr = _compressed(feat, self.maxk) if aggregates else None
        if cbsr is None:
            return super().forward(graph, _dense(feat, self.maxk), edge_weight)
        adjacency, _, _ = self._structure(graph, cbsr.values)
        other = _dense(feat[1], self.maxk) if isinstance(feat, tuple) else None
        one_width = other is None or other.shape[1:] == (cbsr.width,)
        if not _one_value(edge_weight, adjacency) or (self._aggre_type == "gcn" and not one_width):
            return super().forward(graph, _dense(feat, self.maxk), edge_weight)
        cbsr = cbsr.with_values(self.feat_drop(cbsr.values))
        other = None if other is None else self.feat_drop(other)
        value = None if edge_weight is None else edge_weight.reshape(-1)
        # Checks the number of destinations before anything is computed.
        self._destination(graph, adjacency, cbsr.values, other)

        def destination(kept: CBSR) -> Tensor:
            return self._destination(
                graph, adjacency, kept.to_dense() if other is None else kept.values, other
            )

        if self._aggre_type == "gcn":
            scale = inv_degree_with_self(adjacency, accumulation_dtype(cbsr.values.dtype))

            def transform(out: Tensor, kept: CBSR) -> Tensor:
                out = self.fc_neigh(torch.addcmul(out, destination(kept), scale[:, None].to(out.dtype)))
                return out if self.bias is None else out + self.bias

            if self.recompute and other is None and is_plain_linear(self.fc_neigh):
                out = aggregate_cbsr(adjacency, cbsr, transform, self.fc_neigh.weight, value, scale_dst=scale)
            else:
                out = transform(ssd(adjacency, cbsr, value, scale_dst=scale), cbsr)
        elif other is None and self._is_one_map(adjacency, cbsr, self.fc_self):
            own = self.fc_self
            out = self._mean_and_map(adjacency, cbsr, value, own.bias, own.weight)
        elif self._is_one_map(adjacency, cbsr):
            out = self.fc_self(destination(cbsr)) + self._mean_and_map(adjacency, cbsr, value)
        else:
            out = self.fc_self(destination(cbsr)) + self.fc_neigh(ssd(adjacency, cbsr, value, "mean"))
        if self.activation is not None:
            out = self.activation(out)
        return out if self.norm is None else self.norm(out)

    def _mean_and_map(
        self,
        adjacency: Adjacency,
        cbsr: CBSR,
        value: Tensor | None,
        bias: Tensor | None = None,
        root_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes the mean over neighbours, transformed by ``fc_neigh``; needs `_is_one_map`."""
        weight, recompute = self.fc_neigh.weight, self.recompute
        return maxk_linear(
            adjacency, cbsr, weight, bias, root_weight, value, "mean", out_by_in=True, recompute=recompute
        )

    def _is_one_map(self, adjacency: Adjacency, cbsr: CBSR, own: nn.Linear | None = None) -> bool:
        """True if one operator can compute the mean together with ``fc_neigh`` (and ``own``, if given)."""
        neigh = self.fc_neigh
        return (
            (own is None or is_plain_linear(own))
            and is_plain_linear(neigh)
            and neigh.bias is None
            and can_maxk_linear(
                adjacency,
                cbsr,
                neigh.weight,
                None if own is None else own.bias,
                None if own is None else own.weight,
                out_by_in=True,
            )
        )
