"""FastSAGEConv against DGL's SAGEConv."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    DGLError,
    bipartite,
    block,
    check_parity,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
    weights,
)

FastSAGEConv = fastsparse_dgl.FastSAGEConv

AGGREGATORS = ["mean", "gcn", "pool"]
SIZES = [(7, 4), (4, 7), (5, 5)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("weighted", [None, (), (1,)])
def test_parity(name, aggregator, sizes, weighted, device):
    graph = GRAPHS[name]()
    feat = features(graph, sizes[0]) if name in SINGLE else pair(graph, sizes[0], sizes[0])
    options = {} if weighted is None else {"edge_weight": weights(graph, *weighted)}
    layers = layer_pair(FastSAGEConv, *sizes, aggregator)
    check_parity(layers, graph, feat, device, **options)


@pytest.mark.parametrize("aggregator", ["mean", "pool"])
@pytest.mark.parametrize("graph", [bipartite(17, 23), bipartite(23, 17), block()])
def test_different_widths(aggregator, graph, device):
    layers = layer_pair(FastSAGEConv, (6, 3), 4, aggregator)
    check_parity(layers, graph, pair(graph, 6, 3), device)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("sizes", SIZES)
def test_pair_of_features_of_the_same_nodes(aggregator, sizes, device):
    """With "gcn" DGL keeps both under one name, and so aggregates the destinations' features."""
    graph = homogeneous()
    layers = layer_pair(FastSAGEConv, *sizes, aggregator)
    check_parity(layers, graph, pair(graph, sizes[0], sizes[0]), device)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_bias_norm_and_activation(aggregator, bias, sizes, device):
    graph = homogeneous()
    layers = layer_pair(
        FastSAGEConv,
        *sizes,
        aggregator,
        bias=bias,
        norm=torch.nn.functional.normalize,
        activation=torch.nn.functional.elu,
    )
    if bias and aggregator == "gcn":
        torch.nn.init.normal_(layers[1].bias)
        layers[0].load_state_dict(layers[1].state_dict())
    check_parity(layers, graph, features(graph, sizes[0]), device)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_dropout_draws_the_same_numbers(aggregator):
    graph = bipartite()
    layers = layer_pair(FastSAGEConv, 5, 3, aggregator, feat_drop=0.5)
    feat = pair(graph, 5, 5)
    found = []
    for layer in layers:
        torch.manual_seed(0)
        found.append(layer(graph, feat))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layers[0].eval()(graph, feat), layers[1].eval()(graph, feat))


def test_lstm_is_the_original_and_says_so(reasons):
    graph = homogeneous()
    layers = layer_pair(FastSAGEConv, 5, 3, "lstm")
    check_parity(layers, graph, features(graph, 5), "cpu")
    (record,) = reasons.records
    assert record.levelname == "WARNING"
    assert "FastSAGEConv falls back to DGL's implementation, which is slower: aggregator_ty" in record.message
    with pytest.raises(DGLError, match="'lstm' needs a DGLGraph"):
        layers[0](fastsparse_dgl.prepare(graph), features(graph, 5))


@pytest.mark.parametrize("under", [torch.bfloat16, None])
@pytest.mark.parametrize("graph", [homogeneous(), block()])
def test_mean_is_one_step(graph, under, device):
    """One node of autograd's graph, under autocast too."""
    fast, reference = layer_pair(FastSAGEConv, 5, 5, "mean")
    feat = features(graph, 5)
    expected = reference(graph, feat)
    leaf = feat.to(device).requires_grad_()
    with torch.autocast(device, under, enabled=under is not None):
        found = fast.to(device)(graph, leaf)
    assert found.grad_fn.name() == "_AggregateTransformBackward"
    assert found.dtype == (under or torch.float32)
    tolerance = 0.05 if under else 1e-5
    torch.testing.assert_close(found.float().cpu(), expected, rtol=tolerance, atol=tolerance)


def test_replaced_submodules_are_used(device):
    """Adapters and quantised layers take the place of a layer's linears, or hook into them."""
    graph = homogeneous()
    fast = FastSAGEConv(5, 3, "mean").to(device)
    calls = []
    fast.fc_neigh.register_forward_hook(lambda *_: calls.append("neigh"))
    fast.fc_self.register_forward_hook(lambda *_: calls.append("self"))
    fast(graph, features(graph, 5).to(device))
    assert sorted(calls) == ["neigh", "self"]


def test_invalid_aggregator():
    with pytest.raises(DGLError, match="aggregator_type"):
        FastSAGEConv(2, 2, "median")


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_wrong_sizes(aggregator, device):
    graph = bipartite()
    fast = FastSAGEConv(4, 3, aggregator).to(device)
    source, target = (part.to(device) for part in pair(graph, 4, 4))
    with pytest.raises(DGLError, match=r"source node \(17 rows"):
        fast(graph, (source[1:], target))
    with pytest.raises(DGLError, match=r"destination node \(23 rows"):
        fast(graph, (source, target[1:]))
    with pytest.raises(DGLError, match=r"edge_weight: expected one row per edge \(90 rows"):
        fast(graph, (source, target), edge_weight=torch.ones(89, device=device))


def test_gcn_needs_one_width():
    graph = bipartite()
    with pytest.raises(DGLError, match="of one width"):
        FastSAGEConv(4, 3, "gcn")(graph, pair(graph, 4, 3))
