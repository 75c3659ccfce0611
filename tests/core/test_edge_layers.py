"""GINE and gated layers as one node of autograd's graph, against the operators that they are made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastsparse_core import Adjacency, gated_aggregate, gine_aggregate
from fastsparse_core.fused.edge_messages import can_pass_messages, gated_layer, gine_layer

NODES, EDGES, WIDTH = 9, 25, 6


def draw(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()


def graph(device: str) -> Adjacency:
    row, col = torch.randint(NODES - 1, (2, EDGES)).to(device)  # the last node has no edges
    return Adjacency.from_coo(row, col, (NODES, NODES))


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Results, gradients and gradients of those."""
    torch.testing.assert_close(found, expected)
    both = []
    for out in (found, expected):
        once = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        twice = torch.autograd.grad(sum(each.square().sum() for each in again), inputs)
        both.append((*once, *again, *twice))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("features", [0, 3, 4, 5])
@pytest.mark.parametrize("width", [5, WIDTH])
def test_gine(features: int, width: int, device: str) -> None:
    adj, x = graph(device), draw(NODES, width, device=device)
    edge, weight, bias = draw(EDGES, features or width, device=device), None, None
    if features:
        weight = draw(width, features, device=device)
        bias = None if features == 5 else draw(width, device=device)
    eps = torch.tensor([0.3], dtype=torch.float64, device=device)
    assert can_pass_messages(adj, x, edge, weight, bias, eps)
    expected = gine_aggregate(adj, x, edge, edge_weight=weight, edge_bias=bias) + (1 + eps) * x
    inputs = [each for each in (x, edge, weight, bias) if each is not None]
    assert_same(gine_layer(adj, x, edge, weight, bias, eps), expected, inputs)
    with torch.no_grad():
        torch.testing.assert_close(gine_layer(adj, x, edge, weight, bias, eps), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [40, 128])
def test_gine_with_a_heavy_row_and_column(dtype: torch.dtype, width: int, device: str) -> None:
    """Rows in slices get the root's row once; eps may be written before the backward pass."""
    row, col = torch.randint(300, (2, 9000))
    row[:3000], col[4000:7000] = 7, 11
    adj = Adjacency.from_coo(row.to(device), col.to(device), (300, 300))
    shapes = ((300, width), (9000, 5), (width, 5), (width,))
    # Multiples of 1/8: messages before relu are exact in both precisions, and so is their sign.
    wide = [draw(*shape, device=device).detach().mul(4).round().div(8).to(dtype).double() for shape in shapes]
    given = [each.to(dtype).requires_grad_() for each in wide]
    wide = [each.requires_grad_() for each in wide]
    eps = torch.tensor([0.5], dtype=dtype, device=device)
    up = torch.randn(300, width, dtype=torch.float64).to(device, dtype)
    x, edge, weight, bias = given
    found = gine_layer(adj, x, edge, weight, bias, eps)
    eps.zero_()
    expected = gine_aggregate(adj, *wide[:2], edge_weight=wide[2], edge_bias=wide[3]) + 1.5 * wide[0]
    found_gradients = torch.autograd.grad(found, given, up)
    gradients = torch.autograd.grad(expected, wide, up.double())
    # The size of the summed terms, without cancellation: absolute values pass every relu.
    sizes = [each.detach().abs().requires_grad_() for each in wide]
    most = gine_aggregate(adj, *sizes[:2], edge_weight=sizes[2], edge_bias=sizes[3]) + 1.5 * sizes[0]
    terms = (most, *torch.autograd.grad(most, sizes, up.double().abs()))
    # The bias sums 9,000 numbers one by one in float32, about 9,000 ** 0.5 roundings of 1.2e-7.
    limit = 1e-5 if dtype == torch.float32 else 1e-3
    for one, other, size in zip((found, *found_gradients), (expected, *gradients), terms, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= limit * size.norm()


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_gine_of_one_gradient(wanted: int, device: str) -> None:
    adj = graph(device)
    shapes = ((NODES, WIDTH), (EDGES, 3), (WIDTH, 3), (WIDTH,))
    tensors = [draw(*shape, device=device).detach() for shape in shapes]
    tensors[wanted].requires_grad_()
    x, edge, weight, bias = tensors
    eps = torch.zeros(1, dtype=torch.float64, device=device)
    outs = (
        gine_layer(adj, x, edge, weight, bias, eps),
        gine_aggregate(adj, x, edge, edge_weight=weight, edge_bias=bias),
    )
    one, other = (
        torch.autograd.grad(out.sin().sum() if not n else out.add(x).sin().sum(), tensors[wanted])[0]
        for n, out in enumerate(outs)
    )
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("features", [0, 3])
def test_gine_of_a_model_s_first_layer_needs_no_transpose(features: int, device: str) -> None:
    """The inputs of a model need no gradients."""
    adj = graph(device)
    x, edge = torch.randn(NODES, WIDTH, device=device), torch.randn(EDGES, features or WIDTH, device=device)
    maps = [torch.randn(WIDTH, features, device=device), torch.randn(WIDTH, device=device)]
    weight, bias = (each.requires_grad_() for each in maps) if features else (None, None)
    after = torch.randn(4, WIDTH, device=device, requires_grad=True)
    gine_layer(adj, x, edge, weight, bias, torch.zeros(1, device=device), after).sum().backward()
    assert not adj.has_transpose
    assert after.grad is not None


@pytest.mark.parametrize("features", [0, 3])
@pytest.mark.parametrize("has_root", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated(features: int, has_root: bool, has_bias: bool, device: str) -> None:
    adj, x = graph(device), draw(NODES, 4, device=device)
    edge = draw(EDGES, features, device=device) if features else None
    weights = [draw(WIDTH, 4 + features, device=device) for _ in range(3)]
    biases = [draw(WIDTH, device=device) for _ in range(3)]
    root = draw(WIDTH, 4, device=device) if has_root else None
    bias = draw(WIDTH, device=device) if has_bias else None
    assert can_pass_messages(adj, x, edge, *weights, *biases, root, bias)
    pairs = zip(weights, biases, strict=True)
    query, value, key = (F.linear(x, weight[:, :4], each) for weight, each in pairs)
    of_edges = {}
    if edge is not None:
        of_query, of_value, of_key = (weight[:, 4:] for weight in weights)
        of_edges = {"edge_attr": edge, "gate_weight": of_query + of_key, "value_weight": of_value}
    expected = gated_aggregate(adj, key, query, value, **of_edges)
    if root is not None:
        expected = expected + F.linear(x, root)
    if bias is not None:
        expected = expected + bias
    inputs = [each for each in (x, edge, root, bias, *weights, *biases) if each is not None]
    found = gated_layer(adj, x, edge, tuple(weights), tuple(biases), root, bias)
    assert_same(found, expected, inputs)


def test_only_wanted_gradients(device: str) -> None:
    """Frozen parameters get none, and unused gradients are not returned."""
    adj, x = graph(device), torch.randn(NODES, 4, dtype=torch.float64, device=device)
    weights = tuple(draw(WIDTH, 4, device=device) for _ in range(3))
    biases = tuple(draw(WIDTH, device=device).detach() for _ in range(3))
    gated_layer(adj, x, None, weights, biases, None, None).sum().backward()
    assert x.grad is None
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in weights)


def test_other_calls_are_left(device: str) -> None:
    adj, x = graph(device), draw(NODES, WIDTH, device=device)
    assert not can_pass_messages(adj, x[1:], None)
    assert not can_pass_messages(adj, x, x[: EDGES - 1])
    assert not can_pass_messages(adj, x, None, x.float())
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert not can_pass_messages(adj, x, None)
