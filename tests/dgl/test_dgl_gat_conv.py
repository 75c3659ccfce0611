"""FastGATConv against DGL's GATConv: its own options, and those that GATv2 has too."""

from __future__ import annotations

import itertools

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    DGLError,
    block,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
    weights,
)
from dgl_layer_cases import WithAttention, check, randomised

FastGATConv = fastsparse_dgl.FastGATConv
BOTH = (FastGATConv, fastsparse_dgl.FastGATv2Conv)
both = pytest.mark.parametrize("layer_class", BOTH)


def made(*arguments, layer_class=FastGATConv, **options):
    return randomised(*layer_pair(layer_class, *arguments, **options))


@pytest.mark.parametrize(
    ("residual", "bias", "activation"),
    list(itertools.product([False, True], [False, True], [None, torch.nn.functional.elu])),
)
@pytest.mark.parametrize("sizes", [(7, 4, 3), (12, 4, 3), (5, 6, 1), (4, 1, 4)])
def test_options(sizes, residual, bias, activation, device):
    """The residual is the input itself where the widths agree, (12, 4, 3) and (4, 1, 4)."""
    graph = homogeneous()
    layers = made(*sizes, residual=residual, bias=bias, activation=activation)
    check(layers, graph, features(graph, sizes[0]), device)


@pytest.mark.parametrize("sizes", [(7, 4, 3), (12, 4, 3)])
def test_residual_of_a_block(sizes, device):
    graph = block()
    check(made(*sizes, residual=True), graph, features(graph, sizes[0]), device)


@both
@pytest.mark.parametrize("widths", [(7, 5), (7, 12)])
@pytest.mark.parametrize("graph_name", ["wide", "tall", "block"])
def test_residual_of_a_pair(layer_class, widths, graph_name, device):
    graph = GRAPHS[graph_name]()
    layers = made(widths, 4, 3, layer_class=layer_class, residual=True)
    check(layers, graph, pair(graph, *widths), device)


@both
def test_one_tensor_twice_is_a_pair(layer_class, device):
    """A layer made for pairs has a linear map for either end."""
    graph = homogeneous()
    x = features(graph, 7)
    layers = [layer.eval() for layer in made((7, 7), 4, 3, layer_class=layer_class)]
    check(layers, graph, (x, x), device)


@pytest.mark.parametrize("graph_name", ["wide", "homogeneous"])
def test_one_matrix_for_a_pair(graph_name, device):
    """A layer made with one width transforms both of a pair with it."""
    graph = GRAPHS[graph_name]()
    check(made(7, 4, 3), graph, pair(graph, 7, 7), device)


@both
@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_negative_slope(layer_class, slope, device):
    graph = homogeneous()
    layers = made(7, 4, 3, layer_class=layer_class, negative_slope=slope)
    check(layers, graph, features(graph, 7), device)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("graph_name", ["homogeneous", "csc", "block", "batched"])
def test_edge_weight(graph_name, attention, device):
    graph = GRAPHS[graph_name]()
    layers = made(7, 4, 3, residual=True)
    if attention:
        layers = tuple(WithAttention(layer) for layer in layers)
    options = {"edge_weight": weights(graph)}
    check(layers, graph, features(graph, 7), device, **options)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 120)])
def test_edge_weight_shapes_that_dgl_takes(shape, device):
    graph = homogeneous()
    edge_weight = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    check(made(7, 4, 3), graph, features(graph, 7), device, edge_weight=edge_weight)


@pytest.mark.parametrize("middle", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize("attention", [False, True])
def test_more_dimensions(middle, attention, device):
    graph = homogeneous()
    layers = made(7, 4, 3, residual=True)
    if attention:
        layers = tuple(WithAttention(layer) for layer in layers)
    check(layers, graph, features(graph, 7, *middle), device)


def test_shape_of_the_attention_of_more_dimensions(device):
    graph = homogeneous()
    fast, reference = made(7, 4, 3)
    feat = features(graph, 7, 2, 5)
    out, attention = fast.to(device)(graph, feat.to(device), get_attention=True)
    expected = reference(graph, feat, get_attention=True)
    assert (out.shape, attention.shape) == (expected[0].shape, expected[1].shape)
    assert attention.shape == (120, 2, 5, 3, 1)


@both
def test_feature_dropout_draws_as_dgl(layer_class):
    graph = homogeneous()
    results = []
    for layer in made((7, 5), 4, 3, layer_class=layer_class, feat_drop=0.5, residual=True):
        torch.manual_seed(3)
        results.append(layer(graph, pair(graph, 7, 5)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("layer_class", "weighted"), [*((each, False) for each in BOTH), (FastGATConv, True)]
)
def test_dropout_of_returned_attention_draws_as_dgl(layer_class, weighted):
    """The returned attention is the one that the sum used: after dropout and edge weights."""
    graph = homogeneous()
    options = {"edge_weight": weights(graph)} if weighted else {}
    results = []
    for layer in made(7, 4, 3, layer_class=layer_class, feat_drop=0.2, attn_drop=0.5):
        torch.manual_seed(3)
        results.append(layer(graph, features(graph, 7), get_attention=True, **options))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert (results[0][1] == 0).any()


@both
@pytest.mark.parametrize("attention", [False, True])
def test_everything_dropped(layer_class, attention, device):
    graph = homogeneous()
    layers = made(7, 4, 3, layer_class=layer_class, attn_drop=1.0, residual=True)
    if attention:
        layers = tuple(WithAttention(layer) for layer in layers)
    check(layers, graph, features(graph, 7), device)


def one_hot_layer(attn_drop, num_nodes, device):
    """A layer with one head whose output is the row of attention weights, since features are unit vectors."""
    fast = FastGATConv(num_nodes, num_nodes, 1, attn_drop=attn_drop, bias=False).to(device)
    with torch.no_grad():
        fast.fc.weight.copy_(torch.eye(num_nodes))
    return fast


def test_attention_dropout_zeroes_or_scales(device):
    src, dst = (torch.arange(40) for _ in range(2))
    graph = dgl.graph((src.repeat_interleave(40), dst.repeat(40)))
    fast = one_hot_layer(0.4, 40, device)
    feat = torch.eye(40, device=device)
    torch.manual_seed(5)
    dropped = fast(graph, feat).squeeze(1)
    torch.manual_seed(5)
    assert torch.equal(fast(graph, feat).squeeze(1), dropped)
    assert not torch.equal(fast(graph, feat).squeeze(1), dropped)
    weight = fast.eval()(graph, feat).squeeze(1)
    torch.testing.assert_close(weight.sum(1), torch.ones(40, device=device))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weight[kept] / 0.6)
    share = kept.double().mean().item()
    assert abs(share - 0.6) < 5 * (0.6 * 0.4 / 1600) ** 0.5


@both
def test_gradients_under_attention_dropout_see_the_same_mask(layer_class, device):
    graph = homogeneous()
    fast = made(5, 3, 2, layer_class=layer_class, attn_drop=0.5)[0].double().to(device)
    feat = features(graph, 5, dtype=torch.float64).to(device).requires_grad_()

    def run(*_):
        torch.manual_seed(7)
        return fast(graph, feat)

    leaves = (feat, *(parameter for parameter in fast.parameters() if parameter.dim() > 1))
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@both
def test_evaluation_drops_nothing(layer_class, device):
    graph = homogeneous()
    fast, reference = made(7, 4, 3, layer_class=layer_class, feat_drop=0.5, attn_drop=0.5)
    check((fast.eval(), reference.eval()), graph, features(graph, 7), device)


def test_nothing_of_edge_size_without_need(device):
    """Neither the forward nor the backward pass of the fused path keeps a tensor with a row per edge."""
    num_nodes = 40
    src = torch.arange(num_nodes).repeat_interleave(num_nodes)
    graph = dgl.graph((src, torch.arange(num_nodes).repeat(num_nodes)))
    fast = made(7, 4, 3)[0].to(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        fast(graph, features(graph, 7).to(device))
    assert kept
    assert max(kept) < num_nodes * num_nodes


def test_no_wide_copy_of_16_bit_features_is_kept(device):
    graph = homogeneous()
    fast = made(7, 4, 3)[0].to(device)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks, torch.autocast(device, torch.bfloat16):
        fast(graph, features(graph, 7).to(device))
    sizes = {item.numel() for item in kept if item.dtype == torch.float32}
    assert sizes
    assert 30 * 12 not in sizes


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("shape", [(119,), (121,), (0,), (120, 1), (120, 3), (2, 120)])
def test_wrong_edge_weights(shape, device):
    graph = homogeneous()
    fast, reference = made(7, 4, 3)
    with pytest.raises((RuntimeError, DGLError)):
        reference(graph, features(graph, 7), edge_weight=torch.ones(shape))
    with pytest.raises(DGLError, match=r"edge_weight: expected shape \(120,\), one value"):
        fast.to(device)(graph, features(graph, 7).to(device), edge_weight=torch.ones(shape, device=device))


def test_edge_weights_of_another_type():
    graph = homogeneous()
    with pytest.raises(DGLError, match="edge_weight: expected a tensor, got list"):
        made(7, 4, 3)[0](graph, features(graph, 7), edge_weight=[1.0] * 120)


@pytest.mark.gpu
def test_edge_weights_on_another_device():
    graph = homogeneous()
    with pytest.raises(DGLError, match="edge_weight: expected device cuda:0"):
        made(7, 4, 3)[0].cuda()(graph, features(graph, 7).cuda(), edge_weight=torch.ones(120))


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_dropout_outside_its_range(rate):
    for layer_class in (FastGATConv, dgl.nn.GATConv):
        with pytest.raises(ValueError, match="dropout probability"):
            layer_class(7, 4, 3, attn_drop=rate)
