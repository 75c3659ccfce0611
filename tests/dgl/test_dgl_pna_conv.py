"""FastPNAConv against DGL's PNAConv, in float64: its variance is a difference of squares."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import (
    DGLError,
    assert_close,
    bipartite,
    block,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    outputs_and_gradients,
    weights,
)

FastPNAConv = fastsparse_dgl.FastPNAConv
AGGREGATORS = ["mean", "max", "min", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
GRAPHS = {
    "homogeneous": homogeneous,
    "int32": lambda: homogeneous(torch.int32),
    "batched": lambda: dgl.batch([homogeneous(seed=1), homogeneous(seed=2), dgl.graph(([0], [1]))]),
    "isolated": lambda: dgl.graph((torch.tensor([0, 3, 1]), torch.tensor([1, 1, 4])), num_nodes=6),
}


def layers(in_size=6, out_size=6, aggregators=AGGREGATORS, scalers=SCALERS, **options):
    pair = layer_pair(FastPNAConv, in_size, out_size, aggregators, scalers, 1.6, **options)
    return tuple(layer.double() for layer in pair)


def check(graph, device, edge_feat_size=0, in_size=6, **options):
    given = {}
    if edge_feat_size:
        given["edge_feat"] = weights(graph, edge_feat_size, dtype=torch.float64)
    pair = layers(in_size, edge_feat_size=edge_feat_size, **options)
    compare(pair, graph, features(graph, in_size, dtype=torch.float64), device, **given)


def compare(pair, graph, feat, device, fast_graph=None, **given):
    """Result and every gradient; those of biases in front of a batch norm are 0 except for rounding."""
    fast, reference = pair
    expected = outputs_and_gradients(reference, graph, feat, given, "cpu")
    found = outputs_and_gradients(fast, graph if fast_graph is None else fast_graph, feat, given, device)
    assert_close(found, expected, 1e-8, {name: 1.0 for name in expected if name.endswith("bias")})


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("edge_feat_size", [0, 4])
def test_parity(name, num_towers, edge_feat_size, device):
    check(GRAPHS[name](), device, edge_feat_size, num_towers=num_towers)


@pytest.mark.parametrize("aggregator", ["sum", "mean", "min", "max", "var", "std"])
def test_each_aggregator(aggregator, device):
    check(homogeneous(), device, 4, aggregators=[aggregator], scalers=["attenuation"])


@pytest.mark.parametrize(("in_size", "residual"), [(6, False), (9, True)])
def test_residual(in_size, residual, device):
    check(homogeneous(), device, 0, in_size, num_towers=3, residual=residual)


def test_more_features_than_the_kernel_multiplies(device):
    check(homogeneous(), device, 40)


def test_adjacency(device):
    graph = homogeneous()
    pair = layers(edge_feat_size=4)
    edges = weights(graph, 4, dtype=torch.float64)
    feat = features(graph, 6, dtype=torch.float64)
    adjacency = fastsparse_dgl.prepare(graph, device)
    compare(pair, graph, feat, device, adjacency, edge_feat=edges)


def test_dropout_and_batch_norm_follow_the_mode():
    graph = homogeneous()
    fast, reference = (layer.eval() for layer in layers(dropout=0.5))
    feat = features(graph, 6, dtype=torch.float64)
    torch.testing.assert_close(fast(graph, feat), reference(graph, feat))


def test_moments_run_dgls_code(reasons):
    graph = homogeneous()
    pair = layers(aggregators=["moment3", "mean"])
    feat = features(graph, 6, dtype=torch.float64)
    compare(pair, graph, feat, "cpu")
    assert "FastPNAConv falls back to DGL's implementation, which is slower: aggregators" in reasons.text
    with pytest.raises(DGLError, match="graph: expected a DGLGraph"):
        pair[0](fastsparse_dgl.prepare(graph), feat)


def test_hooks_in_towers_are_called():
    graph = homogeneous()
    fast, _ = layers()
    feat = features(graph, 6, dtype=torch.float64)
    expected = fast.eval()(graph, feat)
    seen = []
    fast.towers[0].M.register_forward_hook(lambda *_: seen.append(True))
    torch.testing.assert_close(fast(graph, feat), expected)
    assert seen


def test_accelerate_and_restore():
    original = dgl.nn.pytorch.PNAConv
    model = torch.nn.ModuleList(
        [original(6, 6, AGGREGATORS, SCALERS, 1.6), original(6, 6, ["moment4"], SCALERS, 1.6)]
    )
    report = fastsparse_dgl.accelerate(model, show=False)
    assert [type(layer) for layer in model] == [FastPNAConv, original]
    assert "moment4" in report.left[0].reason
    fastsparse_dgl.restore(model)
    assert type(model[0]) is original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": block()}, "homogeneous"),
        ({"graph": bipartite(30, 12)}, "homogeneous"),
        ({"feat": torch.ones(30, 5, dtype=torch.float64)}, "node_feat"),
        ({"edges": torch.ones(3, 4, dtype=torch.float64)}, "edge_feat"),
        ({"edges": None}, "edge_feat"),
    ],
    ids=["block", "bipartite", "width", "edges", "no edges"],
)
def test_bad_input_is_named(change, message):
    graph = change.get("graph", homogeneous())
    fast, _ = layers(edge_feat_size=4)
    feat = change.get("feat", torch.ones(graph.num_src_nodes(), 6, dtype=torch.float64))
    edges = change.get("edges", torch.ones(graph.num_edges(), 4, dtype=torch.float64))
    with pytest.raises(DGLError, match=message):
        fast(graph, feat, edges)
