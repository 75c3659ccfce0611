"""FastGINConv against DGL's GINConv."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    DGLError,
    check_parity,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
    weights,
)

FastGINConv = fastsparse_dgl.FastGINConv

AGGREGATORS = ["sum", "max", "mean"]


def layers(aggregator, **kwargs):
    return layer_pair(FastGINConv, torch.nn.Linear(5, 3), aggregator, init_eps=0.25, **kwargs)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("learn_eps", [False, True])
@pytest.mark.parametrize("weighted", [None, (), (1,)])
def test_parity(name, aggregator, learn_eps, weighted, device):
    graph = GRAPHS[name]()
    feat = features(graph, 5) if name in SINGLE else pair(graph, 5, 5)
    options = {} if weighted is None else {"edge_weight": weights(graph, *weighted)}
    check_parity(layers(aggregator, learn_eps=learn_eps), graph, feat, device, **options)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("middle", [(), (3,), (2, 3)])
def test_without_function(aggregator, middle, device):
    graph = homogeneous()
    check_parity(layer_pair(FastGINConv, None, aggregator), graph, features(graph, 5, *middle), device)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("shape", [(4,), (3, 1), (1, 4), (3, 4)])
def test_edge_weight_broadcasts_as_in_dgl(aggregator, shape, device):
    graph = homogeneous()
    feat = features(graph, 4, 3)
    check_parity(
        layer_pair(FastGINConv, None, aggregator), graph, feat, device, edge_weight=weights(graph, *shape)
    )


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_vector_of_features(aggregator, shape, device):
    """One number per node, with one or several weights per edge."""
    graph = homogeneous()
    feat = torch.randn(30)
    if shape == ():
        check_parity(layer_pair(FastGINConv, None, aggregator), graph, feat, device)
    else:
        graph_feat = feat[:, None]
        check_parity(
            layer_pair(FastGINConv, None, aggregator),
            graph,
            graph_feat,
            device,
            edge_weight=weights(graph, *shape),
        )


def test_activation(device):
    graph = homogeneous()
    check_parity(layers("sum", activation=torch.relu), graph, features(graph, 5), device)


@pytest.mark.parametrize("under", [torch.bfloat16, None])
@pytest.mark.parametrize("learn_eps", [False, True])
def test_sums_are_one_step(device, learn_eps, under):
    """One node of autograd's graph where eps does not learn; under autocast too, before a linear layer."""
    graph = homogeneous()
    fast, reference = layers("sum", learn_eps=learn_eps)
    leaf = features(graph, 5).to(device).requires_grad_()
    with torch.autocast(device, under, enabled=under is not None):
        found = fast.to(device)(graph, leaf)
    expected = reference(graph, features(graph, 5))
    tolerance = 1e-5 if under is None else 5e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    names, nodes = set(), [found.grad_fn]
    for node in nodes:
        names.add(node.name())
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert ("_AggregateTransformBackward" in names) != learn_eps


def test_invalid_aggregator():
    with pytest.raises(KeyError, match="Aggregator type"):
        FastGINConv(None, "median")


def test_wrong_sizes(device):
    fast = FastGINConv().to(device)
    with pytest.raises(DGLError, match=r"source node \(30 rows"):
        fast(homogeneous(), torch.ones(31, 4, device=device))
    with pytest.raises(DGLError, match=r"edge_weight: expected one row per edge \(120 rows"):
        fast(homogeneous(), torch.ones(30, 4, device=device), edge_weight=torch.ones(119, device=device))
