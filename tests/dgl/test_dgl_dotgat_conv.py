"""FastDotGatConv against DGL's DotGatConv: its own options."""

from __future__ import annotations

import pytest
import torch
from dgl_cases import GRAPHS, fastsparse_dgl, features, homogeneous, layer_pair, pair
from dgl_layer_cases import check, randomised

FastDotGatConv = fastsparse_dgl.FastDotGatConv


def made(*arguments, **options):
    return randomised(*layer_pair(FastDotGatConv, *arguments, **options))


@pytest.mark.parametrize("sizes", [(7, 4, 3), (5, 6, 1), (4, 1, 4), (3, 16, 2)])
@pytest.mark.parametrize("graph_name", ["homogeneous", "block"])
def test_sizes(sizes, graph_name, device):
    graph = GRAPHS[graph_name]()
    check(made(*sizes), graph, features(graph, sizes[0]), device)


def test_large_scores(device):
    """The softmax subtracts the maximum, so scores in the thousands are no matter."""
    graph = homogeneous()
    feat = features(graph, 7, dtype=torch.float64) * 100
    fast, reference = made(7, 4, 3)
    check((fast.double(), reference.double()), graph, feat, device, tolerance=1e-10)
    found = fast.float()(graph, feat.float().to(device))
    assert found.isfinite().all()


def test_one_width_takes_no_pair():
    """DGL's layer made with one width has no matrix for the destinations of a pair."""
    graph = GRAPHS["wide"]()
    for layer in made(7, 4, 3):
        with pytest.raises(AttributeError, match="fc_(src|dst)"):
            layer(graph, pair(graph, 7, 7))


def test_more_dimensions(device):
    """DGL takes no more than two; every slice of ours is DGL's result for that slice."""
    graph = homogeneous()
    fast, reference = made(7, 4, 3)
    feat = features(graph, 7, 5)
    out, attention = fast.to(device)(graph, feat.to(device), get_attention=True)
    assert out.shape == (30, 5, 3, 4)
    assert attention.shape == (120, 5, 3, 1)
    torch.testing.assert_close(out, fast(graph, feat.to(device)), rtol=1e-4, atol=2e-5)
    for middle in range(5):
        expected = reference(graph, feat[:, middle], get_attention=True)
        for found, want in zip((out, attention), expected, strict=True):
            torch.testing.assert_close(found[:, middle].cpu(), want, rtol=1e-4, atol=2e-5)


def test_no_option_to_allow_zero_in_degree_later():
    for layer in made(7, 4, 3):
        assert not hasattr(layer, "set_allow_zero_in_degree")
