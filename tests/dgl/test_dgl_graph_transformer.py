"""GraphTransformerLayer against the same formula in DGL's message passing."""

from __future__ import annotations

import pickle

import pytest
import torch
from dgl_cases import (
    GRAPHS,
    SINGLE,
    DGLError,
    assert_close,
    bipartite,
    block,
    dgl,
    fastsparse_dgl,
    features,
    homogeneous,
    outputs_and_gradients,
    pair,
)
from torch.nn import functional as F

GraphTransformerLayer = fastsparse_dgl.GraphTransformerLayer


class Reference(torch.nn.Module):
    """Equations 4 to 8 of Dwivedi and Bresson over ``dgl.function``, with the parameters of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, graph, feat):
        layer = self.layer
        source, destination = feat if isinstance(feat, tuple) else (feat, feat[: graph.num_dst_nodes()])
        split = (layer.heads, -1)
        with graph.local_scope():
            graph.srcdata["k"] = layer.key(source).unflatten(-1, split)
            graph.srcdata["v"] = layer.value(source).unflatten(-1, split)
            graph.dstdata["q"] = layer.query(destination).unflatten(-1, split)
            graph.apply_edges(dgl.function.u_dot_v("k", "q", "score"))
            width = graph.dstdata["q"].shape[-1]
            weight = dgl.nn.functional.edge_softmax(graph, graph.edata["score"] / width**0.5)
            graph.edata["w"] = F.dropout(weight, layer.attention_dropout, self.training)
            graph.update_all(dgl.function.u_mul_e("v", "w", "m"), dgl.function.sum("m", "out"))
            out = graph.dstdata["out"].flatten(1)
        out = layer.out(layer.dropout(out))
        out = layer.norm1(destination + out if layer.residual else out)
        first, _, drop, second = layer.feed_forward
        inner = second(drop(F.relu(first(out))))
        return layer.norm2(out + inner if layer.residual else inner)


def made(*arguments, **options):
    """The layer, and the reference with a copy of its parameters, under the same names."""
    torch.manual_seed(0)
    fast = GraphTransformerLayer(*arguments, **options)
    reference = Reference(GraphTransformerLayer(*arguments, **options))
    reference.layer.load_state_dict(fast.state_dict())
    return fast, reference


class Call(torch.nn.Module):
    """Gives the parameters of our layer the names that they have in the reference."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, graph, feat):
        return self.layer(graph, feat)


def vanishing(options):
    """Parameters that cannot change the result: shifts of what a softmax or batch normalisation takes."""
    names = ["layer.key.bias"] if options.get("bias") else []
    if options.get("norm", "batch") == "batch":
        names += ["layer.out.bias", "layer.feed_forward.3.bias"]
    return names


def check(arguments, options, graph, feat, device, tolerance=5e-5, dtype=torch.float32):
    fast, reference = made(*arguments, **options)
    expected = outputs_and_gradients(reference.to(dtype), graph, feat, {}, "cpu")
    found = outputs_and_gradients(Call(fast).to(dtype), graph, feat, {}, device)
    for name in vanishing(options):
        scale = max(item.abs().max() for item in expected.values())
        for results in (found, expected):
            assert results.pop(name).abs().max() < tolerance * scale
    assert_close(found, expected, tolerance)


@pytest.mark.parametrize("graph_name", GRAPHS)
@pytest.mark.parametrize("norm", ["batch", "layer", None])
@pytest.mark.parametrize("residual", [False, True])
def test_parity(graph_name, norm, residual, device):
    graph = GRAPHS[graph_name]()
    feat = features(graph, 12) if graph_name in SINGLE else pair(graph, 12, 12)
    check((12, 12, 3), {"norm": norm, "residual": residual}, graph, feat, device)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(7, 12, 3), (7, 12, 1), (12, 12, 12)])
def test_sizes(sizes, bias, device):
    graph = homogeneous()
    check(sizes, {"bias": bias, "residual": False, "norm": "layer"}, graph, features(graph, sizes[0]), device)


def test_float64(device):
    graph = homogeneous()
    feat = features(graph, 12, dtype=torch.float64)
    check((12, 12, 3), {}, graph, feat, device, tolerance=1e-11, dtype=torch.float64)


def test_running_statistics_and_evaluation(device):
    graph = homogeneous()
    fast, reference = made(12, 12, 3, dropout=0.5, attn_drop=0.5)
    feat = features(graph, 12)
    fast = fast.to(device)
    for layer in (fast, reference):
        for module in layer.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    fast.attention_dropout = reference.layer.attention_dropout = 0.0
    for _ in range(3):
        fast(graph, feat.to(device))
        reference(graph, feat)
    fast.attention_dropout = reference.layer.attention_dropout = 0.5
    found, expected = fast.eval()(graph, feat.to(device)), reference.eval()(graph, feat)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_nodes_without_edges_have_attention_zero(norm, device):
    graph = dgl.graph((torch.tensor([0, 1, 2, 2, 4]), torch.tensor([1, 2, 3, 1, 1])), num_nodes=6)
    check((12, 12, 3), {"norm": norm}, graph, features(graph, 12), device)


def test_batched_graphs_are_independent(device):
    graphs = [homogeneous(seed=1), homogeneous(seed=2)]
    batch = dgl.batch(graphs)
    fast = GraphTransformerLayer(12, 12, 3, norm="layer").to(device)
    feat = features(batch, 12).to(device)
    expected = torch.cat([fast(graph, part) for graph, part in zip(graphs, feat.split(30), strict=True)])
    torch.testing.assert_close(fast(batch, feat), expected, rtol=1e-5, atol=1e-5)


def test_dropout_of_features_draws_as_the_reference():
    graph = homogeneous()
    results = []
    for layer in made(12, 12, 3, dropout=0.5, norm="layer"):
        torch.manual_seed(3)
        results.append(layer(graph, features(graph, 12)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_dropout_is_reproducible(device):
    graph = homogeneous()
    feat = features(graph, 12).to(device)
    for options in ({"attn_drop": 0.5}, {"dropout": 0.5}):
        fast = GraphTransformerLayer(12, 12, 3, norm=None, **options).to(device)
        torch.manual_seed(1)
        first = fast(graph, feat)
        torch.manual_seed(1)
        assert torch.equal(fast(graph, feat), first)
        assert not torch.equal(fast(graph, feat), first)


def test_gradients_under_dropout_see_the_same_mask(device):
    graph = homogeneous()
    fast = GraphTransformerLayer(4, 4, 2, dropout=0.3, attn_drop=0.5, norm="layer").double().to(device)
    feat = features(graph, 4, dtype=torch.float64).to(device).requires_grad_()

    def run(*_):
        torch.manual_seed(7)
        return fast(graph, feat)

    leaves = (feat, fast.query.weight, fast.key.weight, fast.value.weight)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_autocast(device):
    graph = homogeneous()
    fast, reference = made(12, 12, 3)
    feat = features(graph, 12)
    with torch.autocast(device, torch.bfloat16):
        found = fast.to(device)(graph, feat.to(device))
    error = (found.cpu().double() - reference(graph, feat).double()).norm() / found.cpu().double().norm()
    assert error < 0.05
    found.float().square().sum().backward()
    assert fast.key.weight.grad.dtype == torch.float32


def test_adjacency_of_a_block(device):
    graph = block()
    fast = GraphTransformerLayer(12, 12, 3).to(device)
    feat = features(graph, 12).to(device)
    adjacency = fastsparse_dgl.prepare(graph, device)
    torch.testing.assert_close(fast(adjacency, feat), fast(graph, feat))


def test_compile_with_an_adjacency():
    graph = homogeneous()
    adjacency = fastsparse_dgl.prepare(graph)
    fast = GraphTransformerLayer(12, 12, 3)
    feat = features(graph, 12).requires_grad_()
    wanted = [feat, *fast.parameters()]
    expected = torch.autograd.grad(fast(adjacency, feat).square().sum(), wanted)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(adjacency, feat).square().sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_pickle():
    graph = homogeneous()
    fast = GraphTransformerLayer(12, 12, 3).eval()
    again = pickle.loads(pickle.dumps(fast))
    assert torch.equal(again(graph, features(graph, 12)), fast(graph, features(graph, 12)))


@pytest.mark.parametrize("norm", ["batch", "layer", None])
def test_reset_parameters(norm):
    torch.manual_seed(2)
    fast = GraphTransformerLayer(12, 12, 3, norm=norm, bias=True)
    fresh = {key: item.clone() for key, item in fast.state_dict().items()}
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.fill_(7)
    torch.manual_seed(2)
    fast.reset_parameters()
    for key, item in fast.state_dict().items():
        assert torch.equal(item, fresh[key]), key


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((12, 12, 5), {}, "out_feats: expected a multiple of num_heads=5"),
        ((12, 12, 0), {}, "out_feats: expected a multiple of num_heads=0, which must be at least 1"),
        ((7, 12, 3), {}, "in_feats: expected 12 like out_feats, got 7"),
        ((12, 12, 3), {"attn_drop": 1.0}, "attn_drop: expected a probability"),
        ((12, 12, 3), {"attn_drop": -0.1}, "attn_drop: expected a probability"),
        ((12, 12, 3), {"norm": "instance"}, "norm: expected"),
    ],
)
def test_wrong_options(arguments, options, message):
    with pytest.raises(DGLError, match=message):
        GraphTransformerLayer(*arguments, **options)


def test_dropout_outside_its_range():
    with pytest.raises(ValueError, match="dropout probability"):
        GraphTransformerLayer(12, 12, 3, dropout=1.5)


def test_wrong_rows_and_widths(device):
    fast = GraphTransformerLayer(12, 12, 3).to(device)
    with pytest.raises(DGLError, match=r"source node \(30 rows"):
        fast(homogeneous(), torch.ones(29, 12, device=device))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fast(homogeneous(), torch.ones(30, 11, device=device))
    with pytest.raises(DGLError, match="pass a pair"):
        fast(bipartite(), torch.ones(17, 12, device=device))
