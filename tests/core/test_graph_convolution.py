"""GCN's linear map and aggregation in one: results, gradients, autocast, and what it leaves to others."""

from __future__ import annotations

from itertools import compress

import pytest
import torch
from cases import DTYPES, TOLERANCE, WIDTHS, edge_lists, features, relative_error
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fastsparse_core import Adjacency, policy, reference, spmm
from fastsparse_core.fused.aggregate_transform import graph_convolution
from fastsparse_core.ops._autocast import _GIVES_FLOAT32
from fastsparse_core.ops._eager import is_plain_eager

NUM_DST, NUM_SRC = 90, 120


def structure(device: str, num_dst: int = NUM_DST, num_src: int = NUM_SRC, edges: int = 700) -> Adjacency:
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(num_dst, (edges,), generator=generator)
    col = torch.randint(num_src, (edges,), generator=generator)
    return Adjacency.from_coo(row.to(device), col.to(device), (num_dst, num_src))


def scales(adj: Adjacency, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {"scale_dst": adj.inv_sqrt_degree(dtype), "scale_src": adj.inv_sqrt_out_degree(dtype)}


def parameters(dtype, device, width, out, *, bias=True, out_by_in=True):
    shape = (out, width) if out_by_in else (width, out)
    weight = features(*shape, dtype, "contiguous", device, seed=4).requires_grad_()
    return weight, features(1, out, dtype, "contiguous", device, seed=5)[0].requires_grad_() if bias else None


def exactly(adj, x, weight, bias, grad, *, out_by_in, relu, factors):
    """The result and the gradients of x, weight and bias in float64, by the reference."""
    x, grad = x.detach().double(), grad.double()
    matrix = weight.detach().double()
    matrix = matrix.t() if out_by_in else matrix
    transposed = {"scale_dst": factors.get("scale_src"), "scale_src": factors.get("scale_dst")}
    out = reference.spmm(adj, x @ matrix, **factors)
    out = out if bias is None else out + bias.detach().double()
    if relu:
        grad = grad * (out > 0)
        out = out.relu()
    back = reference.spmm(adj.t(), grad, **transposed)
    grad_weight = x.t() @ back
    return out, back @ matrix.t(), grad_weight.t() if out_by_in else grad_weight, grad.sum(0)


def sizes(adj, x, weight, bias, grad, *, out_by_in, factors):
    """The same with absolute values: the sizes of the terms, without cancellation."""
    bias = None if bias is None else bias.abs()
    return exactly(
        adj, x.abs(), weight.abs(), bias, grad.abs(), out_by_in=out_by_in, relu=False, factors=factors
    )


@given(
    edges=edge_lists(),
    width=st.sampled_from([w for w in WIDTHS if 0 < w < 300]),
    out=st.sampled_from([1, 8, 40, 47, 128]),
    dtype=st.sampled_from(DTYPES),
    aggregate_first=st.booleans(),
    out_by_in=st.booleans(),
    bias=st.booleans(),
    relu=st.booleans(),
    scaled=st.booleans(),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(
    device, poisoned_memory, edges, width, out, dtype, aggregate_first, out_by_in, bias, relu, scaled
):
    adj = edges.adjacency(device)
    x = features(adj.num_src, width, dtype, "contiguous", device).requires_grad_(not aggregate_first)
    leaves = parameters(dtype, device, width, out, bias=bias, out_by_in=out_by_in)
    factors = scales(adj, dtype) if scaled else {}
    grad = features(adj.num_dst, out, dtype, "contiguous", device, seed=7)
    order = {"aggregate_first": aggregate_first, "out_by_in": out_by_in}
    y = graph_convolution(adj, x, *leaves, **order, relu=relu, **factors)
    assert y is not None
    wanted = [leaf for leaf in (x, *leaves) if leaf is not None and leaf.requires_grad]
    found = [y, *torch.autograd.grad(y, wanted, grad)]
    assert [it.dtype for it in found] == [dtype] * len(found)
    want = exactly(adj, x, *leaves, grad, out_by_in=out_by_in, relu=relu, factors=factors)
    size = sizes(adj, x, *leaves, grad, out_by_in=out_by_in, factors=factors)
    named = ("y", "x", "weight", "bias")
    asked = [True, *(leaf is not None and leaf.requires_grad for leaf in (x, *leaves))]
    # Sums that float16 cannot represent are infinite.
    assume(
        all(float(terms.max()) < torch.finfo(dtype).max for terms in compress(size, asked) if terms.numel())
    )
    for name, got, exact, terms in zip(
        compress(named, asked), found, compress(want, asked), compress(size, asked), strict=True
    ):
        # If a rounded result is 0 and the exact one is not, gradients of relu differ completely.
        if name == "y" or not relu:
            # There are two products: the second one sums the rounding errors of the first one.
            assert (got.double() - exact).norm() <= 2 * TOLERANCE[dtype] * terms.norm()


@pytest.mark.parametrize("aggregate_first", [False, True])
@pytest.mark.parametrize("out_by_in", [False, True])
def test_gradients_of_rectified_results(device, aggregate_first, out_by_in):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device, dtype=torch.float64, requires_grad=not aggregate_first)
    leaves = parameters(torch.float64, device, 24, 40, out_by_in=out_by_in)
    grad = torch.randn(NUM_DST, 40, device=device, dtype=torch.float64)
    factors = scales(adj, torch.float64)
    how = {"aggregate_first": aggregate_first, "out_by_in": out_by_in, "relu": True}
    y = graph_convolution(adj, x, *leaves, **how, **factors)
    assert (y == 0).any()
    assert (y > 0).any()
    assert (y >= 0).all()
    wanted = [leaf for leaf in (x, *leaves) if leaf.requires_grad]
    expected = exactly(adj, x, *leaves, grad, out_by_in=out_by_in, relu=True, factors=factors)
    for got, exact in zip(torch.autograd.grad(y, wanted, grad), expected[1 + aggregate_first :], strict=True):
        assert relative_error(got, exact) <= 1e-12


@pytest.mark.parametrize("aggregate_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu", [False, True])
def test_autocast(device, aggregate_first, dtype, relu):
    """Casts are part of the layer: gradients of float32 parameters come as float32."""
    adj = structure(device, NUM_SRC)
    x = torch.randn(NUM_SRC, 24, device=device)
    x = x if aggregate_first else x.to(dtype).requires_grad_()
    weight, bias = parameters(torch.float32, device, 24, 40)
    how = {"aggregate_first": aggregate_first, "out_by_in": True, "relu": relu}
    factors = scales(adj, torch.float32)
    with torch.autocast(device, dtype):
        y = graph_convolution(adj, x, weight, bias, **how, **factors)
        assert y is not None
    assert y.dtype == dtype
    grad = torch.randn(NUM_SRC, 40, device=device).to(dtype)
    wanted = [leaf for leaf in (x, weight, bias) if leaf.requires_grad]
    rounded = [x.detach().to(dtype), weight.detach().to(dtype)]
    expected = exactly(adj, *rounded, bias, grad, out_by_in=True, relu=False, factors=factors)
    assert relative_error(y, expected[0].relu() if relu else expected[0]) <= 2 * TOLERANCE[dtype]
    if relu:
        expected = exactly(adj, *rounded, bias, grad * (y > 0), out_by_in=True, relu=False, factors=factors)
    for under in (False, True):  # the backward pass, under autocast or not
        with torch.autocast(device, dtype, enabled=under):
            found = torch.autograd.grad(y, wanted, grad, retain_graph=True)
        for got, leaf, exact in zip(found, wanted, expected[1 + aggregate_first :], strict=True):
            assert got.dtype == leaf.dtype
            assert relative_error(got, exact) <= 2 * TOLERANCE[dtype]
    assert relative_error(found[-1], expected[-1]) <= TOLERANCE[torch.float32]  # the bias' gradient
    if device == "cuda" and _GIVES_FLOAT32:
        assert not torch.equal(found[-2], found[-2].to(dtype).float())  # not rounded in between


@pytest.mark.parametrize("aggregate_first", [False, True])
@pytest.mark.parametrize("out_by_in", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_double_backward(device, aggregate_first, out_by_in, relu):
    adj = structure(device, 5, 9, 20)
    factors = scales(adj, torch.float64)
    x = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=not aggregate_first)
    leaves = parameters(torch.float64, device, 4, 3, out_by_in=out_by_in)
    how = {"aggregate_first": aggregate_first, "out_by_in": out_by_in, "relu": relu, **factors}

    def function(*inputs):
        return graph_convolution(adj, *inputs, **how)

    assert torch.autograd.gradcheck(function, (x, *leaves))
    assert torch.autograd.gradgradcheck(function, (x, *leaves))


def test_double_backward_under_autocast(device):
    """The gradient of a gradient reaches weight and features through the casts."""
    adj = structure(device, NUM_SRC)
    x = torch.randn(NUM_SRC, 24, device=device).bfloat16().requires_grad_()
    weight, bias = parameters(torch.float32, device, 24, 40)

    def second(layer):
        with torch.autocast(device, torch.bfloat16):
            y = layer()
        first = torch.autograd.grad(y.float().square().sum(), [x, weight, bias], create_graph=True)
        return torch.autograd.grad(sum(it.float().square().sum() for it in first), [x, weight, bias])

    found = second(lambda: graph_convolution(adj, x, weight, bias, out_by_in=True, aggregate_first=False))
    expected = second(lambda: spmm(adj, torch.nn.functional.linear(x, weight), bias=bias))
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert relative_error(got, wanted) <= 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("frozen", range(3))
def test_gradients_that_nobody_wants(device, frozen):
    adj = structure(device)
    leaves = [torch.randn(NUM_SRC, 24, device=device).requires_grad_()]
    leaves += parameters(torch.float32, device, 24, 40)
    leaves[frozen] = leaves[frozen].detach()
    graph_convolution(adj, *leaves, out_by_in=True, aggregate_first=False).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [nth == frozen for nth in range(3)]


def test_without_gradients(device):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device)
    leaves = parameters(torch.float32, device, 24, 40)
    expected = graph_convolution(adj, x, *leaves, out_by_in=True, aggregate_first=True)
    with torch.no_grad():
        out = graph_convolution(adj, x, *leaves, out_by_in=True, aggregate_first=True)
    assert not out.requires_grad
    assert torch.equal(out, expected)
    with torch.inference_mode():
        assert torch.equal(graph_convolution(adj, x, *leaves, out_by_in=True, aggregate_first=True), out)


def test_what_the_backward_pass_needs_must_stay(device):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device)
    weight, bias = parameters(torch.float32, device, 24, 40)

    def result(x=x, weight=weight):
        return graph_convolution(adj, x, weight, bias, out_by_in=True, aggregate_first=False)

    def write(*tensors):
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(2)

    out = result()
    write(weight, bias)  # with constant features, no gradient needs them
    out.sum().backward()
    out = result()
    write(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    wanted = x.detach().clone().requires_grad_()
    out = result(wanted * 1, weight.detach())
    write(wanted)
    out.sum().backward()
    given = wanted * 1
    out = result(given, weight.detach())
    write(given)  # only the gradient of the weight needs it
    out.sum().backward()
    out = result(wanted)
    write(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_weight_that_was_cast_may_be_written(device):
    """As with a linear layer, which keeps what autocast cast; second derivatives say what they miss."""
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device).bfloat16().requires_grad_()
    weight, _ = parameters(torch.float32, device, 24, 40)

    def gradient(changes: bool, **options):
        with torch.autocast(device, torch.bfloat16):
            y = graph_convolution(adj, x, weight, None, out_by_in=True, aggregate_first=False)
        if changes:
            with torch.no_grad():
                weight.mul_(2)
        return torch.autograd.grad(y.float().sum(), x, **options)[0]

    assert torch.equal(gradient(False), gradient(True))
    with pytest.raises(RuntimeError, match="weight: modified by an inplace operation"):
        gradient(True, create_graph=True)


def test_backward_under_another_autocast(device):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device, requires_grad=True)
    leaves = parameters(torch.float32, device, 24, 40)

    def gradients(under: bool, **options):
        y = graph_convolution(adj, x, *leaves, out_by_in=True, aggregate_first=False)
        with torch.autocast(device, torch.bfloat16, enabled=under):
            return torch.autograd.grad(y.square().sum(), [x, *leaves], **options)

    for options in ({}, {"create_graph": True}):
        for got, expected in zip(gradients(True, **options), gradients(False, **options), strict=True):
            torch.testing.assert_close(got, expected)


def test_scales_of_another_dtype(device):
    """A layer that keeps its normalisation may change its dtype."""
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device, dtype=torch.float64)
    leaves = parameters(torch.float64, device, 24, 40)
    how = {"out_by_in": True, "aggregate_first": False}
    found = graph_convolution(adj, x, *leaves, **how, **scales(adj, torch.float32))
    expected = graph_convolution(adj, x, *leaves, **how, **scales(adj, torch.float64))
    assert relative_error(found, expected) <= TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match=r"scale_dst: expected shape"):
        graph_convolution(adj, x, *leaves, **how, scale_dst=adj.inv_sqrt_out_degree(torch.float64))


def test_what_is_kept_of_a_call_is_of_its_kind(device):
    """Facts that are cached for tensors of one kind are not used for another kind."""
    adj = structure(device)
    weight, bias = parameters(torch.float32, device, 24, 40)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        x = torch.randn(NUM_SRC, 24, device=device, dtype=dtype)
        weight.data, bias.data = weight.detach().to(dtype), bias.detach().to(dtype)
        for scaled in (False, True):
            factors = scales(adj, dtype) if scaled else {}
            y = graph_convolution(adj, x, weight, bias, True, False, **factors)
            exact = exactly(adj, x, weight, bias, y, out_by_in=True, relu=False, factors=factors)[0]
            assert y.dtype == dtype
            assert relative_error(y, exact) <= 2 * TOLERANCE[dtype]
    with torch.autocast(device, torch.bfloat16):
        assert graph_convolution(adj, x, weight, bias, True, False).dtype == torch.bfloat16
    assert graph_convolution(adj, x, weight, bias, True, False).dtype == torch.float32


def test_context_asks_for_an_algorithm(device):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device)
    weight, _ = parameters(torch.float32, device, 24, 40)
    with policy.algorithms(spmm="csr"):
        out = graph_convolution(adj, x, weight, None, out_by_in=True, aggregate_first=True)
    assert torch.equal(out, torch.mm(spmm(adj, x, algorithm="csr"), weight.t()))


def test_features_with_gradient_are_not_aggregated_first(device):
    x = torch.randn(NUM_SRC, 24, device=device, requires_grad=True)
    leaves = parameters(torch.float32, device, 24, 40)
    assert graph_convolution(structure(device), x, *leaves, out_by_in=True, aggregate_first=True) is None


def test_calls_that_others_serve(device):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 24, device=device)
    weight, bias = parameters(torch.float32, device, 24, 40)

    def serves(x=x, weight=weight, bias=bias, out_by_in=True, aggregate_first=False):
        if not is_plain_eager(x):
            return False
        out = graph_convolution(adj, x, weight, bias, out_by_in=out_by_in, aggregate_first=aggregate_first)
        return out is not None

    class Watched(torch.Tensor):
        pass

    assert serves()
    assert serves(bias=None)
    assert serves(aggregate_first=True)
    assert not serves(x=x.clone().requires_grad_(), aggregate_first=True)
    assert not serves(x=x[None])
    assert not serves(x=x[:-1])
    assert not serves(x=x.to_sparse())
    assert not serves(x=x.double())
    assert not serves(x=x.as_subclass(Watched))
    assert not serves(weight=weight.detach().as_subclass(Watched))
    assert not serves(bias=bias.double())
    assert not serves(bias=bias[:1])
    assert not serves(bias=bias[None])
    assert not serves(bias=torch.randn(40, dtype=torch.complex64, device=device).conj().imag)
    assert not serves(weight=None)
    assert not serves(out_by_in=False)
    assert serves(weight=weight.t().contiguous(), out_by_in=False)
    assert not serves(weight=weight.detach().to_sparse())
    seen = []
    torch.func.grad(lambda x: (seen.append(serves(x=x)), x.sum())[1])(x)
    torch.func.vmap(lambda x: (seen.append(serves(x=x)), x)[1])(x[None])
    assert seen == [False, False]
    assert not serves(x=torch.randint(9, x.shape, device=device))
    with torch.autocast(device, torch.bfloat16):
        assert serves()
        assert not serves(x=x.detach().requires_grad_())
        assert serves(x=x.detach().bfloat16().requires_grad_())
        assert not serves(x=x.double())
    with torch.autograd.forward_ad.dual_level():
        assert not serves()


@pytest.mark.parametrize("aggregate_first", [False, True])
def test_wrong_width_is_an_error_as_in_torch(device, aggregate_first):
    adj = structure(device)
    x = torch.randn(NUM_SRC, 23, device=device)
    leaves = parameters(torch.float32, device, 24, 40)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        graph_convolution(adj, x, *leaves, out_by_in=True, aggregate_first=aggregate_first)
