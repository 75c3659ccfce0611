"""Heterogeneous graph transformer operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HGTConv
from torch_geometric.nn.dense import HeteroDictLinear, HeteroLinear
from torch_geometric.nn.dense.linear import is_uninitialized_parameter
from torch_geometric.typing import EdgeType, NodeType, SparseTensor

from fastsparse_core import Adjacency, attention, recorded
from fastsparse_core.fallback import Reason
from fastsparse_core.fused.linear_before_sum import linear_before_sum
from fastsparse_core.log import range_text
from fastsparse_core.ops._eager import CHANGES_OF_CALL
from fastsparse_pyg import fallback
from fastsparse_pyg.caching import lookup
from fastsparse_pyg.graph import cure_of_ids, for_pyg, raise_graph
from fastsparse_pyg.nn.attention import AttentionConv
from fastsparse_pyg.nn.base import is_plain_linear, known, raise_features


class FastHGTConv(AttentionConv, HGTConv):
    r"""PyG's :class:`~torch_geometric.nn.conv.HGTConv` on FastSparse kernels.

    .. math::
        \alpha_{i,j} = \mathrm{softmax}_{j, r} \left( \frac{\mu_r}{\sqrt{d}} (\mathbf{W}^Q_{\tau(i)}
        \mathbf{x}_i)^{\top} \mathbf{W}^A_r \mathbf{W}^K_{\tau(j)} \mathbf{x}_j \right), \qquad
        \mathbf{h}_i = \sum_{j, r} \alpha_{i,j} \mathbf{W}^M_r \mathbf{W}^V_{\tau(j)} \mathbf{x}_j

    From "Heterogeneous Graph Transformer" (https://arxiv.org/abs/2003.01332), section 3. Arguments,
    parameters, ``state_dict`` and results are the same as PyG's. One call of
    :func:`fastsparse_core.attention`, which stores nothing per edge, computes all relations. The matrices of
    a relation and its prior :math:`\mu_r` are multiplied into the weights of the source's keys and values, so
    each node type needs only one matrix product.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}_t|, F_t)`, edges :math:`(2, |\mathcal{E}_r|)`, by type
        - **output:** node features :math:`(|\mathcal{V}_t|, F_{out})` of types with incoming relations

    Example:
        >>> import torch
        >>> from fastsparse_pyg import FastHGTConv
        >>> rates = ("user", "rates", "film")
        >>> layer = FastHGTConv(8, 4, metadata=(["user", "film"], [rates]), heads=2)
        >>> x = {"user": torch.randn(3, 8), "film": torch.randn(2, 8)}
        >>> layer(x, {rates: torch.tensor([[0, 1, 2], [0, 1, 1]])})["film"].shape
        torch.Size([2, 4])
    """

    def forward(
        self, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Any]
    ) -> dict[NodeType, Tensor | None]:
        """Computes the new node features.

        Args:
            x_dict: node features (N, F) by type, all float64, float32, float16 or bfloat16.
            edge_index_dict: edges (2, E) by type. With sparse matrices or Adjacencies, and under
                ``torch.compile``, PyG's code runs.

        Returns:
            Node features (N, F_out) by type, for the node types with incoming edge types.

        Raises:
            ValueError: sizes, dtypes or devices do not fit.
            IndexError: an index refers to a node that does not exist.
        """
        reason = self._reason(x_dict, x_dict, edge_index_dict)
        if reason is not None:
            edge_index_dict = {
                name: self._written_back(edges) if isinstance(edges, Adjacency) else for_pyg(edges)
                for name, edges in edge_index_dict.items()
            }
            return self._original_forward(reason, x_dict, edge_index_dict)
        width = self.out_channels
        queries: list[Tensor] = []
        of_type: dict[EdgeType, Tensor] = {}
        leaving: dict[NodeType, list[EdgeType]] = {}
        for edge_type in edge_index_dict:
            leaving.setdefault(edge_type[0], []).append(edge_type)
        for node_type, x in x_dict.items():
            outgoing = leaving.get(node_type, [])
            weight, bias = self._joint_weights(node_type, outgoing)
            # The prior is multiplied into the weight here; PyG multiplies the messages by it.
            joint = linear_before_sum(x, weight, bias, 1 + 2 * len(outgoing), width)
            parts = joint.split([width, *[2 * width] * len(outgoing)], dim=1)
            queries.append(parts[0])
            of_type |= dict(zip(outgoing, parts[1:], strict=True))
        sources = torch.cat(tuple(map(of_type.__getitem__, edge_index_dict)))
        adj = self._typed_adjacency(x_dict, edge_index_dict)
        out = attention(adj, torch.cat(queries), sources[:, :width], sources[:, width:], heads=self.heads)
        return self._of_nodes(out, x_dict)

    def _joint_weights(self, node_type: NodeType, outgoing: list[EdgeType]) -> tuple[Tensor, Tensor | None]:
        """Returns a joint weight and bias for a node type's queries and its relations' keys and values."""
        linear = self.kqv_lin.lins[node_type]
        heads, width = self.heads, self.out_channels
        # Weights of keys, queries and values, (F, in) each, with the bias as an additional column.
        joined = linear.weight if linear.bias is None else torch.cat([linear.weight, linear.bias[:, None]], 1)
        key, query, value = joined.split(width)
        parts = [query]
        for edge_type in outgoing:
            at = self.edge_types_map[edge_type]
            prior = self.p_rel["__".join(edge_type)].view(heads, 1, 1)
            for rows, transform, factor in ((key, self.k_rel, prior), (value, self.v_rel, None)):
                # The weight has one (D, D) matrix per head and edge type, (H, T, D, D). Select the matrices
                # of this edge type.
                matrix = transform.weight.view(heads, len(self.edge_types), *transform.weight.shape[1:])[
                    :, at
                ]
                matrix = matrix if factor is None else matrix * factor
                parts.append(
                    torch.bmm(matrix.transpose(1, 2), rows.reshape(heads, -1, rows.size(1))).flatten(0, 1)
                )
        weight = torch.cat(parts)
        return (weight, None) if linear.bias is None else (weight[:, :-1], weight[:, -1])

    def _typed_adjacency(
        self, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Tensor]
    ) -> Adjacency:
        """Returns one structure for all relations: rows are nodes of all types, columns are sources."""
        sizes = dict(zip(x_dict, map(len, x_dict.values()), strict=True))
        edges = tuple(edge_index_dict.values())

        def build() -> Adjacency:
            run = recorded.current()
            first: dict[NodeType, int] = {}
            num_dst = num_src = 0
            for node_type, size in sizes.items():
                first[node_type] = num_dst
                num_dst += size
            rows, cols = [], []
            for (src, _, dst), edge_index in edge_index_dict.items():
                for name, index, size in (
                    ("source", edge_index[0], sizes[src]),
                    ("destination", edge_index[1], sizes[dst]),
                ):
                    if run is not None:  # a captured step must not read indices from the device
                        run.check_capacity(index, size)
                    elif index.numel() and not 0 <= (low := int(index.min())) <= int(index.max()) < size:
                        raise IndexError(
                            f"edge_index_dict: expected {name} indices from 0 to {size - 1} between {src!r} "
                            f"and {dst!r}, {range_text(low, int(index.max()))}; {cure_of_ids(low)}"
                        )
                cols.append(edge_index[0] + num_src)
                rows.append(edge_index[1] + first[dst])
                num_src += sizes[src]
            return Adjacency.from_coo(torch.cat(rows), torch.cat(cols), (num_dst, num_src))

        options = ("hgt", tuple(sizes.items()), tuple(edge_index_dict))
        return known(edges[0], options, *edges[1:]) or lookup(edges[0], edges, options, build)

    def _of_nodes(self, out: Tensor, x_dict: dict[NodeType, Tensor]) -> dict[NodeType, Tensor | None]:
        """Computes the layer's result for every node type from the aggregated messages, as in PyG."""
        activated: dict[NodeType, Tensor] = {}
        for node_type, part in zip(x_dict, out.split(list(map(len, x_dict.values()))), strict=True):
            if node_type in self.dst_node_types:
                activated[node_type] = F.gelu(part)
        transformed = self.out_lin(activated)
        result: dict[NodeType, Tensor | None] = {}
        for node_type in activated:
            part = transformed[node_type]
            if part.size(-1) == x_dict[node_type].size(-1):
                share = self.skip[node_type].sigmoid()
                part = share * part + (1 - share) * x_dict[node_type]
            result[node_type] = part
        return result

    def _reason(self, x_src: Any, x_dst: Any, edge_index: Any, *of_call: Any) -> Reason | None:
        """Does the same as :meth:`FastConv._reason`, for dicts by type."""
        if torch.compiler.is_compiling():
            return fallback.COMPILED
        if not x_src or not edge_index:
            return Reason("no nodes or no edges", "", "PyG")
        if self.flow != "source_to_target":
            return Reason(f"flow={self.flow!r}", "Use flow='source_to_target'")
        dtypes, are_matrices = set(), True
        for node_type, x in x_src.items():
            if not isinstance(x, Tensor):
                raise_features(x, f"x_dict[{node_type!r}]")
            dtypes.add(x.dtype)
            are_matrices &= x.dim() == 2 and x.layout is torch.strided
        for edge_type, edges in edge_index.items():
            if not isinstance(edges, (Tensor, SparseTensor, Adjacency)):
                raise_graph(edges, f"edge_index_dict[{edge_type}]")
            if type(edges) is not Tensor or edges.layout is not torch.strided:
                return Reason("edges that are not plain tensors", fallback.PLAIN_EDGES)
            if edges.dim() != 2 or edges.size(0) != 2 or edges.dtype not in (torch.int64, torch.int32):
                return Reason("edges that are not integers of shape (2, num_edges)", fallback.PLAIN_EDGES)
            if edge_type not in self.edge_types_map or not {edge_type[0], edge_type[-1]} <= x_src.keys():
                return Reason(
                    "edges of an unknown type, or of a node type without features",
                    "Pass edge types of the layer's `metadata`, and features of their node types",
                )
        if len(dtypes) != 1 or not are_matrices:
            cure = "Pass features of shape (num_nodes, num_features) and of one dtype"
            return Reason("features that are not matrices of one dtype", cure)
        # The kernels read the weights of the linear layers without calling the layers, so hooks would not
        # run. A lazy layer gets its sizes from a hook.
        modules = (self.kqv_lin, self.k_rel, self.v_rel)
        if tuple(map(type, modules)) != (HeteroDictLinear, HeteroLinear, HeteroLinear):
            return Reason("a replaced linear layer", "Keep the linear layers that HGTConv makes")
        maps = self.kqv_lin.lins
        for node_type in x_src:
            if node_type not in maps:
                return Reason(f"node type {node_type!r}, which is not in the layer's `metadata`", "")
            if is_uninitialized_parameter(maps[node_type].weight):
                return Reason("a lazy linear layer that is not initialized yet", "")
            if not is_plain_linear(maps[node_type]):
                return fallback.HOOKED_LINEAR
        for module in modules:
            if any(map(module.__dict__.get, CHANGES_OF_CALL)):
                return fallback.HOOKED_LINEAR
        return super()._reason(x, x, next(iter(edge_index.values())))
