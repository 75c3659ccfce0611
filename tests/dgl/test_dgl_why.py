"""``why``: what computed each layer of a DGL model."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import dgl, homogeneous
from torch import nn

from fastsparse_dgl import (
    FastGATConv,
    FastHeteroGraphConv,
    FastPNAConv,
    FastSAGEConv,
    GraphTransformerLayer,
    why,
)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, graph, x):
        for layer in self.layers:
            x = layer(graph, x).flatten(1)
        return x


def test_each_layer_of_a_model():
    model = Model(
        FastGATConv(6, 3, 2),
        FastSAGEConv(6, 6, "lstm"),
        dgl.nn.GraphConv(6, 6),
        dgl.nn.TAGConv(6, 6),
        GraphTransformerLayer(6, 6, 2),
        FastPNAConv(6, 6, ["mean", "moment3"], ["identity"], 2.5),
    )
    model.unused = FastSAGEConv(6, 6, "mean")
    found = {item.path: item for item in why(model, homogeneous(), torch.randn(30, 6))}
    assert "FastSparse: fused attention" in str(why(FastGATConv(6, 3, 2), homogeneous(), torch.randn(30, 6)))
    assert "fastsparse_dgl.enable(report=True)" in str(why(nn.Linear(6, 3), torch.randn(3, 6)))
    assert [found[f"layers.{nth}"].by for nth in range(6)] == [
        "FastSparse",
        "DGL",
        "DGL",
        "DGL",
        "FastSparse",
        "DGL",
    ]
    assert found["unused"].by == "not called"
    assert "aggregator_type='lstm' has no kernel. Use 'mean', 'gcn' or 'pool'" in found["layers.1"].reason
    assert "Use fastsparse_dgl.FastGraphConv" in found["layers.2"].reason
    assert "it is DGL's layer. accelerate() leaves it unchanged: has no drop-in" in found["layers.3"].reason
    assert "aggregators=['mean', 'moment3']" in found["layers.5"].reason
    assert not any("Tower" in item.layer for item in found.values())


def test_layers_by_edge_type():
    graph = dgl.heterograph({("a", "cites", "a"): ([0, 1], [1, 0])})
    model = FastHeteroGraphConv({"cites": FastSAGEConv(4, 2, "mean")})
    (found,) = why(model, graph, {"a": torch.randn(2, 4)})
    assert (found.path, found.by) == ("mods.cites", "FastSparse")


def test_what_dgl_refuses_announces_no_slow_path(reasons):
    layer = FastSAGEConv(6, 6, "lstm")
    with pytest.raises(dgl.DGLError):
        layer(homogeneous(), torch.randn(7, 6))
    assert not reasons.records
    layer(homogeneous(), torch.randn(30, 6))
    assert len(reasons.records) == 1


def test_the_graph_comes_first():
    with pytest.raises(
        dgl.DGLError, match=r"feat: expected a tensor .*the graph comes first: layer\(graph, feat\)"
    ):
        FastSAGEConv(6, 6, "mean")(torch.randn(30, 6), homogeneous())
