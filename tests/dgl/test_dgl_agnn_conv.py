"""FastAGNNConv against DGL's AGNNConv: its own options."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    DGLError,
    bipartite,
    block,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
)
from dgl_layer_cases import check

FastAGNNConv = fastsparse_dgl.FastAGNNConv


@pytest.mark.parametrize("graph_name", GRAPHS)
@pytest.mark.parametrize("learn_beta", [False, True])
@pytest.mark.parametrize("init_beta", [0.0, 1.0, -3.0])
def test_beta(graph_name, learn_beta, init_beta, device):
    graph = GRAPHS[graph_name]()
    feat = features(graph, 5) if graph_name in SINGLE else pair(graph, 5, 5)
    layers = layer_pair(FastAGNNConv, init_beta, learn_beta)
    check(layers, graph, feat, device)


def test_constant_beta_is_a_buffer():
    fast, reference = layer_pair(FastAGNNConv, 2.0, learn_beta=False)
    assert not list(fast.parameters())
    assert fast.state_dict().keys() == reference.state_dict().keys() == {"beta"}


@pytest.mark.parametrize("middle", [(1,), (3,), (2, 3)])
@pytest.mark.parametrize("graph_name", ["homogeneous", "block"])
def test_more_dimensions(graph_name, middle, device):
    graph = GRAPHS[graph_name]()
    check(layer_pair(FastAGNNConv), graph, features(graph, 5, *middle), device)


@pytest.mark.parametrize("graph_name", ["homogeneous", "block"])
def test_one_number_per_node(graph_name, device):
    """DGL then normalises over the nodes, and so do we."""
    graph = GRAPHS[graph_name]()
    feat = features(graph, 1).squeeze(1)
    check(layer_pair(FastAGNNConv), graph, feat, device)


def test_zero_features_have_cosine_zero(device):
    graph = homogeneous()
    feat = features(graph, 5)
    feat[::3] = 0
    fast, reference = layer_pair(FastAGNNConv)
    expected = reference(graph, feat)
    torch.testing.assert_close(fast.to(device)(graph, feat.to(device)).cpu(), expected)


@pytest.mark.parametrize("layer_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("feat_dtype", [torch.float32, torch.float64])
def test_result_has_the_features_dtype(layer_dtype, feat_dtype, device):
    graph = homogeneous()
    fast, reference = layer_pair(FastAGNNConv, 1.5)
    feat = features(graph, 5, dtype=feat_dtype)
    found = fast.to(device, layer_dtype)(graph, feat.to(device))
    assert found.dtype == feat_dtype
    torch.testing.assert_close(found.cpu(), reference.to(feat_dtype)(graph, feat), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", [((17, 5), (23, 4)), ((17, 5), (23, 1, 5)), ((17, 2, 5), (23, 1, 5))])
def test_source_and_destination_of_different_shapes(shapes, device):
    fast, _ = layer_pair(FastAGNNConv)
    feat = tuple(torch.ones(shape, device=device) for shape in shapes)
    with pytest.raises(DGLError, match="whose shapes differ only in the rows"):
        fast.to(device)(bipartite(), feat)


def test_pair_of_one_tensor_is_that_tensor(device):
    graph = homogeneous()
    feat = features(graph, 5).to(device)
    fast = FastAGNNConv().to(device)
    torch.testing.assert_close(fast(graph, (feat, feat)), fast(graph, feat))


def test_source_rows_beyond_the_destinations_matter_only_as_sources(device):
    """A block's destinations are its first sources."""
    graph = block()
    feat = features(graph, 5).to(device)
    fast = FastAGNNConv().to(device)
    torch.testing.assert_close(fast(graph, (feat, feat[:12])), fast(graph, feat))
