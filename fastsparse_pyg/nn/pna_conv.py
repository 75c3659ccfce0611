"""Principal neighbourhood aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Sequential
from torch_geometric.nn import PNAConv
from torch_geometric.nn.aggr import (
    Aggregation,
    DegreeScalerAggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.typing import OptTensor

from fastsparse_core import Adjacency, multi_aggregate
from fastsparse_core.fused.principal_aggregation import add_scaled, node_parts
from fastsparse_core.structure.incidence import incidence
from fastsparse_pyg.graph import EdgesLike, is_sparse_matrix, num_caller_values, to_edge_index
from fastsparse_pyg.nn.base import FastConv, is_plain_linear, raise_features

_AGGREGATIONS = {
    SumAggregation: "sum",
    MeanAggregation: "mean",
    MinAggregation: "min",
    MaxAggregation: "max",
    VarAggregation: "var",
    StdAggregation: "std",
}
_SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")


class FastPNAConv(FastConv, PNAConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.PNAConv` on FastSparse kernels.

    .. math::
        \mathbf{x}_i^{\prime} = \gamma_{\mathbf{\Theta}} \Big( \mathbf{x}_i, \underset{j \in
        \mathcal{N}(i)}{\bigoplus} h_{\mathbf{\Theta}} ( \mathbf{x}_i, \mathbf{x}_j, \mathbf{e}_{ij} ) \Big),
        \qquad \bigoplus = \text{scalers} \otimes \text{aggregators}

    after "Principal Neighbourhood Aggregation for Graph Nets" (https://arxiv.org/abs/2004.05718). Arguments,
    parameters, ``state_dict`` and results are the original's. With ``pre_layers=1`` the message is
    :math:`\mathbf{P} \mathbf{x}_i + \mathbf{Q} \mathbf{x}_j + \mathbf{R} \mathbf{e}_{ij} + \mathbf{b}`: the
    products with nodes are computed once per node, :func:`fastsparse_core.multi_aggregate` adds the edge's
    part (of up to 32 features) and computes all aggregations in one pass, and no message is stored. Scalers
    stand behind the update's linear map, so scaled aggregations are not stored either. With more
    ``pre_layers`` messages are PyG's and stored, their aggregation is the kernel's. The variance is that of
    deviations from the mean: more accurate than the original's difference of squares. Entries that share a
    minimum or maximum share its gradient, also where it is exactly 0, of which PyTorch's ``scatter_reduce``
    then drops a part.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, float64, float32, float16 or bfloat16;
          edges :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or
          :class:`~fastsparse_core.Adjacency`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`
    """

    _kernel = "multi_aggregate"
    _bipartite = False
    _fusible = False
    _aggregations = (DegreeScalerAggregation,)

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_attr: OptTensor = None) -> Tensor:
        """Computes the layer.

        Args:
            x: node features (N, F_in).
            edge_index: edges (2, E), EdgeIndex, transposed sparse matrix, or Adjacency of a prepared graph.
            edge_attr: features (E, edge_dim) in the order of the edges; needed where the layer has
                ``edge_dim``.

        Returns:
            Node features (N, F_out).

        Raises:
            ValueError: sizes, dtypes or devices do not fit.
            IndexError: an index points to no node.
        """
        reason = self._why_original_pna(x, edge_index, edge_attr)
        if reason:
            return self._original_forward(reason, x, edge_index, edge_attr)
        graph = self._graph((x, x), edge_index, None)
        adj = graph.adj
        if edge_attr is not None and edge_attr.size(0) != num_caller_values(graph.adj):
            raise ValueError(
                f"edge_attr: expected one row per edge, {num_caller_values(graph.adj)}, "
                f"got shape {tuple(edge_attr.shape)}"
            )
        width, shared = self.F_in, not self.divide_input
        updates = [nn[0] for nn in self.post_nns]
        # Of a split the gradients are put together at once, of slices one by one, in a matrix of zeros each.
        halves = [each.weight.split_with_sizes([width, each.weight.size(1) - width], 1) for each in updates]
        of_own, weights = [half[0] for half in halves], [half[1] for half in halves]
        own_bias = _joined([update.bias for update in updates])
        scaler = self.aggr_module
        names = aggregation_names(scaler)
        if all(is_one_linear(nn) for nn in self.pre_nns):
            maps = [nn[0] for nn in self.pre_nns]
            bias = _joined([each.bias for each in maps])
            sizes = [width] * (2 if edge_attr is None else 3)
            of_dst, of_src, *rest = zip(
                *(each.weight.split_with_sizes(sizes, 1) for each in maps), strict=True
            )
            of_edges: dict[str, Any] = {}
            if edge_attr is not None:
                of_edge = _joined(rest[0])
                encoder = self.edge_encoder
                of_edges = {"edge_attr": edge_attr, "edge_weight": of_edge @ encoder.weight}
                bias = bias + of_edge @ encoder.bias
            x_dst, x_src, own = node_parts(x, of_dst, of_src, of_own, bias, own_bias, shared)
            aggregated = multi_aggregate(adj, x_src, names, x_dst=x_dst, groups=self.towers, **of_edges)
        else:
            nothing = [each[:0] for each in of_own]
            _, _, own = node_parts(x, nothing, nothing, of_own, None, own_bias, shared)
            rows = self._messages(x, edge_index, adj, edge_attr)
            aggregated = multi_aggregate(incidence(adj), rows, names, groups=self.towers)
        out = add_scaled(own, aggregated, weights, self._factors(adj, aggregated, scaler))
        if any(len(nn) > 1 for nn in self.post_nns):
            parts = zip(self.post_nns, out.split(self.F_out, dim=1), strict=True)
            out = torch.cat([nn[1:](part) for nn, part in parts], dim=1)
        return self.lin(out)

    def _messages(self, x: Tensor, edge_index: Any, adj: Adjacency, edge_attr: Tensor | None) -> Tensor:
        """PyG's messages (E, towers * F_in), in the order of the edges."""
        edges = to_edge_index(adj, self.flow) if isinstance(edge_index, Adjacency) else edge_index
        source, target = (0, 1) if self.flow == "source_to_target" else (1, 0)
        shape = (-1, self.towers, self.F_in)
        of_towers = x.view(shape) if self.divide_input else x[:, None].expand(-1, self.towers, -1)
        x_j, x_i = (of_towers.index_select(0, edges[end].long()) for end in (source, target))
        return self.message(x_i, x_j, edge_attr).flatten(1)

    def _factors(self, adj: Adjacency, like: Tensor, scaler: DegreeScalerAggregation) -> list[Tensor | None]:
        """What every scaler multiplies the aggregations of each node by; None: 1."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

        def of_degree(name: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
            """What layers of one graph share."""
            return adj.derived(("pna", name, dtype), lambda: compute(adj.in_degree().to(dtype)))

        formulas = {
            "amplification": lambda: of_degree("log", lambda d: torch.log(d + 1)) / scaler.avg_deg_log,
            "attenuation": lambda: (
                scaler.avg_deg_log / of_degree("log of some", lambda d: torch.log(d.clamp(min=1) + 1))
            ),
            "linear": lambda: of_degree("degree", lambda d: d) / scaler.avg_deg_lin,
            "inverse_linear": lambda: scaler.avg_deg_lin / of_degree("some", lambda d: d.clamp(min=1)),
        }
        return [None if name == "identity" else formulas[name]() for name in scaler.scaler]

    def _why_original_pna(self, x: Any, edge_index: object, edge_attr: object) -> str:
        if not isinstance(x, Tensor):
            raise_features(x)
        if x.dim() != 2:
            return "features that are not a matrix"
        if (edge_attr is None) != (self.edge_dim is None):
            return "edge features without edge_dim, or edge_dim without edge features"
        if edge_attr is not None:
            if not isinstance(edge_attr, Tensor) or edge_attr.dim() != 2:
                return "edge features that are not a matrix"
            if is_sparse_matrix(edge_index):
                return "a sparse matrix with edge features beside it"
            if torch.compiler.is_compiling() and not all(is_one_linear(nn) for nn in self.pre_nns):
                return "torch.compile with stored messages"
        if is_sparse_matrix(edge_index) and (
            edge_index.dense_dim() > 0
            if isinstance(edge_index, Tensor)
            else edge_index.storage.value() is not None  # type: ignore[attr-defined]
        ):
            return "a sparse matrix that carries edge features"
        if is_sparse_matrix(edge_index) and not all(is_one_linear(nn) for nn in self.pre_nns):
            return "a sparse matrix with stored messages"
        return self._why_original(x, edge_index) or why_no_kernel(self)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def is_one_linear(nn: Module) -> bool:
    """Whether a tower's message is one plain linear map."""
    return _is_plain_sequence(nn) and len(nn) == 1 and is_plain_linear(nn[0])  # type: ignore[arg-type, index]


def _is_plain_sequence(nn: Module) -> bool:
    return type(nn) is Sequential and not (nn._forward_hooks or nn._forward_pre_hooks or nn._backward_hooks)


def aggregation_names(scaler: DegreeScalerAggregation) -> list[str]:
    """The aggregations of a PNA layer by name; one that has no kernel is ""."""

    def name(aggregation: Aggregation) -> str:
        if aggregation._forward_hooks or aggregation._forward_pre_hooks:
            return ""
        found = _AGGREGATIONS.get(type(aggregation), "")
        if found in ("var", "std"):
            of_variance = getattr(aggregation, "var_aggr", aggregation)
            if getattr(of_variance, "semi_grad", False):
                return ""
        return found

    several = scaler.aggr
    if type(several) is not MultiAggregation or several.mode != "cat":
        return [""]
    return [name(aggregation) for aggregation in several.aggrs]


def why_no_kernel(layer: PNAConv) -> str:
    """What of a PNA layer keeps PyG's own code running, whatever it is given; "" for nothing."""
    scaler = layer.aggr_module
    if type(scaler) is not DegreeScalerAggregation:
        return f"aggr={layer.aggr!r} has no kernel"
    names = aggregation_names(scaler)
    if "" in names or len(set(names)) < len(names):
        return f"aggregators {[type(each).__name__ for each in getattr(scaler.aggr, 'aggrs', [scaler.aggr])]}"
    if not set(scaler.scaler) <= set(_SCALERS):
        return f"scalers {scaler.scaler}"
    if layer.edge_dim is not None and (layer.edge_dim < 1 or not is_plain_linear(layer.edge_encoder)):
        return "an edge encoder that is not a plain linear map"
    if not all(_is_plain_sequence(nn) and is_plain_linear(nn[0]) for nn in layer.post_nns):
        return "an update that does not begin with a plain linear map"
    return ""
