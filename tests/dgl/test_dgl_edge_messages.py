"""FastGINEConv and FastGatedGCNConv against DGL's: results, all gradients, every option."""

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
from dgl_layer_cases import randomised
from torch import Tensor, nn

from fastsparse_dgl import accelerate, restore

DGLError = dgl.DGLError
WIDTH, EDGE_WIDTH, OUT = 7, 3, 5


def with_edge_order(graph: Any) -> Any:
    """The graph with edge ids that DGL can give its edges' features by."""
    if graph.is_homogeneous and not graph.adj_tensors("csc")[2].numel():
        return dgl.graph(graph.edges(), num_nodes=graph.num_nodes())
    return graph


class Everything(nn.Module):
    """Nodes and edges as one vector, so that one comparison covers both and their gradients."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, feat: Any, edge_feat: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in self.layer(graph, feat, edge_feat)])


def gine(**options: Any) -> tuple[Any, Any]:
    return randomised(*layer_pair(fastsparse_dgl.FastGINEConv, nn.Linear(WIDTH, OUT), **options))


def gated(*widths: int, **options: Any) -> tuple[Any, Any]:
    if not hasattr(dgl.nn.pytorch, "GatedGCNConv"):
        with pytest.raises(NotImplementedError, match=r"2\.0 or newer"):
            fastsparse_dgl.FastGatedGCNConv(*widths)
        pytest.skip("DGL has no GatedGCNConv before 2.0")
    widths = widths or (WIDTH, EDGE_WIDTH, OUT)
    fast, reference = randomised(*layer_pair(fastsparse_dgl.FastGatedGCNConv, *widths, **options))
    for layer in (fast, reference):  # normalised away: their gradients are 0 but for rounding
        layer.A.bias.requires_grad_(not layer.batch_norm)
        layer.B.bias.requires_grad_(not layer.batch_norm)
    return Everything(fast), Everything(reference)


@pytest.mark.parametrize("kind", list(GRAPHS))
def test_gine_matches_the_original(kind, device):
    graph = with_edge_order(GRAPHS[kind]())
    feat = features(graph, WIDTH) if kind in SINGLE else pair(graph, WIDTH, WIDTH)
    check_parity(gine(learn_eps=True), graph, feat, device, edge_feat=weights(graph, WIDTH) - 1)


@pytest.mark.parametrize(("middle", "edges"), [((2,), (2, WIDTH)), ((2,), (1, WIDTH)), ((), (1,))])
def test_gine_of_features_that_broadcast(middle, edges, device):
    graph = homogeneous()
    feat = features(graph, WIDTH, *middle)
    check_parity(gine(init_eps=0.5), graph, feat, device, edge_feat=weights(graph, *edges) - 1)


def test_gine_without_a_function_in_other_dtypes(device):
    graph = homogeneous()
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        layers = layer_pair(fastsparse_dgl.FastGINEConv)
        edge_feat = weights(graph, WIDTH, dtype=dtype)
        exact = layers[1](graph, features(graph, WIDTH, dtype=dtype).double(), edge_feat.double())
        out = layers[0].to(device)(
            graph, features(graph, WIDTH, dtype=dtype).to(device), edge_feat.to(device)
        )
        error = (out.double().cpu() - exact).norm() / exact.norm()
        assert error < (1e-2 if dtype != torch.float64 else 1e-10)


@pytest.mark.parametrize("kind", ["homogeneous", "int32", "batched", "csc"])
def test_gated_gcn_matches_the_original(kind, device):
    graph = with_edge_order(GRAPHS[kind]())
    check_parity(
        gated(), graph, features(graph, WIDTH), device, tolerance=5e-5, edge_feat=weights(graph, EDGE_WIDTH)
    )


@pytest.mark.parametrize(
    "options",
    [{"batch_norm": False}, {"residual": False}, {"activation": None}, {"activation": torch.nn.Tanh()}],
    ids=str,
)
def test_options_of_gated_gcn(options, device):
    graph = homogeneous()
    edge_feat = weights(graph, WIDTH)
    layers = gated(WIDTH, WIDTH, WIDTH, **options)
    check_parity(layers, graph, features(graph, WIDTH), device, tolerance=5e-5, edge_feat=edge_feat)


def test_gated_gcn_of_nodes_without_edges_and_in_evaluation(device):
    graph = dgl.graph(([0, 0, 3], [1, 2, 2]), num_nodes=5)
    layers = tuple(layer.eval() for layer in gated())
    edge_feat = weights(graph, EDGE_WIDTH)
    check_parity(layers, graph, features(graph, WIDTH), device, tolerance=5e-5, edge_feat=edge_feat)


def test_dropout_of_gated_gcn(device):
    graph = homogeneous()
    fast = gated(dropout=0.5, batch_norm=False, activation=None)[0].layer.to(device)
    feat, edge_feat = features(graph, WIDTH).to(device), weights(graph, EDGE_WIDTH).to(device)
    dropped = fast(graph, feat, edge_feat)
    kept = fast.eval()(graph, feat, edge_feat)
    for some, all_ in zip(dropped, kept, strict=True):
        zero = some == 0
        assert zero.any()
        torch.testing.assert_close(some[~zero], 2 * all_[~zero])


def test_features_may_be_written_after_gine(device):
    """As with the original, whose relu keeps its result."""
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


@pytest.mark.parametrize("name", ["GINEConv", "GatedGCNConv"])
def test_an_adjacency_in_place_of_the_graph_and_accelerate(name, device):
    graph = homogeneous()
    if name == "GINEConv":
        fast, reference = gine()
        edge_feat = weights(graph, WIDTH).to(device)
    else:
        fast, reference = (made.layer for made in gated())
        edge_feat = weights(graph, EDGE_WIDTH).to(device)
    accelerate(reference, show=False)
    assert type(reference) is type(fast)
    fast, reference, feat = fast.to(device), reference.to(device), features(graph, WIDTH).to(device)
    adjacency = fastsparse_dgl.caching.adjacency_of(graph, feat.device)
    got, expected = fast(adjacency, feat, edge_feat), reference(graph, feat, edge_feat)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
        assert torch.equal(a, b)
    restore(reference)
    assert type(reference).__name__ == name


def test_bad_input(device):
    graph = homogeneous()
    fast, feat = gine()[0].to(device), features(graph, WIDTH).to(device)
    right = weights(graph, WIDTH).to(device)
    for edge_feat in (None, right[1:], right[:, :2], right[:, 0], right[:, None]):
        with pytest.raises(DGLError, match="edge_feat: expected"):
            fast(graph, feat, edge_feat)


def test_bad_input_of_gated_gcn(device):
    graph = homogeneous()
    fast, feat = gated()[0].layer.to(device), features(graph, WIDTH).to(device)
    right = weights(graph, EDGE_WIDTH).to(device)
    for edge_feat in (None, right[1:], right[:, :2]):
        with pytest.raises(DGLError, match="edge_feat: expected"):
            fast(graph, feat, edge_feat)
    with pytest.raises(DGLError, match="feat: expected a matrix"):
        fast(graph, (feat, feat), right)
    other = bipartite()
    with pytest.raises(DGLError, match="graph: expected one set of nodes"):
        fast(other, features(other, WIDTH).to(device), right)
