"""Several aggregations at once: what `test_operators.py` does not test."""

from __future__ import annotations

import pytest
import torch
from cases import LargestTensor, draw, edge_lists, ragged, relative_error
from hypothesis import given, settings
from operator_cases import ALL, BY_NAME, MULTI, each_operator

from fastsparse_core import Adjacency, multi_aggregate, reference
from fastsparse_core.ops import _multi_aggregate_fused as operator

FEATURES = BY_NAME["multi features"]


@pytest.mark.parametrize("aggregations", [(name,) for name in ALL] + [("std", "max", "mean"), ("min", "sum")])
@each_operator(MULTI)
def test_any_subset_in_any_order(op, aggregations, device):
    adj = ragged(600, device)
    tensors = op.make(adj, (12, 5), torch.float32)
    if set(aggregations) <= {"var", "std"}:
        del tensors["x_dst"]  # its gradient is 0 except for rounding
    op.compare(adj, tensors, 4, aggregations=aggregations)


@pytest.mark.parametrize("width", [24, 9])
def test_results_of_a_group_lie_side_by_side(width, device):
    adj = ragged(600, device)
    tensors = FEATURES.make(adj, (width, 5), torch.float32)
    FEATURES.compare(adj, tensors, 4, aggregations=("max", "mean", "std"), groups=3)
    parts = [
        multi_aggregate(adj, x_src, ("max", "mean"), x_dst=x_dst)
        for x_src, x_dst in zip(tensors["x_src"].chunk(3, 1), tensors["x_dst"].chunk(3, 1), strict=True)
    ]
    whole = multi_aggregate(adj, tensors["x_src"], ("max", "mean"), x_dst=tensors["x_dst"], groups=3)
    assert torch.equal(whole, torch.cat(parts, 1))


@settings(max_examples=15, deadline=None)
@given(edges=edge_lists())
def test_any_structure(edges):
    adj = edges.adjacency("cpu")
    for op in MULTI:
        op.compare(adj, op.make(adj, (5, 5), torch.float64), 10)


def test_entries_that_share_an_extremum_share_its_gradient(device):
    """Evenly, over all slices of a heavy row; as in scatter_reduce, except for extrema of 0."""
    adj = ragged(4000, device)
    x = draw(adj.num_src, 8, device=device).round().requires_grad_()
    out = multi_aggregate(adj, x, ("max", "min"))
    exact = x.detach().double().requires_grad_()
    expected = reference.multi_aggregate(adj, exact, ("max", "min"))
    assert relative_error(out, expected) < 1e-12
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    (right,) = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    assert relative_error(grad, right) < 1e-6
    shifted = exact.detach().add(10).requires_grad_()
    index = adj.row().long()[:, None].expand(-1, 8)
    torch_max = shifted.new_zeros(adj.num_dst, 8).scatter_reduce(
        0, index, shifted[adj.col.long()], "amax", include_self=False
    )
    (of_torch,) = torch.autograd.grad(torch_max.sum(), shifted)
    (of_ours,) = torch.autograd.grad(multi_aggregate(adj, shifted, ("max",)).sum(), shifted)
    assert relative_error(of_ours, of_torch) < 1e-12


def test_equal_messages_do_not_deviate(device):
    adj = ragged(600, device)
    x = torch.full((adj.num_src, 8), 0.1, device=device, requires_grad=True)
    out = multi_aggregate(adj, x, ("var", "std"), min_variance=0.0)
    assert not out.any()
    (grad,) = torch.autograd.grad(out.sum(), x)
    # The last bit of the mean may be wrong, and that error is divided by the deviation.
    assert grad.abs().max() < 1e-5


@pytest.mark.parametrize("min_variance", [1e-5, 1e-3])
def test_small_variances_are_no_deviation(min_variance, device):
    """Below `min_variance`, the deviation and its gradient are 0, as in PyG."""
    adj = Adjacency.from_coo(*torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3]], device=device), (2, 4))
    distance = min_variance**0.5  # distance of messages from the mean: a fifth below, a fifth above
    x = 1 + distance * torch.tensor([[-0.8], [0.8], [-1.2], [1.2]], device=device)
    x.requires_grad_()
    out = multi_aggregate(adj, x, ("var", "std"), min_variance=min_variance)
    torch.testing.assert_close(out[:, 0], min_variance * out.new_tensor([0.64, 1.44]), rtol=1e-2, atol=0)
    torch.testing.assert_close(out[:, 1], distance * out.new_tensor([0, 1.2]), rtol=1e-2, atol=0)
    (grad,) = torch.autograd.grad(out[:, 1].sum(), x)
    torch.testing.assert_close(grad, grad.new_tensor([[0], [0], [-0.5], [0.5]]), rtol=1e-2, atol=0)
    if min_variance == 1e-5:
        assert torch.equal(multi_aggregate(adj, x, ("var", "std")), out)


def test_variance_survives_a_large_mean(device):
    """The difference of mean squares and squared mean would be off by more than the variance."""
    adj = ragged(4000, device)
    x = draw(adj.num_src, 8, device=device) + 1e4
    out = multi_aggregate(adj, x, ("var",))
    assert relative_error(out, reference.multi_aggregate(adj, x, ("var",))) < 1e-3


def test_nan_is_found_where_it_is(device):
    adj = Adjacency.from_coo(*torch.tensor([[0, 0, 0, 1], [0, 1, 2, 0]], device=device), (2, 3))
    x = torch.tensor([[1.0], [float("nan")], [2.0]], device=device)
    out = multi_aggregate(adj, x, ALL)
    assert out[0].isnan().all()
    assert out[1].tolist() == [1, 1, 1, 1, 0, 0]


def test_autocast_takes_its_dtype(device):
    adj = ragged(600, device)
    x = draw(adj.num_src, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert multi_aggregate(adj, x, ("mean",)).dtype == torch.bfloat16


def test_no_message_is_stored(device):
    """The kernels' launches make no tensor of the edges times the width; the mode sees what they allocate."""
    adj = ragged(20_000, device)
    adj.t()
    width, slots = 64, [0, 1, 2, 3, 4, 5]
    tensors = FEATURES.make(adj, (width, 4), torch.float32)
    with LargestTensor() as largest:
        given = (*tensors.values(),)
        out, mean, ties = operator.aggregate(adj, *given, slots, 1, 0.0, adj.num_dst, keep=True)
        grad = torch.ones_like(out)
        kept = (out, mean, ties)
        wanted = {f"{name}_wanted": True for name in ("x_src", "x_dst", "edge", "weight")}
        operator.gradients(adj, grad, *given, *kept, slots, 1, 0.0, **wanted)
    assert out.numel() <= largest.numel < adj.num_edges * width


def test_many_edge_features_are_projected_once(device, reasons):
    adj = ragged(600, device)
    FEATURES.compare(adj, FEATURES.make(adj, (8, 40), torch.float32), 4)
    assert reasons.text.count("edges have 40 features, and the fused kernel takes up to 32") == 1
