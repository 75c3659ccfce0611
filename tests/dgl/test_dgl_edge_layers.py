"""DGL's layers that take features of edges, against DGL's: results, attention, all gradients, options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    bipartite,
    check_parity,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    layer_pair,
    pair,
    weights,
)
from dgl_layer_cases import EDGE_LAYERS, NARROW, WIDTH, Everything, check_edges, edge_layers
from digits import SCALES, Problem, check_digits
from torch import Tensor, nn

from fastsparse_dgl import accelerate, restore

DGLError = dgl.DGLError
ATTENTION = ["EdgeGATConv", "EGATConv"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ATTENTION)
def test_large_features_cost_no_more_digits_than_the_original(name, scale):
    """On the CPU. Kernels for GPUs derive the softmax from the stored result, with fewer digits."""

    def make(seed: int) -> Problem:
        graph = homogeneous(seed=seed)
        arguments = (WIDTH, 3, 4, 3, *((3,) if name == "EGATConv" else ()))
        fast, reference = layer_pair(getattr(fastsparse_dgl, f"Fast{name}"), *arguments)
        inputs = [scale * features(graph, WIDTH, seed=seed), scale * torch.randn(graph.num_edges(), 3)]
        call = lambda layer, given, _: Everything(layer)(graph, *given)  # noqa: E731
        return Problem(reference, fast, inputs, call)

    check_digits(make)


#: Gated layers support only one set of nodes.
ON_GRAPHS = [
    (name, kind)
    for name in EDGE_LAYERS
    for kind in (GRAPHS if name != "GatedGCNConv" else ("homogeneous", "int32", "batched", "csc"))
]


@pytest.mark.parametrize(
    ("name", "kind", "attention"),
    [(*each, False) for each in ON_GRAPHS] + [(*each, True) for each in ON_GRAPHS if each[0] in ATTENTION],
)
def test_matches_the_original(name, kind, attention, device):
    graph = GRAPHS[kind]()
    # On blocks, DGL's EGATConv supports only pairs.
    single = kind in SINGLE and not (name == "EGATConv" and "block" in kind)
    narrow = WIDTH if name == "GINEConv" else NARROW
    feat = features(graph, WIDTH) if single else pair(graph, WIDTH, narrow)
    made = edge_layers(name, learn_eps=True) if name == "GINEConv" else None
    check_edges(name, graph, device, made, feat=feat, attention=attention)


@pytest.mark.parametrize(
    "options",
    [{"residual": False}, {"bias": False}, {"activation": torch.tanh}, {"negative_slope": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_edge_gat(options, device):
    check_edges("EdgeGATConv", homogeneous(), device, edge_layers("EdgeGATConv", **options))


@pytest.mark.parametrize("shape", [None, (), (1,), (1, 1), (1, 120)])
def test_edge_weights_of_egat(shape, device):
    """One for each edge, and the other shapes that DGL takes."""
    graph = homogeneous()
    weight = torch.rand(shape or (), generator=torch.Generator().manual_seed(1))
    weight = weights(graph) if shape is None else weight
    check_edges("EGATConv", graph, device, attention=True, edge_weight=weight)


@pytest.mark.parametrize("shape", [(119,), (120, 1), (2, 120)])
def test_wrong_edge_weights_of_egat(shape, device):
    graph = homogeneous()
    for layer in edge_layers("EGATConv"):
        with pytest.raises((RuntimeError, DGLError)):
            layer(graph, features(graph, WIDTH), weights(graph, 3), edge_weight=torch.ones(shape))


@pytest.mark.parametrize("name", EDGE_LAYERS)
def test_an_adjacency_in_place_of_the_graph_and_accelerate(name, device):
    graph = homogeneous()
    fast, reference = edge_layers(name)
    accelerate(reference, show=False)
    assert type(reference) is type(fast)
    feat, edge_feat = features(graph, WIDTH).to(device), weights(graph, EDGE_LAYERS[name][0]).to(device)
    adjacency = fastsparse_dgl.caching.adjacency_of(graph, feat.device)
    got = Everything(fast.to(device))(adjacency, feat, edge_feat)
    assert torch.equal(got, Everything(reference.to(device))(graph, feat, edge_feat))
    restore(reference)
    assert type(reference).__name__ == name


def test_dropout_of_edge_gat_keeps_the_mean(device):
    graph = homogeneous()
    fast, _ = edge_layers("EdgeGATConv", attn_drop=0.5, residual=False, bias=False)
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


@pytest.mark.parametrize(("middle", "edges"), [((2,), (2, WIDTH)), ((2,), (1, WIDTH)), ((), (1,))])
def test_gine_of_features_that_broadcast(middle, edges, device):
    graph = homogeneous()
    feat, edge_feat = features(graph, WIDTH, *middle), weights(graph, *edges) - 1
    check_parity(edge_layers("GINEConv", init_eps=0.5), graph, feat, device, edge_feat=edge_feat)


def test_gine_without_a_function_in_other_dtypes(device):
    graph = homogeneous()
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        layers = layer_pair(fastsparse_dgl.FastGINEConv)
        feat, edge_feat = features(graph, WIDTH, dtype=dtype), weights(graph, WIDTH, dtype=dtype)
        exact = layers[1](graph, feat.double(), edge_feat.double())
        out = layers[0].to(device)(graph, feat.to(device), edge_feat.to(device))
        error = (out.double().cpu() - exact).norm() / exact.norm()
        assert error < (1e-2 if dtype != torch.float64 else 1e-10)


@pytest.mark.parametrize(
    "options",
    [{"batch_norm": False}, {"residual": False}, {"activation": None}, {"activation": torch.nn.Tanh()}],
    ids=str,
)
def test_options_of_gated_gcn(options, device):
    graph = homogeneous()
    made = edge_layers("GatedGCNConv", WIDTH, WIDTH, WIDTH, **options)
    check_edges("GatedGCNConv", graph, device, made, edge_feat=weights(graph, WIDTH))


def test_gated_gcn_of_nodes_without_edges_and_in_evaluation(device):
    graph = dgl.graph(([0, 0, 3], [1, 2, 2]), num_nodes=5)
    check_edges("GatedGCNConv", graph, device, tuple(layer.eval() for layer in edge_layers("GatedGCNConv")))


def test_dropout_of_gated_gcn(device):
    graph = homogeneous()
    fast, _ = edge_layers("GatedGCNConv", dropout=0.5, batch_norm=False, activation=None)
    fast, feat, edge_feat = fast.to(device), features(graph, WIDTH).to(device), weights(graph, 3).to(device)
    for some, all_ in zip(fast(graph, feat, edge_feat), fast.eval()(graph, feat, edge_feat), strict=True):
        zero = some == 0
        assert zero.any()
        torch.testing.assert_close(some[~zero], 2 * all_[~zero])


def test_features_may_be_written_after_gine(device):
    """As with DGL's layer, whose relu stores its result."""
    graph = homogeneous()
    fast = fastsparse_dgl.FastGINEConv(nn.Linear(WIDTH, WIDTH)).to(device)
    leaves = [features(graph, WIDTH).to(device), weights(graph, WIDTH).to(device)]
    leaves = [*(each.detach().requires_grad_() for each in leaves), *fast.parameters()]
    found = []
    for in_place in (False, True):
        feat, edge_feat = 1 * leaves[0], 1 * leaves[1]
        out = fast(graph, feat, edge_feat)
        if in_place:
            feat += out
            edge_feat.zero_()
        else:
            feat = feat + out
        once = torch.autograd.grad(feat.square().sum(), leaves, create_graph=True)
        found.append([*once, *torch.autograd.grad(sum(each.square().sum() for each in once), leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ATTENTION)
def test_second_derivatives(name, device):
    graph, layer = homogeneous(), edge_layers(name)[0].to(device).double()
    given = (features(graph, WIDTH), weights(graph, EDGE_LAYERS[name][0]))
    given = tuple(each.to(device).double().requires_grad_() for each in given)
    assert torch.autograd.gradgradcheck(lambda *given: layer(graph, *given), given, fast_mode=True)


@pytest.mark.parametrize("name", EDGE_LAYERS)
def test_bad_input(name, device):
    graph = homogeneous()
    fast, feat = edge_layers(name)[0].to(device), features(graph, WIDTH).to(device)
    right: Tensor = weights(graph, EDGE_LAYERS[name][0]).to(device)
    wrong: list[Any] = [None, right[1:], right[:, :2]]
    wrong += [right[:, 0], right[:, None]] if name == "GINEConv" else []
    for edge_feat in wrong:
        with pytest.raises(DGLError, match="expected" if name in ATTENTION else "edge_feat: expected"):
            fast(graph, feat, edge_feat)
    if name in ATTENTION:
        lonely = dgl.graph(([0], [1]), num_nodes=3)
        with pytest.raises(DGLError, match="incoming edge"):
            fast(lonely, torch.randn(3, WIDTH, device=device), torch.randn(1, 3, device=device))
    if name == "GatedGCNConv":
        with pytest.raises(DGLError, match="feat: expected one tensor of shape"):
            fast(graph, (feat, feat), right)
        other = bipartite()
        with pytest.raises(DGLError, match="graph: expected one set of nodes"):
            fast(other, features(other, WIDTH).to(device), right)
