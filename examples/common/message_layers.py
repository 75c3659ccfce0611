"""Layers written with DGL's message functions, as in DGL's own examples; they do not use FastSparse's API."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .frameworks import import_dgl

dgl = import_dgl()
fn = dgl.function


class GCN(nn.Module):
    """Sums the neighbours, divided by the square roots of both degrees (Kipf and Welling 2017)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes (num_nodes, out_channels) from (num_nodes, in_channels)."""
        with graph.local_scope():
            norm = graph.in_degrees().clamp(min=1).float().pow(-0.5).unsqueeze(1)
            graph.ndata["h"] = self.linear(x) * norm
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            graph.apply_nodes(lambda nodes: {"h": nodes.data["h"] * norm})
            return graph.ndata["h"]  # type: ignore[no-any-return]


class GAT(nn.Module):
    """Sums neighbours with weights from a softmax over edges; mean of four heads (Velickovic et al. 2018)."""

    def __init__(self, in_channels: int, out_channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(in_channels, heads * out_channels)
        self.of_source = nn.Linear(in_channels, heads)
        self.of_target = nn.Linear(in_channels, heads)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes (num_nodes, out_channels) from (num_nodes, in_channels)."""
        with graph.local_scope():
            graph.ndata["h"] = self.linear(x).view(x.size(0), self.heads, -1)
            graph.ndata["source"] = self.of_source(x).unsqueeze(2)
            graph.ndata["target"] = self.of_target(x).unsqueeze(2)
            graph.apply_edges(fn.u_add_v("source", "target", "score"))
            score = F.leaky_relu(graph.edata.pop("score"), 0.2)
            graph.edata["weight"] = dgl.ops.edge_softmax(graph, score)
            graph.update_all(fn.u_mul_e("h", "weight", "m"), fn.sum("m", "h"))
            return graph.ndata["h"].mean(1)  # type: ignore[no-any-return]


class GIN(nn.Module):
    """Applies a small network to the sum of a node and its neighbours (Xu et al. 2019)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(in_channels, out_channels), nn.BatchNorm1d(out_channels))
        self.network = nn.Sequential(hidden, nn.ReLU(), nn.Linear(out_channels, out_channels))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes (num_nodes, out_channels) from (num_nodes, in_channels)."""
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "total"))
            return self.network(x + graph.ndata["total"])  # type: ignore[no-any-return]


class RGCN(nn.Module):
    """Averages the neighbours by relation, with one weight matrix each (Schlichtkrull et al. 2018)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.own = nn.Linear(in_channels, out_channels)
        self.of_relation = nn.ModuleDict({name: nn.Linear(in_channels, out_channels) for name in RELATIONS})

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """Computes (num_nodes, out_channels) from (num_nodes, in_channels)."""
        with graph.local_scope():
            for name, linear in self.of_relation.items():
                graph.ndata[name] = linear(x)
            functions = {name: (fn.copy_u(name, "m"), fn.mean("m", "h")) for name in RELATIONS}
            graph.multi_update_all(functions, "sum")
            return self.own(x) + graph.ndata["h"]  # type: ignore[no-any-return]


#: Relations of RGCN's graph: edges to nodes with greater and with smaller numbers.
RELATIONS = ("up", "down")


def graph_for(layer: type[nn.Module], edge_index: Tensor, num_nodes: int) -> Any:
    """Makes DGL's graph for a layer: two relations for RGCN, otherwise one relation with self loops."""
    source, target = edge_index
    if layer is not RGCN:
        return dgl.add_self_loop(dgl.graph((source, target), num_nodes=num_nodes))
    parts = zip(RELATIONS, (source < target, source > target), strict=True)
    edges = {("node", name, "node"): (source[which], target[which]) for name, which in parts}
    return dgl.heterograph(edges, num_nodes_dict={"node": num_nodes})
