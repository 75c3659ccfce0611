"""Every layer of PyG that needs no other package, with a call: for the table of `accelerate`, and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

#: Names in `torch_geometric.nn.conv` that are not layers, and what they are.
NO_LAYER = {
    "MessagePassing": "the base class",
    "HeteroConv": "a container of layers",
    "GPSConv": "a wrapper of a layer",
    "DirGNNConv": "a wrapper of a layer",
    "AntiSymmetricConv": "a wrapper of a layer",
    "WLConv": "no message passing: hashes of colours",
    "XConv": "no message passing, needs torch-cluster",
    "CuGraphSAGEConv": "needs cuGraph",
    "CuGraphGATConv": "needs cuGraph",
    "CuGraphRGCNConv": "needs cuGraph",
    "FusedGATConv": "needs dgNN",
    "GravNetConv": "needs torch-cluster or pyg-lib",
    "DynamicEdgeConv": "needs torch-cluster or pyg-lib",
    "SplineConv": "needs torch-spline-conv or pyg-lib",
    "PANConv": "needs torch-sparse",
    "MeshCNNConv": "its edges are those of a mesh, four per node",
}

RELATIONS, FEATURES = 3, 4


def original_and_drop_in(
    name: str, *arguments: Any, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, nn.Module]:
    """PyG's layer of that name and ours with the same parameters, by implementation."""
    import fastsparse_pyg

    theirs = getattr(pyg, name)(*arguments, **options).to(device, dtype)
    ours = getattr(fastsparse_pyg, f"Fast{name}")(*arguments, **options).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return {"pyg": theirs, "fastsparse": ours}


@dataclass
class Inputs:
    """The arguments of the layers.

    Attributes:
        edge_index: (2, num_edges).
        turned: (2, num_edges), the same edges reversed, for layers that take two lists of edges.
        x: (num_nodes, width).
        edge_attr: (num_edges, FEATURES).
        edge_weight: (num_edges,), positive.
        pos: (num_nodes, 3).
        edge_type: (num_edges,).
        node_type: (num_nodes,).
    """

    edge_index: Tensor
    turned: Tensor
    x: Tensor
    edge_attr: Tensor
    edge_weight: Tensor
    pos: Tensor
    edge_type: Tensor
    node_type: Tensor

    @classmethod
    def draw(cls, edge_index: Tensor, num_nodes: int, width: int, dtype: torch.dtype) -> Inputs:
        """Random inputs that require gradients."""
        device, count = edge_index.device, edge_index.size(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

        weight = (torch.rand(count, device=device, dtype=dtype) + 0.1).requires_grad_()
        return cls(
            edge_index,
            edge_index.flip(0),
            normal(num_nodes, width),
            normal(count, FEATURES),
            weight,
            normal(num_nodes, 3),
            torch.randint(RELATIONS, (count,), device=device),
            torch.randint(RELATIONS, (num_nodes,), device=device),
        )

    def leaves(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return [self.x, self.edge_attr, self.edge_weight, self.pos]


@dataclass(frozen=True)
class Layer:
    """A layer and its call.

    Attributes:
        make: the layer, from the width of its input and output.
        call: its result on some inputs.
        widest: largest width that fits in memory, for layers with a matrix per edge.
    """

    make: Callable[[int], nn.Module]
    call: Callable[[Any, Inputs], Tensor] = field(default=lambda layer, it: layer(it.x, it.edge_index))
    widest: int = 1 << 30


def _mlp(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, outside), nn.Tanh())


def _weighted(layer: Any, it: Inputs) -> Tensor:
    return layer(it.x, it.edge_index, it.edge_weight)


def _attributed(layer: Any, it: Inputs) -> Tensor:
    return layer(it.x, it.edge_index, it.edge_attr)


def _placed(layer: Any, it: Inputs) -> Tensor:
    return layer(it.x, it.pos, it.edge_index)


def _typed(layer: Any, it: Inputs) -> Tensor:
    return layer(it.x, it.edge_index, it.edge_type)


def _hetero(layer: Any, it: Inputs) -> Tensor:
    out: Tensor = layer({"node": it.x}, {("node", "to", "node"): it.edge_index})["node"]
    return out


_METADATA = (["node"], [("node", "to", "node")])
_DEGREES = torch.tensor([1, 2, 3, 4, 5])

LAYERS: dict[str, Layer] = {
    "SimpleConv": Layer(lambda w: pyg.SimpleConv(), _weighted),
    "GCNConv": Layer(lambda w: pyg.GCNConv(w, w)),
    "ChebConv": Layer(lambda w: pyg.ChebConv(w, w, 3)),
    "SAGEConv": Layer(lambda w: pyg.SAGEConv(w, w)),
    "GraphConv": Layer(lambda w: pyg.GraphConv(w, w), _weighted),
    "GatedGraphConv": Layer(lambda w: pyg.GatedGraphConv(w, 2)),
    "ResGatedGraphConv": Layer(lambda w: pyg.ResGatedGraphConv(w, w)),
    "GATConv": Layer(lambda w: pyg.GATConv(w, w // 2, heads=2)),
    "GATv2Conv": Layer(lambda w: pyg.GATv2Conv(w, w // 2, heads=2)),
    "TransformerConv": Layer(lambda w: pyg.TransformerConv(w, w // 2, heads=2)),
    "AGNNConv": Layer(lambda w: pyg.AGNNConv()),
    "TAGConv": Layer(lambda w: pyg.TAGConv(w, w)),
    "GINConv": Layer(lambda w: pyg.GINConv(_mlp(w, w), train_eps=True)),
    "GINEConv": Layer(lambda w: pyg.GINEConv(_mlp(w, w), edge_dim=FEATURES), _attributed),
    "ARMAConv": Layer(lambda w: pyg.ARMAConv(w, w, num_layers=2)),
    "SGConv": Layer(lambda w: pyg.SGConv(w, w, K=2)),
    "SSGConv": Layer(lambda w: pyg.SSGConv(w, w, alpha=0.1, K=2)),
    "APPNP": Layer(lambda w: pyg.APPNP(3, 0.1)),
    "MFConv": Layer(lambda w: pyg.MFConv(w, w, max_degree=4)),
    "RGCNConv": Layer(lambda w: pyg.RGCNConv(w, w, RELATIONS), _typed),
    "FastRGCNConv": Layer(lambda w: pyg.FastRGCNConv(w, w, RELATIONS), _typed, 16),
    "RGATConv": Layer(lambda w: pyg.RGATConv(w, w // 2, RELATIONS, heads=2), _typed, 16),
    "SignedConv": Layer(
        lambda w: pyg.SignedConv(w, w // 2, first_aggr=True),
        lambda layer, it: layer(it.x, it.edge_index, it.turned),
    ),
    "DNAConv": Layer(lambda w: pyg.DNAConv(w), lambda layer, it: layer(it.x.unsqueeze(1), it.edge_index)),
    "PointNetConv": Layer(lambda w: pyg.PointNetConv(_mlp(w + 3, w), add_self_loops=False), _placed),
    "GMMConv": Layer(lambda w: pyg.GMMConv(w, w, dim=FEATURES, kernel_size=2), _attributed),
    "NNConv": Layer(lambda w: pyg.NNConv(w, w, nn.Linear(FEATURES, w * w)), _attributed, 16),
    "CGConv": Layer(lambda w: pyg.CGConv(w, dim=FEATURES), _attributed),
    "EdgeConv": Layer(lambda w: pyg.EdgeConv(_mlp(2 * w, w))),
    "PPFConv": Layer(
        lambda w: pyg.PPFConv(_mlp(w + 4, w), add_self_loops=False),
        lambda layer, it: layer(it.x, it.pos.detach(), it.pos.detach().roll(1, 0), it.edge_index),
    ),
    "FeaStConv": Layer(lambda w: pyg.FeaStConv(w, w, heads=2)),
    "PointTransformerConv": Layer(lambda w: pyg.PointTransformerConv(w, w), _placed),
    "HypergraphConv": Layer(lambda w: pyg.HypergraphConv(w, w)),
    "LEConv": Layer(lambda w: pyg.LEConv(w, w), _weighted),
    "PNAConv": Layer(
        lambda w: pyg.PNAConv(w, w, ["mean", "min", "max", "std"], ["identity", "amplification"], _DEGREES)
    ),
    "ClusterGCNConv": Layer(lambda w: pyg.ClusterGCNConv(w, w)),
    "GENConv": Layer(lambda w: pyg.GENConv(w, w, edge_dim=FEATURES), _attributed),
    "GCN2Conv": Layer(lambda w: pyg.GCN2Conv(w, 0.1), lambda layer, it: layer(it.x, it.x, it.edge_index)),
    "WLConvContinuous": Layer(lambda w: pyg.WLConvContinuous(), _weighted),
    "FiLMConv": Layer(lambda w: pyg.FiLMConv(w, w)),
    "SuperGATConv": Layer(lambda w: pyg.SuperGATConv(w, w // 2, heads=2)),
    "FAConv": Layer(lambda w: pyg.FAConv(w), lambda layer, it: layer(it.x, it.x, it.edge_index)),
    "EGConv": Layer(
        lambda w: pyg.EGConv(w, w, aggregators=["sum", "max", "symnorm"], num_heads=2, num_bases=2)
    ),
    "PDNConv": Layer(lambda w: pyg.PDNConv(w, w, edge_dim=FEATURES, hidden_channels=4), _attributed),
    "GeneralConv": Layer(
        lambda w: pyg.GeneralConv(w, w, in_edge_channels=FEATURES, attention=True), _attributed
    ),
    "HGTConv": Layer(lambda w: pyg.HGTConv(w, w, _METADATA, heads=2), _hetero),
    "HEATConv": Layer(
        lambda w: pyg.HEATConv(w, w, RELATIONS, RELATIONS, 4, FEATURES, 4),
        lambda layer, it: layer(it.x, it.edge_index, it.node_type, it.edge_type, it.edge_attr),
    ),
    "HANConv": Layer(lambda w: pyg.HANConv(w, w, _METADATA, heads=2), _hetero),
    "LGConv": Layer(lambda w: pyg.LGConv()),
    "PointGNNConv": Layer(lambda w: pyg.PointGNNConv(_mlp(w, 3), _mlp(w + 3, w), _mlp(w, w)), _placed),
    "MixHopConv": Layer(lambda w: pyg.MixHopConv(w, w // 2, powers=[0, 1, 2])),
}
