"""GraphSAGE."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsparse_core import Adjacency
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.aggregate_transform import aggregate_linear
from fastsparse_core.fused.joint_linear import add_linear
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import is_plain_linear, may_be_one_node
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.fallback import run
from fastsparse_dgl.graph import DGLError, GraphLike, inv_degree_with_self
from fastsparse_dgl.nn.base import AggregationMixin

NO_LSTM = Reason("aggregator_type='lstm' has no kernel", "Use 'mean', 'gcn' or 'pool'")


class FastSAGEConv(AggregationMixin, dgl.nn.pytorch.SAGEConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.SAGEConv`.

    From Hamilton et al., `Inductive Representation Learning on Large Graphs
    <https://arxiv.org/abs/1706.02216>`_:

    .. math::
        \mathbf{h}_i' = \sigma\big(\mathbf{W}_\text{self} \mathbf{h}_i + \mathbf{b} + \mathbf{W}_\text{neigh}
        \, \text{aggregate}_{j \in \mathcal{N}(i)} (e_{ji} \mathbf{h}_j)\big)

    With ``"gcn"``, the argument of :math:`\sigma` is :math:`\mathbf{W}_\text{neigh} (\mathbf{h}_i + \sum_j
    e_{ji} \mathbf{h}_j) / (|\mathcal{N}(i)| + 1) + \mathbf{b}`. Parameters, defaults, state_dict and repr are
    the same as DGL's.
    FastSparse computes ``"mean"``, ``"gcn"`` and ``"pool"``; with ``"lstm"``, DGL's own code runs. Unlike
    in DGL, ``graph`` may be an :class:`fastsparse_core.Adjacency` and features may be on a GPU while the
    graph is on the CPU (except with ``"lstm"``).

    Args:
        in_feats: width of the input, or a pair of widths (source, destination).
        out_feats: width of the output.
        aggregator_type: ``"mean"``, ``"gcn"``, ``"pool"`` or ``"lstm"``.
        feat_drop: dropout of the input.
        bias: whether the layer has a bias.
        norm: applied to the result, after the activation.
        activation: applied to the result.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastSAGEConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastSAGEConv(8, 4, "mean")(graph, torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    def forward(
        self,
        graph: GraphLike,
        feat: Tensor | tuple[Tensor, Tensor],
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, in_feats), float64, float32, float16 or bfloat16, or a pair of source and
                destination features.
            edge_weight: numbers (E,) or (E, 1), or broadcastable against one node's features, in the order of
                the edge ids.

        Returns:
            (number of destinations, out_feats).

        Raises:
            DGLError: sizes, devices or options do not fit.
        """
        if self._aggre_type == "lstm":
            if isinstance(graph, Adjacency):
                raise DGLError("graph: aggregator_type='lstm' needs a DGLGraph, got an Adjacency")
            name, forward = type(self).__name__, super().forward
            result: Tensor = run(name, NO_LSTM, forward, graph, feat, edge_weight)
            return result

        adjacency, source, given = self._structure(graph, feat)
        source, given = self.feat_drop(source), None if given is None else self.feat_drop(given)
        if self._aggre_type == "gcn":
            out = self._gcn(graph, adjacency, source, given, edge_weight)
        else:
            destination = self._destination(graph, adjacency, source, given)
            whole = self._in_one_step(adjacency, source, destination, edge_weight)
            if whole is None:
                whole = self._plus_neighbours(self.fc_self(destination), adjacency, source, edge_weight)
            out = whole

        if self.activation is not None:
            out = self.activation(out)
        if self.norm is not None:
            out = self.norm(out)
        return out

    @property
    def _transform_first(self) -> bool:
        """True if the linear map comes before the aggregation. As in DGL, narrower features are gathered."""
        return self._in_src_feats > self._out_feats

    def _in_one_step(
        self, adjacency: Adjacency, source: Tensor, destination: Tensor, edge_weight: Tensor | None
    ) -> Tensor | None:
        """Computes the mean layer with one operator; None if the operator does not support the call."""
        own, neigh = self.fc_self, self.fc_neigh
        if (
            self._aggre_type == "mean"
            and edge_weight is None
            and is_plain_linear(own)
            and is_plain_linear(neigh)
            and neigh.bias is None
            and may_be_one_node(source)
        ):
            parameters = (neigh.weight, own.bias, own.weight)
            return aggregate_linear(
                adjacency,
                source,
                *parameters,
                "mean",
                root=destination,
                transform_first=self._transform_first,
            )
        return None

    def _plus_neighbours(
        self, out: Tensor, adjacency: Adjacency, source: Tensor, edge_weight: Tensor | None
    ) -> Tensor:
        """Adds the neighbours' part of the mean and pool layers to ``out``, the result of ``fc_self``."""
        if self._aggre_type == "pool":
            neighbours = self._aggregate(adjacency, F.relu(self.fc_pool(source)), edge_weight, "max")
        elif self._transform_first:
            return out + self._aggregate(adjacency, self.fc_neigh(source), edge_weight, "mean")
        else:
            neighbours = self._aggregate(adjacency, source, edge_weight, "mean")
        if is_plain_linear(self.fc_self):
            return add_linear(out, (neighbours,), (self.fc_neigh,))
        return out + self.fc_neigh(neighbours)  # not in place, because a hook may have stored `out`

    def _gcn(
        self,
        graph: GraphLike,
        adjacency: Adjacency,
        source: Tensor,
        given: Tensor | None,
        edge_weight: Tensor | None,
    ) -> Tensor:
        """Computes the mean over a node and its neighbours, its linear map, and the bias.

        Args:
            graph: the caller's graph.
            adjacency: structure of the graph.
            source: source features.
            given: destination features if the caller passed a pair, else None.
            edge_weight: see :meth:`forward`.
        """
        transform_first = self._transform_first
        if given is not None and given.shape[1:] != source.shape[1:]:
            raise DGLError(
                f"feat: expected source and destination features of one width for aggregator_type='gcn', "
                f"got shapes {tuple(source.shape)} and {tuple(given.shape)}"
            )
        if given is not None and self._has_one_frame(graph):
            source = given
        if transform_first:
            source = self.fc_neigh(source)
            given = self.fc_neigh(given) if given is not None else None
        destination = self._destination(graph, adjacency, source, given)
        scale = inv_degree_with_self(adjacency, accumulation_dtype(source.dtype))
        bias = self.bias if transform_first else None
        out = self._aggregate(adjacency, source, edge_weight, scale_dst=scale, bias=bias)
        scale = scale.to(out.dtype).reshape(-1, *[1] * (destination.dim() - 1))
        out = torch.addcmul(out, destination, scale)
        if not transform_first:
            out = self.fc_neigh(out)
            if self.bias is not None:
                out = out + self.bias
        return out
