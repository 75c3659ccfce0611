"""edge_softmax against the float64 reference, its gradients, extremes and errors."""

from __future__ import annotations

import pytest
import torch
from cases import (
    DTYPES,
    TOLERANCE,
    assert_equal_but_for_rounding,
    edge_lists,
    features,
    relative_error,
    special_scores,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsparse_core import Adjacency, edge_softmax, reference


def with_loops(device: str) -> Adjacency:
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (25,), generator=generator).to(device) for n in (5, 6))
    return Adjacency.from_coo(row, col, (5, 6), self_loops="replace")


@given(
    edges=edge_lists(),
    heads=st.sampled_from([None, 1, 3, 8]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "row_stride", "transposed", "expanded"]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(device, poisoned_memory, edges, heads, dtype, layout):
    adj = edges.adjacency(device)
    score = features(adj.num_values, heads or 1, dtype, layout, device)
    if heads is None:
        score = score[:, 0]
    score = score.detach().requires_grad_()
    out = edge_softmax(adj, score)
    assert out.dtype == dtype
    expected = reference.edge_softmax(adj, score)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    weight = features(adj.num_values, heads or 1, dtype, "contiguous", device, 1).reshape(score.shape)
    (grad,) = torch.autograd.grad(out, score, weight)
    doubled = score.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(reference.edge_softmax(adj, doubled), doubled, weight.double())
    # A gradient is a difference of two terms, each about as large as weight times gradient.
    size = (expected * weight.double()).norm().item() + wanted.norm().item()
    assert (grad.double() - wanted).norm() <= TOLERANCE[dtype] * max(size, 1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_row_is_split(device, dtype):
    num_edges = 200_000
    row = torch.zeros(num_edges, dtype=torch.int64, device=device)
    row[-3:] = torch.tensor([1, 2, 4], device=device)
    adj = Adjacency.from_coo(row, torch.randint(0, 1000, (num_edges,), device=device), (5, 1000))
    score = features(num_edges, 2, dtype, "contiguous", device) + (10 if dtype == torch.float16 else 1e4)
    score = score.requires_grad_()
    out = edge_softmax(adj, score)
    # In float16, most weights of such a long row are subnormal, with an absolute precision of 2^-25.
    error = (out.double() - reference.edge_softmax(adj, score)).norm()
    assert error <= TOLERANCE[dtype] * out.norm() + (2**-25 * num_edges**0.5 if dtype == torch.float16 else 0)
    if device == "cuda":
        assert adj.row_split.num_slots > 1
    weight = features(num_edges, 2, torch.float32, "contiguous", device, 1)
    (grad,) = torch.autograd.grad(out, score, weight.to(dtype))
    sums = torch.zeros(5, 2, device=device).index_add(0, row, grad.float())
    assert sums.abs().max() < 1e-2


def test_extreme_scores(device):
    adj = Adjacency.from_coo(torch.tensor([0, 0, 1, 1, 2, 3, 3]), torch.arange(7), (5, 7)).to(device)
    infinity = float("inf")
    score = torch.tensor([1e4, -1e4, -infinity, 0.0, 5.0, -infinity, -infinity], device=device)
    assert edge_softmax(adj, score).tolist() == [1, 0, 0, 1, 1, 0, 0]
    score[0] = float("nan")
    out = edge_softmax(adj, score)
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [0, 1, 1, 0, 0]
    # Without subtracting the maximum, exp gives only 0 and infinity for such scores.
    out = edge_softmax(adj, torch.tensor([1000.0, 999, 0, 0, 0, -1000, -1001], device=device))
    expected = torch.tensor([0.0, -1], device=device).softmax(0)
    torch.testing.assert_close(out[:2], expected)
    torch.testing.assert_close(out[5:], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4, 8, 33])
def test_special_scores(device, poisoned_memory, dtype, heads):
    """NaN and infinity make the weights of their row and head NaN, and minus infinity weighs 0."""
    edges, special = special_scores()
    adj = edges.adjacency(device)
    score = features(adj.num_values, heads, dtype, "contiguous", device)
    score[:, ::2] += special[:, None].to(device, dtype)
    score.requires_grad_()
    doubled = score.detach().double().requires_grad_()
    out, expected = edge_softmax(adj, score), reference.edge_softmax(adj, doubled)
    tolerance = 4 * TOLERANCE[dtype]
    assert_equal_but_for_rounding(out, expected, tolerance)
    weight = features(adj.num_values, heads, dtype, "contiguous", device, 1)
    (grad,) = torch.autograd.grad(out, score, weight)
    (wanted,) = torch.autograd.grad(expected, doubled, weight.double())
    assert_equal_but_for_rounding(grad, wanted, tolerance)


def test_values_without_an_entry_are_zero(device, poisoned_memory):
    row, col = torch.tensor([2, 0, 1, 1], device=device), torch.tensor([0, 1, 1, 2], device=device)
    adj = Adjacency.from_coo(row, col, (3, 3), self_loops="replace")
    score = torch.zeros(7, device=device, requires_grad=True)
    out = edge_softmax(adj, score)
    assert out.tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5, 0.5]
    (grad,) = torch.autograd.grad(out.square().sum(), score)
    assert grad.tolist() == [0.0] * 7


def test_bitwise_reproducible(device):
    adj = Adjacency.from_coo(torch.zeros(50_000, dtype=torch.int64), torch.arange(50_000), (1, 50_000))
    adj = adj.to(device)
    score = torch.randn(50_000, device=device)
    first = edge_softmax(adj, score)
    assert all(torch.equal(first, edge_softmax(adj, score)) for _ in range(3))
