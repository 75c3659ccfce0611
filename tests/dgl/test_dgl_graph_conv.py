"""FastGraphConv against DGL's GraphConv."""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda_graphs import moved
from dgl_cases import (
    GRAPHS,
    SINGLE,
    DGLError,
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

FastGraphConv = fastsparse_dgl.FastGraphConv

NORMS = ["both", "right", "left", "none"]
SIZES = [(7, 4), (4, 7), (5, 5)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("norm", "sizes"), list(itertools.product(NORMS, SIZES)))
@pytest.mark.parametrize("weighted", [None, (), (1,)])
def test_parity(name, norm, sizes, weighted, device):
    graph = GRAPHS[name]()
    feat = features(graph, sizes[0]) if name in SINGLE else pair(graph, sizes[0], 3)
    options = {} if weighted is None else {"edge_weight": weights(graph, *weighted)}
    check_parity(layer_pair(FastGraphConv, *sizes, norm=norm), graph, feat, device, **options)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_external_weight(sizes, bias, device):
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, *sizes, weight=False, bias=bias)
    check_parity(layers, graph, features(graph, sizes[0]), device, weight=torch.randn(*sizes))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_without_weight(norm, bias, device):
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, 5, 5, weight=False, bias=bias, norm=norm)
    check_parity(layers, graph, features(graph, 5), device, edge_weight=weights(graph))


def test_bias_broadcasts_over_narrow_features(device):
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, 1, 6, weight=False)
    torch.nn.init.normal_(layers[1].bias)
    layers[0].load_state_dict(layers[1].state_dict())
    check_parity(layers, graph, features(graph, 1), device)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("middle", [(3,), (2, 3)])
def test_more_dimensions(sizes, middle, device):
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, *sizes)
    torch.nn.init.normal_(layers[1].bias)
    layers[0].load_state_dict(layers[1].state_dict())
    check_parity(layers, graph, features(graph, sizes[0], *middle), device)


@pytest.mark.parametrize(
    "shape", [(), (1,), (4,), (3, 1), (1, 4), (3, 4), (1, 1), (1, 1, 1), (2, 1, 1), (2, 3, 4)]
)
def test_edge_weight_broadcasts_as_in_dgl(shape, device):
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, 4, 4, norm="none")
    check_parity(layers, graph, features(graph, 4, 3), device, edge_weight=weights(graph, *shape))


@pytest.mark.parametrize("activation", [torch.nn.functional.elu, torch.relu])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_activation(sizes, bias, activation, device):
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, *sizes, bias=bias, activation=activation)
    check_parity(layers, graph, features(graph, sizes[0]), device)


def test_activation_module_is_part_of_the_layer():
    fast, reference = layer_pair(FastGraphConv, 3, 3, activation=torch.nn.PReLU())
    assert fast.state_dict().keys() == reference.state_dict().keys()


def test_two_weights():
    graph = homogeneous()
    fast, _ = layer_pair(FastGraphConv, 3, 2)
    with pytest.raises(DGLError, match="External weight"):
        fast(graph, features(graph, 3), weight=torch.ones(3, 2))


def test_invalid_norm():
    with pytest.raises(DGLError, match="norm"):
        FastGraphConv(2, 2, norm="inner")


def test_state_dict_both_ways():
    fast = FastGraphConv(4, 3)
    reference = dgl.nn.GraphConv(4, 3)
    reference.load_state_dict(fast.state_dict())
    torch.testing.assert_close(reference.weight, fast.weight)
    fast.load_state_dict(dgl.nn.GraphConv(4, 3).state_dict())
    assert isinstance(fast, dgl.nn.GraphConv)
    assert repr(fast) == repr(reference).replace("GraphConv", "FastGraphConv")
    assert fastsparse_dgl.FastGCNConv is FastGraphConv


def test_no_backward_product_for_constant_features(device):
    """Input features need no gradient; with in_feats <= out_feats nothing is aggregated backwards."""
    graph = homogeneous()
    adjacency = fastsparse_dgl.prepare(graph, device, backward=False)
    fast = FastGraphConv(4, 4, norm="right").to(device)
    fast(adjacency, features(graph, 4).to(device)).sum().backward()
    assert not any(name.startswith("t.") for name in adjacency.memory_usage())


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("shape", [(119,), (121, 1), (0,), ()])
def test_wrong_number_of_edge_weights(shape, device):
    fast = FastGraphConv(4, 3).to(device)
    with pytest.raises(DGLError, match=r"edge_weight: expected one row per edge \(120 rows"):
        fast(homogeneous(), torch.ones(30, 4, device=device), edge_weight=torch.ones(shape, device=device))


def test_edge_weight_that_does_not_broadcast(device):
    fast = FastGraphConv(4, 3).to(device)
    with pytest.raises(DGLError, match=r"edge_weight: expected \(E,\)"):
        fast(homogeneous(), torch.ones(30, 4, device=device), edge_weight=torch.ones(120, 2, device=device))


def test_nan_edge_weight_propagates(device):
    graph = homogeneous()
    weight = weights(graph)
    weight[7] = float("nan")
    fast, reference = layer_pair(FastGraphConv, 4, 3)
    expected = reference(graph, features(graph, 4), edge_weight=weight).isnan()
    found = fast.to(device)(graph, features(graph, 4).to(device), edge_weight=weight.to(device)).isnan()
    assert torch.equal(found.cpu(), expected)
    assert expected.any()


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("norm", ["both", "left", "right", "none"])
def test_integer_features(norm, weight):
    """DGL takes them where its normalisation makes them floats."""
    graph, feat = homogeneous(), torch.randint(9, (30, 4))
    reference, fast = (layer(4, 4, norm=norm, weight=weight) for layer in (dgl.nn.GraphConv, FastGraphConv))
    fast.load_state_dict(reference.state_dict())
    if norm in ("both", "left"):
        torch.testing.assert_close(fast(graph, feat), reference(graph, feat))
        return
    with pytest.raises(DGLError):
        reference(graph, feat)
    with pytest.raises(TypeError, match="x: expected float64"):
        fast(graph, feat)


@pytest.mark.gpu
def test_edge_weight_on_another_device():
    with pytest.raises(DGLError, match="edge_weight: expected device cuda:0"):
        FastGraphConv(4, 3).cuda()(
            homogeneous(), torch.ones(30, 4, device="cuda"), edge_weight=torch.ones(120)
        )


def test_bipartite_with_one_tensor(device):
    """Only the source features matter here, so DGL takes them alone."""
    graph = bipartite()
    check_parity(layer_pair(FastGraphConv, 4, 3, norm="left"), graph, features(graph, 4), device)


# ---------------------------------------------------------------- linear map and aggregation in one


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", [None, torch.relu, torch.tanh])
def test_one_node_of_the_graph(sizes, activation, device):
    """Without edge weights; features with gradient that are aggregated first take two."""
    graph = homogeneous()
    layer = FastGraphConv(*sizes, activation=activation).to(device)
    feat = features(graph, sizes[0]).to(device).detach()
    node = layer(graph, feat).grad_fn
    node = node.next_functions[0][0] if activation is torch.tanh else node
    assert type(node).__name__ == "_AggregateTransformBackward"
    name = type(layer(graph, feat.requires_grad_()).grad_fn).__name__
    assert (name == "_AggregateTransformBackward") == (sizes[0] > sizes[1] and activation is not torch.tanh)


@pytest.mark.parametrize(("sizes", "weight"), [((5, 1), (5, 3)), ((5, 2), (5, 1)), ((7, 4), (7, 1))])
def test_external_weight_of_another_width(sizes, weight, device):
    """The bias broadcasts as DGL's does."""
    graph = homogeneous()
    layers = layer_pair(FastGraphConv, *sizes, weight=False)
    torch.nn.init.normal_(layers[1].bias)
    layers[0].load_state_dict(layers[1].state_dict())
    check_parity(layers, graph, features(graph, sizes[0]), device, weight=torch.randn(*weight))


def test_external_weight_that_fits_no_bias(device):
    graph = homogeneous()
    layer = FastGraphConv(5, 4, weight=False).to(device)
    with pytest.raises((RuntimeError, ValueError), match="bias|size"):
        layer(graph, features(graph, 5).to(device), weight=torch.randn(5, 400, device=device))


def test_features_may_be_written_where_dgl_keeps_their_sums(device):
    graph = homogeneous()
    layer, before = FastGraphConv(6, 6).to(device), torch.nn.Linear(6, 6).to(device)
    feat = before(features(graph, 6).to(device))
    feat += layer(graph, feat)
    feat.sum().backward()
    assert before.weight.grad is not None


@pytest.mark.gpu
def test_a_training_step_as_a_cuda_graph():
    """Replays train as steps do, up to the order in which products of matrices are summed."""
    graph = homogeneous()
    feat, label = features(graph, 16).cuda().detach(), torch.arange(graph.num_nodes()).cuda() % 4

    def movement(captures):
        torch.manual_seed(0)
        layers = [FastGraphConv(16, 16, activation=torch.relu), FastGraphConv(16, 4)]
        model = torch.nn.ModuleList(layers).cuda()

        def loss():
            return torch.nn.functional.cross_entropy(model[1](graph, model[0](graph, feat)), label)

        return moved(model, loss, captures=captures)

    steps, replays = movement(False), movement(True)
    assert steps.norm() > 0
    assert (replays - steps).norm() <= 1e-5 * steps.norm()
