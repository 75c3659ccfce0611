"""FastGATv2Conv against DGL's GATv2Conv: its own options."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import WithAttention, check, randomised
from dgl_cases import GRAPHS, block, fastsparse_dgl, features, homogeneous, pair, twin

FastGATv2Conv = fastsparse_dgl.FastGATv2Conv


def made(*arguments, **options):
    return randomised(*twin(FastGATv2Conv, *arguments, **options))


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


@pytest.mark.parametrize("widths", [(7, 5), (7, 12)])
@pytest.mark.parametrize("graph_name", ["wide", "tall", "block"])
def test_residual_of_a_pair(widths, graph_name, device):
    graph = GRAPHS[graph_name]()
    check(made(widths, 4, 3, residual=True), graph, pair(graph, *widths), device)


@pytest.mark.parametrize("share_weights", [False, True])
def test_one_width_for_a_pair(share_weights, device):
    graph = GRAPHS["wide"]()
    layers = made(7, 4, 3, share_weights=share_weights)
    check(layers, graph, pair(graph, 7, 7), device)


@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_negative_slope(slope, device):
    graph = homogeneous()
    check(made(7, 4, 3, negative_slope=slope), graph, features(graph, 7), device)


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


def test_feature_dropout_draws_as_dgl():
    graph = homogeneous()
    results = []
    for layer in made((7, 5), 4, 3, feat_drop=0.5, residual=True):
        torch.manual_seed(3)
        results.append(layer(graph, pair(graph, 7, 5)))
    torch.testing.assert_close(*results)


def test_dropout_of_returned_attention_draws_as_dgl():
    graph = homogeneous()
    results = []
    for layer in made(7, 4, 3, feat_drop=0.2, attn_drop=0.5):
        torch.manual_seed(3)
        results.append(layer(graph, features(graph, 7), get_attention=True))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert (results[0][1] == 0).any()


@pytest.mark.parametrize("attention", [False, True])
def test_everything_dropped(attention, device):
    graph = homogeneous()
    fast, reference = made(7, 4, 3, attn_drop=1.0, residual=True)
    if attention:
        fast, reference = WithAttention(fast), WithAttention(reference)
    check((fast, reference), graph, features(graph, 7), device)


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


def test_gradients_under_attention_dropout_see_the_same_mask(device):
    graph = homogeneous()
    fast = made(5, 3, 2, attn_drop=0.5)[0].double().to(device)
    feat = features(graph, 5, dtype=torch.float64).to(device).requires_grad_()

    def run(*_):
        torch.manual_seed(7)
        return fast(graph, feat)

    leaves = (feat, fast.attn, fast.fc_src.weight, fast.fc_dst.weight)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_evaluation_drops_nothing(device):
    graph = homogeneous()
    fast, reference = made(7, 4, 3, feat_drop=0.5, attn_drop=0.5)
    check((fast.eval(), reference.eval()), graph, features(graph, 7), device)
