"""Principal neighbourhood aggregation: DGL's PNAConv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.principal_aggregation import Scaled, joined_maps, scaled_aggregation
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE
from fastsparse_core.ops._eager import has_plain_call, is_plain_linear
from fastsparse_core.ops.multi_aggregate import AGGREGATIONS
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.fallback import run
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import AggregationMixin, check_edges

_SCALERS = ("identity", "amplification", "attenuation")


class FastPNAConv(AggregationMixin, dgl.nn.pytorch.PNAConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.PNAConv`.

    From Corso et al., `Principal Neighbourhood Aggregation for Graph Nets
    <https://arxiv.org/abs/2004.05718>`_, for each tower:

    .. math::
        \mathbf{h}_i' = U\Big(\mathbf{h}_i, \bigoplus_{j \in \mathcal{N}(i)} M(\mathbf{h}_j, \mathbf{h}_i,
        \mathbf{e}_{ij})\Big), \qquad \bigoplus = \text{scalers} \otimes \text{aggregators}

    Parameters, defaults, state_dict and repr are the same as DGL's. :math:`M` is linear, so its products with
    nodes are computed once per node, for all towers together; :func:`fastsparse_core.multi_aggregate` adds
    the edge's part (of up to 32 features) and computes all aggregations in one pass over the graph. DGL
    needs one pass for every distinct degree. No message and no scaled aggregation is stored. With the
    aggregators ``moment3``, ``moment4`` or ``moment5``, DGL's own code runs. If several messages are equal to
    a minimum or maximum, they share its gradient evenly; DGL gives it to one of them. Unlike in DGL,
    ``graph`` may be an :class:`fastsparse_core.Adjacency`, which counts as one graph in the normalisation by
    graph sizes, and features may be on a GPU while the graph is on the CPU.

    Args:
        in_size: width of the input, divisible by ``num_towers``.
        out_size: width of the output, divisible by ``num_towers``.
        aggregators: any of ``"mean"``, ``"max"``, ``"min"``, ``"std"``, ``"var"``, ``"sum"``,
            ``"moment3"``, ``"moment4"`` and ``"moment5"``.
        scalers: any of ``"identity"``, ``"amplification"``, ``"attenuation"``.
        delta: mean of :math:`\log(d + 1)` over the training set's nodes.
        dropout: dropout probability of every tower's result.
        num_towers: number of towers; the input is split into as many parts.
        edge_feat_size: width of the edges' features, 0: none.
        residual: whether the input is added to the result, if both have the same width.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastPNAConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastPNAConv(8, 4, ["mean", "max"], ["identity"], delta=1.0)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    _kernel = "multi_aggregate"

    def forward(self, graph: GraphLike, node_feat: Tensor, edge_feat: Tensor | None = None) -> Tensor:
        """Computes the new node features.

        Args:
            graph: homogeneous DGLGraph or Adjacency.
            node_feat: (N, in_size), float64, float32, float16 or bfloat16.
            edge_feat: (E, edge_feat_size), in the dtype of ``node_feat``, in the order of the edge ids;
                required with ``edge_feat_size``.

        Returns:
            (N, out_size).

        Raises:
            DGLError: sizes or devices do not fit, or ``graph`` is an Adjacency but DGL's
                own code must run.
        """
        reason = why_no_kernel(self)
        if reason is not None:
            if isinstance(graph, Adjacency):
                raise DGLError(
                    f"graph: expected a DGLGraph, because DGL's own code runs ({reason.message}), "
                    "got an Adjacency"
                )
            name, forward = type(self).__name__, super().forward
            out: Tensor = run(name, reason, forward, graph, node_feat, edge_feat)
            return out
        adjacency, node_feat, _ = self._structure(graph, node_feat, "node_feat")
        if adjacency.num_dst != adjacency.num_src or not (
            isinstance(graph, Adjacency) or graph.is_homogeneous
        ):
            raise DGLError(
                "graph: expected a homogeneous graph, got one whose sources and destinations "
                "are different nodes"
            )
        if node_feat.dim() != 2 or node_feat.size(1) != self.in_size:
            raise DGLError(f"node_feat: expected shape (N, {self.in_size}), got {tuple(node_feat.shape)}")
        if self.edge_feat_size > 0:
            check_edges("edge_feat", edge_feat, adjacency, self.edge_feat_size)
        width, towers = self.tower_in_size, list(self.towers)
        # One loop, because each comprehension would be a function call in Python 3.11.
        of_dst, of_src, of_edge, of_own, weights, biases, own_biases = [], [], [], [], [], [], []
        for tower in towers:
            message, update = tower.M, tower.U
            # The gradient of a split is one tensor; the gradient of each slice would be a matrix full of
            # zeros.
            src, dst, edge = message.weight.split_with_sizes([width, width, self.edge_feat_size], 1)
            own, rest = update.weight.split_with_sizes([width, update.weight.size(1) - width], 1)
            of_dst.append(dst)
            of_src.append(src)
            of_edge.append(edge)
            biases.append(message.bias)
            of_own.append(own)
            weights.append(rest)
            own_biases.append(update.bias)
        matrix, bias = joined_maps(of_dst, of_src, of_own, biases, own_biases, shared=False)
        edges = (edge_feat, torch.cat(of_edge)) if edge_feat is not None and self.edge_feat_size > 0 else None
        factors = self._factors(adjacency, node_feat.dtype)
        of = Scaled(adjacency, towers[0].aggregators, len(towers), 0.0, factors)
        out = scaled_aggregation(of, node_feat, matrix, bias, edges, weights)
        out = out * self._graph_norm(graph, adjacency, out)
        parts = out.split(self.tower_out_size, dim=1)
        mixed = self.mixing_layer(
            torch.cat([t.dropout(t.batchnorm(part)) for t, part in zip(towers, parts, strict=True)], dim=1)
        )
        return mixed + node_feat if self.residual else mixed

    def _factors(self, adjacency: Adjacency, dtype: torch.dtype) -> list[Tensor | None]:
        """Returns the factors of the nodes' aggregations for every scaler; None if they are 1."""
        dtype = ACCUMULATION_DTYPE[dtype]

        def of_degree() -> Tensor:
            return torch.log(
                adjacency.in_degree().to(dtype).clamp(min=1) + 1
            )  # without edges the aggregations are 0

        first, factors = self.towers[0], []
        for name in first.scalers:
            factor: Tensor | None = None
            if name != "identity":
                factor = adjacency.derived(("dgl pna", dtype), of_degree)
                factor = factor / first.delta if name == "amplification" else first.delta / factor
            factors.append(factor)
        return factors

    def _graph_norm(self, graph: GraphLike, adjacency: Adjacency, like: Tensor) -> Tensor | float:
        """Returns 1 / sqrt(nodes of the graph) for every node, (N, 1); a number if there is one graph."""
        if isinstance(graph, Adjacency) or graph.batch_size == 1:
            return float(max(adjacency.num_dst, 1)) ** -0.5

        dtype = ACCUMULATION_DTYPE[like.dtype]
        norm: Tensor = dgl.broadcast_nodes(graph, graph.batch_num_nodes().to(dtype).rsqrt()[:, None])
        return norm.to(like)


def why_no_kernel(layer: Any) -> Reason | None:
    """Returns why a PNA layer always runs DGL's own code; None if it does not."""
    first = layer.towers[0]
    names = list(first.aggregators)
    if not names or not set(names) <= set(AGGREGATIONS) or len(set(names)) < len(names):
        cure = f"Use each of {', '.join(AGGREGATIONS)} at most once"
        return Reason(f"aggregators={names} are not supported", cure)
    if not first.scalers or not set(first.scalers) <= set(_SCALERS):
        cure = f"Use {', '.join(_SCALERS)}"
        return Reason(f"scalers={list(first.scalers)} are not supported", cure)
    for tower in layer.towers:
        if not is_plain_linear(tower.M) or not is_plain_linear(tower.U) or not has_plain_call(tower):
            return Reason("a tower has hooks or replaced linear layers", "")
    return None
