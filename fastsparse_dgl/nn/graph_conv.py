"""Graph convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastsparse_core import Adjacency
from fastsparse_core.fused.aggregate_transform import graph_convolution
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._eager import may_be_one_node
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.graph import DGLError, GraphLike
from fastsparse_dgl.nn.base import AggregationMixin

#: `norm` -> the methods of an Adjacency that return the factors of destinations and sources; "": no factors.
_NORMS = {
    "both": ("inv_sqrt_degree", "inv_sqrt_out_degree"),
    "right": ("inv_degree", ""),
    "left": ("", "inv_out_degree"),
    "none": ("", ""),
}


class FastGraphConv(AggregationMixin, dgl.nn.pytorch.GraphConv):
    r"""Drop-in replacement of :class:`dgl.nn.pytorch.GraphConv`.

    From Kipf and Welling, `Semi-Supervised Classification with Graph Convolutional Networks
    <https://arxiv.org/abs/1609.02907>`_:

    .. math::
        \mathbf{h}_i' = \sigma\Big(\mathbf{b} + \sum_{j \in \mathcal{N}(i)} \frac{e_{ji}}{c_{ji}}\,
        \mathbf{h}_j \mathbf{W}\Big), \qquad c_{ji} = \sqrt{|\mathcal{N}(j)|}\sqrt{|\mathcal{N}(i)|} \text{
        for norm="both".}

    Parameters, defaults, state_dict, repr and errors are the same as DGL's. Normalisation and bias are part
    of the aggregation, so nothing is computed per edge. Unlike in DGL, ``graph`` may be an
    :class:`fastsparse_core.Adjacency`. Features may be on a GPU while the graph is on the CPU; the structure
    is copied once.

    Args:
        in_feats: width of the input.
        out_feats: width of the output.
        norm: ``"both"``, ``"right"`` (by in-degree), ``"left"`` (by out-degree) or ``"none"``. Degrees are
            clamped to at least 1 and ignore edge weights.
        weight: whether the layer has a weight (in_feats, out_feats).
        bias: whether the layer has a bias (out_feats,).
        activation: applied to the result.
        allow_zero_in_degree: whether nodes without incoming edges are accepted; their result is the bias.

    Example:
        >>> import dgl, torch
        >>> from fastsparse_dgl import FastGraphConv
        >>> graph = dgl.graph(([0, 1, 2], [1, 2, 0]))
        >>> FastGraphConv(8, 4)(graph, torch.randn(3, 8)).shape
        torch.Size([3, 4])
    """

    def forward(
        self,
        graph: GraphLike,
        feat: Tensor | tuple[Tensor, Tensor],
        weight: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes the new node features.

        Args:
            graph: DGLGraph with one edge type, block, or Adjacency.
            feat: (N, ..., in_feats), float64, float32, float16 or bfloat16. If it is a pair (source features,
                destination features), only the first is used.
            weight: (in_feats, out_feats), in the dtype of ``feat``, for a layer without its own.
            edge_weight: numbers (E,) or (E, 1), or broadcastable against one node's features, in the order of
                the edge ids.

        Returns:
            (number of destinations, ..., out_feats).

        Raises:
            DGLError: sizes, devices or options do not fit, or a node has no incoming edge and
                ``allow_zero_in_degree`` is False.
        """
        adjacency, source, _ = self._structure(graph, feat)
        if self._norm in ("both", "left") and not source.is_floating_point():
            source = source.to(torch.get_default_dtype())  # as in DGL, whose degree factors are floating
        if weight is None:
            weight = self.weight
        elif self.weight is not None:
            raise DGLError(
                "External weight is provided while at the same time the"
                " module has defined its own weight parameter. Please"
                " create the module with flag weight=False."
            )

        scales = self._scales(adjacency, source)
        relu = self._activation in (torch.relu, torch.nn.functional.relu)
        # Aggregation and product have the same order as in DGL. The order decides how edge weights are
        # broadcast, and which tensors may be written in place.
        aggregate_first = self._in_feats <= self._out_feats
        out = None
        if edge_weight is None and may_be_one_node(source):
            call = (adjacency, source, weight, self.bias, False, aggregate_first)
            out = graph_convolution(*call, **scales, relu=relu, norms=_NORMS[self._norm])
        if out is not None:
            if relu:
                return out
        elif weight is None or not aggregate_first:
            if weight is not None:
                source = torch.matmul(source, weight)
            out = self._aggregate(adjacency, source, edge_weight, bias=self.bias, relu=relu, **scales)
            if relu:
                return out
        else:
            out = self._aggregate(adjacency, source, edge_weight, **scales)
            if self.bias is not None and out.dim() == 2 and weight.dim() == 2:
                out = torch.addmm(self.bias, out, weight)
            else:
                out = torch.matmul(out, weight)
                if self.bias is not None:
                    out = out + self.bias
        return out if self._activation is None else self._activation(out)

    def _scales(self, adjacency: Adjacency, source: Tensor) -> dict[str, Any]:
        """Returns the normalisation as arguments of the aggregation; the factors are cached."""
        key = ("DGL GraphConv", self._norm, source.dtype)
        found: dict[str, Any] | None = adjacency.plans.get(key)
        if found is None:
            dtype, found = accumulation_dtype(source.dtype), {}
            for side, name in zip(("scale_dst", "scale_src"), _NORMS[self._norm], strict=True):
                if name:
                    found[side] = getattr(adjacency, name)(dtype)
            adjacency.plans[key] = found
        return found


#: Alias, because the layer is called GCNConv in other frameworks.
FastGCNConv = FastGraphConv
