"""FastTransformerConv and GraphTransformerLayer: outputs, all gradients, every option."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import KINDS, as_kind, close, gradients, random_graph, same, simple_graph
from torch import nn
from torch_geometric.nn import TransformerConv

from fastsparse_pyg import FastTransformerConv, GraphTransformerLayer, prepare


def pair(
    *args: object, device: str, dtype: torch.dtype = torch.float32, **options: object
) -> tuple[TransformerConv, FastTransformerConv]:
    reference, layer = (
        conv(*args, **options).to(device, dtype) for conv in (TransformerConv, FastTransformerConv)
    )
    return reference, layer


def test_edge_features_and_edge_dim_go_together(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device)
    for conv in pair(6, 5, edge_dim=3, device=device):
        with pytest.raises(AssertionError):
            conv(x, edge_index)
    # Without edge_dim, the original adds edge features to the values without a linear map.
    reference, layer = pair(6, 5, heads=2, device=device)
    edge_attr = torch.randn(edge_index.size(1), 2, 5, device=device)
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr), [], floor=1)


def test_edge_features_need_an_adjacency_without_loops(device):
    edge_index = random_graph(device=device)
    graph = prepare(edge_index, 40, add_self_loops=True)
    layer = FastTransformerConv(6, 5, edge_dim=3).to(device)
    with pytest.raises(ValueError, match="add_self_loops=False"):
        layer(torch.randn(40, 6, device=device), graph, torch.randn(edge_index.size(1), 3, device=device))


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.usefixtures("kernels_only")
def test_attention_weights(device, edge_dim):
    """For True and for False; before dropout."""
    edge_index = random_graph(device=device)
    reference, layer = pair(6, 5, heads=3, edge_dim=edge_dim, dropout=0.9, device=device)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = None if edge_dim is None else torch.randn(edge_index.size(1), edge_dim, device=device)
    for value in (True, False):
        _, (expected_edges, expected_alpha) = reference(x, edge_index, edge_attr, value)
        for graph in (edge_index, prepare(edge_index, 40)):
            _, (edges, alpha) = layer(x, graph, edge_attr, value)
            assert torch.equal(edges, expected_edges)
            close(alpha, expected_alpha)
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr, True)[1][1], [x], floor=1)
    for conv in (reference, layer):
        conv.eval()
    close(layer(x, edge_index, edge_attr, True)[0], reference(x, edge_index, edge_attr, True)[0])


# ---------------------------------------------------------------- GraphTransformerLayer


def plain_layer(layer: GraphTransformerLayer, x_src, x_dst, edge_index):
    """The layer in plain torch: dense scores, masked by the number of edges between two nodes."""
    src, dst = edge_index if layer.flow == "source_to_target" else edge_index.flip(0)
    count = x_src.new_zeros(x_dst.size(0), x_src.size(0)).index_put_(
        (dst, src), x_src.new_ones(len(src)), accumulate=True
    )
    heads = (layer.heads, -1)
    query, key, value = (
        lin(side).unflatten(-1, heads).transpose(0, 1)
        for lin, side in ((layer.query, x_dst), (layer.key, x_src), (layer.value, x_src))
    )
    weight = (query @ key.transpose(1, 2) / query.size(-1) ** 0.5).exp() * count
    total = weight.sum(-1, keepdim=True)
    weight = weight / torch.where(total == 0, 1, total)
    out = layer.out((weight @ value).transpose(0, 1).flatten(1))
    out = layer.norm1(x_dst + out if layer.residual else out)
    forward = layer.feed_forward(out)
    return layer.norm2(out + forward if layer.residual else forward)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "layer"},
        {"norm": None, "bias": True},
        {"residual": False, "norm": None},
        {"flow": "target_to_source"},
    ],
    ids=str,
)
def test_graph_transformer_layer(device, options):
    edge_index = random_graph(device=device)
    layer = GraphTransformerLayer(8, 8, 2, **options).to(device, torch.float64)
    x = torch.randn(40, 8, device=device, dtype=torch.float64, requires_grad=True)
    got, expected = layer(x, edge_index), plain_layer(layer, x, x, edge_index)
    close(got, expected, 1e-10)
    tensors = [x, *layer.parameters()]
    for one, other in zip(gradients(got, tensors), gradients(expected, tensors), strict=True):
        close(one, other, 1e-9, floor=1)


def test_graph_transformer_layer_with_edge_features(device):
    """Its attention is TransformerConv's, which knows edge features."""
    edge_index = random_graph(device=device)
    layer = GraphTransformerLayer(8, 8, 2, norm=None, edge_dim=3).to(device, torch.float64)
    conv = TransformerConv(8, 4, heads=2, edge_dim=3, root_weight=False, bias=False).to(device, torch.float64)
    conv.lin_query, conv.lin_key, conv.lin_value = layer.query, layer.key, layer.value
    conv.lin_edge = layer.edge
    x = torch.randn(40, 8, device=device, dtype=torch.float64, requires_grad=True)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device, dtype=torch.float64, requires_grad=True)
    expected = x + layer.out(conv(x, edge_index, edge_attr))
    expected = expected + layer.feed_forward(expected)
    tensors = [x, edge_attr, *layer.parameters()]
    wanted = gradients(expected, tensors)
    for graph in (edge_index, prepare(edge_index, 40)):
        got = layer(x, graph, edge_attr)
        close(got, expected, 1e-10)
        for one, other in zip(gradients(got, tensors), wanted, strict=True):
            close(one, other, 1e-9, floor=1)
    with pytest.raises(ValueError, match="edge_attr: expected .*, because the layer was made with"):
        layer(x, edge_index)


def test_graph_transformer_layer_bipartite_and_narrowing(device):
    edge_index = random_graph(40, 25, device=device)
    layer = GraphTransformerLayer(6, 8, 4, residual=False, norm="layer").to(device)
    x = torch.randn(40, 6, device=device), torch.randn(25, 6, device=device)
    close(layer(x, edge_index), plain_layer(layer, *x, edge_index), 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_graph_transformer_layer_input_kinds(device, kind):
    edge_index = simple_graph(device=device)
    layer = GraphTransformerLayer(8, 8, 2, norm="layer").to(device)
    x = torch.randn(40, 8, device=device)
    close(layer(x, as_kind(kind, edge_index, 40, 40)), layer(x, edge_index))


def test_graph_transformer_layer_dropout(device):
    """Attention dropout is drawn again each time, from PyTorch's seed, in training only."""
    edge_index = random_graph(device=device)
    layer = GraphTransformerLayer(8, 8, 2, attention_dropout=0.5, norm="layer").to(device)
    x = torch.randn(40, 8, device=device)
    torch.manual_seed(3)
    first, second = layer(x, edge_index), layer(x, edge_index)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(layer(x, edge_index), first)
    layer.eval()
    assert torch.equal(layer(x, edge_index), layer(x, edge_index))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.usefixtures("fresh_compiler")
def test_graph_transformer_layer_compiles(device, fullgraph):
    """With an Adjacency to one graph, with edges to several."""
    edge_index = random_graph(device=device)
    graph = prepare(edge_index, 40) if fullgraph else edge_index
    layer = GraphTransformerLayer(8, 8, 2, norm="layer").to(device)
    compiled = torch.compile(layer, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        x = torch.randn(40, 8, device=device, requires_grad=True)
        got, expected = compiled(x, graph), layer(x, graph)
        close(got, expected)
        tensors = [x, *layer.parameters()]
        for one, other in zip(gradients(got, tensors), gradients(expected, tensors), strict=True):
            close(one, other, floor=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_graph_transformer_layer_under_autocast(device, dtype):
    edge_index = random_graph(device=device)
    layer = GraphTransformerLayer(8, 8, 2, norm="layer").to(device)
    x = torch.randn(40, 8, device=device, requires_grad=True)
    with torch.autocast(device, dtype=dtype):
        got = layer(x, edge_index)
    close(got.float(), layer(x, edge_index), 8 * torch.finfo(dtype).eps)
    for gradient in gradients(got, [x, *layer.parameters()]):
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_channels": 6}, "in_channels: expected 8"),
        ({"heads": 3}, "multiple of heads=3"),
        ({"heads": 0}, "multiple of heads=0"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"dropout": 1.5}, "dropout probability"),
        ({"norm": "group"}, "norm: expected"),
        ({"flow": "both"}, "flow: expected"),
    ],
    ids=str,
)
def test_graph_transformer_layer_options_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        GraphTransformerLayer(**{"in_channels": 8, "out_channels": 8, "heads": 2, **arguments})


def test_graph_transformer_layer_parameters_are_reset():
    layer = GraphTransformerLayer(8, 8, 2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    nn.init.zeros_(layer.norm1.weight)
    layer.reset_parameters()
    assert not torch.equal(layer.query.weight, before["query.weight"])
    assert torch.equal(layer.norm1.weight, before["norm1.weight"])
