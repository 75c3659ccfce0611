"""FastEdgeGATConv and FastEGATConv against DGL's: results, attention, all gradients, every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    check_parity,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
    weights,
)
from dgl_layer_cases import randomised
from digits import SCALES, Problem, check_digits
from torch import Tensor, nn

from fastsparse_dgl import accelerate, restore

DGLError = dgl.DGLError
WIDTH, EDGE_WIDTH = 7, 3


def layers(name: str, *, pair_of_widths: bool = False, **options: Any) -> tuple[Any, Any]:
    """Our layer and DGL's, with equal random parameters."""
    width = (WIDTH, 5) if pair_of_widths else WIDTH
    if name == "EdgeGATConv":
        return randomised(*layer_pair(fastsparse_dgl.FastEdgeGATConv, width, EDGE_WIDTH, 4, 3, **options))
    return randomised(*layer_pair(fastsparse_dgl.FastEGATConv, width, EDGE_WIDTH, 4, 2, 3, **options))


class Everything(nn.Module):
    """All results as one vector, so that one comparison covers them and their gradients."""

    def __init__(self, layer: Any, with_attention: bool) -> None:
        super().__init__()
        self.layer, self.with_attention = layer, with_attention

    def forward(self, graph: Any, feat: Any, edge_feat: Tensor, **options: Any) -> Tensor:
        options |= {"get_attention": True} if self.with_attention else {}
        out = self.layer(graph, feat, edge_feat, **options)
        return torch.cat([part.flatten() for part in (out if isinstance(out, tuple) else (out,))])


def check(name: str, graph: Any, feat: Any, device: str, attention: bool, fast: Any = None, **options: Any):
    made = layers(name, pair_of_widths=isinstance(feat, tuple), **options.pop("made", {}))
    both = tuple(Everything(layer, attention) for layer in made)
    if graph.is_homogeneous and not graph.adj_tensors("csc")[2].numel():
        graph = dgl.graph(graph.edges(), num_nodes=graph.num_nodes())
    edge_feat = weights(graph, EDGE_WIDTH)
    check_parity(both, graph, feat, device, fast_graph=fast, tolerance=2e-5, edge_feat=edge_feat, **options)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["EdgeGATConv", "EGATConv"])
def test_large_features_cost_no_more_digits_than_the_original(name, scale):
    """On the CPU. Kernels for GPUs derive the softmax from the stored result, with fewer digits."""

    def make(seed: int) -> Problem:
        graph = homogeneous(seed=seed)
        layer_class = getattr(fastsparse_dgl, f"Fast{name}")
        fast, reference = layer_pair(
            layer_class, WIDTH, EDGE_WIDTH, 4, 3, *((3,) if name == "EGATConv" else ())
        )
        x = scale * features(graph, WIDTH, seed=seed)
        edge_feat = scale * torch.randn(graph.num_edges(), EDGE_WIDTH)

        def call(layer: Any, given: Any, _: str) -> Tensor:
            out = layer(graph, *given)
            return torch.cat([part.flatten() for part in (out if isinstance(out, tuple) else (out,))])

        return Problem(reference, fast, [x, edge_feat], call)

    check_digits(make)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("kind", list(GRAPHS))
@pytest.mark.parametrize("name", ["EdgeGATConv", "EGATConv"])
def test_matches_the_original(name, kind, attention, device):
    graph = GRAPHS[kind]()
    single = kind in SINGLE and not (
        name == "EGATConv" and "block" in kind
    )  # of which DGL's takes pairs only
    feat = features(graph, WIDTH) if single else pair(graph, WIDTH, 5)
    check(name, graph, feat, device, attention)


@pytest.mark.parametrize(
    "options",
    [{"residual": False}, {"bias": False}, {"activation": torch.tanh}, {"negative_slope": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_edge_gat(options, device):
    graph = homogeneous()
    check("EdgeGATConv", graph, features(graph, WIDTH), device, False, made=options)


def test_edge_weight_of_egat(device):
    graph = homogeneous()
    check("EGATConv", graph, features(graph, WIDTH), device, True, edge_weight=weights(graph))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 120)])
def test_edge_weight_shapes_of_egat_that_dgl_takes(shape, device):
    graph = homogeneous()
    edge_weight = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    check("EGATConv", graph, features(graph, WIDTH), device, True, edge_weight=edge_weight)


@pytest.mark.parametrize("shape", [(119,), (120, 1), (2, 120)])
def test_wrong_edge_weights_of_egat(shape, device):
    graph = homogeneous()
    for layer in layers("EGATConv"):
        with pytest.raises((RuntimeError, DGLError)):
            layer(graph, features(graph, WIDTH), weights(graph, 3), edge_weight=torch.ones(shape))


@pytest.mark.parametrize("name", ["EdgeGATConv", "EGATConv"])
def test_an_adjacency_in_place_of_the_graph_and_accelerate(name, device):
    graph = homogeneous()
    fast, reference = layers(name)
    accelerate(reference, show=False)
    assert type(reference) is type(fast)
    fast, feat, edge_feat = fast.to(device), features(graph, WIDTH).to(device), weights(graph, 3).to(device)
    adjacency = fastsparse_dgl.caching.adjacency_of(graph, feat.device)
    expected = Everything(reference.to(device), False)(graph, feat, edge_feat)
    assert torch.equal(Everything(fast, False)(adjacency, feat, edge_feat), expected)
    restore(reference)
    assert type(reference).__name__ == name


def test_dropout_of_edge_gat_keeps_the_mean(device):
    graph = homogeneous()
    fast, _ = layers("EdgeGATConv", attn_drop=0.5, residual=False, bias=False)
    fast, feat, edge_feat = fast.to(device), features(graph, WIDTH).to(device), weights(graph, 3).to(device)
    copies = 200
    many = dgl.batch([graph] * copies), feat.repeat(copies, 1), edge_feat.repeat(copies, 1)
    torch.manual_seed(0)
    drawn = torch.cat([fast(*many) for _ in range(4)])
    mean = drawn.unflatten(0, (-1, graph.num_nodes())).mean(0)
    expected = fast.eval()(graph, feat, edge_feat)
    assert (mean - expected).abs().max() < 0.2 * expected.abs().max()
    fast.train().attn_drop.p = 1.0
    assert not fast(graph, feat, edge_feat).any()


@pytest.mark.parametrize("name", ["EdgeGATConv", "EGATConv"])
def test_bad_input(name, device):
    graph = homogeneous()
    fast, _ = layers(name)
    fast, feat = fast.to(device), features(graph, WIDTH).to(device)
    for edge_feat in (None, weights(graph, 2).to(device), weights(graph, 3).to(device)[1:]):
        with pytest.raises(DGLError, match="expected"):
            fast(graph, feat, edge_feat)
    lonely = dgl.graph(([0], [1]), num_nodes=3)
    with pytest.raises(DGLError, match="incoming edge"):
        fast(lonely, torch.randn(3, WIDTH, device=device), torch.randn(1, 3, device=device))
