"""FastGINConv against DGL's GINConv."""

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
    dgl,
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


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_isolated_nodes(aggregator, device):
    graph = dgl.graph((torch.tensor([0, 3]), torch.tensor([1, 1])), num_nodes=5)
    check_parity(layers(aggregator), graph, features(graph, 5), device)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_no_edges(aggregator, device):
    """Only the node itself counts. (For max, DGL adds a gradient to node 0 here, which is wrong.)"""
    graph = dgl.graph(([], []), num_nodes=4)
    fast, reference = layers(aggregator)
    feat = features(graph, 5).to(device).requires_grad_()
    out = fast.to(device)(graph, feat)
    torch.testing.assert_close(out.detach().cpu(), reference(graph, feat.detach().cpu()).detach())
    expected = torch.autograd.grad(fast.apply_func(1.25 * feat).sum(), feat)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), feat), expected)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("graph", [homogeneous(), block()])
def test_adjacency_in_place_of_the_graph(aggregator, graph, device):
    adjacency = fastsparse_dgl.prepare(graph, device)
    feat = features(graph, 5)
    options = {"edge_weight": weights(graph)}
    check_parity(layers(aggregator), graph, feat, device, fast_graph=adjacency, **options)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_float64(aggregator, device):
    graph = homogeneous()
    fast, reference = (layer.double() for layer in layers(aggregator, learn_eps=True))
    check_parity((fast, reference), graph, features(graph, 5, dtype=torch.float64), device, tolerance=1e-12)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(aggregator, dtype, device):
    graph = homogeneous()
    fast, reference = layers(aggregator)
    expected = reference(graph, features(graph, 5))
    found = fast.to(device, dtype)(graph, features(graph, 5).to(device, dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_autocast(aggregator, device):
    graph = homogeneous()
    fast, reference = layers(aggregator, learn_eps=True)
    expected = reference(graph, features(graph, 5))
    leaf = features(graph, 5).to(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        found = fast.to(device)(graph, leaf)
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0.05, atol=0.1)
    found.float().sum().backward()
    assert leaf.grad.dtype == torch.float32
    assert fast.eps.grad.shape == (1,)


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


@pytest.mark.parametrize("learn_eps", [False, True])
def test_state_dict_both_ways(learn_eps):
    fast, reference = layers("sum", learn_eps=learn_eps)
    assert fast.state_dict().keys() == reference.state_dict().keys()
    reference.load_state_dict(fast.state_dict())
    assert repr(fast) == repr(reference).replace("GINConv", "FastGINConv")
    assert isinstance(fast, dgl.nn.GINConv)


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_compile_with_an_adjacency(aggregator):
    graph = homogeneous()
    adjacency = fastsparse_dgl.prepare(graph)
    fast, _ = layers(aggregator)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(adjacency, features(graph, 5)), fast(adjacency, features(graph, 5)))


def test_invalid_aggregator():
    with pytest.raises(KeyError, match="Aggregator type"):
        FastGINConv(None, "median")


@pytest.mark.parametrize("sizes", [(17, 23), (23, 17)])
def test_bipartite_needs_a_pair(sizes, device):
    graph = bipartite(*sizes)
    with pytest.raises(DGLError, match=f"one row per destination node, {sizes[1]}"):
        FastGINConv().to(device)(graph, features(graph, 4).to(device))


def test_wrong_sizes(device):
    fast = FastGINConv().to(device)
    with pytest.raises(DGLError, match="source node, 30"):
        fast(homogeneous(), torch.ones(31, 4, device=device))
    with pytest.raises(DGLError, match="edge_weight: expected one row per edge, 120"):
        fast(homogeneous(), torch.ones(30, 4, device=device), edge_weight=torch.ones(119, device=device))
