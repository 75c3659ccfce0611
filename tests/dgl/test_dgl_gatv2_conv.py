"""FastGATv2Conv against DGL's GATv2Conv: its own options."""

from __future__ import annotations

import itertools

import pytest
import torch
from dgl_cases import GRAPHS, block, fastsparse_dgl, features, homogeneous, layer_pair, pair
from dgl_layer_cases import check, randomised

FastGATv2Conv = fastsparse_dgl.FastGATv2Conv


def made(*arguments, **options):
    return randomised(*layer_pair(FastGATv2Conv, *arguments, **options))


@pytest.mark.parametrize(
    ("residual", "bias", "share_weights", "activation"),
    list(itertools.product([False, True], [False, True], [False, True], [None, torch.nn.functional.elu])),
)
@pytest.mark.parametrize("sizes", [(7, 4, 3), (12, 4, 3), (5, 6, 1), (4, 1, 4)])
def test_options(sizes, residual, bias, share_weights, activation, device):
    graph = homogeneous()
    layers = made(*sizes, residual=residual, bias=bias, share_weights=share_weights, activation=activation)
    check(layers, graph, features(graph, sizes[0]), device)


@pytest.mark.parametrize("share_weights", [False, True])
@pytest.mark.parametrize("sizes", [(7, 4, 3), (12, 4, 3)])
def test_block(sizes, share_weights, device):
    graph = block()
    layers = made(*sizes, residual=True, share_weights=share_weights)
    check(layers, graph, features(graph, sizes[0]), device)


@pytest.mark.parametrize("share_weights", [False, True])
def test_one_width_for_a_pair(share_weights, device):
    graph = GRAPHS["wide"]()
    layers = made(7, 4, 3, share_weights=share_weights)
    check(layers, graph, pair(graph, 7, 7), device)


def test_shared_weights_stay_one_parameter():
    fast, reference = made(7, 4, 3, share_weights=True)
    assert fast.fc_src is fast.fc_dst
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in reference.named_parameters()]


def test_more_dimensions(device):
    """DGL takes no more than two; every slice of ours is DGL's result for that slice."""
    graph = homogeneous()
    fast, reference = made(7, 4, 3, residual=True)
    feat = features(graph, 7, 2, 5)
    out, attention = fast.to(device)(graph, feat.to(device), get_attention=True)
    assert out.shape == (30, 2, 5, 3, 4)
    assert attention.shape == (120, 2, 5, 3, 1)
    torch.testing.assert_close(out, fast(graph, feat.to(device)), rtol=1e-4, atol=2e-5)
    for first, second in itertools.product(range(2), range(5)):
        expected = reference(graph, feat[:, first, second], get_attention=True)
        for found, want in zip((out, attention), expected, strict=True):
            torch.testing.assert_close(found[:, first, second].cpu(), want, rtol=1e-4, atol=2e-5)


def test_attention_dropout_is_reproducible_and_unbiased(device):
    graph = homogeneous()
    fast = made(7, 4, 3, attn_drop=0.4)[0].to(device)
    feat = features(graph, 7).to(device)
    torch.manual_seed(5)
    first = fast(graph, feat)
    torch.manual_seed(5)
    assert torch.equal(fast(graph, feat), first)
    assert not torch.equal(fast(graph, feat), first)
    draws = torch.stack([fast(graph, feat).detach() for _ in range(100)])
    expected = fast.eval()(graph, feat)
    deviation = (draws.mean(0) - expected).abs() / (draws.std(0) / 10 + 1e-6)
    assert deviation.max() < 6
