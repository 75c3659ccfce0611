"""FastGATConv and FastGATv2Conv against PyG's: outputs, all gradients, every option and kind of input."""

from __future__ import annotations

import pytest
import torch
from pyg_cases import as_kind, close, random_graph, same, same_on, simple_graph
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv

from fastsparse_pyg import FastGATConv, FastGATv2Conv, prepare

LAYERS = {"gat": (GATConv, FastGATConv), "gatv2": (GATv2Conv, FastGATv2Conv)}

both = pytest.mark.parametrize("name", LAYERS)


def pair(
    name: str, *args: object, device: str, dtype: torch.dtype = torch.float32, **options: object
) -> tuple[GATConv | GATv2Conv, FastGATConv | FastGATv2Conv]:
    reference, layer = (conv(*args, **options).to(device, dtype) for conv in LAYERS[name])
    # A new bias is 0, so a forgotten bias would not be found.
    if reference.bias is not None:
        torch.nn.init.normal_(reference.bias)
        if name == "gatv2":
            torch.nn.init.normal_(reference.lin_l.bias)
    return reference, layer


@both
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.usefixtures("kernels_only")
def test_integer_edge_features(device, name, dtype):
    """Means make them floating, as in PyG, where sums of uint8 wrap and those of bool are "any"."""
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = torch.randint(0, 100, (edge_index.size(1), 3), device=device)
    edge_attr = edge_attr > 30 if dtype == torch.bool else edge_attr.to(dtype)
    for width in (3, 1):
        reference, layer = pair(name, 6, 5, edge_dim=width, device=device)
        for conv in (reference, layer):  # scores of 100 would make rounding in float32 visible
            conv.lin_edge.weight.data.mul_(0.01)
        same(
            reference,
            layer,
            lambda conv, width=width: conv(x, edge_index, edge_attr[:, :width]),
            [x],
            floor=1,
        )
    without = type(layer)(6, 5, edge_dim=3, add_self_loops=False).to(device)
    with pytest.raises((TypeError, RuntimeError)):  # PyG raises an error, too
        without(x, edge_index, edge_attr)


@both
@pytest.mark.parametrize("fill_value", ["max", "min", "mul"])
def test_other_fills_run_the_original(device, name, fill_value):
    edge_index = random_graph(device=device)
    reference, layer = pair(name, 6, 5, edge_dim=3, fill_value=fill_value, device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device, requires_grad=True)
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr), [x, edge_attr], floor=1)
    with_loops = prepare(edge_index, 40, add_self_loops=True)
    with pytest.raises(ValueError, match="fill_value"):
        layer(x, with_loops, edge_attr)
    close(layer(x, prepare(edge_index, 40), edge_attr), reference(x, edge_index, edge_attr))


@pytest.mark.usefixtures("kernels_only")
def test_edge_features_of_one_dimension(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = torch.randn(edge_index.size(1), device=device, requires_grad=True)
    for options in ({}, {"add_self_loops": False}, {"fill_value": 2.0}):
        reference, layer = pair("gat", 6, 5, edge_dim=1, heads=2, device=device, **options)
        same(reference, layer, lambda conv: conv(x, edge_index, edge_attr), [x, edge_attr], floor=1)


@pytest.mark.usefixtures("kernels_only")
def test_edge_features_are_optional(device):
    """edge_dim without features has no effect, and neither have features without edge_dim."""
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    reference, layer = pair("gat", 6, 5, edge_dim=3, device=device)
    same(reference, layer, lambda conv: conv(x, edge_index), [x], floor=1)
    reference, layer = pair("gat", 6, 5, device=device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    same(reference, layer, lambda conv: conv(x, edge_index, edge_attr), [x], floor=1)


@pytest.mark.usefixtures("kernels_only")
def test_without_destination_features(device):
    edge_index = random_graph(40, 25, device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    reference, layer = pair("gat", (6, 4), 5, heads=2, device=device)
    layer.load_state_dict(reference.state_dict())
    expected = reference((x, None), edge_index, size=(40, 25))
    got = layer((x, None), edge_index, size=(40, 25))
    close(got, expected[:25] if expected.size(0) == 40 else expected)
    close(layer((x, None), prepare(edge_index, (40, 25))), got)


@pytest.mark.usefixtures("kernels_only")
def test_one_tensor_for_a_bipartite_layer(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    for options in ({}, {"flow": "target_to_source"}):
        reference, layer = pair("gat", (6, 6), 5, heads=2, device=device, **options)
        same(reference, layer, lambda conv: conv(x, edge_index), [x], floor=1)


def test_bipartite_against_the_flow_runs_the_original(device):
    edge_index = random_graph(40, device=device)
    x = torch.randn(40, 6, device=device), torch.randn(40, 6, device=device)
    reference, layer = pair("gat", (6, 6), 5, flow="target_to_source", device=device)
    same(reference, layer, lambda conv: conv(x, edge_index), [], floor=1)


@both
@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("options", [{"heads": 3}, {"add_self_loops": False, "concat": False}], ids=str)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.usefixtures("kernels_only")
def test_attention_weights(device, name, options, edge_dim, flow):
    """The edges in the original's order, self loops last, and the weights of each; gradients through them."""
    edge_index = random_graph(device=device)
    reference, layer = pair(name, 6, 5, edge_dim=edge_dim, flow=flow, device=device, **options)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = None if edge_dim is None else torch.randn(edge_index.size(1), edge_dim, device=device)
    call = {"edge_attr": edge_attr, "return_attention_weights": True}
    for graph in (edge_index, edge_index.int(), EdgeIndex(edge_index, sparse_size=(40, 40))):
        expected, (expected_edges, expected_alpha) = reference(x, graph, **call)
        got, (edges, alpha) = layer(x, graph, **call)
        close(got, expected)
        assert type(edges) is type(expected_edges)
        assert edges.dtype == expected_edges.dtype
        assert torch.equal(edges.as_tensor() if isinstance(edges, EdgeIndex) else edges, expected_edges)
        close(alpha, expected_alpha)
    adjacency = prepare(edge_index, 40, flow=flow)
    got, (edges, alpha) = layer(x, adjacency, **call)
    close(got, expected)
    assert torch.equal(edges, reference(x, edge_index, **call)[1][0])
    close(alpha, expected_alpha)
    same(reference, layer, lambda conv: conv(x, edge_index, **call)[1][1], [x], floor=1)
    assert torch.is_tensor(layer(x, edge_index, edge_attr, return_attention_weights=False))


def test_attention_weights_after_dropout(device):
    """As the original: the weights that the sum used."""
    edge_index = simple_graph(device=device)
    layer = FastGATConv(6, 5, dropout=0.5, bias=False).to(device)
    x = torch.randn(40, 6, device=device)
    out, (edges, alpha) = layer(x, edge_index, return_attention_weights=True)
    assert (alpha == 0).any()
    messages = alpha * layer.lin(x)[edges[0]]
    close(out, torch.zeros_like(out).index_add(0, edges[1], messages))


@pytest.mark.parametrize("kind", ["csr", "coo"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_attention_weights_of_a_matrix(kind):
    reference, layer = pair("gat", 6, 5, heads=2, device="cpu")
    layer.load_state_dict(reference.state_dict())
    x, matrix = torch.randn(40, 6), as_kind(kind, simple_graph(), 40, 40)
    expected, (expected_matrix, expected_alpha) = reference(x, matrix, return_attention_weights=True)
    got, (got_matrix, alpha) = layer(x, matrix, return_attention_weights=True)
    close(got, expected)
    close(alpha, expected_alpha)
    assert got_matrix.layout == expected_matrix.layout


def test_edge_features_on_an_adjacency_with_loops(device):
    """Also where PyG's code must run: it gets the features of the loops along with them."""
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device, requires_grad=True)
    reference, layer = pair("gat", 6, 5, edge_dim=3, heads=2, device=device)
    for add_self_loops in (False, True):
        graph = prepare(edge_index, 40, add_self_loops=add_self_loops)
        for _ in range(2):
            same_on([graph], edge_index, reference, layer, x, edge_attr, floor=1)
            handle = layer.register_message_forward_hook(lambda *args: None)
        handle.remove()


def test_lazy(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 3, device=device)
    reference, layer = (conv(-1, 5, heads=2).to(device) for conv in (GATConv, FastGATConv))
    reference(x, edge_index)
    assert layer(x, edge_index).shape == (40, 10)
    same(reference, layer, lambda conv: conv(x, edge_index), [], floor=1)
    lazy_edges = FastGATConv(3, 5, edge_dim=-1).to(device)
    assert lazy_edges(x, edge_index, torch.randn(edge_index.size(1), 4, device=device)).shape == (40, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_wide_copy_of_features_is_kept(device, dtype):
    """Scores are float32, but between the passes no float32 tensor as large as the features lives."""
    edge_index = random_graph(device=device)
    layer = FastGATConv(64, 16, heads=4).to(device)
    x = torch.randn(40, 64, device=device, requires_grad=True)
    kept = []
    with torch.autocast(device, dtype=dtype):
        layer(x, edge_index)  # builds what later calls reuse
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
            layer(x, edge_index)
    wide = [one for one in kept if one.dtype == torch.float32 and one.numel() >= 40 * 64]
    assert all(one.data_ptr() in (x.data_ptr(), layer.lin.weight.data_ptr()) for one in wide)
    assert any(one.dtype == dtype for one in kept)


def test_static_graph_is_refused_as_by_the_original(device):
    edge_index = random_graph(device=device)
    with pytest.raises(AssertionError, match="Static graphs not supported"):
        FastGATConv(6, 5).to(device)(torch.randn(3, 40, 6, device=device), edge_index)


def test_edge_features_beside_a_matrix_as_in_the_original():
    x, matrix = torch.randn(40, 6), as_kind("csr", simple_graph(), 40, 40)
    reference, layer = pair("gat", 6, 5, edge_dim=3, device="cpu")
    for conv in (reference, layer):
        with pytest.raises(AssertionError):
            conv(x, matrix, torch.randn(200, 3))


def test_what_gatv2_asserts(device):
    edge_index = random_graph(device=device)
    x = torch.randn(40, 6, device=device)
    edge_attr = torch.randn(edge_index.size(1), 3, device=device)
    for args in (((x, None), edge_index), (x[None], edge_index), (x, edge_index, edge_attr)):
        for conv in pair("gatv2", 6, 5, device=device):
            with pytest.raises(AssertionError):
                conv(*args)
