"""Calls that something watches: fake and meta tensors, traces of operators, torch.func, TorchScript."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as original
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fastsparse_pyg
from fastsparse_core import Adjacency, attention, sddmm, spmm
from fastsparse_pyg import FastMaxKGCNConv, FastMaxKSAGEConv, GraphTransformerLayer, accelerate, prepare

LAYERS = ("GCNConv", "SAGEConv", "GINConv", "GATConv", "GATv2Conv", "AGNNConv", "TransformerConv")
X, EDGES = torch.randn(12, 16), torch.randint(0, 12, (2, 30))


def build(package, prefix: str, name: str) -> nn.Module:
    layer = getattr(package, prefix + name)
    torch.manual_seed(0)
    if name == "AGNNConv":
        return layer()
    return layer(nn.Linear(16, 8)) if name == "GINConv" else layer(16, 8)


@pytest.fixture(params=LAYERS)
def layers(request) -> tuple[nn.Module, nn.Module]:
    """A drop-in and its original, with the same parameters."""
    fast, slow = build(fastsparse_pyg, "Fast", request.param), build(original, "", request.param)
    slow.load_state_dict(fast.state_dict())
    return fast, slow


def test_fake_tensors(layers):
    """The same shape or error as PyG's layer, which cannot count self loops if it removes them."""
    shapes = []
    for layer in layers:
        with FakeTensorMode(allow_non_fake_inputs=True):
            try:
                shapes.append(layer(torch.randn(12, 16), torch.randint(0, 12, (2, 5))).shape)
            except DynamicOutputShapeException as error:
                shapes.append(str(error))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["SAGEConv", "GINConv", "TransformerConv"])
def test_meta_tensors(name):
    fast = build(fastsparse_pyg, "Fast", name).to("meta")
    assert fast(X.to("meta"), EDGES.to("meta")).shape == (12, 8)


def test_structures_of_tensors_without_content_are_refused():
    rows, nothing = torch.tensor([0, 1]), torch.tensor([0, 1], device="meta")
    with pytest.raises(TypeError, match="on the meta device"):
        Adjacency.from_coo(nothing, nothing, (2, 2))
    with pytest.raises(TypeError, match="on the meta device"):
        Adjacency.from_csr(torch.tensor([0, 1, 2], device="meta"), nothing, (2, 2))
    with FakeTensorMode(), pytest.raises(TypeError, match="expected tensors in CPU or GPU memory"):
        Adjacency.from_coo(rows, rows, (2, 2))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(EDGES)
    with pytest.raises(TypeError, match="expected tensors in CPU or GPU memory"):
        prepare(fake, 12)
    functional = torch._to_functional_tensor(rows)
    with pytest.raises(TypeError, match="expected tensors in CPU or GPU memory"):
        Adjacency.from_coo(functional, functional, (2, 2))


def test_operators_of_tensors_without_content_give_what_their_fakes_say():
    adj = Adjacency.from_coo(EDGES[1], EDGES[0], (12, 12))
    x, none = X.to("meta"), (None,) * 4
    for out in (
        torch.ops.fastsparse.spmm(x, None, None, None, None, 12, adj.handle, False, "auto", False),
        torch.ops.fastsparse.attention(x, x, x, *none, 1.0, 0.0, None, 0, 1, "fused3s", adj.handle)[0],
    ):
        assert out.shape == (12, 16)
        assert out.is_meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert spmm(adj, X).shape == attention(adj, X, X, X).shape == (12, 16)
        assert sddmm(adj, X, X).shape == (30,)


@pytest.mark.parametrize("watched", ["make_fx", "compile"])
def test_a_trace_does_not_hold_the_graph_that_it_saw(layers, watched):
    """As PyG's own trace, one of a layer with self loops holds how many of them the first graph had."""
    fast, _ = layers
    other = torch.stack([EDGES[1], EDGES[0]])
    traced = make_fx(fast)(X, EDGES) if watched == "make_fx" else torch.compile(fast, backend="eager")
    torch.testing.assert_close(traced(X, EDGES), fast(X, EDGES))
    torch.testing.assert_close(traced(X, other), fast(X, other))


@pytest.mark.slow
def test_function_transforms(layers):
    fast, slow = layers
    tangent, cotangent = torch.randn_like(X), torch.randn_like(slow(X, EDGES))
    results = []
    for layer in (fast, slow):

        def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
            return layer(x, EDGES)

        out, pulled = vjp(run, X)
        results.append(
            [
                grad(lambda x: run(x).square().sum())(X),
                jvp(run, (X,), (tangent,))[1],
                linearize(run, X)[1](tangent),
                pulled(cotangent)[0],
                vmap(run)(torch.stack([X, 2 * X])),
                out,
            ]
        )
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for jacobian in (jacrev, jacfwd):
        of_parameters = [
            jacobian(lambda p, layer=layer: functional_call(layer, p, (X[:4], EDGES[:, :6] % 4)).sum())(
                dict(layer.named_parameters())
            )
            for layer in (fast, slow)
        ]
        for name, ours in of_parameters[0].items():
            torch.testing.assert_close(ours, of_parameters[1][name], rtol=1e-4, atol=1e-4)


def test_forward_mode(layers):
    tangent = torch.randn_like(X)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, tangent)
        ours, theirs = (torch.autograd.forward_ad.unpack_dual(layer(dual, EDGES)).tangent for layer in layers)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Model(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.parametrize("name", [name for name in LAYERS if "GAT" not in name])
def test_torch_script(name):
    """Not GAT and GATv2, which TorchScript does not compile in this form as PyG has them either."""
    fast = build(fastsparse_pyg, "Fast", name)
    expected = fast(X, EDGES)
    script = torch.jit.script(Model(fast))
    torch.testing.assert_close(script(X, EDGES), expected)
    with torch.no_grad():
        next(fast.parameters()).mul_(2)  # both share parameters
    torch.testing.assert_close(script(X, EDGES), fast(X, EDGES))
    model = Model(build(original, "", name))
    accelerate(model, show=False)
    torch.testing.assert_close(torch.jit.script(model)(X, EDGES), expected)


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"num_blocks": 2}], ids=str)
def test_torch_script_of_rgcn(options):
    """PyG's layer can be scripted after a call, in which it sets an attribute."""
    kind = torch.arange(EDGES.size(1)) % 3
    layer = original.RGCNConv(16, 8, 3, **options)
    expected = layer(X, EDGES, kind)
    torch.testing.assert_close(torch.jit.script(layer)(X, EDGES, kind), expected)
    fast = fastsparse_pyg.FastRGCNConv(16, 8, 3, **options)
    fast.load_state_dict(layer.state_dict())
    torch.testing.assert_close(torch.jit.script(fast)(X, EDGES, kind), expected)


def test_torch_script_of_a_layer_without_an_original():
    with pytest.raises(NotImplementedError, match="FastMaxKGCNConv has no original"):
        torch.jit.script(FastMaxKGCNConv(16, 8, k=4))


def test_layers_without_an_original_take_fake_tensors_too():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, edges = torch.randn(12, 16), torch.randint(0, 12, (2, 5))
        assert FastMaxKSAGEConv(16, 8, k=4)(x, edges).shape == (12, 8)
    layer = GraphTransformerLayer(16, 16, 2)
    adj = prepare(EDGES, 12)
    traced = make_fx(lambda x: layer(x, adj))(X)
    torch.testing.assert_close(traced(2 * X), layer(2 * X, adj))
