"""Gradients of spmm, first and second, and what a call leaves behind for them."""

from __future__ import annotations

import warnings

import pytest
import torch
from cases import (
    ALGORITHMS,
    TOLERANCE,
    each_kernel,
    features,
    random_graph,
    relative_error,
    rows_of,
)

from fastsparse_core import Adjacency, reference, spmm
from fastsparse_core.ops._spmm_extremum import extremum_of_sums


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("heads", [None, 2])
def test_gradients_of_extrema(device, reduce, heads):
    adj = random_graph(9, 7, 30).adjacency(device)
    make = {"dtype": torch.float64, "device": device, "requires_grad": True}
    x = torch.randn(7, 6, **make)
    value = torch.randn(30, **make) if heads is None else torch.randn(30, heads, **make)
    assert torch.autograd.gradcheck(lambda x, value: spmm(adj, x, value, reduce), (x, value))
    assert torch.autograd.gradcheck(lambda x: spmm(adj, x, None, reduce), (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [0, 1, 5, 70])
@pytest.mark.parametrize("width", [5, 70])
@pytest.mark.parametrize("adds", [False, True], ids=["products", "sums"])
def test_gradients_of_extrema_of_rows_of_any_length(device, dtype, heads, width, adds):
    """Also of rows without entries, and of one with many; the terms of edges that were not chosen are 0."""
    if (adds and heads == 0) or heads > width:
        pytest.skip("nothing to add, or not one value for every feature")
    length = torch.tensor([*range(24), 200, 0])
    row = torch.repeat_interleave(torch.arange(26), length)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(row), generator=generator)
    col = torch.randint(30, row.shape, generator=generator)
    adj = Adjacency.from_coo(row[order], col[order], (26, 30)).to(device)
    x = features(30, width, dtype, "contiguous", device).requires_grad_()
    # Sums of 16-bit numbers would have ties.
    of_value = torch.float32 if adds and dtype == torch.float16 else dtype
    value = (
        features(len(row), heads, of_value, "contiguous", device, seed=1).requires_grad_() if heads else None
    )
    leaves = [x] if value is None else [x, value]
    upstream = features(26, width, dtype, "contiguous", device, seed=2)
    result = extremum_of_sums(adj, x, value, False) if adds else spmm(adj, x, value, "max")
    found = [result, *torch.autograd.grad(result, leaves, upstream)]
    # The definition, with messages in the caller's edge order; there are no ties.
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    message = wide[0][col[order].to(device)]
    if heads:
        of_feature = wide[1].repeat_interleave(width // heads, 1)
        message = message + of_feature if adds else message * of_feature
    index = row[order].to(device)[:, None].expand(-1, width)
    out = torch.zeros(26, width, dtype=torch.float64, device=device)
    out = out.scatter_reduce(0, index, message, "amax", include_self=False)
    expected = [out, *torch.autograd.grad(out, wide, upstream.double())]
    for got, want in zip(found, expected, strict=True):
        assert relative_error(got, want) <= TOLERANCE[dtype]


def test_empty_rows_add_no_nan_to_gradients_of_extrema(device):
    adj = Adjacency.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2)).to(device)
    x = torch.tensor([[torch.inf], [1.0]], device=device, requires_grad=True)
    value = torch.ones(2, device=device, requires_grad=True)
    spmm(adj, x, value, "min").sum().backward()
    assert value.grad.tolist() == [0, 1]
    assert x.grad.tolist() == [[0], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 47, 128])
@each_kernel(*ALGORITHMS)
def test_gradients_in_lower_precision(device, dtype, width, algorithm):
    adj = random_graph().adjacency(device)
    x = features(60, width, dtype, "contiguous", device).requires_grad_()
    value = features(400, 1, torch.float32, "contiguous", device)[:, 0].requires_grad_()
    weight = features(40, width, dtype, "contiguous", device, seed=3)
    spmm(adj, x, value, algorithm=algorithm).backward(weight)
    x64, value64 = x.detach().double().requires_grad_(), value.detach().double().requires_grad_()
    reference.spmm(adj, x64, value64).backward(weight.double())
    assert relative_error(x.grad, x64.grad) <= TOLERANCE[dtype]
    assert relative_error(value.grad, value64.grad) <= TOLERANCE[torch.float32]
    assert value.grad.dtype == torch.float32


@pytest.mark.parametrize(("row", "winner"), [([0, 0, 0], 2), ([1, 0, 0], 0)])  # unsorted; sorted
def test_ties_go_to_the_first_entry(device, row, winner):
    adj = Adjacency.from_coo(torch.tensor(row), torch.tensor([2, 0, 1]), (2, 3)).to(device)
    x = torch.ones(3, 2, device=device, requires_grad=True)
    spmm(adj, x, reduce="max")[0].sum().backward()
    assert [node for node, grad in enumerate(x.grad.tolist()) if grad == [1, 1]] == [winner]
    assert x.grad.sum() == 2


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_features_that_no_gradient_reads_may_be_written(device, reduce):
    """Sums with constant values, and maxima, do not keep their features."""
    adj = random_graph(6, 7, 30).adjacency(device)
    leaf = torch.randn(7, 6, device=device, dtype=torch.float64, requires_grad=True)
    value = torch.rand(30, device=device, dtype=torch.float64) if reduce == "sum" else None
    found = []
    for writes in (False, True):
        x = leaf * 1
        out = spmm(adj, x, value, reduce=reduce)
        if writes:
            x.zero_()
        (once,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        found.append((once, *torch.autograd.grad(once.square().sum(), leaf)))
    torch.testing.assert_close(*found)


def test_features_that_a_gradient_reads_are_refused_with_a_cure(device):
    adj = random_graph(6, 7, 30).adjacency(device)
    x, value = (torch.rand(*shape, device=device, requires_grad=True) for shape in ((7, 6), (30,)))
    features = x * 1
    out = spmm(adj, features, value)
    features += 1
    message = r"spmm with a value that requires a gradient: .* write `x = x \+ conv"
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_negative_views(device):
    adj = random_graph().adjacency(device)
    x = torch.randn(60, 8, device=device)
    assert torch.equal(spmm(adj, torch._neg_view(x)), -spmm(adj, x))
    leaf = x.clone().requires_grad_()
    spmm(adj, torch._neg_view(leaf)).sum().backward()
    assert torch.equal(leaf.grad, reference.spmm(adj.t(), -torch.ones(40, 8, device=device)).float())


def test_forward_mode_is_refused(device):
    adj = random_graph().adjacency(device)
    x = torch.randn(60, 8, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="spmm: expected tensors without tangents"):
            spmm(adj, dual)
        assert torch.equal(spmm(adj, x), spmm(adj, x.clone()))


def test_deterministic_mode_covers_extrema(device):
    adj = random_graph().adjacency(device)
    x = torch.randn(60, 16, device=device, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        grads = [torch.autograd.grad(spmm(adj, x, reduce="max").square().sum(), x)[0] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("width", [3, 8, 64])
def test_gradients_of_extrema_repeat(device, width):
    """They repeat without deterministic algorithms, too, and equal the formula."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, 40, (6000,), generator=generator) for _ in range(2))
    row[:4000] = 7  # the row and the column are split into slices
    col[3000:] = 5
    adj = Adjacency.from_coo(row.to(device), col.to(device), (41, 40))
    x = torch.randn(40, width, generator=generator).to(device).requires_grad_()
    value = torch.rand(6000, generator=generator).to(device).requires_grad_()
    out = spmm(adj, x, value, "max").square().sum()
    grads = [torch.autograd.grad(out, (x, value), retain_graph=True) for _ in range(2)]
    formula = torch.autograd.grad(out, (x, value), create_graph=True)
    for first, second, expected in zip(*grads, formula, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected.detach(), rtol=1e-4, atol=1e-4)


def test_result_outlives_the_structure(device):
    x = torch.randn(60, 4, device=device, requires_grad=True)
    adj = random_graph().adjacency(device)
    expected = torch.autograd.grad(reference.spmm(adj, x.double()).sum(), x)[0]
    out = spmm(adj, x)
    del adj
    out.sum().backward()
    assert relative_error(x.grad, expected) < 1e-6


def test_gradient_of_a_bias_is_summed_in_its_dtype(device):
    """Of 3000 ones: bfloat16 would round that to 2992."""
    adj = Adjacency.from_coo(torch.tensor([0]), torch.tensor([0]), (3000, 1)).to(device)
    bias = torch.zeros(8, device=device, requires_grad=True)
    out = spmm(adj, torch.ones(1, 8, dtype=torch.bfloat16, device=device), bias=bias)
    assert out.dtype == torch.bfloat16
    out.backward(torch.ones_like(out))
    assert bias.grad.dtype == torch.float32
    assert bias.grad.tolist() == [3000.0] * 8


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_second_derivatives_of_extrema(device, reduce):
    adj = rows_of([3, 0, 5, 1, 7], 6, device)
    x = torch.randperm(18, device=device).double().reshape(6, 3).requires_grad_()
    value = (torch.randperm(adj.num_values, device=device).double() + 1).requires_grad_()
    bias = torch.randn(3, device=device, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(6, device=device, dtype=torch.float64)

    def run(*tensors):
        x, value, bias = tensors
        return spmm(adj, x, value, reduce, scale_src=scale, bias=bias).square()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.autograd.gradgradcheck(run, (x, value, bias))


def test_the_gradient_of_a_wide_bias_keeps_its_digits(device):
    adj = rows_of([2, 3] * 400, 30, device)
    x = torch.randn(30, 8, device=device).half()
    bias = torch.randn(8, device=device, requires_grad=True)
    upstream = torch.randn(800, 8, device=device).half()
    for reduce in ("max", "sum"):
        (gradient,) = torch.autograd.grad(spmm(adj, x, reduce=reduce, bias=bias), bias, upstream)
        assert relative_error(gradient, upstream.double().sum(0)) <= 1e-6


@pytest.mark.parametrize("operand", ["x", "value", "scale_dst", "scale_src", "bias"])
def test_operands_whose_sign_is_a_flag(device, operand):
    """As of ``z.conj().imag``; gradients too, which read what was saved."""
    adj = rows_of([2, 3, 0, 9], 5, device)
    shapes = {"x": (5, 8), "value": (adj.num_values,), "scale_dst": (4,), "scale_src": (5,), "bias": (8,)}
    operands = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    flagged = {**operands, operand: torch._neg_view(operands[operand])}
    assert flagged[operand].is_neg()
    results = []
    for chosen in ({**operands, operand: -operands[operand]}, flagged):
        leaves = {
            name: chosen[name].clone().requires_grad_() for name in ("x", "value", "bias") if name != operand
        }
        x, value, bias = (leaves.get(name, chosen[name]) for name in ("x", "value", "bias"))
        scales = {name: chosen[name] for name in ("scale_dst", "scale_src")}
        out = spmm(adj, x, value, **scales, bias=bias)
        results.append((out, *torch.autograd.grad(out.square().sum(), tuple(leaves.values()))))
    for plain, found in zip(*results, strict=True):
        assert torch.equal(plain, found)
