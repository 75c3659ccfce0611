"""Principal neighbourhood aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Sequential
from torch_geometric.nn import PNAConv
from torch_geometric.nn.aggr import (
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
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.principal_aggregation import (
    Scaled,
    add_scaled,
    joined_maps,
    node_parts,
    scaled_aggregation,
)
from fastsparse_core.ops._dtypes import ACCUMULATION_DTYPE
from fastsparse_core.ops._eager import has_plain_call
from fastsparse_pyg import fallback
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
#: Scaler -> (is_inverse, f). The factor is f(degree) / average, or average / f(degree) if ``is_inverse``.
_OF_DEGREE: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "amplification": (False, lambda degree: torch.log(degree + 1)),
    "attenuation": (True, lambda degree: torch.log(degree.clamp(min=1) + 1)),
    "linear": (False, lambda degree: degree),
    "inverse_linear": (True, lambda degree: degree.clamp(min=1)),
}
_OWN_MAPS = "Keep the linear maps that PNAConv makes, without hooks"
_SCALERS = {"identity", *_OF_DEGREE}


class FastPNAConv(FastConv, PNAConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.PNAConv` on FastSparse kernels.

    .. math::
        \mathbf{x}_i^{\prime} = \gamma_{\mathbf{\Theta}} \Big( \mathbf{x}_i, \underset{j \in
        \mathcal{N}(i)}{\bigoplus} h_{\mathbf{\Theta}} ( \mathbf{x}_i, \mathbf{x}_j, \mathbf{e}_{ij} ) \Big),
        \qquad \bigoplus = \text{scalers} \otimes \text{aggregators}

    From "Principal Neighbourhood Aggregation for Graph Nets" (https://arxiv.org/abs/2004.05718). Arguments,
    parameters, ``state_dict`` and results are the same as PyG's. With ``pre_layers=1`` the message is
    :math:`\mathbf{P} \mathbf{x}_i + \mathbf{Q} \mathbf{x}_j + \mathbf{R} \mathbf{e}_{ij} + \mathbf{b}`. The
    products with nodes are computed once per node. :func:`fastsparse_core.multi_aggregate` adds the edge's
    part (of up to 32 features) and computes all aggregations in one pass. No message is stored. Scalers are
    applied after the update's linear map, so scaled aggregations are not stored either. With more
    ``pre_layers``, PyG's code computes and stores the messages, and the kernel aggregates them. The variance
    is computed from deviations from the mean, which is more accurate than PyG's difference of squares.
    Messages that attain the same minimum or maximum share its gradient. If the minimum or maximum is exactly
    0, PyTorch's ``scatter_reduce`` drops a part of the gradient; this layer does not.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, float64, float32, float16 or bfloat16;
          edges :math:`(2, |\mathcal{E}|)`, EdgeIndex, transposed sparse matrix or
          :class:`~fastsparse_core.Adjacency`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastPNAConv
        >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> FastPNAConv(8, 4, ["mean", "max"], ["identity"], deg=torch.tensor([0, 3]))(x, edge_index).shape
        torch.Size([3, 4])
    """

    _kernel = "multi_aggregate"
    _bipartite = False
    _fusible = False
    _features = "matrix"
    _aggregations = (DegreeScalerAggregation,)

    def forward(self, x: Tensor, edge_index: EdgesLike, edge_attr: OptTensor = None) -> Tensor:
        """Computes the new node features.

        Args:
            x: node features (N, F_in).
            edge_index: edges (2, E), EdgeIndex, transposed sparse matrix, or Adjacency of a prepared graph.
            edge_attr: features (E, edge_dim) in the order of the edges; required with ``edge_dim``.

        Returns:
            Node features (N, F_out).

        Raises:
            ValueError: sizes, dtypes or devices do not fit.
            IndexError: an index refers to a node that does not exist.
        """
        modules = self.__dict__["_modules"]
        pre_nns, post_nns, scaler = modules["pre_nns"], modules["post_nns"], modules["aggr_module"]
        stores = not are_linear(pre_nns)
        names = aggregation_names(scaler)
        adj = self._structure((x, x), edge_index, None, False, edge_attr, names, stores)
        if not isinstance(adj, Adjacency):
            return self._original_forward(adj, x, edge_index, edge_attr)
        if edge_attr is not None and edge_attr.size(0) != num_caller_values(adj):
            raise ValueError(
                f"edge_attr: expected one row per edge ({num_caller_values(adj)} rows), "
                f"got shape {tuple(edge_attr.shape)}"
            )
        width, shared = self.F_in, not self.divide_input
        # Comprehensions would be function calls in Python 3.11.
        of_own, weights, own_biases = [], [], []
        for nn in post_nns:
            # The gradient of a split is one tensor. The gradient of each slice would be a zero-filled matrix
            # of full size.
            of_node, rest = nn[0].weight.split_with_sizes([width, nn[0].weight.size(1) - width], 1)
            of_own.append(of_node)
            weights.append(rest)
            own_biases.append(nn[0].bias)
        factors = self._factors(adj, x.dtype, scaler)
        if stores:
            maps = joined_maps([], [], of_own, [], own_biases, shared)
            own = node_parts(x, *maps, len(of_own) * self.F_out)[2]
            rows = self._messages(x, edge_index, adj, edge_attr)
            aggregated = multi_aggregate(adj.incidence(), rows, names, groups=self.towers)
            out = add_scaled(own, aggregated, weights, factors)
        else:
            sizes = [width] * (2 if edge_attr is None else 3)
            of_dst, of_src, of_edge, biases = [], [], [], []
            for nn in pre_nns:
                dst, src, *edge = nn[0].weight.split_with_sizes(sizes, 1)
                of_dst.append(dst)
                of_src.append(src)
                of_edge += edge
                biases.append(nn[0].bias)
            edges = None
            if edge_attr is not None:
                encoder, joined = modules["edge_encoder"], _joined(of_edge)
                edges = edge_attr, joined @ encoder.weight
                biases = [_joined(biases) + joined @ encoder.bias]
            matrix, bias = joined_maps(of_dst, of_src, of_own, biases, own_biases, shared)
            of = Scaled(adj, names, self.towers, 1e-5, factors)
            out = scaled_aggregation(of, x, matrix, bias, edges, weights)
        if max(map(len, post_nns)) > 1:
            towers = zip(post_nns, out.split(self.F_out, dim=1), strict=True)
            out = torch.cat([nn[1:](part) for nn, part in towers], dim=1)
        return modules["lin"](out)

    def _messages(self, x: Tensor, edge_index: Any, adj: Adjacency, edge_attr: Tensor | None) -> Tensor:
        """Computes PyG's messages (E, towers * F_in), in the order of the edges."""
        edges = to_edge_index(adj, self.flow) if isinstance(edge_index, Adjacency) else edge_index
        source, target = (0, 1) if self.flow == "source_to_target" else (1, 0)
        shape = (-1, self.towers, self.F_in)
        of_towers = x.view(shape) if self.divide_input else x[:, None].expand(-1, self.towers, -1)
        x_j, x_i = (of_towers.index_select(0, edges[end].long()) for end in (source, target))
        return self.message(x_i, x_j, edge_attr).flatten(1)

    def _factors(
        self, adj: Adjacency, dtype: torch.dtype, scaler: DegreeScalerAggregation
    ) -> list[Tensor | None]:
        """Returns the factors of the nodes' aggregations for every scaler; None if they are 1."""
        dtype, factors = ACCUMULATION_DTYPE[dtype], []
        for name in scaler.scaler:
            factor: Tensor | None = None
            if name != "identity":
                divides, of_degree = _OF_DEGREE[name]

                if torch.compiler.is_compiling():  # `derived` would make the trace depend on cached values
                    factor = of_degree(adj.rowptr.diff().to(dtype))
                else:

                    def build(of_degree: Callable[[Tensor], Tensor] = of_degree) -> Tensor:
                        return of_degree(adj.in_degree().to(dtype))

                    factor = adj.derived(("pna", name, dtype), build)  # shared by all layers of the graph
                average = scaler.avg_deg_lin if "linear" in name else scaler.avg_deg_log
                factor = average / factor if divides else factor / average
            factors.append(factor)
        return factors

    def _reason(
        self,
        x_src: Any,
        x_dst: Any,
        edge_index: Any,
        edge_attr: Any = None,
        names: Sequence[str] = (),
        stores: bool = False,
        *of_call: Any,
    ) -> Reason | None:
        if not isinstance(x_src, Tensor):
            raise_features(x_src)
        if (edge_attr is None) != (self.edge_dim is None):
            return fallback.EDGE_FEATURES_OR_NOT
        if edge_attr is not None and (not isinstance(edge_attr, Tensor) or edge_attr.dim() != 2):
            return fallback.EDGES_NOT_A_MATRIX
        if stores and torch.compiler.is_compiling():
            return fallback.COMPILED_MESSAGES
        is_plain = type(edge_index) is Tensor and edge_index.layout is torch.strided
        if not is_plain and is_sparse_matrix(edge_index):
            if edge_attr is not None:
                return fallback.EDGE_FEATURES_BESIDE
            is_tensor = isinstance(edge_index, Tensor)
            if edge_index.dense_dim() > 0 if is_tensor else edge_index.storage.value() is not None:
                return fallback.EDGE_FEATURES_WITHIN
            if stores:
                return Reason(
                    "a sparse matrix with pre_layers > 1, or with pre_nns that were replaced or have hooks",
                    fallback.PLAIN_EDGES,
                )
        return super()._reason(x_src, x_dst, edge_index) or why_no_kernel(self, names)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def are_linear(nns: Iterable[Any], begin: bool = False) -> bool:
    """True if the network of each tower is one plain linear map, or begins with one if ``begin``."""
    for nn in nns:
        if type(nn) is not Sequential or not has_plain_call(nn):
            return False
        if (len(nn) > 1 and not begin) or not is_plain_linear(nn[0]):
            return False
    return True


def aggregation_names(scaler: Any) -> list[str]:
    """Returns the names of a PNA layer's aggregations; "" for an aggregation without a kernel."""
    several: Any = getattr(scaler, "aggr", None)
    if type(several) is not MultiAggregation or several.mode != "cat":
        return [""]
    names = []
    for aggregation in several.aggrs:
        name = _AGGREGATIONS.get(type(aggregation), "")
        if name in ("var", "std") and getattr(
            getattr(aggregation, "var_aggr", aggregation), "semi_grad", False
        ):
            name = ""
        names.append(name if has_plain_call(aggregation) else "")
    return names


def why_no_kernel(layer: PNAConv, names: Sequence[str] | None = None) -> Reason | None:
    """Returns why a PNA layer always runs PyG's own code; None if kernels can run.

    Args:
        layer: the layer.
        names: result of :func:`aggregation_names` for the layer; None: computed here.
    """
    scaler = layer.aggr_module
    if type(scaler) is not DegreeScalerAggregation:
        return Reason(f"aggr={layer.aggr!r} has no kernel", "Leave `aggr_module` as PNAConv makes it")
    names = aggregation_names(scaler) if names is None else names
    if "" in names or len(set(names)) < len(names):
        several = getattr(scaler.aggr, "aggrs", [scaler.aggr])
        cure = f"Use each of {', '.join(sorted(_AGGREGATIONS.values()))} at most once"
        return Reason(f"aggregators {[type(each).__name__ for each in several]}", cure)
    if not _SCALERS.issuperset(scaler.scaler):
        return Reason(f"scalers {scaler.scaler}", f"Use {', '.join(sorted(_SCALERS))}")
    if layer.edge_dim is not None and (layer.edge_dim < 1 or not is_plain_linear(layer.edge_encoder)):
        return Reason("an edge encoder that is not a plain linear map", _OWN_MAPS)
    if not are_linear(layer.post_nns, begin=True):
        return Reason("an update that does not begin with a plain linear map", _OWN_MAPS)
    return None
